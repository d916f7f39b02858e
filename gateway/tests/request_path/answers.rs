//! Catches: an answer's tokens that the next turn's prompt does not repeat, that another tenant or
//! another prompt gets, that the client sees unasked, or that a node is asked for which did not
//! offer them.

use prompt::gguf::Header;
use prompt::{PromptBuilder, Tokenizer};
use serde_json::{Value, json};

use crate::support::client::{Answer, Connection};
use crate::support::node::{Act, CHUNKS_END, MODEL, Node, chunk, stream_head, usage, usage_chunk};
use crate::support::{Gateway, Stream, chat, model_file};

const END: u32 = 2;

fn builder() -> PromptBuilder {
    let file = std::fs::read(model_file()).expect("the model");
    PromptBuilder::from_gguf(&Header::parse(&file).unwrap()).unwrap()
}

/// Tokens that spell a text, a character each: not what the tokenizer makes of it.
fn odd_tokens(tokenizer: &Tokenizer, text: &str) -> Vec<u32> {
    let encode = |c: char| tokenizer.encode_text(c.encode_utf8(&mut [0; 4]));
    text.chars().flat_map(encode).collect()
}

/// A choice's chunk.
fn event(delta: &Value, token_ids: &[u32], finish: Option<&str>) -> String {
    let chunk = json!({"id": "x", "object": "chat.completion.chunk", "model": MODEL, "choices": [
        {"index": 0, "delta": delta, "finish_reason": finish, "token_ids": token_ids}]});
    format!("data: {chunk}\n\n")
}

/// A stream that says a text character by character, one of them late.
fn streamed(text: &str, tokens: &[u32]) -> Vec<Act> {
    let mut out = stream_head();
    let mut push = |event: String| out.extend(chunk(event.as_bytes()));
    push(event(
        &json!({"role": "assistant", "content": ""}),
        &[],
        None,
    ));
    let chars: Vec<char> = text.chars().collect();
    assert_eq!(chars.len(), tokens.len());
    push(event(&json!({}), &tokens[..1], None));
    push(event(
        &json!({"content": chars[..2].iter().collect::<String>()}),
        &tokens[1..2],
        None,
    ));
    for (c, token) in chars.iter().zip(tokens).skip(2) {
        push(event(&json!({"content": c.to_string()}), &[*token], None));
    }
    push(event(&json!({}), &[END], Some("stop")));
    push(format!(
        "data: {}\n\n",
        usage_chunk(30, 0, tokens.len() as u64 + 1)
    ));
    push("data: [DONE]\n\n".to_owned());
    out.extend(CHUNKS_END);
    vec![Act::Send(out)]
}

fn ask(gateway: &Gateway, key: &str, body: &Value) -> Answer {
    let authorization = format!("authorization: Bearer {key}");
    let headers = [authorization.as_str(), "x-homing-debug: 1"];
    let answer = Connection::open(gateway.addr)
        .request(
            "POST",
            "/v1/chat/completions",
            &headers,
            body.to_string().as_bytes(),
        )
        .answer();
    assert_eq!(answer.status, 200, "{answer:?}");
    answer
}

fn ids(body: &Value) -> Vec<u32> {
    serde_json::from_value(body["prompt_token_ids"].clone()).unwrap_or_default()
}

fn next_turn(body: &Value, message: Value) -> Value {
    let mut next = body.clone();
    let messages = next["messages"].as_array_mut().unwrap();
    messages.push(message);
    messages.push(json!({"role": "user", "content": "go on"}));
    next
}

