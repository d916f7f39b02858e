//! What happens in one step?
//!
//! `step()`: drop the cancelled and the late → schedule (who runs, and a block for every token) →
//! forward → settle (sample, append, publish blocks, tell the client) → publish events. It runs on
//! a thread of its own, which owns model, pool and sequences; nothing else touches them, so nothing
//! here is locked. While there is nothing to do the thread sleeps on its command channel, at most
//! until the next pinned prompt is due, or for moments while the disk is at work.
//!
//! A forward pass that fails or panics ends the requests that were in it, and no others: their
//! blocks go back, the loop goes on.

mod answer;
mod device;
mod follow;
mod handle;
mod incoming;
mod job;
mod outgoing;
mod pins;
mod queue;
mod schedule;
mod sequence;
mod settle;
mod step;
mod tiers;
mod within;

use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TryRecvError, sync_channel};
use std::thread::JoinHandle;
use std::time::Instant;

use cache_index::block::BLOCK_TOKENS;

pub use device::Device;
pub use handle::{Handle, Load, Ticket};
pub use incoming::Inbound;
pub use job::{
    HandOver, Held, HeldInfo, Job, KEEP_MAX, OnFailure, Output, Pooling, Produced, Remote,
    TakeOver, TicketId, Usage, Work,
};
pub use outgoing::{Accepted, Asked, AttachRequest};
pub use pins::HOLD_MAX;

use crate::error::{ApiError, Kind};
use crate::events::EventLog;
use crate::kv::pool::Pool;
use crate::kv::store::disk::Disk;
use crate::kv::store::shared::SharedTier;
use crate::kv::store::{Store, TierChange};
use crate::kv::transfer::client::Order;
use crate::metrics::{Ending, Metrics};
use crate::model::PassOutput;
use crate::sample::Sampler;
use crate::scheduler::join::Overtaken;
use crate::scheduler::pace::{Beside, Pace};
use crate::scheduler::turns::Turns;
use handle::{Command, Shared, Submission};
use incoming::InboundQueue;
use outgoing::{Arrival, Outgoing};
use pins::Pins;
use sequence::Sequence;

/// The bytes of a token, shown one way or the other.
pub type TokenBytes = Box<dyn Fn(u32, Show) -> Vec<u8> + Send>;

/// Guesses what may follow these tokens; sampling verifies every guess.
pub type Drafter = Box<dyn FnMut(&[u32]) -> Vec<u32> + Send>;

/// Whether control tokens are text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Show {
    /// They are not.
    Text,
    /// They are, by their names: a parser of tool calls looks for them.
    Markers,
}

/// Commands that wait for the engine's thread; beyond the queue's bound there are only wake-ups.
const COMMANDS_MAX: usize = 4096;

/// What an engine is made of.
pub struct Parts {
    /// Runs the passes.
    pub device: Box<dyn Device>,
    /// The bytes of a token.
    pub token_bytes: TokenBytes,
    /// Entries in a row of logits.
    pub vocab: usize,
    /// Layers of the model.
    pub layers: usize,
    /// Guesses tokens, if anything does.
    pub drafter: Option<Drafter>,
    /// Blocks in the pool.
    pub kv_blocks: u32,
    /// Blocks in the host tier below it; 0 for none.
    pub host_blocks: usize,
    /// The disk tier below that one, which must be there then.
    pub disk: Option<Disk>,
    /// The shared tier beside the disk; needs host memory too.
    pub shared: Option<SharedTier>,
    /// Takes orders for blocks that other nodes have; none if this node asks for none.
    pub orders: Option<SyncSender<Order>>,
    /// Tokens in one step at most, see [`crate::scheduler::pace`].
    pub step_tokens: usize,
    /// What prompts may take of steps in which others decode.
    pub beside_decode: Beside,
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
    let (handle, receivers) = Handle::new(sender, parts.queue_max, parts.kv_blocks as usize);
    let shared = handle.shared();
    let mut engine = Engine::new(parts, handle.shared(), receivers);
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
    shared: Arc<Shared>,
    started: Instant,
    pool: Pool,
    /// The tiers below the pool, if there are any.
    store: Option<Store>,
    /// What changed in all tiers and has not been told.
    changes: Vec<TierChange>,
    pins: Pins,
    outgoing: Outgoing,
    /// Receivers that have come.
    receivers: Receiver<Arrival>,
    inbound: InboundQueue,
    sampler: Sampler,
    pace: Pace,
    turns: Turns,
    overtaken: Overtaken,
    output: PassOutput,
    /// Preempted sequences are among them; who is next is for `scheduler::turns` to say.
    waiting: Vec<Sequence>,
    running: Vec<Sequence>,
    arrivals: u64,
    /// Blocks that this step copied back into the pool.
    fetched: usize,
    /// Whether this step took blocks from a running sequence.
    preempted: bool,
}

