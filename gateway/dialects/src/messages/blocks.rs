//! What does one content block bring to the prompt?
//!
//! Text, thinking, calls and results become what Chat Completions has for them. Documents and
//! search results whose text is in the request become text; images and files are checked and then
//! refused, because no model served here can see. What only Anthropic's servers could have made
//! (their tools' calls and results, thinking that they encrypted or signed) brings nothing, and is
//! no error: a conversation may have begun there.

use serde_json::Value;

use super::marks::Marks;
use super::path::{Object, Path};
use super::sources;
use crate::error::ApiError;

/// The signature of thinking that came from here; it says only that.
pub(super) const SIGNATURE: &str = "aG9taW5nLXRoaW5raW5nLTE=";
/// How the signature begins of thinking whose text the client asked not to see; the text follows.
/// Clients return signatures unread, so that the next turn's prompt has what the model thought.
pub(super) const UNSEEN: &str = "homing-thinking-1:";
/// The member that a call's input consists of where the model's arguments were no JSON object, as
/// the API's documentation advises its clients to send them.
pub(super) const INVALID_JSON: &str = "INVALID_JSON";

/// Who speaks in a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Speaker {
    User,
    Assistant,
    System,
}

/// A block, as far as the prompt has use for it.
#[derive(Debug)]
pub(super) enum Block {
    /// What is said.
    Text(String),
    /// What was thought before.
    Thinking(String),
    /// A call of a tool.
    Call(Call),
    /// What a tool answered.
    Outcome(Outcome),
    /// Nothing.
    Silent,
}

/// A call of a tool.
#[derive(Debug)]
pub(super) struct Call {
    pub(super) id: String,
    pub(super) name: String,
    /// A JSON object's text, or what the model wrote in its place.
    pub(super) arguments: String,
}

/// What a tool answered.
#[derive(Debug)]
pub(super) struct Outcome {
    pub(super) id: String,
    pub(super) text: String,
}

/// Types of blocks that Anthropic's servers make, and what they need of a client.
const PROVIDERS: &[&str] = &[
    "redacted_thinking",
    "server_tool_use",
    "mcp_tool_use",
    "mcp_tool_result",
    "mcp_tool_listing",
    "container_upload",
    "fallback",
    "tool_addition",
    "tool_removal",
];
/// What else a block may be, for errors.
const KNOWN: &[&str] = &[
    "text",
    "image",
    "document",
    "search_result",
    "thinking",
    "redacted_thinking",
    "tool_use",
    "tool_result",
    "server_tool_use",
    "web_search_tool_result",
];

/// Reads a block of a message.
pub(super) fn block(
    value: Value,
    path: Path<'_>,
    speaker: Speaker,
    marks: &mut Marks,
) -> Result<Block, ApiError> {
    let mut block = Object::new(value, path)?;
    let tag = block.required_text("type")?;
    let mut block = block.at(path.name(&tag));
    let is_marked = marks.take(&mut block)?;
    allowed(&tag, speaker, path)?;
    match tag.as_str() {
        "text" => {
            let text = block.required_text("text")?;
            if text.is_empty() && is_marked {
                let what = "cache_control cannot be set for empty text blocks";
                return Err(block.path.refuse(what));
            }
            if speaker != Speaker::Assistant {
                not_blank(&text, path)?;
            }
            Ok(Block::Text(text))
        }
        "thinking" => thinking(&mut block),
        "tool_use" => call(&mut block).map(Block::Call),
        "tool_result" => outcome(&mut block, marks).map(Block::Outcome),
        // A summary that stands for the messages before it.
        "compaction" => Ok(Block::Text(block.text("content")?.unwrap_or_default())),
        tag if PROVIDERS.contains(&tag) || tag.ends_with("_tool_result") => Ok(Block::Silent),
        _ => match sources::text(&mut block, &tag, marks)? {
            Some(text) => Ok(Block::Text(text)),
            None => Err(path.unknown_tag(&tag, KNOWN)),
        },
    }
}

/// Refuses a user's text without anything to read.
pub(super) fn not_blank(text: &str, path: Path<'_>) -> Result<(), ApiError> {
    if text.is_empty() {
        return Err(path.refuse("text content blocks must be non-empty"));
    }
    if text.trim().is_empty() {
        return Err(path.refuse("text content blocks must contain non-whitespace text"));
    }
    Ok(())
}

