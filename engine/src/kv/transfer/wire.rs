//! How does a frame look on a connection, and how is it known to be whole and from the other node?
//!
//! ```text
//! kind u8 | bytes u32 little-endian | body | checksum, 32 bytes
//! ```
//!
//! The checksum is BLAKE3, keyed for this connection and this direction, over the frame's number, its
//! head and its body: a frame that was damaged, forged, repeated or left out is found. Until both sides
//! have keys ([`super::auth`]) frames have none.
//!
//! Every kind has a largest body, checked before anything is allocated or read.

use std::io::{self, IoSlice, Read, Write};
use std::marker::PhantomData;
use std::net::{Shutdown, TcpStream};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use super::TransferError;

/// A message as JSON.
pub const MESSAGE: u8 = 1;
/// A block within the frame: its number (u32 little-endian), its bytes.
pub const BLOCK: u8 = 2;
/// A block in shared memory: its number and its place there (both u32 little-endian).
pub const PLACED: u8 = 3;
/// A place in shared memory that is free again (u32 little-endian).
pub const FREE: u8 = 4;

/// Bytes of a message: prompts that are asked for by their tokens are the longest.
pub const MESSAGE_BYTES_MAX: usize = 8 << 20;
/// Bytes of a message before the other side is known.
pub const GREETING_BYTES_MAX: usize = 2 << 10;
const HEAD_BYTES: usize = 5;
const SUM_BYTES: usize = blake3::OUT_LEN;

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
#[derive(Clone)]
struct Sums {
    key: [u8; 32],
    next: u64,
}

impl Sums {
    fn sum(&mut self, head: &[u8], parts: &[&[u8]]) -> blake3::Hash {
        let mut hasher = blake3::Hasher::new_keyed(&self.key);
        hasher.update(&self.next.to_le_bytes());
        hasher.update(head);
        for part in parts {
            hasher.update(part);
        }
        self.next += 1;
        hasher.finalize()
    }
}

/// One direction of a connection, with the key of its checksums once there is one.
pub struct Half<D> {
    socket: Socket,
    until: Option<Instant>,
    sums: Option<Sums>,
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
            sums: None,
            direction: PhantomData,
        }
    }

    /// From the next frame on with this key.
    pub fn keyed(self, key: [u8; 32]) -> Self {
        let sums = Some(Sums { key, next: 0 });
        Self { sums, ..self }
    }

    /// The connection.
    pub fn socket(&self) -> &Socket {
        &self.socket
    }
}

impl Writer {
    /// Sends one frame whose body is these parts.
    pub fn write(&mut self, kind: u8, parts: &[&[u8]]) -> io::Result<()> {
        let bytes: usize = parts.iter().map(|part| part.len()).sum();
        let bytes = u32::try_from(bytes).map_err(|_| io::ErrorKind::InvalidInput)?;
        let mut head = [kind; HEAD_BYTES];
        head[1..].copy_from_slice(&bytes.to_le_bytes());
        let sum = self.sums.as_mut().map(|sums| sums.sum(&head, parts));
        let sum = sum.as_ref().map(|sum| &sum.as_bytes()[..]);
        // In one call, and as few packets as can be.
        let all = std::iter::once(&head[..])
            .chain(parts.iter().copied())
            .chain(sum);
        let mut slices: Vec<_> = all.map(IoSlice::new).collect();
        let mut slices = &mut slices[..];
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
    /// Bytes of its body.
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

    /// Reads a short body, of at most `most` bytes.
    pub fn body(&mut self, head: Head, most: usize) -> Result<Vec<u8>, TransferError> {
        if head.bytes > most {
            return Err(oversized(head));
        }
        let mut body = vec![0; head.bytes];
        self.body_into(head, &mut [&mut body])?;
        Ok(body)
    }

    /// Reads a body of just these parts' length into them, and checks it.
    pub fn body_into(&mut self, head: Head, parts: &mut [&mut [u8]]) -> Result<(), TransferError> {
        if head.bytes != parts.iter().map(|part| part.len()).sum::<usize>() {
            return Err(oversized(head));
        }
        for part in &mut *parts {
            self.fill(part).map_err(stalled)?;
        }
        if self.sums.is_none() {
            return Ok(());
        }
        let mut sum = [0; SUM_BYTES];
        self.fill(&mut sum).map_err(stalled)?;
        let Some(sums) = &mut self.sums else {
            return Ok(());
        };
        let mut bytes = [head.kind; HEAD_BYTES];
        bytes[1..].copy_from_slice(&(head.bytes as u32).to_le_bytes());
        let parts: Vec<&[u8]> = parts.iter().map(|part| &**part).collect();
        // Compares in constant time.
        let whole = sums.sum(&bytes, &parts) == blake3::Hash::from_bytes(sum);
        whole.then_some(()).ok_or(TransferError::Damaged)
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
