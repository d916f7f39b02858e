//! Several answers to one prompt, log probabilities, penalties, echo, timeouts. Catches an answer
//! that is mixed up with another one's, a count that is off, and an option that does nothing.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use crate::common::{Node, chat_body, content, shared, user};

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";
const HELD: &str = "homing:kv_blocks_held";

fn choice_contents(answer: &Value) -> Vec<String> {
    let choices = answer["choices"].as_array().expect("choices");
    let text = |choice: &Value| {
        choice["message"]["content"]
            .as_str()
            .expect("content")
            .into()
    };
    choices.iter().map(text).collect()
}

/// The texts of a stream's choices, put together by index.
fn streamed_contents(chunks: &[Value]) -> Vec<String> {
    let mut texts: BTreeMap<u64, String> = BTreeMap::new();
    for choice in chunks.iter().filter_map(|chunk| chunk["choices"].get(0)) {
        let index = choice["index"].as_u64().expect("an index");
        let text = choice["delta"]["content"].as_str().unwrap_or_default();
        *texts.entry(index).or_default() += text;
    }
    texts.into_values().collect()
}

#[test]
fn several_choices_are_as_many_answers_to_one_prompt() {
    let node = shared();
    let long = "Rivers run to the sea, and the sea is not full. ".repeat(8);
    let fields = json!({
        "messages": user(&long), "n": 3, "temperature": 1, "seed": 11, "max_tokens": 20,
        "cache_salt": "several choices",
    });
    let answer = node.chat(fields.clone());
    let texts = choice_contents(&answer);
    assert_eq!(texts.len(), 3);
    assert!(texts[0] != texts[1] && texts[1] != texts[2], "{texts:?}");
    let usage = &answer["usage"];
    assert_eq!(usage["completion_tokens"], 60, "the sum of all");
    let mut one = fields.clone();
    one["n"] = json!(1);
    let single = node.chat(one);
    assert_eq!(
        usage["prompt_tokens"], single["usage"]["prompt_tokens"],
        "counted once"
    );
    assert_eq!(
        content(&single),
        texts[0],
        "the first is the answer to the seed itself"
    );
    let indices = answer["choices"].as_array().expect("choices").iter();
    assert!(
        indices
            .enumerate()
            .all(|(at, choice)| choice["index"] == at)
    );

    let mut body = chat_body(fields);
    body["stream"] = json!(true);
    body["stream_options"] = json!({"include_usage": true});
    let mut chunks = node.stream(CHAT, &body).chunks();
    let last = chunks.pop().expect("usage");
    assert_eq!(last["usage"]["completion_tokens"], 60);
    assert_eq!(streamed_contents(&chunks), texts, "interleaved by index");
    let roles = chunks
        .iter()
        .filter(|c| c["choices"][0]["delta"]["role"] == "assistant");
    assert_eq!(roles.count(), 3);
    let ends = chunks
        .iter()
        .filter(|c| c["choices"][0]["finish_reason"].is_string());
    assert_eq!(ends.count(), 3);
}

#[test]
fn choices_share_the_prompt_and_go_together() {
    let node = Node::start(&["--queue", "8"]);
    let prompt = "Rivers run to the sea. ".repeat(60);
    let body = chat_body(json!({
        "messages": user(&prompt), "n": 4, "temperature": 1, "max_tokens": 3000, "stream": true,
        "ignore_eos": true,
    }));
    let mut events = node.stream(CHAT, &body);
    (0..30).for_each(|_| drop(events.next()));
    let prompt_tokens = node.metric("vllm:prompt_tokens_total");
    let computed = node.metric("homing:computed_tokens_total");
    assert!(prompt_tokens > 4.0 * 300.0, "four prompts: {prompt_tokens}");
    assert!(
        computed < 0.5 * prompt_tokens,
        "computed once: {computed} of {prompt_tokens}"
    );
    drop(events);
    node.wait_for_metric(HELD, |held| held == 0.0);
    let too_many = node.post(CHAT, &chat_body(json!({"n": 9})));
    assert_eq!(
        too_many.error(),
        (400, "invalid_value".into(), Some("n".into()))
    );
}

