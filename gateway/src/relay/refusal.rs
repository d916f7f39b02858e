//! What does a client read when the node says no?
//!
//! The node's status and words, with framing of our own: also when a stream was asked for, the
//! error is one JSON object with its length, in the client's dialect.
//! Nothing is billed for it.

use std::sync::Arc;

use bytes::Bytes;
use http::header::RETRY_AFTER;

use super::whole::{Body, read, stopping};
use super::{Answer, End, Flow};
use crate::fleet::Node;
use crate::ledger::Status;
use crate::respond;
use crate::route::Chosen;
use dialects::error::{ApiError, ErrorKind, reshape};
use policies::price::Usage;
use policies::retry::Outcome;

/// A node's no.
pub(crate) struct Refusal {
    status: u16,
    retry_after: Option<String>,
    body: Bytes,
    chosen: Chosen,
}

impl Refusal {
    /// Reads a refusal whole; the connection goes back to the pool.
    pub(crate) async fn read(flow: &mut Flow<'_>, mut answer: Answer) -> Result<Self, End> {
        let status = answer.exchange.status();
        let retry_after = answer.exchange.header("retry-after").map(str::to_owned);
        match read(flow, &mut answer).await {
            Body::Whole(body) => {
                let Answer {
                    exchange,
                    chosen,
                    load,
                    heard: _,
                    prefilled: _,
                } = answer;
                drop(load);
                flow.gateway.upstream.release(exchange).await;
                Ok(Self {
                    status,
                    retry_after,
                    body,
                    chosen,
                })
            }
            Body::Broken(outcome, cause) => Err(End::Retry(outcome, cause)),
            Body::ClientGone => {
                flow.settle_quietly(Status::Cancelled, Usage::default());
                Err(End::ClientGone)
            }
            Body::Stopping => Err(End::Refused(stopping())),
        }
    }

    /// What it means for the retry policy.
    pub(crate) fn outcome(&self) -> Outcome {
        Outcome::Status(self.status)
    }

    /// The node that said it.
    pub(crate) fn node(&self) -> &Arc<Node> {
        &self.chosen.node
    }

    /// For the log.
    pub(crate) fn cause(&self) -> String {
        let excerpt: String = String::from_utf8_lossy(&self.body)
            .chars()
            .take(200)
            .collect();
        format!(
            "node {} answered {}: {excerpt}",
            self.chosen.node.id, self.status
        )
    }

    /// Tells the client. The node's opinion of our token or of the model is ours to mend, and
    /// would read as if the client's own key were wrong.
    pub(crate) async fn answer(self, flow: &mut Flow<'_>) -> End {
        if matches!(self.status, 401 | 403 | 404) {
            let message = "The node refused the gateway's request. The operator has to look at it.";
            return End::Refused(
                ApiError::new(ErrorKind::NodeFailed, message).because(self.cause()),
            );
        }
        let cause = self.cause();
        flow.settle_quietly(Status::Failed, Usage::default());
        flow.ctx.status = self.status;
        flow.ctx.line.cause = Some(cause);
        match self.write(flow).await {
            Ok(()) => End::Answered,
            Err(_) => End::ClientGone,
        }
    }

    async fn write(self, flow: &mut Flow<'_>) -> pingora::Result<()> {
        let body: Bytes = reshape(flow.ctx.shape, self.status, &self.body).into();
        let mut head = respond::head(flow.ctx, self.status, "application/json", Some(body.len()))?;
        flow.explain(&mut head, &self.chosen)?;
        if let Some(retry_after) = self.retry_after {
            head.insert_header(RETRY_AFTER, retry_after)?;
        }
        respond::whole(flow.client, head, body).await
    }
}
