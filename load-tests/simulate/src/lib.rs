//! How would a fleet fare under this policy? Traces, modelled nodes and routing policies on a
//! virtual clock.
//!
//! [`engine`] models a node (queue, prefill, decode, KV pool) on a clock that its caller moves;
//! [`router`] is what a policy sees and answers. The product's own router is made of the real
//! `policies` and `cache-index`; the others are baselines. Pure: no IO but what a caller passes
//! in, no clock, no threads.
//!
//! A run: a [`trace`] and a [`scenario`] give the requests ([`load`]), [`fleet`] plays them under
//! a policy ([`baselines`], the product's own, or one [`outside`] of this program), [`figures`]
//! sums up. [`conversations`] plays known conversations in place of a trace.

mod agenda;
pub mod baselines;
pub mod compare;
pub mod conversations;
pub mod engine;
pub mod figures;
pub mod fleet;
pub mod homing;
mod ideal;
pub mod load;
pub mod outside;
pub mod policy;
pub mod random;
pub mod report;
pub mod router;
pub mod scenario;
pub mod scenarios;
pub mod trace;
