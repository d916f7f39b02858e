//! What is the fastest node that a gateway can have in front of it?
//!
//! A scripted node: it reads the whole body, answers with a fixed number of words, whole or as a
//! stream, and reports a usage. It computes nothing, so what a proxy costs shows. It speaks Chat
//! Completions, Completions, Messages and Responses by itself, so that a proxy which only passes a
//! dialect on can stand in front of it as well as one which translates. It answers `/health` and
//! `/v1/models` as a node must. It holds no cache and says so (`cached_tokens` 0).

mod answers;

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
use crate::node_http::{self, Body, Pace, error, full, json_response};

use self::answers::{Answer, Form, StreamUsage};

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
    /// Milliseconds before the first chunk of a stream
    #[arg(long, default_value_t = 0)]
    pub first_ms: u64,
    /// Milliseconds before each further chunk
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
            let args = Arc::clone(&args);
            async move { Ok(answer(args, request).await) }
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
    max_completion_tokens: Option<usize>,
    max_output_tokens: Option<usize>,
    prompt_token_ids: Option<Vec<u32>>,
}

#[derive(Default, Deserialize)]
struct StreamOptions {
    #[serde(default)]
    include_usage: bool,
    #[serde(default)]
    continuous_usage_stats: bool,
}

async fn answer(args: Arc<Args>, request: Request<Incoming>) -> Response<Body> {
    let path = request.uri().path().to_owned();
    match (request.method(), path.as_str()) {
        (&Method::GET, "/health") => json_response(StatusCode::OK, &json!({"status": "ok"})),
        (&Method::GET, "/metrics") => Response::new(full("")),
        (&Method::GET, "/v1/models") => json_response(StatusCode::OK, &models(&args.model)),
        (&Method::POST, path) => match Form::at(path) {
            Some(form) => complete(&args, request, form).await,
            None => unknown(),
        },
        _ => unknown(),
    }
}

fn unknown() -> Response<Body> {
    json_response(StatusCode::NOT_FOUND, &error("no such path", None))
}

fn models(id: &str) -> Value {
    json!({"object": "list", "data": [
        {"id": id, "object": "model", "owned_by": "homing", "max_model_len": 1 << 20},
    ]})
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
    let limit = asked.limit();
    let answer = Answer {
        form,
        model: &args.model,
        tokens: limit.min(args.tokens),
        is_cut: limit <= args.tokens,
        prompt_tokens: match &asked.prompt_token_ids {
            Some(ids) => ids.len() as u64,
            None => body.len() as u64 / BYTES_PER_TOKEN,
        },
    };
    let mut response = if asked.stream {
        let pace = Pace {
            first: Duration::from_millis(args.first_ms),
            next: Duration::from_millis(args.token_ms),
        };
        node_http::events(answer.events(asked.usage()), pace)
    } else {
        json_response(StatusCode::OK, &answer.whole())
    };
    if let Some(id) = id {
        response.headers_mut().insert("x-request-id", id);
    }
    response
}

impl Asked {
    /// The client's limit, whatever its dialect calls it.
    fn limit(&self) -> usize {
        self.max_tokens
            .or(self.max_completion_tokens)
            .or(self.max_output_tokens)
            .unwrap_or(usize::MAX)
    }

    fn usage(&self) -> StreamUsage {
        match &self.stream_options {
            Some(o) if o.continuous_usage_stats => StreamUsage::Always,
            Some(o) if o.include_usage => StreamUsage::Last,
            _ => StreamUsage::None,
        }
    }
}
