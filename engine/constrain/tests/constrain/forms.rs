//! What do answers of each kind look like, which tokens are forced, and is the mask right?

use constrain::{CallCount, Calls, Compiled, Reasoning, Spec, Tool};
use serde_json::json;
use std::sync::Arc;

use crate::vocabulary::{EOS, MARKERS, compiler, size, text};

fn compiled(spec: &Spec, reasoning: Option<&Reasoning>) -> Arc<Compiled> {
    compiler()
        .compile(spec, reasoning)
        .unwrap_or_else(|refused| panic!("{spec:?}: {refused}"))
}

/// Whether these tokens, one after the other, are each allowed and make a complete answer.
fn takes(compiled: &Arc<Compiled>, answer: &str) -> bool {
    let mut constraint = compiled.start();
    let mut left = answer;
    while !left.is_empty() {
        let marker = MARKERS.iter().position(|marker| left.starts_with(marker));
        let (token, length) = match marker {
            Some(at) => (u32::try_from(at).expect("small"), MARKERS[at].len()),
            None => (u32::from(left.as_bytes()[0]) + 5, 1),
        };
        // Forced text may want tokens longer than a byte: commit by bytes where the mask has any.
        if constraint.commit(token).is_err() {
            return false;
        }
        left = left.get(length..).unwrap_or_default();
    }
    constraint.is_complete()
}

fn check(spec: &Spec, taken: &[&str], refused: &[&str]) {
    let compiled = compiled(spec, None);
    for answer in taken {
        assert!(takes(&compiled, answer), "refuses {answer:?}: {spec:?}");
    }
    for answer in refused {
        assert!(!takes(&compiled, answer), "takes {answer:?}: {spec:?}");
    }
}

