//! What was the client told, and by which tokens?
//!
//! Where a node reports its tokens (`token_ids`, asked for by `recover`), they are taken out of
//! what the client sees, and kept beside the message they spell until the answer is complete. Then
//! the prompt crate remembers them, so that the next turn's prompt repeats them and stays cached,
//! although they need not be the tokenizer's choice for their text. Done before the terminator goes
//! out: a client's next turn may follow within a millisecond.

use prompt::Answered;
use serde::Deserialize;
use serde_json::{Value, json};

use super::Flow;
use dialects::normalise::normalise_message;
use dialects::{Fields, PromptInput};

/// Text and tokens kept for one answer; a longer one is relayed and not remembered.
const BYTES_MAX: usize = 4 << 20;
/// Choices kept; nobody continues the seventeenth.
const CHOICES_MAX: usize = 16;
/// Calls kept in one choice, for the bound's sake.
const CALLS_MAX: usize = 256;

/// What was heard of an answer so far.
#[derive(Debug, Default)]
pub(crate) struct Heard {
    choices: Vec<Said>,
    bytes: usize,
    /// Something was not understood, or too much: nothing is remembered.
    is_lost: bool,
}

/// One choice.
#[derive(Debug, Default)]
struct Said {
    content: String,
    reasoning: String,
    calls: Vec<Call>,
    tokens: Vec<u32>,
    is_finished: bool,
}

#[derive(Debug, Default)]
struct Call {
    id: String,
    name: String,
    arguments: String,
}

#[derive(Deserialize)]
struct Wire {
    #[serde(default)]
    choices: Vec<WireChoice>,
}

#[derive(Deserialize)]
struct WireChoice {
    #[serde(default)]
    index: usize,
    delta: Option<WireMessage>,
    message: Option<WireMessage>,
    token_ids: Option<Vec<u32>>,
    finish_reason: Option<String>,
}

#[derive(Deserialize)]
struct WireMessage {
    content: Option<String>,
    #[serde(alias = "reasoning")]
    reasoning_content: Option<String>,
    tool_calls: Option<Vec<WireCall>>,
}

#[derive(Deserialize)]
struct WireCall {
    index: Option<usize>,
    id: Option<String>,
    function: Option<WireFunction>,
}

#[derive(Deserialize)]
struct WireFunction {
    name: Option<String>,
    arguments: Option<String>,
}

impl Heard {
    /// A chunk of a stream, or a whole answer, before tokens are taken out of it.
    pub(crate) fn hear(&mut self, json: &[u8]) {
        if self.is_lost {
            return;
        }
        let parsed: Result<Wire, _> = serde_json::from_slice(json);
        self.bytes += json.len();
        self.is_lost = self.bytes > BYTES_MAX
            || !parsed.is_ok_and(|wire| wire.choices.into_iter().all(|choice| self.add(choice)));
        if self.is_lost {
            self.choices = Vec::new();
        }
    }

    fn add(&mut self, choice: WireChoice) -> bool {
        if choice.index >= CHOICES_MAX {
            // Nobody continues it; the others are kept.
            return true;
        }
        if self.choices.len() <= choice.index {
            self.choices.resize_with(choice.index + 1, Said::default);
        }
        let said = &mut self.choices[choice.index];
        said.tokens.extend(choice.token_ids.unwrap_or_default());
        said.is_finished |= choice.finish_reason.is_some();
        let Some(message) = choice.delta.or(choice.message) else {
            return true;
        };
        said.content += message.content.as_deref().unwrap_or_default();
        said.reasoning += message.reasoning_content.as_deref().unwrap_or_default();
        let calls = message.tool_calls.unwrap_or_default();
        calls.into_iter().enumerate().all(|(at, call)| {
            let at = call.index.unwrap_or(at);
            if at >= CALLS_MAX {
                return false;
            }
            if said.calls.len() <= at {
                said.calls.resize_with(at + 1, Call::default);
            }
            let heard = &mut said.calls[at];
            heard.id += call.id.as_deref().unwrap_or_default();
            if let Some(function) = call.function {
                heard.name += function.name.as_deref().unwrap_or_default();
                heard.arguments += function.arguments.as_deref().unwrap_or_default();
            }
            true
        })
    }

    /// The answer is complete: remembers its choices.
    pub(super) fn remember(&self, flow: &Flow<'_>) {
        let job = flow.job;
        let kept = self.choices.iter();
        let kept: Vec<&Said> = kept
            .filter(|said| said.is_finished && !said.tokens.is_empty())
            .collect();
        if self.is_lost || kept.is_empty() {
            return;
        }
        // The request's messages are in the node's body; a copy of their own for the time of the
        // answer would double what a request holds.
        let Ok(turn) = Fields::parse(&job.body).and_then(dialects::chat) else {
            return;
        };
        let PromptInput::Chat { .. } = &turn.prompt else {
            return;
        };
        let gateway = flow.gateway;
        let Some(model) = gateway.prompts.model(&job.model) else {
            return;
        };
        let options = gateway.config.normalise.of(&job.identity.tenant.id);
        for said in kept {
            let mut message = said.message();
            // As the next turn's prompt will have it.
            normalise_message(&mut message, options);
            let answered = Answered {
                prompt: job.prompt.token_ids(),
                message: &message,
                tokens: &said.tokens,
            };
            let seconds = flow.ctx.t_ms.div_euclid(1000);
            let remembered = model.remember(&job.salt, &turn.prompt, &answered, seconds);
            let label = if remembered { "yes" } else { "no" };
            let counter = &gateway.metrics.answers;
            counter.with_label_values(&[label]).inc();
        }
    }
}

impl Said {
    /// The message as a client will send it back.
    fn message(&self) -> Value {
        let mut message = json!({"role": "assistant", "content": self.content});
        if !self.reasoning.is_empty() {
            message["reasoning_content"] = self.reasoning.as_str().into();
        }
        if !self.calls.is_empty() {
            let calls = self.calls.iter().map(|call| {
                json!({"id": call.id, "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments}})
            });
            message["tool_calls"] = calls.collect();
        }
        message
    }
}
