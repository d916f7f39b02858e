//! What does a policy decide that runs outside of this program?
//!
//! The `ext:` protocol from the simulator's side, as [`crate::homing::ext`] speaks it from the
//! policy's: JSON lines; `hello` and each node's first `kv` come first, every `request` is answered
//! at once with `{"node":N}`, `first_token`, `finish` and `kv` are told when they happen. A node's
//! `kv` may be empty: it says that the node tells what it holds. Times are written in full, so that
//! a policy that reads them computes with the same numbers as one in here. Of a request's answer
//! nothing is told before it ends. Who starts the process and carries lines is the caller
//! ([`Exchange`]).
//!
//! An outside policy can neither hold nor refuse. When its first trouble comes, the run goes on
//! without it to its end, and [`Outside::trouble`] says that its figures mean nothing.

use std::collections::HashMap;

use serde::{Deserialize, Serialize};

use crate::engine::Node;
use crate::engine::tiers::Tier;
use crate::router::{Answer, Ask, Change, Router};
use crate::scenario::Fleet;

/// Carries a line to the policy, and an answer back where one is wanted; or says why it cannot.
pub type Exchange<'a> = Box<dyn FnMut(&str, Wanted) -> Result<Option<String>, String> + 'a>;

/// Whether a line is answered.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Wanted {
    /// It is only told.
    Nothing,
    /// One line comes back.
    Answer,
}

/// Metrics that a policy is shown are this old at most, ms: as `routesim` shows them.
const SCRAPE_MS: f64 = 100.0;

#[derive(Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum Message<'a> {
    Hello {
        nodes: usize,
        regions: usize,
        block_tokens: u32,
        capacity_blocks: usize,
        rtt_ms: &'a [f64],
        prefill_tokens_per_s: f64,
        /// For what a policy draws by chance.
        seed: u64,
    },
    Request {
        id: u32,
        t_ms: f64,
        session: String,
        region: usize,
        input_tokens: u32,
        output_tokens_hidden: (),
        blocks: &'a [u32],
        nodes: Vec<Offered>,
    },
    FirstToken {
        id: u32,
        t_ms: f64,
        node: usize,
        cached_tokens: u32,
        ttft_ms: f64,
    },
    Finish {
        id: u32,
        t_ms: f64,
        node: usize,
        output_tokens: u32,
    },
    Kv {
        t_ms: f64,
        node: usize,
        stored: &'a [u32],
        removed: &'a [u32],
    },
}

#[derive(Serialize)]
struct Offered {
    id: usize,
    region: usize,
    waiting: usize,
    kv_used: f64,
    capacity_blocks: usize,
}

#[derive(Deserialize)]
struct Decided {
    node: usize,
}

/// A router that asks an outside policy.
pub struct Outside<'a> {
    exchange: Exchange<'a>,
    nodes: usize,
    /// When each request that has no first token yet came, ms.
    came_ms: HashMap<u32, f64>,
    scraped_ms: f64,
    scraped: Vec<(usize, f64)>,
    trouble: Option<String>,
}

impl<'a> Outside<'a> {
    /// Says hello.
    pub fn new(fleet: &Fleet, exchange: Exchange<'a>) -> Self {
        let mut outside = Self {
            exchange,
            nodes: fleet.nodes,
            came_ms: HashMap::new(),
            scraped_ms: f64::NEG_INFINITY,
            scraped: Vec::new(),
            trouble: None,
        };
        outside.tell(&Message::Hello {
            nodes: fleet.nodes,
            regions: fleet.regions,
            block_tokens: fleet.params.block_tokens,
            capacity_blocks: fleet.capacity,
            rtt_ms: &fleet.round_trips_ms,
            prefill_tokens_per_s: fleet.params.prefill_tokens_per_s,
            seed: fleet.seed,
        });
        for node in 0..fleet.nodes {
            outside.tell(&Message::Kv {
                t_ms: 0.0,
                node,
                stored: &[],
                removed: &[],
            });
        }
        outside
    }

