//! What does a whole answer look like?

use serde_json::{Value, json};

use super::logprobs::Offset;
use super::{Shape, usage_value};
use crate::engine::Usage;
use crate::request::Dialect;
use crate::server::message::{Call, Message};

impl Shape {
    /// The whole answer.
    pub(in crate::server) fn whole(&self, messages: &[Message], usage: &Usage) -> Value {
        let choices = messages
            .iter()
            .enumerate()
            .map(|(index, message)| self.choice(index, message));
        let object = match self.dialect {
            Dialect::Chat => "chat.completion",
            Dialect::Completions => "text_completion",
        };
        json!({
            "id": self.id, "object": object, "created": self.created,
            "model": &*self.served.model_id, "choices": choices.collect::<Vec<_>>(),
            "usage": usage_value(usage),
        })
    }

    fn choice(&self, index: usize, message: &Message) -> Value {
        let logprobs = match self.logprobs {
            true => self.logprobs_value(&message.tokens, &mut Offset::default()),
            false => Value::Null,
        };
        let finish = message.finish.unwrap_or("stop");
        let mut choice = match self.dialect {
            Dialect::Chat => json!({
                "index": index, "message": chat_message(message), "logprobs": logprobs,
                "finish_reason": finish,
            }),
            Dialect::Completions => json!({
                "index": index, "text": format!("{}{}", self.echo, message.content),
                "logprobs": logprobs, "finish_reason": finish,
            }),
        };
        if let Some(stop) = &message.stop {
            choice["stop_reason"] = json!(stop);
        }
        if self.token_ids {
            choice["token_ids"] = message.tokens.iter().map(|token| token.id).collect();
        }
        choice
    }
}

fn chat_message(message: &Message) -> Value {
    let only_calls = !message.calls.is_empty() && message.content.trim().is_empty();
    let content = if only_calls {
        Value::Null
    } else {
        json!(message.content)
    };
    let mut value = json!({"role": "assistant", "content": content, "refusal": null});
    if !message.reasoning.is_empty() {
        value["reasoning_content"] = json!(message.reasoning);
    }
    if !message.calls.is_empty() {
        value["tool_calls"] = message.calls.iter().map(call).collect();
    }
    value
}

fn call(call: &Call) -> Value {
    json!({
        "id": call.id, "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    })
}
