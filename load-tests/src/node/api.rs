//! What does a simulated node answer over HTTP?
//!
//! `/v1/chat/completions` and `/v1/completions`, whole and streamed, each as late as the model of
//! the node says, or that half of one which two nodes share; `/v1/models`, `/v1/kv/info`, `/health` and
//! `/metrics` with what a gateway learns from them.

use std::sync::Arc;

use bytes::Bytes;
use futures_util::stream;
use http_body_util::BodyExt;
use hyper::body::{Frame, Incoming};
use hyper::header::HeaderValue;
use hyper::{Method, Request, Response, StatusCode};
use serde_json::{Value, json};

use cache_index::block::BLOCK_TOKENS;

use super::answers::{Answer, Form};
use super::halves::{Task, reference};
use super::handover::Handovers;
use super::life::{Life, Question, Ticket};
use super::metrics;
use super::prompts::Prompts;
use super::roles::Role;
use super::state::{End, Progress};
use crate::node_http::{Body, Cut, error, event_stream, full, json_response};

/// What the nodes of a process have in common.
pub(super) struct Served {
    pub(super) model: String,
    pub(super) prompts: Prompts,
    pub(super) context_max: usize,
    /// Tokens of an answer where the client allows more.
    pub(super) answer_tokens: usize,
}

/// One node's API.
#[derive(Clone)]
pub(super) struct Api {
    pub(super) served: Arc<Served>,
    pub(super) life: Arc<Life>,
    pub(super) role: Role,
    pub(super) handovers: Arc<Handovers>,
    /// When its process would have started, in seconds.
    pub(super) started_s: f64,
}

impl Api {
    /// Answers one request.
    pub(super) async fn answer(self, request: Request<Incoming>) -> Result<Response<Body>, Cut> {
        let path = request.uri().path().to_owned();
        match (request.method(), path.as_str()) {
            (&Method::GET, "/health") => Ok(self.health()),
            (&Method::GET, "/metrics") => {
                let text = metrics::text(&self.life.lock(), self.started_s);
                Ok(Response::new(full(text)))
            }
            (&Method::GET, "/v1/kv/info") => Ok(self.kv_info()),
            (&Method::GET, "/v1/models") => {
                let model = json!({"id": self.served.model, "object": "model",
                                   "owned_by": "homing", "token_ids": true,
                                   "max_model_len": self.served.context_max});
                let list = json!({"object": "list", "data": [model]});
                Ok(json_response(StatusCode::OK, &list))
            }
            (&Method::POST, path) if Form::at(path).is_some() => {
                let form = Form::at(path).unwrap_or(Form::Chat);
                self.complete(request, form).await
            }
            _ => Ok(json_response(
                StatusCode::NOT_FOUND,
                &error("no such path", None),
            )),
        }
    }

    fn health(&self) -> Response<Body> {
        let (status, word) = match self.life.lock().is_draining {
            false => (StatusCode::OK, "ok"),
            true => (StatusCode::SERVICE_UNAVAILABLE, "draining"),
        };
        json_response(status, &json!({"status": word}))
    }

    /// Who it is to the nodes with which it shares requests.
    fn kv_info(&self) -> Response<Body> {
        let layout = json!({"version": 1, "block_tokens": BLOCK_TOKENS,
                            "body_bytes": self.life.lock().block_bytes()});
        let info = json!({"engine_id": self.life.engine_id, "role": self.role.as_str(),
                          "endpoints": [self.handovers.endpoint], "layout": layout});
        json_response(StatusCode::OK, &info)
    }

    async fn complete(
        &self,
        request: Request<Incoming>,
        form: Form,
    ) -> Result<Response<Body>, Cut> {
        let refused = |why: &str, code: Option<&str>| {
            Ok(json_response(StatusCode::BAD_REQUEST, &error(why, code)))
        };
        let request_id = request.headers().get("x-request-id").cloned();
        // A client that left in the middle of its body gets no answer.
        let body = request.into_body().collect().await.map_err(|_| Cut)?;
        let request: Value = match serde_json::from_slice(&body.to_bytes()) {
            Ok(request) => request,
            Err(cause) => return refused(&cause.to_string(), None),
        };
        let prompt = match self.served.prompts.tokens(&request) {
            Ok(prompt) => prompt,
            Err(why) => return refused(&why, None),
        };
        let task = match Task::read(&request, self.role, &self.handovers.endpoint) {
            Ok(task) => task,
            Err(refusal) => {
                return Ok(json_response(StatusCode::BAD_REQUEST, &refusal.to_json()));
            }
        };
        let answer = self.to_answer(&request, (form, &task), &prompt);
        let (length, most) = (prompt.len() + answer.tokens.len(), self.served.context_max);
        if length > most {
            let why =
                format!("This model's maximum context length is {most} tokens, not {length}.");
            return refused(&why, Some("context_length_exceeded"));
        }
        let mut response = self.serve(&request, (task, answer), &prompt).await?;
        let headers = response.headers_mut();
        headers.insert("x-node-prompt-tokens", prompt.len().into());
        if let Some(id) = request_id {
            headers.insert("x-request-id", id);
        }
        Ok(response)
    }

