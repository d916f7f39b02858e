//! Anthropic Messages: requests in, events out.
//!
//! In the order of a request's way: `tools` and `conversation` (with `blocks`, `sources` and
//! `marks`) make the prompt, `parameters` what chat has for the rest, all refusing through `path`
//! in the API's own words. Back: `chunk` reads what a node says, `answer` turns it into the API's
//! stream and `whole` into its message.
//!
//! Accepted and without effect: fields that no chat node knows (`context_management`, `container`,
//! `metadata`, `service_tier`, beta fields …). Refused are the two that would make the answer one
//! to another conversation or of another kind: continuing a thread kept elsewhere, and compaction.

use std::sync::Arc;

use serde_json::value::RawValue;
use serde_json::{Map, Value};

use crate::answer::Translation;
use crate::caching::Retention;
use crate::error::ApiError;
use crate::known::Reader;
use crate::normalise::normalise;
use crate::shared::Shared;
use crate::{ChatPrompt, Delivery, Fields, PromptInput, TokenIds, Turn, TurnBody};

use self::answer::Answer;
use self::conversation::{Last, recalled};
use self::marks::Marks;
use self::path::{Object, Path};
use self::tools::Tools;

mod answer;
mod blocks;
mod chunk;
mod conversation;
mod marks;
mod parameters;
mod path;
mod sources;
mod tools;
mod whole;

/// Reads a Messages request; the translation turns the answer back.
pub fn parse(fields: Fields<'_>) -> Result<(Turn<'_>, Box<dyn Translation>), ApiError> {
    parse_with(fields, None)
}

/// The same, the prompt in its one spelling; what the reader knows is not read again.
pub fn parse_known<'a>(
    fields: Fields<'a>,
    reader: &Reader<'_>,
) -> Result<(Turn<'a>, Box<dyn Translation>), ApiError> {
    parse_with(fields, Some(reader))
}

fn parse_with<'a>(
    fields: Fields<'a>,
    reader: Option<&Reader<'_>>,
) -> Result<(Turn<'a>, Box<dyn Translation>), ApiError> {
    let recalled = reader.and_then(|reader| Request::recalled(&fields, reader));
    let unread = reader.filter(|_| recalled.is_none());
    let mut request = match recalled {
        Some(request) => request,
        None => Request::read(&fields)?,
    };
    if request.last == Last::Begun {
        return Err(Path::root("messages").refuse(
            "This model does not support assistant message prefill. The conversation must end \
             with a user message.",
        ));
    }
    let mut body = Map::new();
    let limits = parameters::parameters(&fields, &mut body)?;
    let choice = tools::choice(value(&fields, "tool_choice")?, &request.tools, &mut body)?;
    let thinking = parameters::thinking(&fields, &limits, choice)?;
    parameters::format(&fields, &mut body)?;
    let model = std::mem::take(&mut request.model);
    let mut prompt = request.prompt(thinking.template_kwargs());
    if let Some(reader) = unread {
        normalise(&mut prompt, reader.options);
    }
    if let Some(kwargs) = &prompt.template_kwargs {
        body.insert("chat_template_kwargs".to_owned(), kwargs.clone().into());
    }
    let stream = parameters::flag(&fields, "stream")?.unwrap_or(false);
    let answer = Answer::new(model.clone(), &limits, thinking);
    let turn = Turn {
        model,
        prompt: PromptInput::Chat(prompt),
        delivery: match stream {
            true => Delivery::Stream,
            false => Delivery::Whole,
        },
        output_tokens_max: Some(limits.output_tokens_max.max(1)),
        choices: 1,
        token_ids: TokenIds::Hidden,
        body: TurnBody::Chat(body),
    };
    Ok((turn, Box::new(answer)))
}

/// Reads a request to count tokens: the model, and what becomes the prompt.
pub fn count_tokens(fields: Fields<'_>) -> Result<(String, ChatPrompt), ApiError> {
    let mut request = Request::read(&fields)?;
    let mut unused = Map::new();
    tools::choice(value(&fields, "tool_choice")?, &request.tools, &mut unused)?;
    let thinking = parameters::thinking_config(&fields)?;
    let model = std::mem::take(&mut request.model);
    Ok((model, request.prompt(thinking.template_kwargs())))
}

/// How long the client wants its prefix kept: the longest time that its `cache_control` marks ask
/// for; none where it has none or they are wrong.
pub fn retention(fields: &Fields<'_>) -> Option<Retention> {
    Request::read(fields).ok()?.retention
}

/// What both endpoints share.
struct Request {
    model: String,
    tools: Arc<Tools>,
    messages: Vec<Shared>,
    last: Last,
    retention: Option<Retention>,
}

impl Request {
    fn read(fields: &Fields<'_>) -> Result<Self, ApiError> {
        let model = parameters::text(fields, "model")?;
        let model = model.ok_or_else(|| Path::root("model").required())?;
        if model.is_empty() {
            let what = "String should have at least 1 character";
            return Err(Path::root("model").refuse(what));
        }
        parameters::refuse_other_conversations(fields)?;
        let mut marks = Marks::default();
        let tools = tools::tools(value(fields, "tools")?, &mut marks)?;
        let system = value(fields, "system")?;
        let messages = value(fields, "messages")?;
        let (messages, last) = conversation::conversation(system, messages, &mut marks)?;
        if let Some(mark) = value(fields, "cache_control")? {
            marks.take_top(mark)?;
        }
        Ok(Self {
            model,
            tools: Arc::new(tools),
            messages: messages.into_iter().map(Shared::from).collect(),
            last,
            retention: marks.checked()?,
        })
    }

    /// The same in its one spelling, with what was read before; none where only [`read`] can tell.
    ///
    /// [`read`]: Self::read
    fn recalled(fields: &Fields<'_>, reader: &Reader<'_>) -> Option<Self> {
        let model = parameters::text(fields, "model").ok()??;
        if model.is_empty() {
            return None;
        }
        parameters::refuse_other_conversations(fields).ok()?;
        let mut marks = Marks::default();
        let tools = match fields.get("tools") {
            Some(raw) => recalled::tools(raw.get(), reader, &mut marks)?,
            None => Arc::default(),
        };
        let system = fields.get("system").map(RawValue::get);
        let messages = fields.get("messages")?.get();
        let messages = recalled::conversation(system, messages, reader, &mut marks)?;
        if let Some(mark) = value(fields, "cache_control").ok()? {
            marks.take_top(mark).ok()?;
        }
        Some(Self {
            model,
            tools,
            messages,
            last: Last::Asked,
            retention: marks.checked().ok()?,
        })
    }

    fn prompt(self, template_kwargs: Option<Map<String, Value>>) -> ChatPrompt {
        ChatPrompt {
            messages: self.messages,
            tools: self.tools.offered.clone(),
            template_kwargs,
        }
    }
}

/// A field as a value; JSON that the first scan let through (lone surrogates, deep nesting) is
/// refused here.
fn value(fields: &Fields<'_>, name: &str) -> Result<Option<Value>, ApiError> {
    let Some(raw) = fields.get(name) else {
        return Ok(None);
    };
    serde_json::from_str(raw.get()).map(Some).map_err(|error| {
        let path = Path::root(name);
        path.refuse(format_args!("The request body is not valid JSON: {error}"))
    })
}

fn object<'p>(
    fields: &Fields<'_>,
    path: Path<'p>,
    name: &str,
) -> Result<Option<Object<'p>>, ApiError> {
    let value = value(fields, name)?;
    value.map(|value| Object::new(value, path)).transpose()
}
