//! How do other threads talk to the engine's?
//!
//! The engine's thread owns model, pool and sequences; everybody else holds a [`Handle`] and sends
//! commands over a bounded channel. An answer comes back over a channel of its own that has room
//! for all of it, so the step loop never waits for a reader. Dropping a [`Ticket`] is all it takes
//! to cancel: its flag is read at the start of the next step.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender as Arrivals, SyncSender, TrySendError, channel};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use cache_index::block::BLOCK_TOKENS;
use tokio::sync::{mpsc, oneshot, watch};

use super::incoming::Inbound;
use super::job::{HeldInfo, Job, Output, Remote, TicketId};
use super::outgoing::{Answer, Arrival, AttachRequest};
pub use super::queue::Load;
use super::queue::{Queue, QueuePlace};
use crate::error::{ApiError, Kind};
use crate::events::Numbered;
use crate::kv::transfer::TransferId;
use crate::kv::transfer::sender::Sender;
use crate::scheduler::turns::Share;

/// A submitted request. Dropping it cancels the request if it still runs.
#[derive(Debug)]
pub struct Ticket {
    outputs: mpsc::Receiver<Output>,
    cancelled: Arc<AtomicBool>,
    handle: Handle,
}

impl Ticket {
    /// The next thing the engine says; none if its thread died.
    pub async fn next(&mut self) -> Option<Output> {
        self.outputs.recv().await
    }

    /// As [`Ticket::next`], for hand-written futures.
    pub fn poll_next(
        &mut self,
        context: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Option<Output>> {
        self.outputs.poll_recv(context)
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        self.cancelled.store(true, Ordering::Release);
        // A full channel means that the engine is awake and will look at the flag anyway.
        let _ = self.handle.commands.try_send(Command::Wake);
        self.handle.shared.active.send_modify(|active| *active -= 1);
    }
}

/// Work for the engine's thread.
pub(super) enum Command {
    Submit(Box<Submission>),
    Snapshot(oneshot::Sender<Option<Numbered>>),
    Release(TicketId, oneshot::Sender<bool>),
    Held(TicketId, oneshot::Sender<Option<HeldInfo>>),
    Inbound(Box<Inbound>),
    Received(TransferId),
    Lost(TransferId, Arc<Sender>),
    Abandon(TransferId),
    Wake,
    Stop,
}

/// A job with its way back.
pub(super) struct Submission {
    pub(super) job: Job,
    pub(super) share: Share,
    pub(super) outputs: mpsc::Sender<Output>,
    pub(super) cancelled: Arc<AtomicBool>,
    pub(super) arrived: Instant,
    pub(super) place: QueuePlace,
}

#[derive(Debug)]
pub(super) struct Shared {
    queue: Arc<Queue>,
    /// What one request can have at most.
    tokens_max: usize,
    active: watch::Sender<usize>,
    draining: AtomicBool,
    /// Set once the engine's thread has ended.
    pub(super) ended: OnceLock<()>,
}

/// The engine, seen from other threads.
#[derive(Clone)]
pub struct Handle {
    commands: SyncSender<Command>,
    /// Looked at within steps, too.
    receivers: Arrivals<Arrival>,
    shared: Arc<Shared>,
}

impl std::fmt::Debug for Handle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Handle")
            .field("shared", &self.shared)
            .finish_non_exhaustive()
    }
}

impl Handle {
    /// A handle with its channel, and the receivers that come over it.
    pub(super) fn new(
        commands: SyncSender<Command>,
        queue_max: usize,
        kv_blocks: usize,
    ) -> (Self, Receiver<Arrival>) {
        // Bounded by the connections that other nodes may have.
        let (receivers, arrivals) = channel();
        let (active, _) = watch::channel(0);
        let shared = Shared {
            queue: Queue::new(queue_max),
            tokens_max: kv_blocks * BLOCK_TOKENS,
            active,
            draining: AtomicBool::new(false),
            ended: OnceLock::new(),
        };
        let handle = Self {
            commands,
            receivers,
            shared: Arc::new(shared),
        };
        (handle, arrivals)
    }

    pub(super) fn shared(&self) -> Arc<Shared> {
        Arc::clone(&self.shared)
    }

    /// Queues a request, or says why not.
    pub fn submit(&self, job: Job) -> Result<Ticket, ApiError> {
        let hand_over = match &job.remote {
            Remote::HandOver(hand_over) => Some(hand_over.id),
            Remote::None | Remote::TakeOver(_) => None,
        };
        let submitted = self.queue(job);
        if let (Err(_), Some(id)) = (&submitted, hand_over) {
            self.kv_abandon(id);
        }
        submitted
    }

    fn queue(&self, mut job: Job) -> Result<Ticket, ApiError> {
        if self.shared.draining.load(Ordering::Acquire) {
            return Err(draining());
        }
        self.bound(&mut job)?;
        let place = self.shared.queue.take_place(job.scope.salt.as_deref())?;
        // Room for every token and the three other outputs: the engine never waits for a reader.
        let (sender, outputs) = mpsc::channel(job.output_max + 3);
        let cancelled = Arc::new(AtomicBool::new(false));
        let submission = Submission {
            share: place.share,
            job,
            outputs: sender,
            cancelled: Arc::clone(&cancelled),
            arrived: Instant::now(),
            place,
        };
        match self
            .commands
            .try_send(Command::Submit(Box::new(submission)))
        {
            Ok(()) => {}
            Err(TrySendError::Full(_)) => return Err(self.shared.queue.full(&self.load())),
            Err(TrySendError::Disconnected(_)) => return Err(ended()),
        }
        self.shared.active.send_modify(|active| *active += 1);
        Ok(Ticket {
            outputs,
            cancelled,
            handle: self.clone(),
        })
    }

