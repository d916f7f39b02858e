//! Where does this turn go, may it run at all, what happens when a node fails, and what does it
//! cost?
//!
//! Every answer is a pure function of a snapshot: no IO, no clock, no threads; `now` and random
//! numbers are arguments. A decision reserves nothing; the caller carries it out, and every
//! decision can explain itself. In the order in which a turn meets them: [`admission`] (may the
//! tenant run one more?), [`eligible`] (which nodes can take it?), [`cost`] and [`affinity`]
//! (what does each of them cost in milliseconds?), [`pick`] (the choice), [`breaker`] and
//! [`retry`] (when a node fails), [`price`] (the bill).
//! Left out on purpose: who measures rates and counts tokens in flight (the gateway does), and
//! anything shared between gateways.

pub mod admission;
pub mod affinity;
pub mod breaker;
pub mod cost;
pub mod eligible;
pub mod hold;
pub mod load;
pub mod output;
pub mod pick;
pub mod price;
pub mod retry;
pub mod sample;
#[cfg(test)]
mod test_views;
pub mod transfer;
pub mod view;
pub mod working_set;
