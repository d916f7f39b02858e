//! How are missed KV events asked for again?
//!
//! A DEALER socket sends `[empty, start]`; replies are `[empty, topic, seq, payload]` (vLLM before
//! 0.26: without the topic) until one numbered −1. One socket for one replay: an abandoned one
//! takes its late replies with it.

use std::time::Duration;

use bytes::Bytes;
use cache_index::event::EventBatch;
use cache_index::wire::decode_batch;
use tokio::sync::mpsc;
use zeromq::{DealerSocket, Socket, SocketRecv, SocketSend, ZmqMessage};

/// Batches that wait to be applied; a full queue holds the node back, not memory.
pub(super) const QUEUE_BATCHES: usize = 64;

/// Longest silence of a node that is asked. A snapshot of a large pool takes it about a second.
const REPLY_TIMEOUT: Duration = Duration::from_secs(10);

/// The number of the end marker.
const END: u64 = u64::MAX;

/// What a replay brings.
pub(super) enum Reply {
    /// A numbered batch.
    Batch(u64, Box<EventBatch>),
    /// That was all.
    End,
    /// There will be no more.
    Failed(&'static str),
}

/// Runs one replay; ends early when nobody takes its replies any more.
pub(super) async fn run(endpoint: String, from: u64, replies: mpsc::Sender<Reply>) {
    let mut socket = DealerSocket::new();
    let ask = async {
        socket.connect(&endpoint).await?;
        let mut request = ZmqMessage::from(Bytes::new());
        request.push_back(Bytes::copy_from_slice(&from.to_be_bytes()));
        socket.send(request).await
    };
    let last = match tokio::time::timeout(REPLY_TIMEOUT, ask).await {
        Ok(Ok(())) => forward(&mut socket, &replies).await,
        Ok(Err(_)) => Reply::Failed("the replay endpoint cannot be used"),
        Err(_) => Reply::Failed("no connection to the replay endpoint"),
    };
    // A receiver that is gone has abandoned this replay.
    let _ = replies.send(last).await;
}

async fn forward(socket: &mut DealerSocket, replies: &mpsc::Sender<Reply>) -> Reply {
    loop {
        let received = tokio::select! {
            received = tokio::time::timeout(REPLY_TIMEOUT, socket.recv()) => received,
            () = replies.closed() => return Reply::Failed("abandoned"),
        };
        let message = match received {
            Ok(Ok(message)) => message,
            Ok(Err(_)) => return Reply::Failed("the replay connection broke"),
            Err(_) => return Reply::Failed("the replay stopped half way"),
        };
        let reply = match read(&message) {
            Some((END, _)) => return Reply::End,
            Some((seq, payload)) => match decode_batch(&payload) {
                Ok(batch) => Reply::Batch(seq, Box::new(batch)),
                // A hole in the history: what follows may hang in the air.
                Err(_) => return Reply::Failed("a replayed batch cannot be decoded"),
            },
            None => return Reply::Failed("a reply has an unknown form"),
        };
        if replies.send(reply).await.is_err() {
            return Reply::Failed("abandoned");
        }
    }
}

fn read(message: &ZmqMessage) -> Option<(u64, Bytes)> {
    let frames: Vec<_> = message.iter().collect();
    let (seq, payload) = match frames.as_slice() {
        [_, _, seq, payload] | [_, seq, payload] => (seq, payload),
        _ => return None,
    };
    let seq = <[u8; 8]>::try_from(&seq[..]).ok()?;
    Some((u64::from_be_bytes(seq), Bytes::clone(payload)))
}
