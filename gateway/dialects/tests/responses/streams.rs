//! Catches an answer that depends on how the node cut its stream: whatever the chunks, the response
//! at the end is that of the whole answer, and what a client puts together from the events is the
//! same again.

use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};
use serde_json::{Map, Value, json};

use crate::support::{ask, chunk, completion, end, stream};

fn body() -> Value {
    json!({
        "model": "gpt-x", "input": "hi", "stream": true,
        "tools": [
            {"type": "function", "name": "f", "parameters": {"type": "object"}},
            {"type": "custom", "name": "patch"},
        ],
    })
}

/// An answer of a node, in its pieces.
#[derive(Clone, Debug)]
struct Said {
    reasoning: String,
    content: String,
    refusal: String,
    /// Name and arguments.
    calls: Vec<(&'static str, String)>,
    finish: &'static str,
}

fn text(rng: &mut SmallRng, pieces_max: usize) -> String {
    const PIECES: &[&str] = &[
        "a",
        " ",
        "\n",
        "\"",
        "\\",
        "🦀",
        "é",
        "data: [DONE]\n\n",
        "event: x",
        "\u{2028}",
        "{}",
        "\u{1}",
    ];
    let count = rng.random_range(0..=pieces_max);
    (0..count)
        .map(|_| PIECES[rng.random_range(0..PIECES.len())])
        .collect()
}

fn said(rng: &mut SmallRng) -> Said {
    let calls = (0..rng.random_range(0..4)).map(|_| {
        let input = json!({"input": text(rng, 5)}).to_string();
        match rng.random_range(0..4) {
            0 => ("patch", input),
            1 => ("f", String::new()),
            _ => ("f", input),
        }
    });
    let calls = calls.collect();
    Said {
        reasoning: text(rng, 4),
        content: text(rng, 6),
        refusal: match rng.random_range(0..5) {
            0 => text(rng, 2),
            _ => String::new(),
        },
        calls,
        finish: ["stop", "tool_calls", "length", "content_filter"][rng.random_range(0..4)],
    }
}

fn call_id(at: usize) -> String {
    format!("call_{at}")
}

impl Said {
    fn message(&self) -> Value {
        let mut message = json!({"role": "assistant", "content": self.content});
        if !self.reasoning.is_empty() {
            message["reasoning_content"] = self.reasoning.as_str().into();
        }
        if !self.refusal.is_empty() {
            message["refusal"] = self.refusal.as_str().into();
        }
        if !self.calls.is_empty() {
            let call = |(at, (name, arguments)): (usize, &(&str, String))| {
                json!({"id": call_id(at), "type": "function",
                    "function": {"name": name, "arguments": arguments}})
            };
            message["tool_calls"] = self.calls.iter().enumerate().map(call).collect();
        }
        message
    }

