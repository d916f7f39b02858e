//! The gateway's decision log as a trace: what its clients asked, to be asked again.
//!
//! One JSON object a line; no text, only counts and opaque names of blocks. Of its fields only
//! those below matter here. A block's name stands for 512 tokens and all before them. Lines stand
//! in the order in which turns ended. A turn continues the latest one of its session that came
//! before it.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::BufRead;

use serde::Deserialize;

use super::{Builder, Chains, Mode, Raw, Trace, TraceError, lines, parse};

#[derive(Deserialize)]
struct Line {
    /// Arrival, unix ms.
    t_ms: f64,
    #[serde(default)]
    tenant: String,
    session: String,
    prompt_tokens: u32,
    output_tokens: u32,
    #[serde(default)]
    duration_ms: f64,
    blocks: Vec<String>,
}

/// The latest request of a session.
struct Latest {
    request: u32,
    done_ms: f64,
}

pub(super) fn read(name: &str, first: &str, input: impl BufRead) -> Result<Trace, TraceError> {
    let mut turns: Vec<Line> = Vec::new();
    let first = std::iter::once(Ok((1, first.to_owned())));
    for line in first.chain(lines(input)) {
        let (number, text) = line?;
        let line: Line = parse(number, &text)?;
        // A turn that failed before its prompt was known asks nothing of a node.
        if line.prompt_tokens > 0 {
            turns.push(line);
        }
    }
    turns.sort_by(|a, b| a.t_ms.total_cmp(&b.t_ms));
    let start_ms = turns.first().map_or(0.0, |turn| turn.t_ms);
    let mut builder = Builder::new(name, Mode::Open);
    let mut chains = Chains::default();
    let mut sessions: HashMap<(String, String), u32> = HashMap::new();
    let mut latest: HashMap<u32, Latest> = HashMap::new();
    for (request, turn) in turns.into_iter().enumerate() {
        let path = chains.path(turn.blocks.iter().map(|name| hash(name)));
        let next = sessions.len() as u32;
        let session = *sessions.entry((turn.tenant, turn.session)).or_insert(next);
        let this = Latest {
            request: request as u32,
            done_ms: turn.t_ms + turn.duration_ms,
        };
        let before = latest.insert(session, this);
        let raw = Raw {
            at_ms: turn.t_ms - start_ms,
            session,
            prompt_tokens: turn.prompt_tokens,
            output_tokens: turn.output_tokens,
            after: before.as_ref().map(|b| b.request),
            think_ms: before.map_or(0.0, |b| (turn.t_ms - b.done_ms).max(0.0)),
        };
        builder.push(raw, &path);
    }
    Ok(builder.finish(chains.len()))
}

fn hash(name: &str) -> u64 {
    let mut hasher = DefaultHasher::new();
    name.hash(&mut hasher);
    hasher.finish()
}
