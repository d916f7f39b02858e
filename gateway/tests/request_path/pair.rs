//! Turns that two nodes share: catches a field that a connector's nodes would not understand, usage
//! that counts handed-over tokens as cached, a failure of one node that the client sees or that
//! leaves the other one working, load that is not given back, and a second record.

// tidy: long because each connector is tried beside the others, with the same faults

use std::time::Duration;

use serde_json::{Value, json};

use crate::support::client::Answer;
use crate::support::duty::{CACHED, Kind, PROMPT, Role};
use crate::support::node::{Act, MODEL, Node, Received, chunk, delta, json, stream_head};
use crate::support::{Gateway, Stream, chat, eventually};

/// Long enough to be shared: about 2000 tokens.
fn long() -> String {
    "word ".repeat(1600)
}

/// A gateway before these nodes. Moving KV costs nothing, and no part waits for long.
fn gateway(nodes: &[&Node]) -> Gateway {
    Gateway::with_models(
        nodes,
        &format!(
            "[[models]]\nid = \"{MODEL}\"\n[disaggregation]\nkv_bytes_per_token = 1\n\
             prefill_timeout_s = 1.0\ntransfer_timeout_s = 0.5\n"
        ),
    )
}

fn sharing() -> ([Node; 2], Gateway) {
    let nodes = Node::sharing(Kind::Homing, [Role::Prefill, Role::Decode]);
    let gateway = gateway(&[&nodes[0], &nodes[1]]);
    (nodes, gateway)
}

/// Nothing is in flight, at any node.
fn assert_given_back(gateway: &Gateway) {
    gateway.assert_idle();
    for name in ["requests", "prefill_tokens", "decode_tokens"] {
        let metric = format!("homing_node_{name}_in_flight");
        eventually(&metric, || gateway.metric(&metric) == 0.0);
    }
    assert_eq!(gateway.metric("homing_index_expected_requests"), 0.0);
}

fn last(node: &Node) -> Received {
    node.received().pop().expect("a request")
}

/// The one record of an answer.
fn record(gateway: &Gateway, answer: &Answer) -> Value {
    gateway.row(answer.header("x-request-id").unwrap())
}

#[test]
fn every_connector_shares_a_turn_in_every_delivery() {
    for kind in Kind::ALL {
        let [prefill, decode] = Node::sharing(kind, [Role::Prefill, Role::Decode]);
        let gateway = gateway(&[&prefill, &decode]);
        for stream in [Stream::No, Stream::Yes, Stream::WithUsage] {
            let mut body = chat(stream, &long());
            // A client's own references must not get through.
            for name in ["kv_transfer_params", "bootstrap_host", "bootstrap_room"] {
                body[name] = json!({"do_remote_prefill": true, "transfer_id": "forged"});
            }
            (body["max_completion_tokens"], body["unknown"]) = (20.into(), 1.5.into());
            let forged = "x-override-bootstrap-host: evil";
            let text = body.to_string();
            let answer = gateway.post("/v1/chat/completions", &[forged], text.as_bytes());
            let what = format!("{kind:?}, {stream:?}: {answer:?}");
            assert_eq!(answer.status, 200, "{what}");
            assert_eq!(answer.header("x-homing-node"), Some("node-1"), "{what}");
            assert_eq!(
                answer.header("x-homing-prefill-node"),
                Some("node-0"),
                "{what}"
            );
            let (usage, content) = match stream {
                Stream::No => {
                    let body = answer.json();
                    let content = body["choices"][0]["message"]["content"].as_str().unwrap();
                    (body["usage"].clone(), content.to_owned())
                }
                _ => {
                    let chunks = answer.chunks();
                    let usage = chunks.last().map(|chunk| chunk["usage"].clone());
                    (usage.unwrap_or_default(), answer.content())
                }
            };
            assert_eq!(content, "ok", "{what}");
            if stream != Stream::Yes {
                assert_eq!(
                    usage["prompt_tokens_details"]["cached_tokens"], CACHED,
                    "{what}"
                );
                assert_eq!(usage["completion_tokens"], 20, "{what}");
            }
            let row = record(&gateway, &answer);
            for (field, expected) in [
                ("status", json!("complete")),
                ("node", json!("node-1")),
                ("input_tokens", PROMPT.into()),
                ("cached_tokens", CACHED.into()),
                ("output_tokens", 20.into()),
            ] {
                assert_eq!(row[field], expected, "{what}");
            }
            for node in [&prefill, &decode] {
                let got = last(node);
                assert_eq!(got.header("x-request-id"), answer.header("x-request-id"));
                assert!(
                    !got.head.contains("bootstrap") && !got.body.to_string().contains("forged")
                );
                assert_eq!(got.body["unknown"], 1.5);
                assert_eq!(got.body["cache_salt"], last(&prefill).body["cache_salt"]);
            }
            assert_given_back(&gateway);
        }
        assert_eq!((prefill.received().len(), decode.received().len()), (3, 3));
        assert_eq!(gateway.rows().len(), 3);
    }
}

