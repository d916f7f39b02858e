//! How good was a run? A few figures, the same for every policy.

#[cfg(test)]
mod tests;

use serde::Serialize;

use crate::engine::Params;
use crate::fleet::{Outcome, Run};
use crate::scenario::Scenario;

/// Answers shorter than this say nothing about the time per token.
const TPOT_TOKENS_MIN: u32 = 8;

/// The figures of one run, of the requests that came after the warm-up. Times in ms.
#[derive(Clone, Copy, Default, PartialEq, Serialize, Debug)]
pub struct Figures {
    /// Requests that came.
    pub requests: f64,
    /// Answers completed, a second.
    pub completions_per_s: f64,
    /// Cached prompt tokens over all prompt tokens, of requests with a first token.
    pub hit_ratio: f64,
    /// Of the prompt tokens, those that were fetched from a slower tier.
    pub fetched_ratio: f64,
    /// The hit ratio with one cache without limits that all nodes share.
    pub hit_ratio_ideal: f64,
    /// First try to first token. One that never came counts as if it came at the end.
    pub ttft_mean_ms: f64,
    /// Its median.
    pub ttft_p50_ms: f64,
    /// Its 90th percentile.
    pub ttft_p90_ms: f64,
    /// Its 99th percentile.
    pub ttft_p99_ms: f64,
    /// Time per output token after the first, 90th percentile.
    pub tpot_p90_ms: f64,
    /// Time the busiest node spent on prompts over the mean.
    pub balance: f64,
    /// Share of the time that nodes spent on prompts.
    pub busy: f64,
    /// Share of requests with a first token within 2 s.
    pub within_2s: f64,
    /// Share of requests with a first token within 10 s.
    pub within_10s: f64,
    /// Their number a second.
    pub within_10s_per_s: f64,
    /// Completed requests a second that kept both bounds of the scenario.
    pub good_per_s: f64,
    /// Requests without a first token at the end.
    pub unanswered: f64,
    /// Refusals by the gateway per request.
    pub refusals: f64,
    /// Share of requests that were sent to another region.
    pub far: f64,
    /// Mean TTFT with ideal hits on an idle node: no policy reaches it.
    pub floor_mean_ms: f64,
    /// Its 99th percentile.
    pub floor_p99_ms: f64,
}

/// One run summed up.
#[derive(Clone, Default, PartialEq, Serialize, Debug)]
pub struct Summary {
    /// Its figures.
    pub figures: Figures,
    /// TTFT at every hundredth of the requests, from the least to the greatest.
    pub ttft_percentiles_ms: Vec<f64>,
}

impl Summary {
    /// Sums a run up.
    pub fn of(scenario: &Scenario, run: &Run) -> Self {
        let counted = run
            .outcomes
            .iter()
            .filter(|o| o.came_ms >= scenario.warm_ms);
        let ttft = sorted(counted.map(|o| ttft_ms(o, scenario.horizon_ms)));
        let percentiles = (0..=100).map(|p| percentile(&ttft, f64::from(p) / 100.0));
        Self {
            figures: Figures::of(scenario, run),
            ttft_percentiles_ms: percentiles.collect(),
        }
    }
}

impl Figures {
    /// Sums a run up.
    pub fn of(scenario: &Scenario, run: &Run) -> Self {
        let counted: Vec<&Outcome> = run
            .outcomes
            .iter()
            .filter(|o| o.came_ms >= scenario.warm_ms)
            .collect();
        let begun: Vec<&Outcome> = counted
            .iter()
            .copied()
            .filter(|o| o.first_token_ms.is_some())
            .collect();
        let ttft = sorted(counted.iter().map(|o| ttft_ms(o, scenario.horizon_ms)));
        let tpot = sorted(begun.iter().filter_map(|o| tpot_ms(o)));
        let floor = sorted(begun.iter().map(|o| floor_ms(&scenario.fleet.params, o)));
        let seconds = (scenario.horizon_ms - scenario.warm_ms) / 1000.0;
        let prompt_tokens: f64 = begun.iter().map(|o| f64::from(o.prompt_tokens)).sum();
        let share_of_tokens = |tokens: fn(&Outcome) -> u32| {
            let tokens: f64 = begun.iter().map(|o| f64::from(tokens(o))).sum();
            ratio(tokens, prompt_tokens)
        };
        let requests = counted.len() as f64;
        let begun_ttft = sorted(begun.iter().map(|o| ttft_ms(o, scenario.horizon_ms)));
        let within = |limit_ms: f64| begun_ttft.partition_point(|t| *t <= limit_ms) as f64;
        let share = |count: usize| ratio(count as f64, requests);
        let done = begun.iter().filter(|o| o.done_ms.is_some()).count();
        let refusals: f64 = counted.iter().map(|o| f64::from(o.refusals)).sum();
        let busy = mean(&run.busy_ms);
        Self {
            requests,
            completions_per_s: done as f64 / seconds,
            hit_ratio: share_of_tokens(|o| o.cached_tokens),
            fetched_ratio: share_of_tokens(|o| o.fetched_tokens),
            hit_ratio_ideal: share_of_tokens(|o| o.ideal_tokens),
            ttft_mean_ms: mean(&ttft),
            ttft_p50_ms: percentile(&ttft, 0.5),
            ttft_p90_ms: percentile(&ttft, 0.9),
            ttft_p99_ms: percentile(&ttft, 0.99),
            tpot_p90_ms: percentile(&tpot, 0.9),
            balance: ratio(run.busy_ms.iter().copied().fold(0.0, f64::max), busy),
            busy: busy / scenario.horizon_ms,
            within_2s: ratio(within(2_000.0), requests),
            within_10s: ratio(within(10_000.0), requests),
            within_10s_per_s: within(10_000.0) / seconds,
            good_per_s: begun.iter().filter(|o| is_good(scenario, o)).count() as f64 / seconds,
            unanswered: requests - begun.len() as f64,
            refusals: ratio(refusals, requests),
            far: share(begun.iter().filter(|o| o.is_far).count()),
            floor_mean_ms: mean(&floor),
            floor_p99_ms: percentile(&floor, 0.99),
        }
    }