/// Would catch another spacing than `json.dumps` has, or an option of the schema that is lost.
#[test]
fn json_is_written_as_json_dumps_writes_it() {
    let schema = json!({
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "array", "items": {"type": "boolean"}}},
        "required": ["a"],
    });
    check(
        &Spec::JsonSchema(schema),
        &[
            r#"{"a": 1}"#,
            r#"{"a": -20, "b": [true, false]}"#,
            r#"{"a": 1, "b": [], "other": {"x": null}}"#,
        ],
        &[
            r#"{"a":1}"#,
            r#"{ "a": 1}"#,
            r#"{"a": 1,"b": []}"#,
            r#"{"b": []}"#,
            r#"{"a": 1.5}"#,
            r#"{"a": 99999999999999999999999}"#,
            "{\"a\": 1}\n",
        ],
    );
    check(
        &Spec::JsonSchema(json!({"type": "string", "format": "date"})),
        &[r#""2024-02-28""#],
        &[r#""2023-02-29""#, r#""2024-13-01""#],
    );
    check(
        &Spec::JsonSchema(json!({"type": "string", "format": "of my own"})),
        &[r#""anything""#],
        &[],
    );
    check(
        &Spec::JsonObject,
        &["{}", r#"{"a": [1, {"b": "c"}]}"#],
        &["[]", "1"],
    );
}

/// Would catch options for the grammar library that a client smuggles in.
#[test]
fn a_schema_cannot_set_the_library_s_options() {
    let schema = json!({"x-guidance": {"whitespace_flexible": true, "key_separator": "="},
        "type": "object", "properties": {"a": {"type": "null"}}, "required": ["a"],
        "additionalProperties": false});
    check(
        &Spec::JsonSchema(schema),
        &[r#"{"a": null}"#],
        &[r#"{"a"=null}"#, r#"{  "a": null}"#],
    );
}

fn tool(name: &str) -> Tool {
    Tool {
        name: name.into(),
        parameters: json!({"type": "object", "properties": {"x": {"type": "integer"}},
            "required": ["x"], "additionalProperties": false}),
    }
}

fn calls(most: CallCount) -> Calls {
    Calls {
        form: answer::CallForm::of(answer::ToolFormat::Hermes),
        tools: vec![tool("first"), tool("second")],
        most,
    }
}

/// Would catch a call that was not offered, too many of them, or text beside them.
#[test]
fn calls_are_those_that_were_offered() {
    let one = r#"<tool_call>
{"name": "first", "arguments": {"x": 1}}
</tool_call>"#;
    let two = r#"<tool_call>
{"name": "second", "arguments": {"x": 2}}
</tool_call>"#;
    let both = format!("{one}\n{two}");
    let third = one.replace("first", "third");
    let beside = format!("Sure. {one}");
    check(
        &Spec::Calls(calls(CallCount::One)),
        &[one, two],
        &[&both, &third, &beside, ""],
    );
    check(
        &Spec::Calls(calls(CallCount::AtLeastOne)),
        &[one, &both],
        &[&third, &format!("{both}\n"), ""],
    );
    let or = Spec::CallsOr(calls(CallCount::AtLeastOne), Box::new(Spec::JsonObject));
    check(&or, &[one, &both, "{}"], &[&third, "[]"]);
}

/// Would catch a forced text that is sampled, or forced text where there is a choice.
#[test]
fn what_leaves_no_choice_is_forced() {
    let mut constraint = compiled(&Spec::Calls(calls(CallCount::One)), None).start();
    let opening = constraint.forced(100).expect("it goes on");
    assert_eq!(text(&opening), "<tool_call>\n{\"name\": \"");
    assert_eq!(
        constraint.forced(100).expect("it goes on"),
        Vec::<u32>::new()
    );
    let mask = constraint.mask().expect("it goes on");
    let allowed: Vec<String> = (0..size())
        .filter(|token| mask.allows(*token))
        .map(|token| text(&[token]))
        .collect();
    assert!(allowed.contains(&"f".to_owned()), "{allowed:?}");
    assert!(allowed.contains(&"s".to_owned()), "{allowed:?}");
    assert!(allowed.contains(&"first".to_owned()), "{allowed:?}");
    assert!(
        !allowed.iter().any(|text| text.starts_with('t')),
        "{allowed:?}"
    );
    constraint.commit(u32::from(b'f') + 5).expect("it goes on");
    let rest = constraint.forced(3).expect("it goes on");
    assert_eq!(rest.len(), 3);
    let more = constraint.forced(100).expect("it goes on");
    let text = text(&[rest, more].concat());
    assert_eq!(text, "irst\", \"arguments\": {\"x\": ");
}

/// Would catch an end that is allowed too early, or anything that is allowed after it.
#[test]
fn the_end_is_allowed_when_the_answer_is_complete_and_only_then() {
    let spec = Spec::Regex("ab?".into());
    let mut constraint = compiled(&spec, None).start();
    assert!(!constraint.mask().expect("it goes on").allows(EOS));
    constraint.commit(u32::from(b'a') + 5).expect("it goes on");
    assert!(constraint.is_complete());
    assert!(!constraint.is_over());
    assert!(constraint.mask().expect("it goes on").allows(EOS));
    constraint.commit(u32::from(b'b') + 5).expect("it goes on");
    assert!(constraint.is_over());
    let mask = constraint.mask().expect("it goes on");
    let allowed: Vec<u32> = (0..size()).filter(|token| mask.allows(*token)).collect();
    assert_eq!(allowed, [EOS]);
}

/// Would catch control tokens that a grammar over text lets through.
#[test]
fn markers_are_no_text() {
    let mut constraint = compiled(&Spec::Regex("(?s:.*)".into()), None).start();
    let mask = constraint.mask().expect("it goes on");
    let markers: Vec<u32> = (0..5).filter(|token| mask.allows(*token)).collect();
    assert_eq!(markers, [EOS]);
}

/// Would catch a completion that comes too early or too late, or is not taken.
#[test]
fn the_completion_comes_when_it_needs_what_is_left() {
    let spec = Spec::JsonSchema(json!({"type": "array", "items": {"type": "integer"}}));
    let compiled = compiled(&spec, None);
    assert_eq!(compiled.shortest_tokens(), 1, "`[]` is a token");
    let mut constraint = compiled.start();
    constraint.commit(u32::from(b'[') + 5).expect("it goes on");
    constraint.commit(u32::from(b'7') + 5).expect("it goes on");
    assert_eq!(constraint.completion(3).expect("it goes on"), None);
    assert_eq!(constraint.completion(2).expect("it goes on"), None);
    let rest = constraint.completion(1).expect("it goes on");
    assert_eq!(rest.map(|rest| text(&rest)), Some("]".to_owned()));
    assert!(constraint.is_over());
}

/// Would catch two answers of one grammar that share more than its tables, and a grammar that is
/// compiled again.
#[test]
fn answers_of_a_kept_grammar_are_apart() {
    let compiler = compiler();
    let spec = Spec::Choice(vec!["ab".into(), "ac".into()]);
    let first = compiler.compile(&spec, None).expect("a grammar");
    let second = compiler.compile(&spec, None).expect("a grammar");
    assert!(Arc::ptr_eq(&first, &second));
    let (mut one, mut other) = (first.start(), second.start());
    one.commit(u32::from(b'a') + 5).expect("it goes on");
    one.commit(u32::from(b'b') + 5).expect("it goes on");
    assert!(one.is_over());
    assert!(!other.is_complete());
    other.commit(u32::from(b'a') + 5).expect("it goes on");
    assert!(other.commit(u32::from(b'x') + 5).is_err());
}
