//! What is known of one node?
//!
//! Three kinds of knowledge, each with one writer: what the operator said (fixed), what the node
//! says of itself ([`Facts`], written by its health loop), and what this gateway has in flight
//! there (counters, written by [`InFlight`](super::InFlight) guards). A decision sees them as one
//! [`NodeView`].

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use arc_swap::ArcSwap;
use cache_index::block::BLOCK_TOKENS;
use cache_index::ids::NodeId;
use cache_index::tiers::Tiers;
use cache_index::trust::Trust;
use policies::breaker::{Breaker, BreakerParams, Gate};
use policies::load::NodeLoad;
use policies::transfer::Transfers;
use policies::view::{FetchCosts, NodeState, NodeView, SessionKey};
use policies::working_set::WorkingSet;
use tokio::sync::{Notify, watch};

use super::load::Dispatch;
use super::partner::KvInfo;
use super::tiers::NodeTiers;
use crate::config::{Duty, NodeConfig};

/// What a node says of itself.
#[derive(Clone, Debug, PartialEq)]
pub struct Facts {
    /// Whether it can take requests, by its last health checks.
    pub state: NodeState,
    /// Most tokens of prompt and answer together.
    pub context_max: u64,
    /// Whether it reports tokens and takes them; see `docs/OPERATING.md`, "Nodes".
    pub token_ids: bool,
    /// Blocks of 16 tokens in its KV pool; 0 if it does not say.
    pub pool_blocks: u64,
    /// Blocks of 16 tokens that running requests hold.
    pub pool_used_blocks: u64,
    /// Its own block size in tokens.
    pub block_tokens: u64,
    /// What it has below its pool.
    pub tiers: NodeTiers,
    /// Its process start time, in seconds; tells one life from the next.
    pub started_s: Option<f64>,
    /// The shortest of its recent answers to a health check.
    pub round_trip_ms: f64,
    /// What another node must know to take its KV, or to give it some; none where it has not told.
    pub kv: Option<Arc<KvInfo>>,
}

/// One node of the fleet.
pub struct Node {
    /// Configured name.
    pub id: NodeId,
    /// Where to connect.
    pub addr: SocketAddr,
    /// The authority of its URL, for the `host` header.
    pub host: String,
    /// Configured region.
    pub region: String,
    /// What it does of a turn.
    pub duty: Duty,
    /// What fetching KV costs there where it does not tell itself.
    pub fetch_ms_per_block: FetchCosts,
    pub(super) events: Option<String>,
    pub(super) replay: Option<String>,
    pub(super) facts: ArcSwap<Facts>,
    pub(super) model: watch::Sender<Option<Arc<str>>>,
    pub(super) load: Load,
    /// Wakes the health loop ahead of its time.
    pub(super) check_now: Notify,
    /// Tells the event consumer that the node it listened to is gone.
    pub(super) lost: Notify,
    breaker: Mutex<Breaker>,
    born: Instant,
    trust: AtomicU8,
    pub(super) resyncs: AtomicU64,
    pub(super) event_batches: AtomicU64,
    /// What of its events brought no credit.
    pub(super) refused: Refused,
    /// Whether its events name chains by our salts.
    pub(super) salts: AtomicU8,
    /// Whether it has ever reported a cached token.
    pub(super) reports_cached: AtomicBool,
    /// What it said of its KV may be another process's.
    pub(super) kv_doubtful: AtomicBool,
    /// How fast KV arrives there.
    pub(super) transfers: Mutex<Transfers>,
}

/// Blocks and events that brought no credit, for metrics.
#[derive(Default)]
pub(super) struct Refused {
    /// Messages that could not be decoded, and events whose lengths contradict each other.
    pub(super) malformed: AtomicU64,
    /// Blocks after one that is not known.
    pub(super) orphans: AtomicU64,
    /// Blocks under salts or other keys that are not ours.
    pub(super) uncreditable: AtomicU64,
    /// Blocks that were left out at a limit.
    pub(super) over_limit: AtomicU64,
}

/// No chain has begun in its events yet.
const SALTS_UNKNOWN: u8 = 0;
/// Chains begin, and none of them with a salt.
const SALTS_ABSENT: u8 = 1;
/// A chain has begun with a salt of ours.
const SALTS_SEEN: u8 = 2;

/// What this gateway has in flight on a node.
#[derive(Default)]
pub(super) struct Load {
    pub(super) requests: AtomicU64,
    /// Requests that were ever sent there; their numbers.
    pub(super) dispatched: AtomicU64,
    /// Output tokens still expected; counted down as answers stream.
    pub(super) decode_tokens: AtomicU64,
    work: Mutex<NodeLoad>,
    sessions: Mutex<WorkingSet>,
}