#[test]
fn the_usage_is_the_same_in_every_dialect() {
    let (nodes, gateway) = sharing();
    let text = long();
    for stream in [false, true] {
        let body = json!({"model": MODEL, "stream": stream, "max_tokens": 50,
            "messages": [{"role": "user", "content": text}]});
        let answer = gateway.post("/v1/messages", &[], body.to_string().as_bytes());
        assert_eq!(answer.status, 200, "{answer:?}");
        let usages: Vec<Value> = if stream {
            let chunks = answer.chunks_of_lines();
            let usages = chunks
                .iter()
                .flat_map(|event| [event["usage"].clone(), event["message"]["usage"].clone()]);
            usages.filter(Value::is_object).collect()
        } else {
            vec![answer.json()["usage"].clone()]
        };
        assert!(!usages.is_empty(), "{answer:?}");
        for usage in usages {
            assert_eq!(usage["cache_read_input_tokens"], CACHED, "{answer:?}");
        }
        assert_eq!(record(&gateway, &answer)["cached_tokens"], CACHED);

        let body = json!({"model": MODEL, "stream": stream, "store": false, "input": text});
        let answer = gateway.post("/v1/responses", &[], body.to_string().as_bytes());
        assert_eq!(answer.status, 200, "{answer:?}");
        let response = if stream {
            let chunks = answer.chunks_of_lines();
            chunks.last().expect("an event")["response"].clone()
        } else {
            answer.json()
        };
        let details = &response["usage"]["input_tokens_details"];
        assert_eq!(details["cached_tokens"], CACHED, "{answer:?}");
        assert_eq!(record(&gateway, &answer)["cached_tokens"], CACHED);
    }
    assert_eq!(nodes[0].received().len(), 4);
    assert_given_back(&gateway);
}

#[test]
fn what_is_not_worth_two_nodes_stays_on_one() {
    let (nodes, gateway) = sharing();
    let mut two = chat(Stream::No, &long());
    two["n"] = 2.into();
    for body in [chat(Stream::No, "hi"), two] {
        let answer = gateway.chat(&body);
        assert_eq!(answer.status, 200, "{answer:?}");
        assert_eq!(answer.header("x-homing-prefill-node"), None);
        assert_eq!(last(&nodes[1]).body.get("kv_transfer_params"), None);
        assert_eq!(record(&gateway, &answer)["cached_tokens"], 64);
    }
    assert!(nodes[0].received().is_empty());
}

