//! What goes on inside one life of a simulated node?
//!
//! What its lock protects: the model of its time and memory, the blocks' contents, the log of its
//! events and the requests under way. [`State::move_to_now`] brings all of it up to the present:
//! blocks become events, tokens become progress that the requests wait for. What the model
//! says is carried out in `happened`; what two nodes share is in `handed`.

mod handed;
mod happened;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use cache_index::block::{BLOCK_TOKENS, BlockHash, creditable_blocks};
use serde::Serialize;
use simulate::engine::tiers::{Tier, TierParams};
use simulate::engine::{Happened, Job, Node as Model, Part};
use tokio::sync::watch;

use self::handed::Handed;
pub use self::handed::HandoverCounts;
use super::blocks::Blocks;
use super::changes::Changes;
use super::clock::Clock;
use super::events::Log;
use super::faults::Fault;
use super::handover::Offer;
use super::life::Birth;
use super::one_cache::OneCache;
use super::post::{Letter, Post};
use super::shelf::Shelf;

/// Between two looks at how far answers have come, in model time: a step of the default model.
const TOKENS_EVERY_MS: f64 = 12.0;
/// And in real time, so that many fast nodes leave the machine some.
const TOKENS_EVERY: Duration = Duration::from_millis(5);

/// What the lock protects.
pub(super) struct State {
    pub(super) log: Log,
    pub(super) blocks: Blocks,
    pub(super) is_draining: bool,
    pub(super) counts: Counts,
    pub(super) handed: Handed,
    model: Model,
    clock: Clock,
    requests: HashMap<u32, Request>,
    /// Those that wait while the pool is said to be full.
    parked: Option<Vec<Job>>,
    die_before_first: u32,
    die_mid_stream: u32,
    next_id: u32,
    one_cache: Option<Arc<OneCache>>,
    post: Arc<Post>,
    host: Option<TierParams>,
    shelf: Option<Shelf>,
}

/// What of a request is this node's.
pub(super) enum Half {
    /// All of it.
    Whole,
    /// Its prompt, for another node.
    Prompt(Offer),
    /// Its answer, once its KV has come from another node.
    Answer,
}

/// A request as it comes in.
pub(super) struct Asked {
    /// The full blocks of prompt and answer together.
    pub(super) chain: Vec<BlockHash>,
    /// The tokens of both.
    pub(super) tokens: Vec<u32>,
    /// Those blocks that are full of the prompt alone.
    pub(super) prompt_blocks: usize,
    pub(super) salt: Option<Arc<str>>,
    pub(super) prompt_tokens: usize,
    pub(super) answer_tokens: usize,
    pub(super) half: Half,
}

struct Request {
    progress: watch::Sender<Progress>,
    /// The numbers of its blocks, the answer's included.
    path: Arc<[u32]>,
    prompt_blocks: usize,
    answer_tokens: u32,
    prompt_tokens: u32,
    one_cache_tokens: u64,
    end: End,
    /// Tokens that the node had cached which computed its prompt; none where that is this one.
    handed_cached: Option<u32>,
}

/// How far a request has come.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Progress {
    /// Tokens of the prompt that were cached.
    pub(super) cached_tokens: u32,
    /// Tokens of the answer so far.
    pub(super) tokens: u32,
}

/// How a request will end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    /// With its answer.
    Whole,
    /// Before the first token.
    BeforeFirst,
    /// In the middle of its answer.
    MidStream,
}

/// What a life has done so far, by its own count.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Counts {
    /// Requests with a first token.
    pub requests: u64,
    /// Tokens of the prompts that were computed here.
    pub prompt_tokens: u64,
    /// Those of them that were cached.
    pub cached_tokens: u64,
    /// Those of them that were fetched from a slower tier.
    pub fetched_tokens: u64,
    /// Those of them that one unbounded cache shared by all nodes would have had; 0 where it is not
    /// counted.
    pub one_cache_tokens: u64,
    /// Tokens of answers that were completed.
    pub answer_tokens: u64,
}

