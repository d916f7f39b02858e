//! What does chat have for the rest of a request?
//!
//! One function for each group of fields, checked with the API's own limits and contradictions.
//! What chat has no field for is checked where the API would refuse it, and dropped.

use serde_json::{Map, Value};

use super::path::{Object, Path};
use super::tools::Choice;
use super::{object, value};
use crate::Fields;
use crate::error::ApiError;

/// Fewest tokens that thinking may be given, as the API has it.
const THINKING_TOKENS_MIN: u64 = 1024;

/// What limits the answer.
#[derive(Debug)]
pub(super) struct Limits {
    /// `max_tokens`; 0 only fills the cache.
    pub(super) output_tokens_max: u64,
    /// `stop_sequences`
    pub(super) stops: Vec<String>,
    temperature: Option<f64>,
}

/// Whether the model is to think, and the client to see it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Thinking {
    pub(super) demand: Demand,
    /// The text is wanted in the answer.
    pub(super) is_seen: bool,
}

/// Whether the model is to think.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Demand {
    /// Nothing is said, or it is left to the model.
    Unsaid,
    /// It is asked for, with at most so many tokens.
    Asked(u64),
    /// It is not wanted.
    Unwanted,
}

impl Thinking {
    /// What the template is told, by the name that most templates know.
    pub(super) fn template_kwargs(self) -> Option<Map<String, Value>> {
        let wanted = match self.demand {
            Demand::Unsaid => return None,
            Demand::Asked(_) => true,
            Demand::Unwanted => false,
        };
        let mut kwargs = Map::new();
        kwargs.insert("enable_thinking".to_owned(), Value::Bool(wanted));
        Some(kwargs)
    }
}

/// A string.
pub(super) fn text(fields: &Fields<'_>, name: &str) -> Result<Option<String>, ApiError> {
    match value(fields, name)? {
        None => Ok(None),
        Some(Value::String(text)) => Ok(Some(text)),
        Some(_) => Err(Path::root(name).should_be("a valid string")),
    }
}

/// A boolean.
pub(super) fn flag(fields: &Fields<'_>, name: &str) -> Result<Option<bool>, ApiError> {
    match value(fields, name)? {
        None => Ok(None),
        Some(Value::Bool(flag)) => Ok(Some(flag)),
        Some(_) => Err(Path::root(name).should_be("a valid boolean")),
    }
}

/// An integer that is not negative.
fn count(path: Path<'_>, value: &Value, least: u64) -> Result<u64, ApiError> {
    match value {
        Value::Number(number) if number.is_u64() || number.is_i64() => number
            .as_u64()
            .filter(|count| *count >= least)
            .ok_or_else(|| path.should_be(&format!("greater than or equal to {least}"))),
        _ => Err(path.should_be("a valid integer")),
    }
}

/// A number of 0 to 1.
fn share(fields: &Fields<'_>, name: &str) -> Result<Option<f64>, ApiError> {
    let path = Path::root(name);
    let Some(value) = value(fields, name)? else {
        return Ok(None);
    };
    match value.as_f64() {
        Some(number) if number > 1.0 => Err(path.should_be("less than or equal to 1")),
        Some(number) if number < 0.0 => Err(path.should_be("greater than or equal to 0")),
        Some(number) => Ok(Some(number)),
        None => Err(path.should_be("a valid number")),
    }
}

/// Reads what limits and shapes the answer into chat's parameters.
pub(super) fn parameters(
    fields: &Fields<'_>,
    body: &mut Map<String, Value>,
) -> Result<Limits, ApiError> {
    let path = Path::root("max_tokens");
    let most = value(fields, "max_tokens")?.ok_or_else(|| path.required())?;
    let output_tokens_max = count(path, &most, 0)?;
    // A node makes at least one token; the client is not shown what it did not ask for.
    body.insert("max_tokens".to_owned(), output_tokens_max.max(1).into());
    let temperature = share(fields, "temperature")?;
    for (name, number) in [
        ("temperature", temperature),
        ("top_p", share(fields, "top_p")?),
    ] {
        if let Some(number) = number {
            body.insert(name.to_owned(), number.into());
        }
    }
    if let Some(value) = value(fields, "top_k")? {
        let most = count(Path::root("top_k"), &value, 0)?;
        if most > 0 {
            body.insert("top_k".to_owned(), most.into());
        }
    }
    let stops = stops(fields)?;
    if !stops.is_empty() {
        body.insert("stop".to_owned(), stops.clone().into());
    }
    metadata(fields)?;
    match text(fields, "service_tier")?.as_deref() {
        None | Some("auto" | "standard_only") => {}
        Some(_) => {
            return Err(Path::root("service_tier").should_be("'auto' or 'standard_only'"));
        }
    }
    Ok(Limits {
        output_tokens_max,
        stops,
        temperature,
    })
}

fn stops(fields: &Fields<'_>) -> Result<Vec<String>, ApiError> {
    let path = Path::root("stop_sequences");
    let items = match value(fields, "stop_sequences")? {
        None => return Ok(Vec::new()),
        Some(Value::Array(items)) => items,
        Some(_) => return Err(path.should_be("a valid list")),
    };
    let stop = |(at, item): (usize, Value)| match item {
        Value::String(stop) if stop.trim().is_empty() => {
            Err(path.refuse("each stop sequence must contain non-whitespace"))
        }
        Value::String(stop) => Ok(stop),
        _ => Err(path.at(at).should_be("a valid string")),
    };
    items.into_iter().enumerate().map(stop).collect()
}