#[test]
fn the_next_turn_repeats_the_tokens_of_a_streamed_answer() {
    let builder = builder();
    let node = Node::reporting();
    let gateway = Gateway::exact(&[&node]);
    let text = "Hello there, how are you?";
    let tokens = odd_tokens(builder.tokenizer(), text);
    node.script(streamed(text, &tokens));
    let first = chat(Stream::Yes, "hi");
    let answer = ask(&gateway, &gateway.key, &first);
    assert_eq!(answer.content(), text);
    assert!(!answer.text().contains("token_ids"), "{}", answer.text());
    // The chunk of the token whose text came late is gone; all others are there.
    assert_eq!(answer.chunks().len(), 1 + (tokens.len() - 1) + 1);
    let row = gateway.row(answer.header("x-request-id").unwrap());
    assert_eq!(row["output_tokens"], tokens.len() as u64 + 1);
    let sent = node.received().pop().unwrap().body;
    assert_eq!(sent["return_token_ids"], true);
    assert_eq!(sent["prompt_token_ids"], Value::Null);

    let second = next_turn(&first, json!({"role": "assistant", "content": text}));
    let answer = ask(&gateway, &gateway.key, &second);
    let sent = node.received().pop().unwrap().body;
    let prompt = ids(&sent);
    assert_eq!(sent["messages"], second["messages"]);
    assert_eq!(
        answer.header("x-homing-prompt-tokens"),
        Some(prompt.len().to_string().as_str())
    );
    let spelled = [tokens.as_slice(), &[END]].concat();
    let at = prompt
        .windows(spelled.len())
        .position(|window| window == spelled);
    assert!(at.is_some(), "{prompt:?}");

    // An edited answer is the tokenizer's again; so is another tenant's conversation.
    let edited = next_turn(
        &first,
        json!({"role": "assistant", "content": "Hello there."}),
    );
    ask(&gateway, &gateway.key, &edited);
    assert_eq!(ids(&node.received().pop().unwrap().body), Vec::<u32>::new());
    ask(&gateway, &gateway.other_key, &second);
    assert_eq!(ids(&node.received().pop().unwrap().body), Vec::<u32>::new());
    assert_eq!(gateway.metric("homing_answers_total"), 1.0);
    gateway.assert_idle();
}

#[test]
fn the_next_turn_repeats_the_tokens_of_a_whole_answers_calls() {
    let builder = builder();
    let node = Node::reporting();
    let gateway = Gateway::exact(&[&node]);
    let written = "<tool_call>\n{\"name\":\"look\",\"arguments\":{\"at\":\"é\"}}\n</tool_call>";
    let mut tokens = odd_tokens(builder.tokenizer(), written);
    tokens.push(END);
    let message = json!({"role": "assistant", "content": null, "tool_calls": [
        {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": "{\"at\":\"é\"}"}}]});
    let whole = json!({"id": "x", "object": "chat.completion", "model": MODEL, "usage": usage(9, 0, 7),
        "choices": [{"index": 0, "token_ids": tokens, "message": message, "finish_reason": "tool_calls"}]});
    node.script(vec![Act::Send(crate::support::node::json(
        200,
        &[],
        &whole.to_string(),
    ))]);
    let mut first = chat(Stream::No, "hi");
    first["tools"] = json!([{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]);
    let answer = ask(&gateway, &gateway.key, &first).json();
    let mut expected = whole.clone();
    expected["choices"][0]
        .as_object_mut()
        .unwrap()
        .remove("token_ids");
    assert_eq!(answer, expected);

    let mut second = first.clone();
    let messages = second["messages"].as_array_mut().unwrap();
    messages.push(message);
    messages.push(json!({"role": "tool", "tool_call_id": "call_1", "content": "nothing"}));
    // What the next turn chooses of the tools changes nothing.
    second["tool_choice"] = "none".into();
    ask(&gateway, &gateway.key, &second);
    let prompt = ids(&node.received().pop().unwrap().body);
    assert!(prompt.windows(tokens.len()).any(|window| window == tokens));
    gateway.assert_idle();
}

#[test]
fn tokens_are_shown_to_clients_that_ask_and_asked_of_nodes_that_offer() {
    let node = Node::reporting();
    let gateway = Gateway::exact(&[&node]);
    node.script(streamed("abc", &[70, 71, 72]));
    let mut body = chat(Stream::Yes, "hi");
    body["return_token_ids"] = true.into();
    let answer = ask(&gateway, &gateway.key, &body);
    assert_eq!(answer.chunks()[2]["choices"][0]["token_ids"], json!([71]));
    let sent = node.received().pop().unwrap();
    assert_eq!(sent.body["return_token_ids"], true);

    // These tokens do not spell "abc": nothing is repeated.
    let second = next_turn(
        &chat(Stream::Yes, "hi"),
        json!({"role": "assistant", "content": "abc"}),
    );
    ask(&gateway, &gateway.key, &second);
    assert_eq!(ids(&node.received().pop().unwrap().body), Vec::<u32>::new());

    let plain = Node::start();
    let gateway = Gateway::exact(&[&plain]);
    plain.script(streamed("abc", &[70, 71, 72]));
    body["return_token_ids"] = false.into();
    ask(&gateway, &gateway.key, &body);
    assert_eq!(
        plain.received().pop().unwrap().body["return_token_ids"],
        Value::Null
    );
    gateway.assert_idle();
}
