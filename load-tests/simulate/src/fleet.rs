//! What happens when this policy routes this load? The event loop.
//!
//! A request comes, the router answers at once: it goes to a node (half a round trip away), waits in
//! the gateway, or is refused and comes again later. Cache changes reach the router at once, first
//! tokens and ends half a round trip after they left the node, and so do the client. The router
//! sees all nodes as they are at that moment.

#[cfg(test)]
mod tests;

use std::collections::HashSet;
use std::sync::Arc;

use crate::agenda::Agenda;
use crate::engine::{Happened, Job, Node, Part};
use crate::ideal::Ideal;
use crate::load::{Arrivals, Coming};
use crate::router::{Answer, Ask, Change, Router};
use crate::scenario::Scenario;
use crate::trace::Trace;

/// A router that asks to be woken at once, again and again, is woken this often.
const WAKE_MS_MIN: f64 = 1.0;
/// A refused client comes again this much later at the least.
const RETRY_MS_MIN: f64 = 1.0;

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
    /// Those that the node did not compute; 0 without a first token.
    pub cached_tokens: u32,
    /// Of these, the ones that it fetched from a slower tier.
    pub fetched_tokens: u32,
    /// Where it was sent: the node that answers.
    pub node: Option<usize>,
    /// The node that computes its prompt for that one.
    pub prefill_node: Option<usize>,
    /// When its first token reached the client.
    pub first_token_ms: Option<f64>,
    /// When its answer was complete.
    pub done_ms: Option<f64>,
    /// How often the gateway refused it.
    pub refusals: u32,
    /// It was sent to another region.
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
pub fn run(trace: &Trace, scenario: &Scenario, router: &mut dyn Router) -> Run {
    let mut play = Play::new(trace, scenario);
    while let Some(what) = play.agenda.next_until(scenario.horizon_ms) {
        play.handle(what, router);
        play.release(router);
    }
    play.end()
}

#[derive(Clone, Copy, PartialEq, Debug)]
enum What {
    Comes(Coming),
    ComesAgain(u32),
    ReachesNode(u32),
    KvArrives(u32),
    NodeIsDue { node: usize, version: u64 },
    FirstTokenSeen { id: u32, cached_tokens: u32 },
    EndSeen(u32),
    Wake,
}

/// What the loop needs of a request beside its outcome.
struct Live {
    coming: Coming,
    region: usize,
    blocks: Arc<[u32]>,
}

struct Play<'a> {
    scenario: &'a Scenario,
    trace: &'a Trace,
    arrivals: Arrivals<'a>,
    ideal: Ideal,
    nodes: Vec<Node>,
    /// A node's foreseen event counts only while nothing else has happened to the node.
    versions: Vec<u64>,
    agenda: Agenda<What>,
    live: Vec<Live>,
    outcomes: Vec<Outcome>,
    held: HashSet<u32>,
    next_wake_ms: f64,
}

impl<'a> Play<'a> {
    fn new(trace: &'a Trace, scenario: &'a Scenario) -> Self {
        let (arrivals, coming) = Arrivals::new(trace, scenario);
        let mut play = Self {
            scenario,
            trace,
            arrivals,
            ideal: Ideal::default(),
            nodes: scenario.fleet.build(),
            versions: vec![0; scenario.fleet.nodes],
            agenda: Agenda::default(),
            live: Vec::new(),
            outcomes: Vec::new(),
            held: HashSet::new(),
            next_wake_ms: f64::INFINITY,
        };
        for coming in coming {
            play.agenda.foresee(coming.at_ms, What::Comes(coming));
        }
        play
    }

    fn handle(&mut self, what: What, router: &mut dyn Router) {
        match what {
            What::Comes(coming) => {
                let id = self.receive(coming);
                self.route(id, router);
            }
            What::ComesAgain(id) => self.route(id, router),
            What::ReachesNode(id) => self.enqueue(id, router),
            What::KvArrives(id) => {
                if let Some(node) = self.outcomes[id as usize].node {
                    self.give(id, node, Part::Answer, router);
                }
            }
            What::NodeIsDue { node, version } if self.versions[node] == version => {
                self.advance(node, router);
            }
            What::NodeIsDue { .. } => {}
            What::FirstTokenSeen { id, cached_tokens } => {
                if let Some(node) = self.outcomes[id as usize].node {
                    router.first_token(self.agenda.now_ms(), id, node, cached_tokens);
                }
            }
            What::EndSeen(id) => self.end_seen(id, router),
            What::Wake => self.next_wake_ms = f64::INFINITY,
        }
    }

