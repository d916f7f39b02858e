//! Which grammar says what the client asked for?
//!
//! The grammar library takes Lark and JSON schemas, each a grammar of its own that others refer to
//! by name. What the client asked for becomes one or more of these, and a small Lark grammar joins
//! them: reasoning first, or the calls of tools in the family's form.
//!
//! JSON is written the way `json.dumps` of Python writes it, `{"a": 1, "b": [2]}`. Models have seen
//! that form most, and since it leaves no choice of white space, the keys of a schema are forced
//! text: a small model cannot ramble between them, and they cost no forward pass.

use std::fmt::Write;

use answer::Literal;
use llguidance::api::{GrammarWithLexer, TopLevelGrammar};
use serde_json::{Value, json};

use crate::error::Refused;
use crate::limits;
use crate::schema;
use crate::spec::{CallCount, Calls, Reasoning, Spec};
use crate::vocabulary::Vocabulary;
use crate::worst;

/// A grammar as the library takes it.
pub(crate) struct Built {
    pub(crate) grammar: TopLevelGrammar,
    /// Bytes that any lexeme may still need once begun, at most, as far as the specification says;
    /// none where that is not known.
    pub(crate) worst: Option<u32>,
}

/// The grammar of the client's specification, with reasoning allowed first or not.
pub(crate) fn build(
    spec: &Spec,
    reasoning: Option<&Reasoning>,
    vocabulary: &Vocabulary,
) -> Result<Built, Refused> {
    let mut builder = Builder {
        vocabulary,
        grammars: Vec::new(),
        worst: Some(0),
        written_out: 0,
    };
    let mut first = builder.answer(spec)?;
    if let Some(reasoning) = reasoning {
        builder.grammars.push(named("answer", first));
        first = reasoning_grammar(*reasoning, vocabulary);
    }
    let mut grammars = vec![first];
    grammars.extend(builder.grammars);
    Ok(Built {
        grammar: TopLevelGrammar {
            grammars,
            max_tokens: None,
        },
        worst: builder.worst,
    })
}

struct Builder<'a> {
    vocabulary: &'a Vocabulary,
    /// Those that the first one refers to.
    grammars: Vec<GrammarWithLexer>,
    worst: Option<u32>,
    /// Characters of all patterns, their repetitions written out.
    written_out: u64,
}

impl Builder<'_> {
    fn answer(&mut self, spec: &Spec) -> Result<GrammarWithLexer, Refused> {
        Ok(match spec {
            Spec::JsonObject => self.json(&any_object(), "the schema")?,
            Spec::JsonSchema(schema) => self.json(schema, "the schema")?,
            Spec::Regex(regex) => {
                self.note(worst::of_regex(regex));
                regex_grammar(regex)?
            }
            Spec::Lark(text) => {
                self.note(None);
                lark_grammar(text)?
            }
            Spec::Choice(texts) => {
                let longest = texts.iter().map(String::len).max().unwrap_or(0);
                self.note(u32::try_from(longest).ok());
                choice_grammar(texts)?
            }
            Spec::Calls(calls) => self.calls(calls)?,
            Spec::CallsOr(calls, other) => {
                let calls = named("calls", self.calls(calls)?);
                let other = named("other", self.answer(other)?);
                self.grammars.extend([calls, other]);
                GrammarWithLexer::from_lark("start: @calls | @other\n".to_owned())
            }
        })
    }

    fn note(&mut self, worst: Option<u32>) {
        self.worst = self.worst.zip(worst).map(|(one, other)| one.max(other));
    }

    /// Bounds the patterns of all schemas together, before anything is made of them.
    fn bound(&mut self, written_out: u64) -> Result<(), Refused> {
        self.written_out = self.written_out.saturating_add(written_out);
        if self.written_out > limits::PATTERNS_MAX {
            return Err(Refused::new(format!(
                "its patterns have {} characters with their repetitions written out; at most {} \
                 are taken together: make them simpler or shorter",
                self.written_out,
                limits::PATTERNS_MAX
            )));
        }
        Ok(())
    }

    fn json(&mut self, schema: &Value, place: &str) -> Result<GrammarWithLexer, Refused> {
        let prepared = schema::prepare(schema, place)?;
        self.note(prepared.worst);
        self.bound(prepared.written_out)?;
        Ok(json_grammar(prepared.schema))
    }

    /// The calls of tools: each tool's schema is a grammar of its own, which the glue refers to.
    fn calls(&mut self, calls: &Calls) -> Result<GrammarWithLexer, Refused> {
        if calls.tools.is_empty() {
            return Err(Refused::new("a call is required but no tool is offered"));
        }
        if calls.tools.len() > limits::TOOLS_MAX {
            return Err(Refused::new(format!(
                "{} tools are offered; at most {} may be where a call is required",
                calls.tools.len(),
                limits::TOOLS_MAX
            )));
        }
        let form = &calls.form;
        let literals = |parts: &[Literal]| literals(parts, self.vocabulary);
        let more = match calls.most {
            CallCount::One => String::new(),
            CallCount::AtLeastOne => format!(" more{{0,{}}}", limits::CALLS_MAX - 1),
        };
        let mut text = format!(
            "start: {} call{more} {}\n",
            literals(&form.open_all),
            literals(&form.close_all)
        );
        if calls.most == CallCount::AtLeastOne {
            let _ = writeln!(text, "more: {} call", literals(&form.separator));
        }
        let mut options = Vec::new();
        for (index, tool) in calls.tools.iter().enumerate() {
            let place = format!("the parameters of tool '{}'", tool.name);
            let name = if form.name_in_json {
                let json = Value::String(tool.name.clone()).to_string();
                json[1..json.len() - 1].to_owned()
            } else {
                tool.name.clone()
            };
            let grammar = format!("tool-{index}");
            let _ = writeln!(
                text,
                "call{index}: {} {} {} @{grammar} {}",
                literals(&form.open_call),
                quoted(&name),
                literals(&form.name_to_arguments),
                literals(&form.close_call),
            );
            options.push(format!("call{index}"));
            let arguments = schema::arguments(&tool.parameters, &place);
            let arguments = arguments.map_err(|refused| Refused {
                tool: Some(index),
                ..refused
            })?;
            self.note(arguments.worst);
            self.bound(arguments.written_out)
                .map_err(|refused| Refused {
                    tool: Some(index),
                    ..refused
                })?;
            self.grammars
                .push(named(&grammar, json_grammar(arguments.schema)));
        }
        let _ = writeln!(text, "call: {}", options.join(" | "));
        Ok(GrammarWithLexer::from_lark(text))
    }
}

