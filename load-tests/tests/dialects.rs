//! One conversation, three dialects: the same prompt, the same node, the same cache?
//!
//! Against the real stack. A conversation with a tool call begins in one dialect and goes on in
//! another; what was computed for the first must be there for the second.

#![expect(clippy::panic, reason = "a helper fails its test with what it saw")]

mod support;

use std::io::{Read, Write};
use std::net::TcpStream;

use rustix::process::Signal;
use serde_json::{Value, json};
use support::{MODEL, Stack};

#[derive(Clone, Copy, Debug, PartialEq)]
enum Dialect {
    Chat,
    Messages,
    Responses,
}

const ALL: [Dialect; 3] = [Dialect::Chat, Dialect::Messages, Dialect::Responses];

/// What has been said, whatever the dialect.
#[derive(Clone, Debug)]
enum Said {
    User(String),
    Text(String),
    Call { id: String, arguments: String },
    Result { id: String, text: String },
}

/// An answer, whatever the dialect.
#[derive(Debug)]
struct Answer {
    said: Vec<Said>,
    input: u64,
    cached: u64,
    output: u64,
    node: String,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Choice {
    /// The tool has to be called.
    Tool,
    None,
}

impl Dialect {
    fn path(self) -> &'static str {
        match self {
            Self::Chat => "/v1/chat/completions",
            Self::Messages => "/v1/messages",
            Self::Responses => "/v1/responses",
        }
    }

    fn body(self, system: &str, said: &[Said], choice: Choice) -> Value {
        let parameters = json!({"type": "object", "properties": {"city": {"type": "string",
            "enum": ["Paris", "Oslo"]}}, "required": ["city"], "additionalProperties": false});
        let (name, description) = ("weather", "The weather in a city.");
        match self {
            Self::Chat => json!({"model": MODEL, "temperature": 0, "max_tokens": 40,
            "messages": self.items(Some(system), said),
            "tools": [{"type": "function", "function": {"name": name,
                "description": description, "parameters": parameters}}],
            "tool_choice": match choice {
                Choice::Tool => json!({"type": "function", "function": {"name": name}}),
                Choice::None => json!("none"),
            }}),
            Self::Messages => json!({"model": MODEL, "temperature": 0, "max_tokens": 40,
            "system": system, "messages": self.items(None, said),
            "tools": [{"name": name, "description": description, "input_schema": parameters}],
            "tool_choice": match choice {
                Choice::Tool => json!({"type": "tool", "name": name}),
                Choice::None => json!({"type": "none"}),
            }}),
            Self::Responses => json!({"model": MODEL, "temperature": 0, "max_output_tokens": 40,
            "store": false, "instructions": system, "input": self.items(None, said),
            "tools": [{"type": "function", "name": name, "description": description,
                "parameters": parameters, "strict": false}],
            "tool_choice": match choice {
                Choice::Tool => json!({"type": "function", "name": name}),
                Choice::None => json!("none"),
            }}),
        }
    }

    fn items(self, system: Option<&str>, said: &[Said]) -> Vec<Value> {
        let system = system.map(|text| json!({"role": "system", "content": text}));
        let said = said.iter().map(|said| match (self, said) {
            (_, Said::User(text)) => json!({"role": "user", "content": text}),
            (_, Said::Text(text)) => json!({"role": "assistant", "content": text}),
            (Self::Chat, Said::Call { id, arguments }) => json!({"role": "assistant",
                "content": null, "tool_calls": [{"id": id, "type": "function",
                    "function": {"name": "weather", "arguments": arguments}}]}),
            (Self::Messages, Said::Call { id, arguments }) => {
                let input: Value = serde_json::from_str(arguments).expect("valid arguments");
                json!({"role": "assistant", "content": [{"type": "tool_use", "id": id,
                    "name": "weather", "input": input}]})
            }
            (Self::Responses, Said::Call { id, arguments }) => json!({"type": "function_call",
                "call_id": id, "name": "weather", "arguments": arguments}),
            (Self::Chat, Said::Result { id, text }) => {
                json!({"role": "tool", "tool_call_id": id, "content": text})
            }
            (Self::Messages, Said::Result { id, text }) => json!({"role": "user",
                "content": [{"type": "tool_result", "tool_use_id": id, "content": text}]}),
            (Self::Responses, Said::Result { id, text }) => {
                json!({"type": "function_call_output", "call_id": id, "output": text})
            }
        });
        system.into_iter().chain(said).collect()
    }

