//! What does a run's owner want to read?
//!
//! One page: how much was asked, how much of it was cached, how long it took, what failed. The same
//! figures as a table for people and as JSON for scripts; the JSON's names are an interface.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use serde::Serialize;

use crate::agent::Run;
use crate::chat::count_failures;
use crate::measure::{Summary, ratio};

/// The figures of one agent run.
#[derive(Debug, Serialize)]
pub struct Report {
    /// Requests that were sent.
    pub requests: usize,
    /// Those that brought a whole answer.
    pub ok: usize,
    /// Turns never sent, since their session had failed.
    pub not_sent: usize,
    /// Failed requests by kind.
    pub errors: BTreeMap<String, usize>,
    /// Tokens of all prompts, by the server's report.
    pub prompt_tokens: u64,
    /// Those of them that were cached.
    pub cached_tokens: u64,
    /// Tokens of all answers.
    pub output_tokens: u64,
    /// `cached_tokens / prompt_tokens`.
    pub hit_ratio: f64,
    /// First text after the intended time.
    pub ttft_ms: Summary,
    /// Time per further token.
    pub tpot_ms: Summary,
    /// Whole answer after the intended time.
    pub latency_ms: Summary,
    /// How late requests left the client.
    pub late_ms: Summary,
    /// Length of the run.
    pub duration_s: f64,
    /// Answer tokens a second over the run.
    pub output_tokens_per_s: f64,
    /// Prompt tokens a second over the run, cached ones included.
    pub prompt_tokens_per_s: f64,
    /// Requests by `x-homing-node`.
    pub nodes: BTreeMap<String, usize>,
    /// Requests by `x-homing-route`.
    pub routes: BTreeMap<String, usize>,
}

impl Report {
    /// Sums a run up.
    pub fn of(run: &Run) -> Self {
        let ok: Vec<_> = run.records.iter().filter(|r| r.failure.is_none()).collect();
        let usage = |pick: fn(&crate::chat::Usage) -> u64| -> u64 {
            ok.iter().filter_map(|r| r.usage.as_ref()).map(pick).sum()
        };
        let prompt_tokens = usage(|u| u.prompt_tokens);
        let cached_tokens = usage(|u| u.cached_tokens);
        let output_tokens = usage(|u| u.completion_tokens);
        let duration_s = run.duration.as_secs_f64();
        Self {
            requests: run.records.len(),
            ok: ok.len(),
            not_sent: run.not_sent,
            errors: count_failures(run.records.iter().filter_map(|r| r.failure.as_ref())),
            prompt_tokens,
            cached_tokens,
            output_tokens,
            hit_ratio: ratio(cached_tokens as f64, prompt_tokens as f64),
            ttft_ms: Summary::of(ok.iter().filter_map(|r| r.ttft_ms)),
            tpot_ms: Summary::of(ok.iter().filter_map(|r| r.tpot_ms)),
            latency_ms: Summary::of(ok.iter().map(|r| r.latency_ms)),
            late_ms: Summary::of(run.records.iter().map(|r| r.sent_ms - r.intended_ms)),
            duration_s,
            output_tokens_per_s: ratio(output_tokens as f64, duration_s),
            prompt_tokens_per_s: ratio(prompt_tokens as f64, duration_s),
            nodes: count(ok.iter().filter_map(|r| r.node.as_deref())),
            routes: count(ok.iter().filter_map(|r| r.route.as_deref())),
        }
    }

    /// The report for a person.
    pub fn table(&self) -> String {
        let mut out = String::new();
        let mut row = |name: &str, value: String| {
            // Writing to a String cannot fail.
            let _ = writeln!(out, "{name:<16} {value}");
        };
        row(
            "requests",
            format!(
                "{} ({} ok, {} not sent)",
                self.requests, self.ok, self.not_sent
            ),
        );
        row(
            "prompt tokens",
            format!("{} ({} cached)", self.prompt_tokens, self.cached_tokens),
        );
        row("hit ratio", format!("{:.3}", self.hit_ratio));
        row(
            "output tokens",
            format!(
                "{} ({:.1} per second)",
                self.output_tokens, self.output_tokens_per_s
            ),
        );
        row("duration", format!("{:.1} s", self.duration_s));
        row(
            "",
            format!("{:>9} {:>9} {:>9} {:>9}", "p50", "p90", "p99", "max"),
        );
        for (name, s) in [
            ("TTFT, ms", &self.ttft_ms),
            ("TPOT, ms", &self.tpot_ms),
            ("latency, ms", &self.latency_ms),
            ("sent late, ms", &self.late_ms),
        ] {
            row(
                name,
                format!(
                    "{:>9.1} {:>9.1} {:>9.1} {:>9.1}",
                    s.p50, s.p90, s.p99, s.max
                ),
            );
        }
        for (title, counts) in [
            ("node", &self.nodes),
            ("route", &self.routes),
            ("error", &self.errors),
        ] {
            for (name, count) in counts {
                row(title, format!("{name}: {count}"));
            }
        }
        out
    }
}

fn count<'a>(names: impl Iterator<Item = &'a str>) -> BTreeMap<String, usize> {
    let mut counts = BTreeMap::new();
    for name in names {
        *counts.entry(name.to_owned()).or_insert(0) += 1;
    }
    counts
}
