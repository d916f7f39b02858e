//! What do the rounds say together?
//!
//! Medians over the rounds, each round's direct latency taken off its own, then ours by each
//! peer's. A ratio that the project set itself a goal for says so.

use serde::Serialize;

use super::agent_turns::Dialect;
use super::fronts::Front;
use crate::measure::{median, ratio};

/// CPU and added latency beside SMG at 64 KB and more, at 4 KB; added time to the first chunk and
/// CPU a chunk of a stream.
const GOALS: [f64; 4] = [0.35, 0.4, 0.3, 0.6];
/// From this size on the first of them holds.
const LARGE_BYTES: usize = 65_536;

/// What one row of the result is about.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Row {
    /// What the client speaks.
    pub dialect: Dialect,
    /// Size of the request's body.
    pub body_bytes: usize,
    /// Connections.
    pub concurrency: usize,
    /// Whether the answers were streams.
    pub streams: bool,
}

/// One front in one row of one round.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sample {
    pub(super) front: usize,
    pub(super) row: Row,
    /// Whole answers: to their end. Streams: to the first word. Median of the round.
    pub(super) latency_us: f64,
    /// A request, or of a stream a word.
    pub(super) cpu_us: f64,
    pub(super) requests_per_s: f64,
}

/// One proxy in one row: medians over the rounds.
#[derive(Clone, Debug, Serialize)]
pub struct Cell {
    /// nginx, smg or homing.
    pub proxy: &'static str,
    /// The row.
    #[serde(flatten)]
    pub row: Row,
    /// Latency added at the median, of a stream to its first word, in microseconds.
    pub added_p50_us: f64,
    /// CPU of the proxy per request, of a stream per chunk, in microseconds.
    pub cpu_us: f64,
    /// Throughput of the closed loop.
    pub requests_per_s: f64,
}

/// Ours by a peer's in one row.
#[derive(Clone, Debug, Serialize)]
pub struct CellRatio {
    /// The peer.
    pub beside: &'static str,
    /// The row.
    #[serde(flatten)]
    pub row: Row,
    /// CPU.
    pub cpu: Ratio,
    /// Added latency at the median.
    pub added_p50: Ratio,
    /// Throughput.
    pub requests_per_s: f64,
}

/// A ratio, and what it should be at most.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Ratio {
    /// Ours by theirs.
    pub value: f64,
    /// None where no goal is set.
    pub goal: Option<f64>,
}

pub(super) fn cells(fronts: &[Front], rows: &[Row], samples: &[Sample]) -> Vec<Cell> {
    let mut cells = Vec::new();
    for &row in rows {
        let of = |front: usize, value: fn(&Sample) -> f64| -> Vec<f64> {
            let own = samples.iter().filter(|s| (s.front, s.row) == (front, row));
            own.map(value).collect()
        };
        let direct = of(0, |s| s.latency_us);
        for (at, front) in fronts.iter().enumerate().skip(1) {
            let latencies = of(at, |s| s.latency_us);
            let added: Vec<f64> = latencies.iter().zip(&direct).map(|(p, d)| p - d).collect();
            cells.push(Cell {
                proxy: front.name,
                row,
                added_p50_us: median(&added),
                cpu_us: median(&of(at, |s| s.cpu_us)),
                requests_per_s: median(&of(at, |s| s.requests_per_s)),
            });
        }
    }
    cells
}

pub(super) fn ratios(cells: &[Cell]) -> Vec<CellRatio> {
    let peers = cells.iter().filter(|c| c.proxy != "homing");
    peers
        .filter_map(|theirs| {
            let ours = cells
                .iter()
                .find(|c| c.proxy == "homing" && c.row == theirs.row)?;
            let goals = goals(theirs);
            Some(CellRatio {
                beside: theirs.proxy,
                row: theirs.row,
                cpu: Ratio {
                    value: ratio(ours.cpu_us, theirs.cpu_us),
                    goal: goals.map(|[cpu, _]| cpu),
                },
                added_p50: Ratio {
                    value: ratio(ours.added_p50_us, theirs.added_p50_us),
                    goal: goals.map(|[_, added]| added),
                },
                requests_per_s: ratio(ours.requests_per_s, theirs.requests_per_s),
            })
        })
        .collect()
}

/// CPU, added latency.
fn goals(theirs: &Cell) -> Option<[f64; 2]> {
    let [large, small, first, chunk] = GOALS;
    match theirs.proxy {
        "smg" if theirs.row.streams => Some([chunk, first]),
        "smg" if theirs.row.body_bytes >= LARGE_BYTES => Some([large, large]),
        "smg" => Some([small, small]),
        _ => None,
    }
}

impl Row {
    fn text(self) -> String {
        let kind = if self.streams { "stream" } else { "whole" };
        format!(
            "{:<9} {:<6} {:>6} {:>3}",
            self.dialect.as_str(),
            kind,
            self.body_bytes,
            self.concurrency
        )
    }
}

impl Ratio {
    fn text(self) -> String {
        match self.goal {
            None => format!("{:>6.2}       ", self.value),
            Some(goal) => {
                let word = if self.value <= goal { "≤" } else { ">" };
                format!("{:>6.2} {word} {goal:<4}", self.value)
            }
        }
    }
}

/// Cells and ratios for a person.
pub(super) fn table(cells: &[Cell], ratios: &[CellRatio]) -> String {
    let mut out = format!(
        "{:<27} {:<7} {:>14} {:>22} {:>8}\n",
        "dialect   answer   body   c", "proxy", "added p50, µs", "CPU, µs/request|chunk", "req/s"
    );
    for cell in cells {
        out += &format!(
            "{} {:<7} {:>14.0} {:>22.1} {:>8.0}\n",
            cell.row.text(),
            cell.proxy,
            cell.added_p50_us,
            cell.cpu_us,
            cell.requests_per_s
        );
    }
    out += "\nours by theirs                       CPU          added p50    req/s\n";
    for ratio in ratios {
        out += &format!(
            "{} {:<7} {} {} {:>6.2}\n",
            ratio.row.text(),
            ratio.beside,
            ratio.cpu.text(),
            ratio.added_p50.text(),
            ratio.requests_per_s
        );
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cell(proxy: &'static str, row: Row, value: f64) -> Cell {
        Cell {
            proxy,
            row,
            added_p50_us: value,
            cpu_us: value * 2.0,
            requests_per_s: 1.0,
        }
    }

    /// Catches a ratio of another row's cell, and a goal on the wrong row.
    #[test]
    fn ratios_compare_the_same_row_and_know_its_goal() {
        let check = |body_bytes: usize, streams: bool, goals: [f64; 2]| {
            let row = Row {
                dialect: Dialect::Chat,
                body_bytes,
                concurrency: 8,
                streams,
            };
            let other = Row {
                dialect: Dialect::Messages,
                ..row
            };
            let cells = [
                cell("nginx", row, 1.0),
                cell("smg", row, 8.0),
                cell("homing", other, 1.0),
                cell("homing", row, 2.0),
            ];
            let [nginx, smg] = &ratios(&cells)[..] else {
                unreachable!("one ratio a peer");
            };
            assert_eq!((nginx.cpu.value, nginx.cpu.goal), (2.0, None));
            assert_eq!((smg.cpu.value, smg.added_p50.value), (0.25, 0.25));
            assert_eq!([smg.cpu.goal, smg.added_p50.goal], goals.map(Some));
        };
        check(65_536, false, [0.35, 0.35]);
        check(4096, false, [0.4, 0.4]);
        check(4096, true, [0.6, 0.3]);
    }
}
