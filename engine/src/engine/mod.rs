//! What happens in one step?
//!
//! `step()`: drop the cancelled → admit the waiting → plan → find blocks → forward → sample →
//! settle → publish events. It runs on a thread of its own, which owns model, pool and sequences;
//! nothing else touches them, so nothing here is locked. While there is nothing to do the thread
//! sleeps on its command channel.
//!
//! A forward pass that fails or panics ends the requests that were in it, and no others: their
//! blocks go back, the loop goes on.

mod handle;
mod job;
mod sequence;
mod step;

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, TryRecvError, sync_channel};
use std::thread::JoinHandle;

pub use handle::{Handle, Ticket};
pub use job::{Held, HeldInfo, Job, Output, Pooling, Produced, TicketId, Usage, Work};

use crate::events::EventLog;
use crate::kv::pool::Pool;
use crate::metrics::Metrics;
use crate::model::{ForwardError, SeqInput};
use crate::sample::Sampler;
use handle::{Command, Submission};
use sequence::Sequence;

/// Runs a batch; a closure over the model, so that tests can break it.
pub type Forward =
    Box<dyn FnMut(&[SeqInput<'_>], &mut Vec<f32>) -> Result<(), ForwardError> + Send>;

/// The bytes of a token.
pub type TokenBytes = Box<dyn Fn(u32) -> Vec<u8> + Send>;

/// Commands that wait for the engine's thread; beyond the queue's bound there are only wake-ups.
const COMMANDS_MAX: usize = 4096;

/// What an engine is made of.
pub struct Parts {
    /// Runs a batch.
    pub forward: Forward,
    /// The bytes of a token.
    pub token_bytes: TokenBytes,
    /// Entries in a row of logits.
    pub vocab: usize,
    /// Blocks in the pool.
    pub kv_blocks: u32,
    /// Tokens in one step, see [`crate::scheduler::plan`].
    pub step_tokens: usize,
    /// Requests that may wait.
    pub queue_max: usize,
    /// The handles behind `/metrics`.
    pub metrics: Arc<Metrics>,
    /// Where KV events go; none if nobody can ask for them.
    pub events: Option<Arc<EventLog>>,
}

/// Starts the engine's thread.
pub fn start(parts: Parts) -> std::io::Result<(Handle, JoinHandle<()>)> {
    let (sender, commands) = sync_channel(COMMANDS_MAX);
    let handle = Handle::new(sender, parts.queue_max);
    let shared = handle.shared();
    let mut engine = Engine::new(parts);
    let run = move || {
        // Set on a panic too: whoever watches must see that the thread is gone.
        let _ended = scopeguard(move || {
            let _ = shared.ended.set(());
        });
        engine.run(&commands);
    };
    let thread = std::thread::Builder::new()
        .name("engine".into())
        .spawn(run)?;
    Ok((handle, thread))
}

/// Runs a closure when dropped.
fn scopeguard(run: impl FnOnce()) -> impl Drop {
    struct Guard<F: FnOnce()>(Option<F>);
    impl<F: FnOnce()> Drop for Guard<F> {
        fn drop(&mut self) {
            if let Some(run) = self.0.take() {
                run();
            }
        }
    }
    Guard(Some(run))
}

struct Engine {
    parts: Parts,
    pool: Pool,
    sampler: Sampler,
    logits: Vec<f32>,
    /// In order of arrival; preempted sequences stand in front.
    waiting: VecDeque<Sequence>,
    /// In order of joining: the last one is the first to be preempted.
    running: Vec<Sequence>,
}

/// What the commands asked for.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Next {
    Step,
    Stop,
}

impl Engine {
    fn new(parts: Parts) -> Self {
        let pool = Pool::new(parts.kv_blocks);
        Self {
            parts,
            pool,
            sampler: Sampler::default(),
            logits: Vec::new(),
            waiting: VecDeque::new(),
            running: Vec::new(),
        }
    }

    fn run(&mut self, commands: &Receiver<Command>) {
        while self.take_commands(commands) == Next::Step {
            self.step();
        }
    }

    /// Takes every command there is; waits for one if there is nothing to do.
    fn take_commands(&mut self, commands: &Receiver<Command>) -> Next {
        if self.waiting.is_empty() && self.running.is_empty() {
            let Ok(command) = commands.recv() else {
                return Next::Stop;
            };
            if self.take(command) == Next::Stop {
                return Next::Stop;
            }
        }
        loop {
            let command = match commands.try_recv() {
                Ok(command) => command,
                Err(TryRecvError::Empty) => return Next::Step,
                Err(TryRecvError::Disconnected) => return Next::Stop,
            };
            if self.take(command) == Next::Stop {
                return Next::Stop;
            }
        }
    }

    fn take(&mut self, command: Command) -> Next {
        match command {
            Command::Submit(submission) => self.submit(*submission),
            Command::Snapshot(answer) => {
                let log = self.parts.events.as_ref();
                let snapshot = log.and_then(|log| log.snapshot(&self.pool.snapshot()));
                let _ = answer.send(snapshot);
            }
            // Nothing is pinned yet.
            Command::Release(_ticket, answer) => drop(answer.send(false)),
            Command::Held(_ticket, answer) => drop(answer.send(None)),
            Command::Wake => {}
            Command::Stop => return Next::Stop,
        }
        Next::Step
    }

    fn submit(&mut self, submission: Submission) {
        self.waiting.push_back(Sequence::new(submission));
    }
}

#[cfg(test)]
mod tests;
