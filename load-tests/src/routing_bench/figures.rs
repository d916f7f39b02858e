//! What do the runs say: hits, balance, times, predictions, and which goals were missed?

use std::fmt::Write as _;

use serde::Serialize;

use super::apart::{Timed, good_per_s};
use super::fronts::Counted;
use super::{Args, Cell};
use crate::agent::Run;
use crate::measure::{Summary, ratio};

/// Of the cache that all share and that never forgets, this share where caches hold everything.
const ONE_CACHE_SHARE_MIN: f64 = 0.97;
/// The busiest node's computed tokens by the mean.
const IMBALANCE_MAX: f64 = 1.15;

/// One run.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Sample {
    /// Cached share of all prompt tokens, by the nodes' own counts.
    pub hit_ratio: f64,
    /// What one unbounded cache shared by all nodes would have had of the same requests.
    pub one_cache_ratio: f64,
    /// Prompt tokens that the busiest node computed, by the mean of all nodes that compute prompts.
    pub imbalance: f64,
    /// Request to first token, mean, in ms of model time.
    pub ttft_mean_ms: f64,
    /// The same, 99th percentile.
    pub ttft_p99_ms: f64,
    /// Request to the end of its answer, mean, in ms of model time.
    pub latency_mean_ms: f64,
    /// Later tokens, ms of model time each, nine turns in ten.
    pub tpot_p90_ms: f64,
    /// Turns within both bounds in a second of model time.
    pub good_per_s: f64,
    /// Requests that failed, and those that were never sent because of that.
    pub failed: f64,
    /// Cached tokens that the front expected, by those that there were; 0 where it does not say.
    pub expected_share: f64,
    /// Mean distance of a request's expected from its real cached tokens.
    pub expected_error_tokens: f64,
}

impl Sample {
    /// `counted`: by every node before and after the run.
    pub(super) fn of(
        run: &Run,
        (before, after): (&[Counted], &[Counted]),
        args: &Args,
        cell: Cell,
    ) -> Self {
        let speed = args.speed;
        let count = |pick: fn(&Counted) -> u64| -> Vec<f64> {
            let pairs = before.iter().zip(after);
            pairs.map(|(b, a)| (pick(a) - pick(b)) as f64).collect()
        };
        let sum = |pick| count(pick).iter().sum::<f64>();
        let prompts = sum(|c| c.prompt_tokens);
        let mut computed = count(|c| c.prompt_tokens - c.cached_tokens);
        if cell.prefill_nodes > 0 {
            computed.truncate(usize::from(cell.prefill_nodes));
        }
        let most = computed.iter().copied().fold(0.0, f64::max);
        let good = || run.records.iter().filter(|record| record.failure.is_none());
        let ttft = Summary::of(good().filter_map(|r| r.ttft_ms).map(|ms| ms * speed));
        let latency = Summary::of(good().map(|record| record.latency_ms * speed));
        let timed: Vec<Timed> = good()
            .map(|record| Timed {
                due_ms: record.intended_ms * speed,
                done_ms: (record.intended_ms + record.latency_ms) * speed,
                ttft_ms: record.ttft_ms.map(|ms| ms * speed),
                tpot_ms: record.tpot_ms.map(|ms| ms * speed),
            })
            .collect();
        let predicted: Vec<(f64, f64)> = good()
            .filter_map(|r| Some((r.expected_cached? as f64, r.usage?.cached_tokens as f64)))
            .collect();
        let expected = predicted.iter().map(|(e, _)| e).sum();
        let real = predicted.iter().map(|(_, r)| r).sum();
        let error = predicted.iter().map(|(e, r)| (e - r).abs()).sum();
        Self {
            hit_ratio: ratio(sum(|c| c.cached_tokens), prompts),
            one_cache_ratio: ratio(sum(|c| c.one_cache_tokens), prompts),
            imbalance: ratio(most * computed.len() as f64, computed.iter().sum()),
            ttft_mean_ms: ttft.mean,
            ttft_p99_ms: ttft.p99,
            latency_mean_ms: latency.mean,
            tpot_p90_ms: Summary::of(timed.iter().filter_map(|turn| turn.tpot_ms)).p90,
            good_per_s: good_per_s(&timed, &args.bounds),
            failed: (run.records.len() - good().count() + run.not_sent) as f64,
            expected_share: ratio(expected, real),
            expected_error_tokens: ratio(error, predicted.len() as f64),
        }
    }

