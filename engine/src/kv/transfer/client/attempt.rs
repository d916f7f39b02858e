//! One attempt at carrying an order out, over as many connections as it takes.

use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{Receiver, sync_channel};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use super::{Control, Order, STREAMS, Wanted, lock};
use crate::engine::{Handle, Inbound};
use crate::kv::layout::{BlockLayout, convert_layers};
use crate::kv::transfer::auth::{Identity, Session, connect};
use crate::kv::transfer::message::{self, Message};
use crate::kv::transfer::part::{Layers, Part};
use crate::kv::transfer::shared::Region;
use crate::kv::transfer::tcp::Spare;
use crate::kv::transfer::wire::{FREE, MESSAGE, PART, PLACED, Reader, Socket, Writer};
use crate::kv::transfer::{
    End, Endpoint, Inlet, Payload, Reason, TransferError, hex, window_places,
};

/// How long connecting and greeting may take.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
/// How long a further connection may be silent: while a prompt is computed there is nothing to send.
const IDLE_TIMEOUT: Duration = Duration::from_secs(3600);
/// Bytes of a message that is not an order: a first token with its log probabilities.
const ANSWER_BYTES_MAX: usize = 64 << 10;

/// An order and how far it has come.
pub(super) struct Transfer<'a> {
    order: &'a Order,
    identity: &'a Identity,
    engine: &'a Handle,
    /// Which blocks are still to come.
    missing: Vec<bool>,
    /// Opens further connections.
    key: Option<String>,
}

/// A part as this node keeps it. It holds the place of what it was made from, which bounds how many there
/// are.
#[derive(Debug)]
struct Converted {
    bytes: Vec<u8>,
    _place: Box<dyn Payload>,
}

impl Payload for Converted {
    fn bytes(&self) -> &[u8] {
        &self.bytes
    }
}

/// What the connections of one attempt have heard.
struct Heard<'a> {
    number: u64,
    engine: &'a Handle,
    control: &'a Control,
    own: BlockLayout,
    theirs: BlockLayout,
    state: Mutex<HeardState>,
    changed: Condvar,
}

struct HeardState {
    /// What is there of each block.
    here: Vec<Layers>,
    left: usize,
    end: Option<End>,
    failed: Option<TransferError>,
}

impl HeardState {
    fn new(missing: &[bool]) -> Self {
        Self {
            left: missing.iter().filter(|missing| **missing).count(),
            here: missing
                .iter()
                .map(|missing| Layers::all_if(!missing))
                .collect(),
            end: None,
            failed: None,
        }
    }
}

impl<'a> Transfer<'a> {
    pub(super) fn new(order: &'a Order, identity: &'a Identity, engine: &'a Handle) -> Self {
        Self {
            order,
            identity,
            engine,
            missing: (0..order.blocks).map(|block| block >= order.held).collect(),
            key: None,
        }
    }

    /// Connects, and hears everything out.
    pub(super) fn attempt(&mut self) -> Result<End, TransferError> {
        let (session, endpoint) = self.reach()?;
        let Session {
            mut reader,
            mut writer,
            peer_layout,
            ..
        } = session;
        let (freed, free) = sync_channel(window_places(peer_layout.body_bytes()));
        let inlet: Box<dyn Inlet> = match reader.socket() {
            Socket::Unix(stream) => {
                let region = Region::new(peer_layout, freed)?;
                self.ask(region.places(), &mut writer)?;
                region.pass(stream)?;
                Box::new(region)
            }
            Socket::Tcp(_) => {
                self.ask(0, &mut writer)?;
                drop(freed);
                Box::new(Spare::new(peer_layout))
            }
        };
        self.accepted(&mut reader)?;
        let heard = Heard {
            number: self.order.number,
            engine: self.engine,
            control: &self.order.control,
            own: self.identity.layout,
            theirs: peer_layout,
            state: Mutex::new(HeardState::new(&self.missing)),
            changed: Condvar::new(),
        };
        let writer = Arc::new(Mutex::new(writer));
        let told = Arc::clone(&writer);
        // Ends with the connection, or with the last block that is given back: nobody waits for it.
        let spawned = std::thread::Builder::new().name("kv-free".into());
        spawned.spawn(move || give_back(&free, &told))?;
        let hear = |reader: &mut Reader| heard.note(heard.hear(reader, &*inlet));
        let further = if matches!(endpoint, Endpoint::Tcp(_)) {
            STREAMS - 1
        } else {
            0
        };
        let ended = std::thread::scope(|scope| {
            for _ in 0..further {
                scope.spawn(|| match self.join(&endpoint) {
                    Ok(mut reader) => hear(&mut reader),
                    // One connection will do.
                    Err(error) => tracing::debug!(%error, "no further KV connection"),
                });
            }
            scope.spawn(|| hear(&mut reader));
            let ended = heard.wait();
            if ended.is_ok() {
                // If this is lost, the blocks are let go at their deadline.
                let _ = Message::Received.write(&mut lock(&writer));
            }
            self.order.control.close_all();
            ended
        });
        let state = heard
            .state
            .into_inner()
            .unwrap_or_else(PoisonError::into_inner);
        // Of blocks that are not whole everything is asked for again.
        self.missing = state.here.iter().map(|here| !here.is_whole()).collect();
        ended
    }

