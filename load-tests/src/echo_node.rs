//! What is the fastest node that a gateway can have in front of it?
//!
//! A scripted OpenAI node: it reads the whole body, answers with a fixed number of words, whole or
//! as a stream, and reports a usage. It computes nothing, so what a proxy costs shows. It answers
//! `/health` and `/v1/models` as a node must. It holds no cache and says so (`cached_tokens` 0).

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use http_body_util::BodyExt;
use hyper::body::Incoming;
use hyper::{Method, Request, Response, StatusCode};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::net::TcpListener;

use crate::error::LoadError;
use crate::node_http::{self, Body, error, full, json_response};

/// A common chars-per-token guess, only so that the reported usage grows with the prompt.
const BYTES_PER_TOKEN: u64 = 4;

/// Flags of `homing-load echo-node`.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// Address to listen on; port 0 picks one
    #[arg(long, default_value = "127.0.0.1:0")]
    pub listen: SocketAddr,
    /// The model id that it claims to serve
    #[arg(long, default_value = "echo")]
    pub model: String,
    /// Tokens of every answer
    #[arg(long, default_value_t = 16)]
    pub tokens: usize,
    /// Milliseconds between the chunks of a stream
    #[arg(long, default_value_t = 0)]
    pub token_ms: u64,
    /// End when stdin ends: a bench that is killed then leaves no node behind
    #[arg(long)]
    pub exit_with_stdin: bool,
}

/// A listening node.
pub struct EchoNode {
    listener: TcpListener,
    args: Arc<Args>,
}

impl EchoNode {
    /// Takes the port.
    pub async fn bind(args: &Args) -> Result<Self, LoadError> {
        Ok(Self {
            listener: node_http::listen(args.listen).await?,
            args: Arc::new(args.clone()),
        })
    }

    /// Where it listens.
    pub fn address(&self) -> Result<SocketAddr, LoadError> {
        node_http::address(&self.listener)
    }

    /// Serves until dropped.
    pub async fn serve(self) -> Result<(), LoadError> {
        let args = self.args;
        node_http::serve(self.listener, move |request| {
            answer(Arc::clone(&args), request)
        })
        .await
    }
}

/// The few fields that change the answer.
#[derive(Default, Deserialize)]
struct Asked {
    #[serde(default)]
    stream: bool,
    stream_options: Option<StreamOptions>,
    max_tokens: Option<usize>,
    prompt_token_ids: Option<Vec<u32>>,
}

#[derive(Default, Deserialize)]
struct StreamOptions {
    #[serde(default)]
    include_usage: bool,
}

async fn answer(args: Arc<Args>, request: Request<Incoming>) -> Response<Body> {
    let path = request.uri().path().to_owned();
    match (request.method(), path.as_str()) {
        (&Method::GET, "/health") => json_response(StatusCode::OK, &json!({"status": "ok"})),
        (&Method::GET, "/metrics") => Response::new(full("")),
        (&Method::GET, "/v1/models") => json_response(StatusCode::OK, &models(&args.model)),
        (&Method::POST, "/v1/chat/completions") => complete(&args, request, Form::Chat).await,
        (&Method::POST, "/v1/completions") => complete(&args, request, Form::Text).await,
        _ => json_response(StatusCode::NOT_FOUND, &error("no such path", None)),
    }
}

fn models(id: &str) -> Value {
    json!({"object": "list", "data": [
        {"id": id, "object": "model", "owned_by": "homing", "max_model_len": 1 << 20},
    ]})
}

#[derive(Clone, Copy)]
enum Form {
    Chat,
    Text,
}

async fn complete(args: &Args, request: Request<Incoming>, form: Form) -> Response<Body> {
    let id = request.headers().get("x-request-id").cloned();
    let body = match request.into_body().collect().await {
        Ok(body) => body.to_bytes(),
        Err(cause) => {
            return json_response(StatusCode::BAD_REQUEST, &error(&cause.to_string(), None));
        }
    };
    let asked: Asked = match serde_json::from_slice(&body) {
        Ok(asked) => asked,
        Err(cause) => {
            return json_response(StatusCode::BAD_REQUEST, &error(&cause.to_string(), None));
        }
    };
    let tokens = asked.max_tokens.unwrap_or(args.tokens).min(args.tokens);
    let prompt_tokens = match &asked.prompt_token_ids {
        Some(ids) => ids.len() as u64,
        None => body.len() as u64 / BYTES_PER_TOKEN,
    };
    let usage = json!({
        "prompt_tokens": prompt_tokens,
        "completion_tokens": tokens,
        "total_tokens": prompt_tokens + tokens as u64,
        "prompt_tokens_details": {"cached_tokens": 0},
    });
    let mut response = if asked.stream {
        let wants_usage = asked.stream_options.is_some_and(|o| o.include_usage);
        streamed(args, form, tokens, wants_usage.then_some(usage))
    } else {
        json_response(StatusCode::OK, &whole(args, form, tokens, &usage))
    };
    if let Some(id) = id {
        response.headers_mut().insert("x-request-id", id);
    }
    response
}

fn whole(args: &Args, form: Form, tokens: usize, usage: &Value) -> Value {
    let text = "word ".repeat(tokens);
    let (object, choice) = match form {
        Form::Chat => (
            "chat.completion",
            json!({"index": 0, "finish_reason": "length",
                   "message": {"role": "assistant", "content": text}}),
        ),
        Form::Text => (
            "text_completion",
            json!({"index": 0, "finish_reason": "length", "text": text}),
        ),
    };
    json!({"id": "echo", "object": object, "created": 0, "model": args.model,
           "choices": [choice], "usage": usage})
}

fn streamed(args: &Args, form: Form, tokens: usize, usage: Option<Value>) -> Response<Body> {
    let object = match form {
        Form::Chat => "chat.completion.chunk",
        Form::Text => "text_completion",
    };
    let chunk = |choices: Value, usage: &Value| {
        let value = json!({"id": "echo", "object": object, "created": 0, "model": args.model,
                           "choices": choices, "usage": usage});
        format!("data: {value}\n\n")
    };
    let choice = |text: &str, reason: Option<&str>| match form {
        Form::Chat => json!([{"index": 0, "delta": {"content": text}, "finish_reason": reason}]),
        Form::Text => json!([{"index": 0, "text": text, "finish_reason": reason}]),
    };
    let mut events = vec![chunk(choice("word ", None), &Value::Null); tokens];
    events.push(chunk(choice("", Some("length")), &Value::Null));
    events.extend(usage.map(|usage| chunk(json!([]), &usage)));
    events.push("data: [DONE]\n\n".into());
    node_http::events(events, Duration::from_millis(args.token_ms))
}