impl State {
    pub(super) fn new(birth: Birth<'_>, boot_id: String, post: Arc<Post>) -> Self {
        let mut model = Model::new(birth.params, birth.capacity).holding_prompts();
        if let Some(host) = birth.host {
            model = model.with_host(host);
        }
        if let Some(shelf) = &birth.shelf {
            model = model.with_store(shelf.store.clone());
        }
        Self {
            log: Log::new(boot_id),
            blocks: Blocks::new(birth.numbers),
            is_draining: false,
            counts: Counts::default(),
            handed: Handed::new(birth.handover_gb_per_s),
            model,
            clock: Clock::new(birth.speed),
            requests: HashMap::new(),
            parked: None,
            die_before_first: 0,
            die_mid_stream: 0,
            next_id: 0,
            one_cache: birth.one_cache,
            post,
            host: birth.host,
            shelf: birth.shelf,
        }
    }

    /// Takes a request in: its number, how it gets on, how it will end.
    pub(super) fn begin(
        &mut self,
        now_ms: f64,
        asked: Asked,
    ) -> (u32, watch::Receiver<Progress>, End) {
        let id = self.next_id;
        self.next_id = self.next_id.wrapping_add(1);
        let prompt = &asked.chain[..asked.prompt_blocks];
        let seen = match (&self.one_cache, &asked.half) {
            // The node that computes it asks.
            (None, _) | (_, Half::Answer) => 0,
            (Some(cache), _) => cache.see(prompt),
        };
        let seen = seen.min(creditable_blocks(asked.prompt_tokens));
        let path = self
            .blocks
            .use_chain(&asked.chain, &asked.tokens, asked.salt.as_ref());
        let length = |count: usize| u32::try_from(count).unwrap_or(u32::MAX).max(1);
        let (progress, receiver) = watch::channel(Progress::default());
        let end = self.next_end();
        let request = Request {
            progress,
            path: path.into(),
            prompt_blocks: asked.prompt_blocks,
            answer_tokens: length(asked.answer_tokens),
            prompt_tokens: length(asked.prompt_tokens),
            one_cache_tokens: (seen * BLOCK_TOKENS) as u64,
            end,
            handed_cached: None,
        };
        self.requests.insert(id, request);
        match asked.half {
            Half::Whole => self.enqueue(now_ms, id, Part::Whole),
            Half::Prompt(offer) => {
                self.handed.offers.insert(id, offer);
                self.enqueue(now_ms, id, Part::Prompt);
            }
            Half::Answer => self.await_kv(now_ms, id),
        }
        (id, receiver, end)
    }

    /// Puts a request's part into the model, or where it waits while the pool is said to be full.
    fn enqueue(&mut self, now_ms: f64, id: u32, part: Part) {
        let Some(request) = self.requests.get(&id) else {
            return;
        };
        let job = Job {
            part,
            id,
            blocks: request.path[..request.prompt_blocks].into(),
            prompt_tokens: request.prompt_tokens,
            output_tokens: request.answer_tokens,
        };
        match &mut self.parked {
            Some(parked) => parked.push(job),
            None => self.model.enqueue(now_ms, job),
        }
    }

    /// Takes a request out, wherever it is; nothing if it has ended.
    pub(super) fn give_up(&mut self, now_ms: f64, id: u32) {
        if let Some(parked) = &mut self.parked {
            parked.retain(|job| job.id != id);
        }
        if let Some(request) = self.requests.remove(&id) {
            self.model.cancel(now_ms, id);
            self.forget_half(now_ms, id);
            self.blocks.release(&request.path);
        }
    }

    /// Something goes wrong, or ends going wrong; `speed` is the clock's own.
    pub(super) fn suffer(&mut self, now_ms: f64, fault: Fault, speed: f64) {
        match fault {
            Fault::DieBeforeFirstToken(count) => self.die_before_first = count,
            Fault::DieMidStream(count) => self.die_mid_stream = count,
            Fault::Slow(factor) => self.clock.set_speed(speed / factor),
            Fault::DropEvents(count) => self.log.lose(count),
            Fault::Wipe => {
                self.wipe(now_ms);
                // What requests under way hold is still there: all is cleared, and that is left.
                self.log.append_snapshot(&self.blocks);
            }
            Fault::WipeSilently => self.wipe(now_ms),
            Fault::Full => {
                self.parked.get_or_insert_default();
            }
            Fault::Free => {
                for job in self.parked.take().unwrap_or_default() {
                    self.model.enqueue(now_ms, job);
                }
            }
            Fault::Draining => self.is_draining = true,
            Fault::Ready => self.is_draining = false,
            Fault::Restart(_) => {}
        }
    }

