//! What does one chunk of an answer say about tokens?
//!
//! Reads only what the bill needs, borrowed from the event's bytes and without building values:
//! does it carry generated text, does it end a choice, does it hold the usage. A chunk whose fields
//! have unexpected types is relayed all the same, and not counted.

use serde::Deserialize;
use serde::de::{Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};
use std::fmt;

/// What the bill wants to know of a chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct ChunkFacts {
    /// Generated tokens: as many as the node names, and at least one for each choice with text.
    pub(crate) tokens: u64,
    /// There is something in it for a client besides tokens: text, an end, a role, a usage.
    pub(crate) tells: bool,
    /// It has no choices: the shape of the chunk with the usage.
    pub(crate) no_choices: bool,
    /// Choices that it ends.
    pub(crate) finished: u64,
    /// It says that the node failed.
    pub(crate) failed: bool,
    /// The usage, if it is there.
    pub(crate) usage: Option<NodeUsage>,
}

/// The tokens of a request as the node counted them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct NodeUsage {
    /// Prompt tokens.
    pub(crate) input: u64,
    /// Of these, read from cache; a node that does not say so is billed as if none had been.
    pub(crate) cached: u64,
    /// Generated tokens.
    pub(crate) output: u64,
}

/// Reads a chunk; none if it is not a JSON object.
pub(crate) fn facts(data: &[u8]) -> Option<ChunkFacts> {
    let chunk: Chunk = serde_json::from_slice(data).ok()?;
    let choices = chunk.choices.unwrap_or_default();
    Some(ChunkFacts {
        tokens: choices.tokens,
        tells: choices.tells || choices.count == 0 || chunk.usage.is_some(),
        no_choices: choices.count == 0,
        finished: choices.finished,
        failed: chunk.error.is_some(),
        usage: chunk.usage.map(NodeUsage::from),
    })
}

/// Reads the usage of a whole answer.
pub(crate) fn usage_of_whole(body: &[u8]) -> Option<NodeUsage> {
    let whole: Whole = serde_json::from_slice(body).ok()?;
    whole.usage.map(NodeUsage::from)
}

#[derive(Deserialize)]
struct Whole {
    usage: Option<WireUsage>,
}

#[derive(Deserialize)]
struct Chunk {
    choices: Option<Choices>,
    usage: Option<WireUsage>,
    error: Option<IgnoredAny>,
}

#[derive(Deserialize)]
struct WireUsage {
    prompt_tokens: u64,
    completion_tokens: Option<u64>,
    prompt_tokens_details: Option<Details>,
}

#[derive(Deserialize)]
struct Details {
    cached_tokens: Option<u64>,
}

impl From<WireUsage> for NodeUsage {
    fn from(wire: WireUsage) -> Self {
        let cached = wire
            .prompt_tokens_details
            .and_then(|details| details.cached_tokens);
        Self {
            input: wire.prompt_tokens,
            // More cached than there was would bill a negative remainder.
            cached: cached.unwrap_or(0).min(wire.prompt_tokens),
            output: wire.completion_tokens.unwrap_or(0),
        }
    }
}

/// Counts over the choices of a chunk, without keeping them.
#[derive(Default)]
struct Choices {
    count: u64,
    tokens: u64,
    finished: u64,
    tells: bool,
}

impl<'de> Deserialize<'de> for Choices {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Count;
        impl<'de> Visitor<'de> for Count {
            type Value = Choices;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a list of choices")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Choices, A::Error> {
                let mut counts = Choices::default();
                while let Some(choice) = seq.next_element::<Choice>()? {
                    counts.count += 1;
                    let named = choice.token_ids.as_ref().map_or(0, |ids| ids.0);
                    counts.tokens += named.max(u64::from(choice.has_text()));
                    counts.finished += u64::from(choice.finish_reason.is_some());
                    counts.tells |= choice.tells();
                }
                Ok(counts)
            }
        }
        deserializer.deserialize_seq(Count)
    }
}

#[derive(Deserialize)]
struct Choice {
    delta: Option<Delta>,
    text: Option<Filled>,
    finish_reason: Option<IgnoredAny>,
    logprobs: Option<IgnoredAny>,
    token_ids: Option<Length>,
}

/// The places in which engines put generated text.
#[derive(Deserialize)]
struct Delta {
    role: Option<IgnoredAny>,
    content: Option<Filled>,
    reasoning_content: Option<Filled>,
    reasoning: Option<Filled>,
    refusal: Option<Filled>,
    tool_calls: Option<Filled>,
    function_call: Option<Filled>,
}

impl Choice {
    /// Whether a client learns anything from it.
    fn tells(&self) -> bool {
        let role = self
            .delta
            .as_ref()
            .is_some_and(|delta| delta.role.is_some());
        role || self.has_text() || self.finish_reason.is_some() || self.logprobs.is_some()
    }

    fn has_text(&self) -> bool {
        let filled = |field: &Option<Filled>| field.as_ref().is_some_and(|Filled(filled)| *filled);
        filled(&self.text)
            || self.delta.as_ref().is_some_and(|delta| {
                let Delta {
                    role: _,
                    content,
                    reasoning_content,
                    reasoning,
                    refusal,
                    tool_calls,
                    function_call,
                } = delta;
                [
                    content,
                    reasoning_content,
                    reasoning,
                    refusal,
                    tool_calls,
                    function_call,
                ]
                .into_iter()
                .any(filled)
            })
    }
}

/// How many items a list has.
struct Length(u64);

impl<'de> Deserialize<'de> for Length {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Count;
        impl<'de> Visitor<'de> for Count {
            type Value = Length;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a list")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Length, A::Error> {
                let mut count = 0;
                while seq.next_element::<IgnoredAny>()?.is_some() {
                    count += 1;
                }
                Ok(Length(count))
            }
        }
        deserializer.deserialize_seq(Count)
    }
}

/// Whether a string, list or object has anything in it.
struct Filled(bool);

impl<'de> Deserialize<'de> for Filled {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Any;
        impl<'de> Visitor<'de> for Any {
            type Value = Filled;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("any value")
            }

            fn visit_str<E>(self, text: &str) -> Result<Filled, E> {
                Ok(Filled(!text.is_empty()))
            }

            fn visit_unit<E>(self) -> Result<Filled, E> {
                Ok(Filled(false))
            }

            fn visit_bool<E>(self, _: bool) -> Result<Filled, E> {
                Ok(Filled(false))
            }

            fn visit_u64<E>(self, _: u64) -> Result<Filled, E> {
                Ok(Filled(false))
            }

            fn visit_i64<E>(self, _: i64) -> Result<Filled, E> {
                Ok(Filled(false))
            }

            fn visit_f64<E>(self, _: f64) -> Result<Filled, E> {
                Ok(Filled(false))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Filled, A::Error> {
                let mut filled = false;
                while seq.next_element::<IgnoredAny>()?.is_some() {
                    filled = true;
                }
                Ok(Filled(filled))
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Filled, A::Error> {
                let mut filled = false;
                while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {
                    filled = true;
                }
                Ok(Filled(filled))
            }
        }
        deserializer.deserialize_any(Any)
    }
}
