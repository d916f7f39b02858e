//! Catches a stored turn that cannot be continued: items lost, ids that lead nowhere, another
//! prompt than the one that was answered.

use std::collections::HashSet;

use dialects::answer::{Continues, Usage};
use dialects::error::{ApiError, ErrorKind};
use dialects::{Fields, responses};
use serde_json::{Value, json};

use crate::support::{RESPONSE, ask, ask_after, chunk, completion, end, events, ids, stream};

fn answered(body: &Value, message: &Value) -> (Value, dialects::answer::Stored) {
    let mut translation = ask(body).translation;
    let whole = translation
        .whole(&completion(message, "stop"), &end())
        .expect("sound");
    let whole = serde_json::from_slice(&whole).expect("JSON");
    (whole, translation.stored().expect("kept"))
}

#[test]
fn a_turn_is_kept_as_the_api_lists_it() {
    let input = json!([
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "Hello."},
        {"type": "message", "id": "msg_theirs", "role": "user", "content": [{"type": "input_text", "text": "bye"}]},
    ]);
    let body = json!({"model": "m", "input": input, "previous_response_id": "resp_1"});
    let mut translation = ask(&body).translation;
    stream(
        translation.as_mut(),
        &[chunk(&json!({"content": "Bye."}), Some("stop"))],
    );
    let stored = translation.stored().expect("kept");
    assert_eq!(stored.id, RESPONSE);
    assert_eq!(
        stored.continues,
        Some(Continues::Response("resp_1".to_owned()))
    );
    assert_eq!(stored.response["status"], "completed");
    assert_eq!(
        stored.response["output"],
        Value::from(stored.output.clone())
    );
    assert_eq!(stored.output[0]["content"][0]["text"], "Bye.");
    let texts: Vec<_> = stored
        .input
        .iter()
        .map(|item| item["content"][0].clone())
        .collect();
    assert_eq!(
        texts,
        [
            json!({"type": "input_text", "text": "hi"}),
            json!({"type": "output_text", "annotations": [], "text": "Hello."}),
            json!({"type": "input_text", "text": "bye"}),
        ]
    );
    assert_ne!(stored.input[2]["id"], "msg_theirs", "another may have it");
    let all = stored.input.iter().chain(&stored.output);
    let different: HashSet<_> = all.map(|item| item["id"].as_str()).collect();
    assert_eq!(different.len(), stored.input.len() + stored.output.len());
    for item in stored.input.iter().take(2).chain(&stored.output) {
        assert_eq!(item["status"], "completed");
        let id = item["id"].as_str().expect("an id");
        assert_eq!(
            responses::response_of(id).as_deref(),
            Some(RESPONSE),
            "{id}"
        );
    }
    for foreign in [
        "msg_00000000-0000-4000-8000-000000000005",
        "msg_theirs",
        "",
        "_",
        "fc_12",
        "msg_ü123456789012345678901234",
    ] {
        assert_eq!(responses::response_of(foreign), None, "{foreign}");
    }
}

#[test]
fn what_is_not_to_be_stored_is_not_kept() {
    let body = json!({"model": "m", "input": "hi", "store": false}).to_string();
    let request =
        || responses::parse(Fields::parse(body.as_bytes()).expect("JSON")).expect("sound");
    let answer = completion(&json!({"content": "x"}), "stop");
    assert!(!request().stores());
    let (_, mut translation) = request().turn(Vec::new(), ids()).expect("sound");
    translation.whole(&answer, &end()).expect("sound");
    assert!(translation.stored().is_none());
    let mut kept = request();
    kept.keep();
    let (_, mut translation) = kept.turn(Vec::new(), ids()).expect("sound");
    translation.whole(&answer, &end()).expect("sound");
    assert_eq!(translation.stored().expect("kept").response["store"], false);
}