    fn wipe(&mut self, now_ms: f64) {
        self.model.wipe(now_ms);
        for happened in self.model.advance(now_ms) {
            if let Happened::Removed { blocks, tier, .. } = happened {
                for number in blocks {
                    self.blocks.removed(number, tier);
                }
            }
        }
    }

    /// The share of the pool that requests hold, as a node reports it.
    pub(super) fn pool_usage(&self) -> f64 {
        match self.parked {
            Some(_) => 1.0,
            None => self.model.pool_used().min(1.0),
        }
    }

    /// Size of a block's KV.
    pub(super) fn block_bytes(&self) -> u64 {
        let params = self.model.params();
        (params.kv_bytes_per_token * BLOCK_TOKENS as f64) as u64
    }

    /// Blocks in the pool.
    pub(super) fn capacity(&self) -> usize {
        self.model.capacity()
    }

    /// Its memory below the pool.
    pub(super) fn host(&self) -> Option<TierParams> {
        self.host
    }

    /// How long a block takes from there, in real seconds.
    pub(super) fn host_block_s(&self, host: TierParams) -> f64 {
        host.block_ms(self.model.params()) / 1000.0 / self.clock.speed()
    }

    /// Requests whose answers come, and those that wait for that.
    pub(super) fn running_and_waiting(&self) -> (usize, usize) {
        let parked = self.parked.as_ref().map_or(0, Vec::len);
        let running = self.model.running();
        let waiting = self.model.in_flight() - running;
        (running, waiting + parked + self.handed.waiting())
    }

    /// When to look again; none where nothing is going on.
    pub(super) fn pause(&self, now_ms: f64) -> Option<Duration> {
        let next_ms = [self.model.next_ms(), self.handed.next_arrival_ms()];
        let next_ms = next_ms.into_iter().flatten().min_by(f64::total_cmp);
        let pauses = [
            next_ms.map(|next_ms| self.clock.until(next_ms)),
            self.handed.until_deadline(),
        ];
        let pause = pauses.into_iter().flatten().min()?;
        if self.model.running() == 0 {
            return Some(pause);
        }
        let tokens = self.clock.until(now_ms + TOKENS_EVERY_MS);
        Some(pause.min(tokens.max(TOKENS_EVERY)))
    }

    /// Brings everything up to now, which it returns.
    pub(super) fn move_to_now(&mut self) -> f64 {
        let now_ms = self.clock.now_ms();
        let mut changes = Changes::default();
        let mut ended = Vec::new();
        for letter in self.post.open() {
            self.read(now_ms, letter, &mut changes);
        }
        self.end_deadlines(now_ms);
        while let Some((at_ms, id)) = self.handed.next_arrival(now_ms) {
            self.move_to(at_ms, &mut changes, &mut ended);
            self.kv_came(at_ms, id);
        }
        self.move_to(now_ms, &mut changes, &mut ended);
        // The cache has said by now which of their blocks it keeps.
        for request in ended {
            self.blocks.release(&request.path);
        }
        self.tell_tokens();
        let events = changes.finish();
        if !events.is_empty() {
            self.log.append(events);
        }
        now_ms
    }

    fn read(&mut self, now_ms: f64, letter: Letter, changes: &mut Changes) {
        match letter {
            Letter::Taken(transfer) => self.taken(now_ms, transfer),
            // Deadlines are looked at next.
            Letter::LeftAlone => {}
            Letter::Unstored(number) => {
                changes.removed(Tier::Shared, self.blocks.removed(number, Tier::Shared));
            }
        }
    }

    fn next_end(&mut self) -> End {
        let kinds = [
            (&mut self.die_before_first, End::BeforeFirst),
            (&mut self.die_mid_stream, End::MidStream),
        ];
        for (left, end) in kinds {
            if *left > 0 {
                *left -= 1;
                return end;
            }
        }
        End::Whole
    }
}
