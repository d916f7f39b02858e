//! What text does the model see for this conversation? The model file's own Jinja template, in
//! the environment that Hugging Face gives it: blocks trimmed, loop controls, Python's string and
//! dict methods, `raise_exception`, `strftime_now`, `tojson`.
//!
//! The template comes from a file and may be hostile: it has no access to anything but its
//! variables, and its work is bounded by fuel, which also pays for the memory it makes.

use std::borrow::Borrow;
use std::collections::BTreeMap;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::Value;
use minijinja::{AutoEscape, Environment, Error, ErrorKind};
use serde_json::{Value as Json, json};

use crate::append::{with_boundaries, without_boundaries};
use crate::build::ChatInput;
use crate::error::{LoadError, PromptError};
use crate::gguf::Header;
use crate::hermes::{Hermes, Knows};
use crate::marks::Marks;
use crate::messages::{Conversation, Developer, Normaliser, Style, invalid};
use crate::tokenizer::Tokenizer;
use crate::{clock, json};

const KEY: &str = "tokenizer.chat_template";
const NAME: &str = "chat";

/// Work that one rendering may cost: instructions, and one per 64 bytes of text made. A turn of
/// 32 MiB (the largest body) with six copies of it on the way costs 3 M. An endless loop spends
/// 8 M in 0.16 s of CPU, and the memory a rendering makes stays below 512 MB.
const FUEL: u64 = 8_000_000;

/// What only we may set: the rest of the template's variables are the client's to choose.
const RESERVED: &[&str] = &[
    "messages",
    "tools",
    "add_generation_prompt",
    "continue_final_message",
    "bos_token",
    "eos_token",
    "unk_token",
    "pad_token",
    "strftime_now",
    "raise_exception",
];

/// Marks an error that the template raised by itself.
const RAISED: &str = "raised by the template: ";

/// A model's chat template, compiled.
#[derive(Debug)]
pub(crate) struct Template {
    environment: Environment<'static>,
    /// As the model file has it.
    source: Box<str>,
    marks: Marks,
    style: Style,
    /// The last control token before an answer; none where the template writes none there.
    opener: Option<u32>,
    /// Whether it only appends, and so writes boundaries.
    appends: bool,
    /// `bos_token` and its like.
    token_variables: Vec<(&'static str, Value)>,
}

impl Template {
    /// Compiles the template of a model file; `None` if it has none.
    pub(crate) fn from_gguf(
        header: &Header,
        tokenizer: &Tokenizer,
    ) -> Result<Option<Self>, LoadError> {
        let Some(value) = header.get(KEY) else {
            return Ok(None);
        };
        let source = value.as_str().ok_or_else(|| LoadError::Metadata {
            key: KEY.to_owned(),
            why: "is not a string".to_owned(),
        })?;
        let mut marks = Marks::default();
        let token_variables = token_variables(header, tokenizer, &mut marks)?;
        let marked = marks.mark_source(&without_generation_tags(source), tokenizer)?;
        let mut environment = environment()?;
        environment
            .add_template_owned(NAME, marked.clone())
            .map_err(|e| LoadError::Template(e.to_string()))?;
        let style = Style {
            developer: if source.contains("developer") {
                Developer::AsDeveloper
            } else {
                Developer::AsSystem
            },
            knows: Knows::of(source),
            hermes: Hermes::new(&mut marks, tokenizer)?,
        };
        let mut template = Self {
            environment,
            source: source.into(),
            marks,
            style,
            opener: None,
            appends: false,
            token_variables,
        };
        template.style.knows.system = template.shows_system_messages();
        if let Some(rendered) = template.render_harmless() {
            template.opener = template.marks.last_token(&rendered);
            template.marks.learn_joined(&rendered, tokenizer)?;
            template.learn_appends(&marked, &rendered);
        }
        Ok(Some(template))
    }

    /// The last control token before an answer; none where the template writes none there.
    pub(crate) fn opener(&self) -> Option<u32> {
        self.opener
    }

    /// The template as the model file has it.
    pub(crate) fn source(&self) -> &str {
        &self.source
    }

    /// How to read what `render` returns.
    pub(crate) fn marks(&self) -> &Marks {
        &self.marks
    }

