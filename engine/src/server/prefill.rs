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
use super::message::{Message, Reader};
use super::respond::json_answer;
use super::shape::Shape;
use super::{Answer, App};
use crate::engine::Output;
use crate::error::{ApiError, Kind};
use crate::request::prepare::Reading;
use crate::request::{self, Caller, Task};

/// The answer to a request for prefill: the first token where it is handed over, and where the KV is.
pub(super) fn answer(
    shape: &Shape,
    begun: Begun,
    reading: &Reading,
    (boot_id, task): (&str, &Task),
) -> Result<Answer, ApiError> {
    let Output::Done {
        text,
        tokens,
        ending,
        stop,
        usage,
        held: Some(held),
    } = begun.first
    else {
        return Err(ApiError::internal("a prefill ended without a ticket"));
    };
    let mut message = Message::default();
    message.add(Reader::new(reading).end(text, tokens, (ending, stop)));
    let left = held.deadline.saturating_duration_since(Instant::now());
    let mut value = shape.whole(&[message], &usage);
    value["kv_transfer_params"] = json!({
        "do_remote_prefill": true, "do_remote_decode": false,
        "remote_engine_id": boot_id, "ticket": held.ticket.to_string(),
        "deadline_ms": u64::try_from(left.as_millis()).unwrap_or(u64::MAX),
        "blocks": held.blocks,
    });
    if let Task::HandOver(to) = task {
        value["kv_transfer_params"]["transfer_id"] = json!(to.id.to_string());
    }
    Ok(json_answer(StatusCode::OK, &value))
}

/// `GET /v1/kv/info`: who this node is to others that want its blocks, and where.
pub(super) fn info(app: &App, caller: Caller) -> Result<Answer, ApiError> {
    if caller != Caller::TokenHolder {
        let message = "What a node tells of its KV is for callers with the node token. Start the node \
                       with a token and present it.";
        return Err(ApiError::new(
            Kind::Forbidden,
            "node_token_required",
            message,
        ));
    }
    let loaded = app.ready()?;
    let node = &loaded.node;
    let layout = &node.layout;
    Ok(json_answer(
        StatusCode::OK,
        &json!({
            "engine_id": loaded.served.boot_id, "role": node.role.as_str(),
            "endpoints": node.endpoints, "layout": layout,
        }),
    ))
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
