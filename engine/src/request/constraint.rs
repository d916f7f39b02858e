//! What grammar holds the answer to the form that was asked for?
//!
//! A forced call is written as the model's family writes calls, so that the next turn's prompt,
//! which the template writes, repeats the tokens of the answer. Compiling is bounded in time and
//! size by `constrain`; what it refuses is the client's to change, and the refusal names the field.

use std::sync::Arc;

use answer::{CallForm, Detected, ReasoningFormat, ToolFormat, detect};
use constrain::{
    CallCount, Calls, Compiled, Compiler, Reasoning, Refused, Spec, TokenText, Vocabulary,
};
use prompt::PromptBuilder;

use super::prepare::Reading;
use super::{Dialect, Generation, Parallel, ToolChoice, Tools};
use crate::error::{ApiError, Kind};

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
    /// What keeps this vocabulary from having any, where something does.
    compiler: Result<Compiler, String>,
}

impl Constraints {
    pub(super) fn new(prompts: &Arc<PromptBuilder>) -> Self {
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
                .encode_text(&String::from_utf8_lossy(text))
        });
        let vocabulary = Vocabulary::new(tokens, tokenizer.eos_ids().to_vec(), tokenize);
        let compiler = vocabulary.map(Compiler::new);
        Self {
            compiler: compiler.map_err(|error| error.to_string()),
        }
    }

    /// The grammar of a request, if it demands one.
    pub(super) fn compile(
        &self,
        request: &Generation,
        formats: &Formats,
        reading: &Reading,
    ) -> Result<Option<Arc<Compiled>>, ApiError> {
        let Some((spec, field)) = demanded(request, formats) else {
            return Ok(None);
        };
        let compiler = self
            .compiler
            .as_ref()
            .map_err(|why| unusable(&field, why))?;
        let reasoning = match request.dialect {
            Dialect::Chat => reading.syntax.reasoning.map(|format| Reasoning {
                format,
                opened: reading.syntax.opened,
            }),
            Dialect::Completions => None,
        };
        let compiled = compiler.compile(&spec, reasoning.as_ref());
        compiled
            .map(Some)
            .map_err(|refused| blame(&refused, &spec, &field, &request.tools, compiler))
    }
}

fn demanded(request: &Generation, formats: &Formats) -> Option<(Spec, String)> {
    let tools = &request.tools;
    let (offered, most) = match (&tools.choice, tools.parallel) {
        (ToolChoice::Named(at), _) => (&tools.offered[*at..=*at], CallCount::One),
        (ToolChoice::Required, Parallel::One) => (&tools.offered[..], CallCount::One),
        (ToolChoice::Required, Parallel::Many) => (&tools.offered[..], CallCount::AtLeastOne),
        (ToolChoice::None | ToolChoice::Auto, _) => {
            let format = request.format.as_ref()?;
            return Some((format.spec.clone(), format.field.to_owned()));
        }
    };
    let tool = |tool: &super::Tool| constrain::Tool {
        name: tool.name.clone(),
        parameters: tool.parameters.clone(),
    };
    let calls = Calls {
        form: formats.form.clone(),
        tools: offered.iter().map(tool).collect(),
        most,
    };
    Some((Spec::Calls(calls), "tools".to_owned()))
}

/// Names the field that was refused. Of several tools the one whose parameters are refused alone.
fn blame(
    refused: &Refused,
    spec: &Spec,
    field: &str,
    tools: &Tools,
    compiler: &Compiler,
) -> ApiError {
    let Spec::Calls(_) = spec else {
        return invalid(field, refused);
    };
    let places = match tools.choice {
        ToolChoice::Named(at) => at..at + 1,
        _ => 0..tools.offered.len(),
    };
    for at in places {
        let parameters = Spec::JsonSchema(tools.offered[at].parameters.clone());
        if let Err(refused) = compiler.compile(&parameters, None) {
            return invalid(&format!("tools[{at}].function.parameters"), &refused);
        }
    }
    invalid(field, refused)
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
