//! How do several answers to one prompt come out of the engine?
//!
//! Each choice is a request of the engine's own. They are heard in turn, so that none waits behind
//! a talkative one. Dropping this cancels them all.

use std::task::{Context, Poll};

use crate::engine::{Output, Ticket};
use crate::error::ApiError;

/// The requests behind one answer.
#[derive(Debug, Default)]
pub(super) struct Choices {
    /// By index; none once it has ended.
    tickets: Vec<Option<Ticket>>,
    /// Who is heard first.
    turn: usize,
}

impl Choices {
    /// Adds the next choice.
    pub(super) fn push(&mut self, ticket: Ticket) {
        self.tickets.push(Some(ticket));
    }

    /// Whether every choice has ended.
    pub(super) fn are_over(&self) -> bool {
        self.tickets.iter().all(Option::is_none)
    }

    /// The next thing that one of them says, with its index. Must not be asked once all are over.
    pub(super) async fn next(&mut self) -> (usize, Output) {
        std::future::poll_fn(|context| self.poll_next(context)).await
    }

    /// As [`Choices::next`], for hand-written futures.
    pub(super) fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<(usize, Output)> {
        let count = self.tickets.len();
        for step in 0..count {
            let index = (self.turn + step) % count;
            let Some(ticket) = &mut self.tickets[index] else {
                continue;
            };
            let Poll::Ready(output) = ticket.poll_next(context) else {
                continue;
            };
            self.turn = index + 1;
            let ended = || Output::Failed(ApiError::internal("the engine's thread ended"));
            let output = output.unwrap_or_else(ended);
            match output {
                Output::Joined { .. } | Output::Text { .. } => {}
                Output::Done { .. } | Output::Embedding(..) | Output::Failed(_) => {
                    self.tickets[index] = None;
                }
            }
            return Poll::Ready((index, output));
        }
        Poll::Pending
    }
}
