//! Catches money that drifts, rounds twice, rounds in the client's disfavour more than once, or
//! overflows.

use super::{DEFAULT_MODEL, PriceBook, PricedBy, Rated, Rates, Usage};

fn book(entries: &[(&str, Rates)]) -> PriceBook {
    let models = entries
        .iter()
        .map(|(model, rates)| ((*model).to_owned(), *rates))
        .collect();
    PriceBook {
        version: "test".to_owned(),
        models,
    }
}

/// Three dollars, 30 cents and 15 dollars per million tokens.
const RATES: Rates = Rates {
    input: 3_000_000_000,
    cached_input: 300_000_000,
    output: 15_000_000_000,
};

fn check(rates: Rates, usage: (u64, u64, u64), cost: i64, savings: i64) {
    let (input, cached, output) = usage;
    let rated = book(&[("m", rates)]).rate(
        "m",
        &Usage {
            input,
            cached,
            output,
        },
    );
    let expected = Rated {
        cost_nano_usd: cost,
        cache_savings_nano_usd: savings,
        priced_by: PricedBy::Model,
    };
    assert_eq!(rated, expected, "{usage:?} at {rates:?}");
}

#[test]
fn a_turn_costs_the_exact_sum() {
    check(RATES, (0, 0, 0), 0, 0);
    check(RATES, (1000, 0, 0), 3_000_000, 0);
    check(RATES, (1000, 0, 20), 3_300_000, 0);
    // 100 computed, 900 cached: 300,000 + 270,000, and 900 × 2,700 saved.
    check(RATES, (1000, 900, 0), 570_000, 2_430_000);
    // A node that reports more cached tokens than there were is billed as fully cached.
    check(RATES, (1000, 5000, 0), 300_000, 2_700_000);
}

#[test]
fn fractions_are_summed_before_they_are_rounded_up_once() {
    // 0.3 + 0.3 + 0.3 nano-dollars: one, not three.
    let tiny = Rates {
        input: 300_000,
        cached_input: 300_000,
        output: 300_000,
    };
    check(tiny, (2, 1, 1), 1, 0);
    check(tiny, (0, 0, 1), 1, 0);
    check(tiny, (10, 0, 0), 3, 0);
    // Cost and savings add up to the full price: 10 tokens at 0.7 are 7 nano-dollars.
    let uneven = Rates {
        input: 700_000,
        cached_input: 100_000,
        output: 0,
    };
    check(uneven, (10, 10, 0), 1, 6);
    check(uneven, (10, 3, 0), 6, 1);
}

#[test]
fn the_ends_of_the_range_hold() {
    let most = Rates {
        input: i64::MAX,
        cached_input: 0,
        output: i64::MAX,
    };
    check(most, (u64::MAX, 0, u64::MAX), i64::MAX, 0);
    check(most, (1_000_000, 1_000_000, 0), 0, i64::MAX);
    // Cached tokens that cost more save less than nothing.
    check(
        Rates {
            input: 0,
            cached_input: 2_000_000,
            output: 0,
        },
        (5, 5, 0),
        10,
        -10,
    );
}

#[test]
fn an_unknown_model_falls_back_and_says_so() {
    let usage = Usage {
        input: 1000,
        cached: 0,
        output: 0,
    };
    let priced = |book: &PriceBook| {
        let rated = book.rate("unknown", &usage);
        (rated.cost_nano_usd, rated.priced_by)
    };
    assert_eq!(priced(&book(&[("m", RATES)])), (0, PricedBy::Nothing));
    let with_default = book(&[("m", Rates::default()), (DEFAULT_MODEL, RATES)]);
    assert_eq!(priced(&with_default), (3_000_000, PricedBy::Default));
    assert_eq!(with_default.rate("m", &usage).priced_by, PricedBy::Model);
}

#[test]
fn costs_equal_a_slow_sum_token_by_token() {
    let mut state = 7_u64;
    let mut next = |bound: u64| {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        (state >> 33) % bound
    };
    for _ in 0..500 {
        let (input, output) = (next(300), next(300));
        let cached = next(input + 1);
        let [a, b, c] = [next(5_000_000), next(5_000_000), next(5_000_000)].map(u64::cast_signed);
        let millionths: i64 = (0..input)
            .map(|token| if token < cached { b } else { a })
            .chain((0..output).map(|_| c))
            .sum();
        let rates = Rates {
            input: a,
            cached_input: b,
            output: c,
        };
        let rated = book(&[("m", rates)]).rate(
            "m",
            &Usage {
                input,
                cached,
                output,
            },
        );
        let mut cost = millionths / 1_000_000;
        if cost * 1_000_000 < millionths {
            cost += 1;
        }
        assert_eq!(rated.cost_nano_usd, cost);
        let full = book(&[("m", rates)]).rate(
            "m",
            &Usage {
                input,
                cached: 0,
                output,
            },
        );
        assert_eq!(
            rated.cost_nano_usd + rated.cache_savings_nano_usd,
            full.cost_nano_usd
        );
    }
}
