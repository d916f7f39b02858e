//! Where would a peer send a request?
//!
//! `homing-peers policy NAME [KEY=VALUE…]` speaks the ext: protocol on stdin and stdout (JSON lines:
//! `hello`, `request` which is answered with `{"node":N}`, `first_token`, `finish`, `kv`) and decides
//! with the peer's own published code: `dynamo` ([`dynamo`]), `smg-tree` and `smg-events` ([`smg`]).
//! Blocks have numbers in the protocol, one for each whole prefix; which block a number stands behind
//! is learnt from the requests, since `kv` does not say it.

mod dynamo;
mod smg;

use std::collections::HashMap;
use std::io::{BufRead, Write};

use serde::Deserialize;

/// A policy of a peer.
pub trait Policy {
    /// A node holds these blocks of one path now; the first of them stands behind `parent`.
    fn stored(&mut self, node: usize, parent: Option<u32>, blocks: &[u32]) -> Result<(), String>;
    /// A node holds these no longer.
    fn removed(&mut self, node: usize, blocks: &[u32]) -> Result<(), String>;
    /// Chooses a node and counts the request as sent there.
    fn choose(&mut self, request: &Request) -> Result<usize, String>;
    /// A request's first token has come.
    fn first_token(&mut self, id: u32) -> Result<(), String>;
    /// A request has ended.
    fn finished(&mut self, id: u32) -> Result<(), String>;
}

/// The fleet.
#[derive(Clone, Copy, Deserialize)]
pub struct Hello {
    /// How many nodes.
    pub nodes: usize,
    /// Tokens in a block.
    pub block_tokens: u32,
    /// Blocks in each node's pool.
    pub capacity_blocks: u64,
    /// For ties.
    #[serde(default)]
    pub seed: u64,
}

/// A request to be sent somewhere.
#[derive(Deserialize)]
pub struct Request {
    /// Its number.
    pub id: u32,
    /// When it came, ms.
    pub t_ms: f64,
    /// All tokens of its prompt.
    pub input_tokens: u32,
    /// The full blocks of the prompt.
    pub blocks: Vec<u32>,
    /// Nodes to choose from.
    pub nodes: Vec<Offered>,
}

/// A node that may be chosen.
#[derive(Deserialize)]
pub struct Offered {
    /// Its number.
    pub id: usize,
}

#[derive(Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum Message {
    Hello(Hello),
    Request(Request),
    FirstToken {
        id: u32,
    },
    Finish {
        id: u32,
    },
    Kv {
        node: usize,
        #[serde(default)]
        stored: Vec<u32>,
        #[serde(default)]
        removed: Vec<u32>,
    },
    /// The protocol may grow.
    #[serde(other)]
    Unknown,
}

/// A policy's parameters as given, `key=value`.
pub type Parameters = Vec<(String, String)>;

type Build = fn(&Hello, &Parameters) -> Result<Box<dyn Policy>, String>;

const POLICIES: &[(&str, Build)] = &[
    ("dynamo", |hello, given| {
        Ok(Box::new(dynamo::Dynamo::new(hello, given)?))
    }),
    ("smg-tree", |hello, given| {
        Ok(Box::new(smg::Smg::from_dispatches(hello, given)?))
    }),
    ("smg-events", |hello, given| {
        Ok(Box::new(smg::Smg::from_events(hello, given)?))
    }),
];

