//! The table on a terminal.

use std::fmt::Write as _;

use super::{Distance, Peer, Report};
use crate::compare::Row;

/// The best parameters of each policy, one line each, and the product's distances.
pub fn table(report: &Report) -> String {
    let mut text = format!(
        "{}: {}, {} slice, {} nodes of {} blocks, {}, {:.0} s ({:.0} s warm-up)\n",
        report.scenario,
        report.trace,
        report.slice,
        report.nodes,
        report.capacity,
        report.load,
        report.horizon_s,
        report.warm_s
    );
    let rows = report.best_rows();
    let width = rows
        .iter()
        .map(|row| row.label.len())
        .max()
        .unwrap_or(0)
        .max(6);
    let _ = writeln!(
        text,
        "  {:width$} {:>8} {:>7} {:>6} {:>8} {:>8} {:>8} {:>8} {:>6} {:>7} {:>6} {:>6} {:>7} {:>7} {:>6} {:>6}",
        "policy",
        "requests",
        "done/s",
        "hit",
        "ttft ms",
        "p50",
        "p90",
        "p99",
        "tpot90",
        "good/s",
        "busy",
        "max/mn",
        "in 2 s",
        "in 10 s",
        "refus",
        "unansw"
    );
    for row in rows {
        line(&mut text, row, width);
    }
    if let Some(row) = report.rows.first() {
        let _ = writeln!(
            text,
            "  floor: ttft {:.0} ms, p99 {:.0} ms; ideal hit ratio {:.4}",
            row.mean.floor_mean_ms, row.mean.floor_p99_ms, row.mean.hit_ratio_ideal
        );
    }
    for distance in &report.distances {
        distance_line(&mut text, distance);
    }
    text
}

fn line(text: &mut String, row: &Row, width: usize) {
    let f = &row.mean;
    let _ = writeln!(
        text,
        "  {:width$} {:>8.0} {:>7.2} {:>6.4} {:>8.0} {:>8.0} {:>8.0} {:>8.0} {:>6.1} {:>7.3} {:>6.3} \
         {:>6.2} {:>7.4} {:>7.4} {:>6.2} {:>6.1}",
        row.label,
        f.requests,
        f.completions_per_s,
        f.hit_ratio,
        f.ttft_mean_ms,
        f.ttft_p50_ms,
        f.ttft_p90_ms,
        f.ttft_p99_ms,
        f.tpot_p90_ms,
        f.good_per_s,
        f.busy,
        f.balance,
        f.within_2s,
        f.within_10s,
        f.refusals,
        f.unanswered
    );
}

fn distance_line(text: &mut String, distance: &Distance) {
    let number = |value: f64| {
        if value < 100.0 {
            format!("{value:.4}")
        } else {
            format!("{value:.0}")
        }
    };
    let _ = write!(
        text,
        "  homing {:17} {:>9}",
        distance.figure,
        number(distance.homing)
    );
    let mut peer = |what: &str, peer: &Option<Peer>| {
        if let Some(peer) = peer {
            let value = number(peer.value);
            // Nothing over nothing, in a run too short for the figure.
            let ratio = if peer.ratio.is_finite() {
                format!("{:.3}", peer.ratio)
            } else {
                "–".to_owned()
            };
            let _ = write!(text, " = {ratio} x {what} {value} ({})", peer.label);
        }
    };
    peer("reference", &distance.reference);
    peer("baseline", &distance.baseline);
    if let Some(floor) = distance.floor {
        let _ = write!(text, "; floor {}", number(floor));
    }
    text.push('\n');
}
