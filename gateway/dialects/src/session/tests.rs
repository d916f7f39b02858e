//! Catches a session read from the wrong signal, a weaker signal taken where a stronger one is
//! spoilt, and an operator's choice that does nothing.

use http::{HeaderMap, HeaderName, HeaderValue};
use serde_json::{Value, json};

use super::*;

fn headers(pairs: &[(&str, &str)]) -> HeaderMap {
    let mut map = HeaderMap::new();
    for (name, value) in pairs {
        map.append(
            HeaderName::from_bytes(name.as_bytes()).expect("a name"),
            HeaderValue::from_bytes(value.as_bytes()).expect("a value"),
        );
    }
    map
}

/// In words: `source id [< parent]`, `chain …`, `unusable source`, `nothing`.
fn said(table: &Table, dialect: Dialect, pairs: &[(&str, &str)], body: &Value) -> String {
    let body = body.to_string();
    let fields = Fields::parse(body.as_bytes()).expect("an object");
    match table.find(dialect, &headers(pairs), &fields) {
        Found::Session(Signal { id, source, parent }) => match parent {
            Some(parent) => format!("{source} {id} < {parent}"),
            None => format!("{source} {id}"),
        },
        Found::Chain(Continues::Response(id)) => format!("chain response {id}"),
        Found::Chain(Continues::Conversation(id)) => format!("chain conversation {id}"),
        Found::Unusable(source) => format!("unusable {source}"),
        Found::Nothing => "nothing".to_owned(),
    }
}

/// One table: headers, and what they say beside an empty body.
fn check_headers(pairs: &[(&str, &str)], expected: &str) {
    let said = said(&Table::default(), Dialect::Chat, pairs, &json!({}));
    assert_eq!(said, expected, "{pairs:?}");
}

const UUID: &str = "00000000-0000-4000-8000-000000000001";

#[test]
fn each_client_is_known_by_its_header() {
    let turn = json!({"session_id": UUID, "thread_id": "t"}).to_string();
    let window = format!("{UUID}:3");
    let long = "x".repeat(255);
    check_headers(&[], "nothing");
    check_headers(
        &[("session-id", "b"), ("x-session-affinity", "a")],
        "x-session-affinity a",
    );
    check_headers(
        &[("x-session-affinity", &long)],
        &format!("x-session-affinity {long}"),
    );
    check_headers(&[("session-id", "s"), ("thread-id", "s")], "session-id s");
    for name in [
        "x-claude-code-session-id",
        "session_id",
        "thread-id",
        "x-session-id",
        "x-opencode-session",
        "x-amp-thread-id",
        "x-grok-conv-id",
        "conversation_id",
    ] {
        check_headers(&[(name, "s")], &format!("{name} s"));
        check_headers(&[(&name.to_uppercase(), "s")], &format!("{name} s"));
    }
    for name in [
        "x-dynamo-session-id",
        "x-litellm-session-id",
        "x-bf-session-id",
        "x-openrouter-session-id",
    ] {
        check_headers(&[(name, "s")], "x-<name>-session-id s");
    }
    check_headers(
        &[
            ("x-b-session-id", "2"),
            ("x-a-session-id", "1"),
            ("x-parent-session-id", "0"),
        ],
        "x-<name>-session-id 1",
    );
    check_headers(
        &[("x-codex-turn-metadata", &turn)],
        &format!("x-codex-turn-metadata {UUID}"),
    );
    check_headers(
        &[("x-codex-window-id", &window)],
        &format!("x-codex-window-id {UUID}"),
    );
    // A request's id is its own.
    check_headers(&[("x-client-request-id", "r")], "nothing");
}

