//! How much of a prompt could a node serve from its KV tiers?

/// Leading blocks that a node holds, by the slowest tier that it would have to read: each count
/// includes the faster tiers, so none is below the one before it. What lies between two of them
/// is to be fetched from the slower tier.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub struct Tiers {
    /// On the device alone.
    pub device: usize,
    /// If host memory is read too.
    pub host: usize,
    /// If a local drive is read too.
    pub disk: usize,
    /// If a store that nodes share is read too.
    pub shared: usize,
}

impl Tiers {
    /// All of it on the device.
    pub fn on_device(blocks: usize) -> Self {
        Self {
            device: blocks,
            host: blocks,
            disk: blocks,
            shared: blocks,
        }
    }

    /// The longer of both, tier by tier.
    #[must_use]
    pub fn longest(self, other: Self) -> Self {
        Self {
            device: self.device.max(other.device),
            host: self.host.max(other.host),
            disk: self.disk.max(other.disk),
            shared: self.shared.max(other.shared),
        }
    }

    /// At most so many blocks.
    #[must_use]
    pub fn at_most(self, blocks: usize) -> Self {
        Self {
            device: self.device.min(blocks),
            host: self.host.min(blocks),
            disk: self.disk.min(blocks),
            shared: self.shared.min(blocks),
        }
    }
}
