//! Mooncake Store as the shared tier: a client in a process of its own (`child`), started again when it
//! dies, hangs or loses its master.
//!
//! States: *away until* a time (at first: now), *setting up* (a process that has not answered yet),
//! *ready*. Any broken, late or nonsensical answer, and the store's own "cannot reach the master", ends
//! the process and leads to *away*; each time in a row twice as long, up to half a minute.
//!
//! Bytes travel through memory that both processes map and that is registered with Mooncake's transfer
//! engine. Whoever reaches its port can read and write that memory at any time: so what comes is copied
//! out of it first, and checked after.

mod child;

use std::io;
use std::net::{SocketAddr, ToSocketAddrs, UdpSocket};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use super::objects::{Away, Got, Objects, Put};
use crate::sys::shared::SharedMemory;
use child::{Client, Letter, Place};

/// Objects in one call: enough that the way to the master counts for little.
const BATCH: usize = 16;
/// How long a process may take until it has joined the store: Python, and memory of many GiB that is
/// registered with a network card.
const SET_UP: Duration = Duration::from_secs(60);
/// How long any other command may take: a batch of large blocks over a gigabit link takes half of it.
const COMMAND: Duration = Duration::from_millis(1_000);
/// The first wait before another try, and the longest.
const AWAY_MIN: Duration = Duration::from_millis(250);
const AWAY_MAX: Duration = Duration::from_secs(30);

/// The store's own numbers, as far as they mean something here.
const NO_ROOM: i32 = -200;
const MISSING: i32 = -704;
const MASTER_AWAY: i32 = -900;

/// How the store is reached.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MooncakeConfig {
    /// `HOST:PORT` of the master.
    pub master: String,
    /// The name under which others reach this node's part of the store; none to take the address from
    /// which the master is reached.
    pub host: Option<String>,
    /// A Python that has the package.
    pub python: PathBuf,
    /// Bytes that this node gives to the store; 0 for none.
    pub segment_bytes: u64,
    /// The network card, if blocks go by RDMA; else they go by TCP.
    pub device: Option<String>,
}

impl MooncakeConfig {
    fn host(&self) -> io::Result<String> {
        if let Some(host) = &self.host {
            return Ok(host.clone());
        }
        let unknown = || io::Error::new(io::ErrorKind::NotFound, "the master's name is unknown");
        let master = self.master.to_socket_addrs()?.next();
        let master = master.ok_or_else(unknown)?;
        let any = match master {
            SocketAddr::V4(_) => "0.0.0.0:0",
            SocketAddr::V6(_) => "[::]:0",
        };
        // Nothing is sent: the system only says from where it would be.
        let socket = UdpSocket::bind(any)?;
        socket.connect(master)?;
        Ok(socket.local_addr()?.ip().to_string())
    }
}

#[derive(Debug)]
enum State {
    Away(Instant),
    SettingUp(Client, Instant),
    Ready(Client),
}

/// Mooncake's client, seen from here.
#[derive(Debug)]
pub struct Mooncake {
    config: MooncakeConfig,
    memory: SharedMemory,
    object_bytes: usize,
    state: State,
    /// How long it will be away next time.
    wait: Duration,
    /// How long a command may take.
    deadline: Duration,
    ends: Arc<AtomicBool>,
    pid: Arc<AtomicU32>,
}

impl Mooncake {
    /// A client for objects of at most this size; nothing is started before it is tended to. `ends` cuts
    /// every wait short.
    pub fn new(
        config: MooncakeConfig,
        object_bytes: usize,
        ends: Arc<AtomicBool>,
    ) -> io::Result<Self> {
        Ok(Self {
            config,
            memory: SharedMemory::create(BATCH * object_bytes)?,
            object_bytes,
            state: State::Away(Instant::now()),
            wait: AWAY_MIN,
            deadline: COMMAND,
            ends,
            pid: Arc::default(),
        })
    }

    /// The id of the process, 0 while there is none. For tests and operators who kill it.
    pub fn pid(&self) -> Arc<AtomicU32> {
        Arc::clone(&self.pid)
    }

    fn place(&self, number: usize, bytes: usize) -> Place {
        Place {
            at: number * self.object_bytes,
            bytes,
        }
    }

    fn give_up(&mut self, why: String) -> Away {
        if !self.ends.load(Ordering::Relaxed) {
            let again_in_s = self.wait.as_secs_f64();
            tracing::warn!(
                master = self.config.master,
                why,
                again_in_s,
                "Mooncake is away"
            );
        }
        let away = State::Away(Instant::now() + self.wait);
        match std::mem::replace(&mut self.state, away) {
            State::SettingUp(client, _) | State::Ready(client) => client.kill(),
            State::Away(_) => {}
        }
        self.pid.store(0, Ordering::Relaxed);
        self.wait = (self.wait * 2).min(AWAY_MAX);
        Away(why)
    }

