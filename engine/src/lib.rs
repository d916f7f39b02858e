//! The Homing inference engine: one node's worth of model, KV pool and HTTP server.

pub mod error;
pub mod kv;
pub mod model;
pub mod ops;
pub mod output;
pub mod sample;
pub mod scheduler;
pub mod sys;
