//! What do the plain fields of a request ask for?
//!
//! Checked as the API does, and turned into the node's parameters where Chat Completions has the
//! same. What the API has and no node serves is refused only where leaving it out would change what
//! the client gets; the rest is accepted and echoed.

use serde_json::{Map, Value, json};

use super::read::{Object, Path};
use super::{format, refuse};
use crate::Delivery;
use crate::answer::Continues;
use crate::error::ApiError;

/// The plain fields of the API that are read here; `input`, `tools` and `tool_choice` have modules
/// of their own.
pub(super) const FIELDS: &[&str] = &[
    "model",
    "instructions",
    "max_output_tokens",
    "max_tool_calls",
    "metadata",
    "parallel_tool_calls",
    "temperature",
    "top_p",
    "top_logprobs",
    "truncation",
    "store",
    "stream",
    "stream_options",
    "include",
    "background",
    "prompt",
    "reasoning",
    "text",
    "previous_response_id",
    "conversation",
    "user",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "prompt_cache_options",
    "service_tier",
    "client_metadata",
];

/// Fields that the API does not have and nodes do: they travel on under the same name.
pub(super) const PASSED: &[&str] = &[
    "chat_template_kwargs",
    "frequency_penalty",
    "ignore_eos",
    "logit_bias",
    "min_p",
    "min_tokens",
    "presence_penalty",
    "repetition_penalty",
    "seed",
    "stop",
    "stop_token_ids",
    "structured_outputs",
    "timeout",
    "top_k",
];

const INCLUDABLE: &[&str] = &[
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
    "reasoning.encrypted_content",
    "message.output_text.logprobs",
];
const EFFORTS: &[&str] = &["none", "minimal", "low", "medium", "high", "xhigh", "max"];
const SUMMARIES: &[&str] = &["auto", "concise", "detailed"];
const TIERS: &[&str] = &[
    "auto",
    "default",
    "flex",
    "scale",
    "priority",
    "fast",
    "ultrafast",
];
/// The API's bounds of `metadata`.
const METADATA_PAIRS_MAX: usize = 16;
const METADATA_KEY_CHARS_MAX: usize = 64;
const METADATA_VALUE_CHARS_MAX: usize = 512;
/// The API's bound of an id that a client names.
const ID_CHARS_MAX: usize = 255;

/// What the plain fields ask for.
pub(super) struct Params {
    pub(super) model: String,
    pub(super) instructions: Option<String>,
    pub(super) delivery: Delivery,
    pub(super) output_tokens_max: Option<u64>,
    pub(super) stores: bool,
    pub(super) continues: Option<Continues>,
    /// Log probabilities are part of the answer.
    pub(super) logprobs: bool,
    /// Reasoning is to be marked so that clients send it back.
    pub(super) encrypted: bool,
    /// Parameters for the node.
    pub(super) node: Map<String, Value>,
}

/// Reads and checks them.
pub(super) fn read(top: Object<'_, '_>) -> Result<Params, ApiError> {
    let model = top.needed_text("model")?;
    if model.is_empty() {
        return Err(refuse::text_empty(&Path::Key(top.path, "model")));
    }
    unserved(top)?;
    accepted(top)?;
    metadata(top)?;
    let mut node = Map::new();
    for name in PASSED {
        if let Some(value) = top.get(name) {
            node.insert((*name).to_owned(), value.clone());
        }
    }
    for (name, most) in [("temperature", 2.0), ("top_p", 1.0)] {
        if top.number(name, (0.0, most))?.is_some() {
            node.insert(name.to_owned(), top.members[name].clone());
        }
    }
    // The API itself wants at least 16; a node serves less.
    let output_tokens_max = top.integer("max_output_tokens", (1, i64::MAX))?;
    if let Some(most) = output_tokens_max {
        // The older name, which every kind of node knows.
        node.insert("max_tokens".to_owned(), most.into());
    }
    if let Some(effort) = reasoning(top)? {
        node.insert("reasoning_effort".to_owned(), effort.into());
    }
    if let Some(form) = format::read(top)? {
        node.insert("response_format".to_owned(), form);
    }
    let included = included(top)?;
    let likeliest = top.integer("top_logprobs", (0, 20))?;
    let logprobs = included.contains(&"message.output_text.logprobs");
    if logprobs {
        node.insert("logprobs".to_owned(), true.into());
        node.insert("top_logprobs".to_owned(), likeliest.unwrap_or(0).into());
    }
    Ok(Params {
        model: model.to_owned(),
        instructions: top.text("instructions")?.map(str::to_owned),
        delivery: delivery(top)?,
        output_tokens_max: output_tokens_max.and_then(|most| u64::try_from(most).ok()),
        stores: top.flag("store")?.unwrap_or(true),
        continues: continues(top)?,
        logprobs,
        encrypted: included.contains(&"reasoning.encrypted_content"),
        node,
    })
}

/// What nobody here can do, and what would not be the same without it.
fn unserved(top: Object<'_, '_>) -> Result<(), ApiError> {
    if top.flag("background")? == Some(true) {
        return Err(refuse::unsupported(
            &Path::Key(top.path, "background"),
            "Background mode is not supported here. Send the request without 'background' and stream the answer.",
        ));
    }
    if top.get("prompt").is_some() {
        return Err(refuse::unsupported(
            &Path::Key(top.path, "prompt"),
            "Prompt templates are not stored here. Send their text as 'instructions' and 'input'.",
        ));
    }
    Ok(())
}

