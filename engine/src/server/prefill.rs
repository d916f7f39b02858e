//! How is a prompt prefilled for another node, and its KV let go?
//!
//! vLLM's names: the answer carries `kv_transfer_params`, which a router hands to the node that
//! decodes. The blocks stay pinned under a ticket until they are released or the deadline passes.

use std::sync::Arc;
use std::time::Instant;

use http::{Request, StatusCode};
use hyper::body::Incoming;
use serde_json::json;

use super::generate::{Asked, Begun, read};
use super::message::Message;
use super::respond::json_answer;
use super::shape::Shape;
use super::{Answer, App};
use crate::engine::Output;
use crate::error::ApiError;
use crate::request;

/// The answer to a request for prefill alone: no text, and where the KV is.
pub(super) fn answer(shape: &Shape, begun: Begun, boot_id: &str) -> Result<Answer, ApiError> {
    let Output::Done {
        ending,
        usage,
        held: Some(held),
        ..
    } = begun.first
    else {
        return Err(ApiError::internal("a prefill ended without a ticket"));
    };
    let message = Message {
        finish: Some(ending.as_str()),
        ..Message::default()
    };
    let left = held.deadline.saturating_duration_since(Instant::now());
    let mut value = shape.whole(&[message], &usage);
    value["kv_transfer_params"] = json!({
        "do_remote_prefill": true, "do_remote_decode": false,
        "remote_engine_id": boot_id, "ticket": held.ticket.to_string(),
        "deadline_ms": u64::try_from(left.as_millis()).unwrap_or(u64::MAX),
        "blocks": held.blocks,
    });
    Ok(json_answer(StatusCode::OK, &value))
}

/// `POST /v1/kv/release`: whether there was anything to let go.
pub(super) async fn release(
    app: &Arc<App>,
    request: Request<Incoming>,
    asked: &Asked,
) -> Result<Answer, ApiError> {
    let engine = &app.ready_to_release()?.engine;
    let body = read(app, request).await?;
    let release = request::release(&body, asked.caller)?;
    let released = engine.release(release.ticket).await;
    Ok(json_answer(StatusCode::OK, &json!({"released": released})))
}
