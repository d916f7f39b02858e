//! What does a layer of Llama 2 and 3, SmolLM2, Mistral do?
//!
//! Pre-norm attention with rope over grouped key heads, perhaps within a window (Mistral), and a gated
//! feed-forward part.

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
    model.rotate();
    model.store(index, batch);
    stored(model);
    model.attend(index, batch);
    model.feed_forward(index);
}
