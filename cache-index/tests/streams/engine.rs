//! Random numbers and a small engine for the tests: the same seed gives the same run.

use cache_index::event::{EngineHash, ExtraKey, ExtraKeys, GroupKind, KvEvent, Medium};

/// SplitMix64: enough for tests, and no dependency.
pub(crate) struct Random(pub u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Below `bound`.
    pub(crate) fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound as u64) as usize
    }

    /// True once in `n` times.
    pub(crate) fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }

    pub(crate) fn pick<'a, T>(&mut self, of: &'a [T]) -> &'a T {
        &of[self.below(of.len())]
    }
}

/// The salts and adapters that the tests' chains live under. "foreign" is never issued.
pub(crate) const SPACES: &[(Option<&str>, Option<&str>)] = &[
    (None, None),
    (None, Some("salt-a")),
    (None, Some("salt-b")),
    (Some("adapter"), None),
    (Some("adapter"), Some("salt-a")),
    (None, Some("foreign")),
];

/// A block that the engine holds.
#[derive(Clone)]
pub(crate) struct Held {
    pub(crate) name: EngineHash,
    pub(crate) space: usize,
    pub(crate) prefix: Vec<u32>,
}

/// An engine's cache, and the events that its changes make.
pub(crate) struct Engine {
    pub(crate) block_size: usize,
    pub(crate) held: Vec<Held>,
    /// Ours evicts leaves only; others make holes now and then.
    pub(crate) makes_holes: bool,
    names: u64,
    bytes: bool,
    salt: u64,
}

impl Engine {
    pub(crate) fn leaf_first(block_size: usize, random: &mut Random) -> Self {
        Self {
            makes_holes: false,
            ..Self::new(block_size, random)
        }
    }

    pub(crate) fn new(block_size: usize, random: &mut Random) -> Self {
        let bytes = random.one_in(2);
        Self {
            block_size,
            held: Vec::new(),
            makes_holes: true,
            names: 0,
            bytes,
            salt: random.next(),
        }
    }

    /// A name that follows from the content, as engines' hashes do; now and then another one for
    /// the same content, as when two requests compute a prefix at the same time.
    fn name(&mut self, space: usize, prefix: &[u32], random: &mut Random) -> EngineHash {
        self.names += 1;
        let mut value = self.salt ^ (space as u64).wrapping_mul(0x1234_5678_9abc_def1);
        for token in prefix {
            value = Random(value ^ u64::from(*token)).next();
        }
        if random.one_in(12) {
            value = Random(self.names).next();
        }
        match (self.bytes, value % 3) {
            (false, _) => EngineHash::Int(value),
            (true, 0) => EngineHash::Bytes(value.to_le_bytes().repeat(4).into()),
            (true, _) => EngineHash::Bytes(value.to_le_bytes().repeat(2).into()),
        }
    }

    /// Computes one to `blocks_max` blocks after a held one or from the start. Tokens are few, so
    /// that prompts share prefixes.
    pub(crate) fn store(&mut self, blocks_max: usize, random: &mut Random) -> KvEvent {
        let from =
            (!self.held.is_empty() && !random.one_in(4)).then(|| random.pick(&self.held).clone());
        let space = from
            .as_ref()
            .map_or_else(|| random.below(SPACES.len()), |held| held.space);
        let mut prefix = from
            .as_ref()
            .map_or_else(Vec::new, |held| held.prefix.clone());
        let (adapter, salt) = SPACES[space];
        let mut keys = Vec::new();
        let mut block_hashes = Vec::new();
        let begin = prefix.len();
        for at in 0..=random.below(blocks_max) {
            let fill = random.below(2) as u32;
            prefix.extend((0..self.block_size as u32).map(|i| i * fill % 5));
            let name = self.name(space, &prefix, random);
            // Perhaps one more copy: an engine computes again what it holds, and keeps both.
            self.held.push(Held {
                name: name.clone(),
                space,
                prefix: prefix.clone(),
            });
            block_hashes.push(name);
            let salt = salt.filter(|_| at == 0 && from.is_none());
            let texts = [adapter, salt].into_iter().flatten();
            keys.push(texts.map(|text| ExtraKey::Text(text.into())).collect());
        }
        KvEvent::Stored {
            block_hashes,
            parent: from.map(|held| held.name),
            token_ids: prefix[begin..].to_vec(),
            block_size: self.block_size,
            medium: random.one_in(2).then_some(Medium::Device),
            lora_name: adapter.map(str::to_owned),
            extra_keys: ExtraKeys(keys),
            group_idx: random.one_in(2).then_some(0),
            group_kind: *random.pick(&[GroupKind::Full, GroupKind::Unsaid]),
        }
    }

    /// Evicts a block: a leaf mostly, sometimes one with others after it.
    pub(crate) fn evict(&mut self, random: &mut Random) -> Option<KvEvent> {
        if self.held.is_empty() {
            return None;
        }
        let mut at = random.below(self.held.len());
        if !(self.makes_holes && random.one_in(4)) {
            let longer = |a: &Held, b: &Held| {
                a.space == b.space
                    && a.prefix.len() > b.prefix.len()
                    && a.prefix.starts_with(&b.prefix)
            };
            while let Some(leaf) = self
                .held
                .iter()
                .position(|held| longer(held, &self.held[at]))
            {
                at = leaf;
            }
        }
        let gone = self.held.swap_remove(at);
        Some(removed(vec![gone.name]))
    }

    /// All that is held, parents first and each copy for itself: what our engine (which makes no
    /// copies) answers a late joiner. A block whose parent was evicted is left out, since no prompt
    /// can reach it.
    pub(crate) fn stored(&self) -> Vec<KvEvent> {
        let mut held = self.held.clone();
        held.sort_by_key(|held| held.prefix.len());
        let mut events = Vec::new();
        for block in &held {
            let (before, own) = block.prefix.split_at(block.prefix.len() - self.block_size);
            let is_parent = |other: &&Held| other.space == block.space && other.prefix == before;
            let parent = held
                .iter()
                .find(is_parent)
                .map(|parent| parent.name.clone());
            if parent.is_none() && !before.is_empty() {
                continue;
            }
            let (adapter, salt) = SPACES[block.space];
            let salt = salt.filter(|_| parent.is_none());
            let texts = [adapter, salt].into_iter().flatten();
            events.push(KvEvent::Stored {
                block_hashes: vec![block.name.clone()],
                parent,
                token_ids: own.to_vec(),
                block_size: self.block_size,
                medium: None,
                lora_name: adapter.map(str::to_owned),
                extra_keys: ExtraKeys(vec![
                    texts.map(|text| ExtraKey::Text(text.into())).collect(),
                ]),
                group_idx: None,
                group_kind: GroupKind::Unsaid,
            });
        }
        events
    }

    pub(crate) fn clear(&mut self) -> KvEvent {
        self.held.clear();
        KvEvent::Cleared
    }
}

pub(crate) fn removed(block_hashes: Vec<EngineHash>) -> KvEvent {
    KvEvent::Removed {
        block_hashes,
        medium: Some(Medium::Device),
        group_idx: Some(0),
    }
}
