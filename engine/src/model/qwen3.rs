//! What does a layer of Qwen3, dense do?
//!
//! As llama, with a norm of each head's queries and keys before rope, which turns dimensions `i` and
//! `half + i`.

use super::decoder::Decoder;
use crate::ops::{Ops, SeqInput};
use crate::parallel::Collectives;

/// Adds layer `index` to the residual stream. `stored` is told once its keys and values are in the pool.
pub(super) fn layer<O: Ops, C: Collectives>(
    model: &mut Decoder<O, C>,
    (index, batch): (usize, &[SeqInput<'_>]),
    stored: &mut dyn FnMut(&Decoder<O, C>),
) {
    model.project(index);
    model.norm_heads(index);
    model.rotate();
    model.store(index, batch);
    stored(model);
    model.attend(index, batch);
    model.feed_forward(index);
}
