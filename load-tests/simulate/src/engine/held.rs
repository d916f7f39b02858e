//! Which blocks stay where they are though no request here computes with them?
//!
//! Where two nodes share a request, the one keeps what it has computed until the other has all of it,
//! and the other what it has of the prompt already until the rest has come. Who holds says when it ends.

use super::node::Node;
use super::pool::NumberMap;

/// Pins by the number of the request that they are for.
#[derive(Clone, Debug, Default)]
pub(super) struct Held {
    /// Whether what was computed for another node is held.
    pub(super) holds_prompts: bool,
    pins: NumberMap<u32, Vec<u32>>,
}

impl Held {
    pub(super) fn is_empty(&self) -> bool {
        self.pins.is_empty()
    }
}

impl Node {
    /// Pins what the pool has of a path for a request until [`Node::let_go_held`]; how many leading
    /// blocks that are.
    pub fn hold(&mut self, id: u32, path: &[u32]) -> usize {
        let usable = path.len().min(self.pool.capacity() - 2);
        let held = self.pool.overlap(&path[..usable]);
        let pins = self.pool.pin(&path[..held]);
        if let Some(before) = self.held.pins.insert(id, pins) {
            self.pool.unpin(&before);
        }
        held
    }

    /// Ends what is held for a request, if anything is. What follows comes with the next
    /// [`Node::advance`].
    pub fn let_go_held(&mut self, now_ms: f64, id: u32) {
        self.settle(now_ms);
        if let Some(pins) = self.held.pins.remove(&id) {
            self.pool.unpin(&pins);
            self.make_use_of_room();
        }
    }

    /// Requests for which blocks are held, and how many blocks those are.
    pub fn held(&self) -> (usize, usize) {
        let blocks = self.held.pins.values().map(Vec::len).sum();
        (self.held.pins.len(), blocks)
    }

    /// A prompt has been computed for another node.
    pub(super) fn end_prompt(&mut self, id: u32, pins: Vec<u32>) {
        if self.held.holds_prompts {
            self.held.pins.insert(id, pins);
        } else {
            self.pool.unpin(&pins);
        }
    }
}

#[cfg(test)]
mod tests {
    //! Would what is held be evicted, or never be let go?

    use std::sync::Arc;

    use super::super::{Happened, Job, Params, Part};
    use super::*;

    fn job(id: u32, blocks: &[u32], part: Part) -> Job {
        Job {
            id,
            blocks: Arc::from(blocks),
            prompt_tokens: 512 * blocks.len() as u32,
            output_tokens: 1,
            part,
        }
    }

    fn run_out(node: &mut Node) -> Vec<Happened> {
        let mut all = Vec::new();
        while let Some(due_ms) = node.next_ms() {
            all.extend(node.advance(due_ms));
        }
        all
    }

    fn computed(happened: &[Happened]) -> usize {
        let is_end = |h: &&Happened| matches!(h, Happened::Computed { .. });
        happened.iter().filter(is_end).count()
    }

    #[test]
    fn a_prompt_for_another_node_stays_until_it_is_let_go() {
        let mut node = Node::new(Params::default(), 10).holding_prompts();
        node.enqueue(0.0, job(1, &[1, 2, 3, 4], Part::Prompt));
        assert_eq!(computed(&run_out(&mut node)), 1);
        assert_eq!(node.held(), (1, 4));
        // There is no room beside it for a larger one, which waits.
        node.enqueue(
            10_000.0,
            job(2, &[11, 12, 13, 14, 15, 16, 17], Part::Prompt),
        );
        assert_eq!((computed(&run_out(&mut node)), node.waiting()), (0, 1));
        assert_eq!(node.overlap(&[1, 2, 3, 4]), 4);
        node.let_go_held(20_000.0, 1);
        assert_eq!(computed(&run_out(&mut node)), 1);
        assert_eq!(node.held(), (1, 7));
        node.let_go_held(30_000.0, 2);
        assert_eq!((node.held(), node.pool_available()), ((0, 0), 10));
        // What is held of a prompt that comes from elsewhere, and a second time.
        assert_eq!(node.hold(3, &[11, 12, 99]), 2);
        assert_eq!(node.hold(3, &[11, 12, 13]), 3);
        assert_eq!(node.pool_available(), 7);
        node.let_go_held(30_000.0, 3);
        node.let_go_held(30_000.0, 3);
        assert_eq!(node.pool_available(), 10);
    }
}
