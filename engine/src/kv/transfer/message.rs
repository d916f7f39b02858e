//! What do two nodes say to each other besides blocks?
//!
//! JSON, so that a capture can be read; numbers that must not lose a bit travel as their bits. The reader
//! is told how long a message may be, and a message that does not fit its type is an error like any other.

use serde::{Deserialize, Serialize};

use super::wire::{MESSAGE, Reader, Writer};
use super::{End, First, Reason, TransferError};
use crate::kv::layout::{BlockLayout, HeadRange, KeyOrder, KvDtype};
use crate::sample::TokenLogprobs;

/// Log probabilities of one place at most: as many as the API gives.
const TOP_MAX: usize = 64;

/// A message.
#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(crate) enum Message {
    /// Who speaks, and what its blocks are like.
    Hello(Hello),
    /// The proof that the node token is known.
    Proof { mac: String },
    /// No, and why; nothing follows.
    Refused { reason: Reason, message: String },
    /// Asks for the blocks of a transfer.
    Attach(Attach),
    /// Asks for what is cached of a prompt.
    Fetch(Fetch),
    /// Adds a connection to a transfer.
    Join { key: String },
    /// Yes. `key` opens more connections, and the same transfer again after a failure.
    Accepted { key: String, blocks: u32 },
    /// The prompt is still being computed.
    Alive,
    /// All blocks have been sent, on this connection or another.
    End {
        first: Option<FirstBits>,
        cached_tokens: u64,
    },
    /// The receiver has everything.
    Received,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Hello {
    pub(crate) protocol: String,
    pub(crate) version: u16,
    pub(crate) engine_id: String,
    pub(crate) nonce: String,
    pub(crate) model: String,
    pub(crate) layout: Layout,
}

/// A block layout, field by field, so that a refusal can name the one that differs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Layout {
    pub(crate) version: u16,
    pub(crate) dtype: String,
    pub(crate) key_order: String,
    pub(crate) block_tokens: usize,
    pub(crate) layers: usize,
    pub(crate) kv_heads: usize,
    pub(crate) first_head: usize,
    pub(crate) heads: usize,
    pub(crate) head_dim: usize,
    pub(crate) body_bytes: usize,
}

impl Layout {
    pub(crate) fn new(layout: &BlockLayout) -> Self {
        let key_order = match layout.key_order {
            KeyOrder::Pairs => "pairs",
            KeyOrder::Halves => "halves",
        };
        Self {
            version: crate::kv::layout::VERSION,
            dtype: layout.dtype.as_str().to_owned(),
            key_order: key_order.to_owned(),
            block_tokens: layout.block_tokens,
            layers: layout.layers,
            kv_heads: layout.kv_heads,
            first_head: layout.heads.first,
            heads: layout.heads.count,
            head_dim: layout.head_dim,
            body_bytes: layout.body_bytes(),
        }
    }

    /// What it says, if a pool can be like that and its blocks have just that many bytes.
    pub(crate) fn read(&self) -> Option<BlockLayout> {
        let layout = BlockLayout {
            dtype: KvDtype::named(&self.dtype)?,
            key_order: match &*self.key_order {
                "pairs" => KeyOrder::Pairs,
                "halves" => KeyOrder::Halves,
                _ => return None,
            },
            block_tokens: self.block_tokens,
            layers: self.layers,
            kv_heads: self.kv_heads,
            heads: HeadRange {
                first: self.first_head,
                count: self.heads,
            },
            head_dim: self.head_dim,
        };
        let known = self.version == crate::kv::layout::VERSION;
        (known && layout.is_sensible() && layout.body_bytes() == self.body_bytes).then_some(layout)
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Attach {
    pub(crate) transfer_id: String,
    /// From an earlier connection of the same transfer.
    pub(crate) key: Option<String>,
    pub(crate) salt: Option<String>,
    /// Of all tokens of the prompt, see [`crate::kv::transfer::auth::prompt_digest`].
    pub(crate) prompt: String,
    pub(crate) blocks: u32,
    /// Runs of blocks that the receiver lacks: from, up to and without.
    pub(crate) missing: Vec<(u32, u32)>,
    /// How long to wait for the prefill.
    pub(crate) wait_ms: u64,
    /// Places in the shared memory that comes with the next byte; 0 for none.
    pub(crate) places: u32,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Fetch {
    pub(crate) salt: Option<String>,
    pub(crate) tokens: Vec<u32>,
    /// Runs of blocks that the receiver lacks: from, up to and without.
    pub(crate) missing: Vec<(u32, u32)>,
    pub(crate) places: u32,
}

/// A first token, its numbers as bits.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct FirstBits {
    pub(crate) token: u32,
    pub(crate) chosen: Option<u32>,
    pub(crate) top: Vec<(u32, u32)>,
}

impl FirstBits {
    pub(crate) fn new(first: &First) -> Self {
        let logprobs = first.logprobs.as_ref();
        let top = logprobs.map_or(&[][..], |l| &l.top);
        Self {
            token: first.token,
            chosen: logprobs.map(|l| l.chosen.to_bits()),
            top: top.iter().map(|(id, p)| (*id, p.to_bits())).collect(),
        }
    }

    fn first(self) -> Result<First, TransferError> {
        let top: Vec<_> = self
            .top
            .into_iter()
            .map(|(id, p)| (id, f32::from_bits(p)))
            .collect();
        let chosen = self.chosen.map(f32::from_bits);
        let numbers = top.iter().map(|(_, p)| *p).chain(chosen);
        if top.len() > TOP_MAX || numbers.into_iter().any(f32::is_nan) {
            return Err(TransferError::Malformed("log probabilities"));
        }
        Ok(First {
            token: self.token,
            logprobs: chosen.map(|chosen| TokenLogprobs { chosen, top }),
        })
    }
}

impl Message {
    pub(crate) fn end(end: &End) -> Self {
        Self::End {
            first: end.first.as_ref().map(FirstBits::new),
            cached_tokens: end.cached_tokens as u64,
        }
    }

    pub(crate) fn end_of(
        first: Option<FirstBits>,
        cached_tokens: u64,
    ) -> Result<End, TransferError> {
        Ok(End {
            first: first.map(FirstBits::first).transpose()?,
            cached_tokens: usize::try_from(cached_tokens).unwrap_or(usize::MAX),
        })
    }

    /// A refusal as an error, anything else as "makes no sense here".
    pub(crate) fn unexpected(self) -> TransferError {
        match self {
            Self::Refused { reason, message } => {
                // What another node says ends up in logs and answers.
                let message = message
                    .chars()
                    .filter(|c| !c.is_control())
                    .take(512)
                    .collect();
                TransferError::Refused { reason, message }
            }
            _ => TransferError::Malformed("an answer to another question"),
        }
    }

    /// The bytes of a message.
    pub(crate) fn encode(&self) -> Vec<u8> {
        serde_json::to_vec(self).expect("messages have only text keys")
    }

    pub(crate) fn decode(body: &[u8]) -> Result<Self, TransferError> {
        serde_json::from_slice(body).map_err(|_| TransferError::Malformed("no message of ours"))
    }

    pub(crate) fn write(&self, to: &mut Writer) -> std::io::Result<()> {
        to.write(MESSAGE, &[], &mut self.encode())
    }

    /// Reads one message of at most so many bytes.
    pub(crate) fn read(from: &mut Reader, most: usize) -> Result<Self, TransferError> {
        let head = from.head()?;
        if head.kind != MESSAGE {
            return Err(TransferError::Malformed("no message where one must come"));
        }
        Self::decode(&from.body(head, most)?)
    }
}
