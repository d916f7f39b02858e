//! Where do prompts of exactly 512 tokens come from, none with a block in common with another?
//!
//! From the file's own vocabulary: a row of words that are one token each has as many tokens as
//! words, and is checked with the tokenizer before it is used.

use std::path::Path;

use prompt::{PromptBuilder, gguf};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use crate::error::LoadError;

/// Makes texts of exactly so many tokens, no two with a common first block.
pub(crate) struct Prompts {
    builder: PromptBuilder,
    words: Vec<String>,
    random: StdRng,
    model_id: String,
}

impl Prompts {
    pub(crate) fn new(model: &Path, seed: u64) -> Result<Self, LoadError> {
        let bytes = std::fs::read(model).map_err(LoadError::file(model))?;
        let wrong = |e: &dyn std::fmt::Display| {
            LoadError::program("the model file", format!("{}: {e}", model.display()))
        };
        let header = gguf::Header::parse(&bytes).map_err(|e| wrong(&e))?;
        let builder = PromptBuilder::from_gguf(&header).map_err(|e| wrong(&e))?;
        // Words that are one token with their space: any row of them has as many tokens as words.
        let words: Vec<String> = (0..builder.tokenizer().vocab_size() as u32)
            .filter_map(|id| String::from_utf8(builder.tokenizer().token_bytes(id).to_vec()).ok())
            .filter(|t| t.len() > 4 && t.starts_with(' '))
            .filter(|t| t[1..].bytes().all(|b| b.is_ascii_lowercase()))
            .filter(|t| builder.tokenizer().encode_text(t).len() == 1)
            .collect();
        if words.len() < 1000 {
            return Err(wrong(&"too few words of one token to make prompts of"));
        }
        let stem = model.file_stem().unwrap_or_default();
        let model_id = stem.to_string_lossy().into_owned();
        Ok(Self {
            builder,
            words,
            random: StdRng::seed_from_u64(seed),
            model_id,
        })
    }

    /// The id under which our engine serves the file; the peer takes any.
    pub(crate) fn model_id(&self) -> &str {
        &self.model_id
    }

    /// The tokens that end an answer.
    pub(crate) fn ends(&self) -> &[u32] {
        self.builder.tokenizer().eos_ids()
    }

    /// A text of exactly so many tokens.
    pub(crate) fn next(&mut self, tokens: usize) -> String {
        let mut text = String::new();
        while self.builder.tokenizer().encode_text(&text).len() < tokens {
            let missing = tokens - self.builder.tokenizer().encode_text(&text).len();
            for _ in 0..missing {
                text += &self.words[self.random.random_range(0..self.words.len())];
            }
        }
        text
    }
}