    /// The chunks of a stream: texts cut at random, neighbours at times in one chunk.
    fn chunks(&self, rng: &mut SmallRng) -> Vec<Vec<u8>> {
        let mut deltas = vec![json!({"role": "assistant", "content": ""})];
        for (name, text) in [
            ("reasoning_content", &self.reasoning),
            ("content", &self.content),
            ("refusal", &self.refusal),
        ] {
            deltas.extend(cut(rng, text).into_iter().map(|piece| json!({name: piece})));
        }
        for (at, (name, arguments)) in self.calls.iter().enumerate() {
            let mut pieces = cut(rng, arguments);
            let first = match rng.random_bool(0.5) && !pieces.is_empty() {
                true => pieces.remove(0),
                false => String::new(),
            };
            let begins = json!({"index": at, "id": call_id(at), "type": "function",
                "function": {"name": name, "arguments": first}});
            deltas.push(json!({"tool_calls": [begins]}));
            deltas.extend(pieces.into_iter().map(
                |piece| json!({"tool_calls": [{"index": at, "function": {"arguments": piece}}]}),
            ));
        }
        let mut chunks: Vec<Value> = Vec::new();
        for delta in deltas {
            let merged =
                rng.random_bool(0.3) && chunks.last_mut().is_some_and(|last| merge(last, &delta));
            if !merged {
                chunks.push(delta);
            }
        }
        let last = chunks.len() - 1;
        let mut told: Vec<Vec<u8>> = chunks[..last]
            .iter()
            .map(|delta| chunk(delta, None))
            .collect();
        match rng.random_bool(0.5) {
            true => told.push(chunk(&chunks[last], Some(self.finish))),
            false => {
                told.push(chunk(&chunks[last], None));
                told.push(chunk(&json!({}), Some(self.finish)));
            }
        }
        told.push(br#"{"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":1}}"#.to_vec());
        told
    }

    /// The obvious twin: the output as the documentation describes it.
    fn output(&self) -> Vec<Value> {
        let status = match self.finish {
            "length" | "content_filter" => "incomplete",
            _ => "completed",
        };
        let mut output = Vec::new();
        if !self.reasoning.is_empty() {
            output.push(json!({"type": "reasoning",
                "summary": [{"type": "summary_text", "text": self.reasoning}]}));
        }
        let mut parts = Vec::new();
        let nothing = self.calls.is_empty() && self.reasoning.is_empty() && self.refusal.is_empty();
        if !self.content.is_empty() || (nothing && status == "completed") {
            parts.push(
                json!({"type": "output_text", "annotations": [], "logprobs": [],
                "text": self.content}),
            );
        }
        if !self.refusal.is_empty() {
            parts.push(json!({"type": "refusal", "refusal": self.refusal}));
        }
        if !parts.is_empty() {
            let status = if self.calls.is_empty() {
                status
            } else {
                "completed"
            };
            output.push(
                json!({"type": "message", "status": status, "role": "assistant",
                "content": parts}),
            );
        }
        for (at, (name, arguments)) in self.calls.iter().enumerate() {
            let is_whole = serde_json::from_str::<Value>(arguments).is_ok();
            let status = if is_whole { "completed" } else { status };
            let (kind, member, said) = match *name {
                "patch" => {
                    let input: Value = serde_json::from_str(arguments).expect("JSON");
                    ("custom_tool_call", "input", input["input"].clone())
                }
                _ => ("function_call", "arguments", arguments.as_str().into()),
            };
            output.push(json!({"type": kind, "status": status, member: said,
                "call_id": call_id(at), "name": name}));
        }
        output
    }
}

fn cut(rng: &mut SmallRng, text: &str) -> Vec<String> {
    let mut pieces: Vec<String> = Vec::new();
    for letter in text.chars() {
        match pieces.last_mut() {
            Some(piece) if rng.random_bool(0.6) => piece.push(letter),
            _ => pieces.push(letter.to_string()),
        }
    }
    pieces
}

/// Puts a delta into the one before it, if they touch different members.
fn merge(before: &mut Value, delta: &Value) -> bool {
    let (before, delta) = (before.as_object_mut(), delta.as_object());
    let (Some(before), Some(delta)) = (before, delta) else {
        return false;
    };
    let calls = |members: &Map<String, Value>| members["tool_calls"][0]["index"].clone();
    for (name, value) in delta {
        match before.get_mut(name) {
            None => drop(before.insert(name.clone(), value.clone())),
            Some(Value::String(text)) if text.is_empty() => {
                *text = value.as_str().unwrap_or("").to_owned()
            }
            Some(Value::Array(list)) => {
                let index = list.last().map(|call| call["index"].clone());
                if index == Some(calls(delta)) {
                    return false;
                }
                list.extend(value.as_array().cloned().unwrap_or_default());
            }
            Some(_) => return false,
        }
    }
    true
}

/// An item without its id, which the twin does not know.
fn plain(items: &Value) -> Vec<Value> {
    let items = items.as_array().expect("a list").iter().cloned();
    let plain = items.map(|mut item| {
        let id = item
            .as_object_mut()
            .and_then(|item| item.shift_remove("id"));
        assert!(id.is_some_and(|id| id.is_string()));
        item
    });
    plain.collect()
}

/// What a client has at the end that only reads deltas and the items around them.
fn put_together(events: &[(String, Value)]) -> Vec<Value> {
    let mut items: Vec<Value> = Vec::new();
    let mut done: Vec<bool> = Vec::new();
    for (name, data) in events {
        let number = |name: &str| usize::try_from(data[name].as_u64().unwrap_or(0)).expect("small");
        let at = number("output_index");
        let name = name.strip_prefix("response.").unwrap_or(name);
        if name == "output_item.added" {
            assert_eq!(at, items.len(), "items begin in their order");
            items.push(data["item"].clone());
            done.push(false);
        } else if name == "output_item.done" {
            items[at]["status"] = data["item"]["status"].clone();
            if data["item"]["status"].is_null() {
                let item = items[at].as_object_mut();
                item.expect("an item").shift_remove("status");
            }
            assert_eq!(items[at], data["item"]);
            assert!(!std::mem::replace(&mut done[at], true), "done once");
        } else if let Some(item) = items.get_mut(at) {
            let belongs = data["item_id"].is_null() || data["item_id"] == item["id"];
            assert!(belongs, "{data}");
            take(item, name, data, number("content_index"));
        }
    }
    assert!(done.iter().all(|done| *done), "every item is done");
    items
}

/// One event inside an item.
fn take(item: &mut Value, name: &str, data: &Value, place: usize) {
    let add = |text: &mut Value| {
        let more = data["delta"].as_str().expect("a text");
        *text = format!("{}{more}", text.as_str().unwrap_or("")).into();
    };
    match name {
        "reasoning_summary_part.added" => item["summary"] = json!([data["part"]]),
        "reasoning_summary_text.delta" => add(&mut item["summary"][0]["text"]),
        "reasoning_summary_part.done" => assert_eq!(item["summary"][0], data["part"]),
        "content_part.added" => {
            let parts = item["content"].as_array_mut().expect("parts");
            assert_eq!(place, parts.len());
            parts.push(data["part"].clone());
        }
        "output_text.delta" => add(&mut item["content"][place]["text"]),
        "refusal.delta" => add(&mut item["content"][place]["refusal"]),
        "output_text.done" => assert_eq!(item["content"][place]["text"], data["text"]),
        "refusal.done" => assert_eq!(item["content"][place]["refusal"], data["refusal"]),
        "content_part.done" => assert_eq!(item["content"][place], data["part"]),
        "function_call_arguments.delta" => add(&mut item["arguments"]),
        "function_call_arguments.done" => assert_eq!(item["arguments"], data["arguments"]),
        "custom_tool_call_input.delta" => add(&mut item["input"]),
        "custom_tool_call_input.done" => assert_eq!(item["input"], data["input"]),
        _ => {}
    }
}

#[test]
fn any_cut_of_a_stream_ends_in_the_response_of_the_whole() {
    let mut rng = SmallRng::seed_from_u64(4);
    for _ in 0..1500 {
        let said = said(&mut rng);
        let mut translation = ask(&body()).translation;
        let whole = translation
            .whole(&completion(&said.message(), said.finish), &end())
            .expect("sound");
        let whole: Value = serde_json::from_slice(&whole).expect("JSON");
        let twin = said.output();
        assert_eq!(plain(&whole["output"]), twin, "{said:?}");
        let mut translation = translation.fresh();
        let chunks = said.chunks(&mut rng);
        let events = stream(translation.as_mut(), &chunks);
        let (name, last) = events.last().expect("events");
        let expected = match said.finish {
            "length" | "content_filter" => "response.incomplete",
            _ => "response.completed",
        };
        assert_eq!(name, expected);
        let streamed = last["response"].clone();
        assert_eq!(
            put_together(&events),
            *streamed["output"].as_array().expect("a list"),
            "{said:?}"
        );
        assert_eq!(streamed, whole, "{said:?}");
    }
}

#[test]
fn calls_that_a_node_mixes_are_told_apart() {
    let begin = |at: usize| json!({"index": at, "id": call_id(at), "type": "function", "function": {"name": "f", "arguments": ""}});
    let more = |at: usize, text: &str| json!({"index": at, "function": {"arguments": text}});
    let chunks = [
        chunk(&json!({"tool_calls": [begin(0), begin(1)]}), None),
        chunk(
            &json!({"tool_calls": [more(1, "{\"b\""), more(0, "{\"a\"")]}),
            None,
        ),
        chunk(&json!({"content": "meanwhile"}), None),
        chunk(
            &json!({"tool_calls": [more(0, ":1}"), more(1, ":2}")]}),
            Some("tool_calls"),
        ),
    ];
    let events = stream(ask(&body()).translation.as_mut(), &chunks);
    let output = put_together(&events);
    assert_eq!(output[0]["arguments"], "{\"a\":1}");
    assert_eq!(output[1]["arguments"], "{\"b\":2}");
    assert_eq!(output[2]["content"][0]["text"], "meanwhile");
}

#[test]
fn what_goes_on_after_its_end_is_no_answer() {
    let mut translation = ask(&body()).translation;
    let mut out = Vec::new();
    let call = |at: usize, text: &str| json!({"tool_calls": [{"index": at, "id": call_id(at), "function": {"name": "f", "arguments": text}}]});
    translation
        .chunk(&chunk(&call(0, "{}"), None), &mut out)
        .expect("sound");
    translation
        .chunk(&chunk(&call(1, "{}"), None), &mut out)
        .expect("sound");
    translation
        .chunk(&chunk(&call(0, " "), None), &mut out)
        .expect("white space is nothing");
    let error = translation
        .chunk(&chunk(&call(0, "{}"), None), &mut out)
        .expect_err("a call twice");
    assert!(error.to_string().contains("tool call 0 goes on"), "{error}");
    for broken in [
        &b"{\"choices\":7}"[..],
        b"[]",
        b"{\"choices\":[{\"delta\":{\"content\":7}}]}",
    ] {
        assert!(translation.chunk(broken, &mut out).is_err());
    }
    assert!(translation.whole(br#"{"choices":[]}"#, &end()).is_err());
}
