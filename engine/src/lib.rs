//! The Homing inference engine: one node's worth of model, KV pool and HTTP server.

pub mod cli;
pub mod engine;
pub mod error;
pub mod events;
pub mod hub;
pub mod kv;
pub mod metrics;
pub mod model;
pub mod ops;
pub mod output;
pub mod parallel;
pub mod progress;
pub mod request;
pub mod sample;
pub mod scheduler;
pub mod serve;
pub mod server;
pub mod sys;
