//! Which conversation does this turn belong to, and which node served it last?
//!
//! The client's `x-session-affinity` where it is usable, else a fingerprint of the conversation's
//! stable beginning: all messages up to the first one from the user. Both are hashed with the
//! tenant's name, so that no tenant can name another's session. The bindings live in process,
//! bounded in number and renewed by use.
//!
//! Left out: the agents' own headers and fields, and bindings shared between gateways.

use std::collections::HashMap;
use std::num::NonZeroUsize;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use cache_index::ids::NodeId;
use http::HeaderMap;
use lru::LruCache;
use policies::view::SessionKey;
use serde_json::Value;

use dialects::PromptInput;

/// Longest session id taken; a longer one is no id but data.
const ID_CHARS_MAX: usize = 255;
/// A completion prompt's beginning that identifies it: about a paragraph, so that prompts which
/// grow at their end stay one session.
const TEXT_BYTES: usize = 1024;
/// Of a text longer than two of these, only so many bytes at both ends are hashed: all of a 64 KB
/// system prompt would cost a tenth of the request, and prompts of equal length that differ in
/// their middle only share a binding, which is no more than a hint.
const TEXT_END_BYTES: usize = 2048;
/// Bindings kept. At about 150 bytes each the table stays under 20 MB.
const BINDINGS_MAX: NonZeroUsize = NonZeroUsize::new(100_000).expect("not zero");
/// A binding unused for this long is forgotten: the node has evicted the conversation by then.
const BINDING_TTL: Duration = Duration::from_secs(3600);
/// Answer length assumed for a session that has none yet: between a chat turn and a tool call.
const OUTPUT_TOKENS_DEFAULT: u64 = 256;

/// A turn's session.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SessionId {
    /// What bindings and decisions are keyed by.
    pub(crate) key: SessionKey,
    /// What the ledger shows: the client's id, or the fingerprint.
    pub(crate) text: String,
}

/// The session of a request.
pub(crate) fn session_of(
    tenant: &str,
    model: &str,
    headers: &HeaderMap,
    prompt: &PromptInput,
) -> SessionId {
    let mut hasher = blake3::Hasher::new();
    // Lengths in front keep parts from running into each other.
    for part in [tenant, model] {
        hasher.update(&(part.len() as u64).to_le_bytes());
        hasher.update(part.as_bytes());
    }
    let sent = headers
        .get("x-session-affinity")
        .and_then(|value| usable(value.as_bytes()));
    match sent {
        Some(id) => {
            hasher.update(b"header");
            hasher.update(id.as_bytes());
            SessionId {
                key: key(&hasher),
                text: id.to_owned(),
            }
        }
        None => {
            hasher.update(b"fingerprint");
            fingerprint(&mut hasher, prompt);
            let key = key(&hasher);
            SessionId {
                key,
                text: format!("fp-{:016x}", key.0 >> 64),
            }
        }
    }
}

fn key(hasher: &blake3::Hasher) -> SessionKey {
    let mut half = [0; 16];
    half.copy_from_slice(&hasher.finalize().as_bytes()[..16]);
    SessionKey(u128::from_be_bytes(half))
}

/// A session id of 1 to 255 visible ASCII characters.
fn usable(id: &[u8]) -> Option<&str> {
    let fits = (1..=ID_CHARS_MAX).contains(&id.len()) && id.iter().all(u8::is_ascii_graphic);
    std::str::from_utf8(id).ok().filter(|_| fits)
}

fn fingerprint(hasher: &mut blake3::Hasher, prompt: &PromptInput) {
    match prompt {
        PromptInput::Text(text) => {
            hasher.update(&text.as_bytes()[..text.len().min(TEXT_BYTES)]);
        }
        PromptInput::Chat(chat) => {
            for message in &chat.messages {
                feed(hasher, message);
                if message.get("role").is_some_and(|role| role == "user") {
                    return;
                }
            }
        }
    }
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

/// What is remembered of a session.
#[derive(Debug, Clone)]
struct Binding {
    node: NodeId,
    used: Instant,
    /// Smoothed length of its answers.
    output_tokens: u64,
}

/// What a decision asks about a session.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Known {
    /// The node of the last turn.
    pub(crate) node: Option<NodeId>,
    /// The expected length of the next answer.
    pub(crate) output_tokens: u64,
}

/// Which node served each session last.
#[derive(Debug)]
pub(crate) struct Bindings {
    table: Mutex<Table>,
}

#[derive(Debug)]
struct Table {
    sessions: LruCache<u128, Binding>,
    /// Sessions bound to each node; a node once configured stays, with a count of 0.
    counts: HashMap<NodeId, u64>,
}

impl Bindings {
    pub(crate) fn new() -> Self {
        let sessions = LruCache::new(BINDINGS_MAX);
        Self {
            table: Mutex::new(Table {
                sessions,
                counts: HashMap::new(),
            }),
        }
    }

