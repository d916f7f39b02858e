//! Our own recordings: one JSON object a line, no text, only counts and opaque block names.
//!
//! The first line is a [`Head`], each other line a [`Line`]. A block's name is any string that
//! stands for the block and all before it (a chained hash does). Names of blocks smaller than 512
//! tokens may all be given, or only the last of each 512: both give the same path.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::BufRead;

use serde::{Deserialize, Serialize};

use super::{Builder, Chains, Mode, Raw, Trace, TraceError, group, lines, parse};

/// What `format` says.
pub(super) const FORMAT: &str = "homing-sessions";

/// The first line of a recording.
#[derive(Clone, PartialEq, Serialize, Deserialize, Debug)]
pub struct Head {
    /// Always `homing-sessions`.
    pub format: String,
    /// Tokens that each name in `blocks` stands for: 512, or a part of it.
    pub block_tokens: u32,
    /// `closed` where requests wait for the answer before them; `open` by default.
    #[serde(default)]
    pub closed: bool,
}

/// One request of a recording.
#[derive(Clone, PartialEq, Serialize, Deserialize, Debug)]
pub struct Line {
    /// Since the start of the recording, ms.
    pub t_ms: f64,
    /// Its conversation.
    pub session: String,
    /// All tokens of the prompt.
    pub prompt_tokens: u32,
    /// Tokens of the answer.
    pub output_tokens: u32,
    /// The prompt's full blocks, each named by its whole prefix.
    pub blocks: Vec<String>,
    /// When the answer was complete, ms; what a closed recording takes the pauses from.
    #[serde(default)]
    pub done_ms: Option<f64>,
}

/// The latest request of a session.
struct Last {
    request: u32,
    began_ms: f64,
    done_ms: f64,
}

pub(super) fn read(name: &str, first: &str, input: impl BufRead) -> Result<Trace, TraceError> {
    let head: Head = parse(1, first)?;
    let group_len = group(head.block_tokens, 1)?;
    let mode = if head.closed {
        Mode::Closed
    } else {
        Mode::Open
    };
    let mut builder = Builder::new(name, mode);
    let mut chains = Chains::default();
    let mut sessions: HashMap<String, u32> = HashMap::new();
    let mut latest: Vec<Last> = Vec::new();
    for (request, line) in lines(input).enumerate() {
        let (number, text) = line?;
        let line: Line = parse(number, &text)?;
        let groups = line.blocks.chunks_exact(group_len);
        let path = chains.path(groups.filter_map(<[String]>::last).map(|name| {
            let mut hasher = DefaultHasher::new();
            name.hash(&mut hasher);
            hasher.finish()
        }));
        let next = sessions.len() as u32;
        let session = *sessions.entry(line.session).or_insert(next);
        let this = Last {
            request: request as u32,
            began_ms: line.t_ms,
            done_ms: line.done_ms.unwrap_or(line.t_ms),
        };
        let mut raw = Raw {
            at_ms: line.t_ms,
            session,
            prompt_tokens: line.prompt_tokens,
            output_tokens: line.output_tokens,
            after: None,
            think_ms: 0.0,
        };
        match latest.get_mut(session as usize) {
            Some(before) => {
                raw.after = Some(before.request);
                raw.think_ms = (line.t_ms - before.done_ms).max(0.0);
                let began_ms = before.began_ms;
                if head.closed {
                    raw.at_ms -= began_ms;
                }
                *before = Last { began_ms, ..this };
            }
            None => {
                if head.closed {
                    raw.at_ms = 0.0;
                }
                latest.push(this);
            }
        }
        builder.push(raw, &path);
    }
    Ok(builder.finish(chains.len()))
}
