//! How do policies compare? The same scenario, several seeds, each policy over its parameters.
//!
//! The caller plays [`Case`]s in any order, on as many threads as it likes, and gives the results
//! back: this crate has no threads of its own.

use serde::Serialize;

use crate::figures::{Figures, Summary};
use crate::fleet;
use crate::policy::{PolicyError, Spec};
use crate::router::Router;
use crate::scenario::Scenario;
use crate::trace::Trace;

/// One run to be played.
#[derive(Clone, PartialEq, Debug)]
pub struct Case {
    /// The policy.
    pub spec: Spec,
    /// The scenario's seed.
    pub seed: u64,
}

impl Case {
    /// Plays it.
    pub fn play(&self, trace: &Trace, scenario: &Scenario) -> Result<Summary, PolicyError> {
        let mut router = self.spec.build(&self.scenario(scenario).fleet)?;
        Ok(self.play_on(trace, scenario, router.as_mut()))
    }

    /// Plays it on a router that the caller has built, for [`Case::scenario`]'s fleet.
    pub fn play_on(&self, trace: &Trace, scenario: &Scenario, router: &mut dyn Router) -> Summary {
        let scenario = self.scenario(scenario);
        let run = fleet::run(trace, &scenario, router);
        Summary::of(&scenario, &run)
    }

    /// The scenario with this case's seed.
    pub fn scenario(&self, scenario: &Scenario) -> Scenario {
        scenario.clone().with_seed(self.seed)
    }
}

/// Every policy with every seed.
pub fn cases(specs: &[Spec], seeds: &[u64]) -> Vec<Case> {
    let with_seeds = |spec: &Spec| {
        let spec = spec.clone();
        seeds.iter().map(move |&seed| Case {
            spec: spec.clone(),
            seed,
        })
    };
    specs.iter().flat_map(with_seeds).collect()
}

/// One policy with one choice of its parameters.
#[derive(Clone, PartialEq, Serialize, Debug)]
pub struct Row {
    /// The policy's name; an outside policy's command belongs to it.
    pub policy: String,
    /// Name and parameters.
    pub label: String,
    /// The seeds played.
    pub seeds: Vec<u64>,
    /// Means over the seeds.
    pub mean: Figures,
    /// Half the width of the 95 % confidence interval of the mean hit ratio.
    pub hit_ratio_ci95: f64,
    /// The same of the mean TTFT.
    pub ttft_mean_ci95_ms: f64,
    /// Each seed's own figures.
    pub by_seed: Vec<Figures>,
    /// TTFT at every hundredth of the requests, means over the seeds.
    pub ttft_percentiles_ms: Vec<f64>,
}

/// The results of cases, by policy and parameters, in the order of their first appearance.
pub fn rows(results: &[(Case, Summary)]) -> Vec<Row> {
    let mut groups: Vec<(&Spec, Vec<(u64, &Summary)>)> = Vec::new();
    for (case, summary) in results {
        match groups.iter_mut().find(|(spec, _)| **spec == case.spec) {
            Some((_, group)) => group.push((case.seed, summary)),
            None => groups.push((&case.spec, vec![(case.seed, summary)])),
        }
    }
    groups
        .into_iter()
        .map(|(spec, runs)| row(spec, &runs))
        .collect()
}

fn row(spec: &Spec, runs: &[(u64, &Summary)]) -> Row {
    let by_seed: Vec<Figures> = runs.iter().map(|(_, s)| s.figures).collect();
    let points = runs.iter().map(|(_, s)| s.ttft_percentiles_ms.len()).min();
    let mean_at = |point: usize| {
        let all: f64 = runs.iter().map(|(_, s)| s.ttft_percentiles_ms[point]).sum();
        all / runs.len() as f64
    };
    Row {
        policy: match spec.command() {
            Some(_) => spec.to_string(),
            None => spec.name().to_owned(),
        },
        label: spec.to_string(),
        seeds: runs.iter().map(|(seed, _)| *seed).collect(),
        mean: Figures::mean(&by_seed),
        hit_ratio_ci95: ci95(by_seed.iter().map(|f| f.hit_ratio)),
        ttft_mean_ci95_ms: ci95(by_seed.iter().map(|f| f.ttft_mean_ms)),
        ttft_percentiles_ms: (0..points.unwrap_or(0)).map(mean_at).collect(),
        by_seed,
    }
}

/// Half the width of the 95 % confidence interval of the mean of a sample, after Student.
pub fn ci95(sample: impl Iterator<Item = f64>) -> f64 {
    /// Student's t at 97.5 % for 1, 2, … degrees of freedom; beyond the table the normal value's
    /// neighbourhood, a little too wide.
    const STUDENT: [f64; 30] = [
        12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160,
        2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056,
        2.052, 2.048, 2.045, 2.042,
    ];
    let sample: Vec<f64> = sample.collect();
    let n = sample.len() as f64;
    if sample.len() < 2 {
        return f64::INFINITY;
    }
    let mean = sample.iter().sum::<f64>() / n;
    let variance = sample.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / (n - 1.0);
    let student = STUDENT[(sample.len() - 2).min(STUDENT.len() - 1)];
    student * (variance / n).sqrt()
}

/// The row that is best by a figure.
pub fn best<'a>(
    rows: impl Iterator<Item = &'a Row>,
    figure: fn(&Figures) -> f64,
    better: Better,
) -> Option<&'a Row> {
    let badness = |row: &&Row| match better {
        Better::Less => figure(&row.mean),
        Better::More => -figure(&row.mean),
    };
    rows.min_by(|a, b| badness(a).total_cmp(&badness(b)))
}

/// Which way a figure is good.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Better {
    /// The smaller the better.
    Less,
    /// The larger the better.
    More,
}