    fn receive(&mut self, coming: Coming) -> u32 {
        let request = &self.trace.requests[coming.request as usize];
        let blocks = self.arrivals.path(coming.request, coming.play);
        let ideal = self
            .ideal
            .overlap_then_add(&blocks, self.arrivals.blocks_end());
        let params = &self.scenario.fleet.params;
        self.outcomes.push(Outcome {
            came_ms: self.agenda.now_ms(),
            session: u64::from(coming.play),
            prompt_tokens: request.prompt_tokens,
            output_tokens: request.output_tokens,
            ideal_tokens: params.cached_tokens(ideal, request.prompt_tokens),
            cached_tokens: 0,
            fetched_tokens: 0,
            node: None,
            prefill_node: None,
            first_token_ms: None,
            done_ms: None,
            refusals: 0,
            is_far: false,
        });
        self.live.push(Live {
            coming,
            region: self.arrivals.region(coming.request, coming.play),
            blocks,
        });
        self.live.len() as u32 - 1
    }

    fn route(&mut self, id: u32, router: &mut dyn Router) {
        self.settle();
        let (outcome, live) = (&self.outcomes[id as usize], &self.live[id as usize]);
        let ask = Ask {
            id,
            session: outcome.session,
            region: live.region,
            prompt_tokens: outcome.prompt_tokens,
            output_tokens: outcome.output_tokens,
            blocks: &live.blocks,
        };
        let answer = router.route(self.agenda.now_ms(), &ask, &self.nodes);
        self.carry_out(id, answer, router);
    }

    /// Brings the view of every node up to now.
    fn settle(&mut self) {
        for node in &mut self.nodes {
            node.settle(self.agenda.now_ms());
        }
    }

    fn carry_out(&mut self, id: u32, answer: Answer, router: &mut dyn Router) {
        match answer {
            Answer::Hold => {
                self.held.insert(id);
            }
            Answer::Refuse { retry_after_ms } => {
                self.outcomes[id as usize].refusals += 1;
                let again_ms = self.agenda.now_ms() + retry_after_ms.max(RETRY_MS_MIN);
                self.agenda.foresee(again_ms, What::ComesAgain(id));
            }
            Answer::Pair { prefill, decode } => {
                self.outcomes[id as usize].prefill_node = Some(prefill);
                self.carry_out(id, Answer::Send(decode), router);
            }
            Answer::Send(node) => {
                let outcome = &mut self.outcomes[id as usize];
                outcome.node = Some(node);
                outcome.is_far = self.live[id as usize].region != self.nodes[node].region();
                let half_ms = self.half_round_trip_ms(id);
                if half_ms > 0.0 {
                    self.agenda
                        .foresee(self.agenda.now_ms() + half_ms, What::ReachesNode(id));
                } else {
                    self.enqueue(id, router);
                }
            }
        }
    }

    fn half_round_trip_ms(&self, id: u32) -> f64 {
        let from = self.live[id as usize].region;
        self.outcomes[id as usize].node.map_or(0.0, |node| {
            let to = self.nodes[node].region();
            self.scenario.fleet.round_trip_ms(from, to) / 2.0
        })
    }

    fn enqueue(&mut self, id: u32, router: &mut dyn Router) {
        let outcome = &self.outcomes[id as usize];
        match (outcome.prefill_node, outcome.node) {
            (Some(node), _) => self.give(id, node, Part::Prompt, router),
            (None, Some(node)) => self.give(id, node, Part::Whole, router),
            (None, None) => {}
        }
    }

    /// A node gets its part of a request.
    fn give(&mut self, id: u32, node: usize, part: Part, router: &mut dyn Router) {
        let outcome = &self.outcomes[id as usize];
        let job = Job {
            id,
            blocks: self.live[id as usize].blocks.clone(),
            prompt_tokens: outcome.prompt_tokens,
            output_tokens: outcome.output_tokens,
            part,
        };
        self.nodes[node].enqueue(self.agenda.now_ms(), job);
        self.advance(node, router);
    }

    /// Lets a node act up to now, passes on what it did and foresees what it will do.
    fn advance(&mut self, node: usize, router: &mut dyn Router) {
        for happened in self.nodes[node].advance(self.agenda.now_ms()) {
            self.pass_on(node, happened, router);
        }
        self.versions[node] += 1;
        if let Some(due_ms) = self.nodes[node].next_ms() {
            let version = self.versions[node];
            self.agenda
                .foresee(due_ms, What::NodeIsDue { node, version });
        }
    }

