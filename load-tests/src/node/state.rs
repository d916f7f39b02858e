//! What goes on inside one life of a simulated node?
//!
//! What its lock protects: the model of its time and memory, the blocks' contents, the log of its
//! events and the requests under way. [`State::move_to_now`] brings all of it up to the present:
//! blocks become events, tokens become progress that the requests wait for.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use cache_index::block::{BLOCK_TOKENS, BlockHash, creditable_blocks};
use serde::Serialize;
use simulate::engine::{Happened, Job, Node as Model, Part};
use tokio::sync::watch;

use super::blocks::Blocks;
use super::changes::Changes;
use super::clock::Clock;
use super::events::Log;
use super::faults::Fault;
use super::life::Birth;
use super::one_cache::OneCache;

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
    model: Model,
    clock: Clock,
    requests: HashMap<u32, Request>,
    /// Those that wait while the pool is said to be full.
    parked: Option<Vec<Job>>,
    die_before_first: u32,
    die_mid_stream: u32,
    next_id: u32,
    one_cache: Option<Arc<OneCache>>,
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
}

struct Request {
    progress: watch::Sender<Progress>,
    /// The numbers of its blocks, the answer's included.
    path: Arc<[u32]>,
    prompt_blocks: usize,
    answer_tokens: u32,
    prompt_tokens: u32,
    one_cache_tokens: u64,
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
    /// Tokens of their prompts.
    pub prompt_tokens: u64,
    /// Those of them that were cached.
    pub cached_tokens: u64,
    /// Those of them that one unbounded cache shared by all nodes would have had; 0 where it is not
    /// counted.
    pub one_cache_tokens: u64,
    /// Tokens of answers that were completed.
    pub answer_tokens: u64,
}

impl State {
    pub(super) fn new(birth: Birth<'_>) -> Self {
        Self {
            log: Log::new(format!("{:016x}", rand::random::<u64>())),
            blocks: Blocks::default(),
            is_draining: false,
            counts: Counts::default(),
            model: Model::new(birth.params, birth.capacity),
            clock: Clock::new(birth.speed),
            requests: HashMap::new(),
            parked: None,
            die_before_first: 0,
            die_mid_stream: 0,
            next_id: 0,
            one_cache: birth.one_cache,
        }
    }

    /// Takes a request in: its number, how it gets on, how it will end.
    pub(super) fn begin(
        &mut self,
        now_ms: f64,
        asked: &Asked,
    ) -> (u32, watch::Receiver<Progress>, End) {
        let id = self.next_id;
        self.next_id = self.next_id.wrapping_add(1);
        let prompt = &asked.chain[..asked.prompt_blocks];
        let seen = self.one_cache.as_ref().map_or(0, |cache| cache.see(prompt));
        let seen = seen.min(creditable_blocks(asked.prompt_tokens));
        let path = self
            .blocks
            .use_chain(&asked.chain, &asked.tokens, asked.salt.as_ref());
        let length = |count: usize| u32::try_from(count).unwrap_or(u32::MAX).max(1);
        let job = Job {
            part: Part::Whole,
            id,
            blocks: path[..asked.prompt_blocks].into(),
            prompt_tokens: length(asked.prompt_tokens),
            output_tokens: length(asked.answer_tokens),
        };
        let (progress, receiver) = watch::channel(Progress::default());
        let request = Request {
            progress,
            path: path.into(),
            prompt_blocks: asked.prompt_blocks,
            answer_tokens: job.output_tokens,
            prompt_tokens: job.prompt_tokens,
            one_cache_tokens: (seen * BLOCK_TOKENS) as u64,
        };
        self.requests.insert(id, request);
        match &mut self.parked {
            Some(parked) => parked.push(job),
            None => self.model.enqueue(now_ms, job),
        }
        (id, receiver, self.next_end())
    }

    /// Takes a request out, wherever it is; nothing if it has ended.
    pub(super) fn give_up(&mut self, now_ms: f64, id: u32) {
        if let Some(parked) = &mut self.parked {
            parked.retain(|job| job.id != id);
        }
        if let Some(request) = self.requests.remove(&id) {
            self.model.cancel(now_ms, id);
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
            if let Happened::Removed { blocks, .. } = happened {
                for number in blocks {
                    self.blocks.removed(number);
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

    /// Blocks in the pool.
    pub(super) fn capacity(&self) -> usize {
        self.model.capacity()
    }

    /// Requests whose answers come, and those that wait for that.
    pub(super) fn running_and_waiting(&self) -> (usize, usize) {
        let parked = self.parked.as_ref().map_or(0, Vec::len);
        let running = self.model.running();
        (running, self.model.in_flight() - running + parked)
    }

    /// When to look again; none where nothing is going on.
    pub(super) fn pause(&self, now_ms: f64) -> Option<Duration> {
        let next = self.model.next_ms()?;
        let pause = self.clock.until(next);
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
        loop {
            let happened = self.model.advance(now_ms);
            if happened.is_empty() {
                break;
            }
            for happened in happened {
                self.carry_out(now_ms, happened, &mut changes, &mut ended);
            }
        }
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

    fn carry_out(
        &mut self,
        now_ms: f64,
        happened: Happened,
        changes: &mut Changes,
        ended: &mut Vec<Request>,
    ) {
        match happened {
            Happened::Stored { path, from, to, .. } => {
                for number in &path[from..to] {
                    changes.stored(self.blocks.stored(*number));
                }
            }
            Happened::Removed { blocks, .. } => {
                for number in blocks {
                    changes.removed(self.blocks.removed(number));
                }
            }
            Happened::FirstToken {
                id, cached_tokens, ..
            } => self.first_token(id, cached_tokens),
            // It does all of a request.
            Happened::Computed { .. } => {}
            Happened::Finished { id, .. } => ended.extend(self.finished(now_ms, id)),
        }
    }

    fn first_token(&mut self, id: u32, cached_tokens: u32) {
        let Some(request) = self.requests.get(&id) else {
            return;
        };
        let block = u32::try_from(BLOCK_TOKENS).unwrap_or(1);
        // Whole blocks alone are read from a cache.
        let cached_tokens = cached_tokens / block * block;
        request.progress.send_replace(Progress {
            cached_tokens,
            tokens: 1,
        });
        self.counts.requests += 1;
        self.counts.prompt_tokens += u64::from(request.prompt_tokens);
        self.counts.cached_tokens += u64::from(cached_tokens);
        self.counts.one_cache_tokens += request.one_cache_tokens;
    }

    /// An answer is complete: its blocks stay as the prompt's do, since the next turn repeats them.
    fn finished(&mut self, now_ms: f64, id: u32) -> Option<Request> {
        let request = self.requests.remove(&id)?;
        self.counts.answer_tokens += u64::from(request.answer_tokens);
        if request.path.len() > request.prompt_blocks {
            self.model.keep(now_ms, &request.path);
        }
        if let Some(cache) = &self.one_cache {
            cache.see(&self.blocks.hashes(&request.path));
        }
        request
            .progress
            .send_modify(|progress| progress.tokens = request.answer_tokens);
        Some(request)
    }

    /// Tells the requests under way how many tokens their answers have.
    fn tell_tokens(&self) {
        for (id, request) in &self.requests {
            let Some(tokens) = self.model.answered_tokens(*id) else {
                continue;
            };
            request.progress.send_if_modified(|progress| {
                // The first one is told by itself.
                let more = progress.tokens > 0 && tokens > progress.tokens;
                if more {
                    progress.tokens = tokens;
                }
                more
            });
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
