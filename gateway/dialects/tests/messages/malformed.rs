//! Catches a malformed or contradictory request that is accepted, or refused in other words than the
//! API's own, which clients and people act on.

use std::time::Instant;

use serde_json::{Value, json};

use super::{read, refusal, request};

pub(crate) fn check(rows: &[(Value, &str)]) {
    for (extra, expected) in rows {
        let body = request(extra).to_string();
        assert_eq!(refusal(body.as_bytes()), *expected, "{extra}");
    }
}

pub(crate) fn user(content: Value) -> Value {
    json!({"messages": [{"role": "user", "content": content}]})
}

fn conversation(messages: Value) -> Value {
    json!({"messages": messages})
}

#[expect(clippy::too_many_lines, reason = "a table of one row each")]
#[test]
fn scalars_have_their_types_and_ranges() {
    check(&[
        (json!({"model": null}), "model: Field required"),
        (json!({"model": 7}), "model: Input should be a valid string"),
        (
            json!({"model": ""}),
            "model: String should have at least 1 character",
        ),
        (json!({"max_tokens": null}), "max_tokens: Field required"),
        (
            json!({"max_tokens": "9"}),
            "max_tokens: Input should be a valid integer",
        ),
        (
            json!({"max_tokens": 1.5}),
            "max_tokens: Input should be a valid integer",
        ),
        (
            json!({"max_tokens": -1}),
            "max_tokens: Input should be greater than or equal to 0",
        ),
        (
            json!({"temperature": 1.1}),
            "temperature: Input should be less than or equal to 1",
        ),
        (
            json!({"temperature": -0.1}),
            "temperature: Input should be greater than or equal to 0",
        ),
        (
            json!({"temperature": "1"}),
            "temperature: Input should be a valid number",
        ),
        (
            json!({"top_p": 2}),
            "top_p: Input should be less than or equal to 1",
        ),
        (
            json!({"top_k": -1}),
            "top_k: Input should be greater than or equal to 0",
        ),
        (
            json!({"top_k": 1.5}),
            "top_k: Input should be a valid integer",
        ),
        (
            json!({"stream": 1}),
            "stream: Input should be a valid boolean",
        ),
        (
            json!({"stop_sequences": "a"}),
            "stop_sequences: Input should be a valid list",
        ),
        (
            json!({"stop_sequences": ["a", 1]}),
            "stop_sequences.1: Input should be a valid string",
        ),
        (
            json!({"stop_sequences": [" \n"]}),
            "stop_sequences: each stop sequence must contain non-whitespace",
        ),
        (
            json!({"metadata": "u"}),
            "metadata: Input should be a valid dictionary",
        ),
        (
            json!({"metadata": {"user_id": 5}}),
            "metadata.user_id: Input should be a valid string",
        ),
        (
            json!({"service_tier": "fast"}),
            "service_tier: Input should be 'auto' or 'standard_only'",
        ),
        (
            json!({"system": 5}),
            "system: Input should be a valid string or a valid list",
        ),
        (
            json!({"system": [{"type": "image", "source": {}}]}),
            "system.0: `image` blocks can only be in `user` messages",
        ),
        (
            json!({"system": [{"type": "text", "text": ""}]}),
            "system.0: text content blocks must be non-empty",
        ),
        (
            json!({"thread": {"type": "continue", "previous_message_id": "msg_1"}}),
            "thread: threads are not kept on this server; send the whole conversation in `messages`",
        ),
        (
            json!({"compaction": {"type": "summarize"}}),
            "compaction: compaction is not served here; ask for a summary in a message",
        ),
    ]);
}

