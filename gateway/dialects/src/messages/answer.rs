//! How does a node's stream become the API's events?
//!
//! `message_start`, then blocks one after another, each `content_block_start`, deltas and
//! `content_block_stop`, then `message_delta` with the reason and the usage, then `message_stop`.
//! States: not begun; between blocks; within thinking, text or a call. A block ends when something
//! of another kind comes, or the answer. Whitespace at the beginning of a text waits for what
//! follows it: alone it is no text, and the API refuses it when the client sends it back.
//!
//! Thinking ends with a signature that says only that it came from here. It is not shown where the
//! client said that it wants none: such clients read the first block as the answer. Where the
//! client wants it without its text, the text travels in the signature.

use std::io::Write;

use serde::Serialize;
use serde_json::value::RawValue;
use serde_json::{Value, json};

use super::blocks::{SIGNATURE, UNSEEN};
use super::chunk::{CallDelta, Choice, Chunk, Delta, NodeUsage, inside, is_blank};
use super::parameters::{Demand, Limits, Thinking};
use super::whole;
use crate::answer::{End, Malformed, Translation, Usage};
use crate::error::{ApiError, Shape};

/// What the client is shown of an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Shown {
    /// Everything.
    All,
    /// Thinking only as a signature that brings it back.
    UnseenThinking,
    /// No thinking.
    NoThinking,
    /// Nothing: the request only filled the cache.
    Nothing,
}

/// Turns a node's answer into a message.
#[derive(Debug)]
pub(super) struct Answer {
    pub(super) model: String,
    pub(super) stops: Vec<String>,
    pub(super) shown: Shown,
    expected: Usage,
    /// The id, once the message has begun.
    id: Option<String>,
    open: Option<Open>,
    /// Blocks begun.
    blocks: usize,
    /// Calls begun.
    calls: u64,
    /// Whitespace that waits for a text, as the inside of a JSON string.
    held: String,
    /// Thinking that goes into its signature, as the inside of a JSON string.
    unseen: String,
    finish: Option<Finish>,
}

/// The block that takes what comes.
#[derive(Debug, PartialEq, Eq)]
enum Open {
    Thinking,
    Text,
    Call { index: u64, id: String },
}

/// Why the answer ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Finish {
    pub(super) reason: &'static str,
    /// The stop sequence that it met.
    pub(super) stop: Option<String>,
}

impl Finish {
    /// From a node's reason, and the stop string that it names.
    pub(super) fn new(reason: &str, met: Option<Value>, stops: &[String]) -> Self {
        let stop = met.and_then(|met| met.as_str().map(str::to_owned));
        let stop = stop.filter(|stop| reason == "stop" && stops.contains(stop));
        let reason = match reason {
            "length" => "max_tokens",
            "content_filter" => "refusal",
            _ if stop.is_some() => "stop_sequence",
            _ => "end_turn",
        };
        Self { reason, stop }
    }

    /// An answer that ended by calling ends for its calls, whatever the node calls that.
    pub(super) fn after(mut self, has_called: bool) -> Self {
        if has_called && self.reason == "end_turn" {
            self.reason = "tool_use";
        }
        self
    }
}

impl Answer {
    pub(super) fn new(model: String, limits: &Limits, thinking: Thinking) -> Self {
        let shown = if limits.output_tokens_max == 0 {
            Shown::Nothing
        } else if thinking.demand == Demand::Unwanted {
            Shown::NoThinking
        } else if thinking.is_seen {
            Shown::All
        } else {
            Shown::UnseenThinking
        };
        Self::shaped(model, limits.stops.clone(), shown)
    }

    fn shaped(model: String, stops: Vec<String>, shown: Shown) -> Self {
        Self {
            model,
            stops,
            shown,
            expected: Usage::default(),
            id: None,
            open: None,
            blocks: 0,
            calls: 0,
            held: String::new(),
            unseen: String::new(),
            finish: None,
        }
    }

    fn start(&mut self, node_id: Option<&RawValue>, usage: Option<NodeUsage>, out: &mut Vec<u8>) {
        if self.id.is_some() {
            return;
        }
        let node_id: Option<String> = node_id.and_then(|id| serde_json::from_str(id.get()).ok());
        let id = message_id(node_id.as_deref());
        let usage = usage.map_or(self.expected, |usage| told(usage, self.expected));
        let message = json!({
            "id": id, "type": "message", "role": "assistant", "model": self.model, "content": [],
            "stop_reason": null, "stop_sequence": null, "usage": usage_value(&usage),
        });
        self.id = Some(id);
        event(
            out,
            "message_start",
            &json!({"type": "message_start", "message": message}),
        );
    }

