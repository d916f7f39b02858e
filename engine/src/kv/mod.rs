//! The KV pool: which block holds what, and where its values lie.
//!
//! [`pool`] owns the blocks and decides who keeps one and who loses one; [`prefix`] finds computed
//! blocks again by their hash; [`table`] is one sequence's view: its blocks in order. [`storage`]
//! is the memory behind the ids, [`layout`] how a block looks outside it, [`store`] where blocks go
//! that the pool has no room for. Prefix caching is the pool itself: a full block stays where it
//! was computed and is shared by reference; it is copied only when it leaves the pool, and back.

pub mod layout;
pub mod pool;
pub mod prefix;
pub mod storage;
pub mod store;
pub mod table;
pub mod transfer;
