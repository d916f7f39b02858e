//! Which turns run, and how is one cancelled by another request?
//!
//! States of a turn: runs → asked to cancel → ended; or runs → ended. Whoever asks waits for the
//! end, and answers with the response as it was then. A turn that is dropped has ended.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use serde_json::Value;
use tokio::sync::watch;

use crate::store::TenantId;

type Key = (TenantId, String);

/// The turns that run, by tenant and the id of their response.
#[derive(Clone, Default)]
pub(super) struct Running(Arc<Mutex<HashMap<Key, watch::Sender<State>>>>);

#[derive(Debug, Clone, PartialEq)]
enum State {
    Runs,
    Asked,
    Ended(Option<Arc<str>>),
}

/// One turn's place among them.
pub(super) struct Turn {
    running: Running,
    key: Key,
    state: watch::Sender<State>,
}

/// Resolves when a turn is asked to cancel.
pub(crate) struct Cancelled(watch::Receiver<State>);

impl Cancelled {
    /// Waits for it; forever, if the turn ends in another way.
    pub(crate) async fn asked(mut self) {
        let is_asked = |state: &State| *state == State::Asked;
        if self.0.wait_for(is_asked).await.is_err() {
            std::future::pending::<()>().await;
        }
    }
}

impl Running {
    pub(super) fn begin(&self, tenant: &TenantId, id: &str) -> Turn {
        let (state, _) = watch::channel(State::Runs);
        let key = (tenant.clone(), id.to_owned());
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.insert(key.clone(), state.clone());
        Turn {
            running: self.clone(),
            key,
            state,
        }
    }

    /// Asks a turn to cancel and waits for its end: the response as it was then, or none if it
    /// ended otherwise. The outer none: no such turn runs.
    pub(super) async fn cancel(&self, tenant: &TenantId, id: &str) -> Option<Option<Arc<str>>> {
        let state = {
            let all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            all.get(&(tenant.clone(), id.to_owned()))?.clone()
        };
        state.send_if_modified(|state| {
            let runs = *state == State::Runs;
            if runs {
                *state = State::Asked;
            }
            runs
        });
        let mut end = state.subscribe();
        // Not held while waiting: the turn's own drop ends it.
        drop(state);
        let ended = end.wait_for(|state| matches!(state, State::Ended(_))).await;
        match ended.as_deref() {
            Ok(State::Ended(response)) => Some(response.clone()),
            _ => Some(None),
        }
    }
}

impl Turn {
    pub(super) fn cancelled(&self) -> Cancelled {
        Cancelled(self.state.subscribe())
    }

    pub(super) fn is_cancelled(&self) -> bool {
        *self.state.borrow() != State::Runs
    }

    /// The turn has ended, with this response.
    pub(super) fn end(&self, response: &Value) {
        self.state
            .send_replace(State::Ended(Some(response.to_string().into())));
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let mut all = self
            .running
            .0
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        all.remove(&self.key);
        drop(all);
        self.state.send_if_modified(|state| {
            let open = !matches!(state, State::Ended(_));
            if open {
                *state = State::Ended(None);
            }
            open
        });
    }
}
