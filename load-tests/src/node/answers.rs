//! What does an answer look like, whole and in pieces?
//!
//! OpenAI's chat and text completions with the fields that our engine adds: the tokens of each
//! piece where they were asked for, usage on every chunk, cached tokens in it.

use serde_json::{Value, json};

use super::state::Progress;

/// What the node was asked in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Form {
    /// Chat Completions.
    Chat,
    /// Completions.
    Text,
}

impl Form {
    /// The form that a path speaks.
    pub(super) fn at(path: &str) -> Option<Self> {
        match path {
            "/v1/chat/completions" => Some(Self::Chat),
            "/v1/completions" => Some(Self::Text),
            _ => None,
        }
    }
}

/// An answer to come.
pub(super) struct Answer {
    pub(super) form: Form,
    pub(super) id: String,
    pub(super) model: String,
    pub(super) prompt_tokens: usize,
    /// Its tokens and the text of each.
    pub(super) tokens: Vec<u32>,
    pub(super) texts: Vec<String>,
    pub(super) finish_reason: &'static str,
    /// Tell the tokens too.
    pub(super) token_ids: bool,
    /// Usage on every chunk.
    pub(super) continuous_usage: bool,
    /// Usage on a last chunk without choices.
    pub(super) last_usage: bool,
}

impl Answer {
    /// The body of an answer that is not streamed.
    pub(super) fn whole(&self, progress: Progress) -> Value {
        let text = self.texts.concat();
        let (object, mut choice) = match self.form {
            Form::Chat => (
                "chat.completion",
                json!({"index": 0, "message": {"role": "assistant", "content": text}}),
            ),
            Form::Text => ("text_completion", json!({"index": 0, "text": text})),
        };
        choice["finish_reason"] = self.finish_reason.into();
        if self.token_ids {
            choice["token_ids"] = self.tokens.clone().into();
        }
        json!({"id": self.id, "object": object, "created": 0, "model": self.model,
               "choices": [choice], "usage": self.usage(progress, self.tokens.len())})
    }

    /// The tokens between two places as one chunk.
    pub(super) fn chunk(&self, from: usize, progress: Progress) -> String {
        let to = (progress.tokens as usize).min(self.tokens.len());
        let text = self.texts[from..to].concat();
        let mut choice = match self.form {
            Form::Chat => json!({"index": 0, "delta": {"content": text}}),
            Form::Text => json!({"index": 0, "text": text}),
        };
        if from == 0 && self.form == Form::Chat {
            choice["delta"]["role"] = "assistant".into();
        }
        choice["finish_reason"] = Value::Null;
        if self.token_ids {
            choice["token_ids"] = self.tokens[from..to].into();
        }
        let usage = self.continuous_usage.then(|| self.usage(progress, to));
        self.event(&json!([choice]), usage)
    }

    /// What follows the last token.
    pub(super) fn tail(&self, progress: Progress) -> String {
        let mut choice = match self.form {
            Form::Chat => json!({"index": 0, "delta": {}}),
            Form::Text => json!({"index": 0, "text": ""}),
        };
        choice["finish_reason"] = self.finish_reason.into();
        let usage = || Some(self.usage(progress, self.tokens.len()));
        let mut text = self.event(
            &json!([choice]),
            self.continuous_usage.then(usage).flatten(),
        );
        if self.last_usage {
            text += &self.event(&json!([]), usage());
        }
        text + "data: [DONE]\n\n"
    }

    fn event(&self, choices: &Value, usage: Option<Value>) -> String {
        let object = match self.form {
            Form::Chat => "chat.completion.chunk",
            Form::Text => "text_completion",
        };
        let mut chunk = json!({"id": self.id, "object": object, "created": 0,
                               "model": self.model, "choices": choices});
        if let Some(usage) = usage {
            chunk["usage"] = usage;
        }
        format!("data: {chunk}\n\n")
    }

    fn usage(&self, progress: Progress, tokens: usize) -> Value {
        json!({"prompt_tokens": self.prompt_tokens, "completion_tokens": tokens,
               "total_tokens": self.prompt_tokens + tokens,
               "prompt_tokens_details": {"cached_tokens": progress.cached_tokens}})
    }
}
