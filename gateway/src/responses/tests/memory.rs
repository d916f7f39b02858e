//! The slow twin: lists that are searched from their beginning.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use async_trait::async_trait;

use crate::responses::sqlite::Bounds;
use crate::responses::store::{
    Conversation, Finished, Item, Kept, Order, Placed, ResponseStore, Span, StoreError, Stored,
};
use crate::store::TenantId;

#[derive(Default)]
struct Share {
    responses: Vec<(String, Arc<Kept>)>,
    conversations: Vec<Talk>,
}

struct Talk {
    conversation: Conversation,
    t_ms: i64,
    next: i64,
    items: Vec<Placed>,
}

pub(super) struct Memory {
    bounds: Bounds,
    shares: Mutex<HashMap<TenantId, Share>>,
}

impl Share {
    fn rows(&self) -> usize {
        let items: usize = self.conversations.iter().map(|talk| talk.items.len()).sum();
        self.responses.len() + self.conversations.len() + items
    }

    fn bytes(&self) -> usize {
        let responses = self.responses.iter();
        let responses: usize = responses
            .map(|(_, kept)| serde_json::to_string(&**kept).map_or(0, |json| json.len()))
            .sum();
        let talks = self.conversations.iter().map(|talk| {
            let items: usize = talk.items.iter().map(|placed| placed.item.json.len()).sum();
            items + talk.conversation.metadata.len()
        });
        responses + talks.sum::<usize>()
    }

    fn talk(&mut self, id: &str) -> Option<&mut Talk> {
        self.conversations
            .iter_mut()
            .find(|talk| talk.conversation.id == id)
    }

    fn make_room(&mut self, bounds: Bounds) {
        let most = |most: i64| usize::try_from(most).expect("not negative");
        while self.rows() > most(bounds.rows_per_tenant)
            || self.bytes() > most(bounds.bytes_per_tenant)
        {
            let oldest = |times: Vec<i64>| {
                let times = times.into_iter().enumerate();
                times.min_by_key(|(_, t_ms)| *t_ms)
            };
            let response = oldest(self.responses.iter().map(|(_, kept)| kept.t_ms).collect());
            let talk = oldest(self.conversations.iter().map(|talk| talk.t_ms).collect());
            match (response, talk) {
                (Some((at, r_ms)), Some((_, t_ms))) if r_ms <= t_ms => {
                    self.responses.remove(at);
                }
                (_, Some((at, _))) => {
                    self.conversations.remove(at);
                }
                (Some((at, _)), None) => {
                    self.responses.remove(at);
                }
                (None, None) => return,
            }
        }
    }
}

impl Talk {
    fn append(&mut self, items: Vec<Item>, now_ms: i64) {
        for item in items {
            if self.items.iter().all(|placed| placed.item.id != item.id) {
                self.items.push(Placed {
                    position: self.next,
                    item,
                });
            }
            self.next += 1;
        }
        self.t_ms = now_ms;
    }
}

impl Memory {
    pub(super) fn new(bounds: Bounds) -> Self {
        Self {
            bounds,
            shares: Mutex::default(),
        }
    }

    /// Everything that is still alive.
    fn now(&self, now_ms: i64) -> MutexGuard<'_, HashMap<TenantId, Share>> {
        let mut shares = self.shares.lock().unwrap_or_else(PoisonError::into_inner);
        let alive = |t_ms: i64| t_ms > now_ms - self.bounds.ttl_ms;
        for share in shares.values_mut() {
            share.responses.retain(|(_, kept)| alive(kept.t_ms));
            share.conversations.retain(|talk| alive(talk.t_ms));
        }
        shares
    }
}

#[async_trait]
impl ResponseStore for Memory {
    async fn finish(&self, tenant: &TenantId, left: Finished, now_ms: i64) -> Stored<()> {
        let mut shares = self.now(now_ms);
        let share = shares.entry(tenant.clone()).or_default();
        if let Some((id, kept)) = left.response {
            if share.responses.iter().any(|(known, _)| *known == id) {
                return Err(StoreError("twice".to_owned()));
            }
            share.responses.push((id, kept));
        }
        if let Some((id, items)) = left.append
            && let Some(talk) = share.talk(&id)
        {
            talk.append(items, now_ms);
        }
        share.make_room(self.bounds);
        Ok(())
    }

    async fn response(
        &self,
        tenant: &TenantId,
        id: &str,
        now_ms: i64,
    ) -> Stored<Option<Arc<Kept>>> {
        let shares = self.now(now_ms);
        let found = shares.get(tenant).and_then(|share| {
            let mut all = share.responses.iter();
            all.find(|(known, _)| known == id)
        });
        Ok(found.map(|(_, kept)| Arc::clone(kept)))
    }

