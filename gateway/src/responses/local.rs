//! What does one connection remember that nobody is to keep?
//!
//! Over a WebSocket, a turn may continue an earlier one of the same connection although that was
//! not to be stored. Such responses live here until the connection ends, the oldest first to go
//! where they outgrow the bound.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};

use super::store::Kept;

/// Responses of one connection.
pub(crate) struct Local {
    bytes_max: usize,
    kept: Mutex<VecDeque<(String, Arc<Kept>)>>,
}

impl Local {
    /// Room for so many bytes.
    pub(super) fn new(bytes_max: usize) -> Self {
        Self {
            bytes_max,
            kept: Mutex::default(),
        }
    }

    pub(super) fn get(&self, id: &str) -> Option<Arc<Kept>> {
        let all = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        // A turn nearly always continues the last one.
        let mut newest_first = all.iter().rev();
        let found = newest_first.find(|(known, _)| known == id);
        found.map(|(_, kept)| Arc::clone(kept))
    }

    pub(super) fn insert(&self, id: String, kept: Arc<Kept>) {
        let mut all = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        all.push_back((id, kept));
        let mut bytes: usize = all.iter().map(|(_, kept)| kept.bytes()).sum();
        while bytes > self.bytes_max
            && let Some((_, oldest)) = all.pop_front()
        {
            bytes -= oldest.bytes();
        }
    }
}