impl Node {
    pub(super) fn new(config: &NodeConfig) -> Self {
        let NodeConfig {
            id,
            addr,
            host,
            events,
            replay,
            region,
            duty,
            fetch_ms_per_block,
        } = config;
        Self {
            id: id.clone(),
            addr: *addr,
            host: host.clone(),
            region: region.clone(),
            duty: duty.clone(),
            fetch_ms_per_block: *fetch_ms_per_block,
            events: events.clone(),
            replay: replay.clone(),
            facts: ArcSwap::from_pointee(Facts {
                state: NodeState::Down {
                    why: "not checked yet".to_owned(),
                },
                context_max: 0,
                token_ids: false,
                pool_blocks: 0,
                pool_used_blocks: 0,
                block_tokens: 16,
                tiers: NodeTiers::default(),
                started_s: None,
                round_trip_ms: 0.0,
                kv: None,
            }),
            model: watch::channel(None).0,
            load: Load::default(),
            check_now: Notify::new(),
            lost: Notify::new(),
            breaker: Mutex::new(Breaker::new(BreakerParams::default())),
            born: Instant::now(),
            trust: AtomicU8::new(0),
            resyncs: AtomicU64::new(0),
            event_batches: AtomicU64::new(0),
            refused: Refused::default(),
            salts: AtomicU8::new(SALTS_UNKNOWN),
            reports_cached: AtomicBool::new(false),
            kv_doubtful: AtomicBool::new(false),
            transfers: Mutex::default(),
        }
    }

    /// The model id that the node serves; `None` until it has answered once.
    pub fn model(&self) -> Option<Arc<str>> {
        self.model.borrow().clone()
    }

    /// What the node says of itself.
    pub fn facts(&self) -> Arc<Facts> {
        self.facts.load_full()
    }

    /// How far the index may be believed about this node.
    pub fn trust(&self) -> Trust {
        match self.trust.load(Ordering::Acquire) {
            2 => Trust::Exact,
            1 => Trust::Partial,
            _ => Trust::Unknown,
        }
    }

    /// Whether it is judged by what was sent there: it has no events, or they carry no salts
    /// (SGLang), so that nobody can say whose blocks they are about.
    pub fn is_judged(&self) -> bool {
        self.events.is_none() || self.salts.load(Ordering::Relaxed) == SALTS_ABSENT
    }

    /// A chain begins in its events, with a salt or without. One salt is enough: other chains may
    /// come from clients that go past the gateway.
    pub(super) fn saw_chain(&self, is_salted: bool) {
        if is_salted {
            self.salts.store(SALTS_SEEN, Ordering::Relaxed);
            return;
        }
        let (unknown, absent) = (SALTS_UNKNOWN, SALTS_ABSENT);
        let relaxed = Ordering::Relaxed;
        // Fails where it is known already, which is well.
        let _ = self
            .salts
            .compare_exchange(unknown, absent, relaxed, relaxed);
    }

    /// Another process may be another engine.
    pub(super) fn forget_salts(&self) {
        self.salts.store(SALTS_UNKNOWN, Ordering::Relaxed);
    }

    /// How often everything known of it was forgotten.
    pub fn resyncs(&self) -> u64 {
        self.resyncs.load(Ordering::Relaxed)
    }

    /// How many batches of its KV events were applied.
    pub fn event_batches(&self) -> u64 {
        self.event_batches.load(Ordering::Relaxed)
    }

    pub(super) fn set_trust(&self, trust: Trust) {
        let code = match trust {
            Trust::Unknown => 0,
            Trust::Partial => 1,
            Trust::Exact => 2,
        };
        self.trust.store(code, Ordering::Release);
    }

    /// Whether it takes requests now, health checks and breaker together.
    pub fn state(&self) -> NodeState {
        let state = self.facts.load().state.clone();
        match (&state, self.gate()) {
            (NodeState::Up, gate) if !gate.passes() => NodeState::BreakerOpen,
            _ => state,
        }
    }

    /// Requests of this gateway in flight there.
    pub fn requests_in_flight(&self) -> u64 {
        self.load.requests.load(Ordering::Relaxed)
    }

