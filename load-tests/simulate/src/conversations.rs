//! How would conversations fare that are known word by word?
//!
//! [`crate::fleet`] plays traces, of which only blocks of prompts are known. Here a conversation
//! begins at its time, a turn is due its pause after the answer before it, and what a node answered
//! stays in its cache behind the prompt, since the next turn repeats it: as the simulated nodes over
//! HTTP do it, so that a run before them can be predicted. Where two nodes share a turn, what the second
//! has of the prompt is held from then on, and the rest travels while the first computes; the answer stays
//! with the second. One region; the router sends every turn at once. It hears of cache changes, first
//! tokens and ends when they happen.

#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::sync::Arc;

use crate::agenda::Agenda;
use crate::engine::{Happened, Job, Node, Part};
use crate::router::{Answer, Ask, Change, Router};
use crate::scenario::Fleet;

/// One turn to come.
#[derive(Clone, PartialEq, Debug)]
pub struct Turn {
    /// The full blocks of prompt and answer together.
    pub path: Arc<[u32]>,
    /// Those that are full of the prompt alone.
    pub prompt_blocks: usize,
    /// All tokens of the prompt, at least one.
    pub prompt_tokens: u32,
    /// Tokens of the answer, at least one.
    pub output_tokens: u32,
    /// From the answer before it, ms; of the first turn, from the beginning of the run.
    pub pause_ms: f64,
}

/// What became of a turn.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Played {
    /// Which conversation.
    pub conversation: usize,
    /// Which of its turns.
    pub turn: usize,
    /// Where it went: the node that answers.
    pub node: usize,
    /// The node that computes its prompt for that one.
    pub prefill_node: Option<usize>,
    /// Tokens of its prompt that were cached there, in whole blocks.
    pub cached_tokens: u32,
    /// When it was due and sent, ms.
    pub due_ms: f64,
    /// When its first token came.
    pub first_token_ms: f64,
    /// When its answer was complete.
    pub done_ms: f64,
}

/// Plays all of them to their ends; turns in the order in which they were sent.
///
/// # Panics
/// If the router does not send every turn at once.
pub fn play(fleet: &Fleet, conversations: &[Vec<Turn>], router: &mut dyn Router) -> Vec<Played> {
    let mut play = Play::new(fleet, conversations);
    while let Some(what) = play.agenda.next_until(f64::INFINITY) {
        match what {
            What::Due { conversation, turn } => play.send(conversation, turn, router),
            What::Node { node, version } if play.versions[node] == version => {
                play.advance(node, router);
            }
            What::Node { .. } => {}
            What::KvArrives(id) => play.answer(id, router),
        }
    }
    play.played
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum What {
    Due {
        conversation: usize,
        turn: usize,
    },
    /// It counts only while nothing else has happened to the node.
    Node {
        node: usize,
        version: u64,
    },
    /// Of this turn, by its place among those played.
    KvArrives(u32),
}

/// What was computed for another node stays until that has it.
fn nodes(fleet: &Fleet) -> Vec<Node> {
    fleet
        .build()
        .into_iter()
        .map(Node::holding_prompts)
        .collect()
}

struct Play<'a> {
    fleet: &'a Fleet,
    conversations: &'a [Vec<Turn>],
    nodes: Vec<Node>,
    versions: Vec<u64>,
    agenda: Agenda<What>,
    played: Vec<Played>,
    /// Tokens that have to reach the second node, of turns whose prompts are being computed.
    moved: HashMap<u32, f64>,
}

impl<'a> Play<'a> {
    fn new(fleet: &'a Fleet, conversations: &'a [Vec<Turn>]) -> Self {
        let mut play = Self {
            fleet,
            conversations,
            nodes: nodes(fleet),
            versions: vec![0; fleet.nodes],
            agenda: Agenda::default(),
            played: Vec::new(),
            moved: HashMap::new(),
        };
        for conversation in 0..conversations.len() {
            play.foresee_turn(conversation, 0);
        }
        play
    }

    fn foresee_turn(&mut self, conversation: usize, turn: usize) {
        if let Some(next) = self.conversations[conversation].get(turn) {
            let due_ms = self.agenda.now_ms() + next.pause_ms;
            self.agenda
                .foresee(due_ms, What::Due { conversation, turn });
        }
    }

