//! How does a node give out its blocks?
//!
//! A thread accepts connections, and each has a thread of its own: it greets, reads what is wanted, asks
//! the step loop for it, and then hears what the other node says, while another one sends. Who does not
//! prove that it holds the node token gets no further than the greeting, within seconds and few bytes.
//! A transfer is known to its connections by a key that only its receiver was told.

use std::collections::HashMap;
use std::io;
use std::net::TcpListener;
use std::os::unix::net::UnixListener;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use cache_index::block::{Namespace, hash_chain};

use super::auth::{Identity, Session, accept};
use super::message::{self, Message};
use super::sender::Sender;
use super::shared::Places;
use super::tcp::Buffers;
use super::wire::{FREE, MESSAGE, MESSAGE_BYTES_MAX, Reader, Socket};
use super::{
    Reason, TRANSFERS_MAX, TransferError, TransferId, WINDOW_PLACES_MAX, Window, bytes_of_hex, hex,
};
use crate::engine::{Accepted, Asked, AttachRequest, HOLD_MAX, Handle};
use crate::kv::table::Scope;

/// How long a greeting may take, all of it.
const GREETING_TIMEOUT: Duration = Duration::from_secs(5);
/// How long the other node may take nothing of what is sent.
const WRITE_TIMEOUT: Duration = Duration::from_secs(10);
/// What the receiver says comes when it will; how long that may be is up to the blocks' deadline, which
/// closes the connection.
const HEAR_TIMEOUT: Duration = Duration::from_secs(3600);
/// Connections of one kind at a time.
const CONNECTIONS_MAX: usize = 4 * TRANSFERS_MAX;
/// Of these, those that have not proved themselves: nodes take a round trip or two for it.
const STRANGERS_MAX: usize = TRANSFERS_MAX;
/// Bytes of a message about free places: all that a window has.
const FREED_BYTES_MAX: usize = 4 * WINDOW_PLACES_MAX;
/// After failing to accept (out of file descriptors), how long until the next try.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// Connections of one kind: whoever reaches the TCP port must not be in the way of nodes on this host.
#[derive(Default)]
struct Counts {
    all: Arc<AtomicUsize>,
    /// Those that have not proved themselves yet.
    strangers: Arc<AtomicUsize>,
}

/// What every connection needs.
pub struct Desk {
    identity: Identity,
    /// The model id, which block hashes cover.
    model_id: Arc<str>,
    engine: Handle,
    tcp: Counts,
    unix: Counts,
    /// Transfers by the key that opens further connections.
    open: Mutex<HashMap<[u8; 16], Weak<Sender>>>,
}

impl std::fmt::Debug for Desk {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Desk")
            .field("identity", &self.identity)
            .finish_non_exhaustive()
    }
}

impl Desk {
    /// For the blocks of this engine.
    pub fn new(identity: Identity, model_id: Arc<str>, engine: Handle) -> Arc<Self> {
        Arc::new(Self {
            identity,
            model_id,
            engine,
            tcp: Counts::default(),
            unix: Counts::default(),
            open: Mutex::default(),
        })
    }

    /// Serves whoever connects, for as long as the process lives.
    pub fn serve_tcp(self: &Arc<Self>, listener: TcpListener) -> io::Result<()> {
        self.serve("kv-tcp", move || {
            let (stream, _) = listener.accept()?;
            stream.set_nodelay(true)?;
            Ok(Socket::Tcp(stream))
        })
    }

    /// The same for nodes on this host.
    pub fn serve_unix(self: &Arc<Self>, listener: UnixListener) -> io::Result<()> {
        self.serve("kv-unix", move || Ok(Socket::Unix(listener.accept()?.0)))
    }

    fn serve(
        self: &Arc<Self>,
        name: &str,
        accept: impl Fn() -> io::Result<Socket> + Send + 'static,
    ) -> io::Result<()> {
        let desk = Arc::clone(self);
        let run = move || {
            loop {
                match accept() {
                    Ok(socket) => desk.welcome(socket),
                    Err(error) => {
                        tracing::warn!(%error, "could not accept a KV connection");
                        std::thread::sleep(ACCEPT_PAUSE);
                    }
                }
            }
        };
        std::thread::Builder::new()
            .name(name.to_owned())
            .spawn(run)
            .map(drop)
    }

