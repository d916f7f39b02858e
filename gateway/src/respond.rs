//! How does the gateway's own answer get out?
//!
//! JSON with its length, the request id on everything, errors in the client's dialect. A body that has
//! not been read is drained for a moment after a refusal, because closing on a client that still
//! sends makes its system throw the answer away.

use std::time::Duration;

use bytes::Bytes;
use http::header::{ALLOW, CONTENT_LENGTH, CONTENT_TYPE, RETRY_AFTER};
use pingora::Result;
use pingora::http::ResponseHeader;
use pingora::protocols::http::ServerSession;

use crate::ctx::Ctx;
use dialects::error::{ApiError, Shape};

/// How long a refused client may go on sending before the connection is closed on it.
const DRAIN: Duration = Duration::from_secs(1);

/// Header names of ours.
pub(crate) const X_REQUEST_ID: &str = "x-request-id";

/// An answer in JSON.
pub(crate) async fn json(
    client: &mut ServerSession,
    ctx: &mut Ctx,
    status: u16,
    body: Bytes,
) -> Result<()> {
    let head = head(ctx, status, "application/json", Some(body.len()))?;
    ctx.status = status;
    whole(client, head, body).await
}

/// An error of our own.
pub(crate) async fn error(
    client: &mut ServerSession,
    ctx: &mut Ctx,
    error: ApiError,
) -> Result<()> {
    let (status, body) = (error.kind.status_in(ctx.shape), error.body(ctx.shape));
    let mut head = head(ctx, status, "application/json", Some(body.len()))?;
    if let Some(seconds) = error.retry_after_s {
        head.insert_header(RETRY_AFTER, seconds.to_string())?;
    }
    if let Some(methods) = error.allow {
        head.insert_header(ALLOW, methods)?;
    }
    ctx.status = status;
    ctx.line.cause = error.cause.or(Some(error.message));
    let unread = !client.is_body_done();
    whole(client, head, body.into()).await?;
    if unread {
        client.set_total_drain_timeout(Some(DRAIN));
        client.set_read_timeout(Some(DRAIN));
        // Whatever comes of it, the connection is closed afterwards.
        let _ = client.drain_request_body().await;
    }
    Ok(())
}

/// A stream that is all there.
pub(crate) async fn stream(
    client: &mut ServerSession,
    ctx: &mut Ctx,
    events: Vec<u8>,
) -> Result<()> {
    let head = head(ctx, 200, "text/event-stream", Some(events.len()))?;
    ctx.status = 200;
    whole(client, head, events.into()).await
}

/// The head of an answer; without a length the body is a stream.
pub(crate) fn head(
    ctx: &Ctx,
    status: u16,
    content_type: &str,
    length: Option<usize>,
) -> Result<ResponseHeader> {
    let mut head = ResponseHeader::build(status, Some(8))?;
    head.insert_header(CONTENT_TYPE, content_type)?;
    if let Some(length) = length {
        head.insert_header(CONTENT_LENGTH, length)?;
    }
    head.insert_header(X_REQUEST_ID, &ctx.request_id)?;
    if ctx.shape == Shape::Anthropic {
        // The name under which Anthropic's SDKs read it.
        head.insert_header("request-id", &ctx.request_id)?;
    }
    Ok(head)
}

/// Head and body at once.
pub(crate) async fn whole(
    client: &mut ServerSession,
    head: ResponseHeader,
    body: Bytes,
) -> Result<()> {
    client.write_response_header(Box::new(head)).await?;
    client.write_response_body(body, true).await
}
