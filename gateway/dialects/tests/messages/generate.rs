//! Makes up a node's answers: thinking, text and calls with awkward characters, whole, or cut into
//! chunks at random places.

use std::ops::Range;

use rand::RngExt as _;
use rand::rngs::StdRng;
use serde_json::{Value, json};

/// An answer as a node would give it whole.
pub(crate) struct Answer {
    reasoning: String,
    content: String,
    calls: Vec<(String, String, String)>,
    finish: &'static str,
    stop: Value,
}

const PIECES: &[&str] = &[
    "a",
    " ",
    "\n",
    "\n\n",
    "\t",
    "é",
    "🦀",
    "\"",
    "\\",
    "\u{0}",
    "\u{7f}",
    "\u{2028}",
    "\u{a0}",
    "data: [DONE]",
    "event: error\n",
    "{\"a\":",
    "}",
    "\\u0020",
    "</think>",
    "word word",
];

fn text(random: &mut StdRng, pieces: Range<usize>) -> String {
    let count = random.random_range(pieces);
    let piece = |_| PIECES[random.random_range(0..PIECES.len())];
    (0..count).map(piece).collect()
}

pub(crate) fn answer(random: &mut StdRng) -> Answer {
    let arguments = |random: &mut StdRng| match random.random_range(0..5) {
        0 => String::new(),
        1 => text(random, 1..4),
        2 => "{}".to_owned(),
        _ => {
            json!({"z": text(random, 0..4), "a": {"b": [1, null, text(random, 0..2)]}}).to_string()
        }
    };
    let calls = random.random_range(0..4_usize).saturating_sub(1);
    Answer {
        reasoning: text(random, 0..5),
        content: text(random, 0..6),
        calls: (0..calls)
            .map(|at| (format!("call_{at}"), format!("tool{at}"), arguments(random)))
            .collect(),
        finish: ["stop", "length", "tool_calls", "content_filter"][random.random_range(0..4)],
        stop: [json!(null), json!("END"), json!(7), json!("other")][random.random_range(0..4)]
            .clone(),
    }
}

impl Answer {
    pub(crate) fn whole(&self) -> Vec<u8> {
        let call = |(id, name, arguments): &(String, String, String)| json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}});
        let calls: Vec<Value> = self.calls.iter().map(call).collect();
        let mut message = json!({"role": "assistant", "content": self.content, "refusal": null});
        if !self.reasoning.is_empty() {
            message["reasoning_content"] = self.reasoning.as_str().into();
        }
        if !calls.is_empty() {
            message["tool_calls"] = calls.into();
        }
        let choice = json!({"index": 0, "message": message, "finish_reason": self.finish,
            "stop_reason": self.stop});
        let whole = json!({"id": "chatcmpl-1", "object": "chat.completion", "choices": [choice]});
        whole.to_string().into_bytes()
    }

    /// The message as a chat client sends it back, in its one spelling.
    pub(crate) fn replayed(&self) -> Value {
        let arguments = |arguments: &str| match serde_json::from_str(arguments) {
            Ok(object @ Value::Object(_)) => object.to_string(),
            _ if arguments.is_empty() => "{}".to_owned(),
            _ => arguments.to_owned(),
        };
        let call = |(id, name, told): &(String, String, String)| {
            json!({"id": id, "type": "function",
                "function": {"name": name, "arguments": arguments(told)}})
        };
        let mut message = json!({"role": "assistant", "content": null});
        if !self.content.trim().is_empty() {
            message["content"] = self.content.as_str().into();
        }
        if !self.reasoning.is_empty() {
            message["reasoning_content"] = self.reasoning.as_str().into();
        }
        if !self.calls.is_empty() {
            message["tool_calls"] = self.calls.iter().map(call).collect();
        }
        message
    }

    /// The answer as deltas, cut at random, some of them with parts of two kinds.
    fn deltas(&self, random: &mut StdRng) -> Vec<Value> {
        let mut deltas = vec![json!({"role": "assistant", "content": ""})];
        for (name, text) in [
            ("reasoning_content", &self.reasoning),
            ("content", &self.content),
        ] {
            let parts = cut(text, random).into_iter();
            deltas.extend(parts.map(|part| json!({name: part})));
        }
        for (index, (id, name, arguments)) in self.calls.iter().enumerate() {
            let mut parts = cut(arguments, random);
            let first = match random.random_bool(0.5) || parts.is_empty() {
                true => String::new(),
                false => parts.remove(0),
            };
            deltas.push(
                json!({"tool_calls": [{"index": index, "id": id, "type": "function",
                "function": {"name": name, "arguments": first}}]}),
            );
            let parts = parts.into_iter();
            deltas.extend(parts.map(
                |part| json!({"tool_calls": [{"index": index, "function": {"arguments": part}}]}),
            ));
        }
        merged(deltas, random)
    }

    pub(crate) fn chunks(&self, random: &mut StdRng) -> Vec<Value> {
        let chunk = |choice: Value| json!({"id": "chatcmpl-1", "object": "chat.completion.chunk", "choices": [choice]});
        let mut choices: Vec<Value> = self
            .deltas(random)
            .into_iter()
            .map(|delta| json!({"index": 0, "delta": delta, "finish_reason": null}))
            .collect();
        if random.random_bool(0.5) {
            choices.push(json!({"index": 0, "delta": {}}));
        }
        if let Some(last) = choices.last_mut() {
            last["finish_reason"] = self.finish.into();
            last["stop_reason"] = self.stop.clone();
        }
        let mut chunks: Vec<Value> = choices.into_iter().map(chunk).collect();
        chunks.push(json!({"id": "chatcmpl-1", "choices": [], "usage": {"prompt_tokens": 120}}));
        chunks
    }
}

/// A text in pieces, at random places between characters.
fn cut(text: &str, random: &mut StdRng) -> Vec<String> {
    let mut parts: Vec<String> = Vec::new();
    for character in text.chars() {
        match parts.last_mut() {
            Some(part) if random.random_bool(0.6) => part.push(character),
            _ => parts.push(character.to_string()),
        }
    }
    parts
}

/// Some neighbours of different kinds in one delta, as nodes do at a boundary.
fn merged(deltas: Vec<Value>, random: &mut StdRng) -> Vec<Value> {
    let rank = |delta: &Value| {
        let kinds = ["role", "reasoning_content", "content", "tool_calls"];
        kinds.iter().rposition(|kind| delta.get(kind).is_some())
    };
    let mut all: Vec<Value> = Vec::new();
    for delta in deltas {
        match all.last_mut() {
            Some(last) if rank(last) < rank(&delta) && random.random_bool(0.4) => {
                for (name, value) in delta.as_object().expect("an object") {
                    last[name] = value.clone();
                }
            }
            _ => all.push(delta),
        }
    }
    all
}