    fn read(self, node: String, answer: &Value) -> Answer {
        let of = |pointer: &str| {
            let found = answer.pointer(pointer).and_then(Value::as_u64);
            found.unwrap_or_else(|| panic!("no {pointer} in {answer}"))
        };
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        match self {
            Self::Chat => {
                let message = &answer["choices"][0]["message"];
                let said = match message["tool_calls"].as_array() {
                    Some(calls) => calls
                        .iter()
                        .map(|call| Said::Call {
                            id: text(&call["id"]),
                            arguments: text(&call["function"]["arguments"]),
                        })
                        .collect(),
                    None => vec![Said::Text(text(&message["content"]))],
                };
                Answer {
                    said,
                    input: of("/usage/prompt_tokens"),
                    cached: of("/usage/prompt_tokens_details/cached_tokens"),
                    output: of("/usage/completion_tokens"),
                    node,
                }
            }
            Self::Messages => {
                let blocks = answer["content"].as_array().expect("blocks").iter();
                let said = blocks.map(|block| match block["type"].as_str() {
                    Some("tool_use") => Said::Call {
                        id: text(&block["id"]),
                        arguments: block["input"].to_string(),
                    },
                    _ => Said::Text(text(&block["text"])),
                });
                let cached = of("/usage/cache_read_input_tokens");
                Answer {
                    said: said.collect(),
                    input: of("/usage/input_tokens") + cached,
                    cached,
                    output: of("/usage/output_tokens"),
                    node,
                }
            }
            Self::Responses => {
                let items = answer["output"].as_array().expect("items").iter();
                let said = items.map(|item| match item["type"].as_str() {
                    Some("function_call") => Said::Call {
                        id: text(&item["call_id"]),
                        arguments: text(&item["arguments"]),
                    },
                    _ => Said::Text(text(&item["content"][0]["text"])),
                });
                Answer {
                    said: said.collect(),
                    input: of("/usage/input_tokens"),
                    cached: of("/usage/input_tokens_details/cached_tokens"),
                    output: of("/usage/output_tokens"),
                    node,
                }
            }
        }
    }
}

fn post(stack: &Stack, dialect: Dialect, session: &str, body: &Value) -> Answer {
    let rest = stack.ready.url.trim_start_matches("http://");
    let address = rest.split('/').next().expect("an address");
    let mut stream = TcpStream::connect(address).expect("the gateway listens");
    let body = body.to_string();
    let head = format!(
        "POST {} HTTP/1.1\r\nhost: {address}\r\nauthorization: Bearer {}\r\n\
         content-type: application/json\r\nx-session-affinity: {session}\r\nconnection: close\r\n\
         content-length: {}\r\n\r\n",
        dialect.path(),
        stack.ready.api_key,
        body.len()
    );
    stream.write_all(head.as_bytes()).expect("written");
    stream.write_all(body.as_bytes()).expect("written");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("an answer");
    let (head, json) = answer.split_once("\r\n\r\n").expect("a head");
    assert!(head.starts_with("HTTP/1.1 200"), "{dialect:?}: {answer}");
    let node = head.lines().find_map(|line| {
        let (name, value) = line.split_once(": ")?;
        name.eq_ignore_ascii_case("x-homing-node")
            .then(|| value.to_owned())
    });
    let json: Value = serde_json::from_str(json).expect("JSON");
    dialect.read(node.expect("a node"), &json)
}

/// Tokens that end a call and are forced: `"}` and the closing marker.
const FORCED_END_MAX: u64 = 12;

/// Whole blocks of so many tokens, of which the last is always computed.
fn blocks(tokens: u64) -> u64 {
    (tokens - 1) / 16 * 16
}

#[test]
fn switching_the_dialect_keeps_prompt_node_and_cache() {
    let stack = Stack::start(2);
    for first in ALL {
        for second in ALL {
            let session = format!("{first:?}-{second:?}");
            let system = format!("You help {session}. {}", "Be brief and exact. ".repeat(40));
            let mut said = vec![Said::User("What is the weather in Oslo?".to_owned())];
            let begun = post(
                &stack,
                first,
                &session,
                &first.body(&system, &said, Choice::Tool),
            );
            // The very same turn, in the others.
            for dialect in ALL {
                let body = dialect.body(&system, &said, Choice::Tool);
                let same = post(&stack, dialect, &session, &body);
                let found = (same.input, same.cached, &same.node);
                assert_eq!(
                    found,
                    (begun.input, blocks(begun.input), &begun.node),
                    "{dialect:?}"
                );
            }
            said.extend(begun.said.iter().cloned());
            let Some(Said::Call { id, .. }) = begun.said.last() else {
                panic!("no call: {begun:?}");
            };
            let result = Said::Result {
                id: id.clone(),
                text: "rain, 4 degrees".to_owned(),
            };
            said.push(result);
            let told = post(
                &stack,
                second,
                &session,
                &second.body(&system, &said, Choice::None),
            );
            // All of the first turn was there, its answer included, but for the tokens that the
            // grammar forced at its end: nothing was computed from them.
            let least = blocks(begun.input + begun.output - FORCED_END_MAX);
            assert!(
                told.cached >= least,
                "{session}: {} of {least}",
                told.cached
            );
            assert_eq!(told.node, begun.node, "{session}");

            said.extend(told.said.iter().cloned());
            said.push(Said::User("Thank you. And is that cold?".to_owned()));
            let third = post(
                &stack,
                first,
                &session,
                &first.body(&system, &said, Choice::None),
            );
            let least = blocks(told.input + told.output);
            assert!(
                third.cached >= least,
                "{session}: {} of {least}",
                third.cached
            );
            assert_eq!(third.node, begun.node, "{session}");
            let body = second.body(&system, &said, Choice::None);
            let same = post(&stack, second, &session, &body);
            assert_eq!(
                (same.input, &same.node),
                (third.input, &third.node),
                "{session}"
            );
        }
    }
    stack.stop(Signal::INT);
}