    /// Serves a good request.
    async fn serve(
        &self,
        request: &Value,
        (task, answer): (Task, Answer),
        prompt: &[u32],
    ) -> Result<Response<Body>, Cut> {
        let salt = request["cache_salt"].as_str();
        let half = match self.half(&task, prompt, salt) {
            Ok(half) => half,
            Err(refusal) => {
                return Ok(json_response(StatusCode::BAD_REQUEST, &refusal.to_json()));
            }
        };
        let mut ticket = self.life.begin(Question {
            prompt,
            answer: &answer.tokens,
            salt: salt.map(Arc::from),
            half,
        });
        let last_block = ticket.last_block.map(|hash| hash.to_string());
        let mut response = match &task {
            Task::HandOver(to) => {
                let params = reference(self, to, prompt.len() / BLOCK_TOKENS);
                whole(ticket, &answer, Some(params)).await?
            }
            Task::TakeOver(from) => {
                let came = self.take_over(&mut ticket, from, (prompt, salt)).await;
                if let Err(why) = came {
                    let why = format!("The prompt's KV could not be fetched: {why}.");
                    let failed = error(&why, Some("kv_transfer_failed"));
                    return Ok(json_response(StatusCode::SERVICE_UNAVAILABLE, &failed));
                }
                answered(request, ticket, answer).await?
            }
            Task::Whole => answered(request, ticket, answer).await?,
        };
        if let Ok(value) = HeaderValue::try_from(last_block.unwrap_or_default()) {
            let headers = response.headers_mut();
            headers.insert("x-node-last-block", value);
        }
        Ok(response)
    }

    fn to_answer(&self, request: &Value, (form, task): (Form, &Task), prompt: &[u32]) -> Answer {
        let limit = match task {
            // It is there to be handed over.
            Task::HandOver(_) => Some(1),
            _ => ["max_completion_tokens", "max_tokens"]
                .iter()
                .find_map(|name| request[name].as_u64()),
        };
        let limit = limit.map_or(usize::MAX, |limit| {
            usize::try_from(limit).unwrap_or(usize::MAX)
        });
        let count = limit.clamp(1, self.served.answer_tokens.max(1));
        let tokens = self.served.prompts.answer(prompt, count);
        let texts = tokens.iter().map(|token| self.served.prompts.text(*token));
        let options = &request["stream_options"];
        Answer {
            form,
            id: format!("sim-{:016x}", rand::random::<u64>()),
            model: self.served.model.clone(),
            prompt_tokens: prompt.len(),
            texts: texts.collect(),
            tokens,
            finish_reason: if limit <= count { "length" } else { "stop" },
            token_ids: request["return_token_ids"] == true,
            continuous_usage: options["continuous_usage_stats"] == true,
            last_usage: options["include_usage"] == true,
        }
    }
}

async fn answered(request: &Value, ticket: Ticket, answer: Answer) -> Result<Response<Body>, Cut> {
    match request["stream"] == true {
        true => streamed(ticket, answer).await,
        false => whole(ticket, &answer, None).await,
    }
}

/// A whole answer, with where its KV is if that is for another node.
async fn whole(
    mut ticket: Ticket,
    answer: &Answer,
    reference: Option<Value>,
) -> Result<Response<Body>, Cut> {
    let last = u32::try_from(answer.tokens.len()).unwrap_or(u32::MAX) - 1;
    let wanted = match ticket.end {
        End::BeforeFirst => 0,
        End::MidStream => last / 2,
        End::Whole => last,
    };
    let progress = ticket.beyond(wanted).await.ok_or(Cut)?;
    let mut value = answer.whole(progress);
    if let Some(reference) = reference {
        value["kv_transfer_params"] = reference;
    }
    match ticket.end {
        End::BeforeFirst => Err(Cut),
        End::Whole => Ok(json_response(StatusCode::OK, &value)),
        End::MidStream => {
            // Half of a body that was announced whole.
            let body = value.to_string();
            let half = Bytes::copy_from_slice(&body.as_bytes()[..body.len() / 2]);
            let frames = stream::iter([Ok(Frame::data(half)), Err(Cut)]);
            Ok(event_stream(frames))
        }
    }
}

async fn streamed(mut ticket: Ticket, answer: Answer) -> Result<Response<Body>, Cut> {
    let first = ticket.beyond(0).await.ok_or(Cut)?;
    if ticket.end == End::BeforeFirst {
        return Err(Cut);
    }
    let stream = Streaming {
        ticket,
        answer,
        progress: first,
        written: 0,
        is_over: false,
    };
    let frames = stream::unfold(stream, |mut stream| async move {
        let next = stream.next().await?;
        let frame = next.map(|text| Frame::data(Bytes::from(text)));
        Some((frame, stream))
    });
    Ok(event_stream(frames))
}

/// A stream on its way.
struct Streaming {
    ticket: Ticket,
    answer: Answer,
    progress: Progress,
    written: usize,
    is_over: bool,
}

impl Streaming {
    async fn next(&mut self) -> Option<Result<String, Cut>> {
        if self.is_over {
            return None;
        }
        let all = self.answer.tokens.len();
        if self.written == self.progress.tokens as usize {
            let written = u32::try_from(self.written).unwrap_or(u32::MAX);
            match self.ticket.beyond(written).await {
                Some(progress) => self.progress = progress,
                None => {
                    self.is_over = true;
                    return Some(Err(Cut));
                }
            }
        }
        if self.ticket.end == End::MidStream && self.written >= all / 2 {
            self.is_over = true;
            return Some(Err(Cut));
        }
        let mut text = self.answer.chunk(self.written, self.progress);
        self.written = self.progress.tokens as usize;
        if self.written >= all {
            text += &self.answer.tail(self.progress);
            self.is_over = true;
        }
        Some(Ok(text))
    }
}
