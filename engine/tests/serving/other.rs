//! Vectors, tokens and tickets. Catches a vector that depends on its neighbours in the batch, tokens
//! that are not the prompt's, and blocks that stay pinned.

use serde_json::{Value, json};

use crate::common::{MODEL, Node, TOKEN, cached, chat_body, shared, user};

const CHAT: &str = "/v1/chat/completions";
const EMBEDDINGS: &str = "/v1/embeddings";
const HELD: &str = "homing:kv_blocks_held";

fn embed(node: &Node, fields: Value) -> Value {
    let mut body = json!({"model": MODEL});
    for (name, value) in fields.as_object().expect("an object") {
        body[name] = value.clone();
    }
    let reply = node.post(EMBEDDINGS, &body);
    assert_eq!(reply.status, 200, "{}", reply.text());
    reply.json()
}

fn vector(data: &Value) -> Vec<f64> {
    let numbers = data["embedding"].as_array().expect("a list");
    numbers.iter().filter_map(Value::as_f64).collect()
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

#[test]
fn texts_become_vectors() {
    let node = shared();
    let texts = [
        "The river flows to the sea.",
        "A stream runs down to the ocean.",
        "fn main() { println!(\"{}\", 5); }",
    ];
    let answer = embed(node, json!({"input": texts}));
    assert_eq!(answer["object"], "list");
    let data = answer["data"].as_array().expect("data");
    let vectors: Vec<_> = data.iter().map(vector).collect();
    for (at, (data, vector)) in data.iter().zip(&vectors).enumerate() {
        assert_eq!(
            (&data["object"], &data["index"]),
            (&json!("embedding"), &json!(at))
        );
        assert_eq!(vector.len(), 576);
        assert!((dot(vector, vector) - 1.0).abs() < 1e-3, "of length 1");
        let alone = embed(node, json!({"input": texts[at]}));
        assert_eq!(
            &self::vector(&alone["data"][0]),
            vector,
            "alone or beside others"
        );
    }
    assert!(
        dot(&vectors[0], &vectors[1]) > dot(&vectors[0], &vectors[2]),
        "kinship shows"
    );
    assert_eq!(
        answer["usage"]["prompt_tokens"],
        answer["usage"]["total_tokens"]
    );
    let base64 = embed(
        node,
        json!({"input": texts[0], "encoding_format": "base64"}),
    );
    let text = base64["data"][0]["embedding"].as_str().expect("base64");
    assert_eq!(text.len(), (576_usize * 4).div_ceil(3) * 4);
    let last = embed(node, json!({"input": texts[0], "pooling": "last"}));
    assert_ne!(
        vector(&last["data"][0]),
        vectors[0],
        "another pooling, another vector"
    );
    let same = embed(node, json!({"input": texts[0], "dimensions": 576}));
    assert_eq!(vector(&same["data"][0]), vectors[0]);
}

#[test]
fn embeddings_refuse_by_name() {
    let node = shared();
    let rows = [
        (
            json!({"model": MODEL}),
            "missing_required_parameter",
            "input",
        ),
        (
            json!({"model": MODEL, "input": ""}),
            "invalid_value",
            "input",
        ),
        (
            json!({"model": MODEL, "input": "a", "dimensions": 3}),
            "invalid_value",
            "dimensions",
        ),
        (
            json!({"model": MODEL, "input": "a", "encoding_format": "x"}),
            "invalid_value",
            "encoding_format",
        ),
        (
            json!({"model": MODEL, "input": "a", "pooling": "max"}),
            "invalid_value",
            "pooling",
        ),
        (
            json!({"model": MODEL, "input": [[1, 99_999]]}),
            "invalid_type",
            "input[0][1]",
        ),
        (
            json!({"model": MODEL, "input": ["a", "b ".repeat(9000)]}),
            "context_length_exceeded",
            "input[1]",
        ),
    ];
    for (body, code, param) in rows {
        let reply = node.post(EMBEDDINGS, &body);
        assert_eq!(
            reply.error(),
            (400, code.to_owned(), Some(param.to_owned()))
        );
    }
    let ids = embed(node, json!({"input": [[504, 260], [260]]}));
    assert_eq!(ids["usage"]["prompt_tokens"], 3);
}

#[test]
fn tokens_and_back() {
    let node = shared();
    let text = "Rivers – 你好 🦀 <|im_start|>";
    let reply = node
        .post(
            "/tokenize",
            &json!({"prompt": text, "return_token_strs": true}),
        )
        .json();
    assert_eq!(reply["max_model_len"], 8192);
    assert_eq!(
        reply["count"].as_u64(),
        reply["tokens"].as_array().map(|t| t.len() as u64)
    );
    assert_eq!(
        reply["token_strs"].as_array().map(Vec::len),
        reply["tokens"].as_array().map(Vec::len)
    );
    let back = node
        .post("/detokenize", &json!({"tokens": reply["tokens"]}))
        .json();
    assert_eq!(back["prompt"], text);
    let chat = node
        .post(
            "/tokenize",
            &json!({"model": MODEL, "messages": user("Hi.")}),
        )
        .json();
    let answer = node.chat(json!({"messages": user("Hi."), "max_tokens": 1}));
    assert_eq!(chat["count"], answer["usage"]["prompt_tokens"]);
    let rows = [
        ("/tokenize", json!({}), "prompt"),
        ("/tokenize", json!({"prompt": 5}), "prompt"),
        ("/detokenize", json!({}), "tokens"),
        ("/detokenize", json!({"tokens": [-1]}), "tokens[0]"),
    ];
    for (path, body, param) in rows {
        let (status, _, found) = node.post(path, &body).error();
        assert_eq!(
            (status, found.as_deref()),
            (400, Some(param)),
            "{path} {body}"
        );
    }
}

#[test]
fn a_prefilled_prompt_stays_until_it_is_released() {
    let node = Node::start_with(&[], Some(TOKEN));
    let prompt = "Rivers run to the sea. ".repeat(20);
    let params = json!({"do_remote_decode": true, "do_remote_prefill": false});
    let body = chat_body(json!({
        "messages": user(&prompt), "max_tokens": 1, "kv_transfer_params": params,
    }));
    let reply = node.post(CHAT, &body);
    assert_eq!(reply.status, 200, "{}", reply.text());
    let answer = reply.json();
    let params = &answer["kv_transfer_params"];
    assert_eq!(answer["choices"][0]["finish_reason"], "length");
    let blocks = params["blocks"].as_u64().expect("a count");
    assert_eq!(
        blocks,
        answer["usage"]["prompt_tokens"].as_u64().expect("a count") / 16
    );
    assert!(
        params["deadline_ms"]
            .as_u64()
            .is_some_and(|ms| (1..=30_000).contains(&ms))
    );
    assert!(params["remote_engine_id"].is_string());
    node.wait_for_metric(HELD, |held| held == blocks as f64);

    let decode = node.chat(json!({"messages": user(&prompt), "max_tokens": 1}));
    assert!(cached(&decode) > 0, "and of use meanwhile");

    let release = |ticket: &Value| node.post("/v1/kv/release", &json!({"ticket": ticket}));
    assert_eq!(release(&params["ticket"]).json()["released"], true);
    node.wait_for_metric(HELD, |held| held == 0.0);
    assert_eq!(
        release(&params["ticket"]).json()["released"],
        false,
        "only once"
    );
    assert_eq!(release(&json!("guess")).error().0, 400);
    let anonymous = Node::start(&[]);
    let refused = anonymous.post(CHAT, &body).error();
    assert_eq!((refused.0, &*refused.1), (403, "node_token_required"));
}

/// Would catch a retention that nobody acts on, and one that keeps more than its share.
#[test]
fn a_prefix_that_is_wanted_for_longer_outlives_a_newer_one() {
    // Room for two of three prompts.
    let node = Node::start(&["--kv-memory", "22MiB"]);
    let ask = |text: &str, header: &str| {
        let text = format!("{text} and so on ").repeat(100);
        let fields = json!({"max_tokens": 1, "messages": user(&text)});
        let bytes = chat_body(fields).to_string();
        let reply = node.send("POST", "/v1/chat/completions", header, bytes.as_bytes());
        assert_eq!(reply.status, 200, "{}", reply.text());
        cached(&reply.json())
    };
    ask("first", "x-cache-retention-s: 600\r\n");
    ask("second", "");
    ask("third", "");
    assert!(ask("first", "") > 300, "it was wanted for ten minutes");
    let refused = node.send(
        "POST",
        "/v1/chat/completions",
        "x-cache-retention-s: long\r\n",
        chat_body(json!({"messages": user("hi")}))
            .to_string()
            .as_bytes(),
    );
    let param = Some("x-cache-retention-s".to_owned());
    assert_eq!(refused.error(), (400, "invalid_value".into(), param));
}
