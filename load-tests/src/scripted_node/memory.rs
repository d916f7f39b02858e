//! How much of a prompt would a node have cached?
//!
//! A node with a prefix cache holds what it has computed: prompts and the answers to them. The
//! scripted one keeps the last of them as bytes, and what a new prompt shares with any of them counts
//! as cached, in whole blocks. Bytes stand for tokens at a fixed rate, since nothing is computed.

use std::collections::VecDeque;

use serde_json::Value;

/// A common guess for English text and JSON.
const BYTES_PER_TOKEN: usize = 4;
/// What engines cache in.
const BLOCK_TOKENS: usize = 16;
/// Prompts kept. A run of one client makes a few dozen.
const PROMPTS_MAX: usize = 256;

/// The prompts that were answered.
#[derive(Default)]
pub(super) struct Memory {
    held: VecDeque<Vec<u8>>,
}

impl Memory {
    /// Tokens of a prompt that are cached.
    pub(super) fn cached(&self, prompt: &[u8]) -> usize {
        let shared = |held: &Vec<u8>| held.iter().zip(prompt).take_while(|(a, b)| a == b).count();
        let longest = self.held.iter().map(shared).max().unwrap_or(0);
        // The last token is always computed: its output is the answer's first token.
        let most = tokens(prompt).saturating_sub(1);
        let cached = (longest / BYTES_PER_TOKEN).min(most);
        cached / BLOCK_TOKENS * BLOCK_TOKENS
    }

    /// Holds a prompt; the oldest goes where there is no room.
    pub(super) fn hold(&mut self, prompt: Vec<u8>) {
        if self.held.len() == PROMPTS_MAX {
            self.held.pop_front();
        }
        self.held.push_back(prompt);
    }
}

/// Tokens of a prompt.
pub(super) fn tokens(prompt: &[u8]) -> usize {
    prompt.len().div_ceil(BYTES_PER_TOKEN)
}

/// What a template would make of a request: the tools, then each message, nothing else.
pub(super) fn prompt(request: &Value) -> Vec<u8> {
    let parts = |name: &str| request[name].as_array().map_or(&[][..], Vec::as_slice);
    let all = parts("tools").iter().chain(parts("messages"));
    all.flat_map(|part| format!("{part}\n").into_bytes())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Catches cached tokens that the prompt does not share, or a last token counted as cached.
    #[test]
    fn what_is_shared_is_cached_in_whole_blocks() {
        let mut memory = Memory::default();
        let prompt = |length: usize| vec![b'a'; length];
        assert_eq!(memory.cached(&prompt(400)), 0);
        memory.hold(prompt(400));
        assert_eq!(memory.cached(&prompt(400)), 96);
        assert_eq!(memory.cached(&prompt(256)), 48);
        assert_eq!(memory.cached(&prompt(1000)), 96);
        assert_eq!(memory.cached(b"b"), 0);
        for _ in 0..PROMPTS_MAX {
            memory.hold(vec![b'c'; 4]);
        }
        assert_eq!(memory.cached(&prompt(400)), 0);
    }
}
