//! How does a text become a vector? OpenAI's `/v1/embeddings`.
//!
//! Each input is a request of the engine; a few at a time, so that a list of thousands does not
//! fill the queue that others wait in.

use std::sync::Arc;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use http::{Request, StatusCode};
use hyper::body::Incoming;
use serde_json::{Value, json};

use super::client::Client;
use super::generate::{Asked, Watched, aside, read};
use super::respond::json_answer;
use super::routes::Refusal;
use super::{Answer, App, Loaded};
use crate::engine::{Job, Output, Ticket};
use crate::error::ApiError;
use crate::request::{self, Encoding};

/// Inputs in the engine at a time.
const WINDOW: usize = 8;

/// `POST /v1/embeddings`.
pub(super) async fn answer(
    app: &Arc<App>,
    client: &Arc<Client>,
    request: Request<Incoming>,
    asked: Asked,
) -> Result<Answer, Refusal> {
    let loaded = app.ready()?;
    let watched = Watched::new(client, request.version());
    let body = read(app, request).await?;
    let shared = loaded.clone();
    let prepare = move || {
        let mut request = request::embedding(&body, &asked.rules(&shared))?;
        request.timeout = asked.timeout(request.timeout);
        let jobs = shared.served.prepare_embedding(&request, &asked.arrival)?;
        Ok((request.encoding, jobs))
    };
    let (encoding, jobs) = aside(prepare).await?;
    let (data, tokens) = watched
        .unless_gone(compute(loaded, jobs, encoding))
        .await??;
    let value = json!({
        "object": "list", "data": data, "model": &*loaded.served.model_id,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    });
    Ok(json_answer(StatusCode::OK, &value))
}

/// The vectors in order, and how many tokens they took.
async fn compute(
    loaded: &Loaded,
    jobs: Vec<Job>,
    encoding: Encoding,
) -> Result<(Vec<Value>, usize), ApiError> {
    let mut data = Vec::with_capacity(jobs.len());
    let mut tokens = 0;
    let mut jobs = jobs.into_iter().peekable();
    while jobs.peek().is_some() {
        let window = jobs.by_ref().take(WINDOW);
        let tickets = window.map(|job| loaded.engine.submit(job));
        let tickets: Vec<Ticket> = tickets.collect::<Result<_, _>>()?;
        for ticket in tickets {
            let (vector, count) = vector(ticket).await?;
            let index = data.len();
            data.push(json!({
                "object": "embedding", "index": index, "embedding": encoded(&vector, encoding),
            }));
            tokens += count;
        }
    }
    Ok((data, tokens))
}

async fn vector(mut ticket: Ticket) -> Result<(Vec<f32>, usize), ApiError> {
    loop {
        match ticket.next().await {
            Some(Output::Embedding(vector, usage)) => return Ok((vector, usage.prompt_tokens)),
            Some(Output::Failed(error)) => return Err(error),
            Some(Output::Joined { .. }) => {}
            Some(Output::Text { .. } | Output::Done { .. }) => {
                return Err(ApiError::internal("an answer for a vector"));
            }
            None => return Err(ApiError::internal("the engine's thread ended")),
        }
    }
}

fn encoded(vector: &[f32], encoding: Encoding) -> Value {
    match encoding {
        Encoding::Float => json!(vector),
        Encoding::Base64 => {
            let bytes: Vec<u8> = vector.iter().flat_map(|x| x.to_le_bytes()).collect();
            json!(STANDARD.encode(bytes))
        }
    }
}
