//! How many tokens is this prompt, and what are its blocks called?
//!
//! Template, tokens and block hashes by the same code as the engine's, so that both agree on
//! counts and names. Text that was seen before is not tokenised again (`SegmentCache`), and of a
//! known conversation only the new blocks are hashed (`ChainCache`): hashing all of a 64 KB
//! prompt costs about 0.2 ms, finding where it equals the last turn's about 0.005 ms.
//!
//! A model without a tokenizer file is *approximate*: its tokens are estimated and it has no
//! chain, so that routes rest on sessions and load alone.

use std::collections::HashMap;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use ::prompt::gguf::Header;
use ::prompt::{Answered, ChatInput, ChatTokens, PromptBuilder, SegmentCache};
use cache_index::block::{BLOCK_TOKENS, BlockHash, Namespace, extend_chain};
use lru::LruCache;

use crate::config::Config;
use dialects::error::{ApiError, ErrorKind};
use dialects::{ChatPrompt, PromptInput};

/// Text and tokens remembered per model. A system prompt with tools is some 50 KB; this holds
/// the prompts of a thousand conversations.
const SEGMENT_BYTES_MAX: usize = 256 << 20;
/// Tokens remembered with their chains over all conversations: five bytes each, 80 MB.
const CHAIN_TOKENS_MAX: usize = 16 << 20;
/// No header is longer than this; what fails up to here is no model file.
const HEADER_BYTES_MAX: u64 = 1 << 30;
/// Bytes a token stands for where no tokenizer is known: English text has about four.
const BYTES_PER_TOKEN_ESTIMATE: usize = 4;

mod counts;
mod tokens;

/// The configured models and how their prompts are made.
pub struct Prompts {
    models: Vec<Arc<Model>>,
    by_id: HashMap<Arc<str>, Arc<Model>>,
    chains: ChainCache,
}

/// One model.
pub(crate) struct Model {
    /// Its id.
    pub(crate) id: Arc<str>,
    exact: Option<(PromptBuilder, SegmentCache)>,
}

/// A model file could not be used.
#[derive(Debug, thiserror::Error)]
#[error("model '{id}', file {path}: {why}")]
pub struct PromptsError {
    id: String,
    path: PathBuf,
    why: String,
}

/// A prompt, ready for routing.
#[derive(Debug, Clone)]
pub(crate) struct Planned {
    /// Its length.
    pub(crate) tokens: u64,
    /// Its full blocks; empty where the model is approximate.
    pub(crate) chain: Arc<Known>,
    /// Whether the length and the blocks are the engine's own.
    pub(crate) exact: bool,
    /// Answers within it whose tokens are those that were produced: a node that makes the prompt
    /// from the messages again would not come to these tokens.
    pub(crate) answers: usize,
}

impl Planned {
    /// Of so many tokens, none of which any cache holds, or would.
    fn uncached(tokens: u64) -> Self {
        Self {
            tokens,
            chain: Arc::default(),
            exact: false,
            answers: 0,
        }
    }

    /// Of a request that has no prompt.
    pub(crate) fn nothing() -> Self {
        Self::uncached(0)
    }

    /// The hash of the last full block, as the engine's header has it.
    pub(crate) fn last_block(&self) -> String {
        self.chain
            .hashes
            .last()
            .map(ToString::to_string)
            .unwrap_or_default()
    }

    /// Its tokens; empty where the model is approximate.
    pub(crate) fn token_ids(&self) -> &[u32] {
        &self.chain.tokens
    }
}

impl Model {
    /// Remembers an answer to `input`, for the next turn's prompt; false if that cannot be done.
    pub(crate) fn remember(
        &self,
        salt: &str,
        input: &PromptInput,
        answer: &Answered<'_>,
        unix_seconds: i64,
    ) -> bool {
        let (Some((builder, segments)), PromptInput::Chat(chat)) = (&self.exact, input) else {
            return false;
        };
        let input = chat_input(chat, unix_seconds);
        builder.remember(&input, answer, &segments.for_scope(salt))
    }
}

