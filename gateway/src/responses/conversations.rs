//! What do clients ask about conversations?

use dialects::Fields;
use dialects::error::{ApiError, ErrorKind};
use dialects::responses::{conversation_not_found, kept_items};
use http::Method;
use serde_json::{Map, Value, json};
use uuid::Uuid;

use super::ids::{self, no_item};
use super::objects::{Ask, Resource};
use super::page::{Page, list, unknown_after};
use super::store::{Conversation, Item, Order, Placed, Span};
use super::{Responses, unavailable, unreadable};
use crate::ledger::unix_ms;

/// Items that one request may add.
const ITEMS_MAX: usize = 20;
/// Pairs in a conversation's metadata, characters of a name and of a value: the API's own bounds.
const PAIRS_MAX: usize = 16;
const NAME_CHARS_MAX: usize = 64;
const VALUE_CHARS_MAX: usize = 512;

/// Answers a request about conversations.
pub(super) async fn answer(
    responses: &Responses,
    resource: Resource<'_>,
    ask: &Ask<'_>,
) -> Result<String, ApiError> {
    let id = match resource {
        Resource::Conversation(id) | Resource::Items(id) | Resource::Item(id, _) => id,
        _ => return create(responses, ask).await,
    };
    ids::check("conversation_id", id, "conv")?;
    match (resource, ask.method) {
        (Resource::Items(_), &Method::POST) => add(responses, ask, id).await,
        (Resource::Items(_), _) => items(responses, ask, id).await,
        (Resource::Item(_, item), &Method::DELETE) => remove_item(responses, ask, id, item).await,
        (Resource::Item(_, item), _) => one(responses, ask, id, item).await,
        (_, &Method::POST) => update(responses, ask, id).await,
        (_, &Method::DELETE) => remove(responses, ask, id).await,
        _ => show(responses, ask, id).await,
    }
}

async fn create(responses: &Responses, ask: &Ask<'_>) -> Result<String, ApiError> {
    // The body may be left out.
    let fields = match ask.body.is_empty() {
        true => Fields::parse(b"{}")?,
        false => Fields::parse(&ask.body)?,
    };
    let now_ms = unix_ms();
    let id = format!("conv_{}", Uuid::now_v7().simple());
    let items = match value(&fields, "items")? {
        None => Vec::new(),
        Some(list) => checked(list)?.iter().map(ids::item).collect(),
    };
    let conversation = Conversation {
        id,
        created_s: now_ms.div_euclid(1000),
        metadata: metadata(&fields)?.unwrap_or_else(|| "{}".to_owned()),
    };
    let shown = object(&conversation)?;
    let created = responses
        .store
        .create(ask.tenant, conversation, items, now_ms);
    created.await.map_err(unavailable)?;
    Ok(shown)
}

async fn show(responses: &Responses, ask: &Ask<'_>, id: &str) -> Result<String, ApiError> {
    let found = responses
        .store
        .conversation(ask.tenant, id, unix_ms())
        .await;
    object(
        &found
            .map_err(unavailable)?
            .ok_or_else(|| conversation_not_found(id))?,
    )
}

async fn update(responses: &Responses, ask: &Ask<'_>, id: &str) -> Result<String, ApiError> {
    let metadata = metadata(&Fields::parse(&ask.body)?)?.ok_or_else(|| {
        let message = "Missing required parameter: 'metadata'.";
        ApiError::param(ErrorKind::MissingParameter, "metadata", message)
    })?;
    let changed = responses
        .store
        .set_metadata(ask.tenant, id, metadata, unix_ms());
    let changed = changed.await.map_err(unavailable)?;
    object(&changed.ok_or_else(|| conversation_not_found(id))?)
}

async fn remove(responses: &Responses, ask: &Ask<'_>, id: &str) -> Result<String, ApiError> {
    let removed = responses
        .store
        .remove_conversation(ask.tenant, id, unix_ms());
    if removed.await.map_err(unavailable)? {
        Ok(json!({"id": id, "object": "conversation.deleted", "deleted": true}).to_string())
    } else {
        Err(conversation_not_found(id))
    }
}

async fn add(responses: &Responses, ask: &Ask<'_>, id: &str) -> Result<String, ApiError> {
    let fields = Fields::parse(&ask.body)?;
    let given = value(&fields, "items")?.ok_or_else(|| {
        ApiError::param(
            ErrorKind::MissingParameter,
            "items",
            "Missing required parameter: 'items'.",
        )
    })?;
    let added = checked(given)?;
    let items: Vec<Item> = added.iter().map(ids::item).collect();
    let done = responses.store.append(ask.tenant, id, items, unix_ms());
    done.await
        .map_err(unavailable)?
        .ok_or_else(|| conversation_not_found(id))?;
    Ok(list(&added, false))
}

