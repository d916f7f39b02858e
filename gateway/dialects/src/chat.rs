//! What does a Chat Completions request ask for?

use serde_json::Value;

use super::check::{self, Kind};
use super::{ChatPrompt, Common, PromptInput, Turn, TurnBody, caching, common};
use crate::error::ApiError;
use crate::fields::Fields;
use crate::known::Reader;
use crate::normalise::normalise;
use crate::shared::Shared;

mod recalled;

/// Reads a request; with a reader, its prompt is normalised, and known parts are not read again.
pub(super) fn parse<'a>(
    fields: Fields<'a>,
    reader: Option<&Reader<'_>>,
) -> Result<Turn<'a>, ApiError> {
    let Common {
        model,
        delivery,
        choices,
        token_ids,
    } = common(&fields)?;
    logprobs(&fields)?;
    check::boolean(&fields, "parallel_tool_calls")?;
    // The newer name wins, as OpenAI's own service has it.
    let newer = check::integer(&fields, "max_completion_tokens", (1, i64::MAX))?;
    let older = check::integer(&fields, "max_tokens", (1, i64::MAX))?;
    caching::retention(&fields)?;
    let recalled = reader.and_then(|reader| recalled::prompt(&fields, reader));
    let (prompt, changed) = match recalled {
        Some(recalled) => recalled,
        None => {
            let mut prompt = prompt(&fields)?;
            let changed = reader.map(|reader| normalise(&mut prompt, reader.options));
            (prompt, changed.unwrap_or_default())
        }
    };
    tool_choice(&fields, prompt.tools.as_deref())?;
    let output_tokens_max = newer.or(older).and_then(|most| u64::try_from(most).ok());
    Ok(Turn {
        model,
        prompt: PromptInput::Chat(prompt),
        delivery,
        output_tokens_max,
        choices,
        token_ids,
        body: match changed.any() {
            true => TurnBody::Normalised(fields, changed),
            false => TurnBody::Same(fields),
        },
    })
}

/// Alternatives are told only beside the tokens' own probabilities.
fn logprobs(fields: &Fields<'_>) -> Result<(), ApiError> {
    let are_told = check::boolean(fields, "logprobs")?.unwrap_or(false);
    match check::integer(fields, "top_logprobs", (0, 20))? {
        Some(most) if most > 0 && !are_told => {
            let message = "'top_logprobs' is only allowed when 'logprobs' is true.";
            Err(ApiError::invalid("top_logprobs", message))
        }
        _ => Ok(()),
    }
}

/// A call can be demanded only of a tool that is there.
fn tool_choice(fields: &Fields<'_>, tools: Option<&Value>) -> Result<(), ApiError> {
    let param = "tool_choice";
    check::kind(fields, param, Kind::StringOrObject)?;
    let (Some(raw), Some(choice)) = (fields.get(param), value(fields, param)?) else {
        return Ok(());
    };
    let tools = tools
        .and_then(Value::as_array)
        .map_or(&[][..], Vec::as_slice);
    match choice.as_str() {
        Some("none" | "auto") => return Ok(()),
        Some("required") => {}
        Some(_) => {
            return Err(check::wrong(
                param,
                raw,
                "'none', 'auto', 'required' or a tool",
            ));
        }
        None => {}
    }
    if tools.is_empty() {
        let message = "'tool_choice' demands a call, which is only allowed when 'tools' has tools.";
        return Err(ApiError::invalid(param, message));
    }
    // Other kinds of choice are the node's to know.
    if choice["type"] != "function" {
        return Ok(());
    }
    let Some(name) = choice["function"]["name"].as_str() else {
        let message = "'tool_choice.function.name' must be the name of a tool.";
        return Err(ApiError::invalid("tool_choice.function.name", message));
    };
    if tools.iter().any(|tool| tool["function"]["name"] == name) {
        return Ok(());
    }
    let name: String = name.chars().take(64).collect();
    let message = format!(
        "'tool_choice.function.name' is '{name}', which is the name of no tool in 'tools'."
    );
    Err(ApiError::invalid("tool_choice.function.name", message))
}

/// What becomes the prompt.
pub(super) fn prompt(fields: &Fields<'_>) -> Result<ChatPrompt, ApiError> {
    let messages = messages(fields)?;
    check::kind(fields, "tools", Kind::Array)?;
    check::kind(fields, "chat_template_kwargs", Kind::Object)?;
    let tools = value(fields, "tools")?;
    caching::marks(&messages, tools.as_ref())?;
    Ok(ChatPrompt {
        messages: messages.into_iter().map(Shared::from).collect(),
        tools: tools.map(Shared::from),
        template_kwargs: match value(fields, "chat_template_kwargs")? {
            Some(Value::Object(map)) => Some(map),
            _ => None,
        },
    })
}

/// A field as a value; JSON that the first scan let through (lone surrogates, deep nesting) is
/// refused here.
fn value(fields: &Fields<'_>, name: &str) -> Result<Option<Value>, ApiError> {
    let Some(raw) = fields.get(name) else {
        return Ok(None);
    };
    serde_json::from_str(raw.get())
        .map(Some)
        .map_err(|error| ApiError::invalid(name, format!("'{name}' cannot be read: {error}.")))
}

fn messages(fields: &Fields<'_>) -> Result<Vec<Value>, ApiError> {
    let raw = fields
        .get("messages")
        .ok_or_else(|| check::missing("messages"))?;
    let Some(Value::Array(messages)) = value(fields, "messages")? else {
        return Err(check::wrong("messages", raw, "an array of messages"));
    };
    if messages.is_empty() {
        return Err(ApiError::invalid(
            "messages",
            "'messages' is empty; send at least one message.",
        ));
    }
    for (at, message) in messages.iter().enumerate() {
        let Some(message) = message.as_object() else {
            let param = format!("messages[{at}]");
            let text = format!("'{param}' must be an object with 'role' and 'content'.");
            return Err(ApiError::invalid(param, text));
        };
        if !message.get("role").is_some_and(Value::is_string) {
            let param = format!("messages[{at}].role");
            let text =
                format!("'{param}' must be a string: system, developer, user, assistant or tool.");
            return Err(ApiError::invalid(param, text));
        }
    }
    Ok(messages)
}
