//! What do the records of one run say, and the runs of all rounds together?

use std::collections::BTreeMap;

use serde::Serialize;

use super::plan::Kind;
use super::play::{Played, Record, Window};
use super::stack::Transfers;
use crate::measure::{Summary, median, ratio};

/// What a request must keep to be good.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Bounds {
    /// To the first token, in milliseconds.
    pub ttft_ms: f64,
    /// A token after it, in milliseconds, on average over the answer.
    pub tpot_ms: f64,
}

/// The figures of one arrangement in one round, or their medians: means and percentiles over the
/// requests that came in the measured time. Times are in milliseconds.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Figures(pub BTreeMap<&'static str, f64>);

/// The TPOT bounds that goodput is also told for, as multiples of the uncontended time per token.
pub(super) const OTHER_BOUNDS: [(&str, f64); 4] = [
    ("goodput at 1.25", 1.25),
    ("goodput at 1.5", 1.5),
    ("goodput at 2", 2.0),
    ("goodput at 3", 3.0),
];

impl Figures {
    pub(super) fn of(
        played: &Played,
        window: Window,
        bounds: Bounds,
        uncontended_tpot_ms: f64,
        transfers: Transfers,
    ) -> Self {
        let mine = |record: &&Record| window.has(record.at);
        let records: Vec<&Record> = played.records.iter().filter(mine).collect();
        let good = |record: &Record, tpot_ms: f64| {
            record.failure.is_none()
                && record.ttft_ms <= bounds.ttft_ms
                && record.tpot_ms.is_none_or(|found| found <= tpot_ms)
        };
        let goodput = |tpot_ms: f64, kind: Option<Kind>| {
            let of = |record: &&&Record| kind.is_none_or(|kind| record.kind == kind);
            let good = |record: &&&Record| good(record, tpot_ms);
            records.iter().filter(of).filter(good).count() as f64 / window.seconds()
        };
        let mut figures = BTreeMap::from([
            ("requests", records.len() as f64),
            ("failed", count(&records, |r| r.failure.is_some())),
            ("turns", count(&records, |r| r.kind == Kind::Turn)),
            (
                "shared turns",
                count(&records, |r| r.shared && r.kind == Kind::Turn),
            ),
            (
                "shared streams",
                count(&records, |r| r.shared && r.kind == Kind::Stream),
            ),
            ("goodput", goodput(bounds.tpot_ms, None)),
            ("goodput turns", goodput(bounds.tpot_ms, Some(Kind::Turn))),
            (
                "goodput streams",
                goodput(bounds.tpot_ms, Some(Kind::Stream)),
            ),
            ("transfers received", transfers.received as f64),
            ("transfers failed", transfers.failed as f64),
        ]);
        for (name, factor) in OTHER_BOUNDS {
            figures.insert(name, goodput(factor * uncontended_tpot_ms, None));
        }
        let whole: Vec<&Record> = records
            .into_iter()
            .filter(|r| r.failure.is_none())
            .collect();
        latencies(&whole, &mut figures);
        rates(&whole, played, window, &mut figures);
        Self(figures)
    }

    /// Figure by figure.
    pub(super) fn median(rounds: &[Self]) -> Self {
        let names = rounds.iter().flat_map(|round| round.0.keys());
        let of = |name: &&'static str| {
            let values: Vec<f64> = rounds.iter().map(|round| round.get(name)).collect();
            (*name, median(&values))
        };
        Self(names.map(of).collect())
    }

    /// A figure by its name; 0 where there is none.
    pub fn get(&self, name: &str) -> f64 {
        self.0.get(name).copied().unwrap_or(0.0)
    }
}

fn count(records: &[&Record], has: impl Fn(&Record) -> bool) -> f64 {
    records.iter().filter(|record| has(record)).count() as f64
}

