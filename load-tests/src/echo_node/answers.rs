//! How does the same answer look in each dialect?
//!
//! Bodies and streams with the fields and events that the dialects' clients read. A stream's head
//! is written with its first word and its tail as one, so that a pause before each write falls
//! between words alone.

use serde_json::{Value, json};

/// Every token is this.
const WORD: &str = "word ";

/// What the node was asked in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Form {
    Chat,
    Text,
    Messages,
    Responses,
}

impl Form {
    /// The form that a path speaks.
    pub(super) fn at(path: &str) -> Option<Self> {
        match path {
            "/v1/chat/completions" => Some(Self::Chat),
            "/v1/completions" => Some(Self::Text),
            "/v1/messages" => Some(Self::Messages),
            "/v1/responses" => Some(Self::Responses),
            _ => None,
        }
    }
}

/// Where a chat stream reports its usage; the other dialects decide that themselves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StreamUsage {
    None,
    /// In a chunk of its own at the end.
    Last,
    /// In every chunk.
    Always,
}

/// An answer to come.
pub(super) struct Answer<'a> {
    pub(super) form: Form,
    pub(super) model: &'a str,
    pub(super) tokens: usize,
    /// Whether the client's limit ended it.
    pub(super) is_cut: bool,
    pub(super) prompt_tokens: u64,
}

impl Answer<'_> {
    /// The body of an answer that is not streamed.
    pub(super) fn whole(&self) -> Value {
        let text = WORD.repeat(self.tokens);
        let reason = self.chat_reason();
        match self.form {
            Form::Chat => self.completion(
                "chat.completion",
                &json!([{"index": 0, "finish_reason": reason,
                         "message": {"role": "assistant", "content": text}}]),
                &self.chat_usage(self.tokens),
            ),
            Form::Text => self.completion(
                "text_completion",
                &json!([{"index": 0, "finish_reason": reason, "text": text}]),
                &self.chat_usage(self.tokens),
            ),
            Form::Messages => self.message(
                &json!([{"type": "text", "text": text}]),
                &json!(self.stop_reason()),
                self.tokens,
            ),
            Form::Responses => self.response(self.status(), &[self.item("completed", &text)]),
        }
    }

    /// The strings that a stream writes one after another.
    pub(super) fn events(&self, usage: StreamUsage) -> Vec<String> {
        let (head, word, tail) = match self.form {
            Form::Chat | Form::Text => self.chunks(usage),
            Form::Messages => self.message_events(),
            Form::Responses => self.response_events(),
        };
        let mut writes = vec![word; self.tokens];
        match writes.first_mut() {
            Some(first) => first.insert_str(0, &head),
            None => writes.push(head),
        }
        writes.push(tail);
        writes
    }

    fn completion(&self, object: &str, choices: &Value, usage: &Value) -> Value {
        json!({"id": "echo", "object": object, "created": 0, "model": self.model,
               "choices": choices, "usage": usage})
    }

    fn chat_usage(&self, tokens: usize) -> Value {
        json!({"prompt_tokens": self.prompt_tokens, "completion_tokens": tokens,
               "total_tokens": self.prompt_tokens + tokens as u64,
               "prompt_tokens_details": {"cached_tokens": 0}})
    }

    fn chat_reason(&self) -> &'static str {
        if self.is_cut { "length" } else { "stop" }
    }

    fn chunks(&self, usage: StreamUsage) -> (String, String, String) {
        let each = match usage {
            StreamUsage::Always => self.chat_usage(self.tokens),
            StreamUsage::None | StreamUsage::Last => Value::Null,
        };
        let object = match self.form {
            Form::Text => "text_completion",
            _ => "chat.completion.chunk",
        };
        let chunk = |choices: &Value, usage: &Value| {
            format!("data: {}\n\n", self.completion(object, choices, usage))
        };
        let choice = |text: &str, reason: Option<&str>| match self.form {
            Form::Text => json!([{"index": 0, "text": text, "finish_reason": reason}]),
            _ => json!([{"index": 0, "delta": {"content": text}, "finish_reason": reason}]),
        };
        let head = match self.form {
            Form::Text => String::new(),
            _ => chunk(
                &json!([{"index": 0, "delta": {"role": "assistant", "content": ""},
                         "finish_reason": null}]),
                &each,
            ),
        };
        let mut tail = chunk(&choice("", Some(self.chat_reason())), &each);
        if usage != StreamUsage::None {
            tail += &chunk(&json!([]), &self.chat_usage(self.tokens));
        }
        tail += "data: [DONE]\n\n";
        (head, chunk(&choice(WORD, None), &each), tail)
    }

    fn stop_reason(&self) -> &'static str {
        if self.is_cut {
            "max_tokens"
        } else {
            "end_turn"
        }
    }

    fn message(&self, content: &Value, stop_reason: &Value, tokens: usize) -> Value {
        json!({"id": "msg_echo", "type": "message", "role": "assistant", "model": self.model,
               "content": content, "stop_reason": stop_reason, "stop_sequence": null,
               "usage": self.message_usage(tokens)})
    }

    fn message_usage(&self, tokens: usize) -> Value {
        json!({"input_tokens": self.prompt_tokens, "cache_read_input_tokens": 0,
               "cache_creation_input_tokens": 0, "output_tokens": tokens})
    }

    fn message_events(&self) -> (String, String, String) {
        let head = typed(json!({"type": "message_start",
                                "message": self.message(&json!([]), &Value::Null, 0)}))
            + &typed(json!({"type": "content_block_start", "index": 0,
                            "content_block": {"type": "text", "text": ""}}));
        let word = typed(json!({"type": "content_block_delta", "index": 0,
                                "delta": {"type": "text_delta", "text": WORD}}));
        let delta = json!({"stop_reason": self.stop_reason(), "stop_sequence": null});
        let tail = typed(json!({"type": "content_block_stop", "index": 0}))
            + &typed(json!({"type": "message_delta", "delta": delta,
                            "usage": self.message_usage(self.tokens)}))
            + &typed(json!({"type": "message_stop"}));
        (head, word, tail)
    }

    fn status(&self) -> &'static str {
        if self.is_cut {
            "incomplete"
        } else {
            "completed"
        }
    }

    fn item(&self, status: &str, text: &str) -> Value {
        let content = if text.is_empty() {
            json!([])
        } else {
            json!([output_text(text)])
        };
        json!({"id": "msg_echo", "type": "message", "role": "assistant", "status": status,
               "content": content})
    }

    fn response(&self, status: &str, output: &[Value]) -> Value {
        let usage = match status {
            "in_progress" => Value::Null,
            _ => json!({"input_tokens": self.prompt_tokens,
                        "input_tokens_details": {"cached_tokens": 0},
                        "output_tokens": self.tokens,
                        "output_tokens_details": {"reasoning_tokens": 0},
                        "total_tokens": self.prompt_tokens + self.tokens as u64}),
        };
        let incomplete = match status {
            "incomplete" => json!({"reason": "max_output_tokens"}),
            _ => Value::Null,
        };
        json!({"id": "resp_echo", "object": "response", "created_at": 0, "model": self.model,
               "status": status, "error": null, "incomplete_details": incomplete,
               "output": output, "parallel_tool_calls": true, "tool_choice": "auto",
               "tools": [], "usage": usage})
    }

    fn response_events(&self) -> (String, String, String) {
        let text = WORD.repeat(self.tokens);
        let begun = self.response("in_progress", &[]);
        let place = |kind: &str, more: Value| {
            let mut event = json!({"type": kind, "sequence_number": 0, "item_id": "msg_echo",
                                   "output_index": 0, "content_index": 0});
            if let (Some(event), Value::Object(more)) = (event.as_object_mut(), more) {
                event.extend(more);
            }
            typed(event)
        };
        let head = typed(json!({"type": "response.created", "response": begun}))
            + &typed(json!({"type": "response.in_progress", "response": begun}))
            + &place(
                "response.output_item.added",
                json!({"item": self.item("in_progress", "")}),
            )
            + &place(
                "response.content_part.added",
                json!({"part": output_text("")}),
            );
        let word = place("response.output_text.delta", json!({"delta": WORD}));
        let item = self.item("completed", &text);
        let last = match self.status() {
            "incomplete" => "response.incomplete",
            _ => "response.completed",
        };
        let tail = place("response.output_text.done", json!({"text": text}))
            + &place(
                "response.content_part.done",
                json!({"part": output_text(&text)}),
            )
            + &place("response.output_item.done", json!({"item": item}))
            + &typed(json!({"type": last,
                            "response": self.response(self.status(), std::slice::from_ref(&item))}));
        (head, word, tail)
    }
}

