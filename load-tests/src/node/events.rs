//! How does a node tell what it holds?
//!
//! As our engine and vLLM do: numbered batches on a PUB socket, and a ROUTER socket from which a
//! joiner gets those that it missed. The last [`BATCHES_MAX`] are kept; who asks for older ones
//! gets a snapshot first (everything cleared, then everything held). Batches can be made to get
//! lost on the way, as a full queue loses them.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use cache_index::event::{EventBatch, KvEvent};
use cache_index::wire::encode_batch;
use zeromq::{PubSocket, RouterSocket, Socket, SocketRecv, SocketSend, ZmqError, ZmqMessage};

use super::blocks::{Blocks, TIERS};
use super::changes::stored;
use super::life::Life;
use crate::error::LoadError;

/// Batches kept for replay: vLLM's number.
const BATCHES_MAX: usize = 10_000;
/// Batches taken at once, while the node's lock is held.
const BATCHES_AT_ONCE: usize = 64;
/// A port whose last user has just gone may take a moment to be free.
const BIND_TRIES: u32 = 100;
const BIND_PAUSE: Duration = Duration::from_millis(20);

/// What one life of a node has said.
pub(super) struct Log {
    boot_id: String,
    batches: VecDeque<Numbered>,
    next: u64,
    /// So many batches are numbered and kept, and not sent.
    lose: u64,
}

/// A batch with its number.
#[derive(Clone)]
struct Numbered {
    seq: u64,
    payload: Bytes,
    is_lost: bool,
}

impl Log {
    pub(super) fn new(boot_id: String) -> Self {
        Self {
            boot_id,
            batches: VecDeque::new(),
            next: 0,
            lose: 0,
        }
    }

    /// The next batch.
    pub(super) fn append(&mut self, events: Vec<KvEvent>) {
        self.push(EventBatch {
            timestamp: now_s(),
            events,
            dp_rank: None,
            boot_id: Some(self.boot_id.clone()),
        });
    }

    /// The next batch says that everything is cleared and what is held all the same.
    pub(super) fn append_snapshot(&mut self, blocks: &Blocks) {
        let batch = self.everything(blocks);
        self.push(batch);
    }

    fn push(&mut self, batch: EventBatch) {
        let payload = encode_batch(&batch).into();
        let is_lost = self.lose > 0;
        self.lose = self.lose.saturating_sub(1);
        if self.batches.len() == BATCHES_MAX {
            self.batches.pop_front();
        }
        self.batches.push_back(Numbered {
            seq: self.next,
            payload,
            is_lost,
        });
        self.next += 1;
    }

    /// The next `count` batches get lost on their way.
    pub(super) fn lose(&mut self, count: u64) {
        self.lose = count;
    }

    /// Batches so far.
    pub(super) fn count(&self) -> u64 {
        self.next
    }

    fn from(&self, seq: u64) -> Vec<Numbered> {
        let begin = self.batches.partition_point(|batch| batch.seq < seq);
        let rest = self.batches.iter().skip(begin);
        rest.take(BATCHES_AT_ONCE).cloned().collect()
    }

    /// Whether every batch from there on is kept.
    fn reaches(&self, seq: u64) -> bool {
        self.batches.front().map_or(self.next, |batch| batch.seq) <= seq
    }

    fn snapshot(&self, blocks: &Blocks) -> Numbered {
        Numbered {
            seq: self.next.saturating_sub(1),
            payload: encode_batch(&self.everything(blocks)).into(),
            is_lost: false,
        }
    }

    fn everything(&self, blocks: &Blocks) -> EventBatch {
        let told = |tier| {
            let held = blocks.cached(tier).into_iter();
            held.map(move |block| stored(tier, &[block]))
        };
        let held = TIERS.into_iter().flat_map(told);
        EventBatch::snapshot(now_s(), &self.boot_id, held.collect())
    }
}

fn now_s() -> f64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.unwrap_or_default().as_secs_f64()
}