#[expect(clippy::too_many_lines, reason = "a table of one row each")]
#[test]
fn messages_have_their_form() {
    check(&[
        (json!({"messages": null}), "messages: Field required"),
        (
            json!({"messages": {}}),
            "messages: Input should be a valid list",
        ),
        (
            json!({"messages": []}),
            "messages: at least one message is required",
        ),
        (
            json!({"messages": ["hi"]}),
            "messages.0: Input should be a valid dictionary",
        ),
        (
            json!({"messages": [{"content": "hi"}]}),
            "messages.0.role: Field required",
        ),
        (
            json!({"messages": [{"role": "tool", "content": "hi"}]}),
            "messages.0.role: Input should be 'user', 'assistant' or 'system'",
        ),
        (
            json!({"messages": [{"role": "user"}]}),
            "messages.0.content: Field required",
        ),
        (
            user(json!(5)),
            "messages.0.content: Input should be a valid string or a valid list",
        ),
        (
            user(json!("")),
            "messages.0.content: text content blocks must be non-empty",
        ),
        (
            user(json!(" \n")),
            "messages.0.content: text content blocks must contain non-whitespace text",
        ),
        (
            user(json!([])),
            "messages.0: user messages must have non-empty content",
        ),
        (
            user(json!([5])),
            "messages.0.content.0: Input should be a valid dictionary",
        ),
        (
            user(json!([{"text": "x"}])),
            "messages.0.content.0.type: Field required",
        ),
        (
            user(json!([{"type": "text"}])),
            "messages.0.content.0.text.text: Field required",
        ),
        (
            user(json!([{"type": "text", "text": ""}])),
            "messages.0.content.0: text content blocks must be non-empty",
        ),
        (
            user(json!([{"type": "txt", "text": "x"}])),
            "messages.0.content.0: Input tag 'txt' found using 'type' does not match any of the \
             expected tags: 'text', 'image', 'document', 'search_result', 'thinking', \
             'redacted_thinking', 'tool_use', 'tool_result', 'server_tool_use', \
             'web_search_tool_result'",
        ),
        (
            user(json!([{"type": "thinking", "thinking": "x", "signature": ""}])),
            "messages.0.content.0: `thinking` blocks can only be in `assistant` messages",
        ),
        (
            conversation(
                json!([{"role": "user", "content": "x"}, {"role": "system", "content": "y", "clear_at": "soon"}]),
            ),
            "messages.1.clear_at: Input should be 'next_user_message' or 'never'",
        ),
        (
            conversation(
                json!([{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]),
            ),
            "messages: This model does not support assistant message prefill. The conversation \
             must end with a user message.",
        ),
    ]);
}

#[expect(clippy::too_many_lines, reason = "a table of one row each")]
#[test]
fn calls_and_results_belong_together() {
    let ask = json!({"role": "user", "content": "x"});
    let call = json!({"type": "tool_use", "id": "t1", "name": "f", "input": {}});
    let calls = json!({"role": "assistant", "content": [call]});
    let result = |id: &str| json!({"type": "tool_result", "tool_use_id": id, "content": "r"});
    let answer = |blocks: Value| json!({"role": "user", "content": blocks});
    let with = |block: Value| {
        conversation(
            json!([ask, {"role": "assistant", "content": [block]}, answer(json!([result("t1")]))]),
        )
    };
    let unexpected = "messages.0.content.0: unexpected `tool_use_id` found in `tool_result` \
                      blocks: t1. Each `tool_result` block must have a corresponding `tool_use` \
                      block in the previous message.";
    let lonely = "messages.1: `tool_use` ids were found without `tool_result` blocks immediately \
                  after: t1. Each `tool_use` block must have a corresponding `tool_result` block \
                  in the next message.";
    check(&[
        (user(json!([result("t1")])), unexpected),
        (
            conversation(json!([
                ask,
                calls,
                answer(json!([result("t1"), result("t1")]))
            ])),
            "messages.2.content.1: each tool_use must have a single result. Found multiple \
             `tool_result` blocks with id: t1",
        ),
        (conversation(json!([ask, calls, ask])), lonely),
        (
            conversation(json!([ask, calls, ask, {"role": "assistant", "content": "y"}, ask])),
            lonely,
        ),
        (
            conversation(json!([ask, {"role": "assistant", "content": [call, call]}, ask])),
            "messages.1.content.1: `tool_use` ids must be unique",
        ),
        (
            user(json!([call])),
            "messages.0.content.0: `tool_use` blocks can only be in `assistant` messages",
        ),
        (
            conversation(json!([ask, {"role": "assistant", "content": [result("t1")]}, ask])),
            "messages.1.content.0: `tool_result` blocks can only be in `user` messages",
        ),
        (
            with(json!({"type": "tool_use", "name": "f", "input": {}})),
            "messages.1.content.0.tool_use.id: Field required",
        ),
        (
            with(json!({"type": "tool_use", "id": "", "name": "f", "input": {}})),
            "messages.1.content.0.tool_use.id: String should have at least 1 character",
        ),
        (
            with(json!({"type": "tool_use", "id": "t1", "input": {}})),
            "messages.1.content.0.tool_use.name: Field required",
        ),
        (
            with(json!({"type": "tool_use", "id": "t1", "name": "f"})),
            "messages.1.content.0.tool_use.input: Field required",
        ),
        (
            with(json!({"type": "tool_use", "id": "t1", "name": "f", "input": "{}"})),
            "messages.1.content.0.tool_use.input: Input should be a valid dictionary",
        ),
        (
            conversation(json!([
                ask,
                calls,
                answer(json!([{"type": "tool_result", "content": ""}]))
            ])),
            "messages.2.content.0.tool_result.tool_use_id: Field required",
        ),
        (
            conversation(json!([
                ask,
                calls,
                answer(json!([{"type": "tool_result", "tool_use_id": "t1", "content": 5}]))
            ])),
            "messages.2.content.0.tool_result.content: Input should be a valid list",
        ),
        (
            conversation(json!([
                ask,
                calls,
                answer(json!([{"type": "tool_result", "tool_use_id": "t1", "is_error": "no"}]))
            ])),
            "messages.2.content.0.tool_result.is_error: Input should be a valid boolean",
        ),
        (
            conversation(json!([
                ask,
                calls,
                answer(
                    json!([{"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text"}]}])
                )
            ])),
            "messages.2.content.0.tool_result.content.0.text.text: Field required",
        ),
    ]);
}

