//! Which tokens is this request made of, and which will its answer be?
//!
//! With a model file, tokens are the model's own, by the crate that gateway and engine use, so that
//! block hashes equal theirs; a gateway may send them with the request. Without one, four bytes
//! count as a token. An answer is made of words that the tokenizer reads back as the very tokens
//! they came from, chosen by what the prompt is: two prompts that differ get answers that differ.

use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash, Hasher};
use std::path::Path;

use prompt::gguf::Header;
use prompt::{ChatInput, PromptBuilder, SegmentCache, Tokenizer};
use serde_json::Value;

use crate::error::LoadError;

/// Text remembered with its tokens, for all nodes of a process.
const SEGMENT_BYTES_MAX: usize = 64 << 20;
/// A common guess for English text and JSON.
const BYTES_PER_TOKEN: usize = 4;
/// So many words make answers that do not repeat soon.
const WORDS: usize = 1024;
/// Shorter ones are often no words.
const LETTERS_MIN: usize = 3;

/// How prompts become tokens, and answers text.
pub(crate) enum Prompts {
    /// By a model file.
    Exact(Box<Exact>),
    /// By their length.
    Estimate,
}

/// A model's tokenizer and its words.
pub(crate) struct Exact {
    builder: PromptBuilder,
    segments: SegmentCache,
    /// Tokens that begin an answer.
    openers: Vec<u32>,
    /// Tokens that go on: a space and a word.
    words: Vec<u32>,
}

impl Prompts {
    /// Reads the model file, if there is one.
    pub(crate) fn load(gguf: Option<&Path>) -> Result<Self, LoadError> {
        let Some(path) = gguf else {
            return Ok(Self::Estimate);
        };
        let wrong = |why: String| LoadError::Flag {
            flag: "--gguf",
            reason: format!("{}: {why}", path.display()),
        };
        let bytes = std::fs::read(path).map_err(LoadError::file(path))?;
        let header = Header::parse(&bytes).map_err(|e| wrong(e.to_string()))?;
        let builder = PromptBuilder::from_gguf(&header).map_err(|e| wrong(e.to_string()))?;
        let next = words(builder.tokenizer(), " ");
        let openers = words(builder.tokenizer(), "");
        if next.is_empty() || openers.is_empty() {
            return Err(wrong("its vocabulary has no English words".into()));
        }
        Ok(Self::Exact(Box::new(Exact {
            builder,
            segments: SegmentCache::new(SEGMENT_BYTES_MAX),
            openers,
            words: next,
        })))
    }

    /// The prompt's tokens.
    pub(crate) fn tokens(&self, request: &Value) -> Result<Vec<u32>, String> {
        if let Some(ids) = request["prompt_token_ids"].as_array() {
            let id = |id: &Value| id.as_u64().and_then(|id| u32::try_from(id).ok());
            let ids: Option<Vec<u32>> = ids.iter().map(id).collect();
            return ids.ok_or_else(|| "prompt_token_ids has something else than ids".into());
        }
        match (self, request["messages"].as_array()) {
            (Self::Exact(exact), Some(messages)) => {
                let input = ChatInput {
                    messages,
                    tools: request.get("tools").filter(|tools| !tools.is_null()),
                    template_kwargs: request["chat_template_kwargs"].as_object(),
                    unix_seconds: 0,
                };
                let tokens = exact.builder.chat(&input, &exact.segments);
                tokens.map_err(|error| error.to_string())
            }
            (Self::Exact(exact), None) => match request["prompt"].as_str() {
                Some(text) => Ok(exact.builder.completion(text, &exact.segments)),
                None => Err("neither messages nor a prompt that is a string".into()),
            },
            (Self::Estimate, _) => Ok(estimated(request)),
        }
    }

    /// So many tokens of answer.
    pub(crate) fn answer(&self, prompt: &[u32], count: usize) -> Vec<u32> {
        let mut hasher = DefaultHasher::new();
        prompt.hash(&mut hasher);
        let seed = hasher.finish();
        let pick = |from: &[u32], place: usize| {
            let mut hasher = DefaultHasher::new();
            (seed, place).hash(&mut hasher);
            let at = hasher.finish() % from.len() as u64;
            from[usize::try_from(at).unwrap_or(0)]
        };
        (0..count)
            .map(|place| match (self, place) {
                (Self::Exact(exact), 0) => pick(&exact.openers, 0),
                (Self::Exact(exact), place) => pick(&exact.words, place),
                (Self::Estimate, place) => pick(&[0], place),
            })
            .collect()
    }

    /// One token of an answer as text.
    pub(crate) fn text(&self, token: u32) -> String {
        match self {
            Self::Exact(exact) => {
                let bytes = exact.builder.tokenizer().token_bytes(token);
                String::from_utf8_lossy(bytes).into_owned()
            }
            Self::Estimate => "word ".into(),
        }
    }
}

/// Tokens that are `begin` and a word in small letters, and that the tokenizer makes of that text.
fn words(tokenizer: &Tokenizer, begin: &str) -> Vec<u32> {
    let all = 0..u32::try_from(tokenizer.vocab_size()).unwrap_or(u32::MAX);
    let is_word = |id: &u32| {
        let text = std::str::from_utf8(tokenizer.token_bytes(*id)).unwrap_or_default();
        let letters = text.strip_prefix(begin).unwrap_or_default();
        letters.len() >= LETTERS_MIN
            && letters.bytes().all(|byte| byte.is_ascii_lowercase())
            && tokenizer.encode_text(text) == [*id]
    };
    all.filter(|id| !tokenizer.is_control(*id))
        .filter(is_word)
        .take(WORDS)
        .collect()
}

/// Four bytes a token, each its own bytes: what two prompts share, their tokens share.
fn estimated(request: &Value) -> Vec<u32> {
    let parts = |name: &str| request[name].as_array().map_or(&[][..], Vec::as_slice);
    let messages = parts("tools").iter().chain(parts("messages"));
    let mut text: String = messages.map(|part| format!("{part}\n")).collect();
    text.push_str(request["prompt"].as_str().unwrap_or_default());
    text.as_bytes()
        .chunks(BYTES_PER_TOKEN)
        .map(|bytes| {
            let mut token = [0; BYTES_PER_TOKEN];
            token[..bytes.len()].copy_from_slice(bytes);
            u32::from_le_bytes(token)
        })
        .collect()
}