#[test]
fn items_are_found_by_the_ids_that_clients_were_told() {
    let tools = json!([{"type": "function", "name": "f"}]);
    let first = json!({"model": "m", "input": "Weather?", "tools": tools});
    let message = json!({"role": "assistant", "content": "Let me see.", "reasoning_content": "hm", "tool_calls": [
        {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]});
    let (whole, stored) = answered(&first, &message);
    let output = whole["output"].as_array().expect("items");
    let mut input = vec![json!({"role": "user", "content": "Weather?"})];
    input.extend(
        output
            .iter()
            .map(|item| json!({"type": "item_reference", "id": item["id"]})),
    );
    input.push(json!({"type": "function_call_output", "call_id": "c1", "output": "sunny"}));
    let by_reference = json!({"model": "m", "input": input, "tools": tools}).to_string();
    let mut spelled = vec![json!({"role": "user", "content": "Weather?"})];
    spelled.extend(output.iter().cloned());
    spelled.push(input.last().expect("items").clone());
    let spelled = ask(&json!({"model": "m", "input": spelled, "tools": tools}));

    let mut request =
        responses::parse(Fields::parse(by_reference.as_bytes()).expect("JSON")).expect("sound");
    let references = request.references();
    assert_eq!(references.len(), output.len());
    request.resolve(&stored.output);
    let (turn, _) = request.turn(Vec::new(), ids()).expect("resolved");
    let dialects::PromptInput::Chat(prompt) = turn.prompt else {
        panic!("a chat prompt");
    };
    assert_eq!(prompt, spelled.prompt);

    // The same by what was answered before.
    let body = json!({"model": "m", "previous_response_id": RESPONSE, "tools": tools,
        "input": [{"id": output[0]["id"]}, {"type": "function_call_output", "call_id": "c1", "output": "sunny"}]});
    let history = [stored.input.clone(), stored.output.clone()].concat();
    let continued = ask_after(history, &body.to_string()).expect("sound");
    assert_eq!(continued.prompt, spelled.prompt);

    let error = ask_after(Vec::new(), &by_reference)
        .err()
        .expect("unresolved");
    assert_eq!(error.kind.status(), 404);
    assert!(
        error
            .message
            .contains("Items are not persisted when `store` is set to false.")
    );
}

#[test]
fn conversations_take_the_same_items() {
    let seed = "fedcba9876543210fedcba9876543210";
    let items = vec![
        json!({"role": "user", "content": "hi"}),
        json!({"type": "web_search_call", "id": "ws_1"}),
        json!({"role": "assistant", "content": "ho", "id": format!("msg_{seed}0000001")}),
    ];
    let ours = items[2]["id"].clone();
    let kept = responses::kept_items(items, seed).expect("sound");
    assert_eq!(kept[0]["content"][0]["text"], "hi");
    assert_ne!(kept[1]["id"], "ws_1");
    assert_eq!(kept[2]["id"], ours);
    let id = kept[0]["id"].as_str().expect("an id");
    assert!(id.starts_with("msg_fedcba"), "{id}");
    let error = responses::kept_items(vec![json!({"role": "user"})], seed).expect_err("no content");
    assert_eq!(error.param.as_deref(), Some("items[0].content"));
    let fields = Fields::parse(br#"{"metadata":{"a":"b"}}"#).expect("JSON");
    assert_eq!(responses::metadata(&fields).expect("sound")["a"], "b");
}

#[test]
fn a_cancelled_answer_is_kept_as_far_as_it_came() {
    let mut translation = ask(&json!({"model": "m", "input": "hi"})).translation;
    let mut out = Vec::new();
    translation
        .chunk(&chunk(&json!({"content": "Hel"}), None), &mut out)
        .expect("sound");
    let so_far = Usage {
        input: 3,
        output: 1,
        ..Usage::default()
    };
    translation.cancel(so_far, &mut out);
    let told = events(&out);
    let (_, last) = told.last().expect("events");
    assert_eq!(last["response"]["status"], "cancelled");
    assert_eq!(last["response"]["usage"]["total_tokens"], 4);
    let stored = translation.stored().expect("kept");
    assert_eq!(stored.output[0]["status"], "incomplete");
    assert_eq!(stored.output[0]["content"][0]["text"], "Hel");
}

#[test]
fn a_failure_tells_what_was_used() {
    let mut translation = ask(&json!({"model": "m", "input": "hi", "stream": true})).translation;
    let mut out = Vec::new();
    translation
        .chunk(&chunk(&json!({"content": "Hel"}), None), &mut out)
        .expect("sound");
    let error = ApiError::new(ErrorKind::NodeFailed, "The node broke.");
    translation.fail(
        &error,
        Usage {
            input: 3,
            output: 1,
            ..Usage::default()
        },
        &mut out,
    );
    let told = events(&out);
    let [.., (first, error), (second, failed)] = told.as_slice() else {
        panic!("two events at least");
    };
    assert_eq!(
        (first.as_str(), second.as_str()),
        ("error", "response.failed")
    );
    assert_eq!(error["message"], "The node broke.");
    assert_eq!(error["code"], "node_failed");
    assert_eq!(failed["response"]["status"], "failed");
    assert_eq!(
        failed["response"]["error"],
        json!({"code": "server_error", "message": "The node broke."})
    );
    assert_eq!(failed["response"]["usage"]["total_tokens"], 4);
}
