//! Catches a prompt whose spelling still depends on the client, one whose meaning was changed, and
//! a turn that is written anew, or copied, for nothing.

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use serde_json::{Map, Value, json};

use super::*;
use crate::turn::NodeParams;
use crate::{Fields, Shared};

fn prompt(messages: Value, tools: Option<Value>) -> ChatPrompt {
    let Value::Array(messages) = messages else {
        panic!("messages are an array")
    };
    ChatPrompt {
        messages: messages.into_iter().map(Shared::from).collect(),
        tools: tools.map(Shared::from),
        template_kwargs: None,
    }
}

/// One table for messages: as sent, and as they become (the same where nothing changes).
fn check_messages(options: Options, sent: &Value, expected: &Value) {
    let mut given = prompt(sent.clone(), None);
    let changed = normalise(&mut given, options);
    assert_eq!(Value::from(given.messages.clone()), *expected, "{sent}");
    // Values compare without the order of keys; texts do not.
    let texts = |value: &Value| value.to_string();
    let same = texts(sent) == texts(expected);
    assert_eq!(changed.messages, !same, "{sent}");
    assert!(
        !normalise(&mut given, options).any(),
        "once is enough: {sent}"
    );
}

mod orders;

const LINE: &str =
    "x-anthropic-billing-header: cc_version=2.1.332.31a; cc_entrypoint=cli; cch=0aaa9;";

#[test]
fn the_billing_line_goes_and_its_words_stay() {
    let on = Options::default();
    let user = json!({"role": "user", "content": "hi"});
    let system = |text: &str| json!({"role": "system", "content": text});
    for (first, expected) in [
        (system(&format!("{LINE}You are")), Some(system("You are"))),
        (system(&format!("{LINE}\nYou are")), Some(system("You are"))),
        (
            system(&format!("{LINE} a=b; You are")),
            Some(system(" a=b; You are")),
        ),
        (
            system("x-anthropic-billing-header: cc_version=1;You"),
            Some(system("You")),
        ),
        (system(LINE), None),
        (
            json!({"role": "developer", "content": [
                {"type": "text", "text": LINE},
                {"type": "text", "text": "You are"},
            ]}),
            Some(json!({"role": "developer", "content": "You are"})),
        ),
        (
            json!({"role": "system", "content": [{"type": "text", "text": LINE}]}),
            None,
        ),
    ] {
        let expected: Vec<Value> = expected.into_iter().chain([user.clone()]).collect();
        check_messages(on, &json!([first, user]), &Value::Array(expected));
    }
    for untouched in [
        json!([{"role": "user", "content": format!("{LINE}\nWhat is this?")}]),
        json!([system("s"), {"role": "system", "content": LINE}]),
        json!([system(&format!(" {LINE}"))]),
        json!([system(&format!("Never print {LINE}"))]),
        json!([system(
            "x-anthropic-billing-header: is a line of Claude Code; explain it."
        )]),
        json!([system("x-anthropic-billing-header:")]),
        json!([{"role": "assistant", "content": LINE}]),
    ] {
        check_messages(on, &untouched, &untouched);
    }
    let off = Options {
        billing_line: false,
        ..on
    };
    let kept = json!([system(&format!("{LINE}You are")), user]);
    check_messages(off, &kept, &kept);
}