    /// Each figure's mean over several runs.
    pub fn mean(runs: &[Self]) -> Self {
        let mean =
            |pick: fn(&Self) -> f64| runs.iter().map(pick).sum::<f64>() / runs.len().max(1) as f64;
        Self {
            requests: mean(|f| f.requests),
            completions_per_s: mean(|f| f.completions_per_s),
            hit_ratio: mean(|f| f.hit_ratio),
            fetched_ratio: mean(|f| f.fetched_ratio),
            hit_ratio_ideal: mean(|f| f.hit_ratio_ideal),
            ttft_mean_ms: mean(|f| f.ttft_mean_ms),
            ttft_p50_ms: mean(|f| f.ttft_p50_ms),
            ttft_p90_ms: mean(|f| f.ttft_p90_ms),
            ttft_p99_ms: mean(|f| f.ttft_p99_ms),
            tpot_p90_ms: mean(|f| f.tpot_p90_ms),
            balance: mean(|f| f.balance),
            busy: mean(|f| f.busy),
            within_2s: mean(|f| f.within_2s),
            within_10s: mean(|f| f.within_10s),
            within_10s_per_s: mean(|f| f.within_10s_per_s),
            good_per_s: mean(|f| f.good_per_s),
            unanswered: mean(|f| f.unanswered),
            refusals: mean(|f| f.refusals),
            far: mean(|f| f.far),
            floor_mean_ms: mean(|f| f.floor_mean_ms),
            floor_p99_ms: mean(|f| f.floor_p99_ms),
        }
    }
}

fn ttft_ms(outcome: &Outcome, horizon_ms: f64) -> f64 {
    outcome.first_token_ms.unwrap_or(horizon_ms) - outcome.came_ms
}

fn is_good(scenario: &Scenario, outcome: &Outcome) -> bool {
    let tokens_in_time = match tpot_ms(outcome) {
        Some(ms) => ms <= scenario.tpot_bound_ms,
        None => outcome.done_ms.is_some(),
    };
    tokens_in_time && ttft_ms(outcome, scenario.horizon_ms) <= scenario.ttft_bound_ms
}

fn tpot_ms(outcome: &Outcome) -> Option<f64> {
    if outcome.output_tokens < TPOT_TOKENS_MIN {
        return None;
    }
    let after_first = f64::from(outcome.output_tokens - 1);
    Some((outcome.done_ms? - outcome.first_token_ms?) / after_first)
}

fn floor_ms(params: &Params, outcome: &Outcome) -> f64 {
    params.floor_ms(outcome.prompt_tokens, outcome.ideal_tokens)
}

fn sorted(values: impl Iterator<Item = f64>) -> Vec<f64> {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values
}

/// Of sorted values; the lower one where it falls between two.
fn percentile(sorted: &[f64], share: f64) -> f64 {
    let place = (sorted.len().saturating_sub(1) as f64 * share) as usize;
    sorted.get(place).copied().unwrap_or(0.0)
}

fn mean(values: &[f64]) -> f64 {
    ratio(values.iter().sum(), values.len() as f64)
}

fn ratio(part: f64, whole: f64) -> f64 {
    if whole > 0.0 { part / whole } else { 0.0 }
}
