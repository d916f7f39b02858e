//! How does a late joiner, or one that missed something, catch up?
//!
//! It asks a ROUTER socket with `[empty, start_seq]` and gets `[empty, topic, seq, payload]` for
//! each batch from there on, then `[empty, "", -1, ""]` (vLLM's form since 0.26). Where the log no
//! longer reaches back to `start_seq`, the answer opens with a snapshot (everything is cleared,
//! then everything held is stored) that carries the number of the last batch it includes.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::Semaphore;
use zeromq::{RouterSocket, SocketRecv, SocketSend, ZmqError, ZmqMessage};

use super::{EventLog, Numbered};
use crate::engine::Handle;

/// Replays that run at once; more wait. A replay costs a snapshot on the engine's thread.
const REPLAYS_MAX: usize = 8;
/// A joiner that reads nothing for this long is given up on, so that it does not hold a place.
const SEND_TIMEOUT: Duration = Duration::from_secs(10);
/// Batches taken from the log at once.
const BATCHES_AT_ONCE: usize = 256;

/// What a replay needs to know.
pub struct Replay {
    /// The batches.
    pub log: Arc<EventLog>,
    /// Asked for snapshots.
    pub engine: Handle,
    /// The topic of the live stream.
    pub topic: Bytes,
}

/// Answers replay requests until the task is dropped.
pub async fn run(socket: RouterSocket, replay: Replay) -> ZmqError {
    let (sender, mut receiver) = socket.split();
    let replay = Arc::new(replay);
    let places = Arc::new(Semaphore::new(REPLAYS_MAX));
    loop {
        let request = match receiver.recv().await {
            Ok(request) => request.into_vec(),
            Err(error) => return error,
        };
        let Some((peer, start)) = parse(&request) else {
            tracing::warn!(frames = request.len(), "ignored a malformed replay request");
            continue;
        };
        let Ok(place) = Arc::clone(&places).acquire_owned().await else {
            return ZmqError::NoMessage;
        };
        let (replay, sender) = (Arc::clone(&replay), sender.clone());
        tokio::spawn(async move {
            let mut peer = Peer {
                identity: peer,
                sender,
            };
            if let Err(error) = answer(&replay, &mut peer, start).await {
                tracing::warn!(start, %error, "a replay ended early");
            }
            drop(place);
        });
    }
}

/// `[identity, empty, start_seq]`, and the same without the empty frame.
fn parse(frames: &[Bytes]) -> Option<(Bytes, u64)> {
    let (identity, rest) = frames.split_first()?;
    let start = match rest {
        [empty, start] if empty.is_empty() => start,
        [start] => start,
        _ => return None,
    };
    let start = <[u8; 8]>::try_from(&start[..]).ok()?;
    Some((identity.clone(), u64::from_be_bytes(start)))
}

#[derive(Debug, thiserror::Error)]
enum ReplayError {
    #[error("the joiner is gone: {0}")]
    Socket(#[from] ZmqError),
    #[error("the joiner reads nothing")]
    Slow,
    #[error("the engine has stopped")]
    Stopped,
}

async fn answer(replay: &Replay, peer: &mut Peer, start: u64) -> Result<(), ReplayError> {
    let mut next = start;
    loop {
        if !replay.log.reaches(next) {
            let snapshot = replay.engine.snapshot().await.ok_or(ReplayError::Stopped)?;
            let Some(snapshot) = snapshot else { break };
            next = snapshot.seq + 1;
            peer.send(&replay.topic, &snapshot).await?;
        }
        let batches = replay.log.from(next, BATCHES_AT_ONCE);
        let Some(last) = batches.last() else { break };
        // The log may have moved on since it was asked: then start over from a snapshot.
        if batches.first().is_some_and(|first| first.seq != next) {
            continue;
        }
        next = last.seq + 1;
        for batch in &batches {
            peer.send(&replay.topic, batch).await?;
        }
    }
    peer.end().await
}

struct Peer {
    identity: Bytes,
    sender: zeromq::RouterSendHalf,
}

impl Peer {
    async fn send(&mut self, topic: &Bytes, batch: &Numbered) -> Result<(), ReplayError> {
        let seq = Bytes::copy_from_slice(&batch.seq.to_be_bytes());
        self.frames([topic.clone(), seq, batch.payload.clone()])
            .await
    }

    async fn end(&mut self) -> Result<(), ReplayError> {
        let seq = Bytes::copy_from_slice(&(-1_i64).to_be_bytes());
        self.frames([Bytes::new(), seq, Bytes::new()]).await
    }

    async fn frames(&mut self, frames: [Bytes; 3]) -> Result<(), ReplayError> {
        let mut message = ZmqMessage::from(self.identity.clone());
        message.push_back(Bytes::new());
        frames
            .into_iter()
            .for_each(|frame| message.push_back(frame));
        let sent = tokio::time::timeout(SEND_TIMEOUT, self.sender.send(message)).await;
        sent.map_err(|_elapsed| ReplayError::Slow)?
            .map_err(ReplayError::Socket)
    }
}
