//! Catches a request that reads otherwise because parts of it were read before: each turn of a
//! random conversation is read with a memory and, as its slow twin, without.

#![expect(clippy::panic, reason = "a test stops at the first surprise")]

use dialects::error::ApiError;
use dialects::known::{Known, Reader};
use dialects::normalise::Options;
use dialects::session::fingerprint;
use dialects::{Fields, NodeParams, PromptInput, Turn, chat, chat_known};
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{RngExt, SeedableRng};

/// What must be the same: prompt, fingerprint and node's body, or parameter and words of a refusal.
type Read = Result<(String, u64, String), (Option<String>, String)>;

fn shown(turn: Result<Turn<'_>, ApiError>) -> Read {
    let turn = turn.map_err(|error| (error.param, error.message))?;
    let PromptInput::Chat(prompt) = &turn.prompt else {
        panic!("a conversation")
    };
    let params = NodeParams {
        model: "m",
        is_alias: false,
        cache_salt: "5a17",
        usage_always: false,
    };
    let body = String::from_utf8(turn.node_body(&params)).expect("UTF-8");
    Ok((format!("{prompt:?}"), fingerprint(&turn.prompt), body))
}

/// One dialect: how a turn is read, with and without a memory, and how its bodies look.
struct Dialect {
    slow: fn(&str, Options) -> Read,
    fast: fn(&str, &Reader<'_>) -> Read,
    message: fn(&mut StdRng) -> String,
    tools: fn(&mut StdRng) -> String,
    body: fn(&[String], &str) -> String,
}

/// Grows conversations turn by turn; now and then one is edited, cut, or forked.
fn check(dialect: &Dialect, seed: u64) {
    let mut random = StdRng::seed_from_u64(seed);
    let known = Known::new(1 << 20);
    let options = Options {
        billing_line: random.random_bool(0.8),
        content: random.random_bool(0.8),
        ..Options::default()
    };
    let readers = [
        known.reader("a", options),
        known.reader(
            "a",
            Options {
                arguments: false,
                ..options
            },
        ),
        known.reader("b", options),
    ];
    let mut messages: Vec<String> = Vec::new();
    let mut tools = (dialect.tools)(&mut random);
    for turn in 0..14 {
        match random.random_range(0..10) {
            0 if messages.len() > 1 => messages.truncate(messages.len() / 2),
            1 if !messages.is_empty() => {
                let at = random.random_range(0..messages.len());
                messages[at] = (dialect.message)(&mut random);
            }
            2 => tools = (dialect.tools)(&mut random),
            _ => {}
        }
        for _ in 0..random.random_range(0..4) {
            messages.push((dialect.message)(&mut random));
        }
        let body = (dialect.body)(&messages, &tools);
        let reader = readers.choose(&mut random).expect("a reader");
        let expected = (dialect.slow)(&body, reader.options());
        assert_eq!(
            (dialect.fast)(&body, reader),
            expected,
            "seed {seed}, turn {turn}: {body}"
        );
        if expected.is_err() {
            // A message that is refused would hide what follows it.
            messages.retain(|message| {
                let alone = (dialect.body)(std::slice::from_ref(message), "");
                (dialect.slow)(&alone, options).is_ok()
            });
        }
    }
    assert!(known.held_bytes() <= 1 << 20);
}

const TEXTS: &[&str] = &[
    "hi",
    "",
    " ",
    "a \\\"quoted\\\" text",
    "Z\\u00fcrich",
    "x-anthropic-billing-header: cc_version=1.2; cch=a1;You are",
    "x-anthropic-billing-header: cc_version=1.2; cch=a1;",
    "\\ud800",
    "a\\nb]},{[",
];

fn mark(random: &mut StdRng) -> &'static str {
    const MARKS: &[&str] = &[
        "",
        "",
        "",
        r#","cache_control":{"type":"ephemeral"}"#,
        r#", "cache_control" : {"type":"ephemeral","ttl":"1h"}"#,
        r#","cache_control":{"type":"forever"}"#,
        r#","cache_control":null"#,
    ];
    MARKS.choose(random).expect("a mark")
}

