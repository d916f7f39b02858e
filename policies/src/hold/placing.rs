//! Is the fleet past the working-set cliff, and where may a turn go then?

use std::collections::HashSet;

use super::{Gate, NodeRoom, Params, Place, Room, Turn};
use crate::cost::{to_f64, to_tokens};

/// Sessions go where they like again when nobody has lacked room for so long.
pub(super) const ROOM_FOR_ALL_MS: f64 = 60_000.0;

impl Gate {
    /// Where a turn may go; none while there is no room for it.
    pub(super) fn place(&mut self, now_ms: f64, room: Room<'_>, turn: &Turn) -> Option<Place> {
        self.place_beside(now_ms, room, turn, &HashSet::new())
    }

    /// The same, where other newcomers enter at these nodes at this moment.
    pub(super) fn place_beside(
        &mut self,
        now_ms: f64,
        room: Room<'_>,
        turn: &Turn,
        entered: &HashSet<u64>,
    ) -> Option<Place> {
        if !self.is_bounded {
            return Some(Place::Anywhere);
        }
        // A node that has gone keeps nobody.
        let own = self.served.node_of(turn.session);
        if let Some(node) = own.filter(|node| room.node(*node).is_some()) {
            return Some(Place::Among(vec![node]));
        }
        let Params { patience_ms, .. } = self.params;
        let fits = |node: &&NodeRoom| {
            let most = (node.node, self.blocks_max(node));
            self.served.fits(now_ms, most, &turn.footprint, patience_ms)
        };
        let is_idle = |node: &NodeRoom| {
            node.queue_ms <= self.params.entry_queue_ms && !entered.contains(&node.node)
        };
        let (idle, busy): (Vec<&NodeRoom>, Vec<_>) = room.nodes.iter().partition(|n| is_idle(n));
        let open: Vec<u64> = idle.iter().copied().filter(fits).map(|n| n.node).collect();
        if open.is_empty() {
            if !busy.iter().any(fits) {
                self.short_ms = now_ms;
            }
            return None;
        }
        Some(Place::Among(open))
    }

    /// What the working set of a node may take.
    pub(super) fn blocks_max(&self, node: &NodeRoom) -> u64 {
        if node.capacity_blocks == 0 {
            return u64::MAX;
        }
        to_tokens(self.params.set_share * to_f64(node.capacity_blocks))
    }

    /// Finds out whether the fleet is past the cliff.
    pub(super) fn adapt(&mut self, now_ms: f64, room: Room<'_>) {
        let queue_ms = room.queue_ms();
        if !self.is_bounded {
            // They would not count when turns queue up, and nobody keeps a place for them.
            self.served.expel_silent(now_ms, self.params.patience_ms);
        }
        let Some(capacity) = room.capacity_blocks() else {
            self.is_bounded = false;
            return;
        };
        if self.is_bounded {
            let has_room = now_ms - self.short_ms > ROOM_FOR_ALL_MS;
            self.is_bounded = !(has_room && queue_ms < self.params.calm_ms);
        } else if queue_ms > self.params.distress_ms {
            let most = to_tokens(self.params.set_share * to_f64(capacity));
            let live = |node: &NodeRoom| self.served.blocks_on(node.node);
            if room.nodes.iter().map(live).sum::<u64>() > most {
                self.is_bounded = true;
                self.short_ms = now_ms;
                for node in room.nodes {
                    self.served.shrink(node.node, self.blocks_max(node));
                }
            }
        }
    }
}