    fn welcome(self: &Arc<Self>, socket: Socket) {
        let counts = match &socket {
            Socket::Tcp(_) => &self.tcp,
            Socket::Unix(_) => &self.unix,
        };
        let (place, stranger) = (Place::take(&counts.all), Place::take(&counts.strangers));
        if place.count > CONNECTIONS_MAX || stranger.count > STRANGERS_MAX {
            tracing::warn!(
                most = CONNECTIONS_MAX,
                strangers_most = STRANGERS_MAX,
                "too many KV connections; one is closed"
            );
            return;
        }
        let desk = Arc::clone(self);
        let run = move || {
            if let Err(error) = desk.connection(socket, stranger) {
                tracing::info!(%error, "a KV connection ended");
            }
            drop(place);
        };
        let spawned = std::thread::Builder::new()
            .name("kv-send".into())
            .spawn(run);
        if let Err(error) = spawned {
            tracing::warn!(%error, "no thread for a KV connection");
        }
    }

    fn connection(&self, socket: Socket, stranger: Place) -> Result<(), TransferError> {
        socket.set_timeouts(GREETING_TIMEOUT, WRITE_TIMEOUT)?;
        let mut session = accept(socket, &self.identity, GREETING_TIMEOUT)?;
        // Others are greeted meanwhile.
        drop(stranger);
        session
            .reader
            .socket()
            .set_timeouts(GREETING_TIMEOUT, WRITE_TIMEOUT)?;
        let asked = Message::read(&mut session.reader, MESSAGE_BYTES_MAX)?;
        let outcome = match asked {
            Message::Attach(attach) => self.attach(&mut session, attach),
            Message::Fetch(fetch) => self.fetch(&mut session, fetch),
            Message::Join { key } => self.join(&mut session, &key),
            other => Err(other.unexpected()),
        };
        if let Err(TransferError::Refused { reason, message }) = &outcome {
            let (reason, message) = (*reason, message.clone());
            // Whoever is refused may be gone.
            let _ = Message::Refused { reason, message }.write(&mut session.writer);
        }
        outcome
    }

    fn attach(&self, session: &mut Session, attach: message::Attach) -> Result<(), TransferError> {
        let malformed = TransferError::Malformed;
        let id: TransferId = attach
            .transfer_id
            .parse()
            .map_err(|_| malformed("a transfer id"))?;
        let key = attach
            .key
            .as_deref()
            .map(|key| bytes_of_hex(key).ok_or(malformed("a key")));
        let asked = Asked::HandOver {
            id,
            key: key.transpose()?,
            prompt: bytes_of_hex(&attach.prompt).ok_or(malformed("a prompt's digest"))?,
            blocks: attach.blocks,
            salt: attach.salt.map(Arc::from),
        };
        let wait = Duration::from_millis(attach.wait_ms).min(HOLD_MAX);
        self.give(session, attach.places, wait, |sender, peer| AttachRequest {
            asked,
            missing: attach.missing,
            receiver: peer,
            until: Instant::now() + wait,
            sender,
        })
    }

    fn fetch(&self, session: &mut Session, fetch: message::Fetch) -> Result<(), TransferError> {
        let salt: Option<Arc<str>> = fetch.salt.map(Arc::from);
        let namespace = Namespace::new(&self.model_id, None, salt.as_deref());
        // Whoever has the tokens may have the blocks: hashes alone say nothing about a scope.
        let chain = hash_chain(&namespace, &fetch.tokens);
        let missing = fetch.missing;
        let scope = Scope { namespace, salt };
        let asked = Asked::Cached {
            scope,
            chain,
            tokens: fetch.tokens,
        };
        let wait = GREETING_TIMEOUT;
        self.give(session, fetch.places, wait, |sender, peer| AttachRequest {
            asked,
            missing,
            receiver: peer,
            until: Instant::now() + wait,
            sender,
        })
    }

