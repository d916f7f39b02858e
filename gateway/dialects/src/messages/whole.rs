//! How does a whole answer become a message?
//!
//! The same blocks as a stream's, in one object; the tests feed both and compare.

use serde_json::{Map, Value, json};

use super::answer::{Answer, Finish, Shown, message_id, usage_value};
use super::blocks::{INVALID_JSON, SIGNATURE, UNSEEN};
use super::chunk::{Completion, Message, WholeCall};
use crate::answer::{End, Malformed};

/// The message of a `chat.completion`.
pub(super) fn message(answer: &Answer, json: &[u8], end: &End) -> Result<Vec<u8>, Malformed> {
    let completion: Completion =
        serde_json::from_slice(json).map_err(|error| Malformed(error.to_string()))?;
    let id = message_id(completion.id.as_deref());
    let choice = completion.choices.into_iter().next();
    let choice = choice.ok_or_else(|| Malformed("it has no choices".to_owned()))?;
    let mut content = Vec::new();
    let met = choice.stop_reason.or(choice.matched_stop);
    let reason = choice.finish_reason.as_deref().unwrap_or("stop");
    let finish = match answer.shown {
        Shown::Nothing => Finish {
            reason: "max_tokens",
            stop: None,
        },
        shown => {
            let has_called = blocks(choice.message, shown, &id, &mut content);
            Finish::new(reason, met, &answer.stops).after(has_called)
        }
    };
    let mut usage = usage_value(&end.usage);
    usage["service_tier"] = "standard".into();
    let mut message = json!({
        "id": id, "type": "message", "role": "assistant", "model": answer.model,
        "content": Value::Null, "stop_reason": finish.reason, "stop_sequence": finish.stop,
        "usage": usage,
    });
    message["content"] = Value::Array(content);
    if finish.reason == "refusal" {
        message["stop_details"] = refusal();
    }
    if let Some(homing) = &end.homing {
        message["homing"] = homing.clone();
    }
    serde_json::to_vec(&message).map_err(|error| Malformed(error.to_string()))
}

/// What is known of a refusal.
pub(super) fn refusal() -> Value {
    json!({"type": "refusal", "category": null, "explanation": null})
}

/// The content's blocks; true if there are calls among them.
fn blocks(message: Message, shown: Shown, id: &str, content: &mut Vec<Value>) -> bool {
    let reasoning = message.reasoning_content.or(message.reasoning);
    if let Some(thinking) = reasoning.filter(|thinking| !thinking.is_empty()) {
        let (thinking, signature) = match shown {
            Shown::UnseenThinking => (String::new(), format!("{UNSEEN}{thinking}")),
            _ => (thinking, SIGNATURE.to_owned()),
        };
        if shown != Shown::NoThinking {
            content.push(json!({"type": "thinking", "thinking": thinking, "signature": signature}));
        }
    }
    let texts = [message.content, message.refusal];
    let text: String = texts.into_iter().flatten().collect();
    if !text.trim().is_empty() {
        content.push(json!({"type": "text", "text": text}));
    }
    let calls = message.tool_calls.unwrap_or_default();
    let has_called = !calls.is_empty();
    for (at, call) in calls.into_iter().enumerate() {
        content.push(tool_use(call, id, at));
    }
    has_called
}

fn tool_use(call: WholeCall, answer: &str, at: usize) -> Value {
    let id = call.id.filter(|id| !id.is_empty());
    let id = id.unwrap_or_else(|| format!("call_{answer}_{at}"));
    let input = input(call.function.arguments.unwrap_or_default());
    json!({"type": "tool_use", "id": id, "name": call.function.name, "input": input})
}

/// A call's input, from its arguments' text.
fn input(arguments: String) -> Value {
    if arguments.is_empty() {
        return Value::Object(Map::new());
    }
    match serde_json::from_str(&arguments) {
        Ok(input @ Value::Object(_)) => input,
        _ => json!({INVALID_JSON: arguments}),
    }
}
