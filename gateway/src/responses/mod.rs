//! What does the gateway remember of responses, and how does a turn continue one?
//!
//! A turn begins with [`Responses::begin`]: what it continues is found, an unknown id is refused,
//! and a conversation is held, so that two turns never write into one at once. It ends with
//! [`Responses::keep`], before its client can read that it ended. What lies between the two is a
//! [`Keeping`], whose drop gives back what was held.
//!
//! Read next: [`store`] (what is promised), [`sqlite`] (how it is kept), `objects` and
//! `conversations` (the endpoints), `running` (cancelling), `socket` (many turns on a connection).

mod conversations;
mod frames;
mod history;
mod ids;
mod local;
mod objects;
mod page;
mod recent;
mod rows;
mod running;
pub(crate) mod socket;
mod sqlite;
mod store;
#[cfg(test)]
mod tests;
mod worker;

use std::collections::HashSet;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use dialects::answer::{Continues, End, Stored as Answered, Translation, Usage};
use dialects::error::{ApiError, Code, ErrorKind};
use dialects::responses::Request;
use serde_json::Value;
use serde_json::value::to_raw_value;

pub(crate) use local::Local;
pub(crate) use objects::{Resource, serve};
pub(crate) use running::Cancelled;

use crate::config::{Config, ResponsesConfig};
use crate::ledger::unix_ms;
use crate::session::SessionId;
use crate::store::TenantId;
use crate::tasks::{Phase, Tasks};
use running::{Running, Turn};
use sqlite::{Bounds, Sqlite};
use store::{Finished, Kept, KeptSession, Link, ResponseStore, StoreError};

/// How often what is past its time is removed. It is not shown before that either.
const EXPIRE_EVERY: Duration = Duration::from_secs(60);

/// The memory of all tenants' responses.
pub(crate) struct Responses {
    store: Arc<dyn ResponseStore>,
    sqlite: Arc<Sqlite>,
    /// Bytes of JSON that a turn may continue: what a client may send is also what it may mean.
    history_bytes_max: usize,
    /// Conversations in use, by tenant and id.
    held: Arc<Mutex<HashSet<(TenantId, String)>>>,
    running: Running,
}

/// What a turn continues.
#[derive(Default)]
pub(crate) struct Earlier {
    /// Inputs and outputs of earlier turns in their order.
    pub(crate) items: Vec<Value>,
    /// How long they are as JSON.
    pub(crate) bytes: usize,
    /// The session of the chain.
    pub(crate) session: Option<SessionId>,
}

/// Whether a turn's response is to be kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Keep {
    /// `store` is true or not said.
    Yes,
    /// `store` is false.
    No,
}

/// A turn on its way from [`Responses::begin`] to [`Responses::keep`].
pub(crate) struct Keeping {
    tenant: TenantId,
    keep: Keep,
    continues: Option<Link>,
    /// Where the response is remembered that is not to be kept.
    local: Option<Arc<Local>>,
    /// Its place among the turns that can be cancelled.
    turn: Turn,
    /// Its conversation, until the response is kept: a client that has read the end may continue.
    held: Mutex<Option<Held>>,
}

/// A conversation in use by one turn.
struct Held {
    all: Arc<Mutex<HashSet<(TenantId, String)>>>,
    key: (TenantId, String),
}

impl Drop for Held {
    fn drop(&mut self) {
        let mut all = self.all.lock().unwrap_or_else(PoisonError::into_inner);
        all.remove(&self.key);
    }
}

impl Responses {
    /// Opens the memory in the data directory.
    pub(crate) fn open(config: &Config) -> Result<Self, StoreError> {
        let ResponsesConfig {
            ttl,
            rows_per_tenant,
            bytes_per_tenant,
        } = config.responses;
        let bounds = Bounds {
            ttl_ms: i64::try_from(ttl.as_millis()).unwrap_or(i64::MAX),
            rows_per_tenant: i64::try_from(rows_per_tenant).unwrap_or(i64::MAX),
            bytes_per_tenant: i64::try_from(bytes_per_tenant).unwrap_or(i64::MAX),
        };
        let sqlite = Arc::new(Sqlite::open(&config.data, bounds)?);
        let store: Arc<dyn ResponseStore> = Arc::clone(&sqlite) as _;
        Ok(Self {
            store,
            sqlite,
            history_bytes_max: config.limits.body_bytes_max,
            held: Arc::default(),
            running: Running::default(),
        })
    }

    /// Removes what is past its time, until the process stops.
    pub(crate) fn watch(&self, tasks: &Tasks) {
        let (store, drain) = (Arc::clone(&self.store), tasks.drain());
        tasks.spawn("responses-expiry", async move {
            loop {
                if let Err(error) = store.expire(unix_ms()).await {
                    tracing::error!(%error, "old responses were not removed");
                }
                let stopping = drain.reached(Phase::Stopping);
                if tokio::time::timeout(EXPIRE_EVERY, stopping).await.is_ok() {
                    return;
                }
            }
        });
    }

    /// Closes the store; what was asked for is done first.
    pub(crate) fn close(&self) {
        self.sqlite.close();
    }