    fn choice(&mut self, choice: &Choice<'_>, out: &mut Vec<u8>) -> Result<(), Malformed> {
        if self.shown == Shown::Nothing {
            self.finish.get_or_insert(Finish {
                reason: "max_tokens",
                stop: None,
            });
            return Ok(());
        }
        if let Some(delta) = &choice.delta {
            self.delta(delta, out)?;
        }
        if let Some(reason) = &choice.finish_reason {
            let met = choice.stop_reason.or(choice.matched_stop);
            let met = met.and_then(|met| serde_json::from_str(met.get()).ok());
            self.finish = Some(Finish::new(reason, met, &self.stops));
            self.close(out);
        }
        Ok(())
    }

    fn delta(&mut self, delta: &Delta<'_>, out: &mut Vec<u8>) -> Result<(), Malformed> {
        let reasoning = delta.reasoning_content.or(delta.reasoning);
        if let Some(thinking) = inside(reasoning)?
            && matches!(self.shown, Shown::All | Shown::UnseenThinking)
        {
            self.thinking(thinking, out);
        }
        for text in [delta.content, delta.refusal] {
            if let Some(text) = inside(text)? {
                self.text(text, out);
            }
        }
        for call in delta.tool_calls.iter().flatten() {
            self.call(call, out)?;
        }
        Ok(())
    }

    fn thinking(&mut self, thinking: &str, out: &mut Vec<u8>) {
        if self.open != Some(Open::Thinking) {
            let block = json!({"type": "thinking", "thinking": "", "signature": ""});
            self.open(Open::Thinking, &block, out);
        }
        match self.shown {
            Shown::UnseenThinking => self.unseen.push_str(thinking),
            _ => self.say("thinking_delta", "thinking", ["", thinking], out),
        }
    }

    fn text(&mut self, text: &str, out: &mut Vec<u8>) {
        if self.open != Some(Open::Text) {
            if is_blank(text) {
                self.held.push_str(text);
                return;
            }
            let held = std::mem::take(&mut self.held);
            self.open(Open::Text, &json!({"type": "text", "text": ""}), out);
            self.say("text_delta", "text", [&held, text], out);
            return;
        }
        self.say("text_delta", "text", ["", text], out);
    }

    fn call(&mut self, call: &CallDelta<'_>, out: &mut Vec<u8>) -> Result<(), Malformed> {
        let function = call.function.as_ref();
        let arguments = inside(function.and_then(|function| function.arguments))?;
        let given = call.id.as_deref().filter(|id| !id.is_empty());
        let is_same = match &self.open {
            Some(Open::Call { index, id }) => {
                call.index.is_none_or(|given| given == *index)
                    && given.is_none_or(|given| given == id)
            }
            _ => false,
        };
        if !is_same {
            let index = call.index.unwrap_or(self.calls);
            let name = function.and_then(|function| function.name.as_deref());
            let Some(name) = name.filter(|name| !name.is_empty()) else {
                return match arguments {
                    // Some nodes end every call with an empty part.
                    None => Ok(()),
                    Some(_) => Err(Malformed("arguments of no call that is open".to_owned())),
                };
            };
            let id = match (given, &self.id) {
                (Some(id), _) => id.to_owned(),
                (None, answer) => {
                    let answer = answer.as_deref().unwrap_or_default();
                    format!("call_{answer}_{}", self.calls)
                }
            };
            self.calls += 1;
            let block = json!({"type": "tool_use", "id": id, "name": name, "input": {}});
            self.open(Open::Call { index, id }, &block, out);
        }
        if let Some(arguments) = arguments {
            self.say("input_json_delta", "partial_json", ["", arguments], out);
        }
        Ok(())
    }

    fn open(&mut self, open: Open, block: &Value, out: &mut Vec<u8>) {
        self.close(out);
        let index = self.blocks;
        let start = json!({"type": "content_block_start", "index": index, "content_block": block});
        event(out, "content_block_start", &start);
        self.blocks += 1;
        self.open = Some(open);
    }

    fn close(&mut self, out: &mut Vec<u8>) {
        self.held.clear();
        let Some(open) = self.open.take() else {
            return;
        };
        if open == Open::Thinking {
            let unseen = std::mem::take(&mut self.unseen);
            let signature = match unseen.is_empty() {
                true => [SIGNATURE, ""],
                false => [UNSEEN, &unseen],
            };
            self.say("signature_delta", "signature", signature, out);
        }
        let index = self.blocks.saturating_sub(1);
        let stop = json!({"type": "content_block_stop", "index": index});
        event(out, "content_block_stop", &stop);
    }

