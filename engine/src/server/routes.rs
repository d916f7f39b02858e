//! What is served under which path, and how are refusals sent?

use std::sync::Arc;

use http::header::CONTENT_TYPE;
use http::{HeaderMap, HeaderValue, Method, Request, StatusCode};
use hyper::body::{Body, Incoming};
use serde_json::json;

use super::client::Client;
use super::generate::Asked;
use super::respond::{error_answer, json_answer, whole};
use super::stream::ClientGone;
use super::{Answer, App, HEADER_BYTES_MAX, auth, embed, generate, prefill, tokens};
use crate::error::{ApiError, Kind};
use crate::request::Dialect;

const REQUEST_ID: &str = "x-request-id";
/// Characters of a client's own request id; longer ones are replaced.
const REQUEST_ID_CHARS_MAX: usize = 128;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Route {
    Generate(Dialect),
    Embeddings,
    Tokenize,
    Detokenize,
    Release,
    KvInfo,
    Models,
    Health,
    Metrics,
}

/// Answers a request, whatever it is.
pub(super) async fn answer(
    app: &Arc<App>,
    client: &Arc<Client>,
    request: Request<Incoming>,
) -> Result<Answer, ClientGone> {
    let request_id = request_id(request.headers());
    let has_body = !request.body().is_end_stream();
    let mut answer = match dispatch(app, client, request, &request_id).await {
        Ok(answer) => answer,
        Err(Refusal::ClientGone) => return Err(ClientGone),
        Err(Refusal::Error(error)) => {
            // The body may be unread, and hyper may close: give the client time to read why.
            if has_body {
                client.leave_unread();
            }
            log_refusal(&request_id, &error);
            error_answer(&error)
        }
    };
    if let Ok(value) = HeaderValue::from_str(&request_id) {
        answer.headers_mut().insert(REQUEST_ID, value);
    }
    Ok(answer)
}

/// Why a request has no ordinary answer.
pub(super) enum Refusal {
    /// The client reads this.
    Error(ApiError),
    /// Nobody reads anything.
    ClientGone,
}

impl From<ApiError> for Refusal {
    fn from(error: ApiError) -> Self {
        Self::Error(error)
    }
}

async fn dispatch(
    app: &Arc<App>,
    client: &Arc<Client>,
    request: Request<Incoming>,
    request_id: &Arc<str>,
) -> Result<Answer, Refusal> {
    check_header_size(&request)?;
    let route = route(request.method(), request.uri().path())?;
    if route == Route::Health {
        app.ready()?;
        return Ok(json_answer(StatusCode::OK, &json!({"status": "ok"})));
    }
    let caller = auth::caller(app.settings.token.as_ref(), request.headers())?;
    match route {
        Route::Health => unreachable!("answered above"),
        Route::Metrics => Ok(metrics(app)),
        Route::KvInfo => prefill::info(app, caller).map_err(Refusal::Error),
        Route::Models => models(app).map_err(Refusal::Error),
        Route::Generate(dialect) => {
            let asked = Asked::new(caller, request_id, request.headers())?;
            generate::answer(app, client, request, (dialect, asked)).await
        }
        Route::Embeddings => {
            let asked = Asked::new(caller, request_id, request.headers())?;
            embed::answer(app, client, request, asked).await
        }
        Route::Tokenize | Route::Detokenize | Route::Release => {
            let asked = Asked::new(caller, request_id, request.headers())?;
            let answer = match route {
                Route::Tokenize => tokens::tokenize(app, request, asked).await,
                Route::Detokenize => tokens::detokenize(app, request, asked).await,
                _ => prefill::release(app, request, &asked).await,
            };
            answer.map_err(Refusal::Error)
        }
    }
}

fn route(method: &Method, path: &str) -> Result<Route, ApiError> {
    let (route, allowed) = match path {
        "/v1/chat/completions" => (Route::Generate(Dialect::Chat), Method::POST),
        "/v1/completions" => (Route::Generate(Dialect::Completions), Method::POST),
        "/v1/embeddings" => (Route::Embeddings, Method::POST),
        "/v1/kv/release" => (Route::Release, Method::POST),
        "/v1/kv/info" => (Route::KvInfo, Method::GET),
        "/tokenize" => (Route::Tokenize, Method::POST),
        "/detokenize" => (Route::Detokenize, Method::POST),
        "/v1/models" => (Route::Models, Method::GET),
        "/health" => (Route::Health, Method::GET),
        "/metrics" => (Route::Metrics, Method::GET),
        _ => {
            let known = "/v1/chat/completions, /v1/completions, /v1/embeddings, /tokenize, \
                         /detokenize, /v1/models, /health and /metrics";
            let path: String = path.chars().take(128).collect();
            let message = format!("There is no `{path}` here; this node serves {known}.");
            return Err(ApiError::new(Kind::NotFound, "unknown_path", message));
        }
    };
    if *method == allowed || (allowed == Method::GET && *method == Method::HEAD) {
        return Ok(route);
    }
    let message = format!("`{path}` is not for {method}; use {allowed}.");
    Err(ApiError::new(
        Kind::MethodNotAllowed,
        "method_not_allowed",
        message,
    ))
}

fn check_header_size(request: &Request<Incoming>) -> Result<(), ApiError> {
    let line = |(name, value): (&http::HeaderName, &HeaderValue)| {
        name.as_str().len() + value.len() + ": \r\n".len()
    };
    let uri = request
        .uri()
        .path_and_query()
        .map_or(0, |path| path.as_str().len());
    let bytes = uri + request.headers().iter().map(line).sum::<usize>();
    if bytes <= HEADER_BYTES_MAX {
        return Ok(());
    }
    let message =
        format!("The request's header has {bytes} bytes; at most {HEADER_BYTES_MAX} are accepted.");
    Err(ApiError::new(
        Kind::HeaderTooLarge,
        "header_too_large",
        message,
    ))
}

/// The client's own id where it is short and printable, else a new one.
fn request_id(headers: &HeaderMap) -> Arc<str> {
    let own = headers
        .get(REQUEST_ID)
        .and_then(|value| value.to_str().ok());
    let valid = |id: &&str| {
        (1..=REQUEST_ID_CHARS_MAX).contains(&id.len()) && id.bytes().all(|b| b.is_ascii_graphic())
    };
    match own.filter(valid) {
        Some(own) => Arc::from(own),
        None => Arc::from(format!("req-{}", uuid::Uuid::new_v4().simple())),
    }
}

fn metrics(app: &App) -> Answer {
    let mut answer = whole(StatusCode::OK, app.metrics.render().into());
    let text = HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8");
    answer.headers_mut().insert(CONTENT_TYPE, text);
    answer
}

fn models(app: &App) -> Result<Answer, ApiError> {
    let served = &app.ready()?.served;
    let model = json!({
        "id": &*served.model_id, "object": "model", "created": app.started_unix_seconds(),
        "owned_by": "homing", "max_model_len": served.max_model_len,
        // Whoever calls without a token may not name a prompt's tokens.
        "token_ids": app.settings.token.is_some(),
    });
    Ok(json_answer(
        StatusCode::OK,
        &json!({"object": "list", "data": [model]}),
    ))
}

fn log_refusal(request_id: &str, error: &ApiError) {
    let status = error.kind.status().as_u16();
    tracing::info!(
        request_id,
        status,
        code = error.code,
        param = error.param.as_deref(),
        detail = error.detail.as_deref(),
        "request refused"
    );
}