    fn call(&mut self, letter: Letter, objects: &[(&str, Place)]) -> Result<Vec<i32>, Away> {
        let State::Ready(client) = &mut self.state else {
            return Err(Away("it is not set up".to_owned()));
        };
        let deadline = self.deadline;
        let why = match client.call(letter, objects, deadline) {
            Ok(codes) if codes.contains(&MASTER_AWAY) => "its master cannot be reached".to_owned(),
            Ok(codes) => {
                self.wait = AWAY_MIN;
                return Ok(codes);
            }
            Err(error) if error.kind() == io::ErrorKind::TimedOut => {
                format!("its client did not answer within {deadline:?}")
            }
            Err(error) => format!("its client: {error}"),
        };
        Err(self.give_up(why))
    }

    fn start(&mut self) {
        let started = Client::start(&self.config, &self.memory, Arc::clone(&self.ends));
        match started {
            Ok(client) => {
                self.pid.store(client.pid(), Ordering::Relaxed);
                self.state = State::SettingUp(client, Instant::now() + SET_UP);
            }
            Err(error) => {
                let python = self.config.python.display();
                self.give_up(format!("its client cannot be started by {python}: {error}"));
            }
        }
    }

    fn look(&mut self, until: Instant) {
        let State::SettingUp(client, _) = &mut self.state else {
            return;
        };
        let left = until.saturating_duration_since(Instant::now());
        match client.is_set_up(left) {
            Ok(0) => {
                tracing::info!(
                    master = self.config.master,
                    "the shared KV store is reached"
                );
                let away = State::Away(Instant::now());
                if let State::SettingUp(client, _) = std::mem::replace(&mut self.state, away) {
                    self.state = State::Ready(client);
                }
            }
            Ok(code) => {
                self.give_up(format!("setting its client up said {code}"));
            }
            Err(error) => {
                self.give_up(format!(
                    "its client was not set up ({error}); is the package installed for --kv-shared-python?"
                ));
            }
        }
    }
}

impl Objects for Mooncake {
    fn tend(&mut self) -> Option<Duration> {
        if let State::Ready(client) = &mut self.state
            && client.has_ended()
        {
            self.give_up("its client died".to_owned());
        }
        if let State::Away(until) = self.state {
            let left = until.saturating_duration_since(Instant::now());
            if !left.is_zero() {
                return Some(left);
            }
            self.start();
        }
        if let State::SettingUp(_, until) = self.state {
            self.look(until);
        }
        match self.state {
            State::Ready(_) => None,
            State::SettingUp(..) => Some(Duration::ZERO),
            State::Away(until) => Some(until.saturating_duration_since(Instant::now())),
        }
    }

    fn batch(&self) -> usize {
        BATCH
    }

    fn exist(&mut self, keys: &[String]) -> Result<Vec<bool>, Away> {
        let objects: Vec<_> = keys
            .iter()
            .map(|key| (key.as_str(), self.place(0, 0)))
            .collect();
        let codes = self.call(Letter::Exist, &objects)?;
        Ok(codes.into_iter().map(|code| code == 1).collect())
    }

    fn put(&mut self, objects: &[(&str, &[u8])]) -> Result<Vec<Put>, Away> {
        assert!(objects.len() <= BATCH, "{} in a batch", objects.len());
        let mut placed = Vec::with_capacity(objects.len());
        for (number, (key, bytes)) in objects.iter().enumerate() {
            let place = self.place(number, bytes.len());
            self.memory
                .write(place.at, place.bytes, &mut |to| to.copy_from_slice(bytes));
            placed.push((*key, place));
        }
        let codes = self.call(Letter::Put, &placed)?;
        let outcome = |code| match code {
            0 => Put::Stored,
            NO_ROOM => Put::NoRoom,
            code => Put::Failed(code),
        };
        Ok(codes.into_iter().map(outcome).collect())
    }

    fn get(&mut self, wanted: &mut [(&str, &mut [u8])]) -> Result<Vec<Got>, Away> {
        assert!(wanted.len() <= BATCH, "{} in a batch", wanted.len());
        let placed = wanted.iter().enumerate();
        let placed: Vec<_> = placed
            .map(|(number, (key, to))| (*key, self.place(number, to.len())))
            .collect();
        let codes = self.call(Letter::Get, &placed)?;
        let mut outcomes = Vec::with_capacity(codes.len());
        for ((code, (_, place)), (_, to)) in codes.into_iter().zip(&placed).zip(wanted) {
            outcomes.push(match code {
                MISSING => Got::Missing,
                code if code < 0 => Got::Failed(code),
                code => {
                    // What is longer is no object of ours.
                    let bytes = Some(code as usize).filter(|bytes| *bytes <= to.len());
                    let bytes = bytes.unwrap_or(0);
                    to[..bytes].copy_from_slice(self.memory.read(place.at, bytes));
                    Got::Found(bytes)
                }
            });
        }
        Ok(outcomes)
    }

    fn remove(&mut self, key: &str) -> Result<(), Away> {
        // Whether it could be removed changes nothing here: it is in use, or it is gone.
        let place = self.place(0, 0);
        self.call(Letter::Remove, &[(key, place)]).map(drop)
    }
}
