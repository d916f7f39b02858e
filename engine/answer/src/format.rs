//! Which form does a model's template teach it?
//!
//! A GGUF file does not say how its model writes calls, but its chat template has to show past calls
//! and thoughts in the very form, and so holds the form's markers.

use std::fmt;
use std::str::FromStr;

use crate::CallForm;
use crate::lexer::{Mark, Marker};

/// How a family of models writes tool calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ToolFormat {
    /// `<tool_call>{"name": …, "arguments": …}</tool_call>`: Hermes, Qwen, and the preamble.
    Hermes,
    /// `{"name": …, "parameters": …}` as the whole answer; several are separated by `;`.
    Llama3,
    /// `[TOOL_CALLS]` with a JSON array, or `[TOOL_CALLS]name[ARGS]{…}`.
    Mistral,
    /// `<｜tool▁call▁begin｜>…<｜tool▁sep｜>…<｜tool▁call▁end｜>`, with or without a fence.
    DeepSeek,
    /// `<|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{…}<|tool_call_end|>`.
    Kimi,
}

/// How a family of models writes its reasoning.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ReasoningFormat {
    /// `<think>…</think>`.
    Think,
    /// `◁think▷…◁/think▷`.
    KimiThink,
    /// `[THINK]…[/THINK]`.
    Mistral,
}

/// No format has this name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("'{0}' is no tool format; there are hermes, llama3, mistral, deepseek and kimi")]
pub struct UnknownFormat(String);

impl ToolFormat {
    /// Every format.
    pub const ALL: [Self; 5] = [
        Self::Hermes,
        Self::Llama3,
        Self::Mistral,
        Self::DeepSeek,
        Self::Kimi,
    ];

    /// The name on the command line.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Hermes => "hermes",
            Self::Llama3 => "llama3",
            Self::Mistral => "mistral",
            Self::DeepSeek => "deepseek",
            Self::Kimi => "kimi",
        }
    }

    /// What means something in this form wherever it stands outside of JSON strings.
    pub(crate) fn marks(self) -> &'static [Marker] {
        use Mark::{CallClose, CallId, CallOpen, Fence, SectionClose, SectionOpen, Separator};
        match self {
            Self::Hermes => &[(CallOpen, "<tool_call>"), (CallClose, "</tool_call>")],
            Self::Llama3 => &[(CallOpen, "<|python_tag|>")],
            Self::Mistral => &[
                (CallOpen, "[TOOL_CALLS]"),
                (CallId, "[CALL_ID]"),
                (Separator, "[ARGS]"),
            ],
            Self::DeepSeek => &[
                (SectionOpen, "<｜tool▁calls▁begin｜>"),
                (CallOpen, "<｜tool▁call▁begin｜>"),
                (Separator, "<｜tool▁sep｜>"),
                (Fence, "```"),
                (CallClose, "<｜tool▁call▁end｜>"),
                (SectionClose, "<｜tool▁calls▁end｜>"),
            ],
            Self::Kimi => &[
                (SectionOpen, "<|tool_calls_section_begin|>"),
                (CallOpen, "<|tool_call_begin|>"),
                (Separator, "<|tool_call_argument_begin|>"),
                (CallClose, "<|tool_call_end|>"),
                (SectionClose, "<|tool_calls_section_end|>"),
            ],
        }
    }
}

impl fmt::Display for ToolFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for ToolFormat {
    type Err = UnknownFormat;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        let found = Self::ALL.into_iter().find(|f| f.as_str() == name);
        found.ok_or_else(|| UnknownFormat(name.into()))
    }
}

impl ReasoningFormat {
    /// What opens a block.
    pub fn open(self) -> &'static str {
        match self {
            Self::Think => "<think>",
            Self::KimiThink => "◁think▷",
            Self::Mistral => "[THINK]",
        }
    }

    /// What closes it.
    pub fn close(self) -> &'static str {
        match self {
            Self::Think => "</think>",
            Self::KimiThink => "◁/think▷",
            Self::Mistral => "[/THINK]",
        }
    }

    /// Whether a prompt's end opens a block, so that the answer begins inside it.
    pub fn is_open_at_end_of(self, prompt: &str) -> bool {
        prompt.trim_end().ends_with(self.open())
    }
}

/// What a template says about its model's answers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Detected {
    /// How calls are written: Hermes' form when nothing else is recognised, since the preamble for
    /// templates that know no tools asks for that.
    pub tools: ToolFormat,
    /// How reasoning is written, where the template knows reasoning.
    pub reasoning: Option<ReasoningFormat>,
    /// How this very template writes a call.
    pub form: CallForm,
}

/// Reads a chat template's source.
pub fn detect(template: &str) -> Detected {
    let has = |text: &str| template.contains(text);
    let tools = if !has("tools") {
        ToolFormat::Hermes
    } else if has("<|tool_call_begin|>") || has("tool_declare<|im_middle|>") {
        ToolFormat::Kimi
    } else if has("<｜tool▁call") {
        ToolFormat::DeepSeek
    } else if has("[TOOL_CALLS]") {
        ToolFormat::Mistral
    } else if has("<tool_call>") {
        ToolFormat::Hermes
    } else if has("<|python_tag|>") || (has("<|start_header_id|>") && has("\"parameters\"")) {
        ToolFormat::Llama3
    } else {
        ToolFormat::Hermes
    };
    let formats = [
        ReasoningFormat::Mistral,
        ReasoningFormat::KimiThink,
        ReasoningFormat::Think,
    ];
    let reasoning = formats
        .into_iter()
        .find(|f| has(f.open()) || has(f.close()));
    let form = CallForm::of_template(tools, template);
    Detected {
        tools,
        reasoning,
        form,
    }
}

/// The control tokens whose texts a parser for these forms must see.
pub fn markers(tools: Option<ToolFormat>, reasoning: Option<ReasoningFormat>) -> Vec<&'static str> {
    let marks = marks(tools, reasoning);
    let controls = marks.into_iter().filter(|(mark, _)| *mark != Mark::Fence);
    controls.map(|(_, text)| text).collect()
}

/// All that means something in these forms.
pub(crate) fn marks(tools: Option<ToolFormat>, reasoning: Option<ReasoningFormat>) -> Vec<Marker> {
    let mut marks = tools.map_or(Vec::new(), |format| format.marks().to_vec());
    if let Some(format) = reasoning {
        marks.push((Mark::ReasoningOpen, format.open()));
        marks.push((Mark::ReasoningClose, format.close()));
    }
    marks
}