    async fn remove_response(&self, tenant: &TenantId, id: &str, now_ms: i64) -> Stored<bool> {
        let mut shares = self.now(now_ms);
        let share = shares.entry(tenant.clone()).or_default();
        let before = share.responses.len();
        share.responses.retain(|(known, _)| known != id);
        Ok(share.responses.len() < before)
    }

    async fn create(
        &self,
        tenant: &TenantId,
        conversation: Conversation,
        items: Vec<Item>,
        now_ms: i64,
    ) -> Stored<()> {
        let mut shares = self.now(now_ms);
        let share = shares.entry(tenant.clone()).or_default();
        if share.talk(&conversation.id).is_some() {
            return Err(StoreError(
                "UNIQUE constraint failed: conversations.tenant, conversations.id".to_owned(),
            ));
        }
        let mut talk = Talk {
            conversation,
            t_ms: now_ms,
            next: 1,
            items: Vec::new(),
        };
        talk.append(items, now_ms);
        share.conversations.push(talk);
        share.make_room(self.bounds);
        Ok(())
    }

    async fn conversation(
        &self,
        tenant: &TenantId,
        id: &str,
        now_ms: i64,
    ) -> Stored<Option<Conversation>> {
        let mut shares = self.now(now_ms);
        let share = shares.entry(tenant.clone()).or_default();
        Ok(share.talk(id).map(|talk| talk.conversation.clone()))
    }

    async fn set_metadata(
        &self,
        tenant: &TenantId,
        id: &str,
        metadata: String,
        now_ms: i64,
    ) -> Stored<Option<Conversation>> {
        let mut shares = self.now(now_ms);
        let share = shares.entry(tenant.clone()).or_default();
        Ok(share.talk(id).map(|talk| {
            talk.conversation.metadata = metadata;
            talk.t_ms = now_ms;
            talk.conversation.clone()
        }))
    }

    async fn remove_conversation(&self, tenant: &TenantId, id: &str, now_ms: i64) -> Stored<bool> {
        let mut shares = self.now(now_ms);
        let share = shares.entry(tenant.clone()).or_default();
        let before = share.conversations.len();
        share
            .conversations
            .retain(|talk| talk.conversation.id != id);
        Ok(share.conversations.len() < before)
    }

    async fn append(
        &self,
        tenant: &TenantId,
        id: &str,
        items: Vec<Item>,
        now_ms: i64,
    ) -> Stored<Option<()>> {
        let mut shares = self.now(now_ms);
        let share = shares.entry(tenant.clone()).or_default();
        let Some(talk) = share.talk(id) else {
            return Ok(None);
        };
        talk.append(items, now_ms);
        share.make_room(self.bounds);
        Ok(Some(()))
    }

    async fn items(
        &self,
        tenant: &TenantId,
        id: &str,
        span: Span,
        now_ms: i64,
    ) -> Stored<Option<Vec<Placed>>> {
        let mut shares = self.now(now_ms);
        let share = shares.entry(tenant.clone()).or_default();
        Ok(share.talk(id).map(|talk| {
            let within =
                |placed: &&Placed| placed.position > span.after && placed.position < span.before;
            let mut found: Vec<Placed> = talk.items.iter().filter(within).cloned().collect();
            if span.order == Order::Descending {
                found.reverse();
            }
            found.truncate(span.most);
            found
        }))
    }

    async fn item(
        &self,
        tenant: &TenantId,
        id: &str,
        item: &str,
        now_ms: i64,
    ) -> Stored<Option<Placed>> {
        let mut shares = self.now(now_ms);
        let share = shares.entry(tenant.clone()).or_default();
        Ok(share.talk(id).and_then(|talk| {
            let mut all = talk.items.iter();
            all.find(|placed| placed.item.id == item).cloned()
        }))
    }

    async fn remove_item(
        &self,
        tenant: &TenantId,
        id: &str,
        item: &str,
        now_ms: i64,
    ) -> Stored<bool> {
        let mut shares = self.now(now_ms);
        let share = shares.entry(tenant.clone()).or_default();
        let Some(talk) = share.talk(id) else {
            return Ok(false);
        };
        let before = talk.items.len();
        talk.items.retain(|placed| placed.item.id != item);
        Ok(talk.items.len() < before)
    }

    async fn expire(&self, now_ms: i64) -> Stored<()> {
        drop(self.now(now_ms));
        Ok(())
    }
}