    /// Everything held, for a late joiner; `Some(None)` if nothing was ever held, none if the
    /// engine has stopped.
    pub async fn snapshot(&self) -> Option<Option<Numbered>> {
        self.ask(Command::Snapshot).await
    }

    /// Gives the blocks of a ticket back; false if there is no such ticket (any more).
    pub async fn release(&self, ticket: TicketId) -> bool {
        self.ask(|answer| Command::Release(ticket, answer))
            .await
            .unwrap_or(false)
    }

    /// What a ticket holds; none if there is no such ticket (any more).
    pub async fn held(&self, ticket: TicketId) -> Option<HeldInfo> {
        self.ask(|answer| Command::Held(ticket, answer)).await?
    }

    /// Tells a node that waits for this prefill that there will be none.
    pub fn kv_abandon(&self, id: TransferId) {
        // A full channel means a node that waits until its time is up.
        let _ = self.commands.try_send(Command::Abandon(id));
    }

    /// Hands over what came from another node. Waits while the engine has too much to do; false once it
    /// has stopped. For threads that may wait, as are the next ones.
    pub fn kv_inbound(&self, inbound: Inbound) -> bool {
        self.commands
            .send(Command::Inbound(Box::new(inbound)))
            .is_ok()
    }

    /// Asks for blocks on behalf of another node; the answer comes over `answer`, by the time the request
    /// names. False once the engine has stopped.
    pub fn kv_attach(&self, request: AttachRequest, answer: Answer) -> bool {
        let sent = self.receivers.send((request, answer)).is_ok();
        self.wake();
        sent
    }

    /// Another node has all blocks of a transfer.
    pub fn kv_received(&self, id: TransferId) {
        // Once the engine has stopped there is nothing to let go.
        let _ = self.commands.send(Command::Received(id));
    }

    /// The connection to another node is gone.
    pub fn kv_lost(&self, id: TransferId, sender: Arc<Sender>) {
        let _ = self.commands.send(Command::Lost(id, sender));
    }

    /// Has the engine look for what it can do. Never waits.
    pub fn wake(&self) {
        // A full channel means that it is awake.
        let _ = self.commands.try_send(Command::Wake);
    }

    /// Sends a command and waits for its answer; none if the engine has stopped. Unlike a request
    /// this may wait for room in the channel: it is rare, and comes from a task of its own.
    async fn ask<T: Send + 'static>(
        &self,
        command: impl FnOnce(oneshot::Sender<T>) -> Command,
    ) -> Option<T> {
        let (answer, receiver) = oneshot::channel();
        let (commands, command) = (self.commands.clone(), command(answer));
        let sent = tokio::task::spawn_blocking(move || commands.send(command));
        sent.await.ok()?.ok()?;
        receiver.await.ok()
    }

    /// Requests of this salt that may wait.
    pub fn queue_max(&self, salt: Option<&str>) -> usize {
        self.shared.queue.places(salt)
    }

    /// Refuses new requests from now on.
    pub fn drain(&self) {
        self.shared.draining.store(true, Ordering::Release);
    }

    /// Whether requests are refused because the node goes away.
    pub fn is_draining(&self) -> bool {
        self.shared.draining.load(Ordering::Acquire)
    }

    /// Whether the engine's thread has ended.
    pub fn has_ended(&self) -> bool {
        self.shared.ended.get().is_some()
    }

    /// Waits until no request is held by anybody.
    pub async fn idle(&self) {
        let mut active = self.shared.active.subscribe();
        // The sender lives in `shared`, which this handle holds, so the wait ends only at zero.
        let _ = active.wait_for(|active| *active == 0).await;
    }

    /// Ends the engine's thread after its current step.
    pub fn stop(&self) {
        let commands = self.commands.clone();
        // The channel may be full; the engine empties it every step, so this does not wait long.
        let _ = commands.send(Command::Stop);
    }

    /// How busy the queue is; `Load::retry_after_s` is what a refused client should be told.
    pub fn load(&self) -> Load {
        self.shared.queue.load()
    }

    /// Refuses a prompt that no pool state could ever hold, and bounds the answer by what is left:
    /// the engine relies on every sequence fitting alone.
    fn bound(&self, job: &mut Job) -> Result<(), ApiError> {
        let most = self.shared.tokens_max;
        let room = most.saturating_sub(job.prompt.len());
        if job.prompt.is_empty() || room == 0 {
            let message = format!(
                "The prompt has {} tokens; this node's KV pool holds {most}, of which the answer \
                 needs some.",
                job.prompt.len()
            );
            let error = ApiError::new(Kind::Invalid, "context_length_exceeded", message);
            return Err(error.with_param("prompt"));
        }
        job.output_max = job.output_max.clamp(1, room);
        Ok(())
    }
}

impl Shared {
    /// Notes that a request joined the batch.
    pub(super) fn joined(&self) {
        self.queue.joined(Instant::now());
    }
}

fn draining() -> ApiError {
    let message = "This node is shutting down and takes no new requests.";
    ApiError::new(Kind::Overloaded, "node_draining", message)
}

fn ended() -> ApiError {
    ApiError::internal("the engine's thread has ended")
}