/// Both halves of a decision are in its explanation, with their terms.
#[test]
fn both_legs_are_explained() {
    let (_nodes, gateway) = sharing();
    let answer = gateway.chat(&chat(Stream::No, &long()));
    let id = answer.header("x-request-id").unwrap();
    let mut text = None;
    eventually("the decision is in the log", || {
        text = gateway.explain(id, &[]);
        text.is_some()
    });
    let text = text.unwrap();
    for part in [
        "node-0 computes, node-1 answers",
        "to compute the prompt:",
        "*node-0",
        "to answer from it:",
        "*node-1",
        "transfer_ms",
        "stall_ms",
        "tokens to move",
    ] {
        assert!(text.contains(part), "no {part} in {text}");
    }
    let told: Value = serde_json::from_str(&gateway.explain(id, &["--json"]).unwrap()).unwrap();
    let legs = &told[0]["attempts"][0]["legs"];
    for (side, node) in [("prefill", "node-0"), ("decode", "node-1")] {
        assert_eq!(legs["chosen"][side], node);
        let leg = &legs[side][0];
        let terms = leg["terms"].as_object().unwrap().values();
        let sum: f64 = terms.filter_map(Value::as_f64).sum();
        assert!(
            (sum - leg["cost_ms"].as_f64().unwrap()).abs() < 0.01,
            "{leg}"
        );
    }
}

/// What happens, to which node, how it behaves, and who answers then.
type Failure = (&'static str, Role, Vec<Act>, Option<&'static str>);

fn failures() -> Vec<Failure> {
    let silent = || vec![Act::AwaitClose(Duration::from_secs(20))];
    let error = "data: {\"error\":{\"message\":\"the KV did not come\"}}\n\n";
    vec![
        (
            "the first dies before it answers",
            Role::Prefill,
            vec![Act::Close],
            Some("node-1"),
        ),
        (
            "the first fails",
            Role::Prefill,
            vec![Act::Send(json(500, &[], "{}"))],
            Some("node-1"),
        ),
        (
            "the first is overloaded",
            Role::Prefill,
            vec![Act::Send(json(429, &[], "{}"))],
            Some("node-1"),
        ),
        (
            "the first answers nonsense",
            Role::Prefill,
            vec![Act::Send(json(200, &[], "[1"))],
            Some("node-1"),
        ),
        ("the first stalls", Role::Prefill, silent(), Some("node-1")),
        // It has answered, and is gone before the other had all of it.
        (
            "the second misses the KV",
            Role::Decode,
            vec![Act::Meet, Act::Send(json(502, &[], "{}"))],
            Some("node-1"),
        ),
        (
            "the second says so in its stream",
            Role::Decode,
            vec![
                Act::Meet,
                Act::Send(stream_head()),
                Act::Send(chunk(error.as_bytes())),
                Act::Close,
            ],
            Some("node-1"),
        ),
        (
            "the second waits for ever",
            Role::Decode,
            silent(),
            Some("node-1"),
        ),
        // Nobody else is left to answer.
        (
            "the second dies",
            Role::Decode,
            vec![Act::Meet, Act::Close],
            Some("node-0"),
        ),
    ]
}

/// What a scripted failure of one node must come to: the answer of the node that can do without it.
#[test]
fn a_failure_before_the_first_byte_is_made_good_elsewhere() {
    for (what, side, script, expected) in failures() {
        let (nodes, gateway) = sharing();
        let [prefill, decode] = &nodes;
        let (scripted, other) = match side {
            Role::Prefill => (prefill, decode),
            Role::Decode => (decode, prefill),
        };
        let stalls = matches!(script[..], [Act::AwaitClose(_)]);
        scripted.script(script);
        let answer = gateway.chat(&chat(Stream::WithUsage, &long()));
        assert_eq!(
            (answer.status, answer.content().as_str()),
            (200, "ok"),
            "{what}: {answer:?}"
        );
        assert_eq!(answer.header("x-homing-node"), expected, "{what}");
        assert_eq!(answer.header("x-homing-prefill-node"), None, "{what}");
        assert_eq!(answer.header("x-homing-route"), Some("retry"), "{what}");
        let row = record(&gateway, &answer);
        assert_eq!(
            (&row["status"], &row["node"]),
            (&json!("complete"), &json!(expected)),
            "{what}"
        );
        // Its own, since it did all of it.
        assert_eq!(row["cached_tokens"], 64, "{what}");
        assert_eq!(gateway.rows().len(), 1, "{what}");
        assert_eq!(gateway.metric("homing_retries_total"), 1.0, "{what}");
        if stalls {
            eventually(what, || !scripted.hang_ups().is_empty());
        }
        let whole = if expected == Some("node-0") {
            prefill
        } else {
            decode
        };
        assert_eq!(last(whole).body.get("kv_transfer_params"), None, "{what}");
        assert!(!other.received().is_empty(), "{what}");
        assert_given_back(&gateway);
    }
}