    /// A delta of the latest block, with a text given as the insides of JSON strings.
    fn say(&self, kind: &str, name: &str, insides: [&str; 2], out: &mut Vec<u8>) {
        let index = self.blocks.saturating_sub(1);
        // Writing into memory cannot fail.
        let _ = write!(
            out,
            "event: content_block_delta\ndata: {{\"type\":\"content_block_delta\",\"index\":{index},\
             \"delta\":{{\"type\":\"{kind}\",\"{name}\":\""
        );
        for inside in insides {
            out.extend_from_slice(inside.as_bytes());
        }
        out.extend_from_slice(b"\"}}\n\n");
    }
}

impl Translation for Answer {
    fn fresh(&self) -> Box<dyn Translation> {
        Box::new(Self::shaped(
            self.model.clone(),
            self.stops.clone(),
            self.shown,
        ))
    }

    fn begin(&mut self, expected: Usage) {
        self.expected = expected;
    }

    fn chunk(&mut self, json: &[u8], out: &mut Vec<u8>) -> Result<(), Malformed> {
        let chunk: Chunk<'_> =
            serde_json::from_slice(json).map_err(|error| Malformed(error.to_string()))?;
        self.start(chunk.id, chunk.usage, out);
        let choices = chunk.choices.as_deref().unwrap_or_default();
        // One answer was asked for.
        let mut mine = choices
            .iter()
            .filter(|choice| matches!(choice.index, None | Some(0)));
        mine.try_for_each(|choice| self.choice(choice, out))
    }

    fn end(&mut self, end: &End, out: &mut Vec<u8>) {
        self.start(None, None, out);
        self.close(out);
        let finish = self.finish.take();
        let finish = finish.unwrap_or_else(|| Finish::new("stop", None, &[]));
        let finish = finish.after(self.calls > 0);
        let mut delta = json!({
            "type": "message_delta",
            "delta": {"stop_reason": finish.reason, "stop_sequence": finish.stop},
            "usage": usage_value(&end.usage),
        });
        if finish.reason == "refusal" {
            delta["delta"]["stop_details"] = whole::refusal();
        }
        if let Some(homing) = &end.homing {
            delta["homing"] = homing.clone();
        }
        event(out, "message_delta", &delta);
        event(out, "message_stop", &json!({"type": "message_stop"}));
    }

    fn fail(&mut self, error: &ApiError, so_far: Usage, out: &mut Vec<u8>) {
        let mut body: Value =
            serde_json::from_str(&error.body(Shape::Anthropic)).unwrap_or_default();
        body["usage"] = usage_value(&so_far);
        event(out, "error", &body);
    }

    fn whole(&mut self, json: &[u8], end: &End) -> Result<Vec<u8>, Malformed> {
        whole::message(self, json, end)
    }
}

/// The message's id, from the node's.
pub(super) fn message_id(node_id: Option<&str>) -> String {
    let id = node_id.unwrap_or_default();
    let id = id.strip_prefix("chatcmpl-").unwrap_or(id);
    format!("msg_{id}")
}

/// What a node tells at the beginning; what it leaves out is as expected.
fn told(usage: NodeUsage, expected: Usage) -> Usage {
    let input = usage.prompt_tokens.unwrap_or(expected.input);
    let cached = usage
        .prompt_tokens_details
        .and_then(|details| details.cached_tokens);
    Usage {
        input,
        cached: cached.unwrap_or(expected.cached).min(input),
        output: usage.completion_tokens.unwrap_or(0),
        reasoning: 0,
    }
}

/// Tokens as the API tells them: cached ones apart.
pub(super) fn usage_value(usage: &Usage) -> Value {
    let mut value = json!({
        "input_tokens": usage.input.saturating_sub(usage.cached),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached,
        "output_tokens": usage.output,
    });
    if usage.reasoning > 0 {
        value["output_tokens_details"] = json!({"thinking_tokens": usage.reasoning});
    }
    value
}

fn event(out: &mut Vec<u8>, name: &str, data: &impl Serialize) {
    // Writing into memory cannot fail, and neither can a value become JSON.
    let _ = write!(out, "event: {name}\ndata: ");
    let _ = serde_json::to_writer(&mut *out, data);
    out.extend_from_slice(b"\n\n");
}
