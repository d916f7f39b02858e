//! Who asked what when? Traces in memory, and their readers.
//!
//! Every reader brings requests with the path of their prompt in blocks of [`BLOCK_TOKENS`] tokens,
//! each block named uniquely by its whole prefix. A file with smaller blocks is grouped (64 tokens:
//! by 8, 16 tokens: by 32); an incomplete group belongs to no block. Which format a file has is
//! seen in its first line, not in its name.
//!
//! What is common to many sessions is taken to be a system prompt: copies of the trace share it,
//! and everything else is private to a copy or to a user's session.

mod mooncake;
mod recorded;
#[cfg(test)]
mod tests;
mod trie;

use std::collections::HashMap;
use std::io::BufRead;
use std::ops::Range;

/// Tokens in a block of a path.
pub const BLOCK_TOKENS: u32 = 512;

/// Why a trace could not be read.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// The file could not be read on.
    #[error("line {line}: {source}")]
    Io {
        /// Which line, counted from 1.
        line: usize,
        /// The system's answer.
        source: std::io::Error,
    },
    /// A line that makes no sense.
    #[error("line {line}: {reason}")]
    Line {
        /// Which line, counted from 1.
        line: usize,
        /// What is wrong with it.
        reason: String,
    },
    /// No line that tells a format.
    #[error(
        "neither a .trie (a JSON header with `block` and `mode`), nor a Mooncake trace \
         (`timestamp`, `input_length`, `output_length`, `hash_ids`), nor a gateway's decision log \
         (`t_ms`, `session`, `prompt_tokens`, `output_tokens`, `blocks`)"
    )]
    Unknown,
    /// Nothing to play.
    #[error("the trace has no request")]
    Empty,
}

/// What a trace's times mean.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mode {
    /// Requests came at these times, whatever became of others.
    Open,
    /// A request comes a pause after the one before it has ended; times of different sessions have
    /// nothing to do with each other.
    Closed,
}

/// One request of a trace.
#[derive(Clone, PartialEq, Debug)]
pub struct Request {
    /// From the start of the trace (open) or of the session (closed), ms.
    pub at_ms: f64,
    /// Its conversation.
    pub session: u32,
    /// All tokens of the prompt.
    pub prompt_tokens: u32,
    /// Tokens of the answer.
    pub output_tokens: u32,
    /// The request that must end before this one comes.
    pub after: Option<u32>,
    /// The pause after that, ms.
    pub think_ms: f64,
    path: Range<usize>,
    /// Requests that follow it.
    pub followers: Vec<u32>,
}

/// One conversation of a trace.
#[derive(Clone, Default, PartialEq, Debug)]
pub struct Session {
    /// Its requests in the order of the file.
    pub requests: Vec<u32>,
    /// The blocks that are its own lie in here (other sessions' may, too).
    pub private: Range<u32>,
}

/// A trace.
#[derive(Clone, PartialEq, Debug)]
pub struct Trace {
    /// What it calls itself.
    pub name: String,
    /// What its times mean.
    pub mode: Mode,
    /// In the order of the file.
    pub requests: Vec<Request>,
    /// By number.
    pub sessions: Vec<Session>,
    /// The last request's time, ms.
    pub length_ms: f64,
    blocks: u32,
    paths: Vec<u32>,
    shared: Vec<bool>,
}

impl Trace {
    /// Reads a trace of any of the known formats.
    pub fn read(name: &str, mut input: impl BufRead) -> Result<Self, TraceError> {
        let mut first = String::new();
        input
            .read_line(&mut first)
            .map_err(|source| TraceError::Io { line: 1, source })?;
        let head: serde_json::Value =
            serde_json::from_str(first.trim()).map_err(|_| TraceError::Unknown)?;
        let trace = if head["blocks"].is_array() && head["session"].is_string() {
            recorded::read(name, &first, input)?
        } else if head["block"].is_u64() && head["mode"].is_string() {
            trie::read(&first, input)?
        } else if head["hash_ids"].is_array() {
            mooncake::read(name, &first, input)?
        } else {
            return Err(TraceError::Unknown);
        };
        if trace.requests.is_empty() {
            return Err(TraceError::Empty);
        }
        Ok(trace)
    }

    /// The blocks of a request's prompt.
    pub fn path(&self, request: u32) -> &[u32] {
        &self.paths[self.requests[request as usize].path.clone()]
    }

    /// Different blocks in all; they are numbered from 0.
    pub fn blocks(&self) -> u32 {
        self.blocks
    }

    /// Whether a block belongs to a prompt that many sessions share.
    pub fn is_shared(&self, block: u32) -> bool {
        self.shared[block as usize]
    }
}

/// The requests read so far.
struct Builder {
    trace: Trace,
}

/// One request as a reader has it.
struct Raw {
    at_ms: f64,
    session: u32,
    prompt_tokens: u32,
    output_tokens: u32,
    after: Option<u32>,
    think_ms: f64,
}