/// Answers on stdin and stdout until stdin ends.
pub fn policy(mut arguments: impl Iterator<Item = String>) -> Result<(), String> {
    let name = arguments.next().unwrap_or_default();
    let build = POLICIES.iter().find(|(known, _)| *known == name);
    let (_, build) = build.ok_or_else(|| {
        let names: Vec<&str> = POLICIES.iter().map(|(name, _)| *name).collect();
        format!("no policy {name:?}; there are: {}", names.join(", "))
    })?;
    let pair = |argument: String| match argument.split_once('=') {
        Some((key, value)) => Ok((key.to_owned(), value.to_owned())),
        None => Err(format!("{argument:?} is not key=value")),
    };
    let parameters = arguments.map(pair).collect::<Result<Parameters, _>>()?;
    let mut session = Session::new(*build, parameters)?;
    let mut out = std::io::stdout().lock();
    for line in std::io::stdin().lock().lines() {
        let line = line.map_err(|error| format!("reading stdin: {error}"))?;
        if let Some(node) = session.take(&line)? {
            writeln!(out, "{{\"node\":{node}}}")
                .and_then(|()| out.flush())
                .map_err(|error| format!("writing to stdout: {error}"))?;
        }
    }
    Ok(())
}

/// One conversation with a simulator.
struct Session {
    build: Build,
    parameters: Parameters,
    policy: Option<(Hello, Box<dyn Policy>)>,
    parents: Parents,
}

impl Session {
    /// Refuses parameters at once, not when the first line comes.
    fn new(build: Build, parameters: Parameters) -> Result<Self, String> {
        let smallest = Hello {
            nodes: 1,
            block_tokens: 512,
            capacity_blocks: 1,
            seed: 0,
        };
        build(&smallest, &parameters)?;
        Ok(Self {
            build,
            parameters,
            policy: None,
            parents: Parents::default(),
        })
    }

    /// Takes one line; the node to answer with, where an answer is expected.
    fn take(&mut self, line: &str) -> Result<Option<usize>, String> {
        let message = serde_json::from_str(line)
            .map_err(|error| format!("not a message of the ext: protocol: {error}"))?;
        if let Message::Hello(hello) = message {
            if hello.nodes == 0 || hello.block_tokens == 0 {
                return Err("hello: a fleet has nodes, and blocks have tokens".to_owned());
            }
            self.parents = Parents::default();
            self.policy = Some((hello, (self.build)(&hello, &self.parameters)?));
            return Ok(None);
        }
        let (hello, policy) = self.policy.as_mut().ok_or("a message came before hello")?;
        match message {
            Message::Request(request) => {
                if request.nodes.is_empty() || request.nodes.iter().any(|n| n.id >= hello.nodes) {
                    return Err(format!("request {}: no such nodes to choose", request.id));
                }
                self.parents.learn(&request.blocks);
                return policy.choose(&request).map(Some);
            }
            Message::FirstToken { id } => policy.first_token(id)?,
            Message::Finish { id } => policy.finished(id)?,
            Message::Kv { node, .. } if node >= hello.nodes => {
                return Err(format!("kv: no node {node}"));
            }
            Message::Kv {
                node,
                stored,
                removed,
            } => {
                // What was evicted to make room went before what was stored in it.
                if !removed.is_empty() {
                    policy.removed(node, &removed)?;
                }
                if let Some(first) = stored.first() {
                    policy.stored(node, self.parents.of(*first)?, &stored)?;
                }
            }
            Message::Hello(_) | Message::Unknown => {}
        }
        Ok(None)
    }
}

/// Which block each one stands behind.
#[derive(Default)]
struct Parents(HashMap<u32, Option<u32>>);

impl Parents {
    fn learn(&mut self, path: &[u32]) {
        // What a known block stands behind is known.
        for at in (0..path.len()).rev() {
            let parent = at.checked_sub(1).map(|before| path[before]);
            if self.0.insert(path[at], parent).is_some() {
                return;
            }
        }
    }

    fn of(&self, block: u32) -> Result<Option<u32>, String> {
        let parent = self.0.get(&block).copied();
        parent.ok_or_else(|| format!("kv: block {block} was in no request"))
    }
}

/// The whole value of a parameter as a number.
fn number(key: &str, value: &str) -> Result<f64, String> {
    match value.parse::<f64>() {
        Ok(number) if number.is_finite() && number >= 0.0 => Ok(number),
        _ => Err(format!("{key}={value}: a number of 0 or more is needed")),
    }
}

#[cfg(test)]
mod tests;
