//! Where does chance come from? A counter run through a mixer, so that a seed gives the same run
//! everywhere.
//!
//! SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014). The
//! scenarios fix how each draw is seeded and in which order draws are made: with one seed, two
//! simulators then play the same users, and a difference between them is one of the model.

const GOLDEN: u64 = 0x9E37_79B9_7F4A_7C15;

/// A hash of one number: SplitMix64's output function.
pub fn mix(value: u64) -> u64 {
    let value = (value ^ (value >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    value ^ (value >> 31)
}

/// A source of random numbers.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// The same numbers for the same seed.
    pub fn new(seed: u64) -> Self {
        /// Small seeds lie close together; after a few draws their streams do not.
        const WARM_UP_DRAWS: u32 = 4;
        let mut random = Self(seed ^ GOLDEN);
        for _ in 0..WARM_UP_DRAWS {
            random.next_u64();
        }
        random
    }

    /// 64 random bits.
    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(GOLDEN);
        mix(self.0)
    }

    /// In 0 ≤ x < 1.
    pub fn unit(&mut self) -> f64 {
        (self.next_u64() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// In 0 ≤ x < `end`; 0 where `end` is 0.
    pub fn below(&mut self, end: usize) -> usize {
        (self.unit() * end as f64) as usize % end.max(1)
    }
}