/// What the prompt crate is given.
fn chat_input(chat: &ChatPrompt, unix_seconds: i64) -> ChatInput<'_> {
    ChatInput {
        messages: &chat.messages,
        tools: chat.tools.as_ref(),
        template_kwargs: chat.template_kwargs.as_ref(),
        unix_seconds,
    }
}

impl Prompts {
    /// Reads tokenizer and template of every configured model.
    pub fn load(config: &Config) -> Result<Self, PromptsError> {
        let mut models = Vec::new();
        for model in &config.models {
            let exact = match &model.gguf {
                None => None,
                Some(path) => {
                    let failed = |why: String| PromptsError {
                        id: model.id.clone(),
                        path: path.clone(),
                        why,
                    };
                    let header = read_header(path).map_err(failed)?;
                    let builder = PromptBuilder::from_gguf(&header)
                        .map_err(|error| failed(error.to_string()))?;
                    Some((builder, SegmentCache::new(SEGMENT_BYTES_MAX)))
                }
            };
            models.push(Arc::new(Model {
                id: model.id.as_str().into(),
                exact,
            }));
        }
        let by_id = models
            .iter()
            .map(|model| (Arc::clone(&model.id), Arc::clone(model)))
            .collect();
        Ok(Self {
            models,
            by_id,
            chains: ChainCache::new(CHAIN_TOKENS_MAX),
        })
    }

    /// A model by its id.
    pub(crate) fn model(&self, id: &str) -> Option<&Arc<Model>> {
        self.by_id.get(id)
    }

    /// All models, in the configuration's order.
    pub(crate) fn models(&self) -> impl Iterator<Item = &Arc<Model>> {
        self.models.iter()
    }

    /// Tokens and block hashes of a prompt. `conversation` names what it probably continues.
    pub(crate) fn plan(
        &self,
        model: &Model,
        salt: &str,
        conversation: u128,
        input: &PromptInput,
        unix_seconds: i64,
    ) -> Result<(Planned, Hashed), ApiError> {
        let Some(exact) = model.exact.as_ref().filter(|_| input.is_prompt()) else {
            return Ok((Planned::uncached(estimate(input)), Hashed::default()));
        };
        let ChatTokens { tokens, answers } = tokens(exact, salt, input, unix_seconds)?;
        let count = tokens.len() as u64;
        let namespace = Namespace::new(&model.id, None, Some(salt));
        // The salt is part of the key: a conversation whose cache scope changed starts anew.
        let key = conversation_key(&model.id, salt, conversation);
        let (chain, hashed) = self.chains.extend(key, &namespace, tokens);
        Ok((
            Planned {
                tokens: count,
                chain,
                exact: true,
                answers,
            },
            hashed,
        ))
    }
}

impl Prompts {
    /// How many tokens a prompt has, nothing of it remembered as a conversation.
    pub(crate) fn count(
        &self,
        model: &Model,
        salt: &str,
        input: &PromptInput,
        unix_seconds: i64,
    ) -> Result<u64, ApiError> {
        match &model.exact {
            None => Ok(estimate(input)),
            Some(exact) => {
                tokens(exact, salt, input, unix_seconds).map(|tokens| tokens.tokens.len() as u64)
            }
        }
    }
}

/// The tokens of a prompt. A scope of its own: the time to encode must not tell one tenant what
/// another has sent.
fn tokens(
    (builder, segments): &(PromptBuilder, SegmentCache),
    salt: &str,
    input: &PromptInput,
    unix_seconds: i64,
) -> Result<ChatTokens, ApiError> {
    let segments = &segments.for_scope(salt);
    match input {
        PromptInput::Chat(chat) => builder
            .chat_with_answers(&chat_input(chat, unix_seconds), segments)
            .map_err(|error| {
                ApiError::param(ErrorKind::InvalidValue, error.param(), error.to_string())
            }),
        PromptInput::Text(text) => Ok(ChatTokens {
            tokens: builder.completion(text, segments),
            answers: 0,
        }),
        PromptInput::Vectors { .. } => Ok(ChatTokens {
            tokens: Vec::new(),
            answers: 0,
        }),
    }
}

