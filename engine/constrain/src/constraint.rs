//! What may follow in one answer?
//!
//! The grammar library's matcher says what the grammar allows; beside it a [`Finisher`] says what
//! the budget allows. The budget is what the last call of [`Constraint::completion`] named, less
//! what was taken since.

use std::sync::Arc;

use llguidance::Matcher;

use crate::error::Broken;
use crate::finish::{Finisher, Plan};

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

    fn set(&mut self, token: u32) {
        if let Some(word) = self.0.get_mut(token as usize / 32) {
            *word |= 1 << (token % 32);
        }
    }

    fn only(&mut self, tokens: &[u32]) {
        self.0.fill(0);
        tokens.iter().for_each(|token| self.set(*token));
    }
}

/// A walk along one answer.
pub struct Constraint {
    plan: Arc<Plan>,
    matcher: Matcher,
    finisher: Finisher,
    mask: Mask,
    /// Tokens that leave enough of the budget; kept here so that no step allocates.
    affordable: Mask,
    left: Option<usize>,
    over: bool,
}

impl Constraint {
    pub(crate) fn new(plan: Arc<Plan>, matcher: Matcher) -> Self {
        let none = Mask(vec![0; plan.vocabulary.size().div_ceil(32)]);
        Self {
            finisher: Finisher::new(Arc::clone(&plan)),
            matcher,
            mask: none.clone(),
            affordable: none,
            left: None,
            over: false,
            plan,
        }
    }

    /// The tokens that may follow now: those that the grammar allows and after which the rest of the
    /// budget still finishes the answer.
    pub fn mask(&mut self) -> Result<&Mask, Broken> {
        if self.is_over() {
            self.mask.only(self.plan.vocabulary.eos());
            return Ok(&self.mask);
        }
        let allowed = self.matcher.compute_mask().map_err(broken)?;
        let words = allowed.as_slice();
        let n = self.mask.0.len().min(words.len());
        self.mask.0[..n].copy_from_slice(&words[..n]);
        self.mask.0[n..].fill(0);
        if let Some(left) = self.left.filter(|left| !self.finisher.is_far(*left)) {
            self.drop_what_is_too_long(left);
        }
        Ok(&self.mask)
    }

    fn drop_what_is_too_long(&mut self, left: usize) {
        let affordable = &mut self.affordable;
        affordable.0.fill(0);
        let after = left.saturating_sub(1);
        self.finisher.keep(after, |token| affordable.set(token));
        for end in self.plan.vocabulary.eos() {
            affordable.set(*end);
        }
        let words = || self.mask.0.iter().zip(&affordable.0);
        if words().any(|(allowed, affordable)| allowed & affordable != 0) {
            for (allowed, affordable) in self.mask.0.iter_mut().zip(&affordable.0) {
                *allowed &= affordable;
            }
        } else if let Some([first, ..]) = self.finisher.shortest() {
            // The grammar wants the forced text's own tokens; spelled otherwise it is short enough.
            self.mask.only(&[*first]);
        }
    }

    /// Takes the token that follows.
    pub fn commit(&mut self, token: u32) -> Result<(), Broken> {
        if self.over {
            return Ok(());
        }
        if self.plan.vocabulary.eos().contains(&token) && self.is_complete() {
            self.over = true;
            return Ok(());
        }
        self.take(&[token])
    }

    fn take(&mut self, tokens: &[u32]) -> Result<(), Broken> {
        self.matcher.consume_tokens(tokens).map_err(broken)?;
        for token in tokens {
            self.finisher.commit(*token);
        }
        self.left = self.left.map(|left| left.saturating_sub(tokens.len()));
        Ok(())
    }

    /// At most `most` tokens that must follow now, already taken. Never the end token.
    pub fn forced(&mut self, most: usize) -> Result<Vec<u32>, Broken> {
        if self.is_over() {
            return Ok(Vec::new());
        }
        let mut tokens = self.matcher.compute_ff_tokens();
        tokens.truncate(most);
        if let Some(left) = self.left {
            while !tokens.is_empty() {
                let after = left.checked_sub(tokens.len());
                if after.is_some_and(|after| self.finisher.survives(&tokens, after)) {
                    break;
                }
                tokens.pop();
            }
        }
        self.take(&tokens)?;
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

    /// The shortest completion, as soon as it needs all of the `left` tokens of the budget; already
    /// taken, and the answer is over with it. While it is none, the mask allows only tokens after
    /// which a completion within the budget is left, if there was one to begin with.
    pub fn completion(&mut self, left: usize) -> Result<Option<Vec<u32>>, Broken> {
        self.left = Some(left);
        if self.is_over() {
            return Ok(Some(Vec::new()));
        }
        if self.finisher.is_far(left) || self.finisher.is_surely_below(left) {
            return Ok(None);
        }
        let shortest = self.finisher.shortest().map(<[u32]>::to_vec);
        let Some(rest) = shortest.filter(|shortest| shortest.len() == left) else {
            return Ok(None);
        };
        self.take(&rest)?;
        if !self.is_complete() {
            return Err(Broken(
                "its shortest completion does not complete it".into(),
            ));
        }
        self.over = true;
        Ok(Some(rest))
    }
}

fn broken(error: impl std::fmt::Display) -> Broken {
    let text = error.to_string();
    Broken(text.lines().next().unwrap_or_default().to_owned())
}
