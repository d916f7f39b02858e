//! What does the node say?
//!
//! The parts of a Chat Completions answer, or of a chunk of its stream, that become something in a
//! response. Fields that nobody here knows are skipped.

use serde::Deserialize;
use serde_json::value::RawValue;

use crate::answer::Malformed;

/// A chunk, or a whole answer.
#[derive(Deserialize)]
struct Completion<'a> {
    #[serde(borrow)]
    choices: Option<Vec<Choice<'a>>>,
}

/// What a choice says.
#[derive(Deserialize)]
pub(super) struct Choice<'a> {
    index: Option<u64>,
    delta: Option<Message>,
    message: Option<Message>,
    pub(super) finish_reason: Option<String>,
    #[serde(borrow)]
    logprobs: Option<Logprobs<'a>>,
}

#[derive(Deserialize)]
struct Logprobs<'a> {
    #[serde(borrow)]
    content: Option<&'a RawValue>,
}

/// A message, or what is added to it.
#[derive(Default, Deserialize)]
pub(super) struct Message {
    pub(super) content: Option<String>,
    reasoning_content: Option<String>,
    // The name that newer servers give it; some send both.
    reasoning: Option<String>,
    pub(super) refusal: Option<String>,
    pub(super) tool_calls: Option<Vec<Call>>,
}

/// A call, or what is added to it.
#[derive(Deserialize)]
pub(super) struct Call {
    pub(super) index: Option<usize>,
    pub(super) id: Option<String>,
    pub(super) function: Option<Function>,
}

/// Which function, and with what.
#[derive(Default, Deserialize)]
pub(super) struct Function {
    pub(super) name: Option<String>,
    pub(super) arguments: Option<String>,
}

impl Choice<'_> {
    /// The message, or what is added to it.
    pub(super) fn take_message(&mut self) -> Message {
        let message = self.delta.take().or_else(|| self.message.take());
        message.unwrap_or_default()
    }

    /// Log probabilities of the text's tokens: JSON objects with commas between them.
    pub(super) fn logprobs(&self) -> &str {
        let list = self.logprobs.as_ref().and_then(|logprobs| logprobs.content);
        let list = list.map_or("", RawValue::get).trim();
        let inner = list
            .strip_prefix('[')
            .and_then(|list| list.strip_suffix(']'));
        inner.unwrap_or_default().trim()
    }
}

impl Message {
    /// What the model thought.
    pub(super) fn take_reasoning(&mut self) -> Option<String> {
        self.reasoning_content
            .take()
            .or_else(|| self.reasoning.take())
    }
}

/// Reads the first choice of a chunk or of a whole answer; none for a chunk that only tells usage.
pub(super) fn choice(json: &[u8]) -> Result<Option<Choice<'_>>, Malformed> {
    let completion: Completion<'_> =
        serde_json::from_slice(json).map_err(|error| Malformed(error.to_string()))?;
    let choices = completion.choices.unwrap_or_default();
    Ok(choices
        .into_iter()
        .find(|choice| choice.index.unwrap_or(0) == 0))
}
