//! What must a node have cached? The test's own answer.
//!
//! It renders and tokenises the conversation itself and remembers, per node and tenant, every token
//! sequence whose KV that node has computed: the prompt, and the generated tokens but the last one
//! sampled (which was never fed back). What may be credited of a new prompt then follows from the
//! definition: whole 16-token blocks of the longest prefix shared with any of those, and at most
//! those before the prompt's last token.

#![expect(clippy::panic, reason = "a helper fails its test with what it saw")]

use std::collections::HashMap;

use load_tests::chat::Outcome;
use prompt::{Answered, ChatInput, PromptBuilder, SegmentCache, gguf};
use serde_json::{Value, json};

const BLOCK: usize = 16;

/// The model's tokenizer and template, and the way back from text to a single token.
pub(crate) struct Model {
    builder: PromptBuilder,
    segments: SegmentCache,
    by_bytes: HashMap<Vec<u8>, u32>,
}

impl Model {
    /// Reads the file that the stack serves.
    pub(crate) fn load() -> Self {
        let bytes = std::fs::read(super::support::model_path()).expect("the model file");
        let header = gguf::Header::parse(&bytes).expect("a GGUF");
        let builder = PromptBuilder::from_gguf(&header).expect("a tokenizer and a template");
        let tokenizer = builder.tokenizer();
        let by_bytes = (0..u32::try_from(tokenizer.vocab_size()).expect("a small vocabulary"))
            .filter(|id| !tokenizer.is_control(*id))
            .map(|id| (tokenizer.token_bytes(id).to_vec(), id))
            .collect();
        Self {
            builder,
            segments: SegmentCache::new(1 << 20),
            by_bytes,
        }
    }

    /// The prompt of a chat request: answers of the conversation by the tokens that were produced.
    pub(crate) fn prompt(&self, messages: &[Value]) -> Vec<u32> {
        self.builder
            .chat_with_answers(&input(messages), &self.segments)
            .expect("a valid conversation")
            .tokens
    }

    /// Notes the tokens of an answer to these messages.
    pub(crate) fn heard(&self, messages: &[Value], prompt: &[u32], outcome: &Outcome) {
        let answered = Answered {
            prompt,
            message: &json!({"role": "assistant", "content": outcome.text()}),
            tokens: &self.produced(outcome),
        };
        self.builder
            .remember(&input(messages), &answered, &self.segments);
    }

    /// The tokens of an answer's text. Each piece of a stream is the text of one token, and a
    /// vocabulary has each text once, so the way back is unambiguous.
    fn produced(&self, outcome: &Outcome) -> Vec<u32> {
        let token = |piece: &String| {
            let id = self.by_bytes.get(piece.as_bytes());
            *id.unwrap_or_else(|| panic!("{piece:?} is no single token"))
        };
        outcome.pieces.iter().map(token).collect()
    }

    /// The tokens that the node generated and fed back.
    pub(crate) fn fed_back(&self, outcome: &Outcome) -> Vec<u32> {
        let usage = outcome.usage.expect("a usage");
        let mut tokens = self.produced(outcome);
        match outcome.finish_reason.as_deref() {
            // The last token was sampled and sent, but never fed back.
            Some("length") => {
                assert_eq!(
                    tokens.len() as u64,
                    usage.completion_tokens,
                    "{:?}",
                    outcome.pieces
                );
                tokens.pop();
            }
            // The end token was sampled from the last visible one, so all visible ones were fed.
            Some("stop") => assert!(
                usage.completion_tokens.abs_diff(tokens.len() as u64) <= 1,
                "{usage:?} {:?}",
                outcome.pieces
            ),
            other => panic!("finish_reason {other:?}"),
        }
        tokens
    }
}

fn input(messages: &[Value]) -> ChatInput<'_> {
    ChatInput {
        messages,
        tools: None,
        template_kwargs: None,
        unix_seconds: 1_800_000_000,
    }
}

/// What each node holds of each tenant.
#[derive(Default)]
pub(crate) struct Held {
    sequences: HashMap<(String, String), Vec<Vec<u32>>>,
}

impl Held {
    /// Tokens of `prompt` that this node must report as cached.
    pub(crate) fn cached(&self, node: &str, tenant: &str, prompt: &[u32]) -> u64 {
        let held = self.sequences.get(&(node.to_owned(), tenant.to_owned()));
        let shared = held
            .into_iter()
            .flatten()
            .map(|sequence| {
                sequence
                    .iter()
                    .zip(prompt)
                    .take_while(|(a, b)| a == b)
                    .count()
            })
            .max()
            .unwrap_or(0);
        (BLOCK * (shared / BLOCK).min((prompt.len() - 1) / BLOCK)) as u64
    }

    /// Notes what a node has computed.
    pub(crate) fn add(&mut self, node: &str, tenant: &str, computed: Vec<u32>) {
        self.sequences
            .entry((node.to_owned(), tenant.to_owned()))
            .or_default()
            .push(computed);
    }
}