    /// Connects to the node that was named, wherever it is found first.
    fn reach(&self) -> Result<(Session, Endpoint), TransferError> {
        let here = |endpoint: &&Endpoint| matches!(endpoint, Endpoint::Unix(_));
        let (near, far): (Vec<_>, Vec<_>) = self.order.endpoints.iter().partition(here);
        let mut failed = TransferError::Unreachable;
        for endpoint in near.into_iter().chain(far) {
            match self.greet(endpoint) {
                Ok(session) => return Ok((session, endpoint.clone())),
                Err(error) => {
                    tracing::debug!(%error, %endpoint, "a KV endpoint cannot be used");
                    failed = error;
                }
            }
        }
        Err(failed)
    }

    fn greet(&self, endpoint: &Endpoint) -> Result<Session, TransferError> {
        let socket = match endpoint {
            Endpoint::Unix(path) => Socket::Unix(UnixStream::connect(path)?),
            Endpoint::Tcp(address) => {
                let stream = TcpStream::connect_timeout(address, CONNECT_TIMEOUT)?;
                stream.set_nodelay(true)?;
                Socket::Tcp(stream)
            }
        };
        socket.set_timeouts(CONNECT_TIMEOUT, CONNECT_TIMEOUT)?;
        self.order.control.watch(&socket)?;
        let session = connect(socket, self.identity)?;
        if session.peer != *self.order.engine_id {
            let message = format!("the node at {endpoint} is {}, another one", session.peer);
            return Err(TransferError::refused(Reason::WrongNode, message));
        }
        let timeout = self.order.timeout;
        session.reader.socket().set_timeouts(timeout, timeout)?;
        Ok(session)
    }

    fn ask(&self, places: u32, writer: &mut Writer) -> Result<(), TransferError> {
        let salt = self.order.salt.as_deref().map(str::to_owned);
        let message = match &self.order.what {
            Wanted::HandOver { id, prompt } => Message::Attach(message::Attach {
                transfer_id: id.to_string(),
                key: self.key.clone(),
                salt,
                prompt: hex(prompt),
                blocks: self.order.blocks,
                missing: runs(&self.missing),
                wait_ms: u64::try_from(self.order.timeout.as_millis()).unwrap_or(u64::MAX),
                places,
            }),
            Wanted::Cached { tokens } => Message::Fetch(message::Fetch {
                salt,
                tokens: tokens.clone(),
                missing: runs(&self.missing),
                places,
            }),
        };
        Ok(message.write(writer)?)
    }

    fn accepted(&mut self, reader: &mut Reader) -> Result<(), TransferError> {
        match Message::read(reader, ANSWER_BYTES_MAX)? {
            Message::Accepted { key, blocks } => {
                self.key = Some(key);
                // Of what is cached there may be less than was asked for.
                for missing in self.missing.iter_mut().skip(blocks as usize) {
                    *missing = false;
                }
                Ok(())
            }
            other => Err(other.unexpected()),
        }
    }

    /// Opens a further connection.
    fn join(&self, endpoint: &Endpoint) -> Result<Reader, TransferError> {
        let Session {
            mut reader,
            mut writer,
            ..
        } = self.greet(endpoint)?;
        let key = self.key.clone().unwrap_or_default();
        Message::Join { key }.write(&mut writer)?;
        match Message::read(&mut reader, ANSWER_BYTES_MAX)? {
            Message::Accepted { .. } => {
                // Whether anything comes is told by the first connection.
                reader
                    .socket()
                    .set_timeouts(IDLE_TIMEOUT, CONNECT_TIMEOUT)?;
                Ok(reader)
            }
            other => Err(other.unexpected()),
        }
    }
}