    /// What went wrong first; then the run counts for nothing.
    pub fn trouble(&self) -> Option<&str> {
        self.trouble.as_deref()
    }

    fn tell(&mut self, message: &Message<'_>) {
        if let Err(trouble) = self.send(message, Wanted::Nothing) {
            self.trouble.get_or_insert(trouble);
        }
    }

    fn send(&mut self, message: &Message<'_>, wanted: Wanted) -> Result<Option<String>, String> {
        if let Some(trouble) = &self.trouble {
            return Err(trouble.clone());
        }
        let line = serde_json::to_string(message).map_err(|error| error.to_string())?;
        (self.exchange)(&line, wanted)
    }

    fn ask(&mut self, message: &Message<'_>) -> Result<usize, String> {
        let answer = self.send(message, Wanted::Answer)?.unwrap_or_default();
        let unusable = |why: String| format!("answered {:?}: {why}", shortened(&answer));
        let Decided { node } = serde_json::from_str(&answer)
            .map_err(|error| unusable(format!("not {{\"node\":N}}: {error}")))?;
        if node >= self.nodes {
            let last = self.nodes - 1;
            return Err(unusable(format!("nodes are numbered from 0 to {last}")));
        }
        Ok(node)
    }

    fn offered(&mut self, now_ms: f64, nodes: &[Node]) -> Vec<Offered> {
        if now_ms - self.scraped_ms >= SCRAPE_MS {
            self.scraped_ms = now_ms;
            let scrape = |node: &Node| (node.waiting(), node.pool_used());
            self.scraped = nodes.iter().map(scrape).collect();
        }
        let offer = |(id, node): (usize, &Node)| {
            let (waiting, kv_used) = self.scraped[id];
            Offered {
                id,
                region: node.region(),
                waiting,
                kv_used,
                capacity_blocks: node.capacity(),
            }
        };
        nodes.iter().enumerate().map(offer).collect()
    }
}

/// Enough of a line to recognise it.
fn shortened(line: &str) -> String {
    const CHARS_MAX: usize = 200;
    line.chars().take(CHARS_MAX).collect()
}

impl Router for Outside<'_> {
    fn route(&mut self, now_ms: f64, ask: &Ask<'_>, nodes: &[Node]) -> Answer {
        self.came_ms.insert(ask.id, now_ms);
        let offered = self.offered(now_ms, nodes);
        let asked = self.ask(&Message::Request {
            id: ask.id,
            t_ms: now_ms,
            session: format!("s{}", ask.session),
            region: ask.region,
            input_tokens: ask.prompt_tokens,
            output_tokens_hidden: (),
            blocks: ask.blocks,
            nodes: offered,
        });
        match asked {
            Ok(node) => Answer::Send(node),
            Err(trouble) => {
                self.trouble.get_or_insert(trouble);
                Answer::Send(0)
            }
        }
    }

    fn changed(&mut self, now_ms: f64, node: usize, change: &Change<'_>) {
        let (stored, removed): (&[u32], &[u32]) = match change {
            // The protocol knows of one tier.
            Change::Stored { tier, .. } | Change::Removed { tier, .. } if *tier != Tier::Device => {
                return;
            }
            Change::Stored { path, from, .. } => (&path[*from..], &[]),
            Change::Removed { blocks, .. } => (&[], blocks),
        };
        self.tell(&Message::Kv {
            t_ms: now_ms,
            node,
            stored,
            removed,
        });
    }

    fn first_token(&mut self, now_ms: f64, id: u32, node: usize, cached_tokens: u32) {
        let came_ms = self.came_ms.remove(&id).unwrap_or(now_ms);
        self.tell(&Message::FirstToken {
            id,
            t_ms: now_ms,
            node,
            cached_tokens,
            ttft_ms: now_ms - came_ms,
        });
    }

    fn finished(&mut self, now_ms: f64, id: u32, node: usize, output_tokens: u32) {
        self.tell(&Message::Finish {
            id,
            t_ms: now_ms,
            node,
            output_tokens,
        });
    }
}

#[cfg(test)]
mod tests;
