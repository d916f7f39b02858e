//! What does a node say?
//!
//! The parts of a chat chunk, and of a whole chat answer, that become something. Texts stay the
//! node's own JSON: they go into the client's events without being read and written again.

use serde::Deserialize;
use serde_json::value::RawValue;

use crate::answer::Malformed;

/// A chunk of a stream.
#[derive(Debug, Deserialize)]
pub(super) struct Chunk<'a> {
    #[serde(borrow)]
    pub(super) id: Option<&'a RawValue>,
    #[serde(borrow)]
    pub(super) choices: Option<Vec<Choice<'a>>>,
    pub(super) usage: Option<NodeUsage>,
}

/// One answer's part of it.
#[derive(Debug, Deserialize)]
pub(super) struct Choice<'a> {
    pub(super) index: Option<u64>,
    #[serde(borrow)]
    pub(super) delta: Option<Delta<'a>>,
    pub(super) finish_reason: Option<String>,
    /// vLLM's: the stop string, or the stop token's id.
    #[serde(borrow)]
    pub(super) stop_reason: Option<&'a RawValue>,
    /// SGLang's name for it.
    #[serde(borrow)]
    pub(super) matched_stop: Option<&'a RawValue>,
}

/// What is new.
#[derive(Debug, Deserialize)]
pub(super) struct Delta<'a> {
    #[serde(borrow)]
    pub(super) content: Option<&'a RawValue>,
    #[serde(borrow)]
    pub(super) reasoning_content: Option<&'a RawValue>,
    /// The name that newer nodes give it.
    #[serde(borrow)]
    pub(super) reasoning: Option<&'a RawValue>,
    #[serde(borrow)]
    pub(super) refusal: Option<&'a RawValue>,
    #[serde(borrow)]
    pub(super) tool_calls: Option<Vec<CallDelta<'a>>>,
}

/// What is new of a call.
#[derive(Debug, Deserialize)]
pub(super) struct CallDelta<'a> {
    pub(super) index: Option<u64>,
    pub(super) id: Option<String>,
    #[serde(borrow)]
    pub(super) function: Option<FunctionDelta<'a>>,
}

/// What is new of its function.
#[derive(Debug, Deserialize)]
pub(super) struct FunctionDelta<'a> {
    pub(super) name: Option<String>,
    #[serde(borrow)]
    pub(super) arguments: Option<&'a RawValue>,
}

/// A whole answer.
#[derive(Debug, Deserialize)]
pub(super) struct Completion {
    pub(super) id: Option<String>,
    pub(super) choices: Vec<WholeChoice>,
}

/// One answer.
#[derive(Debug, Deserialize)]
pub(super) struct WholeChoice {
    pub(super) message: Message,
    pub(super) finish_reason: Option<String>,
    pub(super) stop_reason: Option<serde_json::Value>,
    pub(super) matched_stop: Option<serde_json::Value>,
}

/// Its message.
#[derive(Debug, Deserialize)]
pub(super) struct Message {
    pub(super) content: Option<String>,
    pub(super) reasoning_content: Option<String>,
    pub(super) reasoning: Option<String>,
    pub(super) refusal: Option<String>,
    pub(super) tool_calls: Option<Vec<WholeCall>>,
}

/// A call in it.
#[derive(Debug, Deserialize)]
pub(super) struct WholeCall {
    pub(super) id: Option<String>,
    pub(super) function: WholeFunction,
}

/// The function that it calls.
#[derive(Debug, Deserialize)]
pub(super) struct WholeFunction {
    pub(super) name: String,
    pub(super) arguments: Option<String>,
}

/// The tokens that a node reports.
#[derive(Debug, Clone, Copy, Deserialize)]
pub(super) struct NodeUsage {
    pub(super) prompt_tokens: Option<u64>,
    pub(super) completion_tokens: Option<u64>,
    pub(super) prompt_tokens_details: Option<PromptDetails>,
}

/// Where a prompt's tokens came from.
#[derive(Debug, Clone, Copy, Deserialize)]
pub(super) struct PromptDetails {
    pub(super) cached_tokens: Option<u64>,
}

/// The inside of a JSON string, escapes and all; none if it is empty or null.
pub(super) fn inside(raw: Option<&RawValue>) -> Result<Option<&str>, Malformed> {
    let Some(raw) = raw else {
        return Ok(None);
    };
    let text = raw.get();
    let inside = text
        .strip_prefix('"')
        .and_then(|text| text.strip_suffix('"'));
    match inside {
        Some(inside) => Ok(Some(inside).filter(|inside| !inside.is_empty())),
        None => Err(Malformed(format!(
            "{text:.40} stands where a string belongs"
        ))),
    }
}

/// Whether the inside of a JSON string spells nothing but whitespace.
pub(super) fn is_blank(inside: &str) -> bool {
    let mut bytes = inside.bytes();
    while let Some(byte) = bytes.next() {
        let is_space = match byte {
            b' ' => true,
            b'\\' => match bytes.next() {
                Some(b'n' | b't' | b'r') => true,
                Some(b'u') => return is_blank_when_read(inside),
                _ => false,
            },
            0x80.. => return is_blank_when_read(inside),
            _ => false,
        };
        if !is_space {
            return false;
        }
    }
    true
}

/// The rare spelling, as the twin has it.
fn is_blank_when_read(inside: &str) -> bool {
    let read: Result<String, _> = serde_json::from_str(&format!("\"{inside}\""));
    read.is_ok_and(|text| text.trim().is_empty())
}