#[test]
fn logprobs_are_told_in_both_dialects() {
    let node = shared();
    let fields = json!({"max_tokens": 12, "logprobs": true, "top_logprobs": 3});
    let answer = node.chat(fields.clone());
    let tokens = answer["choices"][0]["logprobs"]["content"]
        .as_array()
        .expect("tokens");
    assert_eq!(tokens.len(), 12);
    let mut spelled = Vec::new();
    for token in tokens {
        let top = token["top_logprobs"].as_array().expect("alternatives");
        assert_eq!(top.len(), 3);
        assert_eq!(
            top[0]["token"], token["token"],
            "greedy takes the likeliest"
        );
        assert_eq!(top[0]["logprob"], token["logprob"]);
        let logprobs: Vec<f64> = top.iter().filter_map(|t| t["logprob"].as_f64()).collect();
        assert!(logprobs.is_sorted_by(|a, b| a >= b), "{logprobs:?}");
        let sum: f64 = logprobs.iter().map(|logprob| logprob.exp()).sum();
        assert!(sum <= 1.0 + 1e-4, "{sum}");
        let bytes = token["bytes"].as_array().expect("bytes").iter();
        spelled.extend(bytes.map(|byte| byte.as_u64().expect("a byte") as u8));
    }
    assert_eq!(String::from_utf8(spelled).expect("UTF-8"), content(&answer));

    let mut body = chat_body(fields);
    body["stream"] = json!(true);
    let chunks = node.stream(CHAT, &body).chunks();
    let streamed: Vec<&Value> = chunks
        .iter()
        .filter_map(|chunk| chunk["choices"][0]["logprobs"]["content"].as_array())
        .flatten()
        .collect();
    assert_eq!(streamed, tokens.iter().collect::<Vec<_>>());

    let body = json!({"model": "smol", "prompt": "The capital of France is", "temperature": 0,
        "max_tokens": 6, "logprobs": 2});
    let whole = node.post(COMPLETIONS, &body).json();
    let logprobs = &whole["choices"][0]["logprobs"];
    let texts = logprobs["tokens"].as_array().expect("tokens").iter();
    let text: String = texts.filter_map(Value::as_str).collect();
    assert_eq!(Some(&*text), whole["choices"][0]["text"].as_str());
    assert_eq!(logprobs["text_offset"][0], 0);
    for (at, top) in logprobs["top_logprobs"]
        .as_array()
        .expect("maps")
        .iter()
        .enumerate()
    {
        let chosen = logprobs["tokens"][at].as_str().expect("a token");
        assert_eq!(top[chosen], logprobs["token_logprobs"][at]);
    }
}

#[test]
fn token_ids_spell_the_answer() {
    let node = shared();
    let fields = json!({"max_tokens": 16, "return_token_ids": true});
    let answer = node.chat(fields.clone());
    let ids = answer["choices"][0]["token_ids"].clone();
    assert_eq!(ids.as_array().map(Vec::len), Some(16));
    let text = node.post("/detokenize", &json!({"tokens": ids})).json();
    assert_eq!(text["prompt"], content(&answer));
    let mut body = chat_body(fields);
    body["stream"] = json!(true);
    let chunks = node.stream(CHAT, &body).chunks();
    let streamed: Vec<&Value> = chunks
        .iter()
        .filter_map(|chunk| chunk["choices"][0]["token_ids"].as_array())
        .flatten()
        .collect();
    assert_eq!(json!(streamed), ids);
    let plain = node.chat(json!({"max_tokens": 2}));
    assert!(
        plain["choices"][0].get("token_ids").is_none(),
        "only where asked for"
    );
}

#[test]
fn bias_and_penalties_change_the_answer() {
    let node = shared();
    let ask = |fields: Value| node.chat(fields)["choices"][0]["token_ids"].clone();
    let plain = ask(json!({"max_tokens": 40, "return_token_ids": true}));
    let first = plain[0].to_string();
    let without = ask(json!({"max_tokens": 40, "return_token_ids": true,
        "logit_bias": {first.as_str(): -100}}));
    assert!(
        !without.as_array().expect("ids").contains(&plain[0]),
        "{without}"
    );
    let always =
        ask(json!({"max_tokens": 5, "return_token_ids": true, "logit_bias": {"260": 100}}));
    assert_eq!(always, json!([260, 260, 260, 260, 260]));
    for penalty in ["presence_penalty", "frequency_penalty"] {
        // A bias that alone would repeat one token for ever, until the penalty is larger.
        let ids = ask(json!({"max_tokens": 40, "return_token_ids": true,
            "logit_bias": {"260": 20}, penalty: 2, "repetition_penalty": 100}));
        let ids = ids.as_array().expect("ids").clone();
        assert!(ids.iter().any(|id| *id != json!(260)), "{penalty}: {ids:?}");
    }
    let min_p = node.chat(json!({"max_tokens": 12, "temperature": 2, "min_p": 1, "seed": 3}));
    assert_eq!(
        content(&min_p),
        content(&node.chat(json!({"max_tokens": 12}))),
        "the likeliest"
    );
}

