//! What was the conversation's last prompt, and what of it does the next one share?
//!
//! Hashing all of a 64 KB prompt costs about 0.2 ms, finding where it equals the last turn's about
//! 0.005 ms, and rendering it as much as hashing. So a conversation's last prompt is kept with its
//! blocks' hashes and, where the template only appends, with what continuing it takes.
//!
//! Bounded by tokens: with hashes a token costs five bytes. The messages beside them are shared
//! with what requests are read by (`dialects::known`), and cost little of their own there.

use std::sync::{Arc, Mutex, PoisonError};

use ::prompt::Begun;
use cache_index::block::{BLOCK_TOKENS, BlockHash, Namespace, extend_chain};
use dialects::{ChatPrompt, Shared};
use lru::LruCache;
use serde_json::{Map, Value};

/// A prompt's tokens and the hashes of its full blocks.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Known {
    /// The tokens.
    pub(crate) tokens: Vec<u32>,
    /// One per full block.
    pub(crate) hashes: Vec<BlockHash>,
}

/// How many blocks were hashed, and how many were known.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Hashed {
    pub(crate) new: usize,
    pub(crate) known: usize,
}

/// Turns of a conversation that can be continued.
const BEGUN_MAX: usize = 16;

/// A conversation's last prompt.
#[derive(Debug, Default, Clone)]
pub(super) struct Last {
    pub(super) known: Arc<Known>,
    /// What continuing it takes, where it can be.
    pub(super) held: Option<Arc<Held>>,
}

/// What continuing a conversation takes.
#[derive(Debug)]
pub(super) struct Held {
    messages: Vec<Shared>,
    tools: Option<Shared>,
    /// As text: the order of their keys counts.
    template_kwargs: Option<String>,
    /// After this turn and those before it, the latest last: agents go back and try again.
    begun: Vec<Arc<Begun>>,
}

impl Held {
    /// Of a conversation whose prompt was made; `before` are the turns that it continues.
    pub(super) fn new(chat: &ChatPrompt, before: &[Arc<Begun>], begun: Begun) -> Self {
        let oldest = (before.len() + 1).saturating_sub(BEGUN_MAX);
        let mut turns = before[oldest..].to_vec();
        turns.push(Arc::new(begun));
        Self {
            messages: chat.messages.clone(),
            tools: chat.tools.clone(),
            template_kwargs: spelled(chat.template_kwargs.as_ref()),
            begun: turns,
        }
    }

    /// The turns that this conversation continues: it has their messages, and perhaps more.
    pub(super) fn continued_by(&self, chat: &ChatPrompt) -> &[Arc<Begun>] {
        let variables = spelled(chat.template_kwargs.as_ref());
        if self.tools != chat.tools || self.template_kwargs != variables {
            return &[];
        }
        let both = self.messages.iter().zip(&chat.messages);
        let same = both.take_while(|(old, new)| old == new).count();
        let turns = self.begun.partition_point(|begun| begun.messages() <= same);
        &self.begun[..turns]
    }
}

/// Variables as text.
fn spelled(variables: Option<&Map<String, Value>>) -> Option<String> {
    // A map of values always serialises.
    variables.map(|variables| serde_json::to_string(variables).unwrap_or_default())
}

/// The last prompt of each conversation, within a bound of tokens.
pub(super) struct ChainCache {
    inner: Mutex<Inner>,
    tokens_max: usize,
}

struct Inner {
    prompts: LruCache<u128, Last>,
    tokens: usize,
}

impl ChainCache {
    pub(super) fn new(tokens_max: usize) -> Self {
        // The bound is in tokens; the number of entries follows from it.
        Self {
            inner: Mutex::new(Inner {
                prompts: LruCache::unbounded(),
                tokens: 0,
            }),
            tokens_max,
        }
    }

    /// A conversation's last prompt; empty where there is none.
    pub(super) fn last(&self, key: u128) -> Last {
        self.lock().prompts.get(&key).cloned().unwrap_or_default()
    }

    /// The chain of `tokens`, reusing what equals the conversation's last prompt: at least so many
    /// tokens are known to.
    pub(super) fn extend(
        &self,
        key: u128,
        namespace: &Namespace,
        (last, shared): (&Last, usize),
        tokens: Vec<u32>,
        held: Option<Held>,
    ) -> (Arc<Known>, Hashed) {
        let before = &last.known;
        let shared = shared / BLOCK_TOKENS;
        let begin = shared * BLOCK_TOKENS;
        let shared = shared + shared_blocks(&before.tokens[begin..], &tokens[begin..]);
        let mut hashes = Vec::with_capacity(tokens.len() / BLOCK_TOKENS);
        hashes.extend_from_slice(&before.hashes[..shared]);
        let parent = hashes.last().copied().unwrap_or(BlockHash::ROOT);
        hashes.extend(extend_chain(
            namespace,
            parent,
            &tokens[shared * BLOCK_TOKENS..],
        ));
        let hashed = Hashed {
            new: hashes.len() - shared,
            known: shared,
        };
        let known = Arc::new(Known { tokens, hashes });
        let last = Last {
            known: Arc::clone(&known),
            held: held.map(Arc::new),
        };
        self.remember(key, last);
        (known, hashed)
    }

    fn remember(&self, key: u128, last: Last) {
        let mut inner = self.lock();
        inner.tokens += last.known.tokens.len();
        if let Some(old) = inner.prompts.put(key, last) {
            inner.tokens -= old.known.tokens.len();
        }
        while inner.tokens > self.tokens_max {
            let Some((_, old)) = inner.prompts.pop_lru() else {
                break;
            };
            inner.tokens -= old.known.tokens.len();
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn shared_blocks(old: &[u32], new: &[u32]) -> usize {
    let (old, _) = old.as_chunks::<BLOCK_TOKENS>();
    let (new, _) = new.as_chunks::<BLOCK_TOKENS>();
    old.iter().zip(new).take_while(|(a, b)| a == b).count()
}

#[cfg(test)]
mod tests {
    //! Catches a chain that differs from hashing the whole prompt, and a cache past its bound.
    use super::*;
    use cache_index::block::hash_chain;

    #[test]
    fn a_reused_chain_equals_a_fresh_one() {
        let cache = ChainCache::new(1000);
        let namespace = Namespace::new("m", None, Some("s"));
        let base: Vec<u32> = (0..200).collect();
        let mut forked = base.clone();
        forked[40] = 7;
        for (tokens, known) in [
            (base[..100].to_vec(), 0),
            (base.clone(), 6),
            (forked, 2),
            (base[..20].to_vec(), 1),
            (Vec::new(), 0),
        ] {
            let fresh = hash_chain(&namespace, &tokens);
            let last = cache.last(1);
            let (chain, hashed) = cache.extend(1, &namespace, (&last, 0), tokens, None);
            assert_eq!(chain.hashes, fresh);
            assert_eq!(
                hashed,
                Hashed {
                    new: fresh.len() - known,
                    known
                }
            );
        }
    }

    #[test]
    fn the_oldest_conversations_go_first() {
        let cache = ChainCache::new(100);
        let namespace = Namespace::new("m", None, None);
        for key in 0..10 {
            cache.extend(key, &namespace, (&Last::default(), 0), vec![1; 40], None);
            let inner = cache.lock();
            assert!(inner.tokens <= 100);
            assert_eq!(inner.tokens, inner.prompts.len() * 40);
        }
        assert!(cache.lock().prompts.contains(&9));
    }
}