/// What is checked and changes nothing.
fn accepted(top: Object<'_, '_>) -> Result<(), ApiError> {
    top.word("truncation", &["auto", "disabled"])?;
    top.word("service_tier", TIERS)?;
    top.integer("max_tool_calls", (1, i64::MAX))?;
    top.flag("parallel_tool_calls")?;
    top.object("client_metadata")?;
    for name in ["user", "safety_identifier"] {
        top.text(name)?;
    }
    Ok(())
}

/// `metadata`: up to 16 short pairs of strings.
pub(super) fn metadata(top: Object<'_, '_>) -> Result<(), ApiError> {
    let path = Path::Key(top.path, "metadata");
    let Some(members) = top.object("metadata")? else {
        return Ok(());
    };
    if members.len() > METADATA_PAIRS_MAX {
        return Err(refuse::too_many_properties(
            &path,
            METADATA_PAIRS_MAX,
            members.len(),
        ));
    }
    let pairs = Object {
        members,
        path: &path,
    };
    for (name, value) in members {
        let length = name.chars().count();
        if length > METADATA_KEY_CHARS_MAX {
            return Err(refuse::text_too_long(&path, METADATA_KEY_CHARS_MAX, length));
        }
        let Value::String(text) = value else {
            return Err(pairs.wrong(name, "a string", value));
        };
        let length = text.chars().count();
        if length > METADATA_VALUE_CHARS_MAX {
            let path = Path::Key(&path, name);
            return Err(refuse::text_too_long(
                &path,
                METADATA_VALUE_CHARS_MAX,
                length,
            ));
        }
    }
    Ok(())
}

/// The effort, if one is asked for.
fn reasoning<'v>(top: Object<'v, '_>) -> Result<Option<&'v str>, ApiError> {
    let path = Path::Key(top.path, "reasoning");
    let Some(members) = top.object("reasoning")? else {
        return Ok(None);
    };
    let reasoning = Object {
        members,
        path: &path,
    };
    reasoning.word("summary", SUMMARIES)?;
    reasoning.word("generate_summary", SUMMARIES)?;
    let effort = reasoning.word("effort", EFFORTS)?;
    // Nodes know three levels.
    Ok(effort.map(|effort| match effort {
        "minimal" => "low",
        "xhigh" | "max" => "high",
        effort => effort,
    }))
}

fn included<'v>(top: Object<'v, '_>) -> Result<Vec<&'v str>, ApiError> {
    let path = Path::Key(top.path, "include");
    let items = top.list("include")?.map_or(&[][..], Vec::as_slice);
    let word = |(at, value): (usize, &'v Value)| {
        let path = Path::At(&path, at);
        match value.as_str() {
            None => Err(refuse::wrong_type(&path, "a string", value)),
            Some(word) if INCLUDABLE.contains(&word) => Ok(word),
            Some(word) => Err(refuse::unknown_value(&path, word, INCLUDABLE)),
        }
    };
    items.iter().enumerate().map(word).collect()
}

fn delivery(top: Object<'_, '_>) -> Result<Delivery, ApiError> {
    let stream = top.flag("stream")?.unwrap_or(false);
    let path = Path::Key(top.path, "stream_options");
    if let Some(members) = top.object("stream_options")? {
        if !stream {
            return Err(refuse::invalid(
                &path,
                "The 'stream_options' parameter is only allowed when 'stream' is enabled.",
            ));
        }
        let options = Object {
            members,
            path: &path,
        };
        options.flag("include_obfuscation")?;
    }
    Ok(match stream {
        true => Delivery::Stream,
        false => Delivery::Whole,
    })
}

fn continues(top: Object<'_, '_>) -> Result<Option<Continues>, ApiError> {
    let response = top.text("previous_response_id")?;
    let path = Path::Key(top.path, "conversation");
    let conversation = match top.get("conversation") {
        None => None,
        Some(Value::String(id)) => Some((path, id.as_str())),
        Some(Value::Object(members)) => {
            let conversation = Object {
                members,
                path: &path,
            };
            let id = conversation.needed_text("id")?;
            Some((Path::Key(&path, "id"), id))
        }
        Some(other) => {
            let expected = "one of a conversation ID or an object";
            return Err(refuse::wrong_type(&path, expected, other));
        }
    };
    match (response, conversation) {
        (Some(_), Some(_)) => Err(refuse::exclusive()),
        (None, None) => Ok(None),
        (Some(id), None) => {
            id_of(&Path::Key(top.path, "previous_response_id"), id, "resp")?;
            Ok(Some(Continues::Response(id.to_owned())))
        }
        (None, Some((path, id))) => {
            id_of(&path, id, "conv")?;
            Ok(Some(Continues::Conversation(id.to_owned())))
        }
    }
}

fn id_of(path: &Path<'_>, id: &str, prefix: &str) -> Result<(), ApiError> {
    let length = id.chars().count();
    if length > ID_CHARS_MAX {
        return Err(refuse::text_too_long(path, ID_CHARS_MAX, length));
    }
    let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-');
    if !id.chars().all(allowed) {
        return Err(refuse::wrong_characters(path, id));
    }
    match id.starts_with(prefix) {
        true => Ok(()),
        false => Err(refuse::wrong_prefix(path, id, prefix)),
    }
}

/// The echo's default of `text`.
pub(super) fn default_text() -> Value {
    json!({"format": {"type": "text"}, "verbosity": "medium"})
}
