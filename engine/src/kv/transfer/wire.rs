//! How does a frame look on a connection, and how is it known to be whole and from the other node?
//!
//! ```text
//! kind u8 | bytes u32 little-endian | note | body | tag, 16 bytes
//! ```
//!
//! Frames are sealed with AES-128-GCM (NIST SP 800-38D) under a key of this connection and this direction;
//! the nonce is the frame's number. The body is encrypted; the note, a few bytes that say what it is a
//! part of, is not; both are covered by the tag, as is the head: a frame that was damaged, forged, repeated or
//! left out is found. `bytes` counts note and body. Until both sides have keys ([`super::auth`]) frames are
//! plain and have no tag.
//!
//! Every kind has a largest body, checked before anything is allocated or read.

use std::io::{self, IoSlice, Read, Write};
use std::marker::PhantomData;
use std::net::{Shutdown, TcpStream};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use ring::aead::{AES_128_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, Tag, UnboundKey};

use super::TransferError;

/// A message as JSON.
pub const MESSAGE: u8 = 1;
/// A part of blocks within the frame: which (see [`Part`](super::part::Part)) as the note, its bytes as the
/// body.
pub const PART: u8 = 2;
/// A part in shared memory: which, and its place there (u32 little-endian), as the note.
pub const PLACED: u8 = 3;
/// Places in shared memory that are free again (u32 little-endian each) as the body.
pub const FREE: u8 = 4;

/// Bytes of a message: prompts that are asked for by their tokens are the longest.
pub const MESSAGE_BYTES_MAX: usize = 8 << 20;
/// Bytes of a message before the other side is known.
pub const GREETING_BYTES_MAX: usize = 2 << 10;
const HEAD_BYTES: usize = 5;
const NOTE_BYTES_MAX: usize = 16;
const TAG_BYTES: usize = 16;

/// A connection to another node.
#[derive(Debug)]
pub enum Socket {
    /// To another host.
    Tcp(TcpStream),
    /// On this host.
    Unix(UnixStream),
}

impl Socket {
    /// The same connection, for another thread.
    pub fn try_clone(&self) -> io::Result<Self> {
        Ok(match self {
            Self::Tcp(stream) => Self::Tcp(stream.try_clone()?),
            Self::Unix(stream) => Self::Unix(stream.try_clone()?),
        })
    }

    /// Ends it: whoever reads or writes it returns. Never waits.
    pub fn close(&self) {
        // A connection that is gone already cannot be closed, and need not be.
        let _ = match self {
            Self::Tcp(stream) => stream.shutdown(Shutdown::Both),
            Self::Unix(stream) => stream.shutdown(Shutdown::Both),
        };
    }

    /// How long one read and one write may take.
    pub fn set_timeouts(&self, read: Duration, write: Duration) -> io::Result<()> {
        self.set_read_timeout(read)?;
        match self {
            Self::Tcp(stream) => stream.set_write_timeout(Some(write)),
            Self::Unix(stream) => stream.set_write_timeout(Some(write)),
        }
    }

    fn set_read_timeout(&self, read: Duration) -> io::Result<()> {
        match self {
            Self::Tcp(stream) => stream.set_read_timeout(Some(read)),
            Self::Unix(stream) => stream.set_read_timeout(Some(read)),
        }
    }
}

impl Read for &Socket {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        match self {
            Socket::Tcp(stream) => (&mut &*stream).read(to),
            Socket::Unix(stream) => (&mut &*stream).read(to),
        }
    }
}

impl Write for &Socket {
    fn write(&mut self, from: &[u8]) -> io::Result<usize> {
        match self {
            Socket::Tcp(stream) => (&mut &*stream).write(from),
            Socket::Unix(stream) => (&mut &*stream).write(from),
        }
    }

