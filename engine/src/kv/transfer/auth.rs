//! Who is at the other end, and do its blocks fit?
//!
//! Each side sends a hello with a nonce, its engine id and its layout. Then the one that connected proves
//! that it knows the node token, then the other one does: a MAC (BLAKE3, keyed by a key that is derived
//! from the token) over both hellos and the prover's part. The token never travels, a recorded proof is of
//! no use with another nonce, and a proof of one part is none of the other. From the same two hellos come
//! the keys of the connection's two directions. Only then are the layouts compared, and refused by name
//! where one pool could not read the other's blocks.

use std::time::{Duration, Instant};

use cache_index::block::{BLOCK_TOKENS, BlockHash};

use super::message::{Hello, Layout, Message};
use super::wire::{GREETING_BYTES_MAX, Reader, Socket, Writer};
use super::{Reason, TransferError, bytes_of_hex, hex};
use crate::kv::layout::BlockLayout;

/// The version that this build speaks, and the only one.
pub const VERSION: u16 = 3;
const PROTOCOL: &str = "homing-kv-transfer";
/// Characters of an engine id.
pub const ENGINE_ID_CHARS_MAX: usize = 128;

/// Who a node is to others.
#[derive(Clone)]
pub struct Identity {
    /// Names this life of the process.
    pub engine_id: String,
    /// What its blocks are like.
    pub layout: BlockLayout,
    /// Tells its weights from others.
    pub model: [u8; 32],
    /// Derived from the node token.
    pub key: [u8; 32],
}

impl std::fmt::Debug for Identity {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Identity")
            .field("engine_id", &self.engine_id)
            .field("layout", &self.layout)
            .finish_non_exhaustive()
    }
}

impl Identity {
    fn hello(&self) -> Hello {
        Hello {
            protocol: PROTOCOL.to_owned(),
            version: VERSION,
            engine_id: self.engine_id.clone(),
            nonce: hex(&rand::random::<[u8; 16]>()),
            model: hex(&self.model),
            layout: Layout::new(&self.layout),
        }
    }

    fn check_greeting(&self, theirs: &Hello) -> Result<(), TransferError> {
        if theirs.protocol != PROTOCOL || theirs.version != VERSION {
            let message = format!(
                "this node speaks {PROTOCOL} version {VERSION}, the other {} version {}: run the same \
                 release on both",
                theirs.protocol, theirs.version
            );
            return Err(TransferError::refused(Reason::Version, message));
        }
        let length = theirs.engine_id.chars().count();
        if !(1..=ENGINE_ID_CHARS_MAX).contains(&length) {
            return Err(TransferError::Malformed(
                "an engine id of no sensible length",
            ));
        }
        Ok(())
    }

    /// What the other node's blocks are like, if what travels can be read where it goes.
    fn check_layout(&self, theirs: &Hello, flow: Flow) -> Result<BlockLayout, TransferError> {
        let refused = |message| TransferError::refused(Reason::Layout, message);
        let layout = theirs.layout.read();
        let layout = layout.ok_or_else(|| {
            refused(
                "the nodes lay KV blocks out in different versions: run the same release on both"
                    .to_owned(),
            )
        })?;
        let fits = match flow {
            Flow::ToUs => layout.fits_whole(&self.layout),
            Flow::ToThem => self.layout.fits_whole(&layout),
        };
        fits.map_err(|error| {
            refused(format!(
                "{error}: serve the same model with the same --ops, --kv-dtype and ranks on both"
            ))
        })?;
        if theirs.model != hex(&self.model) {
            return Err(refused(
                "the nodes serve different weights: give both the same model file".to_owned(),
            ));
        }
        Ok(layout)
    }
}

/// Which way blocks will travel.
#[derive(Clone, Copy)]
enum Flow {
    ToUs,
    ToThem,
}

/// A connection whose other end is known.
#[derive(Debug)]
pub struct Session {
    /// To read from.
    pub reader: Reader,
    /// To write to.
    pub writer: Writer,
    /// The other node's engine id.
    pub peer: String,
    /// What its blocks are like.
    pub peer_layout: BlockLayout,
}

/// What both sides have said, hashed.
struct Transcript([u8; 32]);

impl Transcript {
    fn new(connecting: &[u8], accepting: &[u8]) -> Self {
        let mut hasher = blake3::Hasher::new();
        for hello in [connecting, accepting] {
            hasher.update(&(hello.len() as u64).to_le_bytes());
            hasher.update(hello);
        }
        Self(*hasher.finalize().as_bytes())
    }

    fn mac(&self, key: &[u8; 32], part: &str) -> blake3::Hash {
        let mut hasher = blake3::Hasher::new_keyed(key);
        hasher.update(part.as_bytes());
        hasher.update(&self.0);
        hasher.finalize()
    }
}

const CONNECTING: &str = "proof of the connecting node";
const ACCEPTING: &str = "proof of the accepting node";
const KEY_TO_ACCEPTING: &str = "key from the connecting node";
const KEY_TO_CONNECTING: &str = "key from the accepting node";

