//! What grammar holds the answer to the form that was asked for?
//!
//! A forced call is written as the model's family writes calls, so that the next turn's prompt,
//! which the template writes, repeats the tokens of the answer. Compiling is bounded in time and
//! size by `constrain`; what it refuses is the client's to change, and the refusal names the field.

use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

use answer::{CallForm, Detected, ReasoningFormat, ToolFormat, detect};
use constrain::{
    CallCount, Calls, Compiled, Compiler, Reasoning, Refused, Spec, TokenText, Vocabulary,
};
use prompt::PromptBuilder;

use super::prepare::Reading;
use super::{Dialect, Generation, Parallel, Tool, ToolChoice};
use crate::error::{ApiError, Kind};

/// Past this, the refusal's time included, no tool at fault is looked for: what is refused late
/// took its time for being large, and would take it again.
const BLAME_TIME: Duration = Duration::from_millis(300);

/// How this model writes what is not plain text.
#[derive(Clone, Debug)]
pub struct Formats {
    /// Calls of tools.
    pub tools: ToolFormat,
    /// A call, letter for letter.
    pub form: CallForm,
    /// Reasoning, if it writes any.
    pub reasoning: Option<ReasoningFormat>,
}

/// Which formats the operator chose.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FormatChoice {
    /// Calls; none for what the template says.
    pub tools: Option<ToolFormat>,
    /// Reasoning; `None` for what the template says, `Some(None)` for not looking for any.
    pub reasoning: Option<Option<ReasoningFormat>>,
}

impl Formats {
    /// What the template says, unless the operator knows better.
    pub fn new(template: Option<&str>, choice: FormatChoice) -> Self {
        let Detected {
            tools,
            reasoning,
            form,
        } = detect(template.unwrap_or_default());
        let reasoning = choice.reasoning.unwrap_or(reasoning);
        match choice.tools {
            Some(chosen) if chosen != tools => Self {
                tools: chosen,
                form: CallForm::of_template(chosen, template.unwrap_or_default()),
                reasoning,
            },
            Some(_) | None => Self {
                tools,
                form,
                reasoning,
            },
        }
    }
}

/// The grammars of one model.
pub(super) struct Constraints {
    compiler: LazyLock<OrWhyNot, Box<dyn FnOnce() -> OrWhyNot + Send>>,
}

/// A compiler, or what keeps the vocabulary from having any.
type OrWhyNot = Result<Compiler, String>;

impl Constraints {
    /// Those of the model whose prompts these are. The vocabulary's trie is built for the first request
    /// that needs it: 140 ms for 49,000 tokens, which would be half of a node's start.
    pub(super) fn new(prompts: &Arc<PromptBuilder>) -> Self {
        let prompts = Arc::clone(prompts);
        Self {
            compiler: LazyLock::new(Box::new(move || compiler(&prompts))),
        }
    }

    /// The grammar of a request, if it demands one.
    pub(super) fn compile(
        &self,
        request: &Generation,
        formats: &Formats,
        reading: &Reading,
    ) -> Result<Option<Arc<Compiled>>, ApiError> {
        let Some(demand) = demanded(request, formats) else {
            return Ok(None);
        };
        let compiler = LazyLock::force(&self.compiler).as_ref();
        let compiler = compiler.map_err(|why| unusable(demand.field, why))?;
        let reasoning = match request.dialect {
            Dialect::Chat => reading.syntax.reasoning.map(|format| Reasoning {
                format,
                opened: reading.syntax.opened,
            }),
            Dialect::Completions => None,
        };
        let started = Instant::now();
        let compiled = compiler.compile(&demand.spec, reasoning.as_ref());
        compiled
            .map(Some)
            .map_err(|refused| demand.blame(&refused, compiler, started))
    }
}