    /// The text of a conversation, with marks for control tokens.
    pub(crate) fn render<M: Borrow<Json>>(
        &self,
        input: &ChatInput<'_, M>,
    ) -> Result<String, PromptError> {
        let messages: Vec<&Json> = input.messages.iter().map(Borrow::borrow).collect();
        Ok(self.render_parts(&input.of(&messages))?.text)
    }

    /// What turns requests' values into the template's.
    pub(crate) fn normaliser(&self) -> Normaliser<'_> {
        Normaliser {
            marks: &self.marks,
            style: &self.style,
        }
    }

    /// The same, and what continuing the conversation takes.
    pub(crate) fn render_parts(
        &self,
        input: &ChatInput<'_, &Json>,
    ) -> Result<Rendered, PromptError> {
        self.check_variables(input)?;
        let Conversation {
            messages,
            tools,
            is_introduced,
        } = self
            .normaliser()
            .conversation(input.messages, input.tools)?;
        let rendered = self.render_values(messages, tools, input)?;
        Ok(Rendered {
            is_introduced,
            ..rendered
        })
    }

    fn check_variables(&self, input: &ChatInput<'_, &Json>) -> Result<(), PromptError> {
        let names = input.template_kwargs.into_iter().flatten();
        match names
            .map(|(name, _)| name)
            .find(|name| RESERVED.contains(&name.as_str()))
        {
            None => Ok(()),
            Some(name) => {
                let param = format!("chat_template_kwargs.{name}");
                Err(invalid(&param, "is set by the server; leave it out"))
            }
        }
    }

    /// Renders what was normalised; of `input` only the variables count.
    pub(crate) fn render_values(
        &self,
        messages: Vec<Value>,
        tools: Value,
        input: &ChatInput<'_, &Json>,
    ) -> Result<Rendered, PromptError> {
        let normaliser = self.normaliser();
        let mut variables: BTreeMap<&str, Value> = self.token_variables.iter().cloned().collect();
        for (name, value) in input.template_kwargs.into_iter().flatten() {
            variables.insert(name.as_str(), normaliser.value(value));
        }
        let unix_seconds = input.unix_seconds;
        let now = move |format: &str| clock::strftime(unix_seconds, format);
        variables.insert("strftime_now", Value::from_function(now));
        let first = messages.first().cloned();
        let count = messages.len();
        variables.insert("messages", Value::from(messages));
        variables.insert("tools", tools.clone());
        variables.insert("add_generation_prompt", Value::from(true));
        let template = self
            .environment
            .get_template(NAME)
            .map_err(|e| refusal(&e))?;
        let text = template
            .render(Value::from(variables))
            .map_err(|e| refusal(&e))?;
        let (text, boundaries) = if self.appends {
            without_boundaries(text)
        } else {
            (text, Vec::new())
        };
        Ok(Rendered {
            text,
            // One before each message and one behind the last, or the template did not get so far.
            settled: boundaries
                .last()
                .copied()
                .filter(|_| boundaries.len() == count + 1),
            boundaries,
            first,
            tools,
            is_introduced: false,
        })
    }

    /// A conversation in which every control token is the template's own. Templates differ in
    /// which roles they accept; one that accepts none of these has no prompt to learn from.
    fn render_harmless(&self) -> Option<String> {
        let full = [
            json!({"role": "system", "content": "s"}),
            json!({"role": "user", "content": "u"}),
            json!({"role": "assistant", "content": "a"}),
            json!({"role": "user", "content": "v"}),
        ];
        [&full[..], &full[1..], &full[1..2]]
            .into_iter()
            .find_map(|messages| self.render_messages(messages))
    }

    /// Finds out whether it only appends; then it is rendered with boundaries from now on.
    fn learn_appends(&mut self, marked: &str, rendered: &str) {
        let Some(source) = with_boundaries(marked) else {
            return;
        };
        if self.environment.add_template_owned(NAME, source).is_ok() {
            self.appends = true;
            if self.render_harmless().as_deref() == Some(rendered) {
                return;
            }
        }
        // It compiled before.
        self.appends = false;
        let _ = self.environment.add_template_owned(NAME, marked.to_owned());
    }

    /// Some templates refuse system messages, and some leave them out.
    fn shows_system_messages(&self) -> bool {
        const WORDS: &str = "words of the system";
        let messages = [
            json!({"role": "system", "content": WORDS}),
            json!({"role": "user", "content": "u"}),
        ];
        self.render_messages(&messages)
            .is_some_and(|rendered| rendered.contains(WORDS))
    }

