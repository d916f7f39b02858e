//! How do live batches reach subscribers?
//!
//! A task reads the log from where it was and hands each batch to a PUB socket, whose own queues
//! drop for a subscriber that does not read. A publisher that fell behind the log skips what is
//! gone; subscribers see the gap.

use std::sync::Arc;

use bytes::Bytes;
use zeromq::{PubSocket, SocketSend, ZmqError, ZmqMessage};

use super::EventLog;

/// Batches taken from the log at once; bounds what is copied while the log's lock is held.
const BATCHES_AT_ONCE: usize = 64;

/// Publishes the log until the task is dropped.
pub async fn run(mut socket: PubSocket, log: Arc<EventLog>, topic: Bytes) -> ZmqError {
    let mut next = 0;
    loop {
        let appended = log.appended.notified();
        let batches = log.from(next, BATCHES_AT_ONCE);
        if batches.is_empty() {
            appended.await;
            continue;
        }
        for batch in batches {
            next = batch.seq + 1;
            let mut message = ZmqMessage::from(topic.clone());
            message.push_back(Bytes::copy_from_slice(&batch.seq.to_be_bytes()));
            message.push_back(batch.payload);
            if let Err(error) = socket.send(message).await {
                return error;
            }
        }
    }
}
