//! How does a node's answer become the client's?
//!
//! A node answers in Chat Completions. Where the client speaks another dialect, a [`Translation`]
//! turns each chunk of the node's stream into the events that the client expects in its place, and
//! a whole answer into a whole answer. State machines without IO: bytes in, bytes out.
//!
//! What a client may read only after the usage record is written (its usage, its terminator) comes
//! from [`Translation::end`] and from nothing before it.

use serde_json::Value;

use crate::error::{ApiError, ErrorKind};

/// The tokens of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Usage {
    /// Prompt tokens, cached ones included.
    pub input: u64,
    /// Of these, read from cache.
    pub cached: u64,
    /// Generated tokens, reasoning included.
    pub output: u64,
    /// Of these, reasoning, where the node tells.
    pub reasoning: u64,
}

/// What an answer's end is made of.
#[derive(Debug, Clone, Default)]
pub struct End {
    /// The request's tokens, as billed.
    pub usage: Usage,
    /// The value of the `homing` field, where the client asked for it.
    pub homing: Option<Value>,
}

/// A node's answer that is not what it should be.
#[derive(Debug, thiserror::Error)]
#[error("the node's answer is not a chat completion: {0}")]
pub struct Malformed(pub String);

/// Turns one answer of a node into the client's dialect.
pub trait Translation: Send + Sync {
    /// The same translation before anything was told to it: an attempt that failed before its
    /// first byte is made anew elsewhere.
    fn fresh(&self) -> Box<dyn Translation>;

    /// What is known before the answer begins: the prompt's tokens, and how many of them are
    /// expected to be cached. Called once, before the first chunk.
    fn begin(&mut self, expected: Usage);

    /// Takes the JSON of one chunk of the node's stream (`chat.completion.chunk`) and appends the
    /// events, complete with their empty lines, that the client may read now. An error object in
    /// place of a chunk is not passed here.
    fn chunk(&mut self, json: &[u8], out: &mut Vec<u8>) -> Result<(), Malformed>;

    /// The stream is complete and recorded: appends all that is left, usage and terminator.
    fn end(&mut self, end: &End, out: &mut Vec<u8>);

    /// The stream stays incomplete: appends the dialect's error event (and what the dialect wants
    /// around it), with what has been used so far.
    fn fail(&mut self, error: &ApiError, so_far: Usage, out: &mut Vec<u8>);

    /// The client has cancelled the answer by another request: appends what ends its stream, with
    /// what has been used so far. [`stored`](Self::stored) then has the answer as it is.
    fn cancel(&mut self, so_far: Usage, out: &mut Vec<u8>) {
        let message = "The request was cancelled.";
        self.fail(
            &ApiError::new(ErrorKind::ClientTimeout, message),
            so_far,
            out,
        );
    }

    /// A whole answer (`chat.completion`) in the client's dialect.
    fn whole(&mut self, json: &[u8], end: &End) -> Result<Vec<u8>, Malformed>;

    /// The items to store for a next turn that refers to this answer; called after [`end`] or
    /// [`whole`]. Empty for dialects that store nothing.
    ///
    /// [`end`]: Self::end
    /// [`whole`]: Self::whole
    fn stored(&mut self) -> Option<Stored> {
        None
    }
}

/// A response to be stored, in the Responses dialect.
#[derive(Debug, Clone, PartialEq)]
pub struct Stored {
    /// `resp_…`
    pub id: String,
    /// The response object, as `GET /v1/responses/{id}` shows it.
    pub response: Value,
    /// The items of this turn's own input, without earlier turns'.
    pub input: Vec<Value>,
    /// The items of the output.
    pub output: Vec<Value>,
    /// The response or conversation that this one continues.
    pub continues: Option<Continues>,
}

/// What a Responses request continues.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Continues {
    /// `previous_response_id`
    Response(String),
    /// `conversation`
    Conversation(String),
}
