//! Which tool calls and which reasoning does an answer's text hold?
//!
//! A model writes its tool calls and its reasoning as text, each family in a form of its own;
//! clients want them apart, as deltas, while they are written. [`Parser`] takes an answer's text in
//! whatever pieces the tokens give and returns [`Piece`]s that are never taken back. However the
//! text is cut, the pieces are the same once adjacent ones are joined.
//!
//! The rules, for every family:
//! - **Nothing is lost.** What only looked like a call comes back as content, its markers included.
//!   A call counts from the moment its name is known and its arguments have begun as a JSON object;
//!   until then its text is held, and text that breaks the form returns as content up to the
//!   character that broke it. There parsing goes on.
//! - **Arguments are JSON.** A small scanner passes on only what continues a valid object, at most
//!   [`DEPTH_MAX`] deep. A raw control character in a string, which small models write for a line
//!   break, becomes its escape. Where the JSON breaks after the call has begun, the call ends like
//!   one that `max_tokens` cut: the client keeps the valid beginning, the rest is content. So the
//!   arguments of a call that was closed are always a valid JSON object.
//! - Arguments that come as a JSON string hold their object's text and are unwrapped; absent, null
//!   and empty ones become `{}`; any other value is no call. Of a key written twice the first
//!   counts.
//! - **A tool that was not offered** is passed on, as vLLM does: the agent's answer to it teaches the
//!   model more than silence. Only Llama's form, which no marker opens, needs a name that was
//!   offered: a JSON answer that has a `name` is an answer.
//! - **White space** next to calls belongs to the form: after a call it is dropped unless text
//!   follows, and in front of the first call where no text came before. Answers without calls keep
//!   theirs. Line breaks around reasoning are dropped; templates write their own.
//!
//! Left out on purpose: the schemas of the arguments (a constraint's matter), and call ids, which
//! the server makes up unless the model wrote one.

mod arguments;
mod calls;
mod form;
mod format;
mod head;
mod json;
mod lexer;
mod object;
mod parser;
mod sink;

pub use form::{CallForm, Literal};
pub use format::{Detected, ReasoningFormat, ToolFormat, UnknownFormat, detect, markers};
pub use parser::Parser;

/// How deep arguments may nest. Most JSON readers give up there, so deeper ones help nobody.
pub const DEPTH_MAX: usize = 128;

/// What an answer may hold besides content.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Syntax {
    /// How calls are written. `None`: no tools were offered, or `tool_choice` is `none`: text that
    /// looks like a call is text.
    pub tools: Option<ToolFormat>,
    /// How reasoning is written.
    pub reasoning: Option<ReasoningFormat>,
    /// The prompt's end has opened a reasoning block already (see
    /// [`ReasoningFormat::is_open_at_end_of`]).
    pub opened: bool,
}

/// Something an answer holds, in the order of its text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Piece {
    /// More of the reasoning.
    Reasoning(String),
    /// More of the content.
    Content(String),
    /// A call begins. Its arguments follow.
    CallStart {
        /// Which call of the answer, from 0.
        index: usize,
        /// The tool's name.
        name: String,
        /// The call's id where the model wrote one before the arguments (Kimi's
        /// `functions.name:0`, Mistral's `[CALL_ID]`); those models expect it back as it is.
        id: Option<String>,
    },
    /// More of a call's arguments: joined, they are the JSON text of an object.
    Arguments {
        /// Which call of the answer.
        index: usize,
        /// JSON text.
        json: String,
    },
}
