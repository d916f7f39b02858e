//! What the operating system gives: mapped files, shared memory and threads.
//!
//! One of the two places in the engine where `unsafe` may appear (the other is `ops`).

pub mod disjoint;
pub mod mmap;
pub mod pool;
pub mod shared;
pub mod stored;