    /// The node as a decision sees it, which holds so many leading blocks of the prompt. How many
    /// sessions are bound to it is the caller's to add, and what their caches mean to the request
    /// ([`Node::view_for`]).
    pub fn view(&self, overlap: Tiers) -> NodeView {
        let state = self.state();
        let facts = self.facts.load();
        self.with_work(|work, now_ms| NodeView {
            id: self.id.clone(),
            region: self.region.clone(),
            state,
            round_trip_ms: facts.round_trip_ms,
            inflight_prefill_tokens: work.prefill_tokens(now_ms),
            inflight_decode_tokens: self.load.decode_tokens.load(Ordering::Relaxed),
            prefill_tokens_per_s: work.tokens_per_s(),
            context_doubles_tokens: work.context_doubles_tokens(),
            pool_blocks: facts.pool_blocks,
            // What the node said last, or what was sent there since.
            pool_used_blocks: facts.pool_used_blocks.max(work.pool_blocks()),
            overlap_blocks: overlap.device,
            overlap_tiers: overlap,
            fetch_ms_per_block: facts.tiers.fetch_costs(&self.fetch_ms_per_block),
            node_block_tokens: facts.block_tokens,
            context_max: facts.context_max,
            bound_sessions: 0,
            arrivals_per_s: work.arrivals_per_s(now_ms),
            busy_share: work.busy_share(now_ms),
            kept_ms: f64::INFINITY,
            role: self.duty.role,
            handover: self.handover(&facts),
            needs_partner: self.needs_partner(),
            decoding_requests: work.decoding(),
        })
    }

    /// The node as a decision about a turn of this session sees it, whose prompt has so many blocks.
    pub fn view_for(&self, overlap: Tiers, session: SessionKey, prompt_blocks: u64) -> NodeView {
        let mut view = self.view(overlap);
        let pool = view.pool_blocks;
        if pool == 0 {
            return view;
        }
        let (held, coming) = (view.overlap_blocks as u64, self.coming_blocks(&view));
        self.with_sessions(|sessions, now_ms| {
            let found = sessions.found_blocks(session, pool, held, coming);
            view.overlap_blocks = usize::try_from(found).unwrap_or(usize::MAX);
            view.kept_ms = sessions.kept_ms(now_ms, pool, prompt_blocks, session);
        });
        view
    }

    /// Blocks of 16 tokens that the requests in flight may still bring, each one's last node block
    /// whole. Without a bound where no events tell what is there already.
    fn coming_blocks(&self, view: &NodeView) -> u64 {
        if self.is_judged() {
            return u64::MAX;
        }
        let last = self.requests_in_flight() * view.node_block_tokens;
        let tokens = view.inflight_prefill_tokens + view.inflight_decode_tokens + last;
        tokens.div_ceil(BLOCK_TOKENS as u64)
    }

    /// A turn of a session goes here.
    pub(super) fn used_by(&self, dispatch: &Dispatch<'_>) {
        let (prompt, cached) = dispatch.blocks();
        self.with_sessions(|sessions, now_ms| {
            sessions.used(now_ms, dispatch.session, prompt, cached);
        });
    }

    /// A turn of a session goes elsewhere.
    pub(super) fn left_by(&self, session: SessionKey) {
        self.with_sessions(|sessions, _| sessions.left(session));
    }

    pub(super) fn with_work<T>(&self, act: impl FnOnce(&mut NodeLoad, f64) -> T) -> T {
        let now_ms = self.born.elapsed().as_secs_f64() * 1000.0;
        let mut work = self
            .load
            .work
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        act(&mut work, now_ms)
    }

    fn with_sessions<T>(&self, act: impl FnOnce(&mut WorkingSet, u64) -> T) -> T {
        let now_ms = u64::try_from(self.born.elapsed().as_millis()).unwrap_or(u64::MAX);
        let sessions = &self.load.sessions;
        let mut sessions = sessions.lock().unwrap_or_else(PoisonError::into_inner);
        act(&mut sessions, now_ms)
    }

    pub(super) fn set_facts(&self, change: impl FnOnce(&mut Facts)) {
        let mut facts = Facts::clone(&self.facts.load());
        change(&mut facts);
        self.facts.store(Arc::new(facts));
    }

    /// What the breaker says now.
    pub fn gate(&self) -> Gate {
        self.with_breaker(|breaker, now_ms| breaker.gate(now_ms))
    }

    pub(super) fn with_breaker<T>(&self, act: impl FnOnce(&mut Breaker, u64) -> T) -> T {
        let now_ms = u64::try_from(self.born.elapsed().as_millis()).unwrap_or(u64::MAX);
        act(
            &mut self.breaker.lock().unwrap_or_else(PoisonError::into_inner),
            now_ms,
        )
    }
}
