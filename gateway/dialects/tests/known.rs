//! Catches a request that reads otherwise because parts of it were read before: each turn of a
//! random conversation is read with a memory and, as its slow twin, without.

#![cfg(test)]

use dialects::error::ApiError;
use dialects::known::{Known, Reader};
use dialects::normalise::Options;
use dialects::session::fingerprint;
use dialects::{Fields, NodeParams, PromptInput, Turn, chat, chat_known, messages, responses};
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

/// Grows conversations turn by turn; now and then one is edited, cut, or forked. How many turns
/// were sound.
fn check(dialect: &Dialect, seed: u64) -> usize {
    let mut sound = 0;
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
        sound += usize::from(expected.is_ok());
        if expected.is_err() {
            // A message that is refused would hide what follows it.
            messages.retain(|message| {
                let alone = (dialect.body)(std::slice::from_ref(message), "");
                (dialect.slow)(&alone, options).is_ok()
            });
        }
    }
    assert!(known.held_bytes() <= 1 << 20);
    sound
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
    let sound: usize = (0..400).map(|seed| check(&CHAT, seed)).sum();
    assert!(sound > 500, "{sound} turns were sound");
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

fn block(random: &mut StdRng, speaker: &str) -> String {
    let id = random.random_range(0..3);
    match (speaker, random.random_range(0..6)) {
        ("assistant", 0 | 1) => format!(
            r#"{{"type":"tool_use","id":"c{id}","name":"f","input":{{"b":1, "a":"{}"}}{}}}"#,
            text(random),
            mark(random)
        ),
        ("assistant", 2) => {
            format!(
                r#"{{"type":"thinking","thinking":"{}","signature":""}}"#,
                text(random)
            )
        }
        ("user", 0 | 1) => format!(
            r#"{{"type":"tool_result","tool_use_id":"c{id}","content":[{{"type":"text","text":"{}"}}]{}}}"#,
            text(random),
            mark(random)
        ),
        (_, 3) => format!(r#"{{"type":"x{id}"}}"#),
        _ => format!(
            r#"{{"type":"text","text":"w{}"{}}}"#,
            text(random),
            mark(random)
        ),
    }
}

/// Mostly a call and its result, so that most conversations are sound.
fn item(random: &mut StdRng) -> String {
    let id = random.random_range(0..3);
    match random.random_range(0..12) {
        0..=3 => format!(
            r#"{{"role":"assistant","content":[{{"type":"text","text":"w{}"}},{{"type":"tool_use","id":"c{id}","name":"f","input":{{"a" : "\u00fc"}}}}]}},
            {{"role":"user","content":[{{"type":"tool_result","tool_use_id":"c{id}","content":"{}"{}}}]}}"#,
            text(random),
            text(random),
            mark(random),
        ),
        4 => r#"{"role":"system","content":"s","clear_at":"next_user_message"}"#.to_owned(),
        5 => r#"{"role":"system","content":[]}"#.to_owned(),
        6 | 7 => r#"{"role":"user","content":"hi"},{"role":"assistant","content":"ho"}"#.to_owned(),
        8 => "[]".to_owned(),
        _ => {
            let speaker = ["user", "assistant", "system"]
                .choose(random)
                .expect("a role");
            let blocks: Vec<String> = (0..random.random_range(0..3))
                .map(|_| block(random, speaker))
                .collect();
            format!(r#"{{"role":"{speaker}","content":[{}]}}"#, blocks.join(","))
        }
    }
}

fn item_tools(random: &mut StdRng) -> String {
    let system = match random.random_range(0..5) {
        0 => String::new(),
        1 => r#","system":7"#.to_owned(),
        2 => format!(
            r#","system":[{{"type":"text","text":"{}"{}}}]"#,
            text(random),
            mark(random)
        ),
        _ => format!(r#","system":"{}""#, text(random)),
    };
    let tools = match random.random_range(0..5) {
        0 => String::new(),
        1 => r#","tools":[],"tool_choice":{"type":"any"}"#.to_owned(),
        2 => {
            r#","tools":[{"type":"web_search_20250305","name":"w"}],"tool_choice":{"type":"auto"}"#
                .to_owned()
        }
        _ => format!(
            r#","tools":[{{"name":"f{}","input_schema":{{"properties":{{"a":{{}}}},"type":"object"}}{}}}],"tool_choice":{{"type":"tool","name":"f1"}}"#,
            random.random_range(1..3),
            mark(random)
        ),
    };
    system + &tools
}

const MESSAGES: Dialect = Dialect {
    slow: |body, options| {
        let turn = Fields::parse(body.as_bytes()).and_then(messages::parse);
        shown(turn.map(|(mut turn, _)| {
            turn.normalise(options);
            turn
        }))
    },
    fast: |body, reader| {
        let turn = Fields::parse(body.as_bytes());
        let turn = turn.and_then(|fields| messages::parse_known(fields, reader));
        shown(turn.map(|(turn, _)| turn))
    },
    message: item,
    tools: item_tools,
    body: |messages, tools| {
        format!(
            r#"{{"model":"m","max_tokens":9,"messages":[{}]{tools}}}"#,
            messages.join(",")
        )
    },
};

#[test]
fn a_messages_request_reads_the_same() {
    let sound: usize = (0..400).map(|seed| check(&MESSAGES, seed)).sum();
    assert!(sound > 500, "{sound} turns were sound");
}

fn input_item(random: &mut StdRng) -> String {
    let id = random.random_range(0..3);
    match random.random_range(0..14) {
        0..=3 => format!(
            r#"{{"type":"function_call","call_id":"c{id}","name":"f","arguments":"{{\"a\": 1}}"}},
            {{"type":"function_call_output","call_id":"c{id}","output":"{}"}}"#,
            text(random)
        ),
        4 => format!(
            r#"{{"type":"reasoning","summary":[{{"type":"summary_text","text":"{}"}}]}}"#,
            text(random)
        ),
        5 => r#"{"type":"web_search_call","id":"w"}"#.to_owned(),
        6 => r#"{"type":"item_reference","id":"i"}"#.to_owned(),
        7 => format!(r#"{{"type":"function_call_output","call_id":"c{id}","output":"x"}}"#),
        8 => r#"{"type":"function_call_output","name":"news","output":"x"}"#.to_owned(),
        9 => format!(r#"{{"type":"custom_tool_call","call_id":"c{id}","name":"g","input":"a b"}}"#),
        10 => r#"{"type":"message","role":"user","content":[{"type":"input_image"}]}"#.to_owned(),
        11 => format!(r#"{{"role":"developer","content":"{}"}}"#, text(random)),
        12 => format!(
            r#"{{"role":"user","content":[{{"type":"input_text","text":"{}"}}, {{"type":"input_text","text":"b"}}]}}"#,
            text(random)
        ),
        _ => format!(r#"{{"role":"assistant","content":"{}"}}"#, text(random)),
    }
}

fn input_tools(random: &mut StdRng) -> String {
    let instructions = match random.random_range(0..4) {
        0 => String::new(),
        1 => r#","instructions":{}"#.to_owned(),
        _ => format!(r#","instructions":"{}""#, text(random)),
    };
    let choice = [
        "",
        r#","tool_choice":"auto""#,
        r#","tool_choice":"required""#,
        r#","tool_choice":"x""#,
        r#","tool_choice":{"type":"function","name":"f"}"#,
        r#","tool_choice":{"type":"allowed_tools","mode":"auto","tools":[{"type":"function","name":"f"}]}"#,
    ];
    let tools = [
        "",
        r#","tools":[]"#,
        r#","tools":[{"type":"web_search"}]"#,
        r#","tools":[{"type":"function","name":"f","parameters":{"properties":{"a":{}},"type":"object"}},{"type":"custom","name":"g"}]"#,
        r#","tools":[{"type":"function","name":"f"},{"type":"function","name":"f"}]"#,
    ];
    let store = [
        "",
        r#","store":false"#,
        r#","store":false"#,
        r#","store":true"#,
    ];
    let of = |random: &mut StdRng, words: &[&'static str]| *words.choose(random).expect("a word");
    [
        &instructions,
        of(random, &tools),
        of(random, &choice),
        of(random, &store),
        of(random, &["", "", r#","previous_response_id":"resp_1""#]),
    ]
    .concat()
}

fn asked(request: Result<responses::Request<'_>, ApiError>) -> Result<Turn<'_>, ApiError> {
    let ids = responses::Ids {
        response: "resp_2".to_owned(),
        created_s: 1,
    };
    request
        .and_then(|request| request.turn(Vec::new(), ids))
        .map(|(turn, _)| turn)
}

const RESPONSES: Dialect = Dialect {
    slow: |body, options| {
        let request = Fields::parse(body.as_bytes()).and_then(responses::parse);
        shown(asked(request).map(|mut turn| {
            turn.normalise(options);
            turn
        }))
    },
    fast: |body, reader| {
        let fields = Fields::parse(body.as_bytes());
        shown(asked(
            fields.and_then(|fields| responses::parse_known(fields, reader)),
        ))
    },
    message: input_item,
    tools: input_tools,
    body: |messages, tools| format!(r#"{{"model":"m","input":[{}]{tools}}}"#, messages.join(",")),
};

#[test]
fn a_responses_request_reads_the_same() {
    let sound: usize = (0..400).map(|seed| check(&RESPONSES, seed)).sum();
    assert!(sound > 500, "{sound} turns were sound");
}

/// Would catch a long text that is taken for another because it looks alike where it is sampled.
#[test]
fn long_texts_that_differ_in_a_letter_are_told_apart() {
    let known = Known::new(1 << 20);
    let reader = known.reader("a", Options::default());
    for at in (0..3000).step_by(37) {
        let mut text = "x".repeat(3000);
        text.replace_range(at..=at, "y");
        let messages = [format!(r#"{{"role":"user","content":"{text}"}}"#)];
        let body = (CHAT.body)(&messages, "");
        assert_eq!(
            (CHAT.fast)(&body, &reader),
            (CHAT.slow)(&body, Options::default())
        );
    }
}