impl Builder {
    fn new(name: &str, mode: Mode) -> Self {
        Self {
            trace: Trace {
                name: name.to_owned(),
                mode,
                requests: Vec::new(),
                sessions: Vec::new(),
                length_ms: 0.0,
                blocks: 0,
                paths: Vec::new(),
                shared: Vec::new(),
            },
        }
    }

    fn push(&mut self, raw: Raw, path: &[u32]) {
        let start = self.trace.paths.len();
        self.trace.paths.extend_from_slice(path);
        self.trace.requests.push(Request {
            at_ms: raw.at_ms,
            session: raw.session,
            prompt_tokens: raw.prompt_tokens.max(1),
            output_tokens: raw.output_tokens.max(1),
            after: raw.after,
            think_ms: raw.think_ms,
            path: start..self.trace.paths.len(),
            followers: Vec::new(),
        });
    }

    /// Fills in what only the whole trace tells.
    fn finish(mut self, blocks: u32) -> Trace {
        let trace = &mut self.trace;
        trace.blocks = blocks;
        for i in 0..trace.requests.len() {
            let (session, after) = (trace.requests[i].session, trace.requests[i].after);
            trace.length_ms = trace.length_ms.max(trace.requests[i].at_ms);
            if let Some(before) = after {
                trace.requests[before as usize].followers.push(i as u32);
            }
            if trace.sessions.len() <= session as usize {
                trace
                    .sessions
                    .resize(session as usize + 1, Session::default());
            }
            trace.sessions[session as usize].requests.push(i as u32);
        }
        trace.shared = shared_blocks(trace);
        for session in 0..trace.sessions.len() {
            trace.sessions[session].private = private_range(trace, session);
        }
        self.trace
    }
}

/// Blocks of a system prompt: in so many sessions that it cannot be one conversation's history.
fn shared_blocks(trace: &Trace) -> Vec<bool> {
    const SESSIONS_MIN: u32 = 4;
    const SESSIONS_SHARE_MIN: f64 = 0.002;
    let sessions_min = SESSIONS_MIN.max((trace.sessions.len() as f64 * SESSIONS_SHARE_MIN) as u32);
    let mut seen_by = vec![0u32; trace.blocks as usize];
    let mut last_session = vec![u32::MAX; trace.blocks as usize];
    for (number, session) in trace.sessions.iter().enumerate() {
        for &request in &session.requests {
            for &block in trace.path(request) {
                if last_session[block as usize] != number as u32 {
                    last_session[block as usize] = number as u32;
                    seen_by[block as usize] += 1;
                }
            }
        }
    }
    seen_by
        .iter()
        .map(|&sessions| sessions >= sessions_min)
        .collect()
}

fn private_range(trace: &Trace, session: usize) -> Range<u32> {
    let requests = &trace.sessions[session].requests;
    let own = requests
        .iter()
        .flat_map(|&request| trace.path(request))
        .copied()
        .filter(|&block| !trace.is_shared(block));
    own.fold(0..0, |range, block| {
        if range.is_empty() {
            block..block + 1
        } else {
            range.start.min(block)..range.end.max(block + 1)
        }
    })
}

/// Names blocks by what comes before them: the same key after the same parent is the same block.
#[derive(Default)]
struct Chains {
    known: HashMap<(Option<u32>, u64), u32>,
}

impl Chains {
    fn block(&mut self, parent: Option<u32>, key: u64) -> u32 {
        let next = self.known.len() as u32;
        *self.known.entry((parent, key)).or_insert(next)
    }

    fn path(&mut self, keys: impl IntoIterator<Item = u64>) -> Vec<u32> {
        let mut parent = None;
        keys.into_iter()
            .map(|key| {
                let block = self.block(parent, key);
                parent = Some(block);
                block
            })
            .collect()
    }

    fn len(&self) -> u32 {
        self.known.len() as u32
    }
}

/// How many blocks of a file make one of ours.
fn group(block_tokens: u32, line: usize) -> Result<usize, TraceError> {
    if block_tokens == 0 || !BLOCK_TOKENS.is_multiple_of(block_tokens) {
        return Err(TraceError::Line {
            line,
            reason: format!("blocks of {block_tokens} tokens do not make up {BLOCK_TOKENS}"),
        });
    }
    Ok((BLOCK_TOKENS / block_tokens) as usize)
}

/// The other lines of a file, numbered from 2, without the empty ones.
fn lines(input: impl BufRead) -> impl Iterator<Item = Result<(usize, String), TraceError>> {
    input
        .lines()
        .enumerate()
        .map(|(i, text)| match text {
            Ok(text) => Ok((i + 2, text)),
            Err(source) => Err(TraceError::Io {
                line: i + 2,
                source,
            }),
        })
        .filter(|line| !matches!(line, Ok((_, text)) if text.trim().is_empty()))
}

fn parse<'a, T: serde::Deserialize<'a>>(line: usize, text: &'a str) -> Result<T, TraceError> {
    serde_json::from_str(text).map_err(|error| TraceError::Line {
        line,
        reason: error.to_string(),
    })
}
