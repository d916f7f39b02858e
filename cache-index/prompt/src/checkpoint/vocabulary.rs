//! What does `tokenizer.json` hold? Its parts, taken apart without believing any of them: a vocabulary of
//! unique ids without large gaps, merges as pairs, and the small parts as JSON.

use std::fmt;

use hashbrown::HashMap;
use serde::Deserialize;
use serde::de::{Deserializer, Error as _, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::Value as Json;
use serde_json::value::RawValue;

use super::{CheckpointError, TOKENIZER};

/// Most tokens; the largest published vocabulary has 262,144.
const TOKENS_MAX: usize = 1 << 20;
/// Most merges; the largest published list has 580,604.
const MERGES_MAX: usize = 1 << 21;
/// Bytes of a normalizer, pre-tokenizer or post-processor: those that are understood take less.
const PART_BYTES_MAX: usize = 1 << 20;

/// The file, as far as it matters here.
#[derive(Deserialize)]
pub(super) struct TokenizerFile {
    #[serde(default)]
    pub(super) added_tokens: Vec<Added>,
    normalizer: Option<Box<RawValue>>,
    pre_tokenizer: Option<Box<RawValue>>,
    post_processor: Option<Box<RawValue>>,
    pub(super) model: Model,
}

/// A token beside the vocabulary, or one of it that is found in any text.
#[derive(Debug, Deserialize)]
pub(super) struct Added {
    pub(super) id: u64,
    pub(super) content: String,
    #[serde(default)]
    pub(super) special: bool,
    #[serde(default)]
    pub(super) single_word: bool,
    #[serde(default)]
    pub(super) lstrip: bool,
    #[serde(default)]
    pub(super) rstrip: bool,
}

/// Vocabulary and merges.
#[derive(Deserialize)]
pub(super) struct Model {
    #[serde(rename = "type")]
    pub(super) kind: Option<String>,
    vocab: Tokens,
    #[serde(default)]
    pub(super) merges: Merges,
    pub(super) unk_token: Option<String>,
    #[serde(default)]
    pub(super) byte_fallback: bool,
    #[serde(default)]
    pub(super) ignore_merges: bool,
    continuing_subword_prefix: Option<String>,
    end_of_word_suffix: Option<String>,
}

/// The small parts, as JSON.
pub(super) struct Parts {
    pub(super) normalizer: Json,
    pub(super) pre_tokenizer: Json,
    pub(super) post_processor: Json,
}

impl TokenizerFile {
    pub(super) fn parse(text: &str) -> Result<Self, CheckpointError> {
        let file: Self = serde_json::from_str(text).map_err(|error| {
            CheckpointError::damaged(TOKENIZER, format!("is not a tokenizer's: {error}"))
        })?;
        let kind = file.model.kind.as_deref();
        if kind.is_some_and(|kind| kind != "BPE") || matches!(file.model.vocab, Tokens::Scored) {
            let found = kind
                .unwrap_or("missing")
                .chars()
                .take(40)
                .collect::<String>();
            return Err(CheckpointError::value(
                TOKENIZER,
                "model.type",
                found,
                "BPE",
            ));
        }
        let affixes = [
            &file.model.continuing_subword_prefix,
            &file.model.end_of_word_suffix,
        ];
        if let Some(affix) = affixes
            .into_iter()
            .flatten()
            .find(|affix| !affix.is_empty())
        {
            let key = "model.continuing_subword_prefix and end_of_word_suffix";
            return Err(CheckpointError::value(
                TOKENIZER,
                key,
                format!("{affix:?}"),
                "empty",
            ));
        }
        Ok(file)
    }

    pub(super) fn parts(&self) -> Result<Parts, CheckpointError> {
        let part = |key: &str, raw: &Option<Box<RawValue>>| {
            let text = raw.as_ref().map_or("null", |raw| raw.get());
            if text.len() > PART_BYTES_MAX {
                let why = format!("has a {key} of {} bytes", text.len());
                return Err(CheckpointError::damaged(TOKENIZER, why));
            }
            let damaged = |error| {
                CheckpointError::damaged(
                    TOKENIZER,
                    format!("has a {key} that is not JSON: {error}"),
                )
            };
            serde_json::from_str(text).map_err(damaged)
        };
        Ok(Parts {
            normalizer: part("normalizer", &self.normalizer)?,
            pre_tokenizer: part("pre_tokenizer", &self.pre_tokenizer)?,
            post_processor: part("post_processor", &self.post_processor)?,
        })
    }

    /// Token texts by id; `None` where the file has none of that id.
    pub(super) fn texts(&self) -> Result<Vec<Option<&str>>, CheckpointError> {
        let Tokens::Known(known) = &self.model.vocab else {
            return Ok(Vec::new());
        };
        let known = known.iter().map(|(text, id)| (text.as_str(), *id));
        let added = self
            .added_tokens
            .iter()
            .map(|added| (added.content.as_str(), added.id));
        let all: Vec<(&str, u64)> = known.chain(added).collect();
        // A few are left out in published files, never most.
        let most = (2 * all.len() as u64).min(TOKENS_MAX as u64);
        let len = all
            .iter()
            .map(|(_, id)| id.saturating_add(1))
            .max()
            .unwrap_or(0);
        if len > most {
            let why = format!(
                "names the token id {}; at most {most} are possible",
                len - 1
            );
            return Err(CheckpointError::damaged(TOKENIZER, why));
        }
        let mut texts = vec![None; len as usize];
        for (text, id) in all {
            match &mut texts[id as usize] {
                // An added token may be in the vocabulary too.
                Some(other) if *other != text => {
                    let why = format!("has two tokens of the id {id}: {other:?} and {text:?}");
                    return Err(CheckpointError::damaged(TOKENIZER, why));
                }
                place => *place = Some(text),
            }
        }
        let mut ids = HashMap::with_capacity(texts.len());
        for (id, text) in texts.iter().enumerate() {
            if let Some(text) = text
                && let Some(other) = ids.insert(*text, id)
            {
                let why = format!("has the token {text:?} twice, as {other} and {id}");
                return Err(CheckpointError::damaged(TOKENIZER, why));
            }
        }
        Ok(texts)
    }
}

/// The vocabulary: text to id.
enum Tokens {
    Known(Vec<(String, u64)>),
    /// Texts with scores, as Unigram models have them.
    Scored,
}

impl<'de> Deserialize<'de> for Tokens {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct All;
        impl<'de> Visitor<'de> for All {
            type Value = Tokens;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "a vocabulary of up to {TOKENS_MAX} tokens")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut items: A) -> Result<Tokens, A::Error> {
                let mut tokens = Vec::new();
                while let Some(token) = items.next_entry()? {
                    if tokens.len() == TOKENS_MAX {
                        return Err(A::Error::invalid_length(TOKENS_MAX + 1, &self));
                    }
                    tokens.push(token);
                }
                Ok(Tokens::Known(tokens))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Tokens, A::Error> {
                while items.next_element::<IgnoredAny>()?.is_some() {}
                Ok(Tokens::Scored)
            }
        }
        from.deserialize_any(All)
    }
}

