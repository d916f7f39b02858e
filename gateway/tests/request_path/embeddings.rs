//! Catches vectors that are changed on their way, tokens billed at a cache's discount or twice, a
//! request that does not go to another node when one fails, and a conversation that moves to
//! another node because its agent asked for vectors.

use serde_json::{Value, json};

use crate::support::node::{Act, MODEL, Node, json as answer_of};
use crate::support::{Gateway, Stream, chat};

const PATH: &str = "/v1/embeddings";

fn vectors(usage: Value) -> String {
    json!({
        "object": "list", "model": MODEL, "usage": usage,
        "data": [{"object": "embedding", "index": 0, "embedding": [0.25, -1.50e-3]}],
    })
    .to_string()
}

fn ask(model: &str) -> Vec<u8> {
    let body =
        json!({"model": model, "input": ["Hello.", "Bye."], "x": 1.5, "cache_salt": "theirs"});
    body.to_string().into_bytes()
}

#[test]
fn vectors_are_relayed_and_billed_by_the_nodes_count() {
    let node = Node::start();
    for exact in [false, true] {
        let gateway = if exact {
            Gateway::exact(&[&node])
        } else {
            Gateway::start(&[&node])
        };
        let said = vectors(json!({"prompt_tokens": 7, "total_tokens": 7}));
        node.script(vec![Act::Send(answer_of(200, &[], &said))]);
        let answer = gateway.post(PATH, &[], &ask(MODEL));
        assert_eq!((answer.status, answer.text()), (200, said));
        assert_eq!(answer.header("x-homing-cached-tokens"), Some("0"));
        assert_eq!(answer.header("x-homing-expected-cached"), Some("0"));
        assert_eq!(answer.header("x-homing-cost-nano-usd"), Some("7"));
        let sent = node.received().pop().unwrap();
        assert!(
            sent.head.starts_with("POST /v1/embeddings "),
            "{}",
            sent.head
        );
        assert_eq!(
            (&sent.body["input"][1], &sent.body["x"]),
            (&"Bye.".into(), &1.5.into())
        );
        assert_ne!(sent.body["cache_salt"], "theirs");
        let row = gateway.row(answer.header("x-request-id").unwrap());
        for (name, expected) in [
            ("input_tokens", 7),
            ("cached_tokens", 0),
            ("output_tokens", 0),
            ("cost_nano_usd", 7),
        ] {
            assert_eq!(row[name], expected, "{name}: {row}");
        }
        assert_eq!(row["status"], "complete");
        gateway.assert_idle();
    }
}

#[test]
fn another_node_takes_over_and_the_name_is_the_clients() {
    let nodes = [Node::start(), Node::start()];
    let models = format!(
        "[[models]]\nid = \"{MODEL}\"\n[[aliases]]\nname = \"text-embedding-*\"\nmodel = \"{MODEL}\"\n"
    );
    let gateway = Gateway::with_models(&[&nodes[0], &nodes[1]], &models);
    let said = vectors(json!({"prompt_tokens": 9, "total_tokens": 9}));
    let good = vec![Act::Send(answer_of(200, &[], &said))];
    nodes.iter().for_each(|node| node.script(good.clone()));
    let first = gateway.post(PATH, &[], &ask("text-embedding-3"));
    // The same texts go to the same idle node again: it fails, the other one has its answer left.
    let chosen = first.header("x-homing-node").unwrap();
    let full = answer_of(503, &[], r#"{"error":{"message":"full"}}"#);
    nodes[usize::from(chosen == "node-1")].script(vec![Act::Send(full)]);
    let answer = gateway.post(PATH, &[], &ask("text-embedding-3"));
    assert_eq!(answer.status, 200, "{answer:?}");
    assert_ne!(answer.header("x-homing-node"), Some(chosen));
    assert_eq!(answer.json()["model"], "text-embedding-3");
    let row = gateway.row(answer.header("x-request-id").unwrap());
    assert_eq!(
        (&row["model"], &row["model_asked"], &row["input_tokens"]),
        (&MODEL.into(), &"text-embedding-3".into(), &9.into())
    );
    assert_eq!(gateway.rows().len(), 2);
    assert_eq!(
        nodes
            .iter()
            .map(|node| node.received().len())
            .sum::<usize>(),
        3
    );
    gateway.assert_idle();
}

#[test]
fn a_conversation_stays_where_it_is() {
    let nodes = [Node::start(), Node::start()];
    let gateway = Gateway::exact(&[&nodes[0], &nodes[1]]);
    let session = "x-session-affinity: agent-1";
    let turn = chat(Stream::No, &"A prompt of some length. ".repeat(40)).to_string();
    let node_of = |answer: crate::support::client::Answer| -> String {
        assert_eq!(answer.status, 200, "{answer:?}");
        answer.header("x-homing-node").unwrap().to_owned()
    };
    let say = || node_of(gateway.post("/v1/chat/completions", &[session], turn.as_bytes()));
    let home = say();
    let said = vectors(json!({"prompt_tokens": 7, "total_tokens": 7}));
    for round in 0..8 {
        for node in &nodes {
            node.script(vec![Act::Send(answer_of(200, &[], &said))]);
        }
        // Vectors that are asked for one after another, alone and within the session.
        let headers = if round % 2 == 0 { &[session][..] } else { &[] };
        let answer = gateway.post(PATH, headers, &ask(MODEL));
        assert_eq!(answer.status, 200);
        nodes.iter().for_each(Node::unscript);
        assert_eq!(say(), home);
    }
    gateway.assert_idle();
}

#[test]
fn malformed_requests_reach_no_node() {
    let node = Node::start();
    let gateway = Gateway::start(&[&node]);
    for (body, param) in [
        (json!({"model": MODEL}), "input"),
        (json!({"model": MODEL, "input": []}), "input"),
        (json!({"model": MODEL, "input": [[1, 2]]}), "input[0]"),
        (json!({"model": "nope", "input": "x"}), "model"),
    ] {
        // A client of Anthropic's reads OpenAI's errors here all the same.
        let headers = ["anthropic-version: 2023-06-01"];
        let answer = gateway.post(PATH, &headers, body.to_string().as_bytes());
        assert!(matches!(answer.status, 400 | 404), "{answer:?}");
        assert_eq!(answer.json()["error"]["param"], param);
    }
    let refusal = r#"{"error":{"message":"no pooling","type":"invalid_request_error","param":null,"code":"x"}}"#;
    node.script(vec![Act::Send(answer_of(400, &[], refusal))]);
    let answer = gateway.post(PATH, &[], &ask(MODEL));
    assert_eq!((answer.status, answer.text()), (400, refusal.to_owned()));
    let rows = gateway.rows();
    assert_eq!(rows.len(), 1);
    assert_eq!(
        (&rows[0]["status"], &rows[0]["cost_nano_usd"]),
        (&"failed".into(), &0.into())
    );
    gateway.assert_idle();
}