impl Heard<'_> {
    fn hear(&self, reader: &mut Reader, inlet: &dyn Inlet) -> Result<(), TransferError> {
        loop {
            let head = reader.head()?;
            match head.kind {
                PART | PLACED => {
                    let wanted = || !self.control.is_cancelled();
                    let (part, payload) = inlet.receive(head, reader, &wanted)?;
                    self.part(part, self.converted(&part, payload)?)?;
                }
                MESSAGE => match Message::decode(&reader.body(head, ANSWER_BYTES_MAX)?)? {
                    Message::Alive => {
                        self.engine.kv_inbound(Inbound::alive(self.number));
                    }
                    Message::End {
                        first,
                        cached_tokens,
                    } => {
                        lock(&self.state).end = Some(Message::end_of(first, cached_tokens)?);
                        self.changed.notify_all();
                    }
                    other => return Err(other.unexpected()),
                },
                _ => return Err(TransferError::Malformed("a frame that senders do not send")),
            }
        }
    }

    fn converted(
        &self,
        part: &Part,
        payload: Box<dyn Payload>,
    ) -> Result<Box<dyn Payload>, TransferError> {
        if self.theirs == self.own {
            return Ok(payload);
        }
        let mut bytes = vec![0; part.bytes(&self.own)?];
        convert_layers(&self.theirs, payload.bytes(), &self.own, &mut bytes);
        Ok(Box::new(Converted {
            bytes,
            _place: payload,
        }))
    }

    /// Hands a part to the step loop. One that nobody asked for ends the transfer.
    fn part(&self, part: Part, payload: Box<dyn Payload>) -> Result<(), TransferError> {
        let unwanted = || TransferError::Malformed("a block that was not asked for");
        let mut state = lock(&self.state);
        let here = state.here.get_mut(part.numbers()).ok_or_else(unwanted)?;
        let mut whole = 0;
        for here in here {
            *here = here.with(&part, self.own.layers).ok_or_else(unwanted)?;
            whole += usize::from(here.is_whole());
        }
        drop(state);
        // Waits while the step loop has more to do than there is room for.
        if !self
            .engine
            .kv_inbound(Inbound::part(self.number, part, payload))
        {
            return Err(TransferError::Cancelled);
        }
        lock(&self.state).left -= whole;
        self.changed.notify_all();
        Ok(())
    }

    fn note(&self, ended: Result<(), TransferError>) {
        let mut state = lock(&self.state);
        if let (Err(error), None) = (ended, &state.failed) {
            state.failed = Some(error);
        }
        drop(state);
        self.changed.notify_all();
    }

    /// Waits until everything has come, or nothing more will.
    fn wait(&self) -> Result<End, TransferError> {
        let waiting = |state: &mut HeardState| {
            state.failed.is_none() && (state.left > 0 || state.end.is_none())
        };
        let state = self.changed.wait_while(lock(&self.state), waiting);
        let mut state = state.unwrap_or_else(PoisonError::into_inner);
        match state.end.take() {
            Some(end) if state.left == 0 => Ok(end),
            _ => Err(state.failed.take().unwrap_or(TransferError::Cancelled)),
        }
    }
}

/// Tells the sender which places are free again.
fn give_back(free: &Receiver<u32>, writer: &Mutex<Writer>) {
    while let Ok(first) = free.recv() {
        // All that have been freed meanwhile, in one message.
        let places = std::iter::once(first).chain(free.try_iter());
        let mut places: Vec<u8> = places.flat_map(u32::to_le_bytes).collect();
        if lock(writer).write(FREE, &[], &mut places).is_err() {
            return;
        }
    }
}

/// Runs of what is set: from, up to and without.
fn runs(set: &[bool]) -> Vec<(u32, u32)> {
    let mut runs: Vec<(u32, u32)> = Vec::new();
    for (at, _) in (0_u32..).zip(set).filter(|(_, set)| **set) {
        match runs.last_mut() {
            Some((_, end)) if *end == at => *end += 1,
            _ => runs.push((at, at + 1)),
        }
    }
    runs
}
