//! What do all indexes hold, and what are they asked?
//!
//! Chains of 128 blocks of 16 tokens, each held by one of 64 nodes. The leading 8 blocks are shared
//! by the chains of a group, as a system prompt is. Everything follows from the number of the
//! chain, so that ten million blocks need no more memory than the index.

/// Nodes that chains are spread over.
pub const NODES: usize = 64;
/// Blocks in a chain.
pub const CHAIN_BLOCKS: usize = 128;
/// Tokens in a block.
pub const BLOCK_TOKENS: usize = 16;
/// Leading blocks that a group shares.
pub const SHARED_BLOCKS: usize = 8;

/// The shape of a run.
#[derive(Clone, Copy)]
pub struct Workload {
    /// Chains that are held.
    pub chains: usize,
    /// Chains in a group.
    pub group: usize,
}

impl Workload {
    /// The tokens of a chain. Numbers past `chains` are further chains of the same kind.
    pub fn tokens(&self, chain: usize) -> Vec<u32> {
        let shared = SHARED_BLOCKS * BLOCK_TOKENS;
        let own = CHAIN_BLOCKS * BLOCK_TOKENS - shared;
        let group = Random::new(0x5eed_0000_0000 + (chain / self.group) as u64);
        let rest = Random::new(0xc4a1_0000_0000_0000 + chain as u64);
        group.take(shared).chain(rest.take(own)).collect()
    }

    /// The node that holds a chain.
    pub fn node(chain: usize) -> usize {
        chain % NODES
    }

    /// Chains in random order, for questions.
    pub fn order(&self, count: usize) -> Vec<usize> {
        let draw = Random::new(0x0bde);
        draw.map(|number| number as usize % self.chains)
            .take(count)
            .collect()
    }

    /// What an exact index says of a chain: nodes that hold some of it, and all their blocks.
    pub fn answer(&self, chain: usize) -> (usize, usize) {
        let first = chain / self.group * self.group;
        let mates = first..(first + self.group).min(self.chains);
        let mut nodes: Vec<usize> = mates.map(Self::node).collect();
        nodes.sort_unstable();
        nodes.dedup();
        (
            nodes.len(),
            CHAIN_BLOCKS + (nodes.len() - 1) * SHARED_BLOCKS,
        )
    }
}

/// SplitMix64, 32 bits at a time.
pub struct Random(u64);

impl Random {
    /// The same draws for the same seed.
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0xd134_2543_de82_ef95))
    }
}

impl Iterator for Random {
    type Item = u32;

    fn next(&mut self) -> Option<u32> {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        Some((z >> 32) as u32)
    }
}
