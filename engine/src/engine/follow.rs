//! What follows from a token without a forward pass?
//!
//! A grammar may leave no choice: then its tokens are appended at once and computed together with
//! the next step. And when the rest of the budget is just enough to finish the answer as the grammar
//! wants it, the shortest completion is appended and the answer ends, valid, with `stop`.
//!
//! Where log probabilities are asked for, every token needs its own row of logits: nothing is taken
//! ahead then, only the completion.

use constrain::Broken;

use super::answer::Voice;
use super::sequence::Sequence;
use crate::error::{ApiError, Kind};
use crate::metrics::Ending;

/// Tokens that a grammar may force at once. More come in the next step; a bound keeps a grammar
/// that repeats a literal for ever from doing it within one step.
const FORCED_MAX: usize = 256;

impl Sequence {
    /// Takes what must follow now. Some if the answer ends with it.
    pub(super) fn follow(&mut self, voice: &Voice<'_>) -> Result<Option<Ending>, ApiError> {
        let Some(mut constraint) = self.job.constraint.take() else {
            return Ok(None);
        };
        let ending = self.follow_grammar(&mut constraint, voice);
        self.job.constraint = Some(constraint);
        ending.map_err(broken)
    }

    /// Appends a token that was picked, and what follows from it.
    pub(super) fn push_picked(
        &mut self,
        picked: crate::sample::Picked,
        voice: &Voice<'_>,
    ) -> Result<Option<Ending>, ApiError> {
        let token = picked.token;
        let ending = self.push(token, picked.logprobs, voice);
        let Some(constraint) = &mut self.job.constraint else {
            return Ok(ending);
        };
        match ending {
            Some(Ending::Stop) => return Ok(ending),
            // The last token of the budget; whether the answer is whole with it decides its ending.
            Some(_) | None => constraint.commit(token).map_err(broken)?,
        }
        Ok(self.follow(voice)?.or(ending))
    }

    fn follow_grammar(
        &mut self,
        constraint: &mut constrain::Constraint,
        voice: &Voice<'_>,
    ) -> Result<Option<Ending>, Broken> {
        if constraint.is_over() {
            return Ok(Some(Ending::Stop));
        }
        if let Some(rest) = constraint.completion(self.output_left())? {
            for token in rest {
                if let Some(ending @ Ending::Stop) = self.push(token, None, voice) {
                    return Ok(Some(ending));
                }
            }
            return Ok(Some(Ending::Stop));
        }
        if self.job.logprobs.is_some() {
            return Ok(None);
        }
        let most = self.output_left().min(FORCED_MAX);
        for token in constraint.forced(most)? {
            voice.metrics.forced_tokens.inc();
            if let Some(ending) = self.push(token, None, voice) {
                let whole = constraint.is_complete();
                return Ok(Some(if whole { Ending::Stop } else { ending }));
            }
        }
        Ok(constraint.is_over().then_some(Ending::Stop))
    }
}

/// The request's own grammar asked for what cannot be done: no fault of the node, which a gateway
/// would otherwise stop trusting.
pub(super) fn broken(error: Broken) -> ApiError {
    let message = "No complete answer of the demanded form could be found within this engine's \
                   limits. Make the grammar simpler, so that its parts do not run into each other, \
                   or raise the token limit.";
    let mut refusal = ApiError::new(Kind::Invalid, "grammar_failed", message);
    refusal.detail = Some(error.to_string());
    refusal
}