    /// For whoever waits.
    pub(super) fn line(&self) -> String {
        format!(
            "hits {:.3} of {:.3}, imbalance {:.2}, TTFT {:.0} / {:.0} ms, latency {:.0} ms, p90 TPOT \
             {:.1} ms, {:.2} good/s, {} failed, expected {:.3}",
            self.hit_ratio,
            self.one_cache_ratio,
            self.imbalance,
            self.ttft_mean_ms,
            self.ttft_p99_ms,
            self.latency_mean_ms,
            self.tpot_p90_ms,
            self.good_per_s,
            self.failed,
            self.expected_share,
        )
    }

    fn mean(samples: &[Self]) -> Self {
        let of =
            |pick: fn(&Self) -> f64| ratio(samples.iter().map(pick).sum(), samples.len() as f64);
        Self {
            hit_ratio: of(|s| s.hit_ratio),
            one_cache_ratio: of(|s| s.one_cache_ratio),
            imbalance: of(|s| s.imbalance),
            ttft_mean_ms: of(|s| s.ttft_mean_ms),
            ttft_p99_ms: of(|s| s.ttft_p99_ms),
            latency_mean_ms: of(|s| s.latency_mean_ms),
            tpot_p90_ms: of(|s| s.tpot_p90_ms),
            good_per_s: of(|s| s.good_per_s),
            failed: of(|s| s.failed),
            expected_share: of(|s| s.expected_share),
            expected_error_tokens: of(|s| s.expected_error_tokens),
        }
    }
}

/// One front in one cell.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// The cell.
    #[serde(flatten)]
    pub cell: Cell,
    /// The front.
    pub front: String,
    /// Means over the rounds.
    #[serde(flatten)]
    pub mean: Sample,
    /// What the simulator says of our gateway in this cell.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub predicted: Option<Sample>,
}

/// Every front in every cell, in the order of the first round, ours with what was predicted.
pub(super) fn rows(samples: &[(Cell, String, Sample)], predicted: &[(Cell, Sample)]) -> Vec<Row> {
    let predicted = |cell: &Cell, front: &str| {
        let of = predicted
            .iter()
            .filter(|(c, _)| c == cell && front == "homing");
        let of: Vec<Sample> = of.map(|(_, sample)| *sample).collect();
        (!of.is_empty()).then(|| Sample::mean(&of))
    };
    let mut rows: Vec<Row> = Vec::new();
    for (cell, front, _) in samples {
        if rows
            .iter()
            .any(|row| row.cell == *cell && row.front == *front)
        {
            continue;
        }
        let of = samples.iter().filter(|(c, f, _)| c == cell && f == front);
        let of: Vec<Sample> = of.map(|(_, _, sample)| *sample).collect();
        rows.push(Row {
            cell: *cell,
            front: front.clone(),
            mean: Sample::mean(&of),
            predicted: predicted(cell, front),
        });
    }
    rows
}

/// The goals that our rows miss. `ample` is the capacity that counts as holding everything.
pub(super) fn missed(rows: &[Row], ample: usize) -> Vec<String> {
    let mut missed = Vec::new();
    for ours in rows.iter().filter(|row| row.front == "homing") {
        let mut miss = |what: String| missed.push(format!("{:?}: {what}", ours.cell));
        let us = &ours.mean;
        if us.failed > 0.0 {
            miss(format!("{} requests failed", us.failed));
        }
        if ours.cell.prefill_nodes > 0 {
            // What the nodes that answer have computed is not where the next turn is computed.
            continue;
        }
        if us.imbalance > IMBALANCE_MAX {
            miss(format!("imbalance {:.3} > {IMBALANCE_MAX}", us.imbalance));
        }
        let share = ratio(us.hit_ratio, us.one_cache_ratio);
        if ours.cell.capacity == ample && share < ONE_CACHE_SHARE_MIN {
            miss(format!(
                "{share:.3} of one cache's hits < {ONE_CACHE_SHARE_MIN}"
            ));
        }
        let peers = rows
            .iter()
            .filter(|row| row.front != "homing" && row.cell == ours.cell);
        for peer in peers {
            let (them, name) = (&peer.mean, &peer.front);
            if us.hit_ratio < them.hit_ratio {
                miss(format!(
                    "hits {:.4} < {:.4} of {name}",
                    us.hit_ratio, them.hit_ratio
                ));
            }
            if us.latency_mean_ms > them.latency_mean_ms {
                let (ours, theirs) = (us.latency_mean_ms, them.latency_mean_ms);
                miss(format!("latency {ours:.0} ms > {theirs:.0} ms of {name}"));
            }
        }
    }
    missed
}