    /// Asks the step loop, and carries out what it grants.
    fn give(
        &self,
        session: &mut Session,
        places: u32,
        wait: Duration,
        request: impl FnOnce(Arc<Sender>, String) -> AttachRequest,
    ) -> Result<(), TransferError> {
        let body_bytes = self.identity.layout.body_bytes();
        let window: Arc<dyn Window> = match session.reader.socket() {
            Socket::Unix(stream) if places > 0 => {
                Arc::new(Places::receive(stream, places, body_bytes)?)
            }
            _ => Arc::new(Buffers::new(body_bytes)),
        };
        let engine = self.engine.clone();
        let sender = Arc::new(Sender::new(window, Box::new(move || engine.wake())));
        let (answer, granted) = sync_channel(1);
        let request = request(Arc::clone(&sender), session.peer.clone());
        if !self.engine.kv_attach(request, answer) {
            return Err(TransferError::refused(
                Reason::GivenUp,
                "the node is shutting down",
            ));
        }
        // The step loop answers by then; a second more, since it may be within a step.
        let accepted = match granted.recv_timeout(wait + GREETING_TIMEOUT) {
            Ok(accepted) => accepted?,
            Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {
                return Err(TransferError::refused(
                    Reason::GivenUp,
                    "the node does not answer",
                ));
            }
        };
        let given = self.send(session, &sender, &accepted);
        sender.close();
        self.engine.kv_lost(accepted.id, sender);
        given
    }

    fn send(
        &self,
        session: &mut Session,
        sender: &Arc<Sender>,
        accepted: &Accepted,
    ) -> Result<(), TransferError> {
        let _open = Open::new(self, accepted.key, sender);
        let answer = Message::Accepted {
            key: hex(&accepted.key),
            blocks: accepted.blocks,
        };
        answer.write(&mut session.writer)?;
        session
            .reader
            .socket()
            .set_timeouts(HEAR_TIMEOUT, WRITE_TIMEOUT)?;
        let (reader, writer) = (&mut session.reader, &mut session.writer);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                if let Err(error) = sender.run(writer) {
                    tracing::debug!(%error, "sending KV blocks ended");
                }
            });
            let heard = self.hear(reader, sender, accepted.id);
            // The other thread ends by this.
            sender.close();
            heard
        })
    }

    /// Hears what the receiver says: places that are free again, and that it has everything.
    fn hear(
        &self,
        reader: &mut Reader,
        sender: &Sender,
        id: TransferId,
    ) -> Result<(), TransferError> {
        loop {
            let head = reader.head()?;
            match head.kind {
                FREE => {
                    let places = reader.body(head, FREED_BYTES_MAX)?;
                    let (places, rest) = places.as_chunks();
                    let given = |place: &[u8; 4]| sender.give_back(u32::from_le_bytes(*place));
                    if !rest.is_empty() || !places.iter().all(given) {
                        return Err(TransferError::Malformed("places that it did not have"));
                    }
                }
                MESSAGE => match Message::decode(&reader.body(head, 4096)?)? {
                    Message::Received => {
                        self.engine.kv_received(id);
                        return Ok(());
                    }
                    other => return Err(other.unexpected()),
                },
                _ => {
                    return Err(TransferError::Malformed(
                        "a frame that receivers do not send",
                    ));
                }
            }
        }
    }

    fn join(&self, session: &mut Session, key: &str) -> Result<(), TransferError> {
        let key = bytes_of_hex(key).ok_or(TransferError::Malformed("a key"))?;
        let sender = self.lock().get(&key).and_then(Weak::upgrade);
        let Some(sender) = sender else {
            let message = "there is no such transfer any more";
            return Err(TransferError::refused(Reason::Unknown, message));
        };
        let answer = Message::Accepted {
            key: hex(&key),
            blocks: 0,
        };
        answer.write(&mut session.writer)?;
        Ok(sender.run(&mut session.writer)?)
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<[u8; 16], Weak<Sender>>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A transfer that further connections may join, while it lasts.
struct Open<'a>(&'a Desk, [u8; 16]);

impl<'a> Open<'a> {
    fn new(desk: &'a Desk, key: [u8; 16], sender: &Arc<Sender>) -> Self {
        desk.lock().insert(key, Arc::downgrade(sender));
        Self(desk, key)
    }
}

impl Drop for Open<'_> {
    fn drop(&mut self) {
        self.0.lock().remove(&self.1);
    }
}

/// Counts a connection while it is open.
struct Place {
    places: Arc<AtomicUsize>,
    count: usize,
}

impl Place {
    fn take(places: &Arc<AtomicUsize>) -> Self {
        let places = Arc::clone(places);
        let count = places.fetch_add(1, Ordering::Relaxed) + 1;
        Self { places, count }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.places.fetch_sub(1, Ordering::Relaxed);
    }
}
