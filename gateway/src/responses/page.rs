//! Which part of a list does a client want, and how is it shown?

use dialects::error::ApiError;
use serde_json::Value;

use super::ids::shown;
use super::store::Order;
use crate::query::Query;

/// Items in a page, where the client does not say.
const LIMIT: usize = 20;
/// Most items in a page.
const LIMIT_MAX: usize = 100;

/// What a client's query asks for.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Page {
    /// The last item of the page before.
    pub(super) after: Option<String>,
    pub(super) limit: usize,
    pub(super) order: Order,
}

impl Page {
    /// Reads a query; what it does not know (`include`) asks for nothing that is here.
    pub(super) fn parse(query: &Query) -> Result<Self, ApiError> {
        let limit = match query.get("limit") {
            None => LIMIT,
            Some(limit) => limit
                .parse()
                .ok()
                .filter(|limit| (1..=LIMIT_MAX).contains(limit))
                .ok_or_else(|| {
                    let limit = shown(limit);
                    let message =
                        format!("'limit' must be an integer from 1 to {LIMIT_MAX}, got '{limit}'.");
                    ApiError::invalid("limit", message)
                })?,
        };
        let order = match query.get("order") {
            None | Some("desc") => Order::Descending,
            Some("asc") => Order::Ascending,
            Some(other) => {
                let message = format!("'order' must be 'asc' or 'desc', got '{}'.", shown(other));
                return Err(ApiError::invalid("order", message));
            }
        };
        let after = query.get("after").filter(|after| !after.is_empty());
        Ok(Self {
            after: after.map(str::to_owned),
            limit,
            order,
        })
    }

    /// The page of a list that is all there, oldest first.
    pub(super) fn of(&self, mut items: Vec<Value>) -> Result<String, ApiError> {
        if self.order == Order::Descending {
            items.reverse();
        }
        if let Some(after) = &self.after {
            let at = items.iter().position(|item| item["id"] == **after);
            let at = at.ok_or_else(|| unknown_after(after))?;
            items.drain(..=at);
        }
        let has_more = items.len() > self.limit;
        items.truncate(self.limit);
        Ok(list(&items, has_more))
    }
}

pub(super) fn unknown_after(after: &str) -> ApiError {
    let message = format!("'after' names no item of this list: '{}'.", shown(after));
    ApiError::invalid("after", message)
}

/// A list object.
pub(super) fn list(items: &[Value], has_more: bool) -> String {
    let id = |item: Option<&Value>| item.map_or(Value::Null, |item| item["id"].clone());
    serde_json::json!({
        "object": "list",
        "data": items,
        "first_id": id(items.first()),
        "last_id": id(items.last()),
        "has_more": has_more,
    })
    .to_string()
}
