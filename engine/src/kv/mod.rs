//! The KV pool: which block holds what, and where its values lie.

pub mod storage;
