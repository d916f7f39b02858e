//! How does an outside simulator talk to the product's router?
//!
//! The `ext:` protocol: JSON lines. `hello` describes the fleet and comes first; each `request` is
//! answered at once with `{"node":N}`; `first_token`, `finish` and `kv` are told. Lines are values
//! in and out here, who reads and writes them is the caller. An outside simulator can neither hold
//! nor refuse a request, so the router's gate is off.

use serde::Deserialize;

use policies::view::{FetchCosts, Role};

use super::{Fleet, Homing, Knowledge, Place, Settings};
use crate::engine::tiers::Tier;
use crate::router::Ask;

/// A line that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ExtError {
    /// Not JSON, or not one of the protocol's messages.
    #[error("not a message of the ext: protocol: {0}")]
    Message(#[from] serde_json::Error),
    /// A message before `hello`, or without any node to choose.
    #[error("{0}")]
    Order(&'static str),
}

#[derive(Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum Message {
    Hello {
        nodes: usize,
        #[serde(default = "one")]
        regions: usize,
        block_tokens: u64,
        capacity_blocks: u64,
        #[serde(default)]
        rtt_ms: Vec<f64>,
    },
    Request {
        id: u32,
        t_ms: f64,
        session: String,
        #[serde(default)]
        region: usize,
        input_tokens: u32,
        blocks: Vec<u32>,
        nodes: Vec<Offered>,
    },
    FirstToken {
        id: u32,
        t_ms: f64,
        cached_tokens: u32,
    },
    Finish {
        id: u32,
        t_ms: f64,
        output_tokens: u32,
    },
    Kv {
        node: usize,
        #[serde(default)]
        stored: Vec<u32>,
        #[serde(default)]
        removed: Vec<u32>,
    },
    #[serde(other)]
    Unknown,
}

/// A node that the simulator lets us choose.
#[derive(Deserialize)]
struct Offered {
    id: usize,
}

fn one() -> usize {
    1
}

/// One conversation with a simulator.
#[derive(Debug)]
pub struct Session {
    settings: Settings,
    homing: Option<Homing>,
}

impl Session {
    /// Before its first line.
    pub fn new(settings: Settings) -> Self {
        Self {
            settings,
            homing: None,
        }
    }

    /// Takes one line; returns the line to answer with, where one is expected.
    pub fn take(&mut self, line: &str) -> Result<Option<String>, ExtError> {
        let message: Message = serde_json::from_str(line)?;
        if let Message::Hello {
            nodes,
            regions,
            block_tokens,
            capacity_blocks,
            rtt_ms,
        } = message
        {
            let regions = regions.max(1);
            let place = |node: usize| Place {
                role: Role::Mixed,
                region: node * regions / nodes.max(1),
                capacity_blocks,
            };
            let fleet = Fleet {
                nodes: (0..nodes).map(place).collect(),
                block_tokens,
                round_trip_ms: rtt_ms,
                // The protocol does not tell of tiers.
                fetch: FetchCosts::default(),
                tiers: Vec::new(),
                handover: None,
            };
            self.homing = Some(Homing::new(fleet, self.settings.clone()));
            return Ok(None);
        }
        let homing = self
            .homing
            .as_mut()
            .ok_or(ExtError::Order("a message came before hello"))?;
        told(homing, message)
    }
}

fn told(homing: &mut Homing, message: Message) -> Result<Option<String>, ExtError> {
    match message {
        Message::Request {
            id,
            t_ms,
            session,
            region,
            input_tokens,
            blocks,
            nodes,
        } => {
            let ask = Ask {
                id,
                session: session_number(&session),
                region,
                prompt_tokens: input_tokens,
                output_tokens: 0,
                blocks: &blocks,
            };
            let offered: Vec<usize> = nodes.iter().map(|node| node.id).collect();
            let chosen = homing
                .choose(t_ms, &ask, &offered)
                .ok_or(ExtError::Order("a request came without a node to choose"))?;
            let node = chosen.node;
            return Ok(Some(format!("{{\"node\":{node}}}")));
        }
        Message::FirstToken {
            id,
            t_ms,
            cached_tokens,
        } => homing.on_first_token(t_ms, id, cached_tokens),
        Message::Finish {
            id,
            t_ms,
            output_tokens,
        } => homing.on_finished(t_ms, id, output_tokens),
        Message::Kv {
            node,
            stored,
            removed,
        } => {
            // A simulator that sends them has events: from here on the index is exact. What was
            // evicted to make room went before what was stored in it.
            homing.learn_from(Knowledge::Events);
            homing.on_removed(node, Tier::Device, &removed);
            homing.on_stored(node, Tier::Device, &stored);
        }
        // The protocol may grow.
        Message::Hello { .. } | Message::Unknown => {}
    }
    Ok(None)
}

/// A number for a session's name: its hash, as the gateway hashes a tenant's session header.
pub(crate) fn session_number(name: &str) -> u64 {
    use cache_index::block::{BlockHash, Namespace, extend_chain};
    let mut padded: Vec<u32> = name.bytes().map(u32::from).collect();
    let blocks = padded
        .len()
        .div_ceil(cache_index::block::BLOCK_TOKENS)
        .max(1);
    padded.resize(blocks * cache_index::block::BLOCK_TOKENS, u32::MAX);
    let namespace = Namespace::new("session", None, None);
    extend_chain(&namespace, BlockHash::ROOT, &padded)
        .last()
        .map_or(0, |hash| hash.short())
}
