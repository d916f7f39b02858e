//! Which conversation does this turn belong to, and which node served it last?
//!
//! What the client says about it, by the table of signals ([`dialects::session`]); for a turn that
//! continues a stored response, the session of that one; else a fingerprint of the conversation's
//! stable beginning. All are hashed with the tenant's name, so that no tenant can name another's
//! session. The bindings live in process, bounded in number and renewed by use.
//!
//! One session may hold several conversations: a title that is asked for beside the first turn, an
//! application that has one key for all. They share the binding, which is no more than a hint, and
//! nothing that belongs to a prompt ([`Session::conversation`]).
//!
//! Left out: bindings shared between gateways.

use std::collections::HashMap;
use std::num::NonZeroUsize;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use cache_index::ids::NodeId;
use dialects::PromptInput;
use dialects::session::{Found, fingerprint};
use lru::LruCache;
use policies::view::SessionKey;

/// Bindings kept. At about 150 bytes each the table stays under 20 MB.
const BINDINGS_MAX: NonZeroUsize = NonZeroUsize::new(100_000).expect("not zero");
/// A binding unused for this long is forgotten: the node has evicted the conversation by then.
const BINDING_TTL: Duration = Duration::from_secs(3600);
/// Answer length assumed for a session that has none yet: between a chat turn and a tool call.
const OUTPUT_TOKENS_DEFAULT: u64 = 256;

/// A session's name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SessionId {
    /// What bindings and decisions are keyed by.
    pub(crate) key: SessionKey,
    /// What the ledger shows: the client's id, or the fingerprint.
    pub(crate) text: String,
}

/// A turn's session.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Session {
    pub(crate) id: SessionId,
    /// The session that started this one, of a sub-agent.
    parent: Option<SessionKey>,
    /// What its prompt is remembered by: the session and the conversation's beginning.
    pub(crate) conversation: u128,
    /// The row of the table that it comes from; `chain` or `fingerprint` where it is none.
    pub(crate) source: String,
}

/// The session of a request: what the table found, or the session of what it continues.
pub(crate) fn session_of(
    tenant: &str,
    model: &str,
    found: Found<'_>,
    chain: Option<SessionId>,
    prompt: &PromptInput,
) -> Session {
    let beginning = fingerprint(prompt);
    let named = |text: String| SessionId {
        key: key(tenant, model, &text),
        text,
    };
    let (id, source, parent) = match (found, chain) {
        (Found::Session(signal), _) => (named(signal.id), signal.source, signal.parent),
        (Found::Chain(_), Some(id)) => (id, "chain", None),
        (Found::Chain(_) | Found::Unusable(_) | Found::Nothing, _) => {
            let text = format!("fp-{beginning:016x}");
            (named(text), "fingerprint", None)
        }
    };
    Session {
        parent: parent.map(|parent| key(tenant, model, &parent)),
        conversation: id.key.0 ^ u128::from(beginning),
        source: source.to_owned(),
        id,
    }
}

