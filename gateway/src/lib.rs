//! The gateway: one address in front of a fleet of nodes.
//!
//! Read the modules in the order in which a request travels: [`config`] (what the operator
//! decided), `proxy` (the table of contents), then what it calls.

pub mod config;
pub mod secrets;
pub mod tasks;
pub mod fleet;
pub mod ledger;
pub mod store;
