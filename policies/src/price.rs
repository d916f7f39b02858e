//! What does a turn cost, and what did the cache save?
//!
//! Money is integer nano-dollars, prices are integer nano-dollars per million tokens: no floating
//! point anywhere. A record's cost is summed exactly in 128 bits and rounded up once, so that it
//! never depends on the order of the terms, and no turn is free by rounding.
//! Left out: price windows, cache writes and reasoning tokens (later classes of the same book).

use std::collections::BTreeMap;

/// The entry that prices models without one of their own.
pub const DEFAULT_MODEL: &str = "*";

/// The unit of prices: they are per so many tokens.
const TOKENS_PER_PRICE: i128 = 1_000_000;

/// Prices of one model, in nano-dollars per million tokens.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Rates {
    /// Of an input token that was computed.
    pub input: i64,
    /// Of an input token that was read from cache.
    pub cached_input: i64,
    /// Of an output token.
    pub output: i64,
}

/// The tokens of one turn.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Usage {
    /// All input tokens, cached ones included.
    pub input: u64,
    /// Of these, the ones read from cache. A node that reports more than all of them is billed
    /// as if all had been cached.
    pub cached: u64,
    /// Output tokens.
    pub output: u64,
}

/// Which entry of the book a price came from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PricedBy {
    /// The model's own entry.
    Model,
    /// The entry [`DEFAULT_MODEL`].
    Default,
    /// None: the turn is free, and the operator should know.
    Nothing,
}

/// A priced turn.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Rated {
    /// What the turn costs.
    pub cost_nano_usd: i64,
    /// What it would have cost more, had no token been cached: cost and savings add up to the
    /// full price, to the nano-dollar. Negative only where the book prices cached tokens higher.
    pub cache_savings_nano_usd: i64,
    /// Where the price came from.
    pub priced_by: PricedBy,
}

/// The prices in force under one version name.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct PriceBook {
    /// Written on every record.
    pub version: String,
    /// Prices by model id; [`DEFAULT_MODEL`] for all others.
    pub models: BTreeMap<String, Rates>,
}

impl PriceBook {
    /// Prices one turn of `model`.
    pub fn rate(&self, model: &str, usage: &Usage) -> Rated {
        let (rates, priced_by) = match (self.models.get(model), self.models.get(DEFAULT_MODEL)) {
            (Some(own), _) => (*own, PricedBy::Model),
            (None, Some(default)) => (*default, PricedBy::Default),
            (None, None) => (Rates::default(), PricedBy::Nothing),
        };
        let cost = cost_nano_usd(&rates, usage);
        let full_price = cost_nano_usd(
            &rates,
            &Usage {
                cached: 0,
                ..*usage
            },
        );
        Rated {
            cost_nano_usd: cost,
            cache_savings_nano_usd: full_price.saturating_sub(cost),
            priced_by,
        }
    }
}

/// The exact sum, rounded up once. Past the range of `i64` (nine billion dollars for one turn) it
/// stays at the end of the range.
fn cost_nano_usd(rates: &Rates, usage: &Usage) -> i64 {
    let cached = usage.cached.min(usage.input);
    let line = |tokens: u64, rate: i64| i128::from(tokens) * i128::from(rate);
    let sum = line(usage.input - cached, rates.input)
        .saturating_add(line(cached, rates.cached_input))
        .saturating_add(line(usage.output, rates.output));
    let floor = sum.div_euclid(TOKENS_PER_PRICE);
    let rounded_up = floor + i128::from(sum.rem_euclid(TOKENS_PER_PRICE) != 0);
    i64::try_from(rounded_up).unwrap_or(if rounded_up < 0 { i64::MIN } else { i64::MAX })
}

#[cfg(test)]
mod tests;
