//! Catches tokens that differ from those of the same prompt as a turn, a bill for them, a bound
//! that is missing, and a model without a tokenizer here whose node is not asked.

use prompt::gguf::Header;
use prompt::{PromptBuilder, SegmentCache};
use serde_json::{Value, json};

use crate::support::client::{Answer, Connection};
use crate::support::node::{Act, MODEL, Node, json as answer_of};
use crate::support::{Gateway, model_file};

fn post(gateway: &Gateway, path: &str, body: &Value) -> Answer {
    gateway.post(path, &[], body.to_string().as_bytes())
}

#[test]
fn the_gateways_own_tokenizer_answers() {
    let file = std::fs::read(model_file()).expect("the model");
    let builder = PromptBuilder::from_gguf(&Header::parse(&file).unwrap()).unwrap();
    let node = Node::start();
    let gateway = Gateway::exact(&[&node]);
    let text = "Hello, wörld! <|im_end|>";
    let of_text = builder.completion(text, &SegmentCache::new(0));
    let said = post(&gateway, "/tokenize", &json!({"prompt": text})).json();
    assert_eq!(
        said,
        json!({"count": of_text.len(), "max_model_len": 8192, "tokens": of_text, "token_strs": null})
    );
    let bare = json!({
        "model": MODEL, "prompt": text, "add_special_tokens": false, "return_token_strs": true,
    });
    let bare = post(&gateway, "/tokenize", &bare).json();
    let strings: Vec<&str> = bare["token_strs"]
        .as_array()
        .unwrap()
        .iter()
        .map(|text| text.as_str().unwrap())
        .collect();
    assert_eq!(strings.len(), bare["tokens"].as_array().unwrap().len());
    assert_eq!(strings.last(), Some(&"<|im_end|>"));
    let back = post(&gateway, "/detokenize", &json!({"tokens": bare["tokens"]}));
    assert_eq!((back.status, back.json()), (200, json!({"prompt": text})));

    // A conversation has the tokens that it has as a turn.
    let messages = json!([{"role": "user", "content": "hi"}]);
    let tools = json!([{"type": "function", "function": {"name": "f", "parameters": {}}}]);
    let asked = json!({"messages": messages, "tools": tools});
    let count = post(&gateway, "/tokenize", &asked).json()["count"].clone();
    let turn = json!({"model": MODEL, "messages": messages, "tools": tools});
    let turn = gateway.post(
        "/v1/chat/completions",
        &["x-homing-debug: 1"],
        turn.to_string().as_bytes(),
    );
    let counted = turn.header("x-homing-prompt-tokens").unwrap();
    assert_eq!(count.to_string(), counted);
    // The turn alone is on the bill, and alone reached the node.
    assert_eq!((gateway.rows().len(), node.received().len()), (1, 1));
    gateway.assert_idle();
}

#[test]
fn malformed_requests_are_refused_by_name() {
    let node = Node::start();
    let gateway = Gateway::exact(&[&node]);
    let image = json!([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:x"}}]}]);
    for (path, body, status, param) in [
        ("/tokenize", json!({}), 400, "prompt"),
        ("/tokenize", json!({"prompt": 7}), 400, "prompt"),
        (
            "/tokenize",
            json!({"model": "nope", "prompt": "x"}),
            404,
            "model",
        ),
        ("/tokenize", json!({"messages": []}), 400, "messages"),
        (
            "/tokenize",
            json!({"messages": image}),
            400,
            "messages[0].content[0].type",
        ),
        (
            "/detokenize",
            json!({"tokens": [1, 4_000_000]}),
            400,
            "tokens",
        ),
        (
            "/detokenize",
            json!({"tokens": vec![1; 1_048_577]}),
            400,
            "tokens",
        ),
    ] {
        let answer = post(&gateway, path, &body);
        assert_eq!(answer.status, status, "{answer:?}");
        assert_eq!(answer.json()["error"]["param"], param);
    }
    let many = json!({"prompt": "a ".repeat(1_100_000)});
    assert_eq!(post(&gateway, "/tokenize", &many).status, 400);
    let mut stranger = Connection::open(gateway.addr);
    let answer = stranger
        .request("POST", "/tokenize", &[], b"{\"prompt\":\"x\"}")
        .answer();
    assert_eq!(answer.status, 401);
    let mut got = Connection::open(gateway.addr);
    assert_eq!(
        got.request("GET", "/tokenize", &[], b"").answer().status,
        405
    );
    assert_eq!((gateway.rows().len(), node.received().len()), (0, 0));
    gateway.assert_idle();
}

#[test]
fn a_node_answers_where_the_gateway_has_no_tokenizer() {
    let nodes = [Node::start(), Node::start()];
    let models =
        format!("[[models]]\nid = \"{MODEL}\"\n[[aliases]]\nname = \"a\"\nmodel = \"{MODEL}\"\n");
    let gateway = Gateway::with_models(&[&nodes[0], &nodes[1]], &models);
    let said = r#"{"count":1,"max_model_len":8192,"tokens":[7],"token_strs":null}"#;
    let body = json!({"model": "a", "prompt": "x", "return_token_strs": false, "x": 1.5});
    // The first one breaks off, whichever it is; the other one is asked then.
    for node in &nodes {
        node.script(vec![Act::Close]);
        node.script(vec![Act::Send(answer_of(200, &[], said))]);
    }
    let answer = post(&gateway, "/tokenize", &body);
    assert_eq!(answer.status, 502, "both broke off: {answer:?}");
    assert!(nodes.iter().all(|node| node.received().len() == 1));
    let answer = post(&gateway, "/tokenize", &body);
    assert_eq!((answer.status, answer.text()), (200, said.to_owned()));
    let received: Vec<_> = nodes.iter().flat_map(Node::received).collect();
    for sent in received {
        assert!(sent.head.starts_with("POST /tokenize "), "{}", sent.head);
        let expected = json!({"model": MODEL, "prompt": "x", "return_token_strs": false, "x": 1.5});
        assert_eq!(sent.body, expected);
    }
    let refusal = r#"{"error":{"message":"`tokens` must be ids","type":"invalid_request_error","param":"tokens","code":"invalid_value"}}"#;
    for node in &nodes {
        node.unscript();
        node.script(vec![Act::Send(answer_of(400, &[], refusal))]);
    }
    let answer = post(&gateway, "/detokenize", &json!({"tokens": [1]}));
    assert_eq!((answer.status, answer.text()), (400, refusal.to_owned()));
    assert_eq!(gateway.rows().len(), 0);
    gateway.assert_idle();
}
