//! What can the engine be asked to do, and what does it say?

use std::sync::Arc;
use std::time::{Duration, Instant};

use cache_index::block::{BlockHash, creditable_blocks};
use constrain::Constraint;

use crate::error::ApiError;
use crate::kv::table::Scope;
use crate::kv::transfer::{Endpoint, TransferId};
use crate::metrics::Ending;
use crate::sample::Sampling;

/// A prefix counts as used at most so much later than it was: clients may ask for a day, and a pool
/// turns over in minutes.
pub const KEEP_MAX: Duration = Duration::from_secs(3600);

/// A request, ready to run. Start from [`Job::generate`] and set what differs.
pub struct Job {
    /// Named in logs.
    pub request_id: Arc<str>,
    /// The prompt, at least one token.
    pub prompt: Vec<u32>,
    /// Hashes of the prompt's leading blocks that may be served from cache.
    pub chain: Vec<BlockHash>,
    /// Whose blocks these are.
    pub scope: Scope,
    /// Tokens to produce at most, at least one.
    pub output_max: usize,
    /// Below so many tokens, no stop token is taken.
    pub output_min: usize,
    /// How to choose them.
    pub sampling: Sampling,
    /// Texts that end the answer.
    pub stops: Vec<String>,
    /// Tokens that end the answer.
    pub stop_tokens: Vec<u32>,
    /// The grammar that holds the answer to a form.
    pub constraint: Option<Constraint>,
    /// Lower goes first, 0 is ordinary, as vLLM has it. It orders the requests of one cache salt
    /// among themselves.
    pub priority: i32,
    /// For how much longer than others its blocks are wanted once it has ended; at most
    /// [`KEEP_MAX`] counts.
    pub keep: Duration,
    /// Leading tokens that tiers below the pool are expected to hold: they are fetched from slow ones while
    /// the request waits for its turn. 0 where nobody knows.
    pub prefetch_tokens: usize,
    /// When the whole request is given up, whether it waits or runs.
    pub deadline: Option<Instant>,
    /// Log probabilities of each token, and so many alternatives; `Some(0)` for the chosen alone.
    pub logprobs: Option<usize>,
    /// Whether to tell the ids of the tokens.
    pub token_ids: bool,
    /// Whether control tokens become text, as a parser of tool calls needs it. Stop tokens never do.
    pub show_markers: bool,
    /// What the request is for.
    pub work: Work,
    /// What another node has to do with it.
    pub remote: Remote,
}

impl Job {
    /// A generation with nothing special about it: greedy, no stops, ordinary priority, no
    /// deadline. `chain` holds the hashes of the prompt's full blocks; those that may not be
    /// credited are dropped here.
    pub fn generate(
        prompt: Vec<u32>,
        mut chain: Vec<BlockHash>,
        scope: Scope,
        output_max: usize,
    ) -> Self {
        chain.truncate(creditable_blocks(prompt.len()));
        Self {
            request_id: Arc::from(""),
            prompt,
            chain,
            scope,
            output_max,
            output_min: 0,
            sampling: Sampling::GREEDY,
            stops: Vec::new(),
            stop_tokens: Vec::new(),
            constraint: None,
            priority: 0,
            keep: Duration::ZERO,
            prefetch_tokens: 0,
            deadline: None,
            logprobs: None,
            token_ids: false,
            show_markers: false,
            work: Work::Generate,
            remote: Remote::None,
        }
    }

    /// For how long its blocks stay pinned once it has ended; none if they do not.
    pub fn hold(&self) -> Option<Duration> {
        match (&self.work, &self.remote) {
            (Work::PrefillOnly { hold }, _) => Some(*hold),
            (Work::Generate, Remote::HandOver(hand_over)) => Some(hand_over.hold),
            (Work::Generate, Remote::None | Remote::TakeOver(_)) | (Work::Embed(_), _) => None,
        }
    }
}

impl std::fmt::Debug for Job {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Job")
            .field("request_id", &self.request_id)
            .field("prompt_tokens", &self.prompt.len())
            .field("output_max", &self.output_max)
            .field("work", &self.work)
            .finish_non_exhaustive()
    }
}

/// What another node has to do with a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Remote {
    /// Nothing.
    None,
    /// It goes on decoding where this one has computed the prompt.
    HandOver(HandOver),
    /// It has blocks of the prompt.
    TakeOver(Box<TakeOver>),
}

