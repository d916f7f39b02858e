//! The request path judged from outside: what the client reads, what the node received, the
//! metrics and the ledger, with the real `homing gateway` between raw sockets.
#![expect(clippy::unwrap_used, reason = "tests")]

mod bad_input;
mod cancel;
mod identity;
mod retry;
mod shutdown;
mod streams;
mod support;
