//! Who used what, and what does it cost? (skeleton)
use std::path::Path;
use std::sync::Arc;

pub mod record;
pub use record::{Status, UsageRecord};

/// Why the ledger could not take a request or a record.
#[derive(Debug, thiserror::Error)]
#[error("ledger")]
pub struct LedgerError;

/// The journal of usage records.
pub struct Ledger;

impl Ledger {
    /// Opens and recovers the journal under `data`. `prices` rates records that recovery has to cut.
    pub fn open(_data: &Path) -> Result<Arc<Ledger>, LedgerError> {
        unimplemented!()
    }
    /// Writes the opening of a request and reserves room for its settlement.
    pub fn begin(&self, _opening: &UsageRecord) -> Result<OpenEntry, LedgerError> {
        unimplemented!()
    }
}

/// An opened request that is to be settled.
#[must_use]
pub struct OpenEntry;

impl OpenEntry {
    /// Totals so far; call it at every relayed chunk: it decides itself when to write.
    pub fn checkpoint(&mut self, _input: u64, _cached: u64, _output: u64) {
        unimplemented!()
    }
    /// Writes the final record; it is with the kernel when this returns.
    pub fn settle(self, _record: UsageRecord) -> Result<(), LedgerError> {
        unimplemented!()
    }
}