/// Reads a model file as far as its header goes: the weights behind it may be larger than memory.
fn read_header(path: &Path) -> Result<Header, String> {
    /// Vocabularies of 128,000 tokens with their merges take about 8 MB.
    const FIRST_READ_BYTES: u64 = 16 << 20;
    let file = File::open(path).map_err(|error| error.to_string())?;
    let length = file.metadata().map_err(|error| error.to_string())?.len();
    let mut prefix = Vec::new();
    let mut most = FIRST_READ_BYTES;
    loop {
        let more = most.saturating_sub(prefix.len() as u64);
        (&file)
            .take(more)
            .read_to_end(&mut prefix)
            .map_err(|error| error.to_string())?;
        match Header::parse_prefix(&prefix, length) {
            Ok(header) => return Ok(header),
            Err(error) if prefix.len() as u64 >= length.min(HEADER_BYTES_MAX) => {
                return Err(error.to_string());
            }
            Err(_) => most = most.saturating_mul(4),
        }
    }
}

fn estimate(input: &PromptInput) -> u64 {
    let bytes = match input {
        PromptInput::Text(text) => text.len(),
        PromptInput::Vectors { text_bytes } => usize::try_from(*text_bytes).unwrap_or(usize::MAX),
        PromptInput::Chat(chat) => {
            let length = |value: &serde_json::Value| value.to_string().len();
            let messages = chat.messages.iter().map(length).sum::<usize>();
            messages + chat.tools.as_ref().map_or(0, length)
        }
    };
    (bytes.div_ceil(BYTES_PER_TOKEN_ESTIMATE)) as u64
}

fn conversation_key(model: &str, salt: &str, conversation: u128) -> u128 {
    let mut hasher = blake3::Hasher::new();
    hasher
        .update(&(model.len() as u64).to_le_bytes())
        .update(model.as_bytes());
    hasher
        .update(salt.as_bytes())
        .update(&conversation.to_le_bytes());
    let mut half = [0; 16];
    half.copy_from_slice(&hasher.finalize().as_bytes()[..16]);
    u128::from_le_bytes(half)
}

/// A prompt's tokens and the hashes of its full blocks.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Known {
    tokens: Vec<u32>,
    /// One per full block.
    pub(crate) hashes: Vec<BlockHash>,
}

/// How many blocks were hashed, and how many were known.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Hashed {
    pub(crate) new: usize,
    pub(crate) known: usize,
}

/// The last prompt of each conversation, within a bound of tokens.
struct ChainCache {
    inner: Mutex<Inner>,
    tokens_max: usize,
}

struct Inner {
    prompts: LruCache<u128, Arc<Known>>,
    tokens: usize,
}

impl ChainCache {
    fn new(tokens_max: usize) -> Self {
        // The bound is in tokens; the number of entries follows from it.
        Self {
            inner: Mutex::new(Inner {
                prompts: LruCache::unbounded(),
                tokens: 0,
            }),
            tokens_max,
        }
    }

    /// The chain of `tokens`, reusing what equals the conversation's last prompt.
    fn extend(&self, key: u128, namespace: &Namespace, tokens: Vec<u32>) -> (Arc<Known>, Hashed) {
        let before = self.lock().prompts.get(&key).cloned().unwrap_or_default();
        let shared = shared_blocks(&before.tokens, &tokens);
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
        self.remember(key, Arc::clone(&known));
        (known, hashed)
    }

    fn remember(&self, key: u128, known: Arc<Known>) {
        let mut inner = self.lock();
        inner.tokens += known.tokens.len();
        if let Some(old) = inner.prompts.put(key, known) {
            inner.tokens -= old.tokens.len();
        }
        while inner.tokens > self.tokens_max {
            let Some((_, old)) = inner.prompts.pop_lru() else {
                break;
            };
            inner.tokens -= old.tokens.len();
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
            let (chain, hashed) = cache.extend(1, &namespace, tokens);
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
            cache.extend(key, &namespace, vec![1; 40]);
            let inner = cache.lock();
            assert!(inner.tokens <= 100);
            assert_eq!(inner.tokens, inner.prompts.len() * 40);
        }
        assert!(cache.lock().prompts.contains(&9));
    }
}
