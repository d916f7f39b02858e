//! The process that holds Mooncake's client, and the talk with it.
//!
//! The client is native code that may crash or hang, and has no interface for us but Python's: so it runs
//! apart, and this side takes it for what answers in time or is killed. Every command has a deadline. It
//! ends with the socket, with its thread's death, or by being killed here.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::process::{Child, ChildStderr, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::MooncakeConfig;
use crate::sys::shared::{SharedMemory, send_file};

const SCRIPT: &str = include_str!("bridge.py");

/// How often a wait for an answer looks whether the node ends.
const SLICE: Duration = Duration::from_millis(50);
/// How long a client may take to leave by itself: Mooncake's takes a second to take its memory out of
/// the store, which else counts on it for ten.
const LEAVE: Duration = Duration::from_millis(1_500);
/// How long it may take to read a command.
const WRITE: Duration = Duration::from_millis(500);
/// The client's buffer for what is not in registered memory: nothing of ours is.
const BUFFER_BYTES: u64 = 16 << 20;

/// A place in the memory that both processes map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) at: usize,
    pub(super) bytes: usize,
}

/// What a client is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Letter {
    Exist,
    Put,
    Get,
    Remove,
}

impl Letter {
    fn byte(self) -> u8 {
        match self {
            Self::Exist => b'E',
            Self::Put => b'P',
            Self::Get => b'G',
            Self::Remove => b'R',
        }
    }
}

/// A running client.
#[derive(Debug)]
pub(super) struct Client {
    child: Child,
    socket: UnixStream,
    ends: Arc<AtomicBool>,
}

impl Client {
    /// Starts a process and hands it the memory; [`Client::is_set_up`] says whether it has the store.
    /// `ends` cuts every wait short.
    pub(super) fn start(
        config: &MooncakeConfig,
        memory: &SharedMemory,
        ends: Arc<AtomicBool>,
    ) -> io::Result<Self> {
        let (ours, theirs) = UnixStream::pair()?;
        let mut child = Command::new(&config.python)
            .args(["-c", SCRIPT])
            // What lies in the node's folder is nothing that Python should import.
            .current_dir("/")
            .env_remove(crate::cli::TOKEN_ENV)
            .stdin(Stdio::from(OwnedFd::from(theirs)))
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()?;
        let stderr = child.stderr.take();
        let mut client = Self {
            child,
            socket: ours,
            ends,
        };
        if let Some(stderr) = stderr {
            std::thread::Builder::new()
                .name("kv-shared-log".into())
                .spawn(move || log(stderr))?;
        }
        client.socket.set_read_timeout(Some(SLICE))?;
        client.socket.set_write_timeout(Some(WRITE))?;
        send_file(&client.socket, memory.file())?;
        let set_up = serde_json::json!({
            "host": config.host()?,
            "master": config.master,
            "protocol": if config.device.is_some() { "rdma" } else { "tcp" },
            "device": config.device.as_deref().unwrap_or_default(),
            "segment_bytes": config.segment_bytes,
            "buffer_bytes": BUFFER_BYTES,
        });
        client.send(set_up.to_string().as_bytes())?;
        Ok(client)
    }

    /// Ends it at once: it is of no use any more.
    pub(super) fn kill(mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    pub(super) fn pid(&self) -> u32 {
        self.child.id()
    }

    pub(super) fn has_ended(&mut self) -> bool {
        // It is ours alone to wait for: an error says that it is gone.
        !matches!(self.child.try_wait(), Ok(None))
    }

    /// What setting the store up said, once it has.
    pub(super) fn is_set_up(&mut self, deadline: Duration) -> io::Result<i32> {
        let codes = self.receive(1, deadline)?;
        codes
            .first()
            .copied()
            .ok_or_else(|| io::ErrorKind::InvalidData.into())
    }

    /// Carries a command out; the store's answer for each object.
    pub(super) fn call(
        &mut self,
        letter: Letter,
        objects: &[(&str, Place)],
        deadline: Duration,
    ) -> io::Result<Vec<i32>> {
        let mut body = vec![letter.byte()];
        body.extend((objects.len() as u32).to_le_bytes());
        for (key, place) in objects {
            let length = u16::try_from(key.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
            body.extend(length.to_le_bytes());
            body.extend(key.as_bytes());
            body.extend((place.at as u64).to_le_bytes());
            body.extend((place.bytes as u64).to_le_bytes());
        }
        self.send(&body)?;
        self.receive(objects.len(), deadline)
    }

    fn send(&mut self, body: &[u8]) -> io::Result<()> {
        let length = u32::try_from(body.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
        self.socket.write_all(&length.to_le_bytes())?;
        self.socket.write_all(body)
    }

    fn receive(&mut self, count: usize, deadline: Duration) -> io::Result<Vec<i32>> {
        let until = Instant::now() + deadline;
        let mut head = [0; 4];
        self.fill(&mut head, until)?;
        if u32::from_le_bytes(head) as usize != 4 * count {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let mut codes = vec![0; 4 * count];
        self.fill(&mut codes, until)?;
        let codes = codes.chunks_exact(4);
        Ok(codes
            .map(|code| i32::from_le_bytes([code[0], code[1], code[2], code[3]]))
            .collect())
    }

    /// Reads all of `to`, unless the deadline passes or the node ends.
    fn fill(&mut self, to: &mut [u8], until: Instant) -> io::Result<()> {
        let mut filled = 0;
        while filled < to.len() {
            match self.socket.read(&mut to[filled..]) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(count) => filled += count,
                Err(error) if is_slice(&error) => {
                    if Instant::now() >= until || self.ends.load(Ordering::Relaxed) {
                        return Err(io::ErrorKind::TimedOut.into());
                    }
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

fn is_slice(error: &io::Error) -> bool {
    use io::ErrorKind::{Interrupted, TimedOut, WouldBlock};
    [Interrupted, TimedOut, WouldBlock].contains(&error.kind())
}

/// Asked to leave, so that the store forgets its memory at once; killed if it does not.
impl Drop for Client {
    fn drop(&mut self) {
        let _ = self.socket.shutdown(std::net::Shutdown::Both);
        let until = Instant::now() + LEAVE;
        while Instant::now() < until {
            if self.has_ended() {
                return;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Passes on what the client says, until it ends.
fn log(stderr: ChildStderr) {
    for line in BufReader::new(stderr).lines() {
        let Ok(line) = line else { return };
        tracing::debug!(target: "mooncake", "{line}");
    }
}