    /// How many sessions are bound to a node, forgotten ones included until they are evicted.
    pub(crate) fn bound_to(&self, node: &NodeId) -> u64 {
        let table = self.table.lock().unwrap_or_else(PoisonError::into_inner);
        table.counts.get(node).copied().unwrap_or(0)
    }

    /// What is known of a session at `now`.
    pub(crate) fn get(&self, session: SessionKey, now: Instant) -> Known {
        let mut table = self.table.lock().unwrap_or_else(PoisonError::into_inner);
        match table.sessions.get(&session.0) {
            Some(bound) if now.duration_since(bound.used) < BINDING_TTL => Known {
                node: Some(bound.node.clone()),
                output_tokens: bound.output_tokens,
            },
            _ => Known {
                node: None,
                output_tokens: OUTPUT_TOKENS_DEFAULT,
            },
        }
    }

    /// The session's turn was answered by `node` with so many tokens (none if that is not known).
    pub(crate) fn bind(
        &self,
        session: SessionKey,
        node: &NodeId,
        output_tokens: Option<u64>,
        now: Instant,
    ) {
        let mut table = self.table.lock().unwrap_or_else(PoisonError::into_inner);
        let before = table
            .sessions
            .get(&session.0)
            .map_or(OUTPUT_TOKENS_DEFAULT, |bound| bound.output_tokens);
        // Half old, half new: answers of one session alternate between tool calls and text.
        let output_tokens = output_tokens.map_or(before, |tokens| before.midpoint(tokens));
        let binding = Binding {
            node: node.clone(),
            used: now,
            output_tokens,
        };
        // The old binding of this session, or the one that had to go for it.
        if let Some((_, old)) = table.sessions.push(session.0, binding)
            && let Some(count) = table.counts.get_mut(&old.node)
        {
            *count = count.saturating_sub(1);
        }
        *table.counts.entry(node.clone()).or_default() += 1;
    }
}

#[cfg(test)]
mod tests {
    //! Catches a session id trusted across tenants, and a conversation whose fingerprint changes
    //! as it grows.
    use super::*;
    use dialects::ChatPrompt;
    use serde_json::json;

    fn of(tenant: &str, header: Option<&str>, messages: Value) -> SessionId {
        let mut headers = HeaderMap::new();
        if let Some(id) = header {
            let value = http::HeaderValue::from_bytes(id.as_bytes()).expect("a header value");
            headers.insert("x-session-affinity", value);
        }
        let Value::Array(messages) = messages else {
            panic!("messages are an array")
        };
        let prompt = PromptInput::Chat(ChatPrompt {
            messages,
            tools: None,
            template_kwargs: None,
        });
        session_of(tenant, "m", &headers, &prompt)
    }

    #[test]
    fn the_fingerprint_is_the_beginning_and_the_tenant() {
        let first = json!([{"role":"system","content":"s"},{"role":"user","content":"hi"}]);
        let mut second = first.clone();
        second
            .as_array_mut()
            .expect("an array")
            .push(json!({"role":"assistant","content":"yo"}));
        let other = json!([{"role":"system","content":"s"},{"role":"user","content":"ho"}]);
        assert_eq!(of("a", None, first.clone()), of("a", None, second));
        assert_ne!(of("a", None, first.clone()).key, of("a", None, other).key);
        assert_ne!(
            of("a", None, first.clone()).key,
            of("b", None, first.clone()).key
        );
        assert_ne!(
            of("a", Some("x"), first.clone()).key,
            of("b", Some("x"), first).key
        );
    }

    #[test]
    fn malformed_ids_are_none() {
        let messages = json!([{"role":"user","content":"hi"}]);
        let fingerprint = of("a", None, messages.clone());
        for id in ["", "two words", "tab\t", "ünïcode", &"x".repeat(256)] {
            assert_eq!(of("a", Some(id), messages.clone()), fingerprint, "{id:?}");
        }
        assert_eq!(of("a", Some("ok-1"), messages).text, "ok-1");
    }

    #[test]
    fn bindings_expire() {
        let bindings = Bindings::new();
        let start = Instant::now();
        bindings.bind(SessionKey(1), &NodeId::new("n"), Some(100), start);
        let known = bindings.get(SessionKey(1), start);
        assert_eq!(
            (known.node, known.output_tokens),
            (Some(NodeId::new("n")), 178)
        );
        assert_eq!(bindings.get(SessionKey(1), start + BINDING_TTL).node, None);
        assert_eq!(bindings.get(SessionKey(2), start).node, None);
        bindings.bind(SessionKey(1), &NodeId::new("o"), None, start);
        let counts = ["n", "o", "p"].map(|name| bindings.bound_to(&NodeId::new(name)));
        assert_eq!(counts, [0, 1, 0]);
    }
}
