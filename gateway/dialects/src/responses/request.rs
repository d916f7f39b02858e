//! How does a request become a turn?
//!
//! First what the request alone can tell ([`parse`]); then, once the caller has looked up what it
//! continues and refers to, the prompt and the translation of the answer ([`Request::turn`]).

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use serde_json::{Map, Value, json};

use super::answer::Answer;
use super::items;
use super::kept::{Ids, Side, keep};
use super::params::{self, Params};
use super::plan::{Kept, Plan};
use super::prompt::Messages;
use super::read::{Object, Path, parsed};
use super::tools::{self, Tools};
use super::{echo, recalled, refuse};
use crate::answer::{Continues, Translation};
use crate::caching;
use crate::error::ApiError;
use crate::known::Reader;
use crate::normalise::{self, Options};
use crate::shared::Shared;
use crate::{ChatPrompt, Fields, PromptInput, TokenIds, Turn, TurnBody};

/// A request that may refer to earlier turns.
pub struct Request<'a> {
    fields: Fields<'a>,
    /// The fields that were read, `input` and `tools` not among them.
    top: Map<String, Value>,
    params: Params,
    tools: Tools,
    input: Input,
    keeps: bool,
    /// How the prompt is to be spelled, unless as it is.
    options: Option<Options>,
}

/// The items of the input.
enum Input {
    /// To be read yet.
    Values(Vec<Value>),
    /// What they become, in its one spelling; nothing is before them.
    Messages(Vec<Shared>),
}

/// Reads a Responses request.
pub fn parse(fields: Fields<'_>) -> Result<Request<'_>, ApiError> {
    parse_with(fields, None)
}

/// The same, for a prompt in its one spelling; what the reader knows is not read again.
pub fn parse_known<'a>(fields: Fields<'a>, reader: &Reader<'_>) -> Result<Request<'a>, ApiError> {
    parse_with(fields, Some(reader))
}

fn parse_with<'a>(
    fields: Fields<'a>,
    reader: Option<&Reader<'_>>,
) -> Result<Request<'a>, ApiError> {
    let mut top = parsed(&fields, params::FIELDS)?;
    top.extend(parsed(&fields, params::PASSED)?);
    top.extend(parsed(&fields, &["tool_choice"])?);
    let known_input = reader.and_then(|reader| recalled::input(&fields, &top, reader));
    let mut input = match &known_input {
        Some(_) => Map::new(),
        None => parsed(&fields, &["input"])?,
    };
    let known_tools = reader.and_then(|reader| recalled::tools(&fields, &top, reader));
    let mut list = match &known_tools {
        Some(_) => Map::new(),
        None => parsed(&fields, &["tools"])?,
    };
    let all = Object {
        members: &top,
        path: &Path::Root,
    };
    let mut params = params::read(all)?;
    caching::retention(&fields)?;
    let tools = match known_tools {
        Some(tools) => tools,
        None => {
            let mut tools = tools::read(list.remove("tools"), all)?;
            if let (Some(offered), Some(reader)) = (&mut tools.offered, reader) {
                offered.edit(|tools| normalise::tools_alone(tools, reader.options));
            }
            tools
        }
    };
    if let Some(choice) = &tools.choice {
        params.node.insert("tool_choice".to_owned(), choice.clone());
    }
    if tools.offered.is_some()
        && let Some(parallel) = all.flag("parallel_tool_calls")?
    {
        let name = "parallel_tool_calls".to_owned();
        params.node.insert(name, parallel.into());
    }
    all.object("chat_template_kwargs")?;
    let input = match known_input {
        Some(messages) => Input::Messages(messages),
        None => {
            let input = self::input(input.remove("input"))?;
            if input.is_empty() && params.continues.is_none() {
                return Err(refuse::nothing_asked());
            }
            Input::Values(input)
        }
    };
    let keeps = params.stores;
    Ok(Request {
        fields,
        top,
        params,
        tools,
        input,
        keeps,
        options: reader.map(|reader| reader.options),
    })
}

/// The items of the input; a string is what the user says.
fn input(input: Option<Value>) -> Result<Vec<Value>, ApiError> {
    let path = Path::Key(&Path::Root, "input");
    let items = match input {
        None => Vec::new(),
        Some(Value::String(text)) => {
            vec![json!({"type": "message", "role": "user", "content": text})]
        }
        Some(Value::Array(items)) => items,
        Some(other) => {
            let expected = "one of an array of input items or string";
            return Err(refuse::wrong_type(&path, expected, &other));
        }
    };
    Ok(items)
}

impl<'a> Request<'a> {
    /// What it continues: the caller looks it up.
    pub fn continues(&self) -> Option<Continues> {
        self.params.continues.clone()
    }

    /// Whether the response is to be stored.
    pub fn stores(&self) -> bool {
        self.params.stores
    }