/// A prompt that is computed for another node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HandOver {
    /// Its name.
    pub id: TransferId,
    /// The engine id of the node that decodes.
    pub receiver: Arc<str>,
    /// Of the prompt, see [`crate::kv::transfer::auth::prompt_digest`].
    pub prompt: [u8; 16],
    /// How long the blocks stay pinned once the request has ended; at most [`super::HOLD_MAX`].
    pub hold: Duration,
}

/// A prompt of which another node has blocks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TakeOver {
    /// The handover that was arranged; none for what the other node has in its cache.
    pub id: Option<TransferId>,
    /// The other node's engine id.
    pub sender: Arc<str>,
    /// Where it is.
    pub endpoints: Vec<Endpoint>,
    /// Of the prompt, see [`crate::kv::transfer::auth::prompt_digest`].
    pub prompt: [u8; 16],
    /// Hashes of all full blocks of the prompt.
    pub chain: Vec<BlockHash>,
    /// How long nothing may come from there.
    pub timeout: Duration,
    /// How long all of it may take, if that is bounded.
    pub total: Option<Duration>,
    /// What becomes of the request if it fails.
    pub on_failure: OnFailure,
}

/// What becomes of a request whose transfer failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnFailure {
    /// Its prompt is computed here.
    Recompute,
    /// It fails.
    Fail,
}

/// What a request is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    /// An answer.
    Generate,
    /// One vector for the prompt.
    Embed(Pooling),
    /// Only the prompt's KV: its full blocks stay pinned for so long, under a ticket.
    PrefillOnly {
        /// How long; at most [`super::HOLD_MAX`].
        hold: Duration,
    },
}

/// How the hidden states of a prompt's tokens become one vector.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pooling {
    /// Their mean.
    Mean,
    /// The last one.
    Last,
}

/// What the engine says about a request, in order.
#[derive(Debug)]
pub enum Output {
    /// It joined the batch; so many of its prompt tokens were cached.
    Joined {
        /// Prompt tokens served from cache.
        cached_tokens: usize,
    },
    /// Tokens were produced; their text may be empty while it is held back.
    Text {
        /// Text that became visible.
        text: String,
        /// The tokens, where ids or log probabilities were asked for.
        tokens: Vec<Produced>,
        /// Tokens produced so far.
        output_tokens: usize,
    },
    /// The answer is complete.
    Done {
        /// The last visible text.
        text: String,
        /// The last tokens, where ids or log probabilities were asked for.
        tokens: Vec<Produced>,
        /// Stop or length.
        ending: Ending,
        /// The stop string that ended it.
        stop: Option<String>,
        /// What it took.
        usage: Usage,
        /// The pinned blocks of a prompt that was computed for another node.
        held: Option<Held>,
    },
    /// The vector of a [`Work::Embed`], of length 1; nothing follows.
    Embedding(Vec<f32>, Usage),
    /// The node failed; nothing follows.
    Failed(ApiError),
}

/// A token of an answer.
#[derive(Clone, Debug, PartialEq)]
pub struct Produced {
    /// The token.
    pub id: u32,
    /// Its log probability in the model's raw distribution; 0 where none was asked for.
    pub logprob: f32,
    /// The most likely tokens there, best first.
    pub top: Vec<(u32, f32)>,
}

/// What a request took, in tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Of those, served from cache.
    pub cached_tokens: usize,
    /// Tokens produced.
    pub output_tokens: usize,
}

/// Names the pinned blocks of a prefilled prompt. Drawn at random, so that it cannot be guessed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TicketId(pub uuid::Uuid);

impl std::fmt::Display for TicketId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.simple().fmt(f)
    }
}

impl std::str::FromStr for TicketId {
    type Err = uuid::Error;

    fn from_str(text: &str) -> Result<Self, uuid::Error> {
        uuid::Uuid::try_parse(text).map(Self)
    }
}

/// Blocks that stay pinned after their request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Held {
    /// What they are released by; it works once.
    pub ticket: TicketId,
    /// When they are released by themselves.
    pub deadline: Instant,
    /// How many full blocks of the prompt there are.
    pub blocks: usize,
}

/// What [`super::Handle::held`] tells of a ticket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeldInfo {
    /// When the blocks are released by themselves.
    pub deadline: Instant,
    /// The hashes of the pinned blocks, in order.
    pub chain: Vec<BlockHash>,
    /// Where they lie, in order.
    pub blocks: Vec<crate::model::BlockId>,
}