/// Of the requests that did not fail.
fn latencies(records: &[&Record], figures: &mut BTreeMap<&'static str, f64>) {
    let of = |kind: Option<Kind>| {
        let mine = move |r: &&&Record| kind.is_none_or(|kind| r.kind == kind);
        records.iter().filter(mine)
    };
    let ttft = |kind| Summary::of(of(kind).map(|r| r.ttft_ms));
    let tpot = |kind| Summary::of(of(kind).filter_map(|r| r.tpot_ms));
    let gaps = records.iter().flat_map(|record| {
        let pairs = record.tokens.windows(2);
        pairs.map(|pair| (pair[1] - pair[0]).as_secs_f64() * 1e3)
    });
    let gaps = Summary::of(gaps);
    let (all, turns) = (ttft(None), ttft(Some(Kind::Turn)));
    figures.extend([
        ("ttft p50", all.p50),
        ("ttft p90", all.p90),
        ("ttft mean", all.mean),
        ("ttft turns p50", turns.p50),
        ("ttft turns p90", turns.p90),
        ("ttft turns mean", turns.mean),
        ("ttft streams p90", ttft(Some(Kind::Stream)).p90),
    ]);
    let (all, turns, streams) = (tpot(None), tpot(Some(Kind::Turn)), tpot(Some(Kind::Stream)));
    figures.extend([
        ("tpot p50", all.p50),
        ("tpot p90", all.p90),
        ("tpot p99", all.p99),
        ("tpot turns p90", turns.p90),
        ("tpot streams p90", streams.p90),
        ("gap p90", gaps.p90),
        ("gap p99", gaps.p99),
        ("gap max", gaps.max),
    ]);
}

/// What was done in the measured time, and what it took.
fn rates(
    records: &[&Record],
    played: &Played,
    window: Window,
    figures: &mut BTreeMap<&'static str, f64>,
) {
    let seconds = window.seconds();
    let tokens = played.records.iter().flat_map(|record| &record.tokens);
    let answered = tokens.filter(|at| window.has(**at)).count() as f64;
    // A prompt counts when its first token comes.
    let begun = played.records.iter().filter(|record| {
        let first = record.tokens.first();
        first.is_some_and(|at| window.has(*at))
    });
    let prompts: u64 = begun.map(|record| record.usage.prompt_tokens).sum();
    let (mut prompt, mut cached) = (0, 0);
    for record in records.iter().filter(|r| r.kind == Kind::Turn) {
        prompt += record.usage.prompt_tokens;
        cached += record.usage.cached_tokens;
    }
    figures.extend([
        ("output tokens/s", answered / seconds),
        ("prompt tokens/s", prompts as f64 / seconds),
        ("cached share", ratio(cached as f64, prompt as f64)),
        ("cpu node 1", played.cpu.nodes[0] / seconds),
        ("cpu node 2", played.cpu.nodes[1] / seconds),
        ("cpu gateway", played.cpu.gateway / seconds),
        ("cpu load", played.cpu.load / seconds),
    ]);
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::chat::Usage;
    use crate::disaggregation_bench::stack::Cpu;

    fn record(kind: Kind, at_s: u64, ttft_ms: f64, tpot_ms: f64) -> Record {
        let first = Duration::from_secs(at_s);
        Record {
            kind,
            at: first,
            failure: None,
            shared: kind == Kind::Turn,
            ttft_ms,
            tpot_ms: Some(tpot_ms),
            tokens: vec![first, first + Duration::from_millis(20)],
            usage: Usage {
                prompt_tokens: 100,
                cached_tokens: 40,
                completion_tokens: 2,
            },
        }
    }

    /// Catches a request counted outside the measured time, a failed or late one counted as good,
    /// and a bound that is not kept.
    #[test]
    fn only_what_came_in_time_and_kept_both_bounds_is_good() {
        let mut failed = record(Kind::Turn, 3, 10.0, 10.0);
        failed.failure = Some("gone".into());
        let played = Played {
            records: vec![
                record(Kind::Stream, 0, 10.0, 10.0),
                record(Kind::Stream, 1, 10.0, 20.0),
                record(Kind::Turn, 2, 100.0, 10.0),
                record(Kind::Turn, 2, 101.0, 10.0),
                record(Kind::Turn, 3, 10.0, 29.0),
                failed,
                record(Kind::Turn, 5, 10.0, 10.0),
            ],
            cpu: Cpu::default(),
        };
        let window = Window {
            from: Duration::from_secs(1),
            to: Duration::from_secs(5),
        };
        let bounds = Bounds {
            ttft_ms: 100.0,
            tpot_ms: 20.0,
        };
        let found = Figures::of(&played, window, bounds, 10.0, Transfers::default());
        for (name, expected) in [
            ("requests", 5.0),
            ("failed", 1.0),
            ("turns", 4.0),
            ("shared turns", 4.0),
            ("goodput", 2.0 / 4.0),
            ("goodput turns", 1.0 / 4.0),
            ("goodput at 3", 3.0 / 4.0),
            ("ttft p90", 101.0),
            ("tpot p90", 29.0),
            ("gap max", 20.0),
            ("cached share", 0.4),
            ("output tokens/s", 10.0 / 4.0),
            ("prompt tokens/s", 500.0 / 4.0),
        ] {
            assert!(
                (found.get(name) - expected).abs() < 1e-9,
                "{name}: {found:?}"
            );
        }
    }
}
