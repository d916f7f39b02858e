//! What does a store of responses promise?
//!
//! Everything is the tenant's own: another tenant's id is an unknown id. A response keeps the items
//! of its own turn and what it continues, never what came before; a conversation is a list of items
//! in their order. What is older than the store's time to live is gone, and so is the oldest of a
//! tenant that keeps more than its share. The clock is the caller's.
//!
//! Two implementations: SQLite in the data directory, and a list in memory that tests compare it
//! with. A store shared between gateways is a third one behind the same interface.

use std::sync::Arc;

use async_trait::async_trait;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use crate::store::TenantId;

/// A response as it is kept.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Kept {
    /// When it was stored, unix milliseconds.
    pub(crate) t_ms: i64,
    /// What it continues.
    pub(crate) continues: Option<Link>,
    /// The session its turn belonged to: the next turn's as well.
    pub(crate) session: KeptSession,
    /// The response object, with `null` for its output where that is [`Self::output`].
    pub(crate) response: Box<RawValue>,
    /// A list: the items of the turn's own input.
    pub(crate) input: Box<RawValue>,
    /// A list: the items of the output.
    pub(crate) output: Box<RawValue>,
}

/// A session as it is kept.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct KeptSession {
    /// The binding's key, in hex (JSON has no numbers of 128 bits).
    pub(crate) key: String,
    /// What the ledger shows.
    pub(crate) text: String,
}

/// What a response continues.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Link {
    /// The response of this id.
    Response(String),
    /// A conversation, up to the item before this position.
    Conversation {
        /// Its id.
        id: String,
        /// The first position that is no part of what was continued.
        before: i64,
    },
}

impl Kept {
    /// What it takes of its tenant's share.
    pub(crate) fn bytes(&self) -> usize {
        self.response.get().len() + self.input.get().len() + self.output.get().len()
    }
}

/// A conversation, without its items.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Conversation {
    /// `conv_…`
    pub(crate) id: String,
    /// Unix seconds of its creation.
    pub(crate) created_s: i64,
    /// A JSON object.
    pub(crate) metadata: String,
}

/// An item of a conversation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Item {
    /// Its id; once in a conversation.
    pub(crate) id: String,
    /// The item as JSON, its id included.
    pub(crate) json: String,
}

/// An item at its place.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Placed {
    /// Its position; later ones are larger.
    pub(crate) position: i64,
    /// What is there.
    pub(crate) item: Item,
}

/// What a finished turn leaves.
#[derive(Debug, Clone, Default)]
pub(crate) struct Finished {
    /// The response and its id, where it is to be kept.
    pub(crate) response: Option<(String, Arc<Kept>)>,
    /// Items for the end of a conversation of this id.
    pub(crate) append: Option<(String, Vec<Item>)>,
}

/// Which items of a conversation are wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Span {
    /// Only items at positions below this one.
    pub(crate) before: i64,
    /// Only items at positions above this one.
    pub(crate) after: i64,
    /// At most so many.
    pub(crate) most: usize,
    /// From which end.
    pub(crate) order: Order,
}

/// The order of a list.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Order {
    /// Oldest first.
    Ascending,
    /// Newest first.
    Descending,
}

/// Why a store did not answer.
#[derive(Debug, thiserror::Error)]
#[error("store of responses: {0}")]
pub(crate) struct StoreError(pub(crate) String);

/// The result of asking a store.
pub(crate) type Stored<T> = Result<T, StoreError>;

/// Keeps responses and conversations of tenants.
#[async_trait]
pub(crate) trait ResponseStore: Send + Sync {
    /// Keeps what a turn left, all of it or nothing. A conversation that is gone takes no items.
    async fn finish(&self, tenant: &TenantId, left: Finished, now_ms: i64) -> Stored<()>;

    /// The response of this id.
    async fn response(&self, tenant: &TenantId, id: &str, now_ms: i64)
    -> Stored<Option<Arc<Kept>>>;

    /// Removes a response; says whether it was there.
    async fn remove_response(&self, tenant: &TenantId, id: &str, now_ms: i64) -> Stored<bool>;

    /// Begins a conversation.
    async fn create(
        &self,
        tenant: &TenantId,
        conversation: Conversation,
        items: Vec<Item>,
        now_ms: i64,
    ) -> Stored<()>;

    /// The conversation of this id.
    async fn conversation(
        &self,
        tenant: &TenantId,
        id: &str,
        now_ms: i64,
    ) -> Stored<Option<Conversation>>;

    /// Replaces a conversation's metadata; none if there is no such conversation.
    async fn set_metadata(
        &self,
        tenant: &TenantId,
        id: &str,
        metadata: String,
        now_ms: i64,
    ) -> Stored<Option<Conversation>>;

    /// Removes a conversation with its items; says whether it was there.
    async fn remove_conversation(&self, tenant: &TenantId, id: &str, now_ms: i64) -> Stored<bool>;

    /// Adds items at the end; none if there is no such conversation. An item whose id is there
    /// already is there already.
    async fn append(
        &self,
        tenant: &TenantId,
        id: &str,
        items: Vec<Item>,
        now_ms: i64,
    ) -> Stored<Option<()>>;

    /// Items of a conversation; none if there is no such conversation.
    async fn items(
        &self,
        tenant: &TenantId,
        id: &str,
        span: Span,
        now_ms: i64,
    ) -> Stored<Option<Vec<Placed>>>;

    /// One item of a conversation.
    async fn item(
        &self,
        tenant: &TenantId,
        id: &str,
        item: &str,
        now_ms: i64,
    ) -> Stored<Option<Placed>>;

    /// Removes an item; says whether it was there.
    async fn remove_item(
        &self,
        tenant: &TenantId,
        id: &str,
        item: &str,
        now_ms: i64,
    ) -> Stored<bool>;

    /// Forgets what is past its time to live.
    async fn expire(&self, now_ms: i64) -> Stored<()>;
}
