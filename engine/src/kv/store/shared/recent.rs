//! What was lately heard of the store, so that the same is not asked again and again.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use cache_index::block::BlockHash;

/// How long an answer is taken for what the store would say now: as long as it protects what it was
/// asked about from being evicted, by default.
const VALID: Duration = Duration::from_secs(5);
/// How long a block that was there is not put again.
const PUT_AGAIN: Duration = Duration::from_secs(60);
/// Answers that are kept, at least half of them: 64 bytes each.
const ANSWERS_MAX: usize = 1 << 17;

#[derive(Clone, Copy, Debug)]
struct Answer {
    held: bool,
    at: Instant,
}

/// Answers, newer and older ones; the older ones go when there are too many newer ones.
#[derive(Debug, Default)]
pub(super) struct Recent {
    newer: HashMap<BlockHash, Answer>,
    older: HashMap<BlockHash, Answer>,
}

impl Recent {
    pub(super) fn note(&mut self, hash: BlockHash, held: bool, at: Instant) {
        if self.newer.len() >= ANSWERS_MAX / 2 {
            self.older = std::mem::take(&mut self.newer);
        }
        self.newer.insert(hash, Answer { held, at });
    }

    /// Whether it is there, if that was heard lately.
    pub(super) fn held(&self, hash: BlockHash, now: Instant) -> Option<bool> {
        let answer = self.find(hash)?;
        (now.saturating_duration_since(answer.at) < VALID).then_some(answer.held)
    }

    /// Whether it was there so lately that it need not be put again.
    pub(super) fn need_not_put(&self, hash: BlockHash, now: Instant) -> bool {
        let answer = self.find(hash);
        answer.is_some_and(|a| a.held && now.saturating_duration_since(a.at) < PUT_AGAIN)
    }

    pub(super) fn forget(&mut self) {
        self.newer.clear();
        self.older.clear();
    }

    fn find(&self, hash: BlockHash) -> Option<Answer> {
        let answer = self.newer.get(&hash).or_else(|| self.older.get(&hash));
        answer.copied()
    }
}

#[cfg(test)]
mod tests {
    //! Catches an answer that is believed for ever, or forgotten at once.
    use super::*;

    #[test]
    fn answers_age() {
        let start = Instant::now();
        let at = |s: u64| start + Duration::from_secs(s);
        let [a, b] = [BlockHash([1; 16]), BlockHash([2; 16])];
        let mut recent = Recent::default();
        assert_eq!(recent.held(a, start), None);
        recent.note(a, true, start);
        recent.note(b, false, start);
        assert_eq!(recent.held(a, at(4)), Some(true));
        assert_eq!(recent.held(b, at(4)), Some(false));
        assert_eq!(recent.held(a, at(5)), None);
        assert!(recent.need_not_put(a, at(59)) && !recent.need_not_put(a, at(60)));
        assert!(!recent.need_not_put(b, start));
        recent.note(a, false, at(1));
        assert_eq!(recent.held(a, at(2)), Some(false), "the later counts");
        recent.forget();
        assert_eq!(recent.held(a, at(2)), None);
    }

    #[test]
    fn there_are_not_too_many() {
        let now = Instant::now();
        let hash = |number: usize| {
            let mut hash = [0; 16];
            hash[..8].copy_from_slice(&number.to_le_bytes());
            BlockHash(hash)
        };
        let mut recent = Recent::default();
        for number in 0..2 * ANSWERS_MAX {
            recent.note(hash(number), true, now);
            assert_eq!(recent.held(hash(number), now), Some(true));
        }
        assert!(recent.newer.len() + recent.older.len() <= ANSWERS_MAX);
    }
}