fn compiler(prompts: &Arc<PromptBuilder>) -> OrWhyNot {
    let tokenizer = prompts.tokenizer();
    let token = |id: u32| TokenText {
        bytes: if tokenizer.is_control(id) {
            tokenizer.token_text(id).as_bytes().to_vec()
        } else {
            tokenizer.token_bytes(id).to_vec()
        },
        control: tokenizer.is_control(id),
    };
    let count = u32::try_from(tokenizer.vocab_size()).unwrap_or(u32::MAX);
    let tokens = (0..count).map(token).collect();
    let shared = Arc::clone(prompts);
    let tokenize = Arc::new(move |text: &[u8]| {
        shared
            .tokenizer()
            .encode_more(&String::from_utf8_lossy(text))
    });
    let vocabulary = Vocabulary::new(tokens, tokenizer.eos_ids().to_vec(), tokenize);
    let compiler = vocabulary.map(Compiler::new);
    compiler.map_err(|error| error.to_string())
}

/// A form, and who asked for it.
struct Demand {
    spec: Spec,
    /// The field to name where no tool is at fault.
    field: &'static str,
    /// Where in `tools` the first tool of the form stands.
    first_tool: usize,
}

impl Demand {
    /// Names the field that was refused.
    fn blame(&self, refused: &Refused, compiler: &Compiler, started: Instant) -> ApiError {
        if let Some(at) = refused.tool {
            return self.blame_tool(at, refused);
        }
        let tools: &[constrain::Tool] = match &self.spec {
            Spec::Calls(calls) if calls.tools.len() == 1 => return self.blame_tool(0, refused),
            Spec::Calls(calls) | Spec::CallsOr(calls, _) => &calls.tools,
            _ => &[],
        };
        // Only the whole was refused: a tool that is refused alone is the culprit.
        for (at, tool) in tools.iter().enumerate() {
            if started.elapsed() > BLAME_TIME {
                break;
            }
            let alone = Spec::JsonSchema(tool.parameters.clone());
            if let Err(refused) = compiler.compile(&alone, None) {
                return self.blame_tool(at, &refused);
            }
        }
        invalid(self.field, refused)
    }

    fn blame_tool(&self, at: usize, refused: &Refused) -> ApiError {
        let at = self.first_tool + at;
        invalid(&format!("tools[{at}].function.parameters"), refused)
    }
}

fn demanded(request: &Generation, formats: &Formats) -> Option<Demand> {
    let tools = &request.tools;
    let offered = &tools.offered;
    let calls = |tools: &[Tool], most| Calls {
        form: formats.form.clone(),
        tools: tools.iter().map(constrained).collect(),
        most,
    };
    let demand = |spec, field, first_tool| {
        Some(Demand {
            spec,
            field,
            first_tool,
        })
    };
    let most = match tools.parallel {
        Parallel::One => CallCount::One,
        Parallel::Many => CallCount::AtLeastOne,
    };
    match (&tools.choice, &request.format) {
        (ToolChoice::Named(at), _) => {
            let calls = calls(&offered[*at..=*at], CallCount::One);
            demand(Spec::Calls(calls), "tools", *at)
        }
        (ToolChoice::Required, _) => demand(Spec::Calls(calls(offered, most)), "tools", 0),
        (_, None) => None,
        // As OpenAI has it, the form is the content's, and calls are no content. vLLM's own fields
        // say what the whole answer is.
        (ToolChoice::Auto, Some(format)) if format.is_of_content && !offered.is_empty() => {
            let spec = Spec::CallsOr(calls(offered, most), Box::new(format.spec.clone()));
            demand(spec, format.field, 0)
        }
        (ToolChoice::None | ToolChoice::Auto, Some(format)) => {
            demand(format.spec.clone(), format.field, 0)
        }
    }
}

fn constrained(tool: &Tool) -> constrain::Tool {
    constrain::Tool {
        name: tool.name.clone(),
        parameters: tool.parameters.clone(),
    }
}

fn invalid(field: &str, refused: &Refused) -> ApiError {
    let message = format!("`{field}` cannot be used: {refused}");
    ApiError::new(Kind::Invalid, "invalid_grammar", message).with_param(field)
}

fn unusable(field: &str, why: &str) -> ApiError {
    let message = format!("`{field}` cannot be served: this model's vocabulary has no grammars.");
    let mut error = ApiError::new(Kind::Invalid, "unsupported_parameter", message);
    error.detail = Some(why.to_owned());
    error.with_param(field)
}
