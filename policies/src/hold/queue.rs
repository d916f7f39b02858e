//! Who waits, since when, and in which order are they asked?

use std::collections::HashMap;

use super::Turn;

/// A turn that waits.
#[derive(Clone, Debug)]
pub(super) struct Waiting {
    pub(super) turn: Turn,
    /// Whether its session is served, and only its node has no time yet.
    pub(super) is_member: bool,
    /// The node that had too much ahead when it was last asked.
    pub(super) full: Option<u64>,
    /// When it was first asked for; earlier tries count.
    pub(super) since_ms: f64,
    /// When it came this time.
    pub(super) came_ms: f64,
}

/// Turns that wait, by their names.
#[derive(Debug, Default)]
pub(super) struct Queue {
    waiting: HashMap<u64, Waiting>,
    by_tenant: HashMap<u64, usize>,
}

impl Queue {
    pub(super) fn len(&self) -> usize {
        self.waiting.len()
    }

    /// How many of them one tenant has.
    pub(super) fn len_of(&self, tenant: u64) -> usize {
        self.by_tenant.get(&tenant).copied().unwrap_or(0)
    }

    pub(super) fn put(&mut self, waiting: Waiting) {
        *self.by_tenant.entry(waiting.turn.tenant).or_default() += 1;
        if let Some(same) = self.waiting.insert(waiting.turn.id, waiting) {
            self.uncount(same.turn.tenant);
        }
    }

    pub(super) fn remove(&mut self, id: u64) -> Option<Waiting> {
        let gone = self.waiting.remove(&id)?;
        self.uncount(gone.turn.tenant);
        Some(gone)
    }

    fn uncount(&mut self, tenant: u64) {
        if let Some(count) = self.by_tenant.get_mut(&tenant) {
            *count -= 1;
            if *count == 0 {
                self.by_tenant.remove(&tenant);
            }
        }
    }

    /// Takes a turn out if it is such a one.
    pub(super) fn remove_if(
        &mut self,
        id: u64,
        such: impl FnOnce(&Waiting) -> bool,
    ) -> Option<Waiting> {
        if such(self.waiting.get(&id)?) {
            return self.remove(id);
        }
        None
    }

    /// When the one that came first this time came.
    pub(super) fn oldest_ms(&self) -> Option<f64> {
        let came = self.waiting.values().map(|waiting| waiting.came_ms);
        came.min_by(f64::total_cmp)
    }

    /// Whether anybody waits for its session to be served at all.
    pub(super) fn has_newcomers(&self) -> bool {
        self.waiting.values().any(|waiting| !waiting.is_member)
    }

    /// Those who came at or before this time, out of the queue.
    pub(super) fn take_late(&mut self, before_ms: f64) -> Vec<Waiting> {
        let is_late = |waiting: &Waiting| waiting.came_ms <= before_ms;
        let mut late: Vec<u64> = self
            .waiting
            .values()
            .filter(|waiting| is_late(waiting))
            .map(|waiting| waiting.turn.id)
            .collect();
        late.sort_unstable();
        late.into_iter().filter_map(|id| self.remove(id)).collect()
    }

    /// Everybody's name, the lowest score first, and the one that came first of equals.
    pub(super) fn order(&self, score: impl Fn(&Waiting) -> f64) -> Vec<u64> {
        let mut scored: Vec<(f64, f64, u64)> = self
            .waiting
            .values()
            .map(|waiting| (score(waiting), waiting.since_ms, waiting.turn.id))
            .collect();
        scored.sort_unstable_by(|a, b| {
            a.0.total_cmp(&b.0)
                .then(a.1.total_cmp(&b.1))
                .then(a.2.cmp(&b.2))
        });
        scored.into_iter().map(|(_, _, id)| id).collect()
    }
}