fn text(random: &mut StdRng) -> &'static str {
    TEXTS.choose(random).expect("a text")
}

fn chat_message(random: &mut StdRng) -> String {
    let role = ["user", "assistant", "system", "developer", "tool"]
        .choose(random)
        .expect("a role");
    let content = match random.random_range(0..6) {
        0 => format!(
            r#"[{{"type":"text","text":"{}"{}}},{{"type": "text","text":"{}"}}]"#,
            text(random),
            mark(random),
            text(random)
        ),
        1 => "null".to_owned(),
        _ => format!("\"{}\"", text(random)),
    };
    match random.random_range(0..24) {
        0 => "7".to_owned(),
        1 => r#"{"content":"x"}"#.to_owned(),
        2 => r#"{"role":"user","content":"a","role":"system"}"#.to_owned(),
        3 => format!("{}1{}", "[".repeat(127), "]".repeat(127)),
        4 => {
            // At the parser's limit.
            let depth = random.random_range(123..129);
            let (open, close) = ("{\"a\":".repeat(depth), "}".repeat(depth));
            format!(r#"{{"role":"user","content":"x","y":{open}1{close}}}"#)
        }
        5..8 => format!(
            r#"{{"role":"assistant","content":{content},"tool_calls":[{{"id":"c1","type":"function",
            "function":{{"name":"f","arguments":"{{\"a\": \"Z\\u00fc\" }}"}}{}}}]}}"#,
            mark(random)
        ),
        _ => format!(
            r#"{{"role":"{role}", "content":{content}{}}}"#,
            mark(random)
        ),
    }
}

fn chat_tools(random: &mut StdRng) -> String {
    let order = match random.random_bool(0.5) {
        true => r#""type":"object","properties":{"b":{"type":"string"},"a":{}},"required":["a"]"#,
        false => r#""required":["a"],"properties":{"a":{},"b":{"type":"string"}},"type":"object""#,
    };
    match random.random_range(0..8) {
        0 => String::new(),
        1 => r#","tools":null"#.to_owned(),
        2 => r#","tools":{}"#.to_owned(),
        3 => r#","tools":[],"tool_choice":"required""#.to_owned(),
        _ => format!(
            r#","tools":[{{"type":"function","function":{{"name":"f{}","parameters":{{{order}}}}}{}}}],"tool_choice":{{"type":"function","function":{{"name":"f1"}}}}"#,
            random.random_range(1..3),
            mark(random)
        ),
    }
}

const CHAT: Dialect = Dialect {
    slow: |body, options| {
        let turn = Fields::parse(body.as_bytes()).and_then(chat);
        shown(turn.map(|mut turn| {
            turn.normalise(options);
            turn
        }))
    },
    fast: |body, reader| {
        let turn = Fields::parse(body.as_bytes());
        shown(turn.and_then(|fields| chat_known(fields, reader)))
    },
    message: chat_message,
    tools: chat_tools,
    body: |messages, tools| {
        format!(
            r#"{{"model":"m","messages":[{}]{tools},"temperature":0.5}}"#,
            messages.join(" ,\n")
        )
    },
};

#[test]
fn a_chat_request_reads_the_same() {
    (0..400).for_each(|seed| check(&CHAT, seed));
}

#[test]
fn known_messages_are_shared_within_a_scope_only() {
    let known = Known::new(1 << 20);
    let body =
        r#"{"model":"m","messages":[{"role":"user","content":[{"type":"text","text":"a"}]}]}"#;
    let first = |scope: &str| {
        let fields = Fields::parse(body.as_bytes()).expect("JSON");
        let turn = chat_known(fields, &known.reader(scope, Options::default())).expect("a turn");
        match turn.prompt {
            PromptInput::Chat(chat) => std::ptr::from_ref::<serde_json::Value>(&chat.messages[0]),
            _ => panic!("a conversation"),
        }
    };
    assert_eq!(first("a"), first("a"));
    assert_ne!(first("a"), first("b"));
}