fn hello_of(body: &[u8]) -> Result<Hello, TransferError> {
    match Message::decode(body)? {
        Message::Hello(hello) => Ok(hello),
        other => Err(other.unexpected()),
    }
}

fn read_raw(reader: &mut Reader) -> Result<Vec<u8>, TransferError> {
    let head = reader.head()?;
    if head.kind != super::wire::MESSAGE {
        return Err(TransferError::Malformed("no greeting"));
    }
    reader.body(head, GREETING_BYTES_MAX)
}

fn proves(message: Message, expected: &blake3::Hash) -> Result<(), TransferError> {
    let Message::Proof { mac } = message else {
        return Err(message.unexpected());
    };
    let mac = bytes_of_hex(&mac).ok_or(TransferError::Malformed("a proof that is none"))?;
    // Compares in constant time.
    if *expected == blake3::Hash::from_bytes(mac) {
        return Ok(());
    }
    let message = "the nodes do not hold the same node token";
    Err(TransferError::refused(Reason::Token, message))
}

/// The side that connected. The socket has its time limits already.
pub fn connect(socket: Socket, own: &Identity) -> Result<Session, TransferError> {
    let mut writer = Writer::new(socket.try_clone()?);
    let mut reader = Reader::new(socket);
    let ours = Message::Hello(own.hello()).encode();
    writer.write(super::wire::MESSAGE, &[], &mut ours.clone())?;
    let theirs = read_raw(&mut reader)?;
    let hello = hello_of(&theirs)?;
    own.check_greeting(&hello)?;
    let transcript = Transcript::new(&ours, &theirs);
    let mac = transcript.mac(&own.key, CONNECTING).to_string();
    Message::Proof { mac }.write(&mut writer)?;
    let answer = Message::read(&mut reader, GREETING_BYTES_MAX)?;
    proves(answer, &transcript.mac(&own.key, ACCEPTING))?;
    let peer_layout = own.check_layout(&hello, Flow::ToUs)?;
    Ok(Session {
        reader: reader.keyed(*transcript.mac(&own.key, KEY_TO_CONNECTING).as_bytes()),
        writer: writer.keyed(*transcript.mac(&own.key, KEY_TO_ACCEPTING).as_bytes()),
        peer: hello.engine_id,
        peer_layout,
    })
}

/// The side that was connected to. The other one is told why it is refused; it has so long to prove
/// itself, all in all.
pub fn accept(socket: Socket, own: &Identity, time: Duration) -> Result<Session, TransferError> {
    let mut writer = Writer::new(socket.try_clone()?);
    let mut reader = Reader::new(socket).until(Some(Instant::now() + time));
    let greeted = greet(&mut reader, &mut writer, own);
    if let Err(TransferError::Refused { reason, message }) = &greeted {
        let (reason, message) = (*reason, message.clone());
        // Whoever is refused may be gone.
        let _ = Message::Refused { reason, message }.write(&mut writer);
    }
    let (transcript, peer, peer_layout) = greeted?;
    let reader = reader.until(None);
    Ok(Session {
        reader: reader.keyed(*transcript.mac(&own.key, KEY_TO_ACCEPTING).as_bytes()),
        writer: writer.keyed(*transcript.mac(&own.key, KEY_TO_CONNECTING).as_bytes()),
        peer,
        peer_layout,
    })
}

fn greet(
    reader: &mut Reader,
    writer: &mut Writer,
    own: &Identity,
) -> Result<(Transcript, String, BlockLayout), TransferError> {
    let theirs = read_raw(reader)?;
    let hello = hello_of(&theirs)?;
    own.check_greeting(&hello)?;
    let ours = Message::Hello(own.hello()).encode();
    writer.write(super::wire::MESSAGE, &[], &mut ours.clone())?;
    let transcript = Transcript::new(&theirs, &ours);
    let answer = Message::read(reader, GREETING_BYTES_MAX)?;
    proves(answer, &transcript.mac(&own.key, CONNECTING))?;
    let layout = own.check_layout(&hello, Flow::ToThem)?;
    let mac = transcript.mac(&own.key, ACCEPTING).to_string();
    Message::Proof { mac }.write(writer)?;
    Ok((transcript, hello.engine_id, layout))
}

/// Stands for all tokens of a prompt in its scope: the last full block's hash, which covers model, scope
/// and all tokens up to there, and the tokens after it.
pub fn prompt_digest(chain: &[BlockHash], prompt: &[u32]) -> [u8; 16] {
    let full = prompt.len() / BLOCK_TOKENS;
    let last = full.checked_sub(1).and_then(|last| chain.get(last));
    let mut hasher = blake3::Hasher::new_derive_key("homing 2026-11 prompt digest");
    hasher.update(&last.unwrap_or(&BlockHash::ROOT).0);
    for token in &prompt[full * BLOCK_TOKENS..] {
        hasher.update(&token.to_le_bytes());
    }
    let mut digest = [0; 16];
    digest.copy_from_slice(&hasher.finalize().as_bytes()[..16]);
    digest
}