#[test]
fn min_tokens_keeps_the_end_away() {
    let node = shared();
    let fields = json!({"messages": user("Say yes."), "max_tokens": 64, "stop": ["."]});
    let plain = node.chat(fields.clone());
    let short = plain["usage"]["completion_tokens"]
        .as_u64()
        .expect("a count");
    assert!(short < 48, "the model ends by itself: {plain}");
    let mut longer = fields;
    longer["min_tokens"] = json!(48);
    let answer = node.chat(longer);
    let count = answer["usage"]["completion_tokens"]
        .as_u64()
        .expect("a count");
    assert!(count >= 48, "{answer}");
}

#[test]
fn echo_begins_with_the_prompt() {
    let node = shared();
    let prompt = "The capital of France is";
    let mut body = json!({"model": "smol", "prompt": prompt, "temperature": 0, "max_tokens": 5});
    let plain = node.post(COMPLETIONS, &body).json();
    let text = plain["choices"][0]["text"]
        .as_str()
        .expect("text")
        .to_owned();
    body["echo"] = json!(true);
    let echoed = node.post(COMPLETIONS, &body).json();
    assert_eq!(echoed["choices"][0]["text"], format!("{prompt}{text}"));
    body["stream"] = json!(true);
    let chunks = node.stream(COMPLETIONS, &body).chunks();
    let pieces = chunks
        .iter()
        .filter_map(|chunk| chunk["choices"][0]["text"].as_str());
    assert_eq!(pieces.collect::<String>(), format!("{prompt}{text}"));
    body["logprobs"] = json!(1);
    let refused = node.post(COMPLETIONS, &body);
    assert_eq!(
        refused.error(),
        (400, "invalid_value".into(), Some("echo".into()))
    );
}

#[test]
fn a_timeout_is_a_status_before_the_first_byte_and_an_event_after() {
    let node = shared();
    let fields = json!({"max_tokens": 4000, "ignore_eos": true, "messages": user("Go on.")});
    let mut body = chat_body(fields);
    body["timeout"] = json!(0.3);
    let reply = node.post(CHAT, &body);
    assert_eq!(reply.error(), (408, "request_timeout".into(), None));
    let mut by_header = body.clone();
    by_header["timeout"] = Value::Null;
    let bytes = by_header.to_string();
    let reply = node.send(
        "POST",
        CHAT,
        "x-request-timeout-ms: 300\r\n",
        bytes.as_bytes(),
    );
    assert_eq!(reply.error(), (408, "request_timeout".into(), None));
    let reply = node.send(
        "POST",
        CHAT,
        "x-request-timeout-ms: soon\r\n",
        bytes.as_bytes(),
    );
    let param = Some("x-request-timeout-ms".to_owned());
    assert_eq!(reply.error(), (400, "invalid_value".into(), param));

    body["stream"] = json!(true);
    body["timeout"] = json!(1.5);
    let mut events = node.stream(CHAT, &body);
    assert_eq!(events.status, 200);
    let mut last = String::new();
    while let Some(event) = events.next() {
        assert_ne!(event, "[DONE]", "nobody may take it for complete");
        last = event;
    }
    let last: Value = serde_json::from_str(&last).expect("JSON");
    assert_eq!(last["error"]["code"], "request_timeout");
}

/// Would catch a form whose compiling keeps a request past its own deadline.
#[test]
fn a_forms_compiling_counts_against_the_deadline() {
    let options: Vec<_> = (1..600)
        .map(|i| {
            let name = format!("p_{i}");
            json!({"type": "object", "required": [name.clone()], "additionalProperties": false,
                "properties": {name: {"type": "string", "pattern": format!("^[a-z]{{{i}}}$")}}})
        })
        .collect();
    let schema = json!({"anyOf": options});
    let mut body = chat_body(json!({"max_tokens": 100, "messages": user("Go on.")}));
    body["response_format"] =
        json!({"type": "json_schema", "json_schema": {"name": "n", "schema": schema}});
    body["timeout"] = json!(0.02);
    let reply = shared().post(CHAT, &body);
    assert_eq!(reply.error(), (408, "request_timeout".into(), None));
}
