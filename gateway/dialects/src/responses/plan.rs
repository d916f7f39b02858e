//! What is known of a response before its first token?
//!
//! Shared by the attempts to answer one request, and never changed.

use serde_json::Value;

use super::echo::Echo;
use super::events::Members;
use super::kept::{Ids, Side};
use crate::answer::{Continues, End, Usage};
use crate::error::ApiError;

/// What all attempts to answer a request share.
pub(super) struct Plan {
    pub(super) ids: Ids,
    pub(super) echo: Echo,
    /// Names of custom tools: calls of these are custom calls.
    pub(super) custom: Vec<String>,
    /// Reasoning is marked so that clients send it back.
    pub(super) encrypted: bool,
    /// Log probabilities are part of the answer.
    pub(super) logprobs: bool,
    /// What is stored with the response; none where nothing is.
    pub(super) kept: Option<Kept>,
}

/// What is stored with a response.
pub(super) struct Kept {
    pub(super) input: Vec<Value>,
    pub(super) continues: Option<Continues>,
}

/// Where a response stands.
pub(super) enum Status<'s> {
    InProgress,
    Completed(&'s End),
    /// It ended early, for this reason.
    Incomplete(&'static str, &'s End),
    Failed(&'s ApiError, Usage),
    /// The client wanted no more of it.
    Cancelled(Usage),
}

impl Plan {
    /// The id of the item at this place of the output.
    pub(super) fn item_id(&self, prefix: &str, at: usize) -> String {
        self.ids.item(prefix, Side::Output, at)
    }

    /// Appends the response object; `output` has the items with commas between them.
    pub(super) fn write(&self, out: &mut Vec<u8>, status: &Status<'_>, output: &[u8]) {
        out.reserve(self.echo.head.len() + self.echo.tail.len() + output.len() + 512);
        out.push(b'{');
        let mut members = Members::of(out);
        members.text("id", &self.ids.response);
        members.text("object", "response");
        members.number("created_at", self.ids.created_s);
        let (word, usage, homing) = match status {
            Status::InProgress => ("in_progress", None, None),
            Status::Completed(end) => ("completed", Some(end.usage), end.homing.as_ref()),
            Status::Incomplete(_, end) => ("incomplete", Some(end.usage), end.homing.as_ref()),
            Status::Failed(_, usage) => ("failed", Some(*usage), None),
            Status::Cancelled(usage) => ("cancelled", Some(*usage), None),
        };
        members.text("status", word);
        members.json("background", b"false");
        match status {
            Status::Failed(error, _) => members.json("error", &failure(error)),
            _ => members.json("error", b"null"),
        };
        match status {
            Status::Incomplete(reason, _) => {
                let details = super::events::object(|details| {
                    details.text("reason", reason);
                });
                members.json("incomplete_details", &details)
            }
            _ => members.json("incomplete_details", b"null"),
        };
        out.push(b',');
        out.extend_from_slice(self.echo.head.as_bytes());
        let mut members = Members::of(out);
        members.list("output", output);
        match usage {
            Some(usage) => members.json("usage", &usage_object(usage)),
            None => members.json("usage", b"null"),
        };
        if let Some(homing) = homing {
            members.json("homing", homing.to_string().as_bytes());
        }
        out.extend_from_slice(self.echo.tail.as_bytes());
        out.push(b'}');
    }
}

/// The API's words for why a response failed are few; everything on our side is `server_error`.
fn failure(error: &ApiError) -> Vec<u8> {
    let code = match error.kind.status() {
        429 => "rate_limit_exceeded",
        500.. => "server_error",
        _ => error.kind.code().unwrap_or("invalid_prompt"),
    };
    super::events::object(|members| {
        members.text("code", code).text("message", &error.message);
    })
}

fn usage_object(usage: Usage) -> Vec<u8> {
    let Usage {
        input,
        cached,
        output,
        reasoning,
    } = usage;
    format!(
        "{{\"input_tokens\":{input},\"input_tokens_details\":{{\"cached_tokens\":{cached},\"cache_write_tokens\":0}},\"output_tokens\":{output},\"output_tokens_details\":{{\"reasoning_tokens\":{reasoning}}},\"total_tokens\":{}}}",
        input.saturating_add(output),
    )
    .into_bytes()
}
