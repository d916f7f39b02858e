//! How does Homing behave under agents' load, and beside its peers?
//!
//! In reading order: [`http`] and [`sse`] speak to a server, [`chat`] is one turn and its times,
//! [`workload`] invents the conversations, [`agent`] runs them in open loop, [`measure`] and
//! [`report`] say what came out. [`echo_node`] is a scripted node to stand behind a proxy,
//! [`http_bench`], [`gateway_bench`] and [`engine_bench`] are the figures of docs/MEASUREMENTS.md,
//! [`process`] starts and watches the programs that they compare.

pub mod agent;
pub mod chat;
pub mod echo_node;
pub mod engine_bench;
pub mod error;
pub mod gateway_bench;
pub mod http;
pub mod http_bench;
pub mod measure;
pub mod process;
pub mod report;
pub mod sse;
pub mod workload;