    fn write_vectored(&mut self, from: &[IoSlice<'_>]) -> io::Result<usize> {
        match self {
            Socket::Tcp(stream) => (&mut &*stream).write_vectored(from),
            Socket::Unix(stream) => (&mut &*stream).write_vectored(from),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// One direction's key and the number of its next frame.
struct Seal {
    key: LessSafeKey,
    next: u64,
}

impl Seal {
    fn new(key: &[u8; 32]) -> Self {
        // The keys of a connection are one hash's output: half of one is as good a key.
        let key = UnboundKey::new(&AES_128_GCM, &key[..AES_128_GCM.key_len()]);
        Self {
            key: LessSafeKey::new(key.expect("a key of just that length")),
            next: 0,
        }
    }

    /// Never the same twice: 2^64 frames are more than any connection has.
    fn nonce(&mut self) -> Nonce {
        let mut nonce = [0; NONCE_LEN];
        nonce[..8].copy_from_slice(&self.next.to_le_bytes());
        self.next += 1;
        Nonce::assume_unique_for_key(nonce)
    }

    fn seal(&mut self, said: Said, body: &mut [u8]) -> io::Result<Tag> {
        let nonce = self.nonce();
        let sealed = self.key.seal_in_place_separate_tag(nonce, said.aad(), body);
        // Fails for bodies of over 64 GB alone.
        sealed.map_err(|_| io::ErrorKind::InvalidInput.into())
    }

    fn open(&mut self, said: Said, body: &mut [u8], tag: Tag) -> Result<(), TransferError> {
        let nonce = self.nonce();
        let opened = self
            .key
            .open_in_place_separate_tag(nonce, said.aad(), tag, body, 0..);
        opened.map(drop).map_err(|_| TransferError::Damaged)
    }
}

/// What of a frame is authenticated and not encrypted: head and note.
#[derive(Clone, Copy)]
struct Said {
    bytes: [u8; HEAD_BYTES + NOTE_BYTES_MAX],
    length: usize,
}

impl Said {
    fn new(head: Head, note: &[u8]) -> Self {
        let mut bytes = [0; HEAD_BYTES + NOTE_BYTES_MAX];
        bytes[0] = head.kind;
        bytes[1..HEAD_BYTES].copy_from_slice(&(head.bytes as u32).to_le_bytes());
        bytes[HEAD_BYTES..][..note.len()].copy_from_slice(note);
        let length = HEAD_BYTES + note.len();
        Self { bytes, length }
    }

    fn as_bytes(&self) -> &[u8] {
        &self.bytes[..self.length]
    }

    fn aad(&self) -> Aad<&[u8]> {
        Aad::from(self.as_bytes())
    }
}

/// One direction of a connection, with its key once there is one.
pub struct Half<D> {
    socket: Socket,
    until: Option<Instant>,
    seal: Option<Seal>,
    direction: PhantomData<D>,
}

/// What this node sends.
#[derive(Debug)]
pub enum Outgoing {}

/// What it receives.
#[derive(Debug)]
pub enum Incoming {}

/// The writing half of a connection.
pub type Writer = Half<Outgoing>;

/// The reading half of a connection.
pub type Reader = Half<Incoming>;

impl<D> std::fmt::Debug for Half<D> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Half")
            .field("socket", &self.socket)
            .finish_non_exhaustive()
    }
}

impl<D> Half<D> {
    /// Without a key.
    pub fn new(socket: Socket) -> Self {
        Self {
            socket,
            until: None,
            seal: None,
            direction: PhantomData,
        }
    }

    /// From the next frame on with this key.
    pub fn keyed(self, key: [u8; 32]) -> Self {
        let seal = Some(Seal::new(&key));
        Self { seal, ..self }
    }

    /// The connection.
    pub fn socket(&self) -> &Socket {
        &self.socket
    }
}

impl Writer {
    /// Sends one frame. Its body is encrypted where it lies; a note has at most 16 bytes.
    pub fn write(&mut self, kind: u8, note: &[u8], body: &mut [u8]) -> io::Result<()> {
        let bytes = note.len() + body.len();
        if note.len() > NOTE_BYTES_MAX || u32::try_from(bytes).is_err() {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let said = Said::new(Head { kind, bytes }, note);
        let seal = self.seal.as_mut();
        let tag = seal.map(|seal| seal.seal(said, body)).transpose()?;
        let tag = tag.as_ref().map_or(&[][..], AsRef::as_ref);
        // In one call, and as few packets as can be.
        let mut slices = [said.as_bytes(), body, tag].map(IoSlice::new);
        let mut slices = &mut slices[..];
        // Those at the end may have nothing in them.
        IoSlice::advance_slices(&mut slices, 0);
        while !slices.is_empty() {
            match (&self.socket).write_vectored(slices) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(written) => IoSlice::advance_slices(&mut slices, written),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

/// What a frame says about itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Head {
    /// Its kind.
    pub kind: u8,
    /// Bytes of its note and body.
    pub bytes: usize,
}

impl Reader {
    /// What is not here by then is not waited for, however steadily it trickles in.
    pub fn until(self, until: Option<Instant>) -> Self {
        Self { until, ..self }
    }

    fn fill(&self, mut to: &mut [u8]) -> io::Result<()> {
        let Some(until) = self.until else {
            return (&self.socket).read_exact(to);
        };
        while !to.is_empty() {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(io::ErrorKind::TimedOut.into());
            }
            self.socket.set_read_timeout(left)?;
            match (&self.socket).read(to) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(count) => to = &mut to[count..],
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Reads a frame's head. Nothing is bounded yet: the reader of the body does that.
    pub fn head(&mut self) -> Result<Head, TransferError> {
        let mut head = [0; HEAD_BYTES];
        self.fill(&mut head).map_err(stalled)?;
        let [kind, bytes @ ..] = head;
        Ok(Head {
            kind,
            bytes: u32::from_le_bytes(bytes) as usize,
        })
    }

    /// Reads a short body without a note, of at most `most` bytes.
    pub fn body(&mut self, head: Head, most: usize) -> Result<Vec<u8>, TransferError> {
        if head.bytes > most {
            return Err(oversized(head));
        }
        let mut body = vec![0; head.bytes];
        self.body_into(head, &mut [], &mut body)?;
        Ok(body)
    }

    /// Reads a note and a body of just this length, and opens them. After an error they hold anything.
    pub fn body_into(
        &mut self,
        head: Head,
        note: &mut [u8],
        body: &mut [u8],
    ) -> Result<(), TransferError> {
        if head.bytes != note.len() + body.len() {
            return Err(oversized(head));
        }
        self.fill(note).map_err(stalled)?;
        self.fill(body).map_err(stalled)?;
        if self.seal.is_none() {
            return Ok(());
        }
        let mut tag = [0; TAG_BYTES];
        self.fill(&mut tag).map_err(stalled)?;
        let Some(seal) = &mut self.seal else {
            return Ok(());
        };
        seal.open(Said::new(head, note), body, Tag::from(tag))
    }
}

fn oversized(head: Head) -> TransferError {
    TransferError::Oversized {
        kind: head.kind,
        bytes: head.bytes,
    }
}

/// A read that took too long is not a connection that failed: trying again would take as long.
fn stalled(error: io::Error) -> TransferError {
    match error.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => TransferError::Stalled,
        _ => TransferError::Io(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Would catch a stranger that keeps a connection by sending a byte now and then.
    #[test]
    fn what_trickles_in_is_late_all_the_same() {
        let (ours, theirs) = UnixStream::pair().expect("a pair");
        let drip = std::thread::spawn(move || {
            let announced = 2000_u32.to_le_bytes();
            (&theirs).write_all(&[MESSAGE]).expect("a kind");
            (&theirs).write_all(&announced).expect("a size");
            // Until the other side has had enough.
            while (&theirs).write_all(b" ").is_ok() {
                std::thread::sleep(Duration::from_millis(5));
            }
        });
        let until = Instant::now() + Duration::from_millis(100);
        let mut reader = Reader::new(Socket::Unix(ours)).until(Some(until));
        let head = reader.head().expect("a head");
        let late = reader.body(head, GREETING_BYTES_MAX);
        assert!(matches!(late, Err(TransferError::Stalled)), "{late:?}");
        drop(reader);
        drip.join().expect("it ends");
    }
}
