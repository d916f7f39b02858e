//! What has a node below its KV pool, and how quickly is it back?
//!
//! Our engine tells on its metrics page; of other nodes, and of a store that nodes share, the
//! configuration says what a fetch takes. A tier of which neither does is not counted on, though the
//! index may know what lies there.

use policies::hold::SlowTier;
use policies::view::FetchCosts;

/// One tier below a node's pool, as the node tells it.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct NodeTier {
    /// Blocks of 16 tokens that it has room for; 0 where there is no such tier.
    pub blocks: u64,
    /// Milliseconds until one of them is in the pool, measured; 0 where it has not been.
    pub block_ms: f64,
}

/// All of them.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct NodeTiers {
    /// Host memory.
    pub host: NodeTier,
    /// A drive.
    pub disk: NodeTier,
}

impl NodeTiers {
    /// Takes what a node tells of the tier of this name.
    pub(super) fn tell(&mut self, name: Option<&str>, tell: impl FnOnce(&mut NodeTier)) {
        match name {
            Some("host") => tell(&mut self.host),
            Some("disk") => tell(&mut self.disk),
            _ => {}
        }
    }

    /// What fetching a block of 16 tokens costs: measured, else configured.
    pub(super) fn fetch_costs(&self, configured: &FetchCosts) -> FetchCosts {
        let FetchCosts {
            host_ms,
            disk_ms,
            shared_ms,
        } = *configured;
        let known = |tier: NodeTier, otherwise: f64| match tier.block_ms {
            ms if ms.is_finite() && ms > 0.0 => ms,
            _ => otherwise,
        };
        FetchCosts {
            host_ms: known(self.host, host_ms),
            disk_ms: known(self.disk, disk_ms),
            shared_ms,
        }
    }

    /// The tiers as the gate counts them, in its blocks of `per` blocks of 16 tokens. What a store that
    /// nodes share has room for is not known.
    pub(crate) fn for_gate(&self, costs: FetchCosts, per: u64) -> [SlowTier; 2] {
        let tier = |tier: NodeTier, block_ms: f64| SlowTier {
            blocks: tier.blocks / per,
            fetch_ms_per_token: block_ms / 16.0,
        };
        [
            tier(self.host, costs.host_ms),
            tier(self.disk, costs.disk_ms),
        ]
    }
}
