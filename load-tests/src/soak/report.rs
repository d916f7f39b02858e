//! What came of the soak?

use std::collections::BTreeMap;

use serde::Serialize;

/// Errors quoted in a report; the rest is counted.
pub(super) const EXAMPLES_MAX: usize = 10;

/// Memory that a node may have gained between a tenth of the run and its end and still be flat: a
/// tenth, and what an allocator keeps by chance.
const GROWTH_RATIO_MAX: f64 = 1.1;
const GROWTH_MIB_MAX: f64 = 32.0;

/// How requests ended.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Endings {
    /// Answered as asked.
    pub answered: u64,
    /// Refused as they had to be.
    pub refused: u64,
    /// Left by the client.
    pub left: u64,
    /// Told to come again later.
    pub busy: u64,
    /// Ended by a deadline of their own.
    pub timed_out: u64,
    /// Without an answer within the run's limit.
    pub stuck: u64,
    /// Ended in any other way.
    pub errors: u64,
}

/// A process's memory over the run, its own pages only.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Rss {
    /// The process.
    pub pid: u32,
    /// After a tenth of the requests.
    pub first_mib: f64,
    /// The most that was seen.
    pub most_mib: f64,
    /// At the end.
    pub last_mib: f64,
}

impl Rss {
    /// Whether it has not grown.
    pub fn is_flat(&self) -> bool {
        self.last_mib <= self.first_mib * GROWTH_RATIO_MAX + GROWTH_MIB_MAX
    }
}

/// The soak's result.
#[derive(Clone, Debug, Serialize)]
pub struct Soak {
    /// Requests sent.
    pub requests: u64,
    /// Seconds from the first to the last.
    pub seconds: f64,
    /// How they ended.
    pub endings: Endings,
    /// How many of each kind were sent.
    pub kinds: BTreeMap<&'static str, u64>,
    /// The first errors, with the numbers of their requests.
    pub examples: Vec<String>,
    /// At each node, what is still in use when everything has ended, by gauge; all must be 0.
    pub left_over: BTreeMap<String, f64>,
    /// The watched processes.
    pub memory: Vec<Rss>,
}

impl Soak {
    /// What is wrong, if anything.
    pub fn faults(&self) -> Vec<String> {
        let mut faults = Vec::new();
        if self.endings.errors > 0 {
            faults.push(format!("{} errors", self.endings.errors));
        }
        if self.endings.stuck > 0 {
            faults.push(format!("{} requests stuck", self.endings.stuck));
        }
        let held = self.left_over.iter().filter(|(_, value)| **value != 0.0);
        faults.extend(held.map(|(gauge, value)| format!("{gauge} is {value} at the end")));
        let grown = self.memory.iter().filter(|rss| !rss.is_flat());
        faults.extend(grown.map(|rss| {
            format!(
                "process {} grew from {:.0} to {:.0} MiB",
                rss.pid, rss.first_mib, rss.last_mib
            )
        }));
        faults
    }

    /// For people.
    pub fn table(&self) -> String {
        let e = &self.endings;
        let mut text = format!(
            "{} requests in {:.0} s: {} answered, {} refused as they must be, {} left by the \
             client, {} told to come later, {} past their own deadline, {} stuck, {} errors\n",
            self.requests,
            self.seconds,
            e.answered,
            e.refused,
            e.left,
            e.busy,
            e.timed_out,
            e.stuck,
            e.errors
        );
        let kinds = self.kinds.iter().map(|(kind, n)| format!("{n} {kind}"));
        text += &format!("asked for: {}\n", kinds.collect::<Vec<_>>().join(", "));
        for (gauge, value) in &self.left_over {
            text += &format!("at the end {gauge} {value}\n");
        }
        for rss in &self.memory {
            text += &format!(
                "process {}: {:.1} MiB after a tenth, {:.1} at most, {:.1} at the end\n",
                rss.pid, rss.first_mib, rss.most_mib, rss.last_mib
            );
        }
        for example in &self.examples {
            text += &format!("error: {example}\n");
        }
        text
    }
}