    /// Keeps what [`Translation::stored`] needs, although the response is not to be stored.
    pub fn keep(&mut self) {
        self.keeps = true;
        if let Input::Messages(_) = self.input
            && let Ok(mut fields) = parsed(&self.fields, &["input"])
            && let Ok(items) = input(fields.remove("input"))
        {
            self.input = Input::Values(items);
        }
    }

    /// The items that are to be read yet.
    fn items(&mut self) -> &mut [Value] {
        match &mut self.input {
            Input::Values(items) => items,
            Input::Messages(_) => &mut [],
        }
    }

    /// Ids of stored items that the input refers to: the caller looks them up, by
    /// [`response_of`](super::response_of), and [`resolve`](Self::resolve)s them.
    pub fn references(&self) -> Vec<String> {
        let Input::Values(items) = &self.input else {
            return Vec::new();
        };
        let ids = items.iter().filter_map(items::reference);
        ids.map(str::to_owned).collect()
    }

    /// Puts stored items in the place of references to them.
    pub fn resolve(&mut self, stored: &[Value]) {
        let by_id: HashMap<&str, &Value> = stored
            .iter()
            .filter_map(|item| Some((item["id"].as_str()?, item)))
            .collect();
        for item in self.items() {
            let found = items::reference(item).and_then(|id| by_id.get(id));
            if let Some(found) = found {
                *item = (*found).clone();
            }
        }
    }

    /// The turn, given the items of earlier ones: inputs and outputs in their order.
    pub fn turn(
        self,
        history: Vec<Value>,
        ids: Ids,
    ) -> Result<(Turn<'a>, Box<dyn Translation>), ApiError> {
        let Self {
            fields,
            top,
            params,
            tools,
            input,
            keeps,
            options,
        } = self;
        let (messages, input) = match input {
            Input::Messages(messages) => (messages, Vec::new()),
            Input::Values(mut input) => {
                drop_known(&mut input, &history);
                let instructions = params.instructions.as_deref();
                let messages = read_messages(instructions, &history, &input)?;
                let mut messages: Vec<Shared> = messages.into_iter().map(Shared::from).collect();
                if let Some(options) = options {
                    normalise::messages_alone(&mut messages, options);
                }
                (messages, input)
            }
        };
        let prompt = ChatPrompt {
            messages,
            tools: tools.offered,
            template_kwargs: match top.get("chat_template_kwargs") {
                Some(Value::Object(variables)) => Some(variables.clone()),
                _ => None,
            },
        };
        let echo = echo::echo(&fields, &top, &params);
        let kept = keeps.then(|| Kept {
            input: kept_input(input, &ids),
            continues: params.continues.clone(),
        });
        let plan = Plan {
            ids,
            echo,
            custom: tools.custom,
            encrypted: params.encrypted,
            logprobs: params.logprobs,
            kept,
        };
        let turn = Turn {
            model: params.model,
            prompt: PromptInput::Chat(prompt),
            delivery: params.delivery,
            output_tokens_max: params.output_tokens_max,
            choices: 1,
            token_ids: TokenIds::Hidden,
            body: TurnBody::Chat(params.node),
        };
        Ok((turn, Box::new(Answer::new(Arc::new(plan)))))
    }
}

/// The messages that instructions and items become.
fn read_messages(
    instructions: Option<&str>,
    history: &[Value],
    input: &[Value],
) -> Result<Vec<Value>, ApiError> {
    let mut messages = Messages::default();
    if let Some(text) = instructions {
        messages.instructions(text);
    }
    let path = Path::Key(&Path::Root, "input");
    for item in history {
        messages.push(items::read(item, &path)?)?;
    }
    for (at, item) in input.iter().enumerate() {
        messages.push(items::read(item, &Path::At(&path, at))?)?;
    }
    messages.finish()
}

/// Drops references to items that stand in the history anyway.
fn drop_known(input: &mut Vec<Value>, history: &[Value]) {
    if !input.iter().any(|item| items::reference(item).is_some()) {
        return;
    }
    let known: HashSet<&str> = history
        .iter()
        .filter_map(|item| item["id"].as_str())
        .collect();
    input.retain(|item| !items::reference(item).is_some_and(|id| known.contains(id)));
}

fn kept_input(input: Vec<Value>, ids: &Ids) -> Vec<Value> {
    let keep = |(at, item)| keep(item, |prefix| ids.item(prefix, Side::Input, at));
    input.into_iter().enumerate().map(keep).collect()
}

/// The `metadata` of a request, as conversations have it too.
pub fn metadata(fields: &Fields<'_>) -> Result<Map<String, Value>, ApiError> {
    let mut top = parsed(fields, &["metadata"])?;
    params::metadata(Object {
        members: &top,
        path: &Path::Root,
    })?;
    match top.remove("metadata") {
        Some(Value::Object(pairs)) => Ok(pairs),
        _ => Ok(Map::new()),
    }
}
