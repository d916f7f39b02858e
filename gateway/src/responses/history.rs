//! What came before a turn?
//!
//! A response knows the one that it continues, so a chain is walked from its end; a conversation is
//! read page by page. Both are bounded in bytes: what a client may send is also what it may mean.

use std::collections::{BTreeSet, HashSet};
use std::sync::Arc;

use dialects::error::ApiError;
use dialects::responses::{conversation_not_found, previous_response_not_found, response_of};
use policies::view::SessionKey;
use serde_json::Value;
use serde_json::value::RawValue;

use super::local::Local;
use super::store::{Kept, KeptSession, Link, Order, Span};
use super::{Earlier, Responses, unavailable, unreadable};
use crate::ledger::unix_ms;
use crate::session::SessionId;
use crate::store::TenantId;

/// Links of a chain that a turn may continue: an agent's longest sessions have some hundreds.
const CHAIN_MAX: usize = 10_000;

impl Responses {
    /// All that led to this response and the response itself.
    pub(super) async fn chain(
        &self,
        tenant: &TenantId,
        first: &str,
        local: Option<&Arc<Local>>,
    ) -> Result<Earlier, ApiError> {
        let (mut links, mut bytes) = (Vec::<Arc<Kept>>::new(), 0);
        let mut next = Some(Link::Response(first.to_owned()));
        let mut items = Vec::new();
        while let Some(Link::Response(id)) = &next {
            let kept = self.find(tenant, id, local).await?;
            let kept = kept.ok_or_else(|| previous_response_not_found(first))?;
            bytes += kept.bytes();
            if bytes > self.history_bytes_max || links.len() >= CHAIN_MAX {
                return Err(self.too_long("previous_response_id"));
            }
            next.clone_from(&kept.continues);
            links.push(kept);
        }
        if let Some(Link::Conversation { id, before }) = &next {
            let (earlier, _) = self.conversation(tenant, id, *before).await?;
            items = earlier.items;
            bytes += earlier.bytes;
        }
        for kept in links.iter().rev() {
            for list in [&kept.input, &kept.output] {
                items.extend(listed(list)?);
            }
        }
        let session = links.first().and_then(|kept| session(&kept.session));
        Ok(Earlier {
            items,
            bytes,
            session,
        })
    }

    /// The items of a conversation before a position, and the first position behind them.
    pub(super) async fn conversation(
        &self,
        tenant: &TenantId,
        id: &str,
        before: i64,
    ) -> Result<(Earlier, i64), ApiError> {
        /// Items read at once.
        const PAGE: usize = 1000;
        let (mut items, mut bytes, mut after) = (Vec::new(), 0, 0);
        loop {
            let span = Span {
                before,
                after,
                most: PAGE,
                order: Order::Ascending,
            };
            let page = self.store.items(tenant, id, span, unix_ms()).await;
            let page = page
                .map_err(unavailable)?
                .ok_or_else(|| conversation_not_found(id))?;
            let full = page.len() == PAGE;
            for placed in page {
                bytes += placed.item.json.len();
                if bytes > self.history_bytes_max {
                    return Err(self.too_long("conversation"));
                }
                after = placed.position;
                items.push(serde_json::from_str(&placed.item.json).map_err(unreadable)?);
            }
            if !full {
                let session = None;
                let earlier = Earlier {
                    items,
                    bytes,
                    session,
                };
                return Ok((earlier, after + 1));
            }
        }
    }

    fn too_long(&self, param: &str) -> ApiError {
        ApiError::invalid(
            param,
            format!(
                "What '{param}' refers to is longer than {} bytes or {CHAIN_MAX} responses. Begin anew with the part that still matters.",
                self.history_bytes_max
            ),
        )
    }

    /// Stored items of these ids; one that is not there is left out.
    pub(super) async fn items_of(
        &self,
        tenant: &TenantId,
        ids: &[String],
        local: Option<&Arc<Local>>,
    ) -> Result<Vec<Value>, ApiError> {
        let wanted: HashSet<&str> = ids.iter().map(String::as_str).collect();
        let responses: BTreeSet<String> = ids.iter().filter_map(|id| response_of(id)).collect();
        let mut items = Vec::new();
        for response in responses.into_iter().take(CHAIN_MAX) {
            let Some(kept) = self.find(tenant, &response, local).await? else {
                continue;
            };
            for list in [&kept.input, &kept.output] {
                let list = listed(list)?.into_iter();
                items.extend(
                    list.filter(|item| item["id"].as_str().is_some_and(|id| wanted.contains(id))),
                );
            }
        }
        Ok(items)
    }

    /// The response of this id: the connection's, or a stored one.
    pub(super) async fn find(
        &self,
        tenant: &TenantId,
        id: &str,
        local: Option<&Arc<Local>>,
    ) -> Result<Option<Arc<Kept>>, ApiError> {
        match local.and_then(|local| local.get(id)) {
            Some(kept) => Ok(Some(kept)),
            None => {
                let found = self.store.response(tenant, id, unix_ms()).await;
                found.map_err(unavailable)
            }
        }
    }
}

/// A list of items as it was kept.
pub(super) fn listed(list: &RawValue) -> Result<Vec<Value>, ApiError> {
    serde_json::from_str(list.get()).map_err(unreadable)
}

fn session(kept: &KeptSession) -> Option<SessionId> {
    Some(SessionId {
        key: SessionKey(u128::from_str_radix(&kept.key, 16).ok()?),
        text: kept.text.clone(),
    })
}