/// Takes the port of the live stream.
pub(super) async fn bind_live(address: SocketAddr) -> Result<(PubSocket, SocketAddr), LoadError> {
    let mut socket = PubSocket::new();
    let address = bind(&mut socket, address).await?;
    Ok((socket, address))
}

/// Takes the port of the replay.
pub(super) async fn bind_replay(
    address: SocketAddr,
) -> Result<(RouterSocket, SocketAddr), LoadError> {
    let mut socket = RouterSocket::new();
    let address = bind(&mut socket, address).await?;
    Ok((socket, address))
}

async fn bind(socket: &mut impl Socket, address: SocketAddr) -> Result<SocketAddr, LoadError> {
    let endpoint = format!("tcp://{address}");
    let mut tries = 0;
    loop {
        match socket.bind(&endpoint).await {
            Ok(bound) => {
                let bound = bound.to_string();
                let parsed = bound.strip_prefix("tcp://").and_then(|a| a.parse().ok());
                return parsed.ok_or_else(|| LoadError::program("the events socket", bound));
            }
            Err(_) if tries < BIND_TRIES => {
                tries += 1;
                tokio::time::sleep(BIND_PAUSE).await;
            }
            Err(error) => return Err(LoadError::program(endpoint, error.to_string())),
        }
    }
}

/// Publishes until dropped; returns why it could not.
pub(super) async fn publish(mut socket: PubSocket, node: Arc<Life>, topic: Bytes) -> LoadError {
    let mut next = 0;
    loop {
        let appended = node.appended.notified();
        let batches = node.lock().log.from(next);
        if batches.is_empty() {
            appended.await;
            continue;
        }
        for batch in batches {
            next = batch.seq + 1;
            if batch.is_lost {
                continue;
            }
            if let Err(error) = socket.send(framed(&topic, &batch)).await {
                return LoadError::program("KV events", error.to_string());
            }
        }
    }
}

fn framed(topic: &Bytes, batch: &Numbered) -> ZmqMessage {
    let mut message = ZmqMessage::from(topic.clone());
    message.push_back(Bytes::copy_from_slice(&batch.seq.to_be_bytes()));
    message.push_back(batch.payload.clone());
    message
}

/// Answers who missed something, one after another, until dropped; returns why it could not.
pub(super) async fn replay(mut socket: RouterSocket, node: Arc<Life>, topic: Bytes) -> LoadError {
    loop {
        let request = match socket.recv().await {
            Ok(request) => request,
            Err(error) => return LoadError::program("a replay", error.to_string()),
        };
        let frames = request.into_vec();
        let (Some(peer), Some(start)) = (frames.first(), frames.last()) else {
            continue;
        };
        let Ok(start) = <[u8; 8]>::try_from(&start[..]) else {
            continue;
        };
        // A joiner that went away is not this node's trouble.
        let _ = catch_up(
            &mut socket,
            &node,
            (peer, &topic),
            u64::from_be_bytes(start),
        )
        .await;
    }
}

async fn catch_up(
    socket: &mut RouterSocket,
    node: &Life,
    (peer, topic): (&Bytes, &Bytes),
    start: u64,
) -> Result<(), ZmqError> {
    let mut next = start;
    loop {
        let batches = {
            let state = node.lock();
            if state.log.reaches(next) {
                state.log.from(next)
            } else {
                vec![state.log.snapshot(&state.blocks)]
            }
        };
        let Some(last) = batches.last() else { break };
        next = last.seq + 1;
        for batch in &batches {
            send(socket, peer, framed(topic, batch)).await?;
        }
    }
    let mut end = ZmqMessage::from(Bytes::new());
    end.push_back(Bytes::copy_from_slice(&(-1_i64).to_be_bytes()));
    end.push_back(Bytes::new());
    send(socket, peer, end).await
}

async fn send(socket: &mut RouterSocket, peer: &Bytes, frames: ZmqMessage) -> Result<(), ZmqError> {
    let mut message = ZmqMessage::from(peer.clone());
    message.push_back(Bytes::new());
    frames
        .into_vec()
        .into_iter()
        .for_each(|frame| message.push_back(frame));
    socket.send(message).await
}
