//! Which conversation is this, where the client does not say?
//!
//! A hash of the conversation's stable beginning: all messages up to the first one from the user.
//! It has to be taken after the prompt was normalised, or a client's spelling makes it another.

use serde_json::Value;

use crate::turn::PromptInput;

/// A completion prompt's beginning that identifies it: about a paragraph, so that prompts which
/// grow at their end stay one session.
const TEXT_BYTES: usize = 1024;
/// Of a text longer than two of these, only so many bytes at both ends are hashed: all of a 64 KB
/// system prompt would cost a tenth of the request, and prompts of equal length that differ in
/// their middle only share a binding, which is no more than a hint.
const TEXT_END_BYTES: usize = 512;

/// The fingerprint of a conversation.
pub fn fingerprint(prompt: &PromptInput) -> u64 {
    let mut hasher = blake3::Hasher::new();
    match prompt {
        PromptInput::Text(text) => {
            hasher.update(&text.as_bytes()[..text.len().min(TEXT_BYTES)]);
        }
        // No conversation; all of a tenant's are one session.
        PromptInput::Vectors { .. } => {}
        PromptInput::Chat(chat) => {
            for message in &chat.messages {
                feed(&mut hasher, message);
                if message.get("role").is_some_and(|role| role == "user") {
                    break;
                }
            }
        }
    }
    let [a, b, c, d, e, f, g, h, ..] = *hasher.finalize().as_bytes();
    u64::from_be_bytes([a, b, c, d, e, f, g, h])
}

/// Feeds a value without writing it out first; a tag before each part keeps shapes apart.
fn feed(hasher: &mut blake3::Hasher, value: &Value) {
    match value {
        Value::Null => hasher.update(b"n"),
        Value::Bool(yes) => hasher.update(if *yes { b"t" } else { b"f" }),
        Value::Number(number) => hasher.update(b"#").update(number.to_string().as_bytes()),
        Value::String(text) => feed_text(hasher, text.as_bytes()),
        Value::Array(items) => {
            hasher.update(b"[");
            items.iter().for_each(|item| feed(hasher, item));
            hasher.update(b"]")
        }
        Value::Object(fields) => {
            hasher.update(b"{");
            for (name, field) in fields {
                hasher
                    .update(&(name.len() as u64).to_le_bytes())
                    .update(name.as_bytes());
                feed(hasher, field);
            }
            hasher.update(b"}")
        }
    };
}

/// Feeds a text: its length, and of a long one only both ends.
fn feed_text<'a>(hasher: &'a mut blake3::Hasher, text: &[u8]) -> &'a mut blake3::Hasher {
    hasher
        .update(b"s")
        .update(&(text.len() as u64).to_le_bytes());
    if text.len() <= 2 * TEXT_END_BYTES {
        return hasher.update(text);
    }
    hasher
        .update(&text[..TEXT_END_BYTES])
        .update(&text[text.len() - TEXT_END_BYTES..])
}

#[cfg(test)]
mod tests {
    //! Catches a conversation whose fingerprint changes as it grows, and two that share one.
    use super::*;
    use crate::turn::ChatPrompt;
    use serde_json::json;

    fn of(messages: Value) -> u64 {
        let Value::Array(messages) = messages else {
            panic!("messages are an array")
        };
        let prompt = ChatPrompt {
            messages: messages.into_iter().map(Into::into).collect(),
            ..ChatPrompt::default()
        };
        fingerprint(&PromptInput::Chat(prompt))
    }

    #[test]
    fn the_beginning_identifies_a_conversation() {
        let system = json!({"role": "system", "content": "s"});
        let user = |text: &str| json!({"role": "user", "content": text});
        let answer = json!({"role": "assistant", "content": "a"});
        let first = of(json!([system, user("hi")]));
        assert_eq!(of(json!([system, user("hi"), answer, user("ho")])), first);
        assert_ne!(of(json!([system, user("ho")])), first);
        assert_ne!(of(json!([user("hi")])), first);
        let long = |end: &str| user(&format!("{}{end}", "x".repeat(10_000)));
        assert_ne!(of(json!([long("a")])), of(json!([long("b")])));
        let text = |text: &str| fingerprint(&PromptInput::Text(text.to_owned()));
        let beginning = "word ".repeat(300);
        assert_eq!(text(&beginning), text(&format!("{beginning} and more")));
        assert_ne!(text("a"), text("b"));
    }
}