#[test]
fn another_node_of_the_same_role_takes_over() {
    let roles = [Role::Prefill, Role::Prefill, Role::Decode, Role::Decode];
    let nodes = Node::sharing(Kind::Homing, roles);
    let gateway = gateway(&nodes.each_ref());
    let chosen = |answer: &Answer| {
        let name = |header| answer.header(header).unwrap_or_default().to_owned();
        (name("x-homing-prefill-node"), name("x-homing-node"))
    };
    let session = ["x-session-affinity: s"];
    let body = chat(Stream::No, &long()).to_string();
    let ask = || gateway.post("/v1/chat/completions", &session, body.as_bytes());
    let at = |name: &str| {
        &nodes[name
            .strip_prefix("node-")
            .unwrap()
            .parse::<usize>()
            .unwrap()]
    };
    let (prefill, decode) = chosen(&ask());
    // Twice: a pooled connection that breaks is taken for a stale one, and the node asked again.
    for _ in 0..2 {
        at(&prefill).script(vec![Act::Close]);
    }
    let first = chosen(&ask());
    assert!(first.0 != prefill && first.1 == decode, "{first:?}");
    for _ in 0..2 {
        at(&decode).script(vec![Act::Close]);
    }
    at(&prefill).unscript();
    let answer = ask();
    let second = chosen(&answer);
    assert!(
        second.1 != decode && second.0.starts_with("node-"),
        "{second:?}"
    );
    assert_eq!(record(&gateway, &answer)["cached_tokens"], CACHED);
    assert_given_back(&gateway);
}

#[test]
fn an_answer_that_breaks_off_is_billed_as_far_as_it_came() {
    let (nodes, gateway) = sharing();
    let mut script = vec![Act::Meet, Act::Send(stream_head())];
    for _ in 0..5 {
        script.push(Act::Send(chunk(
            format!("data: {}\n\n", delta("x")).as_bytes(),
        )));
    }
    script.push(Act::Close);
    nodes[1].script(script);
    let answer = gateway.chat(&chat(Stream::WithUsage, &long()));
    assert_eq!((answer.status, answer.content().as_str()), (200, "xxxxx"));
    assert_eq!(
        answer.chunks().pop().unwrap()["error"]["code"],
        "node_failed"
    );
    let row = record(&gateway, &answer);
    assert_eq!(row["status"], "cut");
    assert_eq!(
        (&row["cached_tokens"], &row["output_tokens"]),
        (&CACHED.into(), &5.into())
    );
    assert_given_back(&gateway);
}

#[test]
fn a_clients_mistake_is_told_once() {
    let (nodes, gateway) = sharing();
    let error = json!({"error": {"message": "no such thing", "type": "invalid_request_error",
        "param": "logit_bias", "code": null}})
    .to_string();
    nodes[0].script(vec![Act::Send(json(400, &[], &error))]);
    nodes[1].script(vec![Act::AwaitClose(Duration::from_secs(20))]);
    let answer = gateway.chat(&chat(Stream::WithUsage, &long()));
    assert_eq!((answer.status, answer.text()), (400, error));
    assert_eq!(answer.header("x-homing-node"), Some("node-0"));
    eventually("the other request is dropped", || {
        // It may not even have got there.
        nodes[1].received().len() == nodes[1].hang_ups().len()
    });
    let row = record(&gateway, &answer);
    assert_eq!(
        (&row["status"], &row["cost_nano_usd"]),
        (&json!("failed"), &json!(0))
    );
    assert_eq!(gateway.metric("homing_retries_total"), 0.0);
    assert_given_back(&gateway);
}

