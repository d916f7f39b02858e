//! What could have been cached? One cache without limits that all nodes share, filled at arrival.

/// Blocks that have ever been asked for.
#[derive(Default)]
pub(crate) struct Ideal {
    seen: Vec<u64>,
}

impl Ideal {
    /// Leading blocks of a path that were asked for before; now all of them have been. Blocks are
    /// numbered below `blocks_end`.
    pub(crate) fn overlap_then_add(&mut self, path: &[u32], blocks_end: u32) -> usize {
        let words = blocks_end as usize / 64 + 1;
        if self.seen.len() < words {
            self.seen.resize(words + words / 2, 0);
        }
        let overlap =
            path.partition_point(|block| self.seen[*block as usize / 64] >> (block % 64) & 1 == 1);
        for block in &path[overlap..] {
            self.seen[*block as usize / 64] |= 1 << (block % 64);
        }
        overlap
    }
}
