//! What does a comparison's owner want to read?
//!
//! One table a scenario, the same as JSON for scripts (names are an interface) and as a page with
//! plots. Where the product took part, how far it is from the reference, from the best baseline and
//! from the floor.

mod page;
mod table;
#[cfg(test)]
mod tests;

use serde::Serialize;

use crate::compare::{Better, Row, best};
use crate::figures::Figures;
use crate::policy::{BASELINES, REFERENCES};
use crate::scenario::{Load, Scenario};
use crate::trace::Trace;

pub use page::page;
pub use table::table;

/// One scenario played by several policies.
#[derive(Clone, PartialEq, Serialize, Debug)]
pub struct Report {
    /// The scenario's name, or the trace's.
    pub scenario: String,
    /// The trace.
    pub trace: String,
    /// Which part of it.
    pub slice: String,
    /// Nodes.
    pub nodes: usize,
    /// Blocks of 512 tokens in each pool.
    pub capacity: usize,
    /// Users, or copies and speed.
    pub load: String,
    /// The end, s.
    pub horizon_s: f64,
    /// Warm-up, s.
    pub warm_s: f64,
    /// Every policy with every choice of parameters.
    pub rows: Vec<Row>,
    /// The product's distances, if it took part.
    pub distances: Vec<Distance>,
}

/// The product beside others in one figure.
#[derive(Clone, PartialEq, Serialize, Debug)]
pub struct Distance {
    /// Which figure.
    pub figure: &'static str,
    /// The product's.
    pub homing: f64,
    /// The best of the references, and which that is.
    pub reference: Option<Peer>,
    /// The best of the baselines, each with its best parameters.
    pub baseline: Option<Peer>,
    /// What nothing can do better; only some figures have one.
    pub floor: Option<f64>,
}

/// Another policy's figure.
#[derive(Clone, PartialEq, Serialize, Debug)]
pub struct Peer {
    /// Name and parameters.
    pub label: String,
    /// Its figure.
    pub value: f64,
    /// The product's figure over it; none where both are 0.
    pub ratio: f64,
}

/// A figure that distances are given for.
struct Measured {
    name: &'static str,
    of: fn(&Figures) -> f64,
    better: Better,
    floor: Option<fn(&Figures) -> f64>,
}

const MEASURED: &[Measured] = &[
    Measured {
        name: "ttft_mean_ms",
        of: |f| f.ttft_mean_ms,
        better: Better::Less,
        floor: Some(|f| f.floor_mean_ms),
    },
    Measured {
        name: "ttft_p99_ms",
        of: |f| f.ttft_p99_ms,
        better: Better::Less,
        floor: Some(|f| f.floor_p99_ms),
    },
    Measured {
        name: "hit_ratio",
        of: |f| f.hit_ratio,
        better: Better::More,
        floor: Some(|f| f.hit_ratio_ideal),
    },
    Measured {
        name: "completions_per_s",
        of: |f| f.completions_per_s,
        better: Better::More,
        floor: None,
    },
    Measured {
        name: "within_10s_per_s",
        of: |f| f.within_10s_per_s,
        better: Better::More,
        floor: None,
    },
];

impl Report {
    /// Of rows that were played.
    pub fn new(name: &str, trace: &Trace, scenario: &Scenario, rows: Vec<Row>) -> Self {
        let load = match scenario.load {
            Load::Users(users) => format!("{users} users"),
            Load::Copies { copies, speed } => format!("{copies} copies at {speed} x"),
        };
        Self {
            scenario: name.to_owned(),
            trace: trace.name.clone(),
            slice: format!("{:?}", scenario.slice).to_lowercase(),
            nodes: scenario.fleet.nodes,
            capacity: scenario.fleet.capacity,
            load,
            horizon_s: scenario.horizon_ms / 1000.0,
            warm_s: scenario.warm_ms / 1000.0,
            distances: distances(&rows),
            rows,
        }
    }

    /// For each policy, the parameters with the least mean TTFT.
    pub fn best_rows(&self) -> Vec<&Row> {
        let mut policies: Vec<&str> = Vec::new();
        for row in &self.rows {
            if !policies.contains(&row.policy.as_str()) {
                policies.push(&row.policy);
            }
        }
        let of = |policy: &&str| {
            let rows = self.rows.iter().filter(|row| row.policy == *policy);
            best(rows, |f| f.ttft_mean_ms, Better::Less)
        };
        policies.iter().filter_map(of).collect()
    }
}

fn distances(rows: &[Row]) -> Vec<Distance> {
    let products = rows.iter().filter(|row| row.policy == "homing");
    let Some(homing) = best(products, |f| f.ttft_mean_ms, Better::Less) else {
        return Vec::new();
    };
    let distance = |measured: &Measured| {
        let value = (measured.of)(&homing.mean);
        let peer = |is_one: &dyn Fn(&Row) -> bool| {
            let rows = rows.iter().filter(|row| is_one(row));
            let best = best(rows, measured.of, measured.better)?;
            let other = (measured.of)(&best.mean);
            Some(Peer {
                label: best.label.clone(),
                value: other,
                ratio: value / other,
            })
        };
        Distance {
            figure: measured.name,
            homing: value,
            reference: peer(&|row| REFERENCES.contains(&row.label.as_str())),
            baseline: peer(&|row| BASELINES.contains(&row.policy.as_str())),
            floor: measured.floor.map(|floor| floor(&homing.mean)),
        }
    };
    MEASURED.iter().map(distance).collect()
}