#[test]
fn what_cannot_be_seen_is_refused() {
    let image = |source: Value| user(json!([{"type": "image", "source": source}]));
    let base64 =
        |kind: &str, data: &str| image(json!({"type": "base64", "media_type": kind, "data": data}));
    let blind = "messages.0.content.0.image: this model cannot see images; send text instead";
    let unread = "messages.0.content.0.document: this model reads no files; send the document's \
                  text with a source of type 'text'";
    let rubbish = "messages.0.content.0.image.source.base64.data: invalid base64 data";
    let picture = json!({"type": "image", "source": {"type": "url", "url": "https://a.example/b"}});
    check(&[
        (base64("image/png", "iVBORw0KGgo="), blind),
        (base64("image/png", "not base64!!"), rubbish),
        (base64("image/png", "abc"), rubbish),
        (base64("image/png", "a==="), rubbish),
        (base64("image/png", ""), rubbish),
        (
            base64("image/tiff", "iVBORw0KGgo="),
            "messages.0.content.0.image.source.base64.media_type: Input should be 'image/jpeg' or \
             'image/png' or 'image/gif' or 'image/webp'",
        ),
        (
            image(json!({"type": "url", "url": "https://a.example/b"})),
            blind,
        ),
        (image(json!({"type": "file", "file_id": "f"})), blind),
        (
            image(json!({"type": "url"})),
            "messages.0.content.0.image.source.url.url: Field required",
        ),
        (
            image(json!({"type": "ftp"})),
            "messages.0.content.0.image.source: Input tag 'ftp' found using 'type' does not match \
             any of the expected tags: 'base64', 'url', 'file'",
        ),
        (
            user(json!([{"type": "image"}])),
            "messages.0.content.0.image.source: Field required",
        ),
        (
            user(json!([{"type": "document", "source":
                {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0="}}])),
            unread,
        ),
        (
            user(json!([{"type": "document", "source":
                {"type": "content", "content": [picture]}}])),
            "messages.0.content.0.document.source.content.content.0.image: this model cannot see \
             images; send text instead",
        ),
        (
            conversation(json!([{"role": "user", "content": "x"},
                {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {}}]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": [picture]}]}])),
            "messages.2.content.0.tool_result.content.0.image: this model cannot see images; send \
             text instead",
        ),
    ]);
}

#[test]
fn broken_json_is_told_where_it_breaks() {
    for (body, expected) in [
        ("", "The request body is not a valid JSON object: "),
        ("[]", "The request body is not a valid JSON object: "),
        (
            "{\"model\":\"m\"",
            "The request body is not a valid JSON object: ",
        ),
        (
            "{\"model\":\"m\",\"model\":\"n\"}",
            "The field 'model' appears twice",
        ),
        (
            r#"{"model":"m","max_tokens":1,"messages":[{"role":"user","content":"\ud83d"}]}"#,
            "messages: The request body is not valid JSON: ",
        ),
        (
            r#"{"model":"\ud83d","max_tokens":1,"messages":[{"role":"user","content":"x"}]}"#,
            "model: The request body is not valid JSON: ",
        ),
    ] {
        let told = refusal(body.as_bytes());
        assert!(told.starts_with(expected), "{body}: {told}");
    }
    for depth in [200, 100_000] {
        let deep = format!("{}{}", "[".repeat(depth), "]".repeat(depth));
        let body = format!(
            r#"{{"model":"m","max_tokens":1,"messages":[{{"role":"user","content":{deep}}}]}}"#
        );
        let told = refusal(body.as_bytes());
        assert!(told.contains("recursion limit exceeded"), "{depth}: {told}");
    }
}

#[test]
fn the_largest_requests_are_read() {
    // A generous bound: a reader that is quadratic in tools, calls or bytes takes minutes.
    let begun = Instant::now();
    let tools: Vec<Value> = (0..10_000)
        .map(|at| json!({"name": format!("tool_{at}"), "input_schema": {"type": "object"}}))
        .collect();
    let body = request(&json!({"tools": tools})).to_string();
    let (prompt, _) = read(body.as_bytes()).expect("many tools are the node's to refuse");
    assert_eq!(
        prompt
            .tools
            .and_then(|tools| tools.as_array().map(Vec::len)),
        Some(10_000)
    );
    let body = request(&user(json!("é".repeat(5 << 19)))).to_string();
    let (prompt, _) = read(body.as_bytes()).expect("one large message");
    assert_eq!(
        prompt.messages[0]["content"].as_str().map(str::len),
        Some(5 << 20)
    );
    let calls: Vec<Value> = (0..10_000)
        .map(|at| json!({"type": "tool_use", "id": format!("t{at}"), "name": "f", "input": {}}))
        .collect();
    let results: Vec<Value> = (0..10_000)
        .rev()
        .map(|at| json!({"type": "tool_result", "tool_use_id": format!("t{at}")}))
        .collect();
    let body = request(&conversation(json!([
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": calls},
        {"role": "user", "content": results},
    ])));
    let (prompt, _) = read(body.to_string().as_bytes()).expect("many calls");
    assert_eq!(prompt.messages.len(), 10_002);
    let took = begun.elapsed();
    assert!(took.as_secs() < 20, "{took:?}");
}
