//! How does a model see tools when its template does not know them? In the form of the Hermes
//! models, which most open models have met in training; docs/TOOLS.md shows it.
//!
//! Each part stands in for the template on its own: the tools become a preamble of the system
//! message where the template never reads `tools`; an assistant's calls become `<tool_call>` blocks
//! at the end of its content where it never reads `tool_calls`; results become `<tool_response>`
//! blocks in a user turn where it has no `tool` role; reasoning becomes a `<think>` block before
//! the content where it never reads `reasoning_content`.
//!
//! All of it depends on the messages and the tools alone, and on what comes before only, so that
//! the next turn's prompt begins with this one's. JSON is spelled as `tojson` does it.

use minijinja::Error;
use serde_json::Value as Json;

use crate::calls::Call;
use crate::error::{LoadError, PromptError};
use crate::json;
use crate::marks::Marks;
use crate::messages::invalid;
use crate::tokenizer::Tokenizer;

const PREAMBLE_HEAD: &str = "# Tools\n\nYou may call one or more functions to assist with the user \
query.\n\nYou are provided with function signatures within <tools></tools> XML tags:\n<tools>";
const PREAMBLE_TAIL: &str = "\n</tools>\n\nFor each function call, return a json object with \
function name and arguments within <tool_call></tool_call> XML tags:\n<tool_call>\n{\"name\": \
<function-name>, \"arguments\": <args-json-object>}\n</tool_call>";

/// What a template renders by itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Knows {
    /// The variable `tools`.
    pub(crate) tools: bool,
    /// The field `tool_calls` of an assistant's message.
    pub(crate) tool_calls: bool,
    /// Messages with the role `tool`.
    pub(crate) tool_role: bool,
    /// The field `reasoning_content` of an assistant's message.
    pub(crate) reasoning: bool,
    /// Messages with the role `system`; learnt by rendering one.
    pub(crate) system: bool,
}

impl Knows {
    /// What the source of a template mentions. The engine asks the same of `tools` when it chooses
    /// the form in which it reads calls, so that a model is read as it was told to write.
    pub(crate) fn of(source: &str) -> Self {
        let mentions = |words: &[&str]| words.iter().any(|word| source.contains(word));
        Self {
            tools: mentions(&["tools"]),
            tool_calls: mentions(&["tool_calls"]),
            tool_role: mentions(&["'tool'", "\"tool\""]),
            reasoning: mentions(&["reasoning_content"]),
            system: true,
        }
    }
}

/// The words of the form, with marks where the vocabulary has a control token of that spelling.
#[derive(Debug, Clone)]
pub(crate) struct Hermes {
    preamble_head: String,
    preamble_tail: String,
    call_open: String,
    call_close: String,
    result_open: String,
    result_close: String,
    think_open: String,
    think_close: String,
}

impl Hermes {
    pub(crate) fn new(marks: &mut Marks, tokenizer: &Tokenizer) -> Result<Self, LoadError> {
        let mut marked = |text: &str| marks.mark_source(text, tokenizer);
        Ok(Self {
            preamble_head: marked(PREAMBLE_HEAD)?,
            preamble_tail: marked(PREAMBLE_TAIL)?,
            call_open: marked("<tool_call>\n")?,
            call_close: marked("\n</tool_call>")?,
            result_open: marked("<tool_response>\n")?,
            result_close: marked("\n</tool_response>")?,
            think_open: marked("<think>\n")?,
            think_close: marked("\n</think>\n\n")?,
        })
    }

    /// The preamble for these tools.
    pub(crate) fn preamble(&self, tools: &[Json], marks: &Marks) -> Result<String, PromptError> {
        let mut text = self.preamble_head.clone();
        for (at, tool) in tools.iter().enumerate() {
            text.push('\n');
            json::spell(tool, marks, &mut text)
                .map_err(|error| unspellable(&format!("tools[{at}]"), &error))?;
        }
        text.push_str(&self.preamble_tail);
        Ok(text)
    }

    /// Appends a call to what an assistant said.
    pub(crate) fn push_call(
        &self,
        content: &mut String,
        call: &Call<'_>,
        marks: &Marks,
    ) -> Result<(), Error> {
        if !content.is_empty() {
            content.push('\n');
        }
        content.push_str(&self.call_open);
        content.push_str("{\"name\": ");
        json::spell(call.name, marks, content)?;
        content.push_str(", \"arguments\": ");
        match call.arguments.as_deref() {
            None | Some(Json::Null) => content.push_str("{}"),
            // Text that is no JSON, as a call that ran into `max_tokens` has it: as it was written.
            Some(Json::String(text)) => content.push_str(&marks.escape(text)),
            Some(arguments) => json::spell(arguments, marks, content)?,
        }
        content.push('}');
        content.push_str(&self.call_close);
        Ok(())
    }

    /// Appends a tool's result to a user turn.
    pub(crate) fn push_result(&self, turn: &mut String, result: &str) {
        if !turn.is_empty() {
            turn.push('\n');
        }
        turn.push_str(&self.result_open);
        turn.push_str(result);
        turn.push_str(&self.result_close);
    }

    /// What an assistant said, its reasoning first.
    pub(crate) fn with_reasoning(&self, reasoning: &str, content: &str) -> String {
        let reasoning = reasoning.trim_matches('\n');
        format!(
            "{}{reasoning}{}{content}",
            self.think_open, self.think_close
        )
    }
}

/// The refusal of a value that cannot be spelled.
pub(crate) fn unspellable(param: &str, error: &Error) -> PromptError {
    invalid(param, &format!("cannot be spelled: {error}"))
}
