//! What does one request leave behind on the bill?
//!
//! One [`UsageRecord`] per request, never changed afterwards. Tokens come from the node's own
//! usage report, or from what was relayed when there is none; money is integer nano-dollars.

/// How a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Status {
    /// Answered in full.
    Complete,
    /// The client went away first.
    Cancelled,
    /// The stream broke (node or gateway died); tokens are those of the last checkpoint.
    Cut,
    /// Refused or failed before a token was relayed.
    Failed,
}

impl Status {
    /// The word used in reports and metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Complete => "complete",
            Self::Cancelled => "cancelled",
            Self::Cut => "cut",
            Self::Failed => "failed",
        }
    }

    /// The status of a word; `None` for any other word.
    pub fn parse(word: &str) -> Option<Self> {
        [Self::Complete, Self::Cancelled, Self::Cut, Self::Failed]
            .into_iter()
            .find(|status| status.as_str() == word)
    }
}

/// One request on the bill.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UsageRecord {
    /// UUID v7, the key that makes projections idempotent.
    pub record_id: u128,
    /// The id the client and the node know.
    pub request_id: String,
    /// Who pays.
    pub tenant: String,
    /// Public id of the API key.
    pub key_id: String,
    /// Model id as served, and as priced.
    pub model: String,
    /// What the client called it: the same, or an alias.
    pub model_asked: String,
    /// Node that answered; empty if none did.
    pub node: String,
    /// Session key as text.
    pub session: String,
    /// Unix milliseconds of arrival.
    pub t_ms: i64,
    /// All prompt tokens, cached ones included.
    pub input_tokens: u64,
    /// Prompt tokens that the node had in its cache.
    pub cached_tokens: u64,
    /// Generated tokens.
    pub output_tokens: u64,
    /// How it ended.
    pub status: Status,
    /// Cost, rounded up once.
    pub cost_nano_usd: i64,
    /// What the cached tokens would have cost on top without the discount.
    pub cache_savings_nano_usd: i64,
    /// Which price book rated it.
    pub price_version: String,
    /// Milliseconds from arrival to the first relayed byte of the answer.
    pub ttft_ms: u32,
    /// Milliseconds from arrival to the end.
    pub duration_ms: u32,
}
