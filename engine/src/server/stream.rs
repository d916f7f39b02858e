//! How does an answer travel token by token?
//!
//! A body that hyper polls: each poll takes what the engine has said since the last one, as
//! server-sent events, and hyper flushes before it waits, so nothing is held back. While it waits
//! for the engine it also watches the client: dropping the body (hyper does so when a write fails)
//! or a reset cancels the request, all choices of it.
//!
//! States: opening (nothing sent), running, ended (terminator or error sent), gone.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use hyper::body::{Body, Frame};

use super::choices::Choices;
use super::client::{Client, Closed};
use super::message::{Delta, Reader};
use super::shape::{ChunkUsage, Offset, Shape};
use crate::engine::{Output, Usage};
use crate::error::ApiError;
use crate::request::UsageChunks;
use crate::request::prepare::Reading;

/// A comment, which every client skips: sent to see whether anybody reads.
const PROBE: &[u8] = b": still there?\n\n";
const TERMINATOR: &[u8] = b"data: [DONE]\n\n";

type Watch = Pin<Box<dyn Future<Output = Closed> + Send>>;

/// A streamed answer.
pub(super) struct StreamBody {
    shape: Shape,
    chunks: UsageChunks,
    usage: Usage,
    speakers: Vec<Speaker>,
    /// None once the answer has ended.
    choices: Option<Choices>,
    client: Arc<Client>,
    watch: Watch,
    ready: Vec<u8>,
}

/// What is known of one choice.
struct Speaker {
    reader: Reader,
    offset: Offset,
    output_tokens: usize,
}

/// The client hung up; hyper drops the connection.
#[derive(Debug, thiserror::Error)]
#[error("the client is gone")]
pub(super) struct ClientGone;

impl StreamBody {
    /// A stream whose first output is already known; the head of the answer waited for it.
    pub(super) fn new(opening: Opening<'_>, client: Arc<Client>) -> Self {
        let watched = Arc::clone(&client);
        let speaker = || Speaker {
            reader: Reader::new(opening.reading),
            offset: Offset::default(),
            output_tokens: 0,
        };
        let mut body = Self {
            shape: opening.shape,
            chunks: opening.chunks,
            usage: opening.usage,
            speakers: (0..opening.count).map(|_| speaker()).collect(),
            choices: Some(opening.choices),
            client,
            watch: Box::pin(async move { watched.closed().await }),
            ready: Vec::new(),
        };
        for choice in 0..opening.count {
            let usage = chunk_usage(body.chunks, &body.usage);
            body.shape.write_opening(&mut body.ready, choice, usage);
        }
        let (choice, first) = opening.first;
        body.take(choice, first);
        body
    }

    fn take(&mut self, choice: usize, output: Output) {
        match output {
            // The first choice's count is the request's: the others share what it computed.
            Output::Joined { .. } => {}
            Output::Text {
                text,
                tokens,
                output_tokens,
            } => {
                let delta = self.speakers[choice].reader.take(text, tokens);
                self.count(choice, output_tokens);
                if !delta.is_empty() {
                    self.delta(choice, &delta);
                }
            }
            Output::Done {
                text,
                tokens,
                ending,
                stop,
                usage,
                held: _,
            } => {
                let reader = &mut self.speakers[choice].reader;
                let delta = reader.end(text, tokens, (ending, stop));
                self.count(choice, usage.output_tokens);
                self.delta(choice, &delta);
                if self.choices.as_ref().is_none_or(Choices::are_over) {
                    self.end();
                }
            }
            Output::Embedding(..) => self.fail(&ApiError::internal("a vector for an answer")),
            Output::Failed(error) => self.fail(&error),
        }
    }

    fn count(&mut self, choice: usize, output_tokens: usize) {
        let counted = &mut self.speakers[choice].output_tokens;
        self.usage.output_tokens += output_tokens - *counted;
        *counted = output_tokens;
    }

    fn delta(&mut self, choice: usize, delta: &Delta) {
        let usage = chunk_usage(self.chunks, &self.usage);
        let offset = &mut self.speakers[choice].offset;
        self.shape
            .write_delta(&mut self.ready, (choice, delta), offset, usage);
    }

    fn end(&mut self) {
        if self.chunks != UsageChunks::None {
            self.shape.write_usage(&mut self.ready, &self.usage);
        }
        self.ready.extend_from_slice(TERMINATOR);
        self.choices = None;
    }

    /// An error within a stream: an event with the error, and no terminator, so that nobody takes
    /// the answer for complete. One choice that fails ends them all.
    fn fail(&mut self, error: &ApiError) {
        let event = format!("data: {}\n\n", error.body());
        self.ready.extend_from_slice(event.as_bytes());
        self.choices = None;
    }

    /// Takes everything the engine has said; registers for more.
    fn take_outputs(&mut self, context: &mut Context<'_>) {
        while let Some(choices) = &mut self.choices {
            match choices.poll_next(context) {
                Poll::Ready((choice, output)) => self.take(choice, output),
                Poll::Pending => return,
            }
        }
    }
}

/// What a chunk that is not the last says about usage.
fn chunk_usage(chunks: UsageChunks, usage: &Usage) -> ChunkUsage<'_> {
    match chunks {
        UsageChunks::None => ChunkUsage::Absent,
        UsageChunks::Last => ChunkUsage::Null,
        UsageChunks::Every => ChunkUsage::Is(usage),
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
        if self.ready.is_empty() && self.choices.is_some() {
            match self.watch.as_mut().poll(context) {
                Poll::Pending => return Poll::Pending,
                Poll::Ready(Closed::Half) => {
                    let client = Arc::clone(&self.client);
                    self.watch = Box::pin(async move { client.gone().await });
                    // hyper polls again once it has written this, and so comes to the new watch.
                    self.ready.extend_from_slice(PROBE);
                }
                Poll::Ready(Closed::Gone) => {
                    self.choices = None;
                    return Poll::Ready(Some(Err(ClientGone)));
                }
            }
        }
        if self.ready.is_empty() {
            return Poll::Ready(None);
        }
        let bytes = Bytes::from(std::mem::take(&mut self.ready));
        Poll::Ready(Some(Ok(Frame::data(bytes))))
    }

    fn is_end_stream(&self) -> bool {
        self.choices.is_none() && self.ready.is_empty()
    }
}

/// What a stream starts from.
pub(super) struct Opening<'a> {
    /// The answer's fixed parts.
    pub(super) shape: Shape,
    /// When to tell the usage.
    pub(super) chunks: UsageChunks,
    /// Prompt and cached tokens.
    pub(super) usage: Usage,
    /// How the text is read.
    pub(super) reading: &'a Reading,
    /// How many choices there are.
    pub(super) count: usize,
    /// The requests.
    pub(super) choices: Choices,
    /// The first output that the client may see.
    pub(super) first: (usize, Output),
}