#[test]
fn a_client_that_leaves_frees_both_nodes() {
    let silent = Act::AwaitClose(Duration::from_secs(20));
    let event = Act::Send(chunk(format!("data: {}\n\n", delta("x")).as_bytes()));
    for (what, prefill, decode) in [
        (
            "while the prompt is computed",
            Some(vec![silent.clone()]),
            vec![silent.clone()],
        ),
        ("after that", None, vec![Act::Meet, silent.clone()]),
        (
            "within the answer",
            None,
            vec![Act::Meet, Act::Send(stream_head()), event, silent.clone()],
        ),
    ] {
        // It waits for the client's sake, not for a deadline's.
        let nodes = Node::sharing(Kind::Homing, [Role::Prefill, Role::Decode]);
        let models =
            format!("[[models]]\nid = \"{MODEL}\"\n[disaggregation]\nkv_bytes_per_token = 1\n");
        let gateway = Gateway::with_models(&[&nodes[0], &nodes[1]], &models);
        let computes = prefill.is_some();
        if let Some(script) = prefill {
            nodes[0].script(script);
        }
        let streams = decode.len() > 2;
        nodes[1].script(decode);
        let mut client = gateway.begin_chat(&["x-request-id: r"], &chat(Stream::Yes, &long()));
        eventually(what, || nodes.iter().all(|node| node.received().len() == 1));
        if !computes {
            // It has answered: nothing of it is left to compute.
            let reached = "homing_node_prefill_tokens_in_flight";
            eventually(what, || gateway.metric(reached) == 0.0);
        }
        if streams {
            assert_eq!(client.head().0, 200, "{what}");
            assert!(client.chunk().is_some(), "{what}");
        }
        drop(client);
        let mut waiting = vec![&nodes[1]];
        if computes {
            waiting.push(&nodes[0]);
        }
        for node in waiting {
            eventually(what, || !node.hang_ups().is_empty());
        }
        let row = gateway.row("r");
        assert_eq!(row["status"], "cancelled", "{what}");
        let output = if streams { 1 } else { 0 };
        assert_eq!(row["output_tokens"], output, "{what}");
        assert_eq!(gateway.rows().len(), 1, "{what}");
        assert_given_back(&gateway);
    }
}

#[test]
fn a_restarted_node_is_asked_who_it_is_now() {
    let (nodes, gateway) = sharing();
    let shared = || {
        let answer = gateway.chat(&chat(Stream::No, &long()));
        assert_eq!(answer.status, 200, "{answer:?}");
        let params = last(&nodes[1]).body["kv_transfer_params"].clone();
        params["remote_engine_id"].as_str().map(str::to_owned)
    };
    assert_eq!(shared().as_deref(), Some("engine-0"));
    let name = nodes[0].restart();
    eventually("the new one is known", || shared() == Some(name.clone()));
    assert_given_back(&gateway);
}

#[test]
fn a_node_that_does_not_tell_about_its_kv_is_done_without() {
    let nodes = Node::sharing(Kind::Homing, [Role::Prefill, Role::Decode]);
    nodes[0].set_mute(true);
    let gateway = gateway(&[&nodes[0], &nodes[1]]);
    let ask = || gateway.chat(&chat(Stream::No, &long()));
    let answer = ask();
    assert_eq!(
        (answer.status, answer.header("x-homing-node")),
        (200, Some("node-1"))
    );
    assert!(nodes[0].received().is_empty());
    nodes[0].set_mute(false);
    // The scripted node answers at once, so that it would look faster than it is: a fresh gateway.
    drop(gateway);
    let gateway = self::gateway(&[&nodes[0], &nodes[1]]);
    let answer = gateway.chat(&chat(Stream::No, &long()));
    assert_eq!(answer.header("x-homing-prefill-node"), Some("node-0"));
}
