//! How does a database of one thread serve many requests?
//!
//! One thread owns the connection. It takes the jobs that wait, runs them in one transaction, each
//! in a savepoint of its own, and answers them after the commit: so a commit is shared by all that
//! came during the last one, and whoever has an answer knows that its rows are with the kernel.
//! There is no fsync on this way; a second thread copies the log into the database every
//! [`CHECKPOINT_EVERY`].
//!
//! Order of shutdown: the queue is closed; the thread serves what is in it and ends; the second one
//! notices and ends.

use std::sync::mpsc as blocking;
use std::sync::{Mutex, PoisonError};
use std::thread::{Builder, JoinHandle};
use std::time::Duration;

use rusqlite::{Connection, Transaction, TransactionBehavior};
use tokio::sync::{mpsc, oneshot};

use super::store::{StoreError, Stored};

/// Jobs that may wait; past it, whoever asks waits to ask.
const QUEUE_MAX: usize = 1024;
/// Jobs in one transaction: their replies wait for the last of them, some 10 ms at most.
const BATCH_MAX: usize = 128;
/// How often the log is copied into the database: at 100 MB/s of responses it grows no larger than
/// that.
const CHECKPOINT_EVERY: Duration = Duration::from_secs(1);

/// A piece of work on its way through a transaction.
trait Job: Send {
    /// Runs it, in a savepoint that is kept only if it succeeds.
    fn run(&mut self, transaction: &mut Transaction<'_>);
    /// Answers, once it is known whether the transaction was committed.
    fn reply(self: Box<Self>, committed: Result<(), &rusqlite::Error>);
}

struct Work<T, W, A> {
    work: Option<W>,
    after: A,
    result: Option<rusqlite::Result<T>>,
    answer: oneshot::Sender<Stored<T>>,
}

impl<T, W, A> Job for Work<T, W, A>
where
    T: Send,
    W: FnOnce(&Connection) -> rusqlite::Result<T> + Send,
    A: FnOnce(&T) + Send,
{
    fn run(&mut self, transaction: &mut Transaction<'_>) {
        let Some(work) = self.work.take() else {
            return;
        };
        self.result = Some(transaction.savepoint().and_then(|savepoint| {
            let result = work(&savepoint)?;
            savepoint.commit()?;
            Ok(result)
        }));
    }

    fn reply(self: Box<Self>, committed: Result<(), &rusqlite::Error>) {
        let result = match (self.result, committed) {
            (Some(Ok(result)), Ok(())) => {
                (self.after)(&result);
                Ok(result)
            }
            (Some(Err(error)), _) => Err(StoreError(error.to_string())),
            (_, Err(error)) => Err(StoreError(error.to_string())),
            (None, Ok(())) => Err(StoreError("the job was not run".to_owned())),
        };
        // Whoever asked may have left meanwhile.
        let _ = self.answer.send(result);
    }
}

/// The way to the thread that owns the database.
pub(super) struct Worker {
    jobs: Mutex<Option<mpsc::Sender<Box<dyn Job>>>>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

impl Worker {
    /// Starts the threads: one works on `owned`, the other copies its log through `copier`.
    pub(super) fn start(owned: Connection, copier: Connection) -> std::io::Result<Self> {
        let (jobs, queue) = mpsc::channel(QUEUE_MAX);
        // Dropped by the first thread when it ends, which ends the second.
        let (alive, ended) = blocking::channel::<()>();
        let work = Builder::new().name("responses".into()).spawn(move || {
            serve(owned, queue);
            drop(alive);
        })?;
        let copy = Builder::new()
            .name("responses-log".into())
            .spawn(move || copy(&copier, &ended))?;
        Ok(Self {
            jobs: Mutex::new(Some(jobs)),
            threads: Mutex::new(vec![work, copy]),
        })
    }

    /// Runs `work` in a transaction and, once that is committed, `after` on its result; both on the
    /// database's thread, in the order of all work.
    pub(super) async fn run<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Connection) -> rusqlite::Result<T> + Send + 'static,
        after: impl FnOnce(&T) + Send + 'static,
    ) -> Stored<T> {
        let gone = || StoreError("the gateway is stopping".to_owned());
        let (answer, answered) = oneshot::channel();
        let job = Work {
            work: Some(work),
            after,
            result: None,
            answer,
        };
        let jobs = {
            let jobs = self.jobs.lock().unwrap_or_else(PoisonError::into_inner);
            jobs.clone().ok_or_else(gone)?
        };
        jobs.send(Box::new(job)).await.map_err(|_| gone())?;
        // Not held while waiting: the queue closes when its last sender is gone.
        drop(jobs);
        answered.await.map_err(|_| gone())?
    }

    /// Serves what waits, then ends.
    pub(super) fn close(&self) {
        let take = |threads: &Mutex<Vec<JoinHandle<()>>>| {
            std::mem::take(&mut *threads.lock().unwrap_or_else(PoisonError::into_inner))
        };
        drop(
            self.jobs
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .take(),
        );
        for thread in take(&self.threads) {
            if thread.join().is_err() {
                tracing::error!("a thread of the store of responses panicked");
            }
        }
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.close();
    }
}

fn serve(mut connection: Connection, mut queue: mpsc::Receiver<Box<dyn Job>>) {
    let mut batch: Vec<Box<dyn Job>> = Vec::with_capacity(BATCH_MAX);
    while let Some(first) = queue.blocking_recv() {
        batch.push(first);
        while batch.len() < BATCH_MAX
            && let Ok(next) = queue.try_recv()
        {
            batch.push(next);
        }
        let committed = commit(&mut connection, &mut batch);
        if let Err(error) = &committed {
            tracing::error!(%error, "the store of responses failed");
        }
        for job in batch.drain(..) {
            job.reply(committed.as_ref().copied());
        }
    }
}

fn commit(connection: &mut Connection, batch: &mut [Box<dyn Job>]) -> rusqlite::Result<()> {
    let mut transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
    for job in batch {
        job.run(&mut transaction);
    }
    transaction.commit()
}

/// Copies the log into the database, beside the thread that writes it and without stopping it.
fn copy(connection: &Connection, ended: &blocking::Receiver<()>) {
    let copy = || {
        connection.query_row("PRAGMA wal_checkpoint(PASSIVE)", [], |row| {
            row.get::<_, i64>(0)
        })
    };
    let mut failing = false;
    while ended.recv_timeout(CHECKPOINT_EVERY) == Err(blocking::RecvTimeoutError::Timeout) {
        match copy() {
            Ok(_) => failing = false,
            Err(error) if !failing => {
                failing = true;
                tracing::error!(%error, "the log of stored responses grows: it cannot be copied");
            }
            Err(_) => {}
        }
    }
}
