//! How does a request go through one life of a simulated node?
//!
//! [`Life::begin`] puts it into the model and gives a [`Ticket`] that tells how far it has come; a
//! ticket that is dropped takes it out again. [`drive`] moves the model along with the clock.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cache_index::block::{BLOCK_TOKENS, BlockHash, Namespace, extend_chain};
use simulate::engine::Params;
use simulate::engine::tiers::TierParams;
use tokio::sync::{Notify, watch};

use super::faults::Fault;
use super::handover::{Claim, Computed};
use super::numbers::Numbers;
use super::one_cache::OneCache;
use super::post::Post;
use super::shelf::Shelf;
use super::state::{Asked, End, Half, Progress, State};

/// One life of a node, as its tasks share it.
pub(super) struct Life {
    state: Mutex<State>,
    /// The log has grown.
    pub(super) appended: Notify,
    /// The model has something new to do.
    changed: Notify,
    /// What other nodes tell it.
    pub(super) post: Arc<Post>,
    /// Its name among those that exchange KV, new with each life.
    pub(super) engine_id: String,
    speed: f64,
    model: String,
}

/// What a life begins with.
pub(super) struct Birth<'a> {
    pub(super) params: Params,
    pub(super) capacity: usize,
    pub(super) speed: f64,
    pub(super) model: &'a str,
    pub(super) host: Option<TierParams>,
    pub(super) handover_gb_per_s: f64,
    pub(super) numbers: Arc<Numbers>,
    pub(super) shelf: Option<Shelf>,
    pub(super) one_cache: Option<Arc<OneCache>>,
}

/// What is asked of a node.
pub(super) struct Question<'a> {
    pub(super) prompt: &'a [u32],
    /// The tokens that the answer will have.
    pub(super) answer: &'a [u32],
    pub(super) salt: Option<Arc<str>>,
    pub(super) half: Half,
}

impl Life {
    /// A new life with an empty cache.
    pub(super) fn new(birth: Birth<'_>) -> Arc<Self> {
        let post = Arc::new(Post::default());
        let engine_id = format!("{:016x}", rand::random::<u64>());
        Arc::new(Self {
            speed: birth.speed,
            model: birth.model.to_owned(),
            state: Mutex::new(State::new(birth, engine_id.clone(), Arc::clone(&post))),
            post,
            engine_id,
            appended: Notify::new(),
            changed: Notify::new(),
        })
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a request in.
    pub(super) fn begin(self: &Arc<Self>, question: Question<'_>) -> Ticket {
        let Question {
            prompt,
            answer,
            salt,
            half,
        } = question;
        let namespace = Namespace::new(&self.model, None, salt.as_deref());
        let mut chain = extend_chain(&namespace, BlockHash::ROOT, prompt);
        let prompt_blocks = chain.len();
        let last_block = chain.last().copied();
        // The last token of an answer is never computed with, so it is in no cache.
        let computed = answer.len().saturating_sub(1);
        let tokens = [prompt, &answer[..computed]].concat();
        let rest = &tokens[prompt_blocks * BLOCK_TOKENS..];
        let parent = last_block.unwrap_or(BlockHash::ROOT);
        chain.extend(extend_chain(&namespace, parent, rest));
        let asked = Asked {
            chain,
            tokens,
            prompt_blocks,
            salt,
            prompt_tokens: prompt.len(),
            answer_tokens: answer.len(),
            half,
        };
        let (id, seen, end) = self.change(|state, now_ms| state.begin(now_ms, asked));
        Ticket {
            node: Arc::clone(self),
            id,
            seen,
            end,
            last_block,
        }
    }

    /// Something goes wrong from now on. A restart is the caller's to carry out.
    pub(super) fn suffer(&self, fault: Fault) {
        let speed = self.speed;
        self.change(|state, now_ms| state.suffer(now_ms, fault, speed));
    }

    /// A change from outside, with the model brought up to now before it and after it.
    fn change<T>(&self, act: impl FnOnce(&mut State, f64) -> T) -> T {
        let done = {
            let mut state = self.lock();
            let now_ms = state.move_to_now();
            let done = act(&mut state, now_ms);
            state.move_to_now();
            done
        };
        self.appended.notify_waiters();
        self.changed.notify_one();
        done
    }
}

/// A request under way; dropping it gives it up.
pub(super) struct Ticket {
    node: Arc<Life>,
    id: u32,
    seen: watch::Receiver<Progress>,
    pub(super) end: End,
    /// The prompt's last full block.
    pub(super) last_block: Option<BlockHash>,
}

impl Ticket {
    /// Waits until the answer has more than so many tokens. None if the node is gone.
    pub(super) async fn beyond(&mut self, tokens: u32) -> Option<Progress> {
        let seen = self.seen.wait_for(|progress| progress.tokens > tokens);
        seen.await.ok().map(|progress| *progress)
    }

    /// Its prompt has been computed elsewhere.
    pub(super) fn kv_comes(&self, computed: Computed, claim: Claim) {
        let comes = |state: &mut State, _: f64| state.kv_comes(self.id, computed, claim);
        self.node.change(comes);
    }

    /// Nothing comes from elsewhere: the prompt is computed here. False where all of it has come.
    pub(super) fn compute_here(&self) -> bool {
        let here = |state: &mut State, now_ms: f64| state.compute_here(now_ms, self.id);
        self.node.change(here)
    }

    /// Nothing comes from elsewhere, and nothing is to be done about it. False where all of it has come.
    pub(super) fn fail(&self) -> bool {
        let fail = |state: &mut State, now_ms: f64| state.fail_half(now_ms, self.id);
        self.node.change(fail)
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        let id = self.id;
        self.node.change(|state, now_ms| state.give_up(now_ms, id));
    }
}

/// Moves the model along until the life is over.
pub(super) async fn drive(node: Arc<Life>) {
    loop {
        let changed = node.changed.notified();
        let pause = {
            let mut state = node.lock();
            let now_ms = state.move_to_now();
            state.pause(now_ms)
        };
        node.appended.notify_waiters();
        match pause {
            None => {
                tokio::select! {
                    () = changed => {}
                    () = node.post.came.notified() => {}
                }
            }
            Some(pause) => {
                tokio::select! {
                    () = tokio::time::sleep(pause) => {}
                    () = changed => {}
                    () = node.post.came.notified() => {}
                }
            }
        }
    }
}