async fn items(responses: &Responses, ask: &Ask<'_>, id: &str) -> Result<String, ApiError> {
    let page = Page::parse(&ask.query)?;
    let mut span = Span {
        before: i64::MAX,
        after: 0,
        most: page.limit + 1,
        order: page.order,
    };
    if let Some(after) = &page.after {
        let found = responses.store.item(ask.tenant, id, after, unix_ms());
        let found = found.await.map_err(unavailable)?;
        let at = found.ok_or_else(|| unknown_after(after))?.position;
        match page.order {
            Order::Ascending => span.after = at,
            Order::Descending => span.before = at,
        }
    }
    let found = responses.store.items(ask.tenant, id, span, unix_ms()).await;
    let mut found = found
        .map_err(unavailable)?
        .ok_or_else(|| conversation_not_found(id))?;
    let has_more = found.len() > page.limit;
    found.truncate(page.limit);
    let found: Vec<Value> = found.iter().map(parsed).collect::<Result<_, _>>()?;
    Ok(list(&found, has_more))
}

async fn one(
    responses: &Responses,
    ask: &Ask<'_>,
    id: &str,
    item: &str,
) -> Result<String, ApiError> {
    show(responses, ask, id).await?;
    let found = responses.store.item(ask.tenant, id, item, unix_ms()).await;
    let found = found.map_err(unavailable)?.ok_or_else(|| no_item(item))?;
    Ok(found.item.json)
}

/// Answers with the conversation, as the API does.
async fn remove_item(
    responses: &Responses,
    ask: &Ask<'_>,
    id: &str,
    item: &str,
) -> Result<String, ApiError> {
    let shown = show(responses, ask, id).await?;
    let removed = responses.store.remove_item(ask.tenant, id, item, unix_ms());
    if removed.await.map_err(unavailable)? {
        Ok(shown)
    } else {
        Err(no_item(item))
    }
}

fn parsed(placed: &Placed) -> Result<Value, ApiError> {
    serde_json::from_str(&placed.item.json).map_err(unreadable)
}

fn object(conversation: &Conversation) -> Result<String, ApiError> {
    let metadata: Value = serde_json::from_str(&conversation.metadata).map_err(unreadable)?;
    Ok(json!({
        "id": conversation.id,
        "object": "conversation",
        "created_at": conversation.created_s,
        "metadata": metadata,
    })
    .to_string())
}

/// A field as a value.
fn value(fields: &Fields<'_>, name: &str) -> Result<Option<Value>, ApiError> {
    let Some(raw) = fields.get(name).filter(|raw| raw.get() != "null") else {
        return Ok(None);
    };
    serde_json::from_str(raw.get())
        .map(Some)
        .map_err(|error| ApiError::invalid(name, format!("'{name}' cannot be read: {error}.")))
}

/// The metadata as JSON, checked.
fn metadata(fields: &Fields<'_>) -> Result<Option<String>, ApiError> {
    let wrong = |message: String| ApiError::invalid("metadata", message);
    let pairs: Map<String, Value> = match value(fields, "metadata")? {
        None => return Ok(None),
        Some(Value::Object(pairs)) => pairs,
        Some(_) => return Err(wrong("'metadata' must be an object.".to_owned())),
    };
    if pairs.len() > PAIRS_MAX {
        let message = format!(
            "'metadata' may have {PAIRS_MAX} pairs, got {}.",
            pairs.len()
        );
        return Err(wrong(message));
    }
    for (name, value) in &pairs {
        let fits = name.chars().count() <= NAME_CHARS_MAX
            && value
                .as_str()
                .is_some_and(|value| value.chars().count() <= VALUE_CHARS_MAX);
        if !fits {
            let message = format!(
                "'metadata' must map names of up to {NAME_CHARS_MAX} characters to strings of up to {VALUE_CHARS_MAX}."
            );
            return Err(wrong(message));
        }
    }
    Ok(Some(Value::Object(pairs).to_string()))
}

/// The items that a request brings.
fn checked(items: Value) -> Result<Vec<Value>, ApiError> {
    let Value::Array(items) = items else {
        return Err(ApiError::invalid("items", "'items' must be an array."));
    };
    if items.len() > ITEMS_MAX {
        let message = format!("'items' may have {ITEMS_MAX} items, got {}.", items.len());
        return Err(ApiError::invalid("items", message));
    }
    kept_items(items, &Uuid::now_v7().simple().to_string())
}