#[test]
fn lists_of_texts_are_their_text() {
    let text = |text: &str| json!({"type": "text", "text": text});
    let marked = json!({"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}});
    let image = json!({"type": "image_url", "image_url": {"url": "data:"}});
    let user = |content: Value| json!([{"role": "user", "content": content}]);
    let on = Options::default();
    for (content, expected) in [
        (json!("a"), json!("a")),
        (json!([text("a")]), json!("a")),
        (json!([text("a"), text("b\n")]), json!("ab\n")),
        (json!([]), json!("")),
        (json!([marked]), json!("a")),
        (json!([text("a"), image]), json!([text("a"), image])),
        (json!([marked, image]), json!([text("a"), image])),
        (json!([{"type": "text"}]), json!([{"type": "text"}])),
        (json!(null), json!(null)),
        (json!([1]), json!([1])),
    ] {
        check_messages(on, &user(content), &user(expected));
    }
    let marks_stay = Options {
        cache_marks: false,
        ..on
    };
    let kept = user(json!([marked]));
    check_messages(marks_stay, &kept, &kept);
    check_messages(marks_stay, &user(json!([text("a")])), &user(json!("a")));
    let lists_stay = Options {
        content: false,
        ..on
    };
    check_messages(
        lists_stay,
        &user(json!([marked])),
        &user(json!([text("a")])),
    );
}

#[test]
fn blank_content_beside_calls_is_null() {
    let call =
        json!([{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]);
    let on = Options::default();
    let assistant = |content: Value, calls: &Value| json!([{"role": "assistant", "content": content, "tool_calls": calls}]);
    for (content, expected) in [
        (json!("\n\n"), json!(null)),
        (json!(""), json!("")),
        (json!(null), json!(null)),
        (json!(" a\n"), json!(" a\n")),
    ] {
        check_messages(on, &assistant(content, &call), &assistant(expected, &call));
    }
    let alone = assistant(json!("\n"), &json!([]));
    check_messages(on, &alone, &alone);
    let off = Options {
        content: false,
        ..on
    };
    let kept = assistant(json!("\n"), &call);
    check_messages(off, &kept, &kept);
    let mut answer = kept[0].clone();
    normalise_message(&mut answer, on);
    assert_eq!(answer, assistant(json!(null), &call)[0]);
}

#[test]
fn marks_go_wherever_they_are() {
    let mark = json!({"type": "ephemeral", "ttl": "1h"});
    let explicit = json!({"mode": "explicit"});
    let sent = json!([
        {"cache_control": mark, "role": "system", "content": "s"},
        {"role": "user", "content": [
            {"type": "text", "text": "a", "prompt_cache_breakpoint": explicit},
        ], "name": "n"},
        {"role": "assistant", "tool_calls": [
            {"id": "c", "cache_control": mark, "type": "function",
             "function": {"name": "f", "arguments": "{\"cache_control\":1}"}},
        ]},
        {"role": "tool", "tool_call_id": "c", "content": "{\"cache_control\": 1}"},
    ]);
    let expected = json!([
        {"role": "system", "content": "s"},
        {"role": "user", "content": "a", "name": "n"},
        {"role": "assistant", "tool_calls": [
            {"id": "c", "type": "function",
             "function": {"name": "f", "arguments": "{\"cache_control\":1}"}},
        ]},
        {"role": "tool", "tool_call_id": "c", "content": "{\"cache_control\": 1}"},
    ]);
    check_messages(Options::default(), &sent, &expected);
    let tool = |extra: Value, function_extra: Value| {
        let mut tool = json!({"type": "function", "function": {"name": "f", "parameters":
            {"type": "object", "properties": {"cache_control": {"type": "string"}}}}});
        for (object, extra) in [("", extra), ("/function", function_extra)] {
            let object = tool.pointer_mut(object).and_then(Value::as_object_mut);
            object
                .expect("an object")
                .extend(extra.as_object().cloned().expect("an object"));
        }
        tool
    };
    let plain = tool(json!({}), json!({}));
    for tools in [
        json!([tool(json!({"cache_control": mark}), json!({}))]),
        json!([tool(json!({}), json!({"cache_control": mark}))]),
    ] {
        let mut given = prompt(json!([]), Some(tools));
        assert!(normalise(&mut given, Options::default()).tools);
        assert_eq!(
            given.tools.expect("tools").to_string(),
            json!([plain]).to_string()
        );
    }
}

#[test]
fn arguments_have_one_spelling() {
    let on = Options::default();
    let call = |arguments: Value| {
        json!([{"role": "assistant", "content": null, "tool_calls": [
            {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}},
        ]}])
    };
    for (sent, expected) in [
        (r#"{"city":"Zürich"}"#, r#"{"city":"Zürich"}"#),
        (r#"{"city": "Z\u00fcrich"}"#, r#"{"city":"Zürich"}"#),
        (
            " {\n\t\"b\" : [ 1 , 2.50 ] , \"a\" : { } }\r\n",
            r#"{"b":[1,2.50],"a":{}}"#,
        ),
        (r#"{"path":"a\/b \" c\\"}"#, r#"{"path":"a/b \" c\\"}"#),
        (
            r#"{"n":12345678901234567890123, "e":1E400}"#,
            r#"{"n":12345678901234567890123,"e":1E400}"#,
        ),
        (r#"{"crab":"\ud83e\udd80"}"#, r#"{"crab":"🦀"}"#),
        (r#"{"control":"\u001f\n"}"#, r#"{"control":"\u001f\n"}"#),
        (r#"{"a": 1, "a": 2}"#, r#"{"a":1,"a":2}"#),
        // What is no JSON object stays as it is.
        (r#"{"half": "\ud83e"}"#, r#"{"half": "\ud83e"}"#),
        (r#"{"cut": "of"#, r#"{"cut": "of"#),
        (r#"{"cut": "of\"#, r#"{"cut": "of\"#),
        ("{ } }", "{ } }"),
        ("[ 1 ]", "[ 1 ]"),
        ("", ""),
        ("two words", "two words"),
    ] {
        check_messages(on, &call(json!(sent)), &call(json!(expected)));
    }
    check_messages(
        on,
        &call(json!({"a": {"b": 1.5}})),
        &call(json!(r#"{"a":{"b":1.5}}"#)),
    );
    check_messages(on, &call(json!(null)), &call(json!(null)));
    let off = Options {
        arguments: false,
        ..on
    };
    check_messages(off, &call(json!("{ }")), &call(json!("{ }")));
}

/// The slow twin: the value, written out again.
#[test]
fn spelled_arguments_are_what_a_parser_writes() {
    let mut random = StdRng::seed_from_u64(4);
    for _ in 0..2_000 {
        let value = Value::Object(random_object(&mut random, 3));
        let mut sent = serde_json::to_string_pretty(&value).expect("JSON");
        if random.random_bool(0.5) {
            sent = sent.replace('ü', "\\u00FC").replace('/', "\\/");
        }
        let mut function = json!({"name": "f", "arguments": sent});
        arguments::normalise(&mut function);
        assert_eq!(function["arguments"], json!(value.to_string()));
    }
}

fn random_object(random: &mut StdRng, depth: u32) -> Map<String, Value> {
    let names = ["a", "zwei Worte", "ü", "\"q\\", "x/y", "\n"];
    (0..random.random_range(0..4))
        .map(|_| {
            let name = names[random.random_range(0..names.len())].to_owned();
            let value = match random.random_range(0..if depth == 0 { 4 } else { 6 }) {
                0 => json!(random.random::<i64>()),
                1 => json!(null),
                2 => json!(names[random.random_range(0..names.len())]),
                3 => json!(true),
                4 => json!([random_object(random, depth - 1)]),
                _ => Value::Object(random_object(random, depth - 1)),
            };
            (name, value)
        })
        .collect()
}

fn body_of(chat: &str) -> String {
    let mut turn = crate::chat(Fields::parse(chat.as_bytes()).expect("JSON")).expect("a turn");
    turn.normalise(Options::default());
    let params = NodeParams {
        model: "m",
        is_alias: false,
        cache_salt: "5a17",
        usage_always: false,
    };
    String::from_utf8(turn.node_body(&params)).expect("UTF-8")
}

#[test]
fn a_body_is_written_anew_only_where_it_changed() {
    let tool = r#"{"type":"function","function":{"name":"f"}}"#;
    let salted = r#","cache_salt":"5a17"}"#;
    let plain = format!(
        r#"{{"model":"m","messages":[ {{"role":"user","content":"h\u0069"}} ],"tools":[ {tool} ],"x":1.0}}"#
    );
    let body = body_of(&plain);
    assert_eq!(body, format!("{}{salted}", &plain[..plain.len() - 1]));

    let listed = plain.replace(r#""h\u0069""#, r#"[{"type":"text","text":"hi"}]"#);
    let body = body_of(&listed);
    assert!(
        body.contains(r#""messages":[{"role":"user","content":"hi"}]"#),
        "{body}"
    );
    assert!(
        body.contains(&format!(r#""tools":[ {tool} ],"x":1.0"#)),
        "{body}"
    );

    let marked = plain.replace(
        r#"{"name":"f"}"#,
        r#"{"name":"f"},"cache_control":{"type":"ephemeral"}"#,
    );
    let body = body_of(&marked);
    assert!(
        body.contains(r#""messages":[ {"role":"user","content":"h\u0069"} ]"#),
        "{body}"
    );
    assert!(body.contains(&format!(r#""tools":[{tool}]"#)), "{body}");
}

#[test]
fn texts_are_moved_and_never_copied() {
    let long = "x".repeat(40_000);
    let mut given = prompt(
        json!([
            {"role": "user", "content": [{"type": "text", "text": long, "cache_control": {}}]},
            {"role": "user", "content": long},
        ]),
        Some(json!([{"function": {"description": long, "name": "f"}, "type": "function"}])),
    );
    let at = |value: &Value| value.as_str().expect("a text").as_ptr();
    let tools = given.tools.as_ref().expect("tools");
    let before = [
        at(&given.messages[0]["content"][0]["text"]),
        at(&given.messages[1]["content"]),
        at(&tools[0]["function"]["description"]),
    ];
    let changed = normalise(&mut given, Options::default());
    assert!(changed.messages && changed.tools);
    let tools = given.tools.as_ref().expect("tools");
    let after = [
        at(&given.messages[0]["content"]),
        at(&given.messages[1]["content"]),
        at(&tools[0]["function"]["description"]),
    ];
    assert_eq!(before, after);
}
