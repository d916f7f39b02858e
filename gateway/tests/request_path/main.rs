//! The request path judged from outside: what the client reads, what the node received, the
//! metrics and the ledger, with the real `homing gateway` between raw sockets.
#![expect(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a test ends where it finds a fault"
)]

mod aliases;
mod answers;
mod bad_input;
mod cache;
mod cancel;
mod detail;
mod dialects;
mod embeddings;
mod encoding;
mod explain;
mod full_disk;
mod held;
mod identity;
mod kept;
mod pair;
mod retention;
mod retry;
mod sessions;
mod shutdown;
mod socket;
mod stored;
mod streams;
mod structure;
mod support;
mod tokens;
