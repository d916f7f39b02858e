//! The engine's binary from outside: over HTTP, over ZMQ, by signals and by its exit code.
//!
//! One test program, so that the big binary is linked once and most tests share one running node.
//! They run in parallel and so may not assume that the shared node is idle; those that must start
//! a node of their own.

#![expect(clippy::panic, reason = "a helper of a test fails the test")]

mod api;
mod bad_input;
mod checkpoint;
mod choices;
mod clients;
mod common;
mod events;
#[path = "../folder/mod.rs"]
mod folder;
mod forms;
#[path = "../mooncake_twin/mod.rs"]
mod mooncake_twin;
mod other;
mod process;
mod shared;
mod tiers;
mod tools;
mod transfer;
