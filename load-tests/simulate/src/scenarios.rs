//! The scenarios that figures are given for, by name.
//!
//! Loads at which a fleet with good routing is busy but keeps up, one where the sessions' working
//! set is about to exceed the pools, and one where it does.

use crate::engine::Params;
use crate::scenario::{Fleet, Load, Scenario, Slice};
use crate::trace::Trace;

/// A scenario by name.
#[derive(Clone, PartialEq, Debug)]
pub struct Named {
    /// Its name on the command line.
    pub name: &'static str,
    /// Its trace's file name without endings.
    pub trace: &'static str,
    /// Its part of the goals.
    pub kind: Kind,
    setup: Setup,
}

/// What is asked of a policy in a scenario.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// Sessions of coding agents, one region.
    Agentic,
    /// More of them than the pools can hold: latency within a bound, whatever it takes.
    PastTheCliff,
    /// Several regions.
    Regions,
    /// Other traffic.
    Other,
}

/// What a command line can say of a scenario; the rest follows from the trace.
#[derive(Clone, PartialEq, Debug)]
pub struct Setup {
    /// Nodes.
    pub nodes: usize,
    /// Blocks in each pool.
    pub capacity: usize,
    /// Who asks.
    pub load: Load,
    /// The end, s; by default an hour of users, or the slice's own length.
    pub horizon_s: Option<f64>,
    /// Warm-up, s; by default 20 minutes of users, or a quarter of the run and at most 10 minutes.
    pub warm_s: Option<f64>,
    /// Regions.
    pub regions: usize,
    /// Round trips between them, ms.
    pub round_trips_ms: Vec<f64>,
    /// How users spread over them; none: evenly.
    pub region_weights: Vec<f64>,
    /// The share of sessions that roam.
    pub roam: f64,
}

impl Setup {
    /// One region, times by default.
    pub fn new(nodes: usize, capacity: usize, load: Load) -> Self {
        Self {
            nodes,
            capacity,
            load,
            horizon_s: None,
            warm_s: None,
            regions: 1,
            round_trips_ms: vec![60.0, 110.0, 150.0],
            region_weights: Vec::new(),
            roam: 0.0,
        }
    }

    /// With a trace, a slice of it and a seed.
    pub fn scenario(&self, trace: &Trace, slice: Slice, seed: u64) -> Scenario {
        let natural_s = match self.load {
            Load::Users(_) => 3600.0,
            Load::Copies { speed, .. } => {
                let share = match slice {
                    Slice::Dev => 2.0 / 3.0,
                    Slice::Held => 1.0 / 3.0,
                    Slice::All => 1.0,
                };
                trace.length_ms / 1000.0 * share / speed
            }
        };
        let natural_warm_s = match self.load {
            Load::Users(_) => 1200.0,
            Load::Copies { .. } => (natural_s * 0.25).min(600.0),
        };
        let weights = if self.region_weights.is_empty() {
            vec![1.0; self.regions]
        } else {
            self.region_weights.clone()
        };
        Scenario {
            fleet: Fleet {
                regions: self.regions,
                round_trips_ms: self.round_trips_ms.clone(),
                seed,
                ..Fleet::alike(Params::default(), self.nodes, self.capacity)
            },
            load: self.load,
            slice,
            seed,
            horizon_ms: self.horizon_s.unwrap_or(natural_s) * 1000.0,
            warm_ms: self.warm_s.unwrap_or(natural_warm_s) * 1000.0,
            region_weights: weights,
            roam: self.roam,
            ttft_bound_ms: 5000.0,
            tpot_bound_ms: 50.0,
            think_ms_max: 900_000.0,
            jitter_ms: 30_000.0,
        }
    }
}

impl Named {
    /// All of them.
    pub fn all() -> Vec<Self> {
        let named = |name, trace, kind, setup| Self {
            name,
            trace,
            kind,
            setup,
        };
        let agents = |nodes, capacity, users| Setup::new(nodes, capacity, Load::Users(users));
        let copies = |speed| Setup::new(8, 3000, Load::Copies { copies: 2, speed });
        let many_nodes = Setup {
            horizon_s: Some(1500.0),
            warm_s: Some(700.0),
            ..agents(64, 12_000, 3200)
        };
        let three_regions = Setup {
            regions: 3,
            region_weights: vec![2.0, 1.0, 0.5],
            roam: 0.2,
            horizon_s: Some(2700.0),
            warm_s: Some(900.0),
            ..agents(24, 12_000, 1100)
        };
        vec![
            named(
                "agentic-ample",
                "weka",
                Kind::Agentic,
                agents(8, 12_000, 450),
            ),
            named(
                "agentic-near-cliff",
                "weka",
                Kind::Agentic,
                agents(8, 3000, 170),
            ),
            named(
                "agentic-past-cliff",
                "weka",
                Kind::PastTheCliff,
                agents(8, 3000, 220),
            ),
            named("agentic-64-nodes", "weka", Kind::Agentic, many_nodes),
            named("agentic-3-regions", "weka", Kind::Regions, three_regions),
            named(
                "conversation",
                "mooncake_conversation",
                Kind::Other,
                copies(1.25),
            ),
            named("tool-mix", "toolmix", Kind::Other, copies(1.2)),
        ]
    }

    /// With its trace, a slice of it and a seed.
    pub fn scenario(&self, trace: &Trace, slice: Slice, seed: u64) -> Scenario {
        self.setup.scenario(trace, slice, seed)
    }
}
