//! What is asked of the nodes, and when? The same of every arrangement.
//!
//! So many answers stream at any time: where one ends, its reader asks for the next. Agents' turns
//! come in open loop, as a Poisson process, each at its time whatever became of those before it.
//! They take turns among sessions, each of which grows by a message a turn and is followed by a new
//! one after its last turn. Sessions begin at different points of their lives; what they held before
//! is sent ahead of the measured time (`primers`).

use std::time::Duration;

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use crate::engine_bench::prompts::Prompts;

/// Between the first questions of two readers.
const STAGGER_S: f64 = 0.5;

/// The shape of the workload.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shape {
    /// Answers that stream at any time.
    pub(super) streams: usize,
    pub(super) stream_prompt_tokens: usize,
    pub(super) stream_tokens: u32,
    /// Prompts of each reader, who begins again after the last.
    pub(super) stream_prompts: usize,
    /// Agents' turns in a second, on average.
    pub(super) turns_per_s: f64,
    pub(super) agents: usize,
    pub(super) growth: Growth,
    /// Tokens of an agent's answer, least and most.
    pub(super) turn_tokens: [u32; 2],
    /// How long turns come.
    pub(super) seconds: f64,
    pub(super) seed: u64,
}

/// How an agent's prompt grows.
#[derive(Clone, Copy, Debug)]
pub(super) struct Growth {
    /// Tokens of a session's first prompt.
    pub(super) first_tokens: usize,
    /// Tokens that each later turn adds.
    pub(super) more_tokens: usize,
    /// Turns of a session.
    pub(super) turns: usize,
}

impl Growth {
    /// New tokens of a turn.
    pub(super) fn of(self, turn: usize) -> usize {
        if turn == 0 {
            self.first_tokens
        } else {
            self.more_tokens
        }
    }

    /// Tokens of a session's last prompt.
    pub(super) fn longest(self) -> usize {
        (0..self.turns).map(|turn| self.of(turn)).sum()
    }
}

/// Who asks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// A short prompt and a long answer.
    Stream,
    /// A long prompt and a short answer.
    Turn,
}

/// One request to come.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Planned {
    /// From the start.
    pub(super) at: Duration,
    pub(super) kind: Kind,
    /// Its `x-session-affinity`.
    pub(super) session: String,
    pub(super) prompt: String,
    /// Tokens of its answer.
    pub(super) tokens: u32,
}

/// All requests.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Plan {
    /// To be answered before the start: what sessions hold by then.
    pub(super) primers: Vec<Planned>,
    /// What each reader of streams asks for, one after another, from its time on.
    pub(super) readers: Vec<Vec<Planned>>,
    /// In the order of their times.
    pub(super) turns: Vec<Planned>,
}

/// Draws the whole workload.
pub(super) fn plan(shape: &Shape, prompts: &mut Prompts) -> Plan {
    let mut random = StdRng::seed_from_u64(shape.seed);
    let mut agents: Vec<Agent> = (0..shape.agents).map(Agent::new).collect();
    let mut primers = Vec::new();
    for (number, agent) in agents.iter_mut().enumerate() {
        let behind = number % shape.growth.turns;
        for _ in 0..behind {
            agent.grow(shape.growth, prompts);
        }
        if behind > 0 {
            primers.push(agent.ask(Duration::ZERO, 1));
        }
    }
    let mut readers = Vec::new();
    for number in 0..shape.streams {
        let stream = |more: usize| Planned {
            // One after another at first, so that they do not end together.
            at: Duration::from_secs_f64(number as f64 * STAGGER_S),
            kind: Kind::Stream,
            session: format!("stream-{number}-{more}"),
            prompt: prompts.next(shape.stream_prompt_tokens),
            tokens: shape.stream_tokens,
        };
        readers.push((0..shape.stream_prompts).map(stream).collect());
    }
    let mut turns = Vec::new();
    let mut at = exponential(&mut random, shape.turns_per_s);
    let mut number = 0;
    let [least, most] = shape.turn_tokens;
    while at < shape.seconds {
        let agent = &mut agents[number % shape.agents];
        agent.grow(shape.growth, prompts);
        let tokens = random.random_range(least..=most);
        turns.push(agent.ask(Duration::from_secs_f64(at), tokens));
        number += 1;
        at += exponential(&mut random, shape.turns_per_s);
    }
    Plan {
        primers,
        readers,
        turns,
    }
}

/// A row of sessions, one after another.
struct Agent {
    number: usize,
    session: usize,
    turn: usize,
    prompt: String,
}

impl Agent {
    fn new(number: usize) -> Self {
        Self {
            number,
            session: 0,
            turn: 0,
            prompt: String::new(),
        }
    }

    /// Goes on to the next turn.
    fn grow(&mut self, growth: Growth, prompts: &mut Prompts) {
        if self.turn == growth.turns {
            self.prompt.clear();
            self.turn = 0;
            self.session += 1;
        }
        self.prompt += &prompts.next(growth.of(self.turn));
        self.turn += 1;
    }

    fn ask(&self, at: Duration, tokens: u32) -> Planned {
        Planned {
            at,
            kind: Kind::Turn,
            session: format!("agent-{}-{}", self.number, self.session),
            prompt: self.prompt.clone(),
            tokens,
        }
    }
}

/// Seconds until the next arrival of a Poisson process; at most eight means, so that no run stands
/// empty for one draw.
fn exponential(random: &mut StdRng, per_s: f64) -> f64 {
    let uniform: f64 = random.random_range(f64::EPSILON..1.0);
    (-uniform.ln()).min(8.0) / per_s
}
