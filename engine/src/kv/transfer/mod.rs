//! How do the KV blocks of a prompt get from the node that computed them to the node that decodes?
//!
//! The node that wants blocks connects to the one that has them, over a Unix socket where both are on
//! one host, else over TCP. Each proves to the other that it holds the node token ([`auth`]) and says
//! what its blocks are like; then the one names a transfer and the blocks that it lacks, and the other
//! sends each layer of them as soon as it is computed ([`part`]). Small messages travel as frames ([`wire`], [`message`]) on both
//! ways; what differs is how the bytes get across, which is what [`Window`] (the sending end) and
//! [`Inlet`] (the receiving end) hide:
//!
//! - [`tcp`]: within the frames, over several connections;
//! - [`shared`]: through memory that the receiver makes and both map; frames only say where.
//!
//! Frames are encrypted and authenticated for this one connection: damage is found, and so is whatever
//! somebody else put in. Whoever holds the node token can read what was recorded: it is no substitute for
//! a private network.
//!
//! A window bounds what is on its way: the sender has no more blocks in flight than the window has
//! places, and the receiver takes no more out of the socket than it has room for. The step loops at both
//! ends never wait: they put blocks into a window, or take them out of a queue; threads of [`server`] and
//! [`client`] do the rest.
//!
//! Blocks travel as the sender keeps them. A receiver that keeps them otherwise (wider values, another order
//! of the keys' dimensions, some of the heads) converts them, on its own thread; what would lose a bit is
//! refused by name.

pub mod auth;
pub mod client;
pub mod message;
pub mod part;
pub mod sender;
pub mod server;
pub mod shared;
pub mod tcp;
pub mod wire;

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;

use crate::sample::TokenLogprobs;
use part::Part;

/// Transfers that a node serves at a time, and that it asks for at a time; more are refused.
pub const TRANSFERS_MAX: usize = 64;
/// Memory for blocks on their way, of one transfer at one end.
pub const WINDOW_BYTES: usize = 8 << 20;
/// Places of a window: two at least, so that one fills while the other travels.
const WINDOW_PLACES_MIN: usize = 4;
/// And no more than so many.
const WINDOW_PLACES_MAX: usize = 64;

/// How many places a window for blocks of this size has.
pub fn window_places(body_bytes: usize) -> usize {
    (WINDOW_BYTES / body_bytes.max(1)).clamp(WINDOW_PLACES_MIN, WINDOW_PLACES_MAX)
}

/// Names one handover. Drawn at random by whoever arranges it, and used once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TransferId(pub [u8; 16]);

impl std::fmt::Display for TransferId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// Not 32 hexadecimal digits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not 32 hexadecimal digits")]
pub struct NoTransferId;

impl FromStr for TransferId {
    type Err = NoTransferId;

    fn from_str(text: &str) -> Result<Self, NoTransferId> {
        bytes_of_hex(text).map(Self).ok_or(NoTransferId)
    }
}

/// Exactly `N` bytes from lower- or upper-case hexadecimal digits.
fn bytes_of_hex<const N: usize>(text: &str) -> Option<[u8; N]> {
    let digits = text.as_bytes();
    let mut bytes = [0; N];
    if digits.len() != 2 * N {
        return None;
    }
    for (byte, pair) in bytes.iter_mut().zip(digits.chunks_exact(2)) {
        let digit = |c: u8| char::from(c).to_digit(16);
        *byte = u8::try_from(digit(pair[0])? << 4 | digit(pair[1])?).ok()?;
    }
    Some(bytes)
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Where a node gives out its blocks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Endpoint {
    /// `unix:/path`: a socket on this host.
    Unix(PathBuf),
    /// `tcp://address:port`.
    Tcp(SocketAddr),
}

impl std::fmt::Display for Endpoint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
            Self::Tcp(address) => write!(f, "tcp://{address}"),
        }
    }
}

/// Neither `unix:/path` nor `tcp://address:port`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("neither unix:/path nor tcp://address:port")]
pub struct NoEndpoint;

/// Bytes of a Unix socket's path, as the operating system has it.
const UNIX_PATH_BYTES_MAX: usize = 107;

impl FromStr for Endpoint {
    type Err = NoEndpoint;

    fn from_str(text: &str) -> Result<Self, NoEndpoint> {
        if let Some(path) = text.strip_prefix("unix:") {
            let fits = path.starts_with('/') && path.len() <= UNIX_PATH_BYTES_MAX;
            return fits.then(|| Self::Unix(path.into())).ok_or(NoEndpoint);
        }
        let address = text.strip_prefix("tcp://").ok_or(NoEndpoint)?;
        address.parse().map(Self::Tcp).map_err(|_| NoEndpoint)
    }
}

