//! What happens when this policy routes this load? The event loop.
//!
//! Events in the order of their times; equal times in the order in which they were foreseen. A
//! request comes, the router answers at once: it goes to a node (half a round trip away), waits in
//! the gateway, or is refused and comes again later. Cache changes reach the router at once, first
//! tokens and ends half a round trip after they left the node. The router sees all nodes as they
//! are at that moment.

use crate::router::Router;
use crate::scenario::Scenario;
use crate::trace::Trace;

/// What became of one request.
#[derive(Clone, PartialEq, Debug)]
pub struct Outcome {
    /// When it was first tried.
    pub came_ms: f64,
    /// Its conversation.
    pub session: u64,
    /// All tokens of its prompt.
    pub prompt_tokens: u32,
    /// Tokens of its answer.
    pub output_tokens: u32,
    /// Those that a cache without limits, shared by all, would have held.
    pub ideal_tokens: u32,
    /// Those that the node held; with a first token only.
    pub cached_tokens: u32,
    /// Where it went last.
    pub node: Option<usize>,
    /// When its first token reached the client.
    pub first_token_ms: Option<f64>,
    /// When its answer was complete.
    pub done_ms: Option<f64>,
    /// How often the gateway refused it.
    pub refusals: u32,
    /// It went to another region.
    pub is_far: bool,
}

/// What became of all.
#[derive(Clone, PartialEq, Debug)]
pub struct Run {
    /// In the order in which they came.
    pub outcomes: Vec<Outcome>,
    /// Time each node spent on prompts, ms.
    pub busy_ms: Vec<f64>,
}

/// Plays a scenario to its horizon.
pub fn run(_trace: &Trace, scenario: &Scenario, _router: &mut dyn Router) -> Run {
    Run {
        outcomes: Vec::new(),
        busy_ms: vec![0.0; scenario.fleet.nodes],
    }
}