/// What the commands asked for.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Next {
    Step,
    Stop,
}

impl Engine {
    fn new(mut parts: Parts, shared: Arc<Shared>, receivers: Receiver<Arrival>) -> Self {
        Self {
            shared,
            receivers,
            started: Instant::now(),
            pool: Pool::new(parts.kv_blocks),
            store: tiers::store(&mut parts),
            changes: Vec::new(),
            pins: Pins::default(),
            outgoing: Outgoing::default(),
            inbound: InboundQueue::new(),
            sampler: Sampler::default(),
            pace: Pace::new(parts.step_tokens, parts.beside_decode),
            turns: Turns::default(),
            overtaken: Overtaken::default(),
            output: PassOutput::default(),
            waiting: Vec::new(),
            running: Vec::new(),
            arrivals: 0,
            fetched: 0,
            preempted: false,
            parts,
        }
    }

    fn run(&mut self, commands: &Receiver<Command>) {
        // What an earlier life of this node left on the disk is told before anybody asks.
        self.poll_disk();
        self.publish();
        while self.take_commands(commands) == Next::Step {
            self.step();
        }
    }

    /// Takes every command there is; waits for one if there is nothing to do.
    fn take_commands(&mut self, commands: &Receiver<Command>) -> Next {
        if self.has_nothing_to_do() {
            match self.wait(commands) {
                Ok(command) => {
                    if self.take(command) == Next::Stop {
                        return Next::Stop;
                    }
                }
                // A ticket is due, and the step gives its blocks back; or the disk may be done.
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return Next::Stop,
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

    /// Whether only a command, another node, the disk or a deadline can change anything.
    fn has_nothing_to_do(&self) -> bool {
        let waits = |s: &Sequence| s.waits_for_disk() || s.waits_for_node();
        let at_rest = self.inbound.is_empty() && !self.outgoing.is_behind;
        at_rest && self.running.is_empty() && self.waiting.iter().all(waits)
    }

    fn wait(&self, commands: &Receiver<Command>) -> Result<Command, RecvTimeoutError> {
        let deadlines = [
            self.pins.next_deadline(),
            self.outgoing.next_deadline(),
            self.next_stall(),
        ];
        let due = deadlines.into_iter().flatten().min();
        let due = due.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        match due.into_iter().chain(self.next_look()).min() {
            None => commands.recv().map_err(|_| RecvTimeoutError::Disconnected),
            Some(most) => commands.recv_timeout(most),
        }
    }

    fn take(&mut self, command: Command) -> Next {
        match command {
            Command::Submit(submission) => self.submit(*submission),
            Command::Snapshot(answer) => {
                let log = self.parts.events.as_ref();
                let snapshot = log.and_then(|log| log.snapshot(&self.held()));
                let _ = answer.send(snapshot);
            }
            Command::Release(ticket, answer) => {
                let _ = answer.send(self.pins.release(ticket, &mut self.pool));
            }
            Command::Inbound(inbound) => self.queue_inbound(*inbound),
            Command::Received(id) => self.receiver_has_all(id),
            Command::Lost(id, sender) => self.receiver_lost(id, &sender),
            Command::Abandon(id) => self.outgoing.abandon(id),
            Command::Held(ticket, answer) => drop(answer.send(self.pins.info(ticket))),
            Command::Wake => {}
            Command::Stop => return Next::Stop,
        }
        Next::Step
    }

    fn submit(&mut self, submission: Submission) {
        let sequence = Sequence::new(submission, self.arrivals);
        self.arrivals += 1;
        if self.opens_hand_over(&sequence) {
            self.read_ahead(&sequence);
            return self.waiting.push(sequence);
        }
        let message =
            "`kv_transfer_params.transfer_id` was used before; draw a new one for each try.";
        let used = ApiError::new(Kind::Invalid, "invalid_value", message);
        sequence.fail(used.with_param("kv_transfer_params.transfer_id"));
        self.end(sequence, Ending::Failed);
    }
}

#[cfg(test)]
mod tests;
