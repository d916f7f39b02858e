//! Which part of the model does a rank hold?
//!
//! Attention is cut by key heads, with the query heads that read them; the feed-forward part by
//! quantisation groups of its inner width; the vocabulary by tokens. Queries, keys, values, gate,
//! up, table and output matrix are cut along rows, so that a rank computes its own outputs;
//! the attention's output and the feed-forward's last matrix along columns, over which the ranks
//! add up. Norm weights and the residual stream are whole on every rank.

use std::ops::Range;

use super::config::ModelConfig;
use super::error::ModelError;
use crate::ops::Heads;
use crate::ops::reference::dequant::QUANT_BLOCK;
use crate::ops::shard::share;
use crate::parallel::Rank;

/// A rank's part.
#[derive(Debug, Clone)]
pub(crate) struct Part {
    /// Key and value heads.
    pub(crate) kv_heads: Range<usize>,
    /// The query heads that read them.
    pub(crate) query_heads: Range<usize>,
    /// The feed-forward's inner width.
    pub(crate) ff: Range<usize>,
    /// Tokens.
    pub(crate) vocab: Range<usize>,
    head_dim: usize,
    window: usize,
    rank: Rank,
}

impl Part {
    /// The part of a rank; refused if some rank would be left without work.
    pub(crate) fn of(config: &ModelConfig, rank: Rank) -> Result<Part, ModelError> {
        let group = config.heads / config.kv_heads;
        let enough = |what: &'static str, units: usize| {
            if units >= rank.count() {
                return Ok(share(units, rank));
            }
            Err(ModelError::Ranks {
                what,
                units,
                ranks: rank.count(),
            })
        };
        let kv_heads = enough("key heads", config.kv_heads)?;
        let ff = enough(
            "quantisation groups of the feed-forward part",
            config.ff / QUANT_BLOCK,
        )?;
        Ok(Part {
            query_heads: kv_heads.start * group..kv_heads.end * group,
            kv_heads,
            ff: ff.start * QUANT_BLOCK..ff.end * QUANT_BLOCK,
            vocab: enough("tokens", config.vocab)?,
            head_dim: config.head_dim,
            window: config.window.unwrap_or(usize::MAX),
            rank,
        })
    }

    /// Whose part it is.
    pub(crate) fn rank(&self) -> Rank {
        self.rank
    }

    /// The heads as attention counts them.
    pub(crate) fn heads(&self) -> Heads {
        Heads {
            heads: self.query_heads.len(),
            kv_heads: self.kv_heads.len(),
            dim: self.head_dim,
            window: self.window,
        }
    }

    /// Rows of the query matrix, or columns of the attention's output.
    pub(crate) fn queries(&self) -> Range<usize> {
        self.query_heads.start * self.head_dim..self.query_heads.end * self.head_dim
    }

    /// Rows of the key matrix, or of the value matrix.
    pub(crate) fn keys(&self) -> Range<usize> {
        self.kv_heads.start * self.head_dim..self.kv_heads.end * self.head_dim
    }
}
