//! What is seen to while a pass computes?
//!
//! A pass takes a while; after each of its layers the step loop looks up: receivers that have come are
//! connected, blocks in the pool are given to those that ask for them, and what has been computed so far
//! goes out. Nothing that the pass reads or writes changes.

use std::sync::mpsc::Receiver;

use super::outgoing::{Arrival, Asked, Outgoing, Source};
use super::pins::Pins;
use super::sequence::Sequence;
use crate::kv::pool::Pool;
use crate::kv::store::Store;
use crate::kv::table::BlockTable;
use crate::metrics::Metrics;
use crate::model::ReadLayers;
use crate::scheduler::Chunk;

/// What there is besides the pass.
pub(super) struct Within<'a> {
    pub(super) outgoing: &'a mut Outgoing,
    pub(super) pins: &'a mut Pins,
    pub(super) pool: &'a mut Pool,
    pub(super) store: Option<&'a Store>,
    pub(super) receivers: &'a Receiver<Arrival>,
    pub(super) running: &'a [Sequence],
    pub(super) chunks: &'a [Chunk],
    pub(super) metrics: &'a Metrics,
    /// Layers of the model, and bytes of one layer of a block.
    pub(super) layers: (usize, usize),
    /// Whole blocks that may still be copied.
    pub(super) left: usize,
}

impl Within<'_> {
    /// So many layers are computed.
    pub(super) fn layer(&mut self, computed: usize, read: &ReadLayers<'_>) {
        while let Ok(arrival) = self.receivers.try_recv() {
            self.take(arrival);
        }
        let (layers, layer_bytes) = self.layers;
        let mut source = Source {
            layers,
            layer_bytes,
            read: &mut |block, layers, to| read(block, layers, to),
            left: &mut self.left,
            within_pass: true,
            metrics: &self.metrics.transfers,
        };
        let batch = (self.running, self.chunks);
        self.outgoing
            .pump_within(batch, self.pins, computed, &mut source);
    }

    fn take(&mut self, (request, answer): Arrival) {
        let Asked::Cached { scope, chain, .. } = &request.asked else {
            return self.outgoing.attach(request, answer);
        };
        let held = self.pool.overlap(chain).blocks;
        let is_all = self.store.is_none() || held == chain.len();
        let expected = self.running.iter().map(Sequence::pins).sum();
        let has_room = !self.outgoing.is_crowded() && self.pins.may_pin(held, expected, self.pool);
        if !is_all || !has_room {
            return self.outgoing.look_later((request, answer));
        }
        let table = BlockTable::claim(self.pool, scope.clone(), &chain[..held]);
        let keep = (&mut *self.pins, &mut *self.pool);
        self.outgoing.grant(table, (request, answer), keep);
    }
}
