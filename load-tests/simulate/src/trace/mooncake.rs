//! Mooncake's JSONL: arrivals with the ids of their prompts' blocks of 512 tokens.
//!
//! Its ids name blocks by their whole prefix already, the last one of a prompt being incomplete as
//! a rule; it is kept, since the same prompt has the same id there. There are no sessions in it: a
//! request continues the session of the latest earlier request whose prompt, its full blocks, at
//! least two, is a prefix of its own.

use std::collections::HashMap;
use std::io::BufRead;

use serde::Deserialize;

use super::{BLOCK_TOKENS, Builder, Chains, Mode, Raw, Trace, TraceError, lines, parse};

/// A shorter prompt is a prefix of too many others to tell a conversation.
const CONTINUED_BLOCKS_MIN: usize = 2;

#[derive(Deserialize)]
struct Line {
    timestamp: f64,
    input_length: u32,
    output_length: u32,
    hash_ids: Vec<u64>,
}

/// The latest request whose full blocks end at a block.
struct End {
    request: u32,
    session: u32,
    at_ms: f64,
}

pub(super) fn read(name: &str, first: &str, input: impl BufRead) -> Result<Trace, TraceError> {
    let mut builder = Builder::new(name, Mode::Open);
    let mut chains = Chains::default();
    let mut ends: HashMap<u32, End> = HashMap::new();
    let (mut requests, mut sessions) = (0u32, 0u32);
    let first = std::iter::once(Ok((1, first.to_owned())));
    for line in first.chain(lines(input)) {
        let (number, text) = line?;
        let line: Line = parse(number, &text)?;
        let path = chains.path(line.hash_ids);
        let full = path.len().min((line.input_length / BLOCK_TOKENS) as usize);
        let before = path
            .iter()
            .skip(CONTINUED_BLOCKS_MIN - 1)
            .rev()
            .find_map(|block| ends.get(block));
        let (session, after, think_ms) = match before {
            Some(end) => (end.session, Some(end.request), line.timestamp - end.at_ms),
            None => {
                sessions += 1;
                (sessions - 1, None, 0.0)
            }
        };
        if full >= CONTINUED_BLOCKS_MIN {
            let end = End {
                request: requests,
                session,
                at_ms: line.timestamp,
            };
            ends.insert(path[full - 1], end);
        }
        let raw = Raw {
            at_ms: line.timestamp,
            session,
            prompt_tokens: line.input_length,
            output_tokens: line.output_length,
            after,
            think_ms,
        };
        builder.push(raw, &path);
        requests += 1;
    }
    Ok(builder.finish(chains.len()))
}