    fn render_messages(&self, messages: &[serde_json::Value]) -> Option<String> {
        let input = ChatInput {
            messages,
            tools: None,
            template_kwargs: None,
            unix_seconds: 0,
        };
        self.render(&input).ok()
    }
}

/// A rendered conversation.
#[derive(Debug)]
pub(crate) struct Rendered {
    /// With marks for control tokens.
    pub(crate) text: String,
    /// Where each message begins and the last ends; empty where the template does not only append.
    pub(crate) boundaries: Vec<usize>,
    /// The end of the last message, where the text up to there stays as messages are added.
    pub(crate) settled: Option<usize>,
    /// The first message and the tools, as the template was given them.
    pub(crate) first: Option<Value>,
    pub(crate) tools: Value,
    /// Whether messages to come cannot change where the tools are introduced.
    pub(crate) is_introduced: bool,
}

fn environment() -> Result<Environment<'static>, LoadError> {
    let syntax = SyntaxConfig::builder()
        .trim_blocks(true)
        .lstrip_blocks(true)
        .build();
    let mut environment = Environment::new();
    environment.set_syntax(syntax.map_err(|e| LoadError::Template(e.to_string()))?);
    environment.set_auto_escape_callback(|_| AutoEscape::None);
    environment.set_fuel(Some(FUEL));
    environment.set_debug(false);
    environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    environment.add_filter("tojson", json::tojson);
    // Jinja's `none is iterable` is false; templates guard `tools | length` with it.
    environment.add_test("iterable", |value: &Value| {
        !value.is_none() && value.try_iter().is_ok()
    });
    environment.add_function(
        "raise_exception",
        |message: String| -> Result<Value, Error> {
            Err(Error::new(
                ErrorKind::InvalidOperation,
                format!("{RAISED}{message}"),
            ))
        },
    );
    Ok(environment)
}

fn token_variables(
    header: &Header,
    tokenizer: &Tokenizer,
    marks: &mut Marks,
) -> Result<Vec<(&'static str, Value)>, LoadError> {
    let mut variables = Vec::new();
    for (name, key) in [
        ("bos_token", "tokenizer.ggml.bos_token_id"),
        ("eos_token", "tokenizer.ggml.eos_token_id"),
        ("unk_token", "tokenizer.ggml.unknown_token_id"),
        ("pad_token", "tokenizer.ggml.padding_token_id"),
    ] {
        let id = header.get(key).and_then(|value| value.as_u64());
        let Some(id) = id.and_then(|id| u32::try_from(id).ok()) else {
            continue;
        };
        if tokenizer.is_control(id) {
            variables.push((name, Value::from(marks.mark(id)?.to_string())));
        }
    }
    Ok(variables)
}

/// The source with `{% generation %}` blocks, which mark training targets, made transparent.
fn without_generation_tags(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(begin) = rest.find("{%") {
        let (before, tag) = rest.split_at(begin);
        let length = tag.find("%}").map_or(tag.len(), |end| end + 2);
        let (tag, behind) = tag.split_at(length);
        out.push_str(before);
        let name = tag.trim_matches(|c: char| "{}%-+".contains(c) || c.is_whitespace());
        match name {
            "generation" => out.push_str(&tag.replace(name, "if true")),
            "endgeneration" => out.push_str(&tag.replace(name, "endif")),
            _ => out.push_str(tag),
        }
        rest = behind;
    }
    out.push_str(rest);
    out
}

/// A template's failure in words for the client.
fn refusal(error: &Error) -> PromptError {
    let detail = error.detail().unwrap_or_default();
    let message = match detail.strip_prefix(RAISED) {
        Some(raised) => format!("the model's chat template refuses `messages`: {raised}"),
        None if error.kind() == ErrorKind::OutOfFuel => {
            "the model's chat template (`tokenizer.chat_template` of its file) needs too many steps \
             for `messages`; send fewer or shorter messages, and where short ones fail as well, the \
             operator has to mend the template: it loops"
                .to_owned()
        }
        None => format!(
            "the model's chat template (`tokenizer.chat_template` of its file) cannot render \
             `messages` ({error}); check the order of roles and the fields of each message"
        ),
    };
    PromptError::Template { message }
}
