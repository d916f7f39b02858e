//! How many tokens is this prompt, and what are its blocks called?
//!
//! Template, tokens and block hashes by the same code as the engine's, so that both agree on
//! counts and names. Text that was seen before is not tokenised again (`SegmentCache`), and of a
//! known conversation only the new messages are rendered and the new blocks hashed (`chains`).
//!
//! A model without a tokenizer file is *approximate*: its tokens are estimated and it has no
//! chain, so that routes rest on sessions and load alone.

use std::collections::HashMap;
#[cfg(test)]
use std::path::Path;
use std::path::PathBuf;
use std::sync::Arc;

use ::prompt::{Answered, ChatInput, ChatTokens, PromptBuilder, PromptError, SegmentCache};
use cache_index::block::Namespace;

use crate::config::Config;
use dialects::error::{ApiError, ErrorKind};
use dialects::{ChatPrompt, PromptInput, Shared};

/// Text and tokens remembered per model. A system prompt with tools is some 50 KB; this holds
/// the prompts of a thousand conversations.
const SEGMENT_BYTES_MAX: usize = 256 << 20;
/// Tokens remembered with their chains over all conversations: five bytes each, 80 MB.
const CHAIN_TOKENS_MAX: usize = 16 << 20;
/// Bytes a token stands for where no tokenizer is known: English text has about four.
const BYTES_PER_TOKEN_ESTIMATE: usize = 4;

mod chains;
mod counts;
mod file;
mod tokens;

use self::chains::{ChainCache, Held, Last};
pub(crate) use self::chains::{Hashed, Known};
use self::file::read_header;

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
fn chat_input(chat: &ChatPrompt, unix_seconds: i64) -> ChatInput<'_, Shared> {
    ChatInput {
        messages: &chat.messages,
        tools: chat.tools.as_deref(),
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
        let namespace = Namespace::new(&model.id, None, Some(salt));
        // The salt is part of the key: a conversation whose cache scope changed starts anew.
        let key = conversation_key(&model.id, salt, conversation);
        let last = self.chains.last(key);
        let Made {
            prompt: ChatTokens { tokens, answers },
            shared,
            held,
        } = made(exact, salt, input, (&last, unix_seconds))?;
        let count = tokens.len() as u64;
        let (chain, hashed) = self
            .chains
            .extend(key, &namespace, (&last, shared), tokens, held);
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

#[cfg(test)]
impl Prompts {
    /// One model, of a file and perhaps with another template; none if there is no such file.
    pub(crate) fn of_model(id: &str, path: &Path, template: Option<&str>) -> Option<Self> {
        let mut header = read_header(path).ok()?;
        if let Some(template) = template {
            let template = ::prompt::gguf::Value::Str(template.into());
            header
                .metadata
                .insert("tokenizer.chat_template".into(), template);
        }
        let builder = PromptBuilder::from_gguf(&header).ok()?;
        let model = Arc::new(Model {
            id: id.into(),
            exact: Some((builder, SegmentCache::new(SEGMENT_BYTES_MAX))),
        });
        Some(Self {
            models: vec![Arc::clone(&model)],
            by_id: [(Arc::clone(&model.id), model)].into(),
            chains: ChainCache::new(CHAIN_TOKENS_MAX),
        })
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

/// A prompt that was made for a turn.
struct Made {
    prompt: ChatTokens,
    /// How many of its tokens are known to be the conversation's last prompt's.
    shared: usize,
    /// What the next turn can continue.
    held: Option<Held>,
}

/// Makes a prompt: of a conversation that continues its last one, the new part.
fn made(
    exact: &(PromptBuilder, SegmentCache),
    salt: &str,
    input: &PromptInput,
    (last, unix_seconds): (&Last, i64),
) -> Result<Made, ApiError> {
    let PromptInput::Chat(chat) = input else {
        return Ok(Made {
            prompt: tokens(exact, salt, input, unix_seconds)?,
            shared: 0,
            held: None,
        });
    };
    let (builder, segments) = exact;
    let segments = &segments.for_scope(salt);
    let chat_input = &chat_input(chat, unix_seconds);
    let held = last.held.as_ref();
    let mut before = held.map_or(&[][..], |held| held.continued_by(chat));
    let grown = before.last().and_then(|begun| {
        let grown = builder.chat_grown(begun, &last.known.tokens, chat_input, segments)?;
        Some((begun.tokens(), grown))
    });
    let (shared, prompt, begun) = match grown {
        Some((shared, (prompt, begun))) => (shared, prompt, Some(begun)),
        None => {
            before = &[];
            let made = builder.chat_begun(chat_input, segments);
            let (prompt, begun) = made.map_err(|error| refusal(&error))?;
            (0, prompt, begun)
        }
    };
    Ok(Made {
        prompt,
        shared,
        held: begun.map(|begun| Held::new(chat, before, begun)),
    })
}

fn refusal(error: &PromptError) -> ApiError {
    ApiError::param(ErrorKind::InvalidValue, error.param(), error.to_string())
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
            .map_err(|error| refusal(&error)),
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

fn estimate(input: &PromptInput) -> u64 {
    let bytes = match input {
        PromptInput::Text(text) => text.len(),
        PromptInput::Vectors { text_bytes } => usize::try_from(*text_bytes).unwrap_or(usize::MAX),
        PromptInput::Chat(chat) => {
            let length = |value: &Shared| value.json().len();
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
