//! Which tokens are this text, and which text are these tokens? vLLM's `/tokenize` and
//! `/detokenize`.

use std::sync::Arc;

use http::{Request, StatusCode};
use hyper::body::Incoming;
use serde_json::json;

use super::generate::{Asked, aside, read};
use super::respond::json_answer;
use super::{Answer, App};
use crate::error::ApiError;
use crate::request;

/// `POST /tokenize`.
pub(super) async fn tokenize(
    app: &Arc<App>,
    request: Request<Incoming>,
    asked: Asked,
) -> Result<Answer, ApiError> {
    let loaded = app.ready()?.clone();
    let body = read(app, request).await?;
    // A long text takes milliseconds.
    let value = aside(move || {
        let served = &loaded.served;
        let request = request::tokenization(&body, &asked.rules(&loaded))?;
        let tokens = served.tokenize(&request, asked.arrival.unix_seconds)?;
        let texts = tokens.iter().map(|token| served.token_text(*token));
        let texts = request.token_strings.then(|| texts.collect::<Vec<_>>());
        Ok(json!({
            "count": tokens.len(), "max_model_len": served.max_model_len, "tokens": tokens,
            "token_strs": texts,
        }))
    });
    Ok(json_answer(StatusCode::OK, &value.await?))
}

/// `POST /detokenize`.
pub(super) async fn detokenize(
    app: &Arc<App>,
    request: Request<Incoming>,
    asked: Asked,
) -> Result<Answer, ApiError> {
    let loaded = app.ready()?.clone();
    let body = read(app, request).await?;
    let value = aside(move || {
        let request = request::detokenization(&body, &asked.rules(&loaded))?;
        Ok(json!({"prompt": loaded.served.text(&request.tokens)}))
    });
    Ok(json_answer(StatusCode::OK, &value.await?))
}
