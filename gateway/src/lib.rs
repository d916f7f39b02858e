//! The gateway: one address in front of a fleet of nodes.
//!
//! Read the modules in the order in which a request travels: [`config`] (what the operator
//! decided), [`proxy`] (the table of contents), `turn` (the steps of a turn), then what it calls:
//! `identify`, `read`, [`dialects`], `aliases`, `session`, `admit`, [`prompt`], `route`, `upstream`, `relay`,
//! `recover`, `pair` (a turn that two nodes share), `settle`, `respond`. Beside that path: [`store`] (tenants and keys), `responses` (what
//! turns leave for later ones, and many turns on one connection), [`ledger`] (usage records), [`fleet`] (nodes, their health, load and cache), [`metrics`], [`secrets`] and
//! [`tasks`] (the only place that spawns). Around it all: [`cli`], [`serve`] (start and shutdown of
//! one gateway), [`up`] (a gateway with its own nodes), [`report`] and [`admin`].

pub mod admin;
pub mod cli;
pub mod config;
pub mod fleet;
mod hold;
pub mod ledger;
pub mod metrics;
pub mod prompt;
pub mod proxy;
pub mod report;
pub mod secrets;
pub mod serve;
pub mod signals;
pub mod store;
pub mod tasks;
pub mod up;

mod admit;
mod aliases;
mod ctx;
#[cfg(test)]
mod decision_tests;
mod decisions;
mod endpoint;
mod identify;
mod models;
mod pair;
mod query;
mod read;
mod recover;
mod relay;
mod respond;
mod responses;
mod route;
mod session;
mod settle;
mod tokens;
mod turn;
mod upstream;
