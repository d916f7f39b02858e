//! How does an answer travel token by token?
//!
//! A body that hyper polls: each poll takes what the engine has said since the last one, as
//! server-sent events, and hyper flushes before it waits, so nothing is held back. While it waits
//! for the engine it also watches the client: dropping the body (hyper does so when a write fails)
//! or a reset cancels the request.
//!
//! States: opening (nothing sent), running, ended (terminator or error sent), gone.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::{Bytes, BytesMut};
use hyper::body::{Body, Frame};
use serde_json::Value;

use super::client::{Client, Closed};
use super::shape::Shape;
use crate::engine::{Output, Ticket, Usage};
use crate::error::ApiError;
use crate::request::UsageChunks;

/// A comment, which every client skips: sent to see whether anybody reads.
const PROBE: &[u8] = b": still there?\n\n";
const TERMINATOR: &[u8] = b"data: [DONE]\n\n";

type Watch = Pin<Box<dyn Future<Output = Closed> + Send>>;

/// A streamed answer.
pub(super) struct StreamBody {
    shape: Shape,
    chunks: UsageChunks,
    usage: Usage,
    /// None once the answer has ended.
    ticket: Option<Ticket>,
    client: Arc<Client>,
    watch: Watch,
    ready: BytesMut,
}

/// The client hung up; hyper drops the connection.
#[derive(Debug, thiserror::Error)]
#[error("the client is gone")]
pub(super) struct ClientGone;

impl StreamBody {
    /// A stream whose first output is already known; the head of the answer waited for it.
    pub(super) fn new(opening: Opening, client: Arc<Client>) -> Self {
        let Opening {
            shape,
            chunks,
            usage,
            ticket,
            first,
        } = opening;
        let watched = Arc::clone(&client);
        let mut body = Self {
            shape,
            chunks,
            usage,
            ticket: Some(ticket),
            client,
            watch: Box::pin(async move { watched.closed().await }),
            ready: BytesMut::new(),
        };
        if let Some(chunk) = body.shape.opening() {
            body.event(chunk);
        }
        body.take(first);
        body
    }

    fn take(&mut self, output: Output) {
        match output {
            Output::Joined { cached_tokens } => self.usage.cached_tokens = cached_tokens,
            Output::Text {
                text,
                output_tokens,
                ..
            } => {
                self.usage.output_tokens = output_tokens;
                if !text.is_empty() {
                    self.event(self.shape.text(&text, None));
                }
            }
            Output::Done {
                text,
                ending,
                usage,
                ..
            } => {
                self.usage = usage;
                self.event(self.shape.text(&text, Some(ending)));
                if self.chunks != UsageChunks::None {
                    self.line(&self.shape.usage(&usage));
                }
                self.ready.extend_from_slice(TERMINATOR);
                self.ticket = None;
            }
            Output::Embedding(..) => self.fail(&ApiError::internal("a vector nobody asked for")),
            Output::Failed(error) => self.fail(&error),
        }
    }

    /// An error within a stream: an event with the error, and no terminator, so that nobody takes
    /// the answer for complete.
    fn fail(&mut self, error: &ApiError) {
        self.line(&error.body());
        self.ticket = None;
    }

    fn event(&mut self, chunk: Value) {
        let chunk = self.shape.with_usage(chunk, self.chunks, &self.usage);
        self.line(&chunk);
    }

    fn line(&mut self, value: &Value) {
        self.ready.extend_from_slice(b"data: ");
        self.ready.extend_from_slice(value.to_string().as_bytes());
        self.ready.extend_from_slice(b"\n\n");
    }

    /// Takes everything the engine has said; registers for more.
    fn take_outputs(&mut self, context: &mut Context<'_>) {
        while let Some(ticket) = &mut self.ticket {
            match ticket.poll_next(context) {
                Poll::Ready(Some(output)) => self.take(output),
                Poll::Ready(None) => self.fail(&ApiError::internal("the engine's thread ended")),
                Poll::Pending => return,
            }
        }
    }
}

impl Body for StreamBody {
    type Data = Bytes;
    type Error = ClientGone;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, ClientGone>>> {
        self.take_outputs(context);
        if self.ready.is_empty() && self.ticket.is_some() {
            match self.watch.as_mut().poll(context) {
                Poll::Pending => return Poll::Pending,
                Poll::Ready(Closed::Half) => {
                    let client = Arc::clone(&self.client);
                    self.watch = Box::pin(async move { client.gone().await });
                    // hyper polls again once it has written this, and so comes to the new watch.
                    self.ready.extend_from_slice(PROBE);
                }
                Poll::Ready(Closed::Gone) => {
                    self.ticket = None;
                    return Poll::Ready(Some(Err(ClientGone)));
                }
            }
        }
        if self.ready.is_empty() {
            return Poll::Ready(None);
        }
        let bytes = self.ready.split().freeze();
        Poll::Ready(Some(Ok(Frame::data(bytes))))
    }

    fn is_end_stream(&self) -> bool {
        self.ticket.is_none() && self.ready.is_empty()
    }
}

/// What a stream starts from.
pub(super) struct Opening {
    /// The answer's fixed parts.
    pub(super) shape: Shape,
    /// When to tell the usage.
    pub(super) chunks: UsageChunks,
    /// Prompt and cached tokens, as far as known.
    pub(super) usage: Usage,
    /// The request.
    pub(super) ticket: Ticket,
    /// The first output that the client may see.
    pub(super) first: Output,
}
