//! What do clients ask about responses that were?
//!
//! One function from a request to the JSON of its answer. Another tenant's response is an unknown
//! one.

use bytes::Bytes;
use dialects::error::{ApiError, ErrorKind};
use dialects::responses::response_not_found;
use http::Method;
use pingora::protocols::http::ServerSession;
use serde_json::{Value, json};

use super::history::listed;
use super::page::Page;
use super::store::Kept;
use super::{Responses, conversations, ids, unavailable, unreadable};
use crate::ctx::Ctx;
use crate::identify::identify;
use crate::ledger::unix_ms;
use crate::proxy::Gateway;
use crate::query::Query;
use crate::read;
use crate::store::TenantId;

/// What a path names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Resource<'a> {
    /// `/v1/responses/{id}`
    Response(&'a str),
    /// `/v1/responses/{id}/input_items`
    InputItems(&'a str),
    /// `/v1/responses/{id}/cancel`
    Cancel(&'a str),
    /// `/v1/conversations`
    Conversations,
    /// `/v1/conversations/{id}`
    Conversation(&'a str),
    /// `/v1/conversations/{id}/items`
    Items(&'a str),
    /// `/v1/conversations/{id}/items/{item}`
    Item(&'a str, &'a str),
}

impl<'a> Resource<'a> {
    /// What a path names, and the methods that it takes.
    pub(crate) fn at(path: &'a str) -> Option<(Self, &'static str)> {
        let (first, rest) = path.strip_prefix("/v1/")?.split_once('/')?;
        let mut parts = rest.split('/');
        let id = parts.next().filter(|id| !id.is_empty())?;
        let more = [parts.next(), parts.next(), parts.next()];
        Some(match (first, more) {
            ("responses", [None, ..]) => (Self::Response(id), "GET, DELETE"),
            ("responses", [Some("input_items"), None, _]) => (Self::InputItems(id), "GET"),
            ("responses", [Some("cancel"), None, _]) => (Self::Cancel(id), "POST"),
            ("conversations", [None, ..]) => (Self::Conversation(id), "GET, POST, DELETE"),
            ("conversations", [Some("items"), None, _]) => (Self::Items(id), "GET, POST"),
            ("conversations", [Some("items"), Some(item), None]) if !item.is_empty() => {
                (Self::Item(id, item), "GET, DELETE")
            }
            _ => return None,
        })
    }
}

/// A request about what is stored.
pub(super) struct Ask<'a> {
    pub(super) tenant: &'a TenantId,
    pub(super) method: &'a Method,
    pub(super) query: Query,
    pub(super) body: Bytes,
}

/// Answers a request about what is stored.
pub(crate) async fn serve(
    gateway: &Gateway,
    client: &mut ServerSession,
    ctx: &mut Ctx,
    resource: Resource<'_>,
) -> Result<String, ApiError> {
    let identity = identify(&gateway.store, &client.req_header().headers)?;
    ctx.line.is_of(&identity);
    let body = read::body(client, &gateway.config.limits).await?;
    let request = client.req_header();
    let ask = Ask {
        tenant: &identity.tenant.id,
        method: &request.method,
        query: Query::parse(request.uri.query().unwrap_or_default()),
        body,
    };
    answer(&gateway.responses, resource, &ask).await
}

async fn answer(
    responses: &Responses,
    resource: Resource<'_>,
    ask: &Ask<'_>,
) -> Result<String, ApiError> {
    match resource {
        Resource::Response(id) => {
            ids::check("response_id", id, "resp")?;
            if *ask.method == Method::DELETE {
                delete(responses, ask.tenant, id).await
            } else {
                refuse_stream(&ask.query)?;
                let kept = responses.kept(ask.tenant, id).await?;
                Ok(object(&kept)?.to_string())
            }
        }
        Resource::InputItems(id) => {
            ids::check("response_id", id, "resp")?;
            let page = Page::parse(&ask.query)?;
            let kept = responses.kept(ask.tenant, id).await?;
            page.of(listed(&kept.input)?)
        }
        Resource::Cancel(id) => {
            ids::check("response_id", id, "resp")?;
            cancel(responses, ask.tenant, id).await
        }
        other => conversations::answer(responses, other, ask).await,
    }
}

impl Responses {
    /// The response of this id.
    async fn kept(&self, tenant: &TenantId, id: &str) -> Result<std::sync::Arc<Kept>, ApiError> {
        let found = self.store.response(tenant, id, unix_ms()).await;
        found
            .map_err(unavailable)?
            .ok_or_else(|| response_not_found(id))
    }
}

/// The response object as its client saw it.
fn object(kept: &Kept) -> Result<Value, ApiError> {
    let mut response: Value = serde_json::from_str(kept.response.get()).map_err(unreadable)?;
    if let Some(output) = response.get_mut("output").filter(|output| output.is_null()) {
        *output = serde_json::from_str(kept.output.get()).map_err(unreadable)?;
    }
    Ok(response)
}

async fn delete(responses: &Responses, tenant: &TenantId, id: &str) -> Result<String, ApiError> {
    let removed = responses
        .store
        .remove_response(tenant, id, unix_ms())
        .await
        .map_err(unavailable)?;
    if removed {
        Ok(json!({"id": id, "object": "response", "deleted": true}).to_string())
    } else {
        Err(response_not_found(id))
    }
}

/// A stream can be followed by the client that began it, and by nobody later.
fn refuse_stream(query: &Query) -> Result<(), ApiError> {
    if query.get("stream") == Some("true") {
        return Err(ApiError::invalid(
            "stream",
            "A stored response cannot be streamed again: ask for it without 'stream'.",
        ));
    }
    Ok(())
}

/// Cancels a response that is being made.
async fn cancel(responses: &Responses, tenant: &TenantId, id: &str) -> Result<String, ApiError> {
    if let Some(Some(response)) = responses.running.cancel(tenant, id).await {
        return Ok(response.to_string());
    }
    // It ended by itself, now or earlier.
    let kept = responses.kept(tenant, id).await?;
    let object = object(&kept)?;
    let status = object["status"].as_str().unwrap_or("completed");
    if status == "cancelled" {
        // To ask twice is as good as once.
        return Ok(object.to_string());
    }
    let message = format!("Cannot cancel a {status} response.");
    Err(ApiError::new(ErrorKind::InvalidValue, message))
}