fn key(tenant: &str, model: &str, text: &str) -> SessionKey {
    let mut hasher = blake3::Hasher::new();
    // Lengths in front keep parts from running into each other.
    for part in [tenant, model, text] {
        hasher.update(&(part.len() as u64).to_le_bytes());
        hasher.update(part.as_bytes());
    }
    let mut half = [0; 16];
    half.copy_from_slice(&hasher.finalize().as_bytes()[..16]);
    SessionKey(u128::from_be_bytes(half))
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

    /// What is known of a session at `now`. A sub-agent's answers are expected to be as long as
    /// its parent's until it has some of its own; its node is not the parent's, since its prompt is
    /// not.
    pub(crate) fn get(&self, session: &Session, now: Instant) -> Known {
        let mut table = self.table.lock().unwrap_or_else(PoisonError::into_inner);
        let mut fresh = |key: SessionKey| {
            let bound = table.sessions.get(&key.0)?;
            let is_fresh = now.duration_since(bound.used) < BINDING_TTL;
            is_fresh.then(|| (bound.node.clone(), bound.output_tokens))
        };
        match fresh(session.id.key) {
            Some((node, output_tokens)) => Known {
                node: Some(node),
                output_tokens,
            },
            None => Known {
                node: None,
                output_tokens: session
                    .parent
                    .and_then(fresh)
                    .map_or(OUTPUT_TOKENS_DEFAULT, |(_, tokens)| tokens),
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
    //! Catches a session id trusted across tenants, one conversation taken for another, and a
    //! binding that outlives its time.
    use super::*;
    use dialects::ChatPrompt;
    use dialects::answer::Continues;
    use dialects::session::Signal;
    use serde_json::json;

    fn prompt(user: &str) -> PromptInput {
        PromptInput::Chat(ChatPrompt {
            messages: vec![json!({"role": "user", "content": user}).into()],
            ..ChatPrompt::default()
        })
    }

    fn named(id: &str, parent: Option<&str>) -> Found<'static> {
        Found::Session(Signal {
            id: id.to_owned(),
            source: "x-session-affinity",
            parent: parent.map(str::to_owned),
        })
    }

    #[test]
    fn sessions_are_the_tenants_own() {
        let of = |tenant, model, found, chain, user| {
            session_of(tenant, model, found, chain, &prompt(user))
        };
        let one = of("a", "m", named("x", None), None, "hi");
        assert_eq!((&*one.id.text, &*one.source), ("x", "x-session-affinity"));
        assert_ne!(
            of("b", "m", named("x", None), None, "hi").id.key,
            one.id.key
        );
        assert_ne!(
            of("a", "n", named("x", None), None, "hi").id.key,
            one.id.key
        );
        // Another prompt of the same session.
        let title = of("a", "m", named("x", None), None, "Give it a title");
        assert_eq!(title.id, one.id);
        assert_ne!(title.conversation, one.conversation);

        let plain = of("a", "m", Found::Nothing, None, "hi");
        assert!(plain.id.text.starts_with("fp-"), "{}", plain.id.text);
        assert_eq!(
            of("a", "m", Found::Unusable("session-id"), None, "hi"),
            plain
        );
        assert_ne!(
            of("b", "m", Found::Nothing, None, "hi").id.key,
            plain.id.key
        );
        // The next turn of a stored response, whatever its session was named by.
        let chain = || Found::Chain(Continues::Response("resp_1".to_owned()));
        for first in [&one, &plain] {
            let next = of("a", "m", chain(), Some(first.id.clone()), "hi");
            assert_eq!((&next.id, &*next.source), (&first.id, "chain"));
            assert_eq!(next.conversation, first.conversation);
        }
        assert_eq!(of("a", "m", chain(), None, "hi"), plain);
    }

    #[test]
    fn bindings_expire() {
        let bindings = Bindings::new();
        let start = Instant::now();
        let of = |id, parent| session_of("t", "m", named(id, parent), None, &prompt("hi"));
        let one = of("s", None);
        bindings.bind(one.id.key, &NodeId::new("n"), Some(100), start);
        let known = |session: &Session, now| {
            let known = bindings.get(session, now);
            (known.node, known.output_tokens)
        };
        assert_eq!(known(&one, start), (Some(NodeId::new("n")), 178));
        assert_eq!(known(&one, start + BINDING_TTL), (None, 256));
        assert_eq!(known(&of("other", None), start), (None, 256));
        // A sub-agent: as talkative as its parent, at home where it fits.
        assert_eq!(known(&of("s/agent", Some("s")), start), (None, 178));
        bindings.bind(one.id.key, &NodeId::new("o"), None, start);
        let counts = ["n", "o", "p"].map(|name| bindings.bound_to(&NodeId::new(name)));
        assert_eq!(counts, [0, 1, 0]);
    }
}
