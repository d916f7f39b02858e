//! What does a request ask for, whatever its dialect?
//!
//! The few fields that the gateway acts on, the prompt as the chat template takes it, and the body
//! for the node. Nodes are asked in Chat Completions or Completions: a body in one of these is
//! passed on byte for byte where nothing had to change, any other is written anew.

use serde_json::{Map, Value};

use crate::fields::Fields;
use crate::normalise::Changed;
use crate::shared::Shared;

/// What a request asks for.
pub struct Turn<'a> {
    /// The model's id as the client wrote it.
    pub model: String,
    /// What becomes the prompt.
    pub prompt: PromptInput,
    /// Whether the answer is to be a stream.
    pub delivery: Delivery,
    /// Most tokens the client wants back in each choice; none leaves it to the node.
    pub output_tokens_max: Option<u64>,
    /// How many answers it wants.
    pub choices: u64,
    /// Whether it wants to see tokens.
    pub token_ids: TokenIds,
    /// Where the rest of the node's body comes from.
    pub body: TurnBody<'a>,
}

/// Where a node's body comes from.
pub enum TurnBody<'a> {
    /// The client's own bytes, in the node's dialect.
    Same(Fields<'a>),
    /// The client's own bytes, except for what was normalised: that is written from
    /// [`Turn::prompt`].
    Normalised(Fields<'a>, Changed),
    /// Translated: parameters of a chat request, without `messages` and `tools`, which are written
    /// from [`Turn::prompt`], and without `stream`, which is written from [`Turn::delivery`].
    Chat(Map<String, Value>),
}

/// The part of a request that reaches the model.
pub enum PromptInput {
    /// Messages for the chat template.
    Chat(ChatPrompt),
    /// Text as it is.
    Text(String),
    /// Texts of which vectors are made, each on its own: only their size matters here.
    Vectors {
        /// All of them together.
        text_bytes: u64,
    },
}

impl PromptInput {
    /// Whether it is one prompt, whose beginning a cache may hold.
    pub fn is_prompt(&self) -> bool {
        !matches!(self, Self::Vectors { .. })
    }
}

/// What the chat template is given.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ChatPrompt {
    /// At least one object with a string `role`.
    pub messages: Vec<Shared>,
    /// Tool definitions in Chat Completions' form.
    pub tools: Option<Shared>,
    /// Extra variables for the template.
    pub template_kwargs: Option<Map<String, Value>>,
}

/// Whether the client reads the tokens that a node reports.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TokenIds {
    /// It asked for them: the answer is relayed as it is.
    Shown,
    /// It did not: they are ours alone.
    Hidden,
}

/// How the client wants its answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Delivery {
    /// One JSON object.
    Whole,
    /// Server-sent events; a chat chunk with the usage is hidden.
    Stream,
    /// Server-sent events, and the client asked for the chunk with the usage.
    StreamWithUsage,
}

/// What the gateway decides about a node's body.
#[derive(Debug, Clone, Copy)]
pub struct NodeParams<'a> {
    /// The id under which nodes serve the model.
    pub model: &'a str,
    /// The client's own name for it was another one.
    pub is_alias: bool,
    /// What separates the tenant's blocks from others': hex, so without escapes.
    pub cache_salt: &'a str,
    /// Usage is wanted in every chunk, for a dialect whose first event tells it.
    pub usage_always: bool,
}

impl Turn<'_> {
    /// The body for the node: the client's, with model and `cache_salt` ours, with usage always
    /// asked for, and without what only gateways may say.
    pub fn node_body(&self, params: &NodeParams<'_>) -> Vec<u8> {
        let salt = format!("\"{}\"", params.cache_salt);
        let options = if params.usage_always {
            r#"{"include_usage":true,"continuous_usage_stats":true}"#
        } else {
            r#"{"include_usage":true}"#
        };
        let model = json(params.model);
        let mut set: Vec<(&str, &str)> = vec![("cache_salt", &salt)];
        if self.delivery != Delivery::Whole {
            set.push(("stream_options", options));
        }
        let written = match &self.body {
            TurnBody::Same(_) => Changed::default(),
            TurnBody::Normalised(_, changed) => *changed,
            TurnBody::Chat(_) => Changed {
                messages: true,
                tools: true,
            },
        };
        let messages;
        if let PromptInput::Chat(chat) = &self.prompt {
            if written.messages {
                messages = list(&chat.messages);
                set.push(("messages", &messages));
            }
            if let Some(tools) = chat.tools.as_ref().filter(|_| written.tools) {
                set.push(("tools", tools.json()));
            }
        }
        match &self.body {
            TurnBody::Same(fields) | TurnBody::Normalised(fields, _) => {
                if params.is_alias {
                    set.push(("model", &model));
                }
                let hides_ids = self.token_ids == TokenIds::Hidden;
                let urgent = is_urgent(fields);
                fields.rebuild(
                    |field| {
                        only_gateways_say(field)
                            || (hides_ids && field == "return_token_ids")
                            || (urgent && field == "priority")
                    },
                    &set,
                )
            }
            TurnBody::Chat(parameters) => {
                set.push(("model", &model));
                if self.delivery != Delivery::Whole {
                    set.push(("stream", "true"));
                }
                object(parameters, &set)
            }
        }
    }
}

/// Whether a request asks to go before others (vLLM's numbers: lower goes first, 0 where nothing
/// is said). A client may step back behind others, never ahead of another tenant. Zero is left
/// out as well: a node without priorities refuses the field.
fn is_urgent(fields: &Fields<'_>) -> bool {
    fields
        .get("priority")
        .and_then(|raw| raw.get().parse::<i64>().ok())
        .is_some_and(|priority| priority <= 0)
}

/// Fields that a client may not say to a node: references into another request's KV cache have
/// returned another prompt's answer, and token ids would bypass the template.
pub(crate) fn only_gateways_say(field: &str) -> bool {
    matches!(
        field,
        "kv_transfer_params" | "prompt_token_ids" | "cache_salt" | "request_id"
    ) || field.starts_with("bootstrap_")
}

/// A JSON array of parts that are JSON already.
fn list(parts: &[Shared]) -> String {
    let length: usize = parts.iter().map(|part| part.json().len() + 1).sum();
    let mut out = String::with_capacity(length + 2);
    out.push('[');
    for (at, part) in parts.iter().enumerate() {
        if at > 0 {
            out.push(',');
        }
        out.push_str(part.json());
    }
    out.push(']');
    out
}

fn json(value: &(impl serde::Serialize + ?Sized)) -> String {
    // Strings and JSON values always serialise.
    serde_json::to_string(value).unwrap_or_default()
}

/// An object of parameters and of members that are JSON already.
fn object(parameters: &Map<String, Value>, set: &[(&str, &str)]) -> Vec<u8> {
    let length: usize = set
        .iter()
        .map(|(name, json)| name.len() + json.len() + 4)
        .sum();
    let mut out = Vec::with_capacity(length + 512);
    out.push(b'{');
    let mut member = |name: &str, write: &mut dyn FnMut(&mut Vec<u8>)| {
        if out.len() > 1 {
            out.push(b',');
        }
        // Writing into a Vec cannot fail.
        let _ = serde_json::to_writer(&mut out, name);
        out.push(b':');
        write(&mut out);
    };
    for (name, value) in parameters {
        if set.iter().all(|(set, _)| set != name) {
            member(name, &mut |out| {
                let _ = serde_json::to_writer(out, value);
            });
        }
    }
    for (name, json) in set {
        member(name, &mut |out| out.extend_from_slice(json.as_bytes()));
    }
    out.push(b'}');
    out
}
