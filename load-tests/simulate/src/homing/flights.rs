//! What is under way, and what does the router learn as it goes on?

use std::sync::Arc;

use cache_index::approximate;
use cache_index::block::{BLOCK_TOKENS, BlockHash};
use cache_index::expected::Ticket;
use policies::load::Sent;

use super::{Decided, Homing, Knowledge};
use crate::router::Ask;

/// The node that computes a prompt for another one, until it has.
#[derive(Debug)]
pub(super) struct Computes {
    pub(super) node: usize,
    pub(super) ticket: Option<Ticket>,
}

/// A request that a node has and has not finished.
#[derive(Debug)]
pub(super) struct Flight {
    pub(super) node: usize,
    pub(super) prefill: Option<Computes>,
    pub(super) session: u64,
    pub(super) chain: Arc<[BlockHash]>,
    pub(super) ticket: Option<Ticket>,
    pub(super) sent: approximate::Sent,
}

impl Homing {
    pub(super) fn dispatch(&mut self, now_ms: f64, ask: &Ask<'_>, node: usize, decided: &Decided) {
        let Decided {
            chain,
            expected,
            request,
            decision,
        } = decided;
        let prefill = self.dispatch_prompt(now_ms, ask, decided);
        let per_block = self.fleet.per_block();
        let id = &self.nodes[node].id;
        let alone = chain.len() - expected[node];
        let held = match decision.pair() {
            Some(pair) => request.prompt_tokens - pair.moved_tokens.min(request.prompt_tokens),
            None => decision.expected_cached_tokens,
        };
        let sent = Sent {
            // Another node computes what this one lacks.
            cached_tokens: match prefill {
                Some(_) => request.prompt_tokens,
                None => held,
            },
            fetch_ms: match prefill {
                Some(_) => 0.0,
                None => decision.fetched().ms,
            },
            prompt_tokens: request.prompt_tokens,
            output_tokens: request.output_tokens_expected,
            pool_blocks: (alone * per_block) as u64,
        };
        let flight = Flight {
            node,
            prefill,
            session: ask.session,
            chain: Arc::clone(chain),
            ticket: self.expected.add(id, chain),
            sent: self.guess.sent(id, chain),
        };
        let load = &mut self.nodes[node].load;
        load.dispatched(now_ms, u64::from(ask.id), sent);
        let blocks = ((chain.len() * per_block) as u64, held / BLOCK_TOKENS as u64);
        self.sessions.bind(now_ms, ask.session, node, blocks);
        self.flights.insert(ask.id, flight);
    }

    /// The node that computes the prompt for another one is counted as busy with it; none where one
    /// node does all.
    fn dispatch_prompt(
        &mut self,
        now_ms: f64,
        ask: &Ask<'_>,
        decided: &Decided,
    ) -> Option<Computes> {
        let Decided {
            chain, decision, ..
        } = decided;
        let node = *self.numbers.get(&decision.pair()?.prefill)?;
        let sent = Sent {
            cached_tokens: decision.expected_cached_tokens,
            fetch_ms: decision.fetched().ms,
            prompt_tokens: u64::from(ask.prompt_tokens),
            output_tokens: 0,
            pool_blocks: ((chain.len() - decided.expected[node]) * self.fleet.per_block()) as u64,
        };
        let known = &mut self.nodes[node];
        known.load.dispatched(now_ms, u64::from(ask.id), sent);
        let ticket = self.expected.add(&known.id, chain);
        Some(Computes { node, ticket })
    }

    /// A node has computed the prompt of a request that another one answers.
    pub fn on_computed(&mut self, now_ms: f64, id: u32) {
        let Some(flight) = self.flights.get_mut(&id) else {
            return;
        };
        if let Some(Computes { node, ticket }) = flight.prefill.take() {
            self.nodes[node].load.ended(now_ms, u64::from(id));
            if let Some(ticket) = ticket {
                self.expected.end(ticket);
            }
        }
    }

    /// A request's first token has come, and with it the tokens that its node read from cache.
    pub fn on_first_token(&mut self, now_ms: f64, id: u32, cached_tokens: u32) {
        let Some(flight) = self.flights.get(&id) else {
            return;
        };
        let known = &mut self.nodes[flight.node];
        known.load.first_token(now_ms, u64::from(id));
        if self.settings.knowledge == Knowledge::Usage {
            // The last token is always computed, so a prompt held whole is reported one short.
            let cached = u64::from(cached_tokens).div_ceil(self.fleet.block_tokens);
            let cached = usize::try_from(cached).unwrap_or(usize::MAX);
            self.guess
                .served(&known.id, &flight.chain, flight.sent, Some(cached));
        }
    }

    /// A request has ended.
    pub fn on_finished(&mut self, now_ms: f64, id: u32, output_tokens: u32) {
        let Some(flight) = self.flights.remove(&id) else {
            return;
        };
        self.nodes[flight.node].load.ended(now_ms, u64::from(id));
        self.outputs.learn(flight.session, u64::from(output_tokens));
        if let Some(ticket) = flight.ticket {
            self.expected.end(ticket);
        }
    }
}
