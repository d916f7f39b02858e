//! How does Homing behave under agents' load, and beside its peers?
//!
//! In reading order: [`http`] and [`sse`] speak to a server, [`chat`] is one turn and its times,
//! [`workload`] invents the conversations, [`agent`] runs them in open loop, [`measure`] and
//! [`report`] say what came out. [`echo_node`] is a node that computes nothing to stand behind a proxy, [`scripted_node`] one that
//! uses tools, both on `node_http`,
//! [`http_bench`], [`gateway_bench`], [`engine_bench`], [`fairness_bench`], [`constrain_bench`] and
//! [`disaggregation_bench`] are the figures of docs/MEASUREMENTS.md, [`answers`] says how many tokens of answers a next turn
//! would lose, [`soak`] asks for everything at once, [`simulate`] plays traces on a virtual clock,
//! [`clients`] drives other people's clients through the gateway, [`vllm_check`] asks a real vLLM what
//! it had cached, [`random_model`]
//! makes a file of a useful size to measure on, [`process`] starts and watches the programs that they compare.

pub mod agent;
pub mod answers;
pub mod chat;
pub mod clients;
pub mod constrain_bench;
pub mod disaggregation_bench;
pub mod echo_node;
pub mod engine_bench;
pub mod error;
pub mod fairness_bench;
pub mod gateway_bench;
pub mod http;
pub mod http_bench;
pub mod measure;
pub mod node;
mod node_http;
pub mod policy;
pub mod process;
pub mod random_model;
pub mod report;
pub mod routing_bench;
pub mod scripted_node;
pub mod simulate;
pub mod soak;
pub mod sse;
pub mod vllm_check;
pub mod workload;
