//! Which part of a stored weight does a rank hold?
//!
//! A weight is cut before it is packed, along rows (each rank computes some of the outputs) or
//! along columns (each rank sums over some of the inputs, and the sums are added up). Stored rows
//! are whole quantisation groups of 32 columns, so a row can always be cut off, and a column cut
//! must lie on the border of a group: a scale belongs to a group and cannot be halved. Inputs are
//! quantised in the same groups, so a rank's rows are the bits that they are in the whole.

use std::borrow::Cow;
use std::ops::Range;

use prompt::gguf::Dtype;

use super::Tensor;
use super::reference::dequant::{QUANT_BLOCK, stored_bytes, values_together};
use crate::parallel::Rank;

/// Part of a stored weight.
#[derive(Debug)]
pub struct Shard<'a> {
    dtype: Dtype,
    rows: usize,
    cols: usize,
    bytes: Cow<'a, [u8]>,
}

impl Shard<'_> {
    /// The part as a weight of its own.
    pub fn tensor(&self) -> Tensor<'_> {
        Tensor {
            dtype: self.dtype,
            rows: self.rows,
            cols: self.cols,
            bytes: &self.bytes,
        }
    }
}

/// Why a weight cannot be cut so.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ShardError {
    /// A border inside a quantisation group.
    #[error(
        "columns {start} to {end} do not lie on the borders of quantisation groups of 32 columns"
    )]
    InsideGroup {
        /// First column.
        start: usize,
        /// The column after the last.
        end: usize,
    },
    /// A range that is empty or reaches past the weight.
    #[error("{what} {start} to {end} are none of the weight's {count}")]
    Range {
        /// `rows` or `columns`.
        what: &'static str,
        /// The first.
        start: usize,
        /// The one after the last.
        end: usize,
        /// How many there are.
        count: usize,
    },
    /// The stored bytes are not those of the shape.
    #[error("{bytes} stored bytes are not {rows} rows of {cols} values of {dtype:?}")]
    Stored {
        /// Bytes given.
        bytes: usize,
        /// Rows of the weight.
        rows: usize,
        /// Columns of the weight.
        cols: usize,
        /// Its format.
        dtype: Dtype,
    },
}

/// A rank's share of `units` that cannot be cut further, as even as whole units allow; earlier
/// ranks have the larger ones. Empty for some ranks if there are fewer units than ranks.
pub fn share(units: usize, rank: Rank) -> Range<usize> {
    let (each, rest) = (units / rank.count(), units % rank.count());
    let start = rank.index() * each + rank.index().min(rest);
    start..start + each + usize::from(rank.index() < rest)
}

/// Some rows: a product with them is those outputs of the whole's, bit for bit.
pub fn rows<'a>(tensor: &Tensor<'a>, rows: Range<usize>) -> Result<Shard<'a>, ShardError> {
    check("rows", &rows, tensor.rows)?;
    let row_bytes = row_bytes(tensor)?;
    Ok(Shard {
        dtype: tensor.dtype,
        rows: rows.len(),
        cols: tensor.cols,
        bytes: Cow::Borrowed(&tensor.bytes[rows.start * row_bytes..rows.end * row_bytes]),
    })
}

/// Some columns: products with all shards, each with its own columns of the input, add up to the
/// whole's, up to the order of the sum.
pub fn cols<'a>(tensor: &Tensor<'a>, cols: Range<usize>) -> Result<Shard<'a>, ShardError> {
    if cols == (0..tensor.cols) {
        return rows(tensor, 0..tensor.rows);
    }
    check("columns", &cols, tensor.cols)?;
    let group = values_together(tensor.dtype).unwrap_or(1).max(QUANT_BLOCK);
    let border = |col: usize| col.is_multiple_of(group);
    if !border(cols.start) || !border(cols.end) {
        return Err(ShardError::InsideGroup {
            start: cols.start,
            end: cols.end,
        });
    }
    let row_bytes = row_bytes(tensor)?;
    let group_bytes = stored_bytes(tensor.dtype, group).unwrap_or(0);
    let of_row = cols.start / group * group_bytes..cols.end / group * group_bytes;
    let mut bytes = Vec::with_capacity(tensor.rows * of_row.len());
    for row in tensor.bytes.chunks_exact(row_bytes) {
        bytes.extend_from_slice(&row[of_row.clone()]);
    }
    Ok(Shard {
        dtype: tensor.dtype,
        rows: tensor.rows,
        cols: cols.len(),
        bytes: Cow::Owned(bytes),
    })
}

fn check(what: &'static str, range: &Range<usize>, count: usize) -> Result<(), ShardError> {
    if range.is_empty() || range.end > count {
        return Err(ShardError::Range {
            what,
            start: range.start,
            end: range.end,
            count,
        });
    }
    Ok(())
}

/// Bytes of one stored row, if the tensor is what it says it is.
fn row_bytes(tensor: &Tensor<'_>) -> Result<usize, ShardError> {
    stored_bytes(tensor.dtype, tensor.cols)
        .filter(|bytes| bytes.checked_mul(tensor.rows) == Some(tensor.bytes.len()))
        .ok_or(ShardError::Stored {
            bytes: tensor.bytes.len(),
            rows: tensor.rows,
            cols: tensor.cols,
            dtype: tensor.dtype,
        })
}
