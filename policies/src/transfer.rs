//! How fast does KV arrive at a node?
//!
//! Learnt from turns that two nodes shared: how long after the prompt was computed the first token
//! came, and, where KV travels along with the prefill, how long that took as well. A first token
//! that comes soon after a long prefill says only that the transfer was no slower than it: that
//! raises an estimate and never lowers it or makes one. What else a first token waits for on the second node is
//! in the figure too, since turns wait for it all the same.

/// Size of one token's KV where no node tells: what a model of 8 billion parameters with 8 KV heads
/// has at 16 bits.
pub(crate) const BYTES_PER_TOKEN: f64 = 131_072.0;
/// How fast KV travels where nothing is known: what one TCP stream moves between two machines.
pub(crate) const BYTES_PER_S: f64 = 1e9;
/// What fetching from another node's cache takes before the first block: a connection, a greeting, a step
/// at each end.
const FETCH_BEGIN_MS: f64 = 10.0;
/// Such blocks come behind both nodes' own steps: as slow as this many transfers alone.
const FETCH_BESIDE_OTHERS: f64 = 2.0;

pub(crate) fn known(told: Option<f64>, otherwise: f64) -> f64 {
    let makes_sense = |figure: &f64| figure.is_finite() && *figure > 0.0;
    told.filter(makes_sense).unwrap_or(otherwise)
}

/// Milliseconds for each of so many blocks of 16 tokens that a node fetches from another one's cache; a
/// figure of 0 is not known.
pub fn fetch_block_ms(blocks: usize, bytes_per_token: f64, bytes_per_s: f64) -> f64 {
    let bytes = 16.0 * known(Some(bytes_per_token), BYTES_PER_TOKEN);
    let alone_ms = bytes * 1000.0 / known(Some(bytes_per_s), BYTES_PER_S);
    let blocks = f64::from(u32::try_from(blocks.max(1)).unwrap_or(u32::MAX));
    FETCH_BESIDE_OTHERS * alone_ms + FETCH_BEGIN_MS / blocks
}

/// What is left of earlier measurements after a new one: about ten count, as links change.
const KEEP: f64 = 0.9;
/// Smaller handovers say more about latencies than about the rate.
const BYTES_MIN: f64 = 1e6;
/// A handover that took longer than so many times what was expected has waited for something else,
/// and counts as if it had taken that long.
const STALL_MAX: f64 = 4.0;
/// The first token came soon: its wait is at most this share of the prefill. A link that is half as
/// fast as the prefill or slower lets it wait longer; the second node's own first step, shorter.
const HIDDEN_SHARE: f64 = 0.5;

/// One handover.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Handed {
    /// What had to be moved.
    pub bytes: f64,
    /// From the prompt's end to the first token.
    pub waited_ms: f64,
    /// How long KV travelled along with the prefill before that; 0 where it did not.
    pub along_ms: f64,
}

/// The handovers that a node has taken.
#[derive(Clone, Copy, Debug, Default)]
pub struct Transfers {
    bytes: f64,
    ms: f64,
}

impl Transfers {
    /// A handover was taken.
    pub fn took(&mut self, handed: Handed) {
        let Handed {
            bytes,
            waited_ms,
            along_ms,
        } = handed;
        let ms = waited_ms.max(0.0) + along_ms.max(0.0);
        if !(bytes >= BYTES_MIN && bytes.is_finite() && ms > 0.0 && ms.is_finite()) {
            return;
        }
        let expected_ms = if self.bytes > 0.0 {
            bytes * self.ms / self.bytes
        } else {
            f64::INFINITY
        };
        let was_hidden = along_ms > 0.0 && waited_ms <= HIDDEN_SHARE * along_ms;
        let is_faster = expected_ms.is_finite() && ms < expected_ms;
        if was_hidden && !is_faster {
            return;
        }
        self.bytes = self.bytes * KEEP + bytes;
        self.ms = self.ms * KEEP + ms.min(STALL_MAX * expected_ms);
    }

    /// Bytes in a second; 0 before the first handover.
    pub fn bytes_per_s(&self) -> f64 {
        if self.ms > 0.0 {
            self.bytes * 1000.0 / self.ms
        } else {
            0.0
        }
    }
}

#[cfg(test)]
mod tests {
    //! Catches a rate in the wrong unit, and one that a hidden transfer or a stall spoils.
    use super::*;

    fn after(handed: &[(f64, f64, f64)]) -> f64 {
        let mut transfers = Transfers::default();
        for (bytes, waited_ms, along_ms) in handed {
            transfers.took(Handed {
                bytes: *bytes,
                waited_ms: *waited_ms,
                along_ms: *along_ms,
            });
        }
        transfers.bytes_per_s()
    }

    #[test]
    fn rates_are_bytes_in_a_second() {
        for (handed, expected) in [
            (&[][..], 0.0),
            (&[(1e9, 500.0, 0.0)], 2e9),
            // Both together moved it.
            (&[(1e9, 400.0, 600.0)], 1e9),
            // Hidden: a longer prefill says nothing, a shorter one that it is faster.
            (&[(1e9, 1.0, 999.0)], 0.0),
            (&[(1e9, 500.0, 0.0), (1e9, 1.0, 9999.0)], 2e9),
            (&[(1e9, 2000.0, 0.0), (1e9, 1.0, 499.0)], 1.9e12 / 2300.0),
            // Too small, or absurd.
            (&[(1e5, 500.0, 0.0)], 0.0),
            (&[(1e9, f64::NAN, 0.0), (f64::INFINITY, 1.0, 0.0)], 0.0),
        ] {
            let found = after(handed);
            assert!((found - expected).abs() < 1e-3, "{handed:?}: {found}");
        }
    }

    #[test]
    fn a_stall_counts_within_bounds_and_is_forgotten() {
        let mut handed = vec![(1e9, 500.0, 0.0); 20];
        handed.push((1e9, 60_000.0, 0.0));
        let stalled = after(&handed);
        assert!((1.2e9..2e9).contains(&stalled), "{stalled}");
        handed.extend([(1e9, 500.0, 0.0); 30]);
        assert!(after(&handed) > 1.9e9);
    }

    #[test]
    fn what_a_cache_elsewhere_costs() {
        // 1.6 ms a block alone, and a tenth of the beginning.
        assert!((fetch_block_ms(10, 100_000.0, 1e9) - 4.2).abs() < 1e-9);
        let unknown = fetch_block_ms(10, 0.0, 0.0);
        assert_eq!(unknown, fetch_block_ms(10, BYTES_PER_TOKEN, BYTES_PER_S));
        assert!(fetch_block_ms(0, f64::NAN, -1.0).is_finite());
    }
}
