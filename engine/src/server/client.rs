//! Is the client still there?
//!
//! A closed connection and a half-closed one (the client has said all it will say, and reads on)
//! look the same to a reader: end of file. Only writing tells them apart: a host whose process is
//! gone answers with a reset. So when end of file comes while an answer is being computed, a
//! harmless probe is written: `100 Continue` before the head of the answer, an event-stream comment
//! within a stream. If a reset comes back the client is gone, and its request is cancelled within
//! a round trip; otherwise it gets its answer.
//!
//! hyper is told to allow half-closed clients and so never looks at the socket while it waits for
//! us; watching it is this file's part. The socket is shared between both, for that reason.

use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, Interest, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::Sleep;

/// A client's connection, shared by hyper and by whoever watches for its end.
#[derive(Debug)]
pub(super) struct Client {
    stream: TcpStream,
    /// Set while a write is only partly done: a probe now would land inside an answer.
    writing: AtomicBool,
    /// Set when an answer was sent without reading the whole request.
    unread: AtomicBool,
    /// Bytes read since the last request was handed to the service.
    read_bytes: AtomicU64,
}

/// How a connection ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Closed {
    /// The client sends no more, and may be gone or may be reading.
    Half,
    /// The connection was reset: nobody reads.
    Gone,
}

/// Written before the head of an answer to see whether anybody reads. Clients skip it.
const PROBE: &[u8] = b"HTTP/1.1 100 Continue\r\n\r\n";

/// What is read and thrown away after an early refusal at most, so that the client reads the
/// refusal and not a reset.
const LINGER_BYTES_MAX: usize = 64 << 20;
const LINGER: Duration = Duration::from_secs(2);
/// A client that reads nothing of its answer for this long is given up on. Its request has long
/// run to its end by then (the engine never waits for a reader); this frees the connection.
const WRITE_STALL: Duration = Duration::from_secs(120);

impl Client {
    /// Takes over an accepted connection.
    pub(super) fn new(stream: TcpStream) -> Self {
        Self {
            stream,
            writing: AtomicBool::new(false),
            unread: AtomicBool::new(false),
            read_bytes: AtomicU64::new(0),
        }
    }

    /// The client's address, where it is still known.
    pub(super) fn address(&self) -> Option<SocketAddr> {
        self.stream.peer_addr().ok()
    }

    /// Notes that a request's head was read whole.
    pub(super) fn head_done(&self) {
        self.read_bytes.store(0, Ordering::Relaxed);
    }

    /// Whether part of a request's head has come.
    pub(super) fn in_head(&self) -> bool {
        self.read_bytes.load(Ordering::Relaxed) > 0
    }

    /// Notes that the answer goes out before the request was read whole.
    pub(super) fn leave_unread(&self) {
        self.unread.store(true, Ordering::Relaxed);
    }

    /// Waits until the client sends no more, or is gone.
    pub(super) async fn closed(&self) -> Closed {
        let mut byte = [0];
        match self.stream.peek(&mut byte).await {
            Ok(0) => Closed::Half,
            // A pipelined request hides the end of file behind it; a reset still shows.
            Ok(_) => self.gone().await,
            Err(_) => Closed::Gone,
        }
    }

    /// Waits until the connection is reset.
    pub(super) async fn gone(&self) -> Closed {
        // An error here means that the runtime shuts down: nobody will be served either.
        let _ = self.stream.ready(Interest::ERROR).await;
        Closed::Gone
    }

    /// Waits until the client is known to be gone, probing before the head of an answer.
    pub(super) async fn gone_before_head(&self, understands_probe: bool) {
        if self.closed().await == Closed::Half {
            if understands_probe && !self.writing.load(Ordering::Acquire) {
                let _ = self.stream.try_write(PROBE);
            }
            self.gone().await;
        }
    }

    /// Writes a whole small answer, past hyper; for connections that hyper gave up.
    pub(super) async fn write_last(&self, bytes: &[u8]) {
        let ready = tokio::time::timeout(LINGER, self.stream.writable()).await;
        if matches!(ready, Ok(Ok(()))) {
            let _ = self.stream.try_write(bytes);
        }
    }

    /// Closes the connection; after an early refusal not before the client had time to read it.
    pub(super) async fn close(self) {
        let Self {
            mut stream, unread, ..
        } = self;
        if !unread.into_inner() || stream.shutdown().await.is_err() {
            return;
        }
        let drain = async {
            let mut buffer = vec![0; 64 << 10];
            let mut left = LINGER_BYTES_MAX;
            while let Ok(count @ 1..) = stream.read(&mut buffer).await {
                left = left.saturating_sub(count);
                if left == 0 {
                    break;
                }
            }
        };
        let _ = tokio::time::timeout(LINGER, drain).await;
    }
}

/// hyper's side of the connection.
#[derive(Debug)]
pub(super) struct ClientIo {
    client: Arc<Client>,
    /// Runs while a write waits for the client to read.
    stall: Option<Pin<Box<Sleep>>>,
}

impl AsyncRead for ClientIo {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let client = &self.client;
        loop {
            ready!(client.stream.poll_read_ready(context))?;
            match client.stream.try_read(buffer.initialize_unfilled()) {
                Ok(count) => {
                    buffer.advance(count);
                    client.read_bytes.fetch_add(count as u64, Ordering::Relaxed);
                    return Poll::Ready(Ok(()));
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Poll::Ready(Err(error)),
            }
        }
    }
}

impl ClientIo {
    pub(super) fn new(client: Arc<Client>) -> Self {
        Self {
            client,
            stall: None,
        }
    }

    fn poll_with(
        &mut self,
        context: &mut Context<'_>,
        total: usize,
        write: impl Fn(&TcpStream) -> io::Result<usize>,
    ) -> Poll<io::Result<usize>> {
        let client = &self.client;
        client.writing.store(true, Ordering::Release);
        loop {
            if client.stream.poll_write_ready(context)?.is_pending() {
                let sleep = || Box::pin(tokio::time::sleep(WRITE_STALL));
                let stall = self.stall.get_or_insert_with(sleep);
                ready!(stall.as_mut().poll(context));
                return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
            }
            match write(&client.stream) {
                Ok(count) => {
                    client.writing.store(count < total, Ordering::Release);
                    self.stall = None;
                    return Poll::Ready(Ok(count));
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Poll::Ready(Err(error)),
            }
        }
    }
}

impl AsyncWrite for ClientIo {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.poll_with(context, bytes.len(), |stream| stream.try_write(bytes))
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let total = parts.iter().map(|part| part.len()).sum();
        self.poll_with(context, total, |stream| stream.try_write_vectored(parts))
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, _context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _context: &mut Context<'_>) -> Poll<io::Result<()>> {
        // The connection closes when the last share of it is dropped, see `Client::close`.
        Poll::Ready(Ok(()))
    }
}