/// Refuses blocks in the mouth of the wrong speaker.
fn allowed(tag: &str, speaker: Speaker, path: Path<'_>) -> Result<(), ApiError> {
    let speakers: &[Speaker] = match tag {
        "thinking" | "redacted_thinking" | "tool_use" | "server_tool_use" => &[Speaker::Assistant],
        "tool_result" | "image" | "document" | "search_result" => &[Speaker::User],
        "tool_addition" | "tool_removal" => &[Speaker::System],
        "text" => return Ok(()),
        _ if speaker == Speaker::System => &[Speaker::User],
        _ => return Ok(()),
    };
    if speakers.contains(&speaker) {
        return Ok(());
    }
    let whose = match speakers {
        [Speaker::Assistant] => "assistant",
        [Speaker::System] => "system",
        _ => "user",
    };
    Err(path.refuse(format_args!(
        "`{tag}` blocks can only be in `{whose}` messages"
    )))
}

fn thinking(block: &mut Object<'_>) -> Result<Block, ApiError> {
    let thinking = block.required_text("thinking")?;
    let signature = block.text("signature")?;
    // Unsigned thinking came from a server like this one by way of another dialect; signed by
    // somebody else, it is another model's.
    match signature.as_deref() {
        None | Some("" | SIGNATURE) => Ok(Block::Thinking(thinking)),
        Some(signature) => Ok(match signature.strip_prefix(UNSEEN) {
            Some(unseen) => Block::Thinking(unseen.to_owned()),
            None => Block::Silent,
        }),
    }
}

fn call(block: &mut Object<'_>) -> Result<Call, ApiError> {
    let id = block.required_text("id")?;
    if id.is_empty() {
        let what = "String should have at least 1 character";
        return Err(block.path.name("id").refuse(what));
    }
    let name = block.required_text("name")?;
    let path = block.path;
    let input = block.take("input");
    let path = path.name("input");
    let arguments = match input {
        None => return Err(path.required()),
        Some(Value::Object(input)) => match input.get(INVALID_JSON) {
            Some(Value::String(text)) if input.len() == 1 => text.clone(),
            // A map always serialises.
            _ => serde_json::to_string(&input).unwrap_or_default(),
        },
        Some(_) => return Err(path.should_be("a valid dictionary")),
    };
    Ok(Call {
        id,
        name,
        arguments,
    })
}

fn outcome(block: &mut Object<'_>, marks: &mut Marks) -> Result<Outcome, ApiError> {
    let id = block.required_text("tool_use_id")?;
    let is_error = block.flag("is_error")?.unwrap_or(false);
    let content = block.take("content");
    let path = block.path.name("content");
    let mut text = match content {
        None => String::new(),
        Some(Value::String(text)) => text,
        Some(Value::Array(items)) => {
            let mut text = String::new();
            for (at, item) in items.into_iter().enumerate() {
                part(item, path.at(at), marks, &mut text)?;
            }
            text
        }
        Some(_) => return Err(path.should_be("a valid list")),
    };
    if is_error && text.is_empty() {
        // Other failures say what they are.
        text.push_str("The tool failed.");
    }
    Ok(Outcome { id, text })
}

/// A part of a tool's result.
fn part(
    value: Value,
    path: Path<'_>,
    marks: &mut Marks,
    text: &mut String,
) -> Result<(), ApiError> {
    const KNOWN: &[&str] = &[
        "text",
        "image",
        "document",
        "search_result",
        "tool_reference",
    ];
    let mut part = Object::new(value, path)?;
    let tag = part.required_text("type")?;
    let mut part = part.at(path.name(&tag));
    marks.take(&mut part)?;
    match tag.as_str() {
        "text" => text.push_str(&part.required_text("text")?),
        "tool_reference" => {
            let name = part.required_text("tool_name")?;
            text.push_str(&format!("<tool_reference>{name}</tool_reference>"));
        }
        _ => match sources::text(&mut part, &tag, marks)? {
            Some(found) => text.push_str(&found),
            None => return Err(path.unknown_tag(&tag, KNOWN)),
        },
    }
    Ok(())
}