fn output_text(text: &str) -> Value {
    json!({"type": "output_text", "text": text, "annotations": []})
}

/// An event with its name on a line of its own, as Anthropic's clients and OpenAI's newer ones want.
fn typed(event: Value) -> String {
    let name = event["type"].as_str().unwrap_or_default().to_owned();
    format!("event: {name}\ndata: {event}\n\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sse::Events;

    /// Catches a stream whose words are not the whole answer's, and a head that waits alone.
    #[test]
    fn a_stream_says_what_the_whole_answer_says() {
        let check = |form: Form, word: &str, last: &str, whole: &str| {
            let answer = Answer {
                form,
                model: "m",
                tokens: 3,
                is_cut: false,
                prompt_tokens: 9,
            };
            let writes = answer.events(StreamUsage::Last);
            assert_eq!(writes.len(), 4, "{form:?}");
            let words = |write: &String| write.matches(word).count();
            assert_eq!(writes[..3].iter().map(words).collect::<Vec<_>>(), [1, 1, 1]);
            let events = Events::default()
                .push(writes.concat().as_bytes())
                .expect("a stream");
            assert!(
                events.last().is_some_and(|e| e.contains(last)),
                "{events:?}"
            );
            let body = answer.whole();
            let text = body.pointer(whole).and_then(Value::as_str);
            assert_eq!(text, Some("word word word "), "{body}");
        };
        check(
            Form::Chat,
            r#""content":"word ""#,
            "[DONE]",
            "/choices/0/message/content",
        );
        check(Form::Text, r#""text":"word ""#, "[DONE]", "/choices/0/text");
        check(
            Form::Messages,
            r#""text":"word ""#,
            "message_stop",
            "/content/0/text",
        );
        check(
            Form::Responses,
            r#""delta":"word ""#,
            "response.completed",
            "/output/0/content/0/text",
        );
    }
}