#[test]
fn each_client_is_known_by_its_field() {
    let table = Table::default();
    let old = format!("user_0a1b_account_{UUID}_session_{UUID}");
    let new = json!({"device_id": "d", "session_id": UUID}).to_string();
    for (body, expected) in [
        (
            json!({"session_id": "s", "prompt_cache_key": "k"}),
            "body.session_id s".to_owned(),
        ),
        (
            json!({"conversation_id": "s"}),
            "body.conversation_id s".into(),
        ),
        (json!({"conversation": "s"}), "body.conversation s".into()),
        (
            json!({"metadata": {"user_id": old}}),
            format!("body.metadata.user_id {UUID}"),
        ),
        (
            json!({"metadata": {"user_id": new}}),
            format!("body.metadata.user_id {UUID}"),
        ),
        (
            json!({"metadata": {"session_id": "s"}}),
            "body.metadata.session_id s".into(),
        ),
        (
            json!({"client_metadata": {"session_id": "s"}}),
            "body.client_metadata.session_id s".into(),
        ),
        (
            json!({"prompt_cache_key": "k"}),
            "body.prompt_cache_key k".into(),
        ),
        // A user may have many sessions.
        (json!({"user": "u"}), "nothing".into()),
        (json!({"metadata": {"user_id": "alice"}}), "nothing".into()),
        (json!({"metadata": {"user_id": "{}"}}), "nothing".into()),
        (
            json!({"metadata": "alice", "client_metadata": 1}),
            "nothing".into(),
        ),
    ] {
        assert_eq!(said(&table, Dialect::Chat, &[], &body), expected, "{body}");
    }
}

#[test]
fn chains_belong_to_the_responses_dialect() {
    let table = Table::default();
    let chat = |body| said(&table, Dialect::Chat, &[], &body);
    let responses = |body| said(&table, Dialect::Responses, &[], &body);
    let both = json!({"previous_response_id": "resp_1", "prompt_cache_key": "k"});
    assert_eq!(responses(both), "chain response resp_1");
    assert_eq!(
        responses(json!({"conversation": "conv_1"})),
        "chain conversation conv_1"
    );
    let object = json!({"conversation": {"id": "conv_1"}});
    assert_eq!(responses(object.clone()), "chain conversation conv_1");
    assert_eq!(chat(object), "body.conversation conv_1");
    assert_eq!(
        responses(json!({"previous_response_id": null, "prompt_cache_key": "k"})),
        "body.prompt_cache_key k"
    );
    let header = [("session-id", "s")];
    let chain = json!({"previous_response_id": "resp_1"});
    assert_eq!(
        said(&table, Dialect::Responses, &header, &chain),
        "session-id s"
    );
}

#[test]
fn sub_agents_have_sessions_of_their_own() {
    let table = Table::default();
    let claude = "x-claude-code-session-id";
    for (pairs, expected) in [
        (
            &[(claude, "s"), ("x-claude-code-agent-id", "a")][..],
            "x-claude-code-session-id s/a < s",
        ),
        (
            &[
                (claude, "s"),
                ("x-claude-code-agent-id", "b"),
                ("x-claude-code-parent-agent-id", "a"),
            ],
            "x-claude-code-session-id s/b < s/a",
        ),
        (
            &[(claude, "s"), ("x-claude-code-parent-agent-id", "a")],
            "x-claude-code-session-id s",
        ),
        (
            &[("session-id", "s"), ("thread-id", "t")],
            "session-id s/t < s",
        ),
        (
            &[("x-session-affinity", "c"), ("x-parent-session-id", "p")],
            "x-session-affinity c < p",
        ),
        (
            &[("x-session-id", "c"), ("x-parent-session-id", "p")],
            "x-session-id c < p",
        ),
        (&[("x-parent-session-id", "p")], "nothing"),
    ] {
        assert_eq!(
            said(&table, Dialect::Messages, pairs, &json!({})),
            expected,
            "{pairs:?}"
        );
    }
}

