//! What does a call look like, letter for letter?
//!
//! A forced call is written by a grammar, and the next turn's prompt shows it as the template
//! writes it. Only if both agree, spaces included, does the answer's KV stay usable. So the form
//! here is the templates', and the parser reads it back.

use crate::ToolFormat;

/// A part of a form.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Literal {
    /// Text, in whatever tokens.
    Text(String),
    /// A control token where the vocabulary has one of that text, else text.
    Marker(String),
    /// A decimal number that the model chooses: Kimi counts the calls of a conversation.
    Number,
}

/// How calls are written: `open_all`, then the calls with `separator` between them, then
/// `close_all`. A call is `open_call`, the name, `name_to_arguments`, the arguments' JSON object,
/// `close_call`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CallForm {
    /// Before the first call.
    pub open_all: Vec<Literal>,
    /// Before a call's name.
    pub open_call: Vec<Literal>,
    /// Between the name and the arguments.
    pub name_to_arguments: Vec<Literal>,
    /// After the arguments.
    pub close_call: Vec<Literal>,
    /// Between two calls.
    pub separator: Vec<Literal>,
    /// After the last call.
    pub close_all: Vec<Literal>,
    /// The name stands in a JSON string, and needs its escapes.
    pub name_in_json: bool,
}

fn text(text: &str) -> Literal {
    Literal::Text(text.into())
}

fn marker(text: &str) -> Literal {
    Literal::Marker(text.into())
}

impl CallForm {
    /// A family's form. Of the two forms of Mistral and of DeepSeek the one of their newer models;
    /// [`CallForm::of_template`] knows which a template uses.
    pub fn of(format: ToolFormat) -> Self {
        match format {
            ToolFormat::Hermes => Self::hermes(),
            ToolFormat::Llama3 => Self::llama3(),
            ToolFormat::Mistral => Self::mistral_named(),
            ToolFormat::DeepSeek => Self::deepseek_bare(),
            ToolFormat::Kimi => Self::kimi(),
        }
    }

    /// The form that this template writes past calls in.
    pub fn of_template(format: ToolFormat, template: &str) -> Self {
        match format {
            ToolFormat::Mistral if template.contains("[ARGS]") => Self::mistral_named(),
            ToolFormat::Mistral if template.contains("[TOOL_CALLS] [") => Self::mistral_array(" ["),
            ToolFormat::Mistral => Self::mistral_array("["),
            ToolFormat::DeepSeek if template.contains("```json") => Self::deepseek_fenced(),
            other => Self::of(other),
        }
    }

    fn hermes() -> Self {
        Self {
            open_all: Vec::new(),
            open_call: vec![marker("<tool_call>"), text("\n{\"name\": \"")],
            name_to_arguments: vec![text("\", \"arguments\": ")],
            close_call: vec![text("}\n"), marker("</tool_call>")],
            separator: vec![text("\n")],
            close_all: Vec::new(),
            name_in_json: true,
        }
    }

    fn llama3() -> Self {
        Self {
            open_all: Vec::new(),
            open_call: vec![text("{\"name\": \"")],
            name_to_arguments: vec![text("\", \"parameters\": ")],
            close_call: vec![text("}")],
            separator: vec![text("; ")],
            close_all: Vec::new(),
            name_in_json: true,
        }
    }

    /// The templates add an id of nine letters to each object. The engine makes it up when the call
    /// is over, so it is no part of the form.
    fn mistral_array(bracket: &str) -> Self {
        Self {
            open_all: vec![marker("[TOOL_CALLS]"), text(bracket)],
            open_call: vec![text("{\"name\": \"")],
            name_to_arguments: vec![text("\", \"arguments\": ")],
            close_call: vec![text("}")],
            separator: vec![text(", ")],
            close_all: vec![text("]")],
            name_in_json: true,
        }
    }

    fn mistral_named() -> Self {
        Self {
            open_all: Vec::new(),
            open_call: vec![marker("[TOOL_CALLS]")],
            name_to_arguments: vec![marker("[ARGS]")],
            close_call: Vec::new(),
            separator: Vec::new(),
            close_all: Vec::new(),
            name_in_json: false,
        }
    }

    fn deepseek_fenced() -> Self {
        Self {
            open_all: vec![marker("<｜tool▁calls▁begin｜>")],
            open_call: vec![
                marker("<｜tool▁call▁begin｜>"),
                text("function"),
                marker("<｜tool▁sep｜>"),
            ],
            name_to_arguments: vec![text("\n```json\n")],
            close_call: vec![text("\n```"), marker("<｜tool▁call▁end｜>")],
            separator: vec![text("\n")],
            close_all: vec![marker("<｜tool▁calls▁end｜>")],
            name_in_json: false,
        }
    }

    fn deepseek_bare() -> Self {
        Self {
            open_all: vec![marker("<｜tool▁calls▁begin｜>")],
            open_call: vec![marker("<｜tool▁call▁begin｜>")],
            name_to_arguments: vec![marker("<｜tool▁sep｜>")],
            close_call: vec![marker("<｜tool▁call▁end｜>")],
            separator: Vec::new(),
            close_all: vec![marker("<｜tool▁calls▁end｜>")],
            name_in_json: false,
        }
    }

    fn kimi() -> Self {
        Self {
            open_all: vec![marker("<|tool_calls_section_begin|>")],
            open_call: vec![marker("<|tool_call_begin|>"), text("functions.")],
            name_to_arguments: vec![
                text(":"),
                Literal::Number,
                marker("<|tool_call_argument_begin|>"),
            ],
            close_call: vec![marker("<|tool_call_end|>")],
            separator: Vec::new(),
            close_all: vec![marker("<|tool_calls_section_end|>")],
            name_in_json: false,
        }
    }

    /// The text of these calls: each a name and its arguments' JSON.
    pub fn render(&self, calls: &[(&str, &str)]) -> String {
        let mut out = String::new();
        write(&mut out, &self.open_all, 0);
        for (index, (name, arguments)) in calls.iter().enumerate() {
            if index > 0 {
                write(&mut out, &self.separator, index);
            }
            write(&mut out, &self.open_call, index);
            if self.name_in_json {
                let quoted = serde_json::Value::from(*name).to_string();
                out += &quoted[1..quoted.len() - 1];
            } else {
                out += name;
            }
            write(&mut out, &self.name_to_arguments, index);
            out += arguments;
            write(&mut out, &self.close_call, index);
        }
        write(&mut out, &self.close_all, 0);
        out
    }
}

/// Appends literals; a number is this one.
fn write(out: &mut String, literals: &[Literal], number: usize) {
    for literal in literals {
        match literal {
            Literal::Text(text) | Literal::Marker(text) => out.push_str(text),
            Literal::Number => out.push_str(&number.to_string()),
        }
    }
}
