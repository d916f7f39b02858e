//! What does a gateway look like to a client when the model behind it can use tools?
//!
//! A scripted Chat Completions node. [`script`] says what it answers, `memory` how many tokens it
//! reports as cached; this file is the form: whole or streamed, in pieces as nodes send them (a role,
//! reasoning, words, arguments in fragments), with usage on every chunk where it was asked for. A
//! prompt that is too long is refused as nodes refuse it. It computes nothing, so coding agents whose
//! prompts are tens of thousands of tokens run in seconds on any machine.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use http_body_util::BodyExt;
use hyper::body::Incoming;
use hyper::{Method, Request, Response, StatusCode};
use serde_json::{Value, json};
use tokio::net::TcpListener;

use self::memory::Memory;
use self::script::{Answer, Said};
use crate::error::LoadError;
use crate::node_http::{self, Body, Pace, error, json_response};

mod memory;
pub mod script;

/// Arguments in one chunk: so few that every call comes in fragments.
const FRAGMENT_CHARS: usize = 7;

/// Flags of `homing-load scripted-node`.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// Address to listen on; port 0 picks one
    #[arg(long, default_value = "127.0.0.1:0")]
    pub listen: SocketAddr,
    /// The model id that it claims to serve
    #[arg(long, default_value = "scripted")]
    pub model: String,
    /// Tokens of prompt and answer together that it claims to take
    #[arg(long, default_value_t = 200_000)]
    pub context: usize,
    /// Append the body of every request to this file, one a line
    #[arg(long, value_name = "FILE")]
    pub record: Option<PathBuf>,
    /// End when stdin ends: a test that is killed then leaves no node behind
    #[arg(long)]
    pub exit_with_stdin: bool,
}

/// A listening node.
pub struct ScriptedNode {
    listener: TcpListener,
    node: Arc<Node>,
}

struct Node {
    args: Args,
    memory: Mutex<Memory>,
}

impl ScriptedNode {
    /// Takes the port.
    pub async fn bind(args: &Args) -> Result<Self, LoadError> {
        Ok(Self {
            listener: node_http::listen(args.listen).await?,
            node: Arc::new(Node {
                args: args.clone(),
                memory: Mutex::default(),
            }),
        })
    }

    /// Where it listens.
    pub fn address(&self) -> Result<SocketAddr, LoadError> {
        node_http::address(&self.listener)
    }

    /// Serves until dropped.
    pub async fn serve(self) -> Result<(), LoadError> {
        let node = self.node;
        node_http::serve(self.listener, move |request| {
            let node = Arc::clone(&node);
            async move { Ok(node.answer(request).await) }
        })
        .await
    }
}

impl Node {
    async fn answer(&self, request: Request<Incoming>) -> Response<Body> {
        let path = request.uri().path().to_owned();
        match (request.method(), path.as_str()) {
            (&Method::GET, "/health") => json_response(StatusCode::OK, &json!({"status": "ok"})),
            (&Method::GET, "/v1/models") => json_response(
                StatusCode::OK,
                &json!({"object": "list", "data": [
                    {"id": self.args.model, "object": "model", "owned_by": "homing",
                     "max_model_len": self.args.context},
                ]}),
            ),
            (&Method::POST, "/v1/chat/completions") => self.complete(request).await,
            _ => json_response(StatusCode::NOT_FOUND, &error("no such path", None)),
        }
    }

    async fn complete(&self, request: Request<Incoming>) -> Response<Body> {
        let refused = |why: &str, code| json_response(StatusCode::BAD_REQUEST, &error(why, code));
        let body = match request.into_body().collect().await {
            Ok(body) => body.to_bytes(),
            Err(cause) => return refused(&cause.to_string(), None),
        };
        let request: Value = match serde_json::from_slice(&body) {
            Ok(request) => request,
            Err(cause) => return refused(&cause.to_string(), None),
        };
        if let Err(cause) = self.record(&body) {
            eprintln!("homing-load: {cause}");
        }
        let prompt = memory::prompt(&request);
        let prompt_tokens = memory::tokens(&prompt);
        if prompt_tokens > self.args.context {
            let why = format!(
                "This model's maximum context length is {} tokens. Your messages have {prompt_tokens}.",
                self.args.context
            );
            return refused(&why, Some("context_length_exceeded"));
        }
        let reply = self.reply(&request, prompt);
        if request["stream"] == true {
            let options = &request["stream_options"];
            let chunks = Chunks {
                model: &self.args.model,
                continuous: options["continuous_usage_stats"] == true,
                last: options["include_usage"] == true,
            };
            node_http::events(chunks.of(&reply), Pace::default())
        } else {
            json_response(StatusCode::OK, &whole(&self.args.model, &reply))
        }
    }

    fn record(&self, body: &[u8]) -> Result<(), LoadError> {
        let Some(path) = &self.args.record else {
            return Ok(());
        };
        use std::io::Write as _;
        let line = [body, b"\n"].concat();
        std::fs::File::options()
            .create(true)
            .append(true)
            .open(path)
            .and_then(|mut file| file.write_all(&line))
            .map_err(LoadError::file(path))
    }

