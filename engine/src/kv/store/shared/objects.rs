//! What is asked of a store that nodes share?
//!
//! Batches of keys and bytes; what the store has not, or has no room for, is an answer like any other.
//! That it cannot be reached at all is the one error: whoever implements this then tries again by itself,
//! less and less often, as [`Objects::tend`] is called.

use std::time::Duration;

/// The store cannot be reached now.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the shared KV store cannot be reached: {0}")]
pub struct Away(pub String);

/// What became of an object that was to be put.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Put {
    /// It is there. If another was there under its key, that one is.
    Stored,
    /// There is no room now.
    NoRoom,
    /// The store did not take it; with the store's own number.
    Failed(i32),
}

/// What became of an object that was wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Got {
    /// So many bytes of it came.
    Found(usize),
    /// It is not there.
    Missing,
    /// It is in use in a way that forbids reading it now, or the store failed; with its own number.
    Failed(i32),
}

/// A store of immutable objects that nodes share. Calls may take as long as their deadline.
pub trait Objects: Send {
    /// Does what is due to reach the store. None if it can be asked; else when to tend to it again.
    fn tend(&mut self) -> Option<Duration>;

    /// The most objects in one call.
    fn batch(&self) -> usize;

    /// Which of these objects there are.
    fn exist(&mut self, keys: &[String]) -> Result<Vec<bool>, Away>;

    /// Puts objects under keys that have none.
    fn put(&mut self, objects: &[(&str, &[u8])]) -> Result<Vec<Put>, Away>;

    /// Brings objects; each into a buffer of its own, which must be as long as it.
    fn get(&mut self, wanted: &mut [(&str, &mut [u8])]) -> Result<Vec<Got>, Away>;

    /// Removes an object that is not what it should be, if that is possible.
    fn remove(&mut self, key: &str) -> Result<(), Away>;
}