fn metadata(fields: &Fields<'_>) -> Result<(), ApiError> {
    let path = Path::root("metadata");
    match object(fields, path, "metadata")? {
        None => Ok(()),
        Some(mut metadata) => metadata.text("user_id").map(drop),
    }
}

/// Reads `thinking`.
pub(super) fn thinking_config(fields: &Fields<'_>) -> Result<Thinking, ApiError> {
    const KNOWN: &[&str] = &["enabled", "disabled", "adaptive", "between_tools"];
    let path = Path::root("thinking");
    let Some(mut config) = object(fields, path, "thinking")? else {
        return Ok(Thinking {
            demand: Demand::Unsaid,
            is_seen: true,
        });
    };
    let tag = config.required_text("type")?;
    let demand = match tag.as_str() {
        "adaptive" => Demand::Unsaid,
        "disabled" | "between_tools" => Demand::Unwanted,
        "enabled" => {
            let budget = config.take("budget_tokens");
            let path = path.name("enabled");
            let path = path.name("budget_tokens");
            let budget = budget.ok_or_else(|| path.required())?;
            Demand::Asked(count(path, &budget, THINKING_TOKENS_MIN)?)
        }
        _ => return Err(path.unknown_tag(&tag, KNOWN)),
    };
    let display = config.text("display")?;
    Ok(Thinking {
        demand,
        // Other words are about summaries and updates, which nobody writes here.
        is_seen: display.as_deref() != Some("omitted"),
    })
}

/// Reads `thinking`, and refuses what contradicts it.
pub(super) fn thinking(
    fields: &Fields<'_>,
    limits: &Limits,
    choice: Choice,
) -> Result<Thinking, ApiError> {
    let thinking = thinking_config(fields)?;
    let Demand::Asked(budget) = thinking.demand else {
        return Ok(thinking);
    };
    if budget >= limits.output_tokens_max {
        return Err(ApiError::invalid(
            "max_tokens",
            "`max_tokens` must be greater than `thinking.budget_tokens`.",
        ));
    }
    if choice == Choice::Forced {
        return Err(ApiError::invalid(
            "tool_choice",
            "Thinking may not be enabled when tool_choice forces tool use.",
        ));
    }
    if limits
        .temperature
        .is_some_and(|temperature| temperature != 1.0)
    {
        return Err(ApiError::invalid(
            "temperature",
            "`temperature` may only be set to 1 when thinking is enabled.",
        ));
    }
    Ok(thinking)
}

/// Reads `output_config`, and the field that its format had before.
pub(super) fn format(fields: &Fields<'_>, body: &mut Map<String, Value>) -> Result<(), ApiError> {
    let path = Path::root("output_config");
    if let Some(mut config) = object(fields, path, "output_config")? {
        effort(&mut config, body)?;
        if let Some(format) = config.object("format")? {
            response_format(format, body)?;
        }
    }
    let path = Path::root("output_format");
    if let Some(format) = object(fields, path, "output_format")? {
        response_format(format, body)?;
    }
    Ok(())
}

fn effort(config: &mut Object<'_>, body: &mut Map<String, Value>) -> Result<(), ApiError> {
    let effort = match config.text("effort")?.as_deref() {
        None => return Ok(()),
        Some("low") => "low",
        Some("medium") => "medium",
        // What lies above has no name that nodes share.
        Some("high" | "xhigh" | "max") => "high",
        Some(_) => {
            let path = config.path.name("effort");
            return Err(path.should_be("'low', 'medium', 'high', 'xhigh' or 'max'"));
        }
    };
    body.insert("reasoning_effort".to_owned(), effort.into());
    Ok(())
}

fn response_format(mut format: Object<'_>, body: &mut Map<String, Value>) -> Result<(), ApiError> {
    let tag = format.required_text("type")?;
    if tag != "json_schema" {
        return Err(format.path.unknown_tag(&tag, &["json_schema"]));
    }
    let schema = format.take("schema");
    let path = format.path.name("schema");
    let schema = schema.ok_or_else(|| path.required())?;
    if !schema.is_object() {
        return Err(path.should_be("a valid dictionary"));
    }
    let mut named = Map::new();
    // Chat wants a name, which nobody reads.
    named.insert("name".to_owned(), "output".into());
    named.insert("schema".to_owned(), schema);
    named.insert("strict".to_owned(), Value::Bool(true));
    let mut chat = Map::new();
    chat.insert("type".to_owned(), "json_schema".into());
    chat.insert("json_schema".to_owned(), Value::Object(named));
    body.insert("response_format".to_owned(), Value::Object(chat));
    Ok(())
}

/// Refuses fields that would make this another conversation's answer, or no answer at all.
pub(super) fn refuse_other_conversations(fields: &Fields<'_>) -> Result<(), ApiError> {
    if let Some(mut thread) = object(fields, Path::root("thread"), "thread")?
        && thread.text("type")?.as_deref() == Some("continue")
    {
        return Err(thread.path.refuse(
            "threads are not kept on this server; send the whole conversation in `messages`",
        ));
    }
    if fields.get("compaction").is_some() {
        return Err(Path::root("compaction")
            .refuse("compaction is not served here; ask for a summary in a message"));
    }
    Ok(())
}