    /// The answer and what it used; the memory then holds both prompt and answer.
    fn reply(&self, request: &Value, mut prompt: Vec<u8>) -> Reply {
        let tokens_max = ["max_completion_tokens", "max_tokens"]
            .iter()
            .find_map(|name| request[name].as_u64());
        let answer = script::answer(request);
        let (answer, finish_reason) = cut(answer, tokens_max);
        let mut memory = self.memory.lock().unwrap_or_else(PoisonError::into_inner);
        let reply = Reply {
            prompt_tokens: memory::tokens(&prompt),
            cached_tokens: memory.cached(&prompt),
            id: format!("chatcmpl-{:016x}", rand::random::<u64>()),
            call_ids: (0..8)
                .map(|_| format!("call_{:016x}", rand::random::<u64>()))
                .collect(),
            answer,
            finish_reason,
        };
        prompt.extend(reply.message().to_string().into_bytes());
        memory.hold(prompt);
        reply
    }
}

/// Keeps an answer within `max_tokens`, a word a token. Calls and reasoning are not cut: a client that
/// asks for so little asks for words.
fn cut(answer: Answer, tokens_max: Option<u64>) -> (Answer, &'static str) {
    let Said::Text(text) = &answer.said else {
        return (answer, "tool_calls");
    };
    let most = tokens_max.and_then(|most| usize::try_from(most).ok());
    let kept: Vec<&str> = text
        .split_inclusive(' ')
        .take(most.unwrap_or(usize::MAX))
        .collect();
    let kept = kept.concat();
    let reason = if kept.len() < text.len() {
        "length"
    } else {
        "stop"
    };
    let said = Said::Text(kept);
    (Answer { said, ..answer }, reason)
}

/// An answer, ready to be written.
struct Reply {
    id: String,
    call_ids: Vec<String>,
    answer: Answer,
    finish_reason: &'static str,
    prompt_tokens: usize,
    cached_tokens: usize,
}

impl Reply {
    fn calls(&self) -> impl Iterator<Item = (usize, &String, &String, String)> {
        let calls = match &self.answer.said {
            Said::Calls(calls) => calls.as_slice(),
            Said::Text(_) => &[],
        };
        let with_ids = calls.iter().zip(&self.call_ids).enumerate();
        with_ids.map(|(at, ((name, arguments), id))| (at, id, name, arguments.to_string()))
    }

    /// The message as a client sends it back.
    fn message(&self) -> Value {
        let reasoning = &self.answer.reasoning;
        match &self.answer.said {
            Said::Text(text) => {
                json!({"role": "assistant", "content": text, "reasoning_content": reasoning})
            }
            Said::Calls(_) => {
                let calls: Vec<Value> = self
                    .calls()
                    .map(|(_, id, name, arguments)| {
                        json!({"id": id, "type": "function",
                               "function": {"name": name, "arguments": arguments}})
                    })
                    .collect();
                json!({"role": "assistant", "content": null, "reasoning_content": reasoning,
                       "tool_calls": calls})
            }
        }
    }

    /// The answer's pieces after the role, as deltas.
    fn deltas(&self) -> Vec<Value> {
        let words = |text: &str, key: &str| -> Vec<Value> {
            text.split_inclusive(' ')
                .map(|word| json!({key: word}))
                .collect()
        };
        let mut deltas = words(&self.answer.reasoning, "reasoning_content");
        if let Said::Text(text) = &self.answer.said {
            deltas.extend(words(text, "content"));
        }
        for (index, id, name, arguments) in self.calls() {
            let piece = |call: Value| json!({"tool_calls": [call]});
            deltas.push(piece(json!({"index": index, "id": id, "type": "function",
                                     "function": {"name": name, "arguments": ""}})));
            let letters: Vec<char> = arguments.chars().collect();
            for fragment in letters.chunks(FRAGMENT_CHARS) {
                let fragment: String = fragment.iter().collect();
                deltas.push(piece(
                    json!({"index": index, "function": {"arguments": fragment}}),
                ));
            }
        }
        deltas
    }

    /// The usage after so many tokens of answer: one a piece.
    fn usage(&self, completion_tokens: usize) -> Value {
        json!({
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": self.prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        })
    }
}

fn whole(model: &str, reply: &Reply) -> Value {
    json!({"id": reply.id, "object": "chat.completion", "created": 0, "model": model,
           "choices": [{"index": 0, "message": reply.message(),
                        "finish_reason": reply.finish_reason}],
           "usage": reply.usage(reply.deltas().len())})
}

/// How the chunks of a stream are written.
struct Chunks<'a> {
    model: &'a str,
    /// Usage on every chunk.
    continuous: bool,
    /// Usage on a last chunk without choices.
    last: bool,
}

impl Chunks<'_> {
    fn of(&self, reply: &Reply) -> Vec<String> {
        let deltas = reply.deltas();
        let tokens = deltas.len();
        let choice = |delta: Value, reason: Option<&str>| json!([{"index": 0, "delta": delta, "finish_reason": reason}]);
        let role = json!({"role": "assistant", "content": ""});
        let mut events = vec![self.chunk(reply, choice(role, None), self.continuous.then_some(0))];
        for (delta, tokens) in deltas.into_iter().zip(1..) {
            let usage = self.continuous.then_some(tokens);
            events.push(self.chunk(reply, choice(delta, None), usage));
        }
        let end = choice(json!({}), Some(reply.finish_reason));
        events.push(self.chunk(reply, end, self.continuous.then_some(tokens)));
        if self.last {
            events.push(self.chunk(reply, json!([]), Some(tokens)));
        }
        events.push("data: [DONE]\n\n".into());
        events
    }

    fn chunk(&self, reply: &Reply, choices: Value, tokens: Option<usize>) -> String {
        let usage = tokens.map(|tokens| reply.usage(tokens));
        let value = json!({"id": reply.id, "object": "chat.completion.chunk", "created": 0,
                           "model": self.model, "choices": choices, "usage": usage});
        format!("data: {value}\n\n")
    }
}