    /// A turn of this tenant begins, under the id that its response will have.
    pub(crate) async fn begin(
        &self,
        tenant: &TenantId,
        id: &str,
        (request, local): (&mut Request<'_>, Option<&Arc<Local>>),
    ) -> Result<(Keeping, Earlier), ApiError> {
        let keep = match request.stores() {
            true => Keep::Yes,
            false => Keep::No,
        };
        let continues = request.continues();
        if local.is_some() || matches!(continues, Some(Continues::Conversation(_))) {
            // A connection and a conversation take what is not kept itself.
            request.keep();
        }
        let mut keeping = Keeping {
            tenant: tenant.clone(),
            keep,
            continues: None,
            local: local.cloned(),
            turn: self.running.begin(tenant, id),
            held: Mutex::default(),
        };
        let earlier = match &continues {
            None => Earlier::default(),
            Some(Continues::Response(previous)) => {
                ids::check("previous_response_id", previous, "resp")?;
                keeping.continues = Some(Link::Response(previous.clone()));
                self.chain(tenant, previous, local).await?
            }
            Some(Continues::Conversation(conversation)) => {
                ids::check("conversation", conversation, "conv")?;
                keeping.held = Mutex::new(Some(self.hold(tenant, conversation)?));
                let (earlier, before) = self.conversation(tenant, conversation, i64::MAX).await?;
                keeping.continues = Some(Link::Conversation {
                    id: conversation.clone(),
                    before,
                });
                earlier
            }
        };
        let references = request.references();
        if !references.is_empty() {
            request.resolve(&self.items_of(tenant, &references, local).await?);
        }
        Ok((keeping, earlier))
    }

    /// The turn's answer is complete: it is kept when this returns. A failure costs the client its
    /// next turn's memory, not this turn's answer, so it is logged and nothing more.
    pub(crate) async fn keep(&self, keeping: &Keeping, session: &SessionId, answered: Answered) {
        let held = keeping.held.lock();
        let _held = held.unwrap_or_else(PoisonError::into_inner).take();
        // One that was complete before it could be cancelled is answered from the store.
        if keeping.is_cancelled() && answered.response["status"] == "cancelled" {
            keeping.turn.end(&answered.response);
        }
        let now_ms = unix_ms();
        let id = answered.id.clone();
        let append = match &keeping.continues {
            Some(Link::Conversation { id, .. }) => {
                let items = answered.input.iter().chain(&answered.output);
                Some((id.clone(), items.map(ids::item).collect()))
            }
            _ => None,
        };
        let kept = match (keeping.keep, &keeping.local) {
            (Keep::No, None) => None,
            _ => kept(keeping, session, answered, now_ms).map(Arc::new),
        };
        let response = match (keeping.keep, &keeping.local, kept) {
            (Keep::Yes, _, Some(kept)) => Some((id.clone(), kept)),
            (Keep::No, Some(local), Some(kept)) => {
                local.insert(id.clone(), kept);
                None
            }
            _ => None,
        };
        let left = Finished { response, append };
        if left.response.is_none() && left.append.is_none() {
            return;
        }
        if let Err(error) = self.store.finish(&keeping.tenant, left, now_ms).await {
            tracing::error!(%error, response = id, "a response was not kept");
        }
    }

    /// Keeps a response without output, for a turn that only prepares the next one; returns the
    /// events of its stream.
    pub(crate) async fn prepare(
        &self,
        keeping: &Keeping,
        session: &SessionId,
        translation: &dyn Translation,
    ) -> Vec<u8> {
        let mut translation = translation.fresh();
        let mut events = Vec::new();
        translation.begin(Usage::default());
        translation.end(&End::default(), &mut events);
        if let Some(stored) = translation.stored() {
            self.keep(keeping, session, stored).await;
        }
        events
    }

    /// Room for what one connection remembers by itself.
    pub(crate) fn local(&self) -> Local {
        Local::new(self.history_bytes_max)
    }

    /// The right to write into a conversation.
    fn hold(&self, tenant: &TenantId, id: &str) -> Result<Held, ApiError> {
        let key = (tenant.clone(), id.to_owned());
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        if !held.insert(key.clone()) {
            return Err(ApiError::param(
                ErrorKind::Refused(Code::ConversationLocked),
                "conversation",
                "Another response is being made in this conversation. Try again once it is done.",
            ));
        }
        Ok(Held {
            all: Arc::clone(&self.held),
            key,
        })
    }
}

impl Keeping {
    /// Resolves when somebody asks to cancel the turn.
    pub(crate) fn cancelled(&self) -> Cancelled {
        self.turn.cancelled()
    }

    /// Whether somebody has asked to cancel it.
    pub(crate) fn is_cancelled(&self) -> bool {
        self.turn.is_cancelled()
    }
}

/// What is kept of an answer.
fn kept(keeping: &Keeping, session: &SessionId, answered: Answered, now_ms: i64) -> Option<Kept> {
    let Answered {
        id: _,
        mut response,
        input,
        output,
        continues: _,
    } = answered;
    if let Some(said) = response.get_mut("output")
        && said.as_array() == Some(&output)
    {
        *said = Value::Null;
    }
    Some(Kept {
        t_ms: now_ms,
        continues: keeping.continues.clone(),
        session: KeptSession {
            key: format!("{:032x}", session.key.0),
            text: session.text.clone(),
        },
        response: to_raw_value(&response).ok()?,
        input: to_raw_value(&input).ok()?,
        output: to_raw_value(&output).ok()?,
    })
}

/// The store does not answer.
fn unavailable(error: StoreError) -> ApiError {
    let message = "Stored responses cannot be read right now. Try again in a moment.";
    ApiError::new(ErrorKind::StoreUnavailable, message).because(error)
}

/// What was stored is not what it was.
fn unreadable(error: serde_json::Error) -> ApiError {
    let message = "A stored response could not be read.";
    ApiError::new(ErrorKind::Internal, message).because(error)
}