    fn pass_on(&mut self, node: usize, happened: Happened, router: &mut dyn Router) {
        if let Some((at_ms, change)) = Change::of(&happened) {
            router.changed(at_ms, node, &change);
        }
        match happened {
            Happened::Stored { .. } | Happened::Removed { .. } => {}
            Happened::FirstToken {
                at_ms,
                id,
                cached_tokens,
                fetched_tokens,
            } => {
                let seen_ms = at_ms + self.half_round_trip_ms(id);
                let outcome = &mut self.outcomes[id as usize];
                outcome.first_token_ms = Some(seen_ms);
                if outcome.prefill_node.is_none() {
                    outcome.cached_tokens = cached_tokens;
                    outcome.fetched_tokens = fetched_tokens;
                }
                let cached_tokens = outcome.cached_tokens;
                let what = What::FirstTokenSeen { id, cached_tokens };
                self.at(seen_ms, what, router);
            }
            Happened::Computed {
                at_ms,
                id,
                cached_tokens,
                fetched_tokens,
                took_ms,
            } => {
                let outcome = &mut self.outcomes[id as usize];
                outcome.cached_tokens = cached_tokens;
                outcome.fetched_tokens = fetched_tokens;
                router.computed(at_ms, id, node);
                let tail_ms = self.handover_left_ms(id, took_ms);
                self.at(at_ms + tail_ms, What::KvArrives(id), router);
            }
            Happened::Finished { at_ms, id, .. } => {
                let seen_ms = at_ms + self.half_round_trip_ms(id);
                self.outcomes[id as usize].done_ms = Some(seen_ms);
                self.at(seen_ms, What::EndSeen(id), router);
            }
        }
    }

    /// What is left of a handover when the prompt is computed.
    fn handover_left_ms(&self, id: u32, took_ms: f64) -> f64 {
        let outcome = &self.outcomes[id as usize];
        let fleet = &self.scenario.fleet;
        let held = outcome.node.map_or(0, |node| {
            let blocks = self.nodes[node].overlap(&self.live[id as usize].blocks);
            fleet.params.cached_tokens(blocks, outcome.prompt_tokens)
        });
        let moved = f64::from(outcome.prompt_tokens) - f64::from(held);
        let gb_per_s = fleet.handover_gb_per_s;
        fleet.params.handover_left_ms(moved, gb_per_s, took_ms)
    }

    /// What happens now is handled now, not behind other events of this moment.
    fn at(&mut self, at_ms: f64, what: What, router: &mut dyn Router) {
        if at_ms > self.agenda.now_ms() {
            self.agenda.foresee(at_ms, what);
        } else {
            self.handle(what, router);
        }
    }

    fn end_seen(&mut self, id: u32, router: &mut dyn Router) {
        let outcome = &self.outcomes[id as usize];
        if let Some(node) = outcome.node {
            router.finished(self.agenda.now_ms(), id, node, outcome.output_tokens);
        }
        let live = &mut self.live[id as usize];
        live.blocks = Arc::from([]);
        let Coming { request, play, .. } = live.coming;
        for coming in self.arrivals.ended(request, play, self.agenda.now_ms()) {
            self.agenda.foresee(coming.at_ms, What::Comes(coming));
        }
    }

    fn release(&mut self, router: &mut dyn Router) {
        if self.held.is_empty() {
            return;
        }
        self.settle();
        for (id, answer) in router.release(self.agenda.now_ms(), &self.nodes) {
            assert!(self.held.remove(&id), "request {id} released, not held");
            self.carry_out(id, answer, router);
        }
        if let Some(wake_ms) = router.wake_ms() {
            let wake_ms = wake_ms.max(self.agenda.now_ms() + WAKE_MS_MIN);
            if wake_ms < self.next_wake_ms {
                self.next_wake_ms = wake_ms;
                self.agenda.foresee(wake_ms, What::Wake);
            }
        }
    }

    fn end(mut self) -> Run {
        let horizon_ms = self.scenario.horizon_ms;
        for node in &mut self.nodes {
            node.settle(horizon_ms);
        }
        // What a client would have seen after the end, it has not seen.
        for outcome in &mut self.outcomes {
            outcome.done_ms = outcome.done_ms.filter(|done| *done <= horizon_ms);
        }
        Run {
            outcomes: self.outcomes,
            busy_ms: self.nodes.iter().map(Node::prefill_busy_ms).collect(),
        }
    }
}
