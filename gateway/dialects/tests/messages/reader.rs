//! Reads a stream as the SDKs do: events in their order, deltas added to the block that their index
//! names. Panics where the order is not the API's.

use serde_json::{Value, json};

/// The events of a stream: each one an `event` line and a `data` line with its JSON.
pub(crate) fn events(stream: &[u8]) -> Vec<(String, Value)> {
    let text = std::str::from_utf8(stream).expect("UTF-8");
    let event = |block: &str| {
        let (name, data) = block.split_once('\n').expect("two lines");
        let name = name.strip_prefix("event: ").expect("an event line");
        let data = data.strip_prefix("data: ").expect("a data line");
        let data: Value = serde_json::from_str(data).expect("JSON");
        assert_eq!(data["type"], name);
        (name.to_owned(), data)
    };
    assert!(text.is_empty() || text.ends_with("\n\n"), "{text}");
    let blocks = text.split_terminator("\n\n");
    blocks.map(event).collect()
}

/// The message that a stream adds up to; panics where the order is not the API's.
pub(crate) fn message(stream: &[u8]) -> Value {
    let events = events(stream);
    let (first, rest) = events.split_first().expect("events");
    assert_eq!(first.0, "message_start");
    let mut message = first.1["message"].clone();
    assert_eq!(message["content"], json!([]));
    assert_eq!(message["stop_reason"], Value::Null);
    let mut arguments = String::new();
    let mut is_open = false;
    let mut is_over = false;
    for (name, data) in rest {
        assert!(!is_over, "{name} after the message's end");
        let blocks = message["content"].as_array_mut().expect("a list");
        match name.as_str() {
            "content_block_start" => {
                assert!(!is_open, "one block at a time");
                assert_eq!(data["index"], blocks.len());
                blocks.push(data["content_block"].clone());
                is_open = true;
                arguments.clear();
            }
            "content_block_delta" => {
                assert!(is_open, "deltas are of an open block");
                assert_eq!(data["index"], blocks.len() - 1);
                let block = blocks.last_mut().expect("a block");
                add(block, &data["delta"], &mut arguments);
            }
            "content_block_stop" => {
                assert!(is_open, "only an open block is closed");
                assert_eq!(data["index"], blocks.len() - 1);
                let block = blocks.last_mut().expect("a block");
                if block["type"] == "tool_use" && !arguments.is_empty() {
                    block["input"] = match serde_json::from_str(&arguments) {
                        Ok(Value::Object(input)) => Value::Object(input),
                        _ => json!({"INVALID_JSON": arguments}),
                    };
                }
                is_open = false;
            }
            "message_delta" => {
                assert!(!is_open, "all blocks are closed before the end");
                for (name, value) in data["delta"].as_object().expect("an object") {
                    message[name] = value.clone();
                }
                message["usage"] = data["usage"].clone();
            }
            "message_stop" => is_over = true,
            other => panic!("{other}"),
        }
    }
    assert!(is_over, "the message ends");
    message
}

fn add(block: &mut Value, delta: &Value, arguments: &mut String) {
    let kind = delta["type"].as_str().expect("a type");
    let (name, of) = match kind {
        "thinking_delta" => ("thinking", "thinking"),
        "signature_delta" => ("signature", "thinking"),
        "text_delta" => ("text", "text"),
        "input_json_delta" => ("partial_json", "tool_use"),
        other => panic!("{other}"),
    };
    assert_eq!(block["type"], of);
    let said = delta[name].as_str().expect("text");
    if of == "tool_use" {
        arguments.push_str(said);
    } else {
        let all = format!("{}{said}", block[name].as_str().expect("text"));
        block[name] = all.into();
    }
}
