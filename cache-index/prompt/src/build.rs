//! How does a request become tokens? Normalise, render, take apart at control tokens, and look up
//! or encode the text between them.

use std::borrow::Borrow;

use serde_json::Value as Json;

use crate::answers::Progress;
use crate::error::{LoadError, PromptError};
use crate::gguf::Header;
use crate::marks::Part;
use crate::segments::SegmentCache;
use crate::template::Template;
use crate::tokenizer::{Piece, Tokenizer};

/// A chat request's parts that reach the model.
#[derive(Debug)]
pub struct ChatInput<'a, M = Json> {
    /// The request's `messages`: JSON values, or what stands for them.
    pub messages: &'a [M],
    /// The request's `tools`.
    pub tools: Option<&'a Json>,
    /// The request's `chat_template_kwargs`: extra variables for the template.
    pub template_kwargs: Option<&'a serde_json::Map<String, Json>>,
    /// Now, for templates that print the date (UTC).
    pub unix_seconds: i64,
}

impl<M> Clone for ChatInput<'_, M> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<M> Copy for ChatInput<'_, M> {}

impl<'a, M> ChatInput<'a, M> {
    /// The same request with these messages.
    pub(crate) fn of<'m, N>(&self, messages: &'m [N]) -> ChatInput<'m, N>
    where
        'a: 'm,
    {
        ChatInput {
            messages,
            tools: self.tools,
            template_kwargs: self.template_kwargs,
            unix_seconds: self.unix_seconds,
        }
    }
}

/// A prompt, and how many answers within it are known by their own tokens.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ChatTokens {
    /// The prompt.
    pub tokens: Vec<u32>,
    /// Answers whose tokens are those that were produced.
    pub answers: usize,
}

/// Tokenizer and chat template of one model.
#[derive(Debug)]
pub struct PromptBuilder {
    tokenizer: Tokenizer,
    template: Option<Template>,
}

impl PromptBuilder {
    /// Builds both from a model file's metadata.
    pub fn from_gguf(header: &Header) -> Result<Self, LoadError> {
        let tokenizer = Tokenizer::from_gguf(header)?;
        let template = Template::from_gguf(header, &tokenizer)?;
        Ok(Self {
            tokenizer,
            template,
        })
    }

    /// The tokenizer.
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// The chat template as the model file has it; none if it has none.
    pub fn template_source(&self) -> Option<&str> {
        self.template.as_ref().map(Template::source)
    }

    /// The chat template, where there is one.
    pub(crate) fn template(&self) -> Option<&Template> {
        self.template.as_ref()
    }

    /// The tokens of a chat request, generation prompt included. Control tokens come from the
    /// template alone; their text inside messages stays text.
    pub fn chat<M: Borrow<Json>>(
        &self,
        input: &ChatInput<'_, M>,
        known: &SegmentCache,
    ) -> Result<Vec<u32>, PromptError> {
        let template = self.template.as_ref().ok_or(PromptError::NoTemplate)?;
        let rendered = template.render(input)?;
        let mut tokens = Vec::with_capacity(rendered.len() / 3);
        for part in template.marks().parts(&rendered) {
            match part {
                Part::Token(token) => tokens.push(token),
                Part::Text(text) => known.push_text(&self.tokenizer, &text, &mut tokens),
            }
        }
        Ok(tokens)
    }

    /// The same, with the tokens that `remember` was told for answers within the conversation in
    /// place of the tokenizer's own.
    pub fn chat_with_answers<M: Borrow<Json>>(
        &self,
        input: &ChatInput<'_, M>,
        known: &SegmentCache,
    ) -> Result<ChatTokens, PromptError> {
        if !known.holds_answers() {
            let tokens = self.chat(input, known)?;
            return Ok(ChatTokens { tokens, answers: 0 });
        }
        let template = self.template.as_ref().ok_or(PromptError::NoTemplate)?;
        let rendered = template.render(input)?;
        let mut tokens = Vec::with_capacity(rendered.len() / 3);
        let mut progress = Progress::new(known);
        let so_far = (&mut tokens, &mut progress);
        self.walk(template, &rendered, known, so_far, |_, _, _| true);
        Ok(ChatTokens {
            tokens,
            answers: progress.answers,
        })
    }

    /// The tokens of a plain prompt, with BOS where the model file asks for it. Control tokens in
    /// it are recognised: whoever sends a plain prompt applies the template by hand.
    pub fn completion(&self, text: &str, known: &SegmentCache) -> Vec<u32> {
        let mut tokens = Vec::with_capacity(text.len() / 3 + 1);
        tokens.extend(self.tokenizer.prompt_prefix());
        for piece in self.tokenizer.pieces_with_specials(text) {
            match piece {
                Piece::Token(token) => tokens.push(token),
                Piece::Text(text) => known.push_plain(&self.tokenizer, text, &mut tokens),
            }
        }
        tokens
    }
}
