//! What do other routers do? Their rules, each after its source, driven like the product's own.
//!
//! An honest rule keeps its own accounts from what it is told: what it sent where, what has
//! answered, which blocks a node says it holds. [`oracle`] alone looks into the nodes.

mod accounts;
pub mod cache_aware;
mod choice;
pub mod dynamo;
pub mod llm_d;
pub mod load_only;
pub mod oracle;
pub mod sticky;

pub use choice::{Ring, Ties};
