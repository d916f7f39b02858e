//! One conversation in every dialect: catches a translation that depends on how the network cut
//! the stream, usage that a client reads otherwise than the ledger, a cancelled stream that is free
//! on one surface (fault H04), cumulative usage that is added up (H06), and a refusal whose body
//! gets lost (H13).

use std::time::Duration;

use serde_json::{Value, json};

use crate::support::client::{Answer, Connection};
use crate::support::node::{Act, CHUNKS_END, MODEL, Node, chunk, stream_head, usage};
use crate::support::{Gateway, eventually};

/// A surface.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Surface {
    Chat,
    Messages,
    Responses,
}

const ALL: [Surface; 3] = [Surface::Chat, Surface::Messages, Surface::Responses];

impl Surface {
    fn path(self) -> &'static str {
        match self {
            Self::Chat => "/v1/chat/completions",
            Self::Messages => "/v1/messages?beta=true",
            Self::Responses => "/v1/responses",
        }
    }

    /// A delta of the text `x`, as it is written.
    fn delta(self) -> &'static str {
        match self {
            Self::Chat => r#""content":"x""#,
            Self::Messages => r#""text":"x""#,
            Self::Responses => r#""delta":"x""#,
        }
    }

    /// A request with a tool.
    fn body(self, text: &str, stream: bool) -> Value {
        let parameters = json!({"type": "object", "properties": {"city": {"type": "string"}}});
        let chat_tool = json!({"type": "function",
            "function": {"name": "weather", "description": "d", "parameters": parameters}});
        match self {
            Self::Chat => {
                let mut body = json!({"model": MODEL, "stream": stream, "tools": [chat_tool],
                    "messages": [{"role": "system", "content": "Be brief."},
                        {"role": "user", "content": text}]});
                if stream {
                    body["stream_options"] = json!({"include_usage": true});
                }
                body
            }
            Self::Messages => json!({"model": MODEL, "stream": stream, "max_tokens": 500,
                "system": "Be brief.", "messages": [{"role": "user", "content": text}],
                "tools": [{"name": "weather", "description": "d", "input_schema": parameters}]}),
            Self::Responses => json!({"model": MODEL, "stream": stream, "store": false,
                "instructions": "Be brief.", "input": text,
                "tools": [{"type": "function", "name": "weather", "description": "d",
                    "parameters": parameters}]}),
        }
    }

    /// What a client makes of a stream.
    fn read(self, answer: &Answer) -> Heard {
        let mut heard = Heard::default();
        for event in events(answer) {
            match self {
                Self::Chat => heard.chat(&event),
                Self::Messages => heard.messages(&event),
                Self::Responses => heard.responses(&event),
            }
        }
        heard
    }
}

/// The `data` of every event that is JSON.
fn events(answer: &Answer) -> Vec<Value> {
    let text = answer.text();
    let lines = text.lines().filter_map(|line| line.strip_prefix("data:"));
    lines
        .filter_map(|data| serde_json::from_str(data.trim_start()).ok())
        .collect()
}

#[derive(Debug, Default, PartialEq)]
struct Heard {
    text: String,
    arguments: String,
    /// Input, cached and output tokens.
    usage: (u64, u64, u64),
    ended: bool,
    error: Option<String>,
}