/// Pairs that are joined, first learned first.
#[derive(Default)]
pub(super) struct Merges(pub(super) Vec<(String, String)>);

/// `"a b"`, or `["a", "b"]` in files of newer versions.
struct Merge(String, String);

impl<'de> Deserialize<'de> for Merge {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct One;
        impl<'de> Visitor<'de> for One {
            type Value = Merge;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("two tokens")
            }

            fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<Merge, E> {
                match text.split_once(' ') {
                    Some((left, right)) => Ok(Merge(left.to_owned(), right.to_owned())),
                    None => Err(E::invalid_value(serde::de::Unexpected::Str(text), &self)),
                }
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Merge, A::Error> {
                let (left, right) = (items.next_element()?, items.next_element()?);
                match (left, right, items.next_element::<IgnoredAny>()?) {
                    (Some(left), Some(right), None) => Ok(Merge(left, right)),
                    _ => Err(A::Error::custom("a merge is of two tokens")),
                }
            }
        }
        from.deserialize_any(One)
    }
}

impl<'de> Deserialize<'de> for Merges {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct All;
        impl<'de> Visitor<'de> for All {
            type Value = Merges;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "a list of up to {MERGES_MAX} merges")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Merges, A::Error> {
                let mut merges = Vec::new();
                while let Some(Merge(left, right)) = items.next_element()? {
                    if merges.len() == MERGES_MAX {
                        return Err(A::Error::invalid_length(MERGES_MAX + 1, &self));
                    }
                    merges.push((left, right));
                }
                Ok(Merges(merges))
            }
        }
        from.deserialize_seq(All)
    }
}
