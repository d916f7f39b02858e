//! What has a node that shares a request with another still to get, and still to give?
//!
//! A request whose prompt another node computes goes: awaited (what this node has of it is held), coming
//! (computed there, the rest of its KV on its way), here (a request of the model like any other). If
//! nothing comes it is computed here. A prompt that was computed for another node stays pinned until all
//! of it was taken, or until its deadline where nobody waits for it.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use cache_index::block::{BLOCK_TOKENS, creditable_blocks};
use serde::Serialize;
use simulate::engine::Part;

use super::super::handover::{Claim, Computed, Offer, TransferId};
use super::{End, Request, State};

/// What is shared.
pub(in super::super) struct Handed {
    pub(in super::super) counts: HandoverCounts,
    /// Of requests whose prompt is computed for others, by their numbers.
    pub(super) offers: HashMap<u32, Offer>,
    link_gb_per_s: f64,
    awaited: HashMap<u32, Awaited>,
    coming: Vec<Coming>,
    tickets: HashMap<TransferId, Held>,
}

/// What a life has handed over and taken so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct HandoverCounts {
    /// Prompts that were taken over by the node that they were computed for.
    pub transfers_sent: u64,
    /// Prompts whose KV was asked for.
    pub transfers_asked: u64,
    /// Those whose KV came whole.
    pub transfers_received: u64,
    /// Those whose KV did not come.
    pub transfers_failed: u64,
    /// Bytes that came.
    pub transfer_received_bytes: u64,
    /// Prompts that nobody took before their deadline.
    pub tickets_expired: u64,
}

struct Awaited {
    since_ms: f64,
    /// Tokens that need not come.
    held_tokens: u32,
}

struct Coming {
    at_ms: f64,
    id: u32,
    bytes: u64,
    cached_tokens: u32,
    claim: Claim,
}

struct Held {
    id: u32,
    deadline: Instant,
    /// Whoever waits for it sees when it is dropped.
    offer: Offer,
}

impl Held {
    /// When it is let go; not while somebody waits for it.
    fn deadline(&self) -> Option<Instant> {
        (!self.offer.is_awaited()).then_some(self.deadline)
    }
}

impl Handed {
    pub(super) fn new(link_gb_per_s: f64) -> Self {
        Self {
            counts: HandoverCounts::default(),
            offers: HashMap::new(),
            link_gb_per_s,
            awaited: HashMap::new(),
            coming: Vec::new(),
            tickets: HashMap::new(),
        }
    }

    /// Requests whose KV has not come.
    pub(super) fn waiting(&self) -> usize {
        self.awaited.len() + self.coming.len()
    }

    /// Prompts that are being computed for others, and those that wait to be taken.
    pub(in super::super) fn open_and_held(&self) -> (usize, usize) {
        (self.offers.len() + self.tickets.len(), self.tickets.len())
    }

    pub(super) fn next_arrival_ms(&self) -> Option<f64> {
        let times = self.coming.iter().map(|coming| coming.at_ms);
        times.min_by(f64::total_cmp)
    }

    /// The first request whose KV has come by now.
    pub(super) fn next_arrival(&self, now_ms: f64) -> Option<(f64, u32)> {
        let by_time = |a: &&Coming, b: &&Coming| a.at_ms.total_cmp(&b.at_ms);
        let first = self.coming.iter().min_by(by_time)?;
        (first.at_ms <= now_ms).then_some((first.at_ms, first.id))
    }

    pub(super) fn until_deadline(&self) -> Option<Duration> {
        let first = self.tickets.values().filter_map(Held::deadline).min()?;
        Some(first.saturating_duration_since(Instant::now()))
    }

    fn take_coming(&mut self, id: u32) -> Option<Coming> {
        let place = self.coming.iter().position(|coming| coming.id == id)?;
        Some(self.coming.swap_remove(place))
    }
}

impl State {
    /// Tickets are held for so many blocks.
    pub(in super::super) fn held_blocks(&self) -> usize {
        self.model.held().1
    }

    /// A request whose prompt another node computes: what is here of it stays.
    pub(super) fn await_kv(&mut self, now_ms: f64, id: u32) {
        let Some(request) = self.requests.get(&id) else {
            return;
        };
        let prompt = &request.path[..request.prompt_blocks];
        let blocks = self.model.hold(id, prompt);
        let params = self.model.params();
        let held_tokens = params.cached_tokens(blocks, request.prompt_tokens);
        let awaited = Awaited {
            since_ms: now_ms,
            held_tokens,
        };
        self.handed.awaited.insert(id, awaited);
        self.handed.counts.transfers_asked += 1;
    }

