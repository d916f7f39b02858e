//! What does a node hold, by its own account?
//!
//! One task a node: subscribe to its KV events, let [`Tracker`] say what each message means, and
//! carry that out on the model's index. A message that was missed is asked for again at the
//! node's replay endpoint while live ones go on arriving. When the connection breaks, or the health
//! loop sees another process at the address, everything known of the node is forgotten and asked
//! for from the beginning.
//!
//! Left out on purpose: endpoints to which the engine connects (vLLM without `*`): the node's
//! events must be reachable at a stated address.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use cache_index::event::{EventBatch, KvEvent};
use cache_index::index::{Applied, Index};
use cache_index::trust::{Replay, Step, Tracker};
use cache_index::wire::decode_batch;
use futures_util::{FutureExt, StreamExt};
use tokio::sync::mpsc;
use zeromq::{Socket, SocketEvent, SocketRecv, SubSocket, ZmqMessage};

use super::Fleet;
use super::node::Node;
use super::replay::{self, Reply};
use crate::tasks::{Phase, Tasks};

/// Longest wait for a connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);
/// Between two attempts to connect.
const RECONNECT_EVERY: Duration = Duration::from_millis(200);

/// A replay so long after the one before has nothing to do with it.
const CALM: Duration = Duration::from_secs(10);
/// How long the second of two such replays waits, and how long any at most: a snapshot of a large pool
/// takes its node about a second.
const REPLAY_WAIT_MIN: Duration = Duration::from_millis(100);
const REPLAY_WAIT_MAX: Duration = Duration::from_secs(10);

/// Follows one node's events until the process stops.
pub(super) async fn follow(fleet: Arc<Fleet>, node: Arc<Node>, tasks: Tasks) {
    let drain = tasks.drain();
    let Some(events) = node.events.clone() else {
        // Nothing to follow; but what was sent to a process that is gone is gone with it.
        loop {
            tokio::select! {
                () = node.lost.notified() => fleet.forget(&node),
                () = drain.reached(Phase::Stopping) => return,
            }
        }
    };
    let mut model = node.model.subscribe();
    loop {
        let Some(name) = model.borrow_and_update().clone() else {
            tokio::select! {
                changed = model.changed() => if changed.is_err() { return },
                () = drain.reached(Phase::Stopping) => return,
            }
            continue;
        };
        let index = fleet.index(&name);
        // Said of the connection before, if it was said: this one begins from nothing.
        let _ = node.lost.notified().now_or_never();
        let mut follower =
            Follower::new(Arc::clone(&fleet), Arc::clone(&node), index, tasks.clone());
        let why = tokio::select! {
            why = follower.connection(&events) => why,
            () = node.lost.notified() => "the node is gone or was restarted",
            _ = model.changed() => "the node serves another model",
            () = drain.reached(Phase::Stopping) => return,
        };
        tracing::info!(node = %node.id, why, "KV events ended");
        follower.lost();
        tokio::select! {
            () = tokio::time::sleep(RECONNECT_EVERY) => {}
            () = drain.reached(Phase::Stopping) => return,
        }
    }
}

struct Follower {
    fleet: Arc<Fleet>,
    node: Arc<Node>,
    index: Arc<Index>,
    tasks: Tasks,
    tracker: Tracker,
    /// Replies of the replay that runs; dropping it abandons the replay.
    replies: Option<mpsc::Receiver<Reply>>,
    pace: Pace,
}

/// How soon a node may be asked again for what was missed: each replay within [`CALM`] of the one before
/// waits twice as long. A node that leaves a hole in everything that it sends would else be asked all the
/// time.
#[derive(Debug, Default)]
struct Pace {
    next: Option<Instant>,
    wait: Duration,
}

impl Pace {
    /// How long the next replay waits.
    fn next(&mut self, now: Instant) -> Duration {
        let is_again = self.next.is_some_and(|next| now < next + CALM);
        self.wait = match is_again {
            true => (self.wait * 2).clamp(REPLAY_WAIT_MIN, REPLAY_WAIT_MAX),
            false => Duration::ZERO,
        };
        self.next = Some(now + self.wait);
        self.wait
    }
}

impl Follower {
    fn new(fleet: Arc<Fleet>, node: Arc<Node>, index: Arc<Index>, tasks: Tasks) -> Self {
        let replay = if node.replay.is_some() {
            Replay::Available
        } else {
            Replay::Absent
        };
        Self {
            fleet,
            node,
            index,
            tasks,
            tracker: Tracker::new(replay),
            replies: None,
            pace: Pace::default(),
        }
    }