impl Heard {
    fn chat(&mut self, event: &Value) {
        let delta = &event["choices"][0]["delta"];
        self.text += delta["content"].as_str().unwrap_or_default();
        let function = &delta["tool_calls"][0]["function"];
        self.arguments += function["arguments"].as_str().unwrap_or_default();
        self.ended |= event["choices"][0]["finish_reason"].is_string();
        if let Some(input) = event["usage"]["prompt_tokens"].as_u64() {
            let cached = event["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64();
            let output = event["usage"]["completion_tokens"].as_u64();
            self.usage = (input, cached.unwrap_or(0), output.unwrap());
        }
        self.error(&event["error"]["message"]);
    }

    fn messages(&mut self, event: &Value) {
        match event["type"].as_str() {
            Some("content_block_delta") => {
                self.text += event["delta"]["text"].as_str().unwrap_or_default();
                self.arguments += event["delta"]["partial_json"].as_str().unwrap_or_default();
            }
            Some("message_delta") => {
                let of = |name: &str| event["usage"][name].as_u64().unwrap();
                let cached = of("cache_read_input_tokens");
                self.usage = (of("input_tokens") + cached, cached, of("output_tokens"));
            }
            Some("message_stop") => self.ended = true,
            Some("error") => self.error(&event["error"]["message"]),
            _ => {}
        }
    }

    fn responses(&mut self, event: &Value) {
        match event["type"].as_str() {
            Some("response.output_text.delta") => self.text += event["delta"].as_str().unwrap(),
            Some("response.function_call_arguments.delta") => {
                self.arguments += event["delta"].as_str().unwrap();
            }
            Some("response.completed") => {
                let of = |pointer: &str| {
                    let usage = &event["response"]["usage"];
                    usage.pointer(pointer).and_then(Value::as_u64).unwrap()
                };
                let cached = of("/input_tokens_details/cached_tokens");
                self.usage = (of("/input_tokens"), cached, of("/output_tokens"));
                self.ended = true;
            }
            Some("response.failed") => self.error(&event["response"]["error"]["message"]),
            Some("error") => self.error(&event["message"]),
            _ => {}
        }
    }

    fn error(&mut self, message: &Value) {
        if let Some(message) = message.as_str() {
            self.error = Some(message.to_owned());
        }
    }
}

/// The events of a node's answer: text, a call, usage, terminator, in one way of writing them.
fn node_stream(space: &str, ending: &str) -> Vec<u8> {
    let choice = |delta: Value, finish: Value| {
        json!({"id": "x", "object": "chat.completion.chunk", "model": MODEL,
            "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]})
    };
    let call = |delta: Value| choice(json!({"tool_calls": [delta]}), Value::Null);
    let last = json!({"id": "x", "object": "chat.completion.chunk", "model": MODEL, "choices": [],
        "usage": usage(1000, 640, 20)});
    let chunks = [
        choice(json!({"role": "assistant", "content": ""}), Value::Null),
        choice(
            json!({"content": "你好🦀 data: [DONE]\n\ndata: [DONE]"}),
            Value::Null,
        ),
        choice(json!({"content": " \"q\" \\ and\r\n\u{1}é"}), Value::Null),
        call(json!({"index": 0, "id": "call_1", "type": "function",
            "function": {"name": "weather", "arguments": ""}})),
        call(json!({"index": 0, "function": {"arguments": "{\"city\":\"杭"}})),
        call(json!({"index": 0, "function": {"arguments": "州\"}"}})),
        choice(json!({}), json!("tool_calls")),
        last,
    ];
    let mut out = format!(": keep-alive{ending}");
    for chunk in chunks {
        out += &format!("data:{space}{chunk}{ending}");
    }
    (out + &format!("data:{space}[DONE]{ending}")).into_bytes()
}

fn framed(pieces: &[&[u8]]) -> Vec<u8> {
    let mut out = stream_head();
    for piece in pieces.iter().filter(|piece| !piece.is_empty()) {
        out.extend(chunk(piece));
    }
    out.extend(CHUNKS_END);
    out
}

#[test]
fn every_cut_and_spelling_reads_the_same_in_every_dialect() {
    let node = Node::start();
    let gateway = Gateway::start(&[&node]);
    let expected = Heard {
        text: "你好🦀 data: [DONE]\n\ndata: [DONE] \"q\" \\ and\r\n\u{1}é".to_owned(),
        arguments: "{\"city\":\"杭州\"}".to_owned(),
        usage: (1000, 640, 20),
        ended: true,
        error: None,
    };
    for surface in ALL {
        for (space, ending) in [
            (" ", "\n\n"),
            ("", "\n\n"),
            (" ", "\r\n\r\n"),
            ("", "\r\n\r\n"),
        ] {
            let stream = node_stream(space, ending);
            let mut scripts = vec![vec![Act::Bytewise(framed(&[&stream]))]];
            // One HTTP chunk ends at every byte offset.
            for at in 0..stream.len() {
                scripts.push(vec![Act::Send(framed(&[&stream[..at], &stream[at..]]))]);
            }
            for script in scripts {
                node.script(script);
                let body = surface.body("hi", true).to_string();
                let answer = gateway.post(surface.path(), &[], body.as_bytes());
                assert_eq!(answer.status, 200, "{}", answer.text());
                assert_eq!(
                    surface.read(&answer),
                    expected,
                    "{surface:?}: {}",
                    answer.text()
                );
            }
        }
    }
    let rows = gateway.rows();
    for row in &rows {
        let billed = ["input_tokens", "cached_tokens", "output_tokens"].map(|name| &row[name]);
        assert_eq!(billed, [&json!(1000), &json!(640), &json!(20)], "{row}");
        assert_eq!(row["status"], "complete");
    }
    gateway.assert_idle();
}

/// Catches events that are dropped where a batch of few holds the answer's end too: the engine sends
/// short answers so.
#[test]
fn a_short_answer_that_comes_at_once_is_whole() {
    let node = Node::start();
    let gateway = Gateway::start(&[&node]);
    for surface in ALL {
        let only = json!({"id": "x", "object": "chat.completion.chunk", "model": MODEL, "choices": [
            {"index": 0, "delta": {"role": "assistant", "content": "yes"}, "finish_reason": "stop"}]});
        let last = json!({"id": "x", "object": "chat.completion.chunk", "model": MODEL,
            "choices": [], "usage": usage(30, 0, 1)});
        let stream = format!("data: {only}\n\ndata: {last}\n\ndata: [DONE]\n\n");
        node.script(vec![Act::Send(framed(&[stream.as_bytes()]))]);
        let body = surface.body("hi", true).to_string();
        let answer = gateway.post(surface.path(), &[], body.as_bytes());
        let heard = surface.read(&answer);
        assert_eq!(
            (heard.text.as_str(), heard.ended),
            ("yes", true),
            "{}",
            answer.text()
        );
        let first = &events(&answer)[0];
        let begun = match surface {
            Surface::Chat => first["choices"][0]["delta"]["role"] == "assistant",
            Surface::Messages => first["type"] == "message_start",
            Surface::Responses => first["type"] == "response.created",
        };
        assert!(begun, "{surface:?}: {}", answer.text());
    }
    gateway.assert_idle();
}

#[test]
fn h04_a_cancelled_stream_is_billed_on_every_surface() {
    let node = Node::start();
    let gateway = Gateway::exact(&[&node]);
    for surface in ALL {
        let mut script = vec![Act::Send(stream_head())];
        for _ in 0..400 {
            let delta = crate::support::node::delta("x");
            script.push(Act::Send(chunk(format!("data: {delta}\n\n").as_bytes())));
            script.push(Act::Pause(Duration::from_millis(50)));
        }
        node.script(script);
        let before = node.hang_ups().len();
        let body = surface.body(&"word ".repeat(970), true).to_string();
        let mut client = Connection::open(gateway.addr);
        let authorization = format!("authorization: Bearer {}", gateway.key);
        client.request("POST", surface.path(), &[&authorization], body.as_bytes());
        let (status, head) = client.head();
        assert_eq!(status, 200);
        let mut deltas = 0;
        while deltas < 10 {
            let piece = String::from_utf8(client.chunk().unwrap()).unwrap();
            deltas += piece.matches(surface.delta()).count();
        }
        drop(client);
        eventually("the node's connection is closed", || {
            node.hang_ups().len() > before
        });
        let line = head.lines().find_map(|line| {
            line.to_ascii_lowercase()
                .strip_prefix("x-request-id: ")
                .map(str::to_owned)
        });
        let row = gateway.row(&line.unwrap());
        assert_eq!(row["status"], "cancelled", "{surface:?}");
        assert!(row["input_tokens"].as_u64().unwrap() > 970, "{row}");
        assert!(row["output_tokens"].as_u64().unwrap() >= 10, "{row}");
    }
    gateway.assert_idle();
}

#[test]
fn h06_later_usage_replaces_earlier_usage() {
    let node = Node::start();
    let gateway = Gateway::start(&[&node]);
    let chunk_with = |text: &str, usage: Value| {
        let choices = json!([{"index": 0, "delta": {"content": text}, "finish_reason": null}]);
        let chunk = json!({"id": "x", "object": "chat.completion.chunk", "choices": choices,
            "usage": usage});
        format!("data: {chunk}\n\n")
    };
    for surface in ALL {
        let last = json!({"id": "x", "choices": [], "usage": usage(3602, 3600, 8)});
        let stream = [
            chunk_with("a", usage(3602, 0, 1)),
            chunk_with("b", usage(3602, 3600, 5)),
            format!("data: {last}\n\ndata: [DONE]\n\n"),
        ];
        node.script(vec![Act::Send(framed(&[stream.concat().as_bytes()]))]);
        let body = surface.body("hi", true).to_string();
        let answer = gateway.post(surface.path(), &[], body.as_bytes());
        assert_eq!(
            surface.read(&answer).usage,
            (3602, 3600, 8),
            "{}",
            answer.text()
        );
        let row = gateway.row(answer.header("x-request-id").unwrap());
        let billed = ["input_tokens", "cached_tokens", "output_tokens"].map(|name| &row[name]);
        assert_eq!(
            billed,
            [&json!(3602), &json!(3600), &json!(8)],
            "{surface:?}"
        );
    }
    gateway.assert_idle();
}

#[test]
fn h13_the_body_of_a_refused_stream_arrives() {
    let node = Node::start();
    let gateway = Gateway::start(&[&node]);
    for surface in ALL {
        for (status, kind) in [(429, "rate_limit_error"), (400, "invalid_request_error")] {
            let message = "the queue is full, ".repeat(10);
            let body = json!({"error": {"message": message, "type": "requests", "param": null,
                "code": null}});
            let refusal =
                crate::support::node::json(status, &["retry-after: 7"], &body.to_string());
            // Once for each attempt.
            node.script(vec![Act::Send(refusal.clone())]);
            let body = surface.body("hi", true).to_string();
            let answer = gateway.post(surface.path(), &[], body.as_bytes());
            assert_eq!(answer.status, status, "{surface:?}: {}", answer.text());
            assert_eq!(answer.header("retry-after"), Some("7"));
            assert_eq!(answer.header("content-type"), Some("application/json"));
            let told = answer.json();
            assert_eq!(told["error"]["message"], message);
            if surface == Surface::Messages {
                assert_eq!(told["type"], "error");
                assert_eq!(told["error"]["type"], kind);
            }
            let row = gateway.row(answer.header("x-request-id").unwrap());
            assert_eq!(
                (&row["status"], &row["cost_nano_usd"]),
                (&json!("failed"), &json!(0))
            );
        }
    }
    gateway.assert_idle();
}

#[test]
fn an_error_within_a_stream_is_told_in_the_dialect() {
    let node = Node::start();
    let gateway = Gateway::start(&[&node]);
    let error = json!({"error": {"message": "the grammar broke", "type": "invalid_request_error",
        "code": "grammar_failed"}});
    let first = crate::support::node::delta("half an ans");
    for surface in ALL {
        for message in [Some("the grammar broke"), None] {
            let mut begun = stream_head();
            begun.extend(chunk(format!("data: {first}\n\n").as_bytes()));
            // Else both may be read at once, and nothing has been relayed yet.
            let mut script = vec![Act::Send(begun), Act::Pause(Duration::from_millis(100))];
            if message.is_some() {
                script.push(Act::Send(chunk(format!("data: {error}\n\n").as_bytes())));
            }
            script.push(Act::Close);
            node.script(script);
            let body = surface.body("hi", true).to_string();
            let answer = gateway.post(surface.path(), &[], body.as_bytes());
            let heard = surface.read(&answer);
            assert_eq!(heard.text, "half an ans", "{surface:?}");
            assert!(!heard.ended, "{surface:?}: {}", answer.text());
            let said = heard
                .error
                .unwrap_or_else(|| panic!("{surface:?}: {}", answer.text()));
            assert!(message.is_none_or(|message| said == message), "{said}");
            let row = gateway.row(answer.header("x-request-id").unwrap());
            assert_eq!(row["status"], "cut");
        }
    }
    gateway.assert_idle();
}