    /// The other node has computed it: what is missing travels, and has since it was asked for.
    pub(in super::super) fn kv_comes(&mut self, id: u32, computed: Computed, claim: Claim) {
        let (Some(awaited), Some(request)) =
            (self.handed.awaited.remove(&id), self.requests.get(&id))
        else {
            return;
        };
        let computed_ms = self.clock.ms_at(computed.at);
        let along_ms = (computed_ms - awaited.since_ms).clamp(0.0, computed.took_ms);
        let tokens = f64::from(request.prompt_tokens - awaited.held_tokens);
        let params = self.model.params();
        let left_ms = params.handover_left_ms(tokens, self.handed.link_gb_per_s, along_ms);
        self.handed.coming.push(Coming {
            at_ms: computed_ms.max(awaited.since_ms) + left_ms,
            id,
            bytes: (tokens * params.kv_bytes_per_token) as u64,
            cached_tokens: computed.cached_tokens,
            claim,
        });
    }

    /// Everything of it is here: it answers as soon as there is room.
    pub(super) fn kv_came(&mut self, at_ms: f64, id: u32) {
        let Some(coming) = self.handed.take_coming(id) else {
            return;
        };
        if let Some(request) = self.requests.get_mut(&id) {
            request.handed_cached = Some(coming.cached_tokens);
        }
        self.handed.counts.transfers_received += 1;
        self.handed.counts.transfer_received_bytes += coming.bytes;
        self.enqueue(at_ms, id, Part::Answer);
        self.model.let_go_held(at_ms, id);
        coming.claim.taken();
    }

    /// Nothing comes any more: the prompt is computed here. False where everything has come.
    pub(in super::super) fn compute_here(&mut self, now_ms: f64, id: u32) -> bool {
        if !self.fail_half(now_ms, id) {
            return false;
        }
        if let (Some(cache), Some(request)) = (&self.one_cache, self.requests.get_mut(&id)) {
            let prompt = self.blocks.hashes(&request.path[..request.prompt_blocks]);
            let most = creditable_blocks(request.prompt_tokens as usize);
            request.one_cache_tokens = (cache.see(&prompt).min(most) * BLOCK_TOKENS) as u64;
        }
        self.enqueue(now_ms, id, Part::Whole);
        true
    }

    /// Nothing comes any more, and the request does without. False where everything has come.
    pub(in super::super) fn fail_half(&mut self, now_ms: f64, id: u32) -> bool {
        let was_missing = self.forget_half(now_ms, id);
        self.handed.counts.transfers_failed += u64::from(was_missing);
        was_missing
    }

    /// Ends what is shared of a request; whether its KV had still to come.
    pub(in super::super) fn forget_half(&mut self, now_ms: f64, id: u32) -> bool {
        self.handed.offers.remove(&id);
        let was_awaited = self.handed.awaited.remove(&id).is_some();
        let was_coming = self.handed.take_coming(id).is_some();
        if was_awaited || was_coming {
            self.model.let_go_held(now_ms, id);
        }
        was_awaited || was_coming
    }

    /// A prompt for another node is computed: it is held for that one, and its request is over.
    pub(super) fn hand_over(&mut self, at_ms: f64, id: u32, took_ms: f64) -> Option<Request> {
        let request = self.requests.remove(&id)?;
        let offer = self.handed.offers.remove(&id);
        // One that dies leaves nothing to take.
        let Some(offer) = offer.filter(|_| request.end == End::Whole) else {
            self.model.let_go_held(at_ms, id);
            return Some(request);
        };
        let at = self.clock.instant(at_ms);
        offer.computed(Computed {
            at,
            took_ms,
            cached_tokens: request.progress.borrow().cached_tokens,
        });
        let held = Held {
            id,
            deadline: Instant::now().max(at) + offer.timeout,
            offer,
        };
        self.handed.tickets.insert(held.offer.id, held);
        Some(request)
    }

    /// The other node has everything.
    pub(super) fn taken(&mut self, now_ms: f64, transfer: TransferId) {
        if let Some(held) = self.handed.tickets.remove(&transfer) {
            self.handed.counts.transfers_sent += 1;
            self.model.let_go_held(now_ms, held.id);
        }
    }

    /// Lets go of what nobody took in time.
    pub(super) fn end_deadlines(&mut self, now_ms: f64) {
        let now = Instant::now();
        let late = |(_, held): &(&TransferId, &Held)| held.deadline().is_some_and(|at| at <= now);
        let late = self.handed.tickets.iter().filter(late);
        let late: Vec<TransferId> = late.map(|(transfer, _)| *transfer).collect();
        for transfer in late {
            if let Some(held) = self.handed.tickets.remove(&transfer) {
                self.handed.counts.tickets_expired += 1;
                self.model.let_go_held(now_ms, held.id);
            }
        }
    }
}