    /// One connection from its beginning to its end; returns why it ended.
    async fn connection(&mut self, endpoint: &str) -> &'static str {
        let mut socket = SubSocket::new();
        let mut monitor = socket.monitor();
        // The socket would connect again by itself, unseen: each connection gets its own socket.
        let connect = async {
            socket.subscribe("").await?;
            socket.connect(endpoint).await
        };
        match tokio::time::timeout(CONNECT_TIMEOUT, connect).await {
            Ok(Ok(())) => {}
            Ok(Err(_)) => return "the events endpoint cannot be used",
            Err(_) => return "no connection to the events endpoint",
        }
        let steps = self.tracker.on_connected();
        self.carry_out(steps);
        loop {
            tokio::select! {
                message = socket.recv() => match message {
                    Ok(message) => self.live(&message),
                    Err(_) => return "the events connection broke",
                },
                event = monitor.next() => {
                    if let Some(SocketEvent::Disconnected(_) | SocketEvent::Closed) | None = event {
                        return "the events connection ended";
                    }
                }
                reply = next(&mut self.replies) => self.replayed(reply),
            }
        }
    }

    fn live(&mut self, message: &ZmqMessage) {
        let frames: Vec<_> = message.iter().collect();
        let [_topic, seq, payload] = frames.as_slice() else {
            return;
        };
        let Ok(seq) = <[u8; 8]>::try_from(&seq[..]) else {
            return;
        };
        let seq = u64::from_be_bytes(seq);
        let steps = match decode_batch(payload) {
            Ok(batch) => self.tracker.on_live(seq, batch),
            Err(error) => {
                let before = self.node.refused.malformed.fetch_add(1, Ordering::Relaxed);
                // A flood of them is a figure and no flood of lines.
                if before.is_power_of_two() || before == 0 {
                    let so_far = before + 1;
                    tracing::warn!(node = %self.node.id, seq, so_far, %error, "KV events cannot be decoded");
                }
                self.tracker.on_undecodable(seq)
            }
        };
        self.carry_out(steps);
    }

    fn replayed(&mut self, reply: Option<Reply>) {
        let steps = match reply {
            Some(Reply::Batch(seq, batch)) => self.tracker.on_replayed(seq, *batch),
            Some(Reply::End) => {
                self.replies = None;
                self.tracker.on_replay_end()
            }
            Some(Reply::Failed(why)) => {
                tracing::warn!(node = %self.node.id, why, "replay of KV events failed");
                self.replies = None;
                self.tracker.on_replay_failed()
            }
            None => {
                self.replies = None;
                self.tracker.on_replay_failed()
            }
        };
        self.carry_out(steps);
    }

    fn lost(&mut self) {
        self.replies = None;
        let steps = self.tracker.on_lost();
        self.carry_out(steps);
        // Whatever the tracker remembers, a broken connection leaves nothing to believe.
        self.index.forget(&self.node.id);
        self.node.forget_salts();
    }

    fn carry_out(&mut self, steps: Vec<Step>) {
        for step in steps {
            match step {
                Step::Apply(batch) => self.apply(&batch),
                Step::Forget => {
                    self.node.resyncs.fetch_add(1, Ordering::Relaxed);
                    self.index.forget(&self.node.id);
                    self.fleet.forget(&self.node);
                }
                Step::Replay { from } => self.start_replay(from),
            }
        }
        let (before, now) = (self.node.trust(), self.tracker.trust());
        if before != now {
            tracing::info!(
                node = %self.node.id,
                trust = ?now,
                blocks = self.index.held(&self.node.id),
                "index of the node changed its trust"
            );
            self.node.set_trust(now);
        }
    }

    fn apply(&self, batch: &EventBatch) {
        for event in &batch.events {
            match event {
                KvEvent::Stored {
                    parent: None,
                    extra_keys,
                    ..
                } => self.node.saw_chain(!extra_keys.of(0).is_empty()),
                // What was on its way there is gone with the rest, if it had arrived.
                KvEvent::Cleared => self.fleet.forget(&self.node),
                _ => {}
            }
        }
        let applied = self.index.apply(&self.node.id, batch);
        self.node.event_batches.fetch_add(1, Ordering::Relaxed);
        self.count(&applied);
        tracing::trace!(node = %self.node.id, ?applied, "KV events applied");
    }

    /// Counts what brought no credit. The first of a kind is a line in the log; a flood is a metric.
    fn count(&self, applied: &Applied) {
        let node = &self.node.id;
        let refused = &self.node.refused;
        let is_first = |counter: &AtomicU64, more: usize| {
            more > 0 && counter.fetch_add(more as u64, Ordering::Relaxed) == 0
        };
        if is_first(&refused.malformed, applied.malformed) {
            tracing::warn!(%node, "KV events contradict themselves: their blocks get no credit");
        }
        if is_first(&refused.over_limit, applied.over_limit) {
            tracing::warn!(%node, "the index is full: some blocks of the node get no credit");
        }
        if is_first(&refused.orphans, applied.orphans) {
            tracing::info!(%node, "KV events build on blocks that are not known: these get no credit");
        }
        if is_first(&refused.uncreditable, applied.uncreditable) {
            tracing::info!(%node, "KV events are about prompts that are not ours: these get no credit");
        }
    }

    fn start_replay(&mut self, from: u64) {
        let Some(endpoint) = self.node.replay.clone() else {
            return;
        };
        let wait = self.pace.next(Instant::now());
        if wait.is_zero() {
            tracing::info!(node = %self.node.id, from, "replay of KV events begins");
        }
        let (sender, receiver) = mpsc::channel(replay::QUEUE_BATCHES);
        self.replies = Some(receiver);
        let replay = async move {
            tokio::select! {
                () = tokio::time::sleep(wait) => {}
                // Nobody waits for it any more.
                () = sender.closed() => return,
            }
            replay::run(endpoint, from, sender).await;
        };
        self.tasks.spawn("kv-replay", replay);
    }
}

/// The next reply of the replay that runs; never, where none runs.
async fn next(replies: &mut Option<mpsc::Receiver<Reply>>) -> Option<Reply> {
    match replies {
        Some(replies) => replies.recv().await,
        None => std::future::pending().await,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Would catch a node that is asked for a replay as often as it leaves holes, or one that has to wait
    /// for its first.
    #[test]
    fn replays_in_a_row_wait_longer_and_longer() {
        let (mut pace, mut now) = (Pace::default(), Instant::now());
        let mut waits = Vec::new();
        for _ in 0..10 {
            let wait = pace.next(now);
            waits.push(wait.as_millis());
            now += wait;
        }
        assert_eq!(waits[..4], [0, 100, 200, 400]);
        assert_eq!(waits[9], 10_000);
        assert_eq!(pace.next(now + 2 * CALM), Duration::ZERO);
    }
}