#[test]
fn what_cannot_be_used_gives_no_session() {
    let table = Table::default();
    let long = "x".repeat(256);
    // The weaker signal is there in every row, and is not taken.
    let weaker = json!({"prompt_cache_key": "k"});
    for bad in [&*long, "two words", "tab\there", "ünïcode"] {
        for name in ["x-session-affinity", "session-id", "x-foo-session-id"] {
            let name_of_row = if name == "x-foo-session-id" {
                "x-<name>-session-id"
            } else {
                name
            };
            assert_eq!(
                said(&table, Dialect::Chat, &[(name, bad)], &weaker),
                format!("unusable {name_of_row}"),
                "{bad}"
            );
        }
        let body = json!({"session_id": bad, "prompt_cache_key": "k"});
        assert_eq!(
            said(&table, Dialect::Chat, &[], &body),
            "unusable body.session_id"
        );
    }
    for bad in [json!(5), json!(["s"]), json!({"id": 7})] {
        let body = json!({"conversation": bad, "prompt_cache_key": "k"});
        assert_eq!(
            said(&table, Dialect::Responses, &[], &body),
            "unusable body.conversation"
        );
    }
    let two = [("session-id", "a"), ("session-id", "b")];
    assert_eq!(
        said(&table, Dialect::Chat, &two, &weaker),
        "unusable session-id"
    );
    let same = [("session-id", "a"), ("session-id", "a")];
    assert_eq!(said(&table, Dialect::Chat, &same, &weaker), "session-id a");
    let agent = [
        ("x-claude-code-session-id", "s"),
        ("x-claude-code-agent-id", &*long),
    ];
    assert_eq!(
        said(&table, Dialect::Chat, &agent, &weaker),
        "unusable x-claude-code-session-id"
    );
    // Nothing said is not something unusable.
    let empty = [("x-session-affinity", ""), ("x-codex-turn-metadata", "{")];
    assert_eq!(
        said(&table, Dialect::Chat, &empty, &weaker),
        "body.prompt_cache_key k"
    );
}

#[test]
fn operators_choose() {
    let of = |headers: &[&str], enable: &[&str], disable: &[&str]| {
        let owned = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
        Table::new(&Choices {
            headers: owned(headers),
            enable: owned(enable),
            disable: owned(disable),
        })
    };
    let table = of(
        &["X-Ticket"],
        &["body.user"],
        &["x-litellm-session-id", "body.prompt_cache_key"],
    )
    .expect("a table");
    let chat = |pairs: &[(&str, &str)], body| said(&table, Dialect::Chat, pairs, &body);
    let ticket = [("x-ticket", "t"), ("session-id", "s")];
    assert_eq!(chat(&ticket, json!({})), "x-ticket t");
    let both = [("x-ticket", "t"), ("x-session-affinity", "a")];
    assert_eq!(chat(&both, json!({})), "x-session-affinity a");
    assert_eq!(
        chat(
            &[("x-litellm-session-id", "s")],
            json!({"prompt_cache_key": "k"})
        ),
        "nothing"
    );
    assert_eq!(
        chat(&[("x-bf-session-id", "s")], json!({})),
        "x-<name>-session-id s"
    );
    assert_eq!(chat(&[], json!({"user": "u"})), "body.user u");

    let first = of(&["x-ticket"], &[], &["x-session-affinity"]).expect("a table");
    assert_eq!(first.names().next(), Some("x-ticket"));
    for (result, named) in [
        (of(&["no header"], &[], &[]), "no header"),
        (of(&[], &["nonsense"], &[]), "nonsense"),
        (of(&[], &[], &["x-nonsense"]), "x-nonsense"),
    ] {
        let text = result.expect_err("a refusal").to_string();
        assert!(text.contains(named), "{text}");
    }
    let default: Vec<String> = Table::default().names().map(str::to_owned).collect();
    let chosen: Vec<String> = of(&[], &[], &[])
        .expect("a table")
        .names()
        .map(str::to_owned)
        .collect();
    assert_eq!(default, chosen);
}

#[test]
fn the_documentation_has_the_same_table() {
    let page = include_str!("../../../../docs/sessions.md");
    let documented: Vec<&str> = page
        .lines()
        .skip_while(|line| !line.starts_with("| signal |"))
        .take_while(|line| line.starts_with('|'))
        .filter_map(|line| line.strip_prefix("| `")?.split('`').next())
        .collect();
    let rows: Vec<&str> = ROWS.iter().map(|row| row.name).collect();
    assert_eq!(documented, rows);
}