    fn send(&mut self, conversation: usize, turn: usize, router: &mut dyn Router) {
        for node in &mut self.nodes {
            node.settle(self.agenda.now_ms());
        }
        let next = &self.conversations[conversation][turn];
        let blocks: Arc<[u32]> = next.path[..next.prompt_blocks].into();
        let id = self.played.len() as u32;
        let ask = Ask {
            id,
            session: conversation as u64,
            region: 0,
            prompt_tokens: next.prompt_tokens,
            output_tokens: next.output_tokens,
            blocks: &blocks,
        };
        let (prefill_node, node) = match router.route(self.agenda.now_ms(), &ask, &self.nodes) {
            Answer::Send(node) => (None, node),
            Answer::Pair { prefill, decode } => (Some(prefill), decode),
            answer => unreachable!("a router that sends at once answered {answer:?}"),
        };
        self.played.push(Played {
            conversation,
            turn,
            node,
            prefill_node,
            cached_tokens: 0,
            due_ms: self.agenda.now_ms(),
            first_token_ms: f64::NAN,
            done_ms: f64::NAN,
        });
        match prefill_node {
            None => self.give(id, node, Part::Whole, router),
            Some(prefill) => {
                let held = self.nodes[node].hold(id, &blocks);
                let params = &self.fleet.params;
                let held = params.cached_tokens(held, next.prompt_tokens);
                self.moved.insert(id, f64::from(next.prompt_tokens - held));
                self.give(id, prefill, Part::Prompt, router);
            }
        }
    }

    /// A node gets its part of a turn.
    fn give(&mut self, id: u32, node: usize, part: Part, router: &mut dyn Router) {
        let Played {
            conversation, turn, ..
        } = self.played[id as usize];
        let turn = &self.conversations[conversation][turn];
        let job = Job {
            part,
            id,
            blocks: turn.path[..turn.prompt_blocks].into(),
            prompt_tokens: turn.prompt_tokens,
            output_tokens: turn.output_tokens,
        };
        self.nodes[node].enqueue(self.agenda.now_ms(), job);
        self.advance(node, router);
    }

    /// Everything of a turn's prompt is at the node that answers.
    fn answer(&mut self, id: u32, router: &mut dyn Router) {
        let Played {
            node, prefill_node, ..
        } = self.played[id as usize];
        self.give(id, node, Part::Answer, router);
        for node in prefill_node.into_iter().chain([node]) {
            self.nodes[node].let_go_held(self.agenda.now_ms(), id);
            self.advance(node, router);
        }
    }

    /// Whole blocks alone are read from a cache.
    fn whole_blocks(&self, tokens: u32) -> u32 {
        let block_tokens = self.fleet.params.block_tokens;
        tokens / block_tokens * block_tokens
    }

    /// Lets a node act up to now, passes on what it did and foresees what it will do.
    fn advance(&mut self, node: usize, router: &mut dyn Router) {
        loop {
            // What an answer leaves in the cache comes with the next look.
            let happened = self.nodes[node].advance(self.agenda.now_ms());
            if happened.is_empty() {
                break;
            }
            for happened in happened {
                self.pass_on(node, happened, router);
            }
        }
        self.versions[node] += 1;
        if let Some(due_ms) = self.nodes[node].next_ms() {
            let version = self.versions[node];
            self.agenda.foresee(due_ms, What::Node { node, version });
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
                ..
            } => {
                let cached_tokens = self.whole_blocks(cached_tokens);
                let played = &mut self.played[id as usize];
                played.first_token_ms = at_ms;
                if played.prefill_node.is_none() {
                    played.cached_tokens = cached_tokens;
                }
                let cached_tokens = played.cached_tokens;
                router.first_token(at_ms, id, node, cached_tokens);
            }
            Happened::Computed {
                at_ms,
                id,
                cached_tokens,
                took_ms,
                ..
            } => {
                self.played[id as usize].cached_tokens = self.whole_blocks(cached_tokens);
                router.computed(at_ms, id, node);
                let moved = self.moved.remove(&id).unwrap_or(0.0);
                let Fleet {
                    params,
                    handover_gb_per_s,
                    ..
                } = self.fleet;
                let left_ms = params.handover_left_ms(moved, *handover_gb_per_s, took_ms);
                self.agenda.foresee(at_ms + left_ms, What::KvArrives(id));
            }
            Happened::Finished {
                at_ms,
                id,
                output_tokens,
            } => {
                let played = &mut self.played[id as usize];
                played.done_ms = at_ms;
                let Played {
                    conversation, turn, ..
                } = *played;
                let done = &self.conversations[conversation][turn];
                if done.path.len() > done.prompt_blocks {
                    self.nodes[node].keep(self.agenda.now_ms(), &done.path);
                }
                router.finished(at_ms, id, node, output_tokens);
                self.foresee_turn(conversation, turn + 1);
            }
        }
    }
}