pub(super) fn table(rows: &[Row], missed: &[String]) -> String {
    let mut text = format!(
        "{:>8} {:>7} {:>7} {:>6} {:>6} {:>6} {:>9} {:>17} {:>8} {:>8} {:>7} {:>9}  front\n",
        "blocks",
        "prompts",
        "prefill",
        "hits",
        "one",
        "share",
        "imbalance",
        "TTFT mean/p99 ms",
        "latency",
        "TPOT p90",
        "good/s",
        "expected"
    );
    for row in rows {
        line(&mut text, row.cell, &row.mean, &row.front);
        if let Some(predicted) = &row.predicted {
            line(
                &mut text,
                row.cell,
                predicted,
                &format!("{}, simulated", row.front),
            );
        }
    }
    match missed {
        [] => text.push_str("every goal is met\n"),
        missed => missed.iter().for_each(|miss| {
            let _ = writeln!(text, "missed: {miss}");
        }),
    }
    text
}

fn line(text: &mut String, cell: Cell, sample: &Sample, front: &str) {
    let Cell {
        capacity,
        system_prompts,
        prefill_nodes,
    } = cell;
    let _ = writeln!(
        text,
        "{capacity:>8} {system_prompts:>7} {prefill_nodes:>7} {:>6.3} {:>6.3} {:>6.3} {:>9.3} {:>8.0} / \
         {:>6.0} {:>8.0} {:>8.1} {:>7.2} {:>9}  {front}",
        sample.hit_ratio,
        sample.one_cache_ratio,
        ratio(sample.hit_ratio, sample.one_cache_ratio),
        sample.imbalance,
        sample.ttft_mean_ms,
        sample.ttft_p99_ms,
        sample.latency_mean_ms,
        sample.tpot_p90_ms,
        sample.good_per_s,
        match sample.expected_share {
            share if share > 0.0 => format!("{share:.3}"),
            _ => "-".into(),
        },
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(front: &str, hit_ratio: f64, imbalance: f64, latency_mean_ms: f64) -> Row {
        Row {
            cell: Cell {
                capacity: 100,
                system_prompts: 1,
                prefill_nodes: 0,
            },
            front: front.into(),
            mean: Sample {
                hit_ratio,
                one_cache_ratio: 0.9,
                imbalance,
                latency_mean_ms,
                ..Sample::default()
            },
            predicted: None,
        }
    }

    /// Catches a goal that no figure can miss.
    #[test]
    fn goals() {
        let check = |ours: [f64; 3], ample: usize, expected: usize| {
            let [hits, imbalance, latency] = ours;
            let rows = [
                row("homing", hits, imbalance, latency),
                row("smg", 0.88, 1.4, 50.0),
            ];
            let missed = missed(&rows, ample);
            assert_eq!(missed.len(), expected, "{missed:?}");
        };
        check([0.89, 1.1, 49.0], 100, 0);
        check([0.87, 1.1, 49.0], 100, 2);
        check([0.87, 1.1, 49.0], 200, 1);
        check([0.89, 1.2, 51.0], 100, 2);
    }

    /// Catches rounds that are not averaged, and cells that are mixed up.
    #[test]
    fn rounds_are_averaged() {
        let cell = |system_prompts| Cell {
            capacity: 1,
            system_prompts,
            prefill_nodes: 0,
        };
        let sample = |hit_ratio| Sample {
            hit_ratio,
            ..Sample::default()
        };
        let all = [
            (cell(1), "homing".into(), sample(0.5)),
            (cell(6), "homing".into(), sample(0.1)),
            (cell(1), "homing".into(), sample(0.7)),
        ];
        let predicted = [(cell(6), sample(0.3)), (cell(6), sample(0.4))];
        let rows = rows(&all, &predicted);
        assert!(rows[0].predicted.is_none());
        let said = rows[1].predicted.expect("predicted").hit_ratio;
        assert!((said - 0.35).abs() < 1e-9);
        let table = table(&rows, &[]);
        assert_eq!(table.matches("homing, simulated").count(), 1, "{table}");
        let hits: Vec<f64> = rows.iter().map(|row| row.mean.hit_ratio).collect();
        assert_eq!(hits.len(), 2);
        assert!(
            (hits[0] - 0.6).abs() < 1e-9 && (hits[1] - 0.1).abs() < 1e-9,
            "{hits:?}"
        );
    }
}
