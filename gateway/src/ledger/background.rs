//! What happens to the journal beside the requests?
//!
//! Two threads, because each waits on a disk: one syncs every [`SYNC_EVERY`], the other fills the
//! database every [`PROJECT_EVERY`] and archives segments. Order of shutdown: both are told to
//! stop; the syncing one ends at once; the projecting one makes a last pass; then the journal is
//! closed by whoever stopped them.

use std::fs;
use std::io;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::{Builder, JoinHandle};
use std::time::Duration;

use super::sqlite::{Progress, Projection, ProjectionError};
use super::{ARCHIVE, SYNC_EVERY, Shared, segment};

/// How far the database is behind the journal at most while it works: what a report that does not
/// project itself, or an operator's own query, may miss.
const PROJECT_EVERY: Duration = Duration::from_millis(200);

/// After an error the database gets this much time to recover; the journal loses nothing.
const PROJECT_BACK_OFF: Duration = Duration::from_secs(2);

/// A flag that a sleeping thread notices at once.
#[derive(Default)]
pub(crate) struct Stop {
    set: Mutex<bool>,
    changed: Condvar,
}

impl Stop {
    /// Sets the flag.
    pub(crate) fn set(&self) {
        *self.set.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.changed.notify_all();
    }

    /// Sleeps for `duration` or until the flag is set; says whether it is.
    pub(crate) fn wait(&self, duration: Duration) -> bool {
        let set = self.set.lock().unwrap_or_else(PoisonError::into_inner);
        let (set, _) = self
            .changed
            .wait_timeout_while(set, duration, |set| !*set)
            .unwrap_or_else(PoisonError::into_inner);
        *set
    }
}

/// Starts both threads.
pub(super) fn start(shared: &Arc<Shared>, stop: &Arc<Stop>) -> io::Result<Vec<JoinHandle<()>>> {
    let sync = (Arc::clone(shared), Arc::clone(stop));
    let project = (Arc::clone(shared), Arc::clone(stop));
    let syncing = Builder::new()
        .name("journal-sync".into())
        .spawn(move || sync_loop(&sync.0, &sync.1))?;
    let projecting = Builder::new()
        .name("ledger-project".into())
        .spawn(move || project_loop(&project.0, &project.1))?;
    Ok(vec![syncing, projecting])
}

fn sync_loop(shared: &Shared, stop: &Stop) {
    let mut failing = false;
    while !stop.wait(SYNC_EVERY) {
        match shared.journal.sync() {
            Ok(()) => failing = false,
            Err(error) if !failing => {
                failing = true;
                tracing::error!(%error, "the journal cannot be synced; tried again every 50 ms");
            }
            Err(_) => {}
        }
    }
}

fn project_loop(shared: &Shared, stop: &Stop) {
    let mut projection = None;
    let mut failing = false;
    let mut pause = PROJECT_EVERY;
    loop {
        let last = stop.wait(pause);
        match pass(shared, &mut projection) {
            Ok(progress) => {
                (failing, pause) = (false, PROJECT_EVERY);
                if progress.damaged > 0 {
                    tracing::error!(lines = progress.damaged, "the journal has damaged lines");
                }
            }
            Err(error) => {
                pause = PROJECT_BACK_OFF;
                if !failing {
                    failing = true;
                    tracing::error!(%error, "the ledger database is behind; the journal keeps all records");
                }
                projection = error
                    .is_damage()
                    .then(|| Projection::make_again(&shared.data).ok())
                    .flatten();
            }
        }
        if last {
            return;
        }
    }
}

fn pass(shared: &Shared, projection: &mut Option<Projection>) -> Result<Progress, ProjectionError> {
    let projection = match projection {
        Some(projection) => projection,
        none => none.insert(Projection::open(&shared.data)?),
    };
    let live = shared.journal.position();
    let progress = projection.catch_up(Some(live))?;
    let oldest_needed = shared.journal.oldest_needed();
    for (number, path) in segment::list(&shared.dir)? {
        // The current segment is never older than the position, so it always stays.
        if number < progress.segment && number < oldest_needed {
            fs::rename(&path, shared.dir.join(ARCHIVE).join(segment::name(number)))?;
        }
    }
    Ok(progress)
}
