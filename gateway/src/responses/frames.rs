//! How do bytes of a WebSocket become messages, and messages bytes?
//!
//! The framing is tungstenite's; this gives it a stream that is two buffers, so that the bytes can
//! come and go through whatever carries the connection. Pings are answered within.

use std::io::{self, ErrorKind, Read, Write};

use bytes::{Buf, Bytes, BytesMut};
use tungstenite::Utf8Bytes;
use tungstenite::error::{CapacityError, Error};
use tungstenite::protocol::frame::coding::CloseCode;
use tungstenite::protocol::{CloseFrame, Message, Role, WebSocket, WebSocketConfig};

/// Taken from the buffer at once.
const READ_BYTES: usize = 16 << 10;

/// One connection's framing.
pub(super) struct Frames(WebSocket<Pipe>);

#[derive(Default)]
struct Pipe {
    incoming: BytesMut,
    outgoing: BytesMut,
}

/// What a client sent.
#[derive(Debug)]
pub(super) enum Sent {
    /// A text.
    Text(Utf8Bytes),
    /// Bytes, which mean nothing here.
    Binary,
    /// It closes the connection, or has broken its rules; the answer is among the bytes to write.
    Closed,
}

impl Frames {
    /// The gateway's side, for messages of up to so many bytes.
    pub(super) fn new(message_bytes_max: usize) -> Self {
        let config = WebSocketConfig::default()
            .read_buffer_size(READ_BYTES)
            .write_buffer_size(0)
            .max_message_size(Some(message_bytes_max))
            .max_frame_size(Some(message_bytes_max));
        let pipe = Pipe::default();
        Self(WebSocket::from_raw_socket(pipe, Role::Server, Some(config)))
    }

    /// Takes in bytes of the client; says what is complete now.
    pub(super) fn receive(&mut self, bytes: &[u8]) -> Vec<Sent> {
        self.0.get_mut().incoming.extend_from_slice(bytes);
        let mut all = Vec::new();
        loop {
            match self.0.read() {
                Ok(Message::Text(text)) => all.push(Sent::Text(text)),
                Ok(Message::Binary(_)) => all.push(Sent::Binary),
                // A ping has its answer; a pong and a raw frame need none.
                Ok(Message::Ping(_) | Message::Pong(_) | Message::Frame(_)) => {}
                Err(Error::Io(error)) if error.kind() == ErrorKind::WouldBlock => break,
                Ok(Message::Close(_)) | Err(Error::ConnectionClosed | Error::AlreadyClosed) => {
                    all.push(Sent::Closed);
                    break;
                }
                Err(error) => {
                    let (code, why) = code(&error);
                    self.close(code, why);
                    all.push(Sent::Closed);
                    break;
                }
            }
        }
        // The buffers always take it.
        let _ = self.0.flush();
        all
    }

    /// Frames a text.
    pub(super) fn send(&mut self, text: impl Into<Utf8Bytes>) {
        // Refused only once the connection is closed, when nobody reads it any more.
        let _ = self.0.send(Message::Text(text.into()));
    }

    /// Closes the gateway's side.
    pub(super) fn close(&mut self, code: CloseCode, reason: &'static str) {
        let reason = Utf8Bytes::from_static(reason);
        // A second close is none.
        let _ = self.0.close(Some(CloseFrame { code, reason }));
        let _ = self.0.flush();
    }

    /// The bytes to write.
    pub(super) fn take(&mut self) -> Bytes {
        self.0.get_mut().outgoing.split().freeze()
    }
}

/// How a client hears of a broken rule.
fn code(error: &Error) -> (CloseCode, &'static str) {
    match error {
        Error::Capacity(CapacityError::MessageTooLong { .. }) => (
            CloseCode::Size,
            "the message is larger than a request may be",
        ),
        Error::Utf8(_) => (CloseCode::Invalid, "the text is not UTF-8"),
        _ => (CloseCode::Protocol, "the frame is not a WebSocket's"),
    }
}

impl Read for Pipe {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        if self.incoming.is_empty() {
            return Err(ErrorKind::WouldBlock.into());
        }
        let count = into.len().min(self.incoming.len());
        self.incoming.copy_to_slice(&mut into[..count]);
        Ok(count)
    }
}

impl Write for Pipe {
    fn write(&mut self, from: &[u8]) -> io::Result<usize> {
        self.outgoing.extend_from_slice(from);
        Ok(from.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
