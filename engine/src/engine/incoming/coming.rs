//! How a waiting request stands with the node that has its prompt.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::engine::job::{Remote, TakeOver};
use crate::engine::sequence::Sequence;
use crate::kv::table::BlockTable;
use crate::kv::transfer::client::Control;
use crate::kv::transfer::part::Layers;
use crate::kv::transfer::{First, TransferError};

/// How a request stands with the node that has its prompt.
#[derive(Debug)]
pub(in crate::engine) enum Coming {
    /// Nothing was asked for.
    Open,
    /// Blocks are on their way.
    Blocks(Box<Receiving>),
    /// Everything is here.
    Here(Box<Taken>),
    /// There is nothing to wait for.
    Over,
}

/// Blocks that have come so far.
#[derive(Debug)]
pub(in crate::engine) struct Receiving {
    pub(super) table: BlockTable,
    /// What is here of each block of the prompt.
    pub(super) here: Vec<Layers>,
    pub(super) control: Arc<Control>,
    pub(super) timeout: Duration,
    /// When nothing has come for too long.
    pub(super) deadline: Instant,
    /// When all of it has taken too long.
    pub(super) until: Option<Instant>,
}

/// A prompt that is here.
#[derive(Debug)]
pub(in crate::engine) struct Taken {
    pub(super) table: BlockTable,
    pub(super) first: Option<First>,
    /// Of the prompt at the node that computed it, if one was asked to.
    pub(super) cached_tokens: Option<usize>,
}

impl Coming {
    pub(in crate::engine) fn new(remote: &Remote) -> Self {
        match remote {
            Remote::TakeOver(_) => Self::Open,
            Remote::None | Remote::HandOver(_) => Self::Over,
        }
    }

    pub(super) fn table(self) -> Option<BlockTable> {
        match self {
            Self::Blocks(receiving) => {
                receiving.control.cancel();
                Some(receiving.table)
            }
            Self::Here(taken) => Some(taken.table),
            Self::Open | Self::Over => None,
        }
    }

    /// Blocks held for it.
    pub(in crate::engine) fn blocks(&self) -> &[crate::model::BlockId] {
        match self {
            Self::Blocks(receiving) => receiving.table.blocks(),
            Self::Here(taken) => taken.table.blocks(),
            Self::Open | Self::Over => &[],
        }
    }

    pub(super) fn deadline(&self) -> Option<Instant> {
        match self {
            Self::Blocks(receiving) => Some(match receiving.until {
                Some(until) => until.min(receiving.deadline),
                None => receiving.deadline,
            }),
            Self::Open | Self::Here(_) | Self::Over => None,
        }
    }

    /// What one that is past its deadline has failed by.
    pub(super) fn lateness(&self, now: Instant) -> TransferError {
        match self {
            Self::Blocks(receiving) if receiving.deadline > now => TransferError::Slow,
            _ => TransferError::Stalled,
        }
    }
}

impl Receiving {
    /// Full leading blocks that are here.
    pub(super) fn leading(&self) -> usize {
        self.here.iter().take_while(|here| here.is_whole()).count()
    }
}

impl Sequence {
    /// Whether it waits for another node.
    pub(in crate::engine) fn waits_for_node(&self) -> bool {
        matches!(self.coming, Coming::Blocks(_))
    }

    /// Whether it was promised its blocks and has not joined.
    pub(in crate::engine) fn is_promised(&self) -> bool {
        matches!(self.coming, Coming::Blocks(_) | Coming::Here(_))
    }

    pub(super) fn take_over(&self) -> Option<&TakeOver> {
        match &self.job.remote {
            Remote::TakeOver(take_over) => Some(take_over),
            Remote::None | Remote::HandOver(_) => None,
        }
    }

    /// Whether the answer may begin with a token that another node chose. A form is kept by the node that
    /// compiled it, and log probabilities that are missing cannot be made up.
    pub(super) fn accepts(&self, first: &First) -> bool {
        let job = &self.job;
        let told = match (job.logprobs, &first.logprobs) {
            (None, _) => true,
            (Some(top), Some(logprobs)) => logprobs.top.len() >= top,
            (Some(_), None) => false,
        };
        let too_early = job.output_min > 0 && job.stop_tokens.contains(&first.token);
        told && !too_early && job.constraint.is_none()
    }
}
