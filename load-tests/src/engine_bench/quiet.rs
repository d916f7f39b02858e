//! Was the machine ours while a round ran?
//!
//! The kernel counts what all processes together used; what the two programs and this bench used
//! is taken off, and the rest was others'. Time that the hypervisor took counts with it.

use std::fs;
use std::time::Instant;

use super::sides::Running;
use crate::process::cpu_seconds;

/// The share of one core that others may take in a round that counts.
pub(super) const OTHERS_MOST: f64 = 0.05;

/// A round in progress.
pub(super) struct Quiet {
    started: Instant,
    all: f64,
    own: f64,
}

impl Quiet {
    /// Reads the counters.
    pub(super) fn begin(programs: &mut [Option<Running>]) -> Self {
        programs.iter_mut().flatten().for_each(Running::rewind);
        Self {
            started: Instant::now(),
            all: busy_seconds(),
            own: cpu_seconds(std::process::id()),
        }
    }

    /// The share of one core that neither this bench nor these programs used since.
    pub(super) fn others(&self, programs: &[Option<Running>]) -> f64 {
        let programs: f64 = programs.iter().flatten().map(Running::used_seconds).sum();
        let own = cpu_seconds(std::process::id()) - self.own + programs;
        let wall = self.started.elapsed().as_secs_f64().max(1e-3);
        ((busy_seconds() - self.all - own) / wall).max(0.0)
    }
}

/// Seconds that all processors together were not idle.
fn busy_seconds() -> f64 {
    let text = fs::read_to_string("/proc/stat").unwrap_or_default();
    let line = text.lines().next().unwrap_or_default();
    // user nice system idle iowait irq softirq steal; guests are in user already.
    let fields = line.split_whitespace().skip(1).take(8);
    let ticks: u64 = fields
        .enumerate()
        .filter(|(at, _)| !matches!(at, 3 | 4))
        .filter_map(|(_, f)| f.parse::<u64>().ok())
        .sum();
    ticks as f64 / rustix::param::clock_ticks_per_second() as f64
}