/// The first token of an answer, as the node that computed the prompt chose it.
#[derive(Clone, Debug, PartialEq)]
pub struct First {
    /// The token.
    pub token: u32,
    /// Its log probabilities, where the request asked for them.
    pub logprobs: Option<TokenLogprobs>,
}

/// What is told once every block has been.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct End {
    /// Where to go on from; none where the answer must have a form, which only its own node keeps.
    pub first: Option<First>,
    /// Prompt tokens that the node which computed the prompt had from its cache.
    pub cached_tokens: usize,
}

/// Why a node gives no blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reason {
    /// Another version of the protocol.
    Version,
    /// Not the same node token.
    Token,
    /// Blocks of another layout, or of other weights.
    Layout,
    /// Meant for another node, at this end or the other.
    WrongNode,
    /// No prefill named this transfer in time, or it is over.
    Unknown,
    /// The transfer was used before.
    Used,
    /// The transfer belongs to another cache scope.
    Scope,
    /// The transfer is of another prompt.
    Prompt,
    /// Too many transfers at once.
    Busy,
    /// The prefill failed, or its blocks had to be given up.
    GivenUp,
    /// A message that makes no sense.
    Malformed,
}

/// Why a transfer came to nothing.
#[derive(Debug, thiserror::Error)]
pub enum TransferError {
    /// The connection failed.
    #[error("the connection to the other node failed: {0}")]
    Io(#[from] io::Error),
    /// The other side refused.
    #[error("the other node refused ({reason:?}): {message}")]
    Refused {
        /// Why.
        reason: Reason,
        /// What it said, for the operator.
        message: String,
    },
    /// A frame's checksum is wrong.
    #[error("a damaged or forged frame")]
    Damaged,
    /// A frame that is longer than any of its kind.
    #[error("a frame of kind {kind} with {bytes} bytes")]
    Oversized {
        /// Its kind.
        kind: u8,
        /// What it says about its length.
        bytes: usize,
    },
    /// A message that makes no sense where it came.
    #[error("a message that makes no sense: {0}")]
    Malformed(&'static str),
    /// Nobody wants it any more.
    #[error("cancelled")]
    Cancelled,
    /// Nothing came for too long.
    #[error("nothing came within the time allowed")]
    Stalled,
    /// All of it took too long.
    #[error("it did not all come within the time allowed")]
    Slow,
    /// There is nowhere to connect to.
    #[error("none of the endpoints could be reached")]
    Unreachable,
    /// A value that attention could not mask.
    #[error("a block with values that are not finite")]
    NotFinite,
    /// No room in the pool.
    #[error("the KV pool has no room for the blocks")]
    PoolFull,
}

impl TransferError {
    pub(crate) fn refused(reason: Reason, message: impl Into<String>) -> Self {
        let message = message.into();
        Self::Refused { reason, message }
    }

    /// Whether another try may go better: the connection failed, and not the matter.
    fn is_passing(&self) -> bool {
        matches!(self, Self::Io(_) | Self::Damaged)
    }
}

/// The sending end's places for blocks on their way.
pub trait Window: Send + Sync + std::fmt::Debug {
    /// What carries the bytes, for metrics.
    fn medium(&self) -> Medium;
    /// A place that is free, if there is one.
    fn take(&self) -> Option<u32>;
    /// Has so many bytes written into a place that was taken; a place has room for a block's.
    fn fill(&self, place: u32, bytes: usize, fill: &mut dyn FnMut(&mut [u8]));
    /// Sends what is in a place.
    fn send(&self, place: u32, part: Part, to: &mut wire::Writer) -> io::Result<()>;
    /// Whether a quarter of the places are free: worth waking a step loop for.
    fn has_room(&self) -> bool;
    /// The receiver is done with a place. False if it had no such place.
    fn give_back(&self, place: u32) -> bool;
}

/// A part's bytes at the receiving end. Its place is given back when it is dropped.
pub trait Payload: Send + std::fmt::Debug {
    /// The bytes.
    fn bytes(&self) -> &[u8];
}

/// The receiving end: takes a part's bytes from where they came.
pub trait Inlet: Send + Sync + std::fmt::Debug {
    /// Reads the rest of a part's frame, after its head. Waits for room, as long as `wanted` says.
    fn receive(
        &self,
        head: wire::Head,
        from: &mut wire::Reader,
        wanted: &dyn Fn() -> bool,
    ) -> Result<(Part, Box<dyn Payload>), TransferError>;
}

/// What carries the bytes of blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Medium {
    /// Frames over TCP, or over a Unix socket without shared memory.
    Tcp,
    /// Memory that both nodes map.
    Shared,
}

impl Medium {
    /// The label in metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Tcp => "tcp",
            Self::Shared => "shared",
        }
    }
}

#[cfg(test)]
mod tests;
