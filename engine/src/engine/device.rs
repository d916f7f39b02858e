//! What runs the passes and holds the blocks' bytes?
//!
//! Outside of tests the ranks of a model. A closure will do where nothing but passes is asked for:
//! its blocks cannot be copied, so they stay in the pool.

use std::ops::Range;

use crate::kv::store::Blocks;
use crate::kv::store::form::Form;
use crate::model::{BlockId, ForwardError, Pass, PassOutput, Watch};
use crate::parallel::RankGroup;

/// What a step loop computes on.
pub trait Device: Blocks + Send {
    /// Runs a pass, and tells of each layer as it is computed, if it can tell.
    fn run(
        &mut self,
        pass: &Pass<'_>,
        output: &mut PassOutput,
        watch: &mut Watch<'_>,
    ) -> Result<(), ForwardError>;

    /// Copies some layers of a full block out. Of one that does not tell of layers only all are asked for.
    fn read_layers(&mut self, block: BlockId, layers: Range<usize>, to: &mut [u8]);

    /// Copies some layers of a block in that came from elsewhere. False, and zeros, if they have values
    /// that attention could not mask.
    fn take_layers(&mut self, block: BlockId, layers: Range<usize>, from: &[u8]) -> bool;
}

impl Device for RankGroup {
    fn run(
        &mut self,
        pass: &Pass<'_>,
        output: &mut PassOutput,
        watch: &mut Watch<'_>,
    ) -> Result<(), ForwardError> {
        Self::run_watched(self, pass, output, watch)
    }

    fn read_layers(&mut self, block: BlockId, layers: Range<usize>, to: &mut [u8]) {
        if to.len() == self.block_bytes() {
            return self.read_block(block, to);
        }
        self.first().read_layers(block, layers, to);
    }

    fn take_layers(&mut self, block: BlockId, layers: Range<usize>, mut from: &[u8]) -> bool {
        let mut finite = true;
        for rank in self.ranks() {
            let bytes = layers.len() * rank.block_layout().payload_bytes();
            let (own, rest) = from.split_at(bytes);
            finite &= rank.take_layers(block, layers.clone(), own);
            from = rest;
        }
        finite
    }
}

/// A block's bytes are those of the ranks in their order.
impl Blocks for RankGroup {
    fn block_bytes(&self) -> usize {
        self.all()
            .map(|rank| rank.block_layout().body_bytes())
            .sum()
    }

    fn read_block(&mut self, block: BlockId, mut to: &mut [u8]) {
        for rank in self.ranks() {
            let (own, rest) = to.split_at_mut(rank.block_layout().body_bytes());
            rank.read_block(block, own);
            to = rest;
        }
    }

    fn write_block(&mut self, block: BlockId, mut from: &[u8]) {
        for rank in self.ranks() {
            let (own, rest) = from.split_at(rank.block_layout().body_bytes());
            rank.write_block(block, own);
            from = rest;
        }
    }

    fn kept_bytes(&self) -> usize {
        let dtype = self.first().block_layout().dtype;
        self.form().kept_bytes(dtype, self.block_bytes())
    }

    fn keep_block(&mut self, block: BlockId, to: &mut [u8]) {
        let (form, dtype) = (self.form(), self.first().block_layout().dtype);
        if form == Form::Exact {
            return self.read_block(block, to);
        }
        let mut body = self.take_body();
        self.read_block(block, &mut body);
        form.keep(dtype, &body, to);
        self.give_body(body);
    }

    fn restore_block(&mut self, block: BlockId, from: &[u8]) {
        let (form, dtype) = (self.form(), self.first().block_layout().dtype);
        if form == Form::Exact {
            return self.write_block(block, from);
        }
        let mut body = self.take_body();
        form.restore(dtype, from, &mut body);
        self.write_block(block, &body);
        self.give_body(body);
    }
}

impl<F> Device for F
where
    F: FnMut(&Pass<'_>, &mut PassOutput) -> Result<(), ForwardError> + Send,
{
    fn run(
        &mut self,
        pass: &Pass<'_>,
        output: &mut PassOutput,
        _watch: &mut Watch<'_>,
    ) -> Result<(), ForwardError> {
        self(pass, output)
    }

    fn read_layers(&mut self, _block: BlockId, _layers: Range<usize>, _to: &mut [u8]) {}

    fn take_layers(&mut self, _block: BlockId, _layers: Range<usize>, _from: &[u8]) -> bool {
        false
    }
}

impl<F> Blocks for F
where
    F: FnMut(&Pass<'_>, &mut PassOutput) -> Result<(), ForwardError> + Send,
{
    fn block_bytes(&self) -> usize {
        0
    }

    fn read_block(&mut self, _block: BlockId, _to: &mut [u8]) {}

    fn write_block(&mut self, _block: BlockId, _from: &[u8]) {}
}
