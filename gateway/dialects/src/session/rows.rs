//! The table itself: every signal, the most trusted first.
//!
//! Headers come before the body: they are set for the gateway, and by whoever runs the client. Of
//! the body, the chain comes first, since the prompt does continue it; `prompt_cache_key` comes
//! last, since many applications send one key for all their conversations. docs/sessions.md shows
//! the same table to operators; a test compares the two.

/// One signal.
#[derive(Debug, Clone, Copy)]
pub(super) struct Row {
    /// Its name in the configuration and in the documentation: a header's own, a field's behind
    /// `body.`.
    pub(super) name: &'static str,
    pub(super) place: Place,
    /// The header with the id of a sub-agent within the session.
    pub(super) child: Option<&'static str>,
    /// The header with the id of the session, or sub-agent, that started this one.
    pub(super) parent: Option<&'static str>,
    pub(super) by_default: ByDefault,
}

/// Where a signal's id is.
#[derive(Debug, Clone, Copy)]
pub(super) enum Place {
    /// The header of the row's name.
    Header,
    /// Any header `x-<name>-session-id`.
    HeaderPattern,
    /// A member of the JSON object in a header.
    HeaderMember(&'static str, &'static str),
    /// A header's value up to a character.
    HeaderUpTo(&'static str, char),
    /// A field of the body.
    Field(&'static str),
    /// A member of an object in the body.
    Member(&'static str, &'static str),
    /// The session's part of `metadata.user_id`.
    UserId,
    /// A field of the body which in the Responses dialect refers to what is continued, and is any
    /// other field elsewhere.
    Chain(&'static str, Chain),
}

/// What a chain's id names.
#[derive(Debug, Clone, Copy)]
pub(super) enum Chain {
    Response,
    Conversation,
}

/// Whether a row is in use where the operator says nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ByDefault {
    On,
    Off,
}

const fn row(name: &'static str, place: Place) -> Row {
    Row {
        name,
        place,
        child: None,
        parent: None,
        by_default: ByDefault::On,
    }
}

const fn off(row: Row) -> Row {
    Row {
        by_default: ByDefault::Off,
        ..row
    }
}

const fn header(name: &'static str) -> Row {
    row(name, Place::Header)
}

const PARENT_SESSION: Option<&str> = Some("x-parent-session-id");

pub(super) static ROWS: &[Row] = &[
    Row {
        parent: PARENT_SESSION,
        ..header("x-session-affinity")
    },
    // Claude Code: sub-agents send their session's id and their own.
    Row {
        child: Some("x-claude-code-agent-id"),
        parent: Some("x-claude-code-parent-agent-id"),
        ..header("x-claude-code-session-id")
    },
    // Codex: one id for a task, one for each of its threads; the main thread has the task's.
    Row {
        child: Some("thread-id"),
        ..header("session-id")
    },
    // Pi; older versions of Codex.
    Row {
        child: Some("thread_id"),
        ..header("session_id")
    },
    header("thread-id"),
    // opencode: a sub-agent has a session of its own.
    Row {
        parent: PARENT_SESSION,
        ..header("x-session-id")
    },
    Row {
        parent: PARENT_SESSION,
        ..header("x-opencode-session")
    },
    header("x-amp-thread-id"),
    header("x-grok-conv-id"),
    // Dynamo, LiteLLM, Bifrost, OpenRouter and more.
    row("x-<name>-session-id", Place::HeaderPattern),
    header("conversation_id"),
    row(
        "x-codex-turn-metadata",
        Place::HeaderMember("x-codex-turn-metadata", "session_id"),
    ),
    // The session's id and the number of the context window.
    row(
        "x-codex-window-id",
        Place::HeaderUpTo("x-codex-window-id", ':'),
    ),
    row(
        "body.previous_response_id",
        Place::Chain("previous_response_id", Chain::Response),
    ),
    row(
        "body.conversation",
        Place::Chain("conversation", Chain::Conversation),
    ),
    row("body.session_id", Place::Field("session_id")),
    row("body.conversation_id", Place::Field("conversation_id")),
    row("body.metadata.user_id", Place::UserId),
    row(
        "body.metadata.session_id",
        Place::Member("metadata", "session_id"),
    ),
    row(
        "body.client_metadata.session_id",
        Place::Member("client_metadata", "session_id"),
    ),
    row("body.prompt_cache_key", Place::Field("prompt_cache_key")),
    // New for every request in most clients; Codex and Pi send the session's id in it.
    off(header("x-client-request-id")),
    // A user, who may have many sessions at once.
    off(row("body.user", Place::Field("user"))),
];
