//! What do many measured values say together?
//!
//! Exact percentiles by nearest rank over all values kept in memory: a run has at most some hundred
//! thousand requests, so an approximating histogram would save nothing. Values are `f64` in the
//! unit that their name says.

use serde::Serialize;

/// The usual figures of one set of values; all zero when there are none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Summary {
    /// How many values.
    pub count: usize,
    /// Their mean.
    pub mean: f64,
    /// Half of them are at most this.
    pub p50: f64,
    /// Nine in ten.
    pub p90: f64,
    /// Ninety-nine in a hundred.
    pub p99: f64,
    /// The largest.
    pub max: f64,
}

impl Summary {
    /// Sums up any number of values.
    pub fn of(values: impl IntoIterator<Item = f64>) -> Self {
        let mut sorted: Vec<f64> = values.into_iter().collect();
        sorted.sort_by(f64::total_cmp);
        let Some(&max) = sorted.last() else {
            return Self::default();
        };
        let count = sorted.len();
        let at = |percent: usize| sorted[(count * percent).div_ceil(100).max(1) - 1];
        Self {
            count,
            mean: sorted.iter().sum::<f64>() / count as f64,
            p50: at(50),
            p90: at(90),
            p99: at(99),
            max,
        }
    }
}

/// The middle value, or the mean of the two middle ones; 0 when there are none.
pub fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    match sorted.len() {
        0 => 0.0,
        n if n % 2 == 1 => sorted[n / 2],
        n => f64::midpoint(sorted[n / 2 - 1], sorted[n / 2]),
    }
}

/// `part / whole`, 0 when there is no whole.
pub fn ratio(part: f64, whole: f64) -> f64 {
    if whole == 0.0 { 0.0 } else { part / whole }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Catches percentiles that are off by one rank.
    #[test]
    fn nearest_rank() {
        let check = |n: u32, expected: [f64; 3]| {
            let found = Summary::of((1..=n).map(f64::from).rev());
            assert_eq!([found.p50, found.p90, found.p99], expected, "1..={n}");
            assert_eq!(found.max, f64::from(n));
        };
        check(1, [1.0, 1.0, 1.0]);
        check(2, [1.0, 2.0, 2.0]);
        check(10, [5.0, 9.0, 10.0]);
        check(100, [50.0, 90.0, 99.0]);
        check(1000, [500.0, 900.0, 990.0]);
        assert_eq!(Summary::of([]), Summary::default());
        assert_eq!(
            [median(&[3.0, 1.0]), median(&[5.0, 1.0, 2.0]), median(&[])],
            [2.0, 2.0, 0.0]
        );
    }
}
