//! Catches a malformed request that reaches a node, a refusal that does not name its parameter,
//! and a node body in which a client's own salt or transfer reference survives.
use super::*;

fn refused(dialect: Dialect, body: &str) -> ApiError {
    match dialect.parse(body.as_bytes()) {
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
        let turn = Dialect::Completions.parse(body.as_bytes()).expect("valid");
        assert!(matches!(turn.prompt, PromptInput::Text(text) if text == "say hi"));
    }
}

#[test]
fn the_node_gets_our_salt_and_no_forged_references() {
    let body = r#"{"model":"m","messages":[{"role":"user","content":"x"}],"cache_salt":"theirs","kv_transfer_params":{"a":1},"bootstrap_room":7,"prompt_token_ids":[1],"stream":true,"metadata":{"k":1.0}}"#;
    let turn = Dialect::Chat.parse(body.as_bytes()).expect("valid");
    assert_eq!(turn.delivery, Delivery::Stream);
    let sent = String::from_utf8(turn.node_body("abc")).expect("UTF-8");
    assert_eq!(
        sent,
        r#"{"model":"m","messages":[{"role":"user","content":"x"}],"stream":true,"metadata":{"k":1.0},"cache_salt":"abc","stream_options":{"include_usage":true}}"#
    );
}

#[test]
fn paths_and_methods() {
    for (method, path, expected) in [
        (Method::GET, "/health", Ok(Endpoint::Health)),
        (Method::GET, "/v1/models", Ok(Endpoint::Models)),
        (Method::GET, "/v1/models/a/b", Ok(Endpoint::Model("a/b"))),
        (
            Method::POST,
            "/v1/chat/completions",
            Ok(Endpoint::Turn(Dialect::Chat)),
        ),
        (
            Method::POST,
            "/v1/completions/",
            Ok(Endpoint::Turn(Dialect::Completions)),
        ),
        (Method::GET, "/v1/chat/completions", Err(405)),
        (Method::POST, "/v1/models", Err(405)),
        (Method::POST, "/v2", Err(404)),
        (Method::GET, "/", Err(404)),
    ] {
        let found = endpoint(&method, path).map_err(|error| error.kind.status());
        assert_eq!(found, expected, "{method} {path}");
    }
}
