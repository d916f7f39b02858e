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
use super::{echo, refuse};
use crate::answer::{Continues, Translation};
use crate::caching;
use crate::error::ApiError;
use crate::shared::Shared;
use crate::{ChatPrompt, Fields, PromptInput, TokenIds, Turn, TurnBody};

/// A request that may refer to earlier turns.
pub struct Request<'a> {
    fields: Fields<'a>,
    /// The fields that were read, `input` and `tools` not among them.
    top: Map<String, Value>,
    params: Params,
    tools: Tools,
    input: Vec<Value>,
    keeps: bool,
}

/// Reads a Responses request.
pub fn parse(fields: Fields<'_>) -> Result<Request<'_>, ApiError> {
    let mut top = parsed(&fields, params::FIELDS)?;
    top.extend(parsed(&fields, params::PASSED)?);
    top.extend(parsed(&fields, &["tool_choice"])?);
    let mut large = parsed(&fields, &["input", "tools"])?;
    let all = Object {
        members: &top,
        path: &Path::Root,
    };
    let mut params = params::read(all)?;
    caching::retention(&fields)?;
    let tools = tools::read(large.remove("tools"), all)?;
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
    let input = input(large.remove("input"))?;
    if input.is_empty() && params.continues.is_none() {
        return Err(refuse::nothing_asked());
    }
    let keeps = params.stores;
    Ok(Request {
        fields,
        top,
        params,
        tools,
        input,
        keeps,
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
    }

    /// Ids of stored items that the input refers to: the caller looks them up, by
    /// [`response_of`](super::response_of), and [`resolve`](Self::resolve)s them.
    pub fn references(&self) -> Vec<String> {
        let ids = self.input.iter().filter_map(items::reference);
        ids.map(str::to_owned).collect()
    }

    /// Puts stored items in the place of references to them.
    pub fn resolve(&mut self, stored: &[Value]) {
        let by_id: HashMap<&str, &Value> = stored
            .iter()
            .filter_map(|item| Some((item["id"].as_str()?, item)))
            .collect();
        for item in &mut self.input {
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
            mut input,
            keeps,
        } = self;
        drop_known(&mut input, &history);
        let mut messages = Messages::default();
        if let Some(text) = &params.instructions {
            messages.instructions(text);
        }
        let path = Path::Key(&Path::Root, "input");
        for item in &history {
            messages.push(items::read(item, &path)?)?;
        }
        for (at, item) in input.iter().enumerate() {
            messages.push(items::read(item, &Path::At(&path, at))?)?;
        }
        let prompt = ChatPrompt {
            messages: messages.finish()?.into_iter().map(Shared::from).collect(),
            tools: tools.offered.map(Shared::from),
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
