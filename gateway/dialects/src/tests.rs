//! Catches a malformed request that reaches a node, a refusal that does not name its parameter,
//! and a node body in which a client's own salt or transfer reference survives.
use super::*;

fn refused(dialect: Dialect, body: &str) -> ApiError {
    match parse(dialect, body.as_bytes()) {
        Ok(_) => panic!("{body} was accepted"),
        Err(error) => error,
    }
}

fn check(dialect: Dialect, body: &str, param: &str) {
    let error = refused(dialect, body);
    assert_eq!(error.kind.status(), 400, "{body}");
    assert_eq!(error.param.as_deref(), Some(param), "{body}: {error}");
}

#[test]
fn every_refusal_names_its_parameter() {
    for (field, param) in [
        (r#""messages":[]"#, "messages"),
        (r#""messages":"hi""#, "messages"),
        (r#""messages":[1]"#, "messages[0]"),
        (r#""messages":[{"content":"x"}]"#, "messages[0].role"),
        (r#""messages":[{"role":7}]"#, "messages[0].role"),
        (
            r#""messages":[{"role":"user","content":"\ud800"}]"#,
            "messages",
        ),
        (r#""stream":"yes""#, "stream"),
        (
            r#""stream_options":{"include_usage":true}"#,
            "stream_options",
        ),
        (
            r#""stream":true,"stream_options":{"include_usage":1}"#,
            "stream_options.include_usage",
        ),
        (r#""max_tokens":0"#, "max_tokens"),
        (r#""max_tokens":1.5"#, "max_tokens"),
        (r#""max_completion_tokens":-1"#, "max_completion_tokens"),
        (r#""temperature":"hot""#, "temperature"),
        (r#""temperature":2.1"#, "temperature"),
        (r#""top_p":-0.1"#, "top_p"),
        (r#""n":0"#, "n"),
        (r#""stop":[1]"#, "stop"),
        (r#""tools":{}"#, "tools"),
        (r#""model":7"#, "model"),
    ] {
        let mut body = format!("{{{field}");
        for (name, valid) in [
            ("model", r#""m""#),
            ("messages", r#"[{"role":"user","content":"x"}]"#),
        ] {
            if !field.contains(&format!("\"{name}\":")) {
                body += &format!(",\"{name}\":{valid}");
            }
        }
        check(Dialect::Chat, &(body + "}"), param);
    }
    check(Dialect::Chat, "{}", "model");
    check(Dialect::Chat, r#"{"model":"m"}"#, "messages");
    check(Dialect::Completions, r#"{"model":"m"}"#, "prompt");
    check(
        Dialect::Completions,
        r#"{"model":"m","prompt":["a","b"]}"#,
        "prompt",
    );
    check(
        Dialect::Completions,
        r#"{"model":"m","prompt":[1,2]}"#,
        "prompt",
    );
    let deep = "[".repeat(5000) + &"]".repeat(5000);
    check(
        Dialect::Chat,
        &format!(r#"{{"model":"m","messages":{deep}}}"#),
        "messages",
    );
}

#[test]
fn one_prompt_has_two_spellings() {
    for spelling in [r#""say hi""#, r#"["say hi"]"#] {
        let body = format!(r#"{{"model":"m","prompt":{spelling}}}"#);
        let turn = parse(Dialect::Completions, body.as_bytes()).expect("valid");
        assert!(matches!(turn.prompt, PromptInput::Text(text) if text == "say hi"));
    }
}

#[test]
fn the_node_gets_our_salt_and_no_forged_references() {
    let body = r#"{"model":"m","messages":[{"role":"user","content":"x"}],"cache_salt":"theirs","kv_transfer_params":{"a":1},"bootstrap_room":7,"prompt_token_ids":[1],"stream":true,"metadata":{"k":1.0}}"#;
    let turn = parse(Dialect::Chat, body.as_bytes()).expect("valid");
    assert_eq!(turn.delivery, Delivery::Stream);
    let sent = String::from_utf8(turn.node_body(&PARAMS)).expect("UTF-8");
    assert_eq!(
        sent,
        r#"{"model":"m","messages":[{"role":"user","content":"x"}],"stream":true,"metadata":{"k":1.0},"cache_salt":"abc","stream_options":{"include_usage":true}}"#
    );
}

const PARAMS: crate::NodeParams<'_> = crate::NodeParams {
    model: "m",
    is_alias: false,
    cache_salt: "abc",
    usage_always: false,
};

pub(super) fn parse(dialect: Dialect, body: &[u8]) -> Result<Turn<'_>, ApiError> {
    let fields = Fields::parse(body)?;
    match dialect {
        Dialect::Completions => completions(fields),
        _ => chat(fields),
    }
}

#[test]
fn a_nodes_refusal_becomes_an_error_object() {
    for (body, message) in [
        (r#"{"error":{"message":"m","x":1}}"#, "m"),
        (
            r#"{"object":"error","message":"too long","code":400}"#,
            "too long",
        ),
        (r#"{"detail":"no"}"#, "no"),
        (r#"{"error":"plain"}"#, "plain"),
        (
            "<html>",
            "The node answered with status 400 and no explanation.",
        ),
        ("", "The node answered with status 400 and no explanation."),
    ] {
        for shape in [error::Shape::OpenAi, error::Shape::Anthropic] {
            let shaped = error::reshape(shape, 400, body.as_bytes());
            let value: serde_json::Value = serde_json::from_slice(&shaped).expect("JSON");
            assert_eq!(value["error"]["message"], message, "{body}");
            let typed = value["type"] == "error";
            assert_eq!(typed, shape == error::Shape::Anthropic);
        }
    }
}