fn named(name: &str, grammar: GrammarWithLexer) -> GrammarWithLexer {
    GrammarWithLexer {
        name: Some(name.to_owned()),
        ..grammar
    }
}

/// A schema with the spacing of `json.dumps`. Characters are written as themselves, and control
/// characters with their short escape: `\u` would let a model spell any key in many ways.
fn json_grammar(mut schema: Value) -> GrammarWithLexer {
    if let Some(true) = schema.as_bool() {
        schema = json!({});
    }
    if let Some(object) = schema.as_object_mut() {
        object.insert(
            "x-guidance".to_owned(),
            json!({
                "item_separator": ", ",
                "key_separator": ": ",
                "whitespace_flexible": false,
                "json_allowed_escapes": "nrbtf\\\"",
            }),
        );
    }
    GrammarWithLexer::from_json_schema(schema)
}

/// Any object. The library has a rule for any value, but with numbers of any length.
fn any_object() -> Value {
    let any = json!({"$ref": "#/$defs/any"});
    json!({
        "type": "object",
        "additionalProperties": any,
        "$defs": {"any": {"anyOf": [
            {"type": ["string", "number", "boolean", "null"]},
            {"type": "array", "items": any},
            {"type": "object", "additionalProperties": any},
        ]}},
    })
}

fn regex_grammar(regex: &str) -> Result<GrammarWithLexer, Refused> {
    if regex.len() > limits::REGEX_BYTES_MAX {
        return Err(Refused::new(format!(
            "the regular expression is longer than {} bytes",
            limits::REGEX_BYTES_MAX
        )));
    }
    Ok(GrammarWithLexer::from_regex(regex))
}

fn lark_grammar(text: &str) -> Result<GrammarWithLexer, Refused> {
    if text.trim().is_empty() {
        return Err(Refused::new("the grammar is empty"));
    }
    Ok(GrammarWithLexer::from_lark(text.to_owned()))
}

fn choice_grammar(texts: &[String]) -> Result<GrammarWithLexer, Refused> {
    if texts.is_empty() {
        return Err(Refused::new("the choice names no text to choose from"));
    }
    if texts.len() > limits::ENUM_MAX {
        return Err(Refused::new(format!(
            "the choice has {} texts; at most {} are taken",
            texts.len(),
            limits::ENUM_MAX
        )));
    }
    let options: Vec<String> = texts.iter().map(|text| quoted(text)).collect();
    Ok(GrammarWithLexer::from_lark(format!(
        "start: CHOICE\nCHOICE: {}\n",
        options.join(" | ")
    )))
}

/// Reasoning that may come first. Where the prompt has opened the block, it has to be closed.
fn reasoning_grammar(reasoning: Reasoning, vocabulary: &Vocabulary) -> GrammarWithLexer {
    let format = reasoning.format;
    let (thought, rule) = match vocabulary.marker(format.close()) {
        // The marker is no text, so that the thought's text ends before it.
        Some(id) => (
            format!("thought <[{id}]> gap"),
            "thought: TEXT?\nTEXT: /(?s:.+)/\n".to_owned(),
        ),
        None => (
            "thought gap".to_owned(),
            format!(
                "thought[lazy]: /(?s:.*){}/\n",
                escaped_regex(format.close())
            ),
        ),
    };
    let open = literals(&[Literal::Marker(format.open().to_owned())], vocabulary);
    let start = if reasoning.opened {
        format!("start: {thought} @answer\n")
    } else {
        format!("start: block? @answer\nblock: {open} {thought}\n")
    };
    GrammarWithLexer::from_lark(format!("{start}{rule}gap: GAP?\nGAP: /\\n{{1,2}}/\n"))
}

/// The parts of a form as Lark symbols.
fn literals(parts: &[Literal], vocabulary: &Vocabulary) -> String {
    let mut out = String::new();
    for part in parts {
        let symbol = match part {
            Literal::Marker(name) => match vocabulary.marker(name) {
                Some(id) => format!("<[{id}]>"),
                None => quoted(name),
            },
            Literal::Text(text) => quoted(text),
            Literal::Number => "/[0-9]{1,4}/".to_owned(),
        };
        out.push_str(&symbol);
        out.push(' ');
    }
    out
}

/// A Lark string, which has JSON's syntax; characters that it does not take raw are escaped.
fn quoted(text: &str) -> String {
    let json = Value::String(text.to_owned()).to_string();
    json.replace('\u{7f}', "\\u007f")
}

/// A text as a regular expression between slashes. `\<` would be the beginning of a word.
fn escaped_regex(text: &str) -> String {
    let mut out = String::new();
    for c in text.chars() {
        if r"\.+*?()|[]{}^$/".contains(c) {
            out.push('\\');
        }
        out.push(c);
    }
    out
}
