//! How are log probabilities told, in either dialect?

use serde_json::{Map, Value, json};

use super::Shape;
use crate::engine::Produced;
use crate::request::Dialect;

/// Told in place of −∞, which JSON does not have; vLLM's number.
const LEAST: f32 = -9999.0;

/// Characters of a choice's text so far: completions tell where each token begins.
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::server) struct Offset(usize);

impl Shape {
    /// The `logprobs` of a choice or a chunk of it.
    pub(super) fn logprobs_value(&self, tokens: &[Produced], offset: &mut Offset) -> Value {
        match self.dialect {
            Dialect::Chat => {
                let content = tokens.iter().map(|token| self.chat_token(token));
                json!({"content": content.collect::<Vec<_>>(), "refusal": null})
            }
            Dialect::Completions => self.completion_tokens(tokens, offset),
        }
    }

    fn chat_token(&self, token: &Produced) -> Value {
        let mut value = self.one(token.id, token.logprob);
        let top = token
            .top
            .iter()
            .map(|(id, logprob)| self.one(*id, *logprob));
        value["top_logprobs"] = top.collect();
        value
    }

    fn one(&self, id: u32, logprob: f32) -> Value {
        json!({
            "token": self.served.token_text(id), "logprob": logprob.max(LEAST),
            "bytes": self.served.token_bytes(id),
        })
    }

    fn completion_tokens(&self, tokens: &[Produced], offset: &mut Offset) -> Value {
        let mut offsets = Vec::with_capacity(tokens.len());
        let mut top = Vec::with_capacity(tokens.len());
        for token in tokens {
            offsets.push(offset.0);
            offset.0 += self.served.token_text(token.id).chars().count();
            let likeliest = token.top.iter().map(|(id, logprob)| {
                let text = self.served.token_text(*id).into_owned();
                (text, json!(logprob.max(LEAST)))
            });
            let mut likeliest: Map<String, Value> = likeliest.collect();
            // As OpenAI and vLLM have it: the chosen one is among them in any case.
            likeliest
                .entry(self.served.token_text(token.id))
                .or_insert_with(|| json!(token.logprob.max(LEAST)));
            top.push(Value::Object(likeliest));
        }
        let texts = tokens.iter().map(|token| self.served.token_text(token.id));
        let logprobs = tokens.iter().map(|token| token.logprob.max(LEAST));
        json!({
            "tokens": texts.collect::<Vec<_>>(), "token_logprobs": logprobs.collect::<Vec<_>>(),
            "top_logprobs": top, "text_offset": offsets,
        })
    }
}
