//! Which tokens is this text?

use crate::error::LoadError;
use crate::gguf::Header;

/// A byte-level BPE tokenizer.
#[derive(Debug)]
pub struct Tokenizer {
    bytes: Vec<Vec<u8>>,
    eos: Vec<u32>,
}

impl Tokenizer {
    /// Builds the tokenizer from a model file's metadata.
    pub fn from_gguf(_: &Header) -> Result<Self, LoadError> {
        Err(LoadError::Template("not yet".into()))
    }

    /// The tokens of text in which special-token text stays text.
    pub fn encode_text(&self, _: &str) -> Vec<u32> {
        Vec::new()
    }

    /// The tokens of text in which control tokens are recognised.
    pub fn encode_with_specials(&self, _: &str) -> Vec<u32> {
        Vec::new()
    }

    /// A token's bytes; empty for control tokens and ids outside the vocabulary.
    pub fn token_bytes(&self, id: u32) -> &[u8] {
        self.bytes.get(id as usize).map_or(&[], Vec::as_slice)
    }

    /// Is this a control token (never shown as text)?
    pub fn is_control(&self, _: u32) -> bool {
        false
    }

    /// The tokens that end a generation.
    pub fn eos_ids(&self) -> &[u32] {
        &self.eos
    }

    /// The token that begins a sequence, if the model has one.
    pub fn bos(&self) -> Option<u32> {
        None
    }

    /// Number of tokens in the vocabulary.
    pub fn vocab_size(&self) -> usize {
        self.bytes.len()
    }
}
