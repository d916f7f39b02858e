//! By which angle does rope turn each pair of a head at each position?
//!
//! A pair's frequency falls with its place in the head. Models that were stretched to longer contexts
//! slow the pairs down, all alike (linear; Chen et al., arXiv:2306.15595), by a factor each (`llama3`, whose
//! factors a GGUF file has as a tensor), or the slow ones alone, with louder queries and keys (YaRN; Peng et
//! al., arXiv:2309.00071). Frequencies and angles are rounded to f32 as the reference implementations do:
//! far from position 0 that rounding is visible in the logits.

use crate::ops::Rotation;

/// How a model's frequencies differ from those of its base alone.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum RopeScaling {
    /// Not at all.
    None,
    /// All are divided by this.
    Linear {
        /// At least 1, for a longer context.
        factor: f32,
    },
    /// Each is divided by a factor of its own: the tensor `rope_freqs.weight`.
    PerPair,
    /// Pairs that turn less than `slow` times within the original context are divided by the factor, those
    /// that turn more than `fast` times are not, and those between in part.
    Yarn {
        /// At least 1.
        factor: f32,
        /// Positions of the original context.
        original: usize,
        /// Turns within it (`beta_fast`).
        fast: f32,
        /// The same (`beta_slow`).
        slow: f32,
        /// Queries and keys are this much longer, by the paper's `0.1 ln(factor) + 1`.
        attention: f32,
    },
}

/// The frequencies of one head's pairs, and by what cosines and sines are multiplied.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Rope {
    frequencies: Vec<f32>,
    amplitude: f32,
}

impl Rope {
    /// `factors` are those of [`RopeScaling::PerPair`], one a pair.
    pub(crate) fn new(head_dim: usize, base: f32, scaling: RopeScaling, factors: &[f32]) -> Rope {
        let half = head_dim / 2;
        let plain = (0..half).map(|pair| 1.0 / base.powf(pair as f32 / half as f32));
        let plain: Vec<f32> = plain.collect();
        let (frequencies, amplitude) = match scaling {
            RopeScaling::None => (plain, 1.0),
            RopeScaling::Linear { factor } => (plain.iter().map(|f| f / factor).collect(), 1.0),
            RopeScaling::PerPair => {
                let divided = plain.iter().zip(factors).map(|(f, factor)| f / factor);
                (divided.collect(), 1.0)
            }
            RopeScaling::Yarn {
                factor,
                original,
                fast,
                slow,
                attention,
            } => {
                // The pair, as a fraction, that turns so many times within the original context.
                let pair = |turns: f32| {
                    let length = original as f32 / (turns * std::f32::consts::TAU);
                    head_dim as f32 * length.ln() / (2.0 * base.ln())
                };
                let first = pair(fast).floor().max(0.0);
                let last = pair(slow).ceil().min(head_dim as f32 - 1.0);
                let width = if first == last { 0.001 } else { last - first };
                let mixed = plain.iter().enumerate().map(|(at, f)| {
                    let slowed = ((at as f32 - first) / width).clamp(0.0, 1.0);
                    f / factor * slowed + f * (1.0 - slowed)
                });
                (mixed.collect(), attention)
            }
        };
        Rope {
            frequencies,
            amplitude,
        }
    }

    /// Appends one position's angles.
    pub(crate) fn push(&self, position: usize, to: &mut Rotation) {
        for frequency in &self.frequencies {
            let angle = f64::from(position as f32 * frequency);
            to.cos.push(angle.cos() as f32 * self.amplitude);
            to.sin.push(angle.sin() as f32 * self.amplitude);
        }
    }
}
