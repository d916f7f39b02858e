//! What does a Chat Completions request ask for?

use serde_json::Value;

use super::check::{self, Kind};
use super::{ChatPrompt, Common, PromptInput, Turn, TurnBody, caching, common};
use crate::error::ApiError;
use crate::fields::Fields;

pub(super) fn parse(fields: Fields<'_>) -> Result<Turn<'_>, ApiError> {
    let Common {
        model,
        delivery,
        choices,
        token_ids,
    } = common(&fields)?;
    let messages = messages(&fields)?;
    check::boolean(&fields, "logprobs")?;
    check::integer(&fields, "top_logprobs", (0, 20))?;
    check::kind(&fields, "tools", Kind::Array)?;
    check::kind(&fields, "tool_choice", Kind::StringOrObject)?;
    check::boolean(&fields, "parallel_tool_calls")?;
    check::kind(&fields, "chat_template_kwargs", Kind::Object)?;
    // The newer name wins, as OpenAI's own service has it.
    let newer = check::integer(&fields, "max_completion_tokens", (1, i64::MAX))?;
    let older = check::integer(&fields, "max_tokens", (1, i64::MAX))?;
    let tools = value(&fields, "tools")?;
    caching::retention(&fields)?;
    caching::marks(&messages, tools.as_ref())?;
    let prompt = PromptInput::Chat(ChatPrompt {
        messages,
        tools,
        template_kwargs: match value(&fields, "chat_template_kwargs")? {
            Some(Value::Object(map)) => Some(map),
            _ => None,
        },
    });
    let output_tokens_max = newer.or(older).and_then(|most| u64::try_from(most).ok());
    Ok(Turn {
        model,
        prompt,
        delivery,
        output_tokens_max,
        choices,
        token_ids,
        body: TurnBody::Same(fields),
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
