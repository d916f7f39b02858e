//! How does a KV block look outside the pool?
//!
//! A block travels layer by layer, as *records*: a header that says everything about the bytes
//! after it, those bytes, and a checksum of both. The other side may be another build, another op
//! set, a rank with other heads, or hostile; it converts what it can without losing a bit, and
//! refuses the rest with a reason.
//!
//! ```text
//!  0  magic "HKVB"        8  block_tokens u16    16  layer u32        28  heads u32
//!  4  version u16        10  tokens u16          20  kv_heads u32     32  head_dim u32
//!  6  dtype u8           12  layers u32          24  first_head u32   36  payload bytes u32
//!  7  key order u8                                                    40  payload, checksum
//! ```
//!
//! All numbers are little-endian. The payload has, for each head of the range, its tile as the pool
//! keeps it ([`format`](KvFormat) says how): the keys of `block_tokens` positions, then the values.
//! Of a block that is not full, positions from `tokens` on are zeros: what
//! the pool has there may be another tenant's. The checksum is the first 16 bytes of the BLAKE3
//! hash of header and payload; it finds damage, not forgery, which is up to the channel.
//!
//! Within one node a full block moves between tiers as its *body*: the payloads of its layers, one
//! after the other, without headers. Whoever keeps bodies keeps the layout beside them once.
//!
//! Left out on purpose: which block of which prompt this is. Blocks are named by their hash, which
//! covers the model; a layout only says whether the bytes fit.

mod carry;
mod format;
pub(crate) mod tile;

pub use carry::convert_layers;
pub(crate) use carry::{export, import, read_body, read_layers, take_layers, write_body};
pub(crate) use format::GROUP_DIMS;
pub use format::{Bf16, Element, F16, F32, Int8, KvDtype, KvFormat};

/// The version of the layout that this build writes, and the only one it reads.
pub const VERSION: u16 = 1;
/// Bytes of a record's header.
pub const HEADER_BYTES: usize = 40;
/// Bytes of a record's checksum.
pub const CHECKSUM_BYTES: usize = 16;

const MAGIC: [u8; 4] = *b"HKVB";
/// Upper bound of every count in a header: beyond any model, and small enough that the payload's
/// size cannot overflow.
const COUNT_MAX: u32 = 1 << 14;

/// The order in which the dimensions of a stored key follow one another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KeyOrder {
    /// As in the model's file: rope turns dimensions `2i` and `2i + 1`.
    Pairs,
    /// First the even ones, then the odd ones: rope turns `i` and `half + i`.
    Halves,
}

/// Some of the model's key and value heads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HeadRange {
    /// The first of them.
    pub first: usize,
    /// How many.
    pub count: usize,
}

impl HeadRange {
    fn end(self) -> usize {
        self.first + self.count
    }

    /// The heads that are in both.
    fn shared(self, other: HeadRange) -> Option<HeadRange> {
        let first = self.first.max(other.first);
        let count = self.end().min(other.end()).checked_sub(first)?;
        (count > 0).then_some(HeadRange { first, count })
    }
}

/// Everything that decides whether one pool's blocks can be read by another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockLayout {
    /// The format of keys and values.
    pub dtype: KvDtype,
    /// The order of a key's dimensions.
    pub key_order: KeyOrder,
    /// Positions in a block.
    pub block_tokens: usize,
    /// Layers of the model.
    pub layers: usize,
    /// Key and value heads of the whole model.
    pub kv_heads: usize,
    /// Those that this pool has.
    pub heads: HeadRange,
    /// Width of one head.
    pub head_dim: usize,
}

impl BlockLayout {
    /// Bytes of one record: one layer of one block.
    pub fn record_bytes(&self) -> usize {
        HEADER_BYTES + self.payload_bytes() + CHECKSUM_BYTES
    }

    /// Bytes of a block's body: the payloads of all its layers.
    pub fn body_bytes(&self) -> usize {
        self.layers * self.payload_bytes()
    }

    /// Bytes of one layer of a block.
    pub(crate) fn payload_bytes(&self) -> usize {
        self.heads.count * self.tile_bytes()
    }

    fn tile_bytes(&self) -> usize {
        self.dtype.tile_bytes(self.head_dim, self.block_tokens)
    }

    /// Whether its numbers are within the bounds of any pool's.
    pub(crate) fn is_sensible(&self) -> bool {
        let bound = 1..=COUNT_MAX as usize;
        let counts = [
            self.block_tokens,
            self.layers,
            self.kv_heads,
            self.heads.count,
            self.head_dim,
        ];
        counts.iter().all(|count| bound.contains(count))
            && self.heads.first < self.kv_heads
            && self.heads.end() <= self.kv_heads
            && self.dtype.takes(self.head_dim)
    }

    /// Whether a pool of layout `own` can take in what one of this layout gives, without losing a bit;
    /// and which heads of it.
    pub fn fits(&self, own: &BlockLayout) -> Result<HeadRange, LayoutError> {
        for (field, theirs, ours) in [
            ("block_tokens", self.block_tokens, own.block_tokens),
            ("layers", self.layers, own.layers),
            ("kv_heads", self.kv_heads, own.kv_heads),
            ("head_dim", self.head_dim, own.head_dim),
        ] {
            if theirs != ours {
                return Err(LayoutError::Differs {
                    field,
                    theirs,
                    ours,
                });
            }
        }
        if !self.dtype.is_within(own.dtype) {
            return Err(LayoutError::Narrower {
                theirs: self.dtype,
                ours: own.dtype,
            });
        }
        // Dimensions that share a scale in one order do not in the other.
        if own.dtype == KvDtype::Int8 && self.key_order != own.key_order {
            return Err(LayoutError::Order {
                theirs: self.key_order,
                ours: own.key_order,
            });
        }
        let heads = self.heads.shared(own.heads);
        heads.ok_or(LayoutError::Heads {
            theirs: self.heads,
            ours: own.heads,
        })
    }

    /// The same for whole blocks: every head of `own` must be in this layout.
    pub fn fits_whole(&self, own: &BlockLayout) -> Result<(), LayoutError> {
        if self.fits(own)? == own.heads {
            return Ok(());
        }
        Err(LayoutError::Heads {
            theirs: self.heads,
            ours: own.heads,
        })
    }
}

/// A record that has been read: whole, of this version, undamaged.
#[derive(Debug, Clone, Copy)]
pub struct Record<'a> {
    /// What its pool is like.
    pub layout: BlockLayout,
    /// The layer it holds.
    pub layer: usize,
    /// Leading positions that are computed.
    pub tokens: usize,
    payload: &'a [u8],
}

/// Why a record is not taken in. The pool is as it was.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LayoutError {
    /// Fewer or more bytes than the record says, or than any record has.
    #[error("a KV record of {found} bytes, expected {expected}")]
    Length {
        /// Bytes given.
        found: usize,
        /// Bytes that would do.
        expected: usize,
    },
    /// Something else altogether.
    #[error("not a KV record")]
    Magic,
    /// Another version of the layout.
    #[error("a KV record of version {found}; this node reads version {VERSION}")]
    Version {
        /// The version in the header.
        found: u16,
    },
    /// A header field with a value that no pool has.
    #[error("a KV record with {field} {found}")]
    Field {
        /// The field.
        field: &'static str,
        /// Its value.
        found: u32,
    },
    /// The bytes are not those that were written.
    #[error("a damaged KV record: the checksum differs")]
    Checksum,
    /// The other pool belongs to a model of another shape.
    #[error("the KV record's {field} is {theirs}, this node's is {ours}")]
    Differs {
        /// The field.
        field: &'static str,
        /// In the record.
        theirs: usize,
        /// Here.
        ours: usize,
    },
    /// The record is not of the layer asked for.
    #[error("a KV record of layer {found}, expected layer {expected}")]
    Layer {
        /// In the record.
        found: usize,
        /// Asked for.
        expected: usize,
    },
    /// No head of the record is one of this pool's.
    #[error("the KV record has heads {theirs:?}, this node {ours:?}")]
    Heads {
        /// In the record.
        theirs: HeadRange,
        /// Here.
        ours: HeadRange,
    },
    /// This pool keeps values in a format that would round the record's.
    #[error("the KV record's values are {theirs:?}; this node's {ours:?} would lose bits of them")]
    Narrower {
        /// In the record.
        theirs: KvDtype,
        /// Here.
        ours: KvDtype,
    },
    /// Keys in 8 bits, whose dimensions are in another order than this pool's.
    #[error("the KV record's keys share scales in order {theirs:?}, this node's in {ours:?}")]
    Order {
        /// In the record.
        theirs: KeyOrder,
        /// Here.
        ours: KeyOrder,
    },
    /// A value that attention could not mask.
    #[error("a KV record with values that are not finite")]
    NotFinite,
}

impl<'a> Record<'a> {
    /// Reads a record. Nothing about it is trusted; nothing is allocated.
    pub fn parse(bytes: &'a [u8]) -> Result<Record<'a>, LayoutError> {
        let Some((header, rest)) = bytes.split_first_chunk::<HEADER_BYTES>() else {
            return Err(LayoutError::Length {
                found: bytes.len(),
                expected: HEADER_BYTES,
            });
        };
        let (layout, layer, tokens) = read_header(header)?;
        if bytes.len() != layout.record_bytes() {
            return Err(LayoutError::Length {
                found: bytes.len(),
                expected: layout.record_bytes(),
            });
        }
        let (payload, checksum) = rest.split_at(layout.payload_bytes());
        if checksum != checksum_of(&bytes[..HEADER_BYTES + payload.len()]) {
            return Err(LayoutError::Checksum);
        }
        Ok(Record {
            layout,
            layer,
            tokens,
            payload,
        })
    }

    /// The stored bytes of one head's tile.
    fn tile(&self, head: usize) -> &'a [u8] {
        let len = self.layout.tile_bytes();
        &self.payload[(head - self.layout.heads.first) * len..][..len]
    }
}

fn read_header(header: &[u8; HEADER_BYTES]) -> Result<(BlockLayout, usize, usize), LayoutError> {
    let u16_at = |at: usize| u16::from_le_bytes([header[at], header[at + 1]]);
    let u32_at = |at: usize| u32::from(u16_at(at)) | u32::from(u16_at(at + 2)) << 16;
    if header[..4] != MAGIC {
        return Err(LayoutError::Magic);
    }
    if u16_at(4) != VERSION {
        return Err(LayoutError::Version { found: u16_at(4) });
    }
    let within = |field, found: u32, least: u32, most: u32| {
        if (least..=most).contains(&found) {
            return Ok(found as usize);
        }
        Err(LayoutError::Field { field, found })
    };
    let dtype = KvDtype::ALL[within("dtype", header[6].into(), 0, 3)?];
    let order = [KeyOrder::Pairs, KeyOrder::Halves][within("key order", header[7].into(), 0, 1)?];
    let block_tokens = within("block_tokens", u16_at(8).into(), 1, COUNT_MAX)?;
    let tokens = within("tokens", u16_at(10).into(), 1, block_tokens as u32)?;
    let layers = within("layers", u32_at(12), 1, COUNT_MAX)?;
    let layer = within("layer", u32_at(16), 0, layers as u32 - 1)?;
    let kv_heads = within("kv_heads", u32_at(20), 1, COUNT_MAX)?;
    let first = within("first_head", u32_at(24), 0, kv_heads as u32 - 1)?;
    let count = within("heads", u32_at(28), 1, (kv_heads - first) as u32)?;
    let head_dim = within("head_dim", u32_at(32), 2, COUNT_MAX)?;
    if !dtype.takes(head_dim) {
        return Err(LayoutError::Field {
            field: "head_dim",
            found: head_dim as u32,
        });
    }
    let layout = BlockLayout {
        dtype,
        key_order: order,
        block_tokens,
        layers,
        kv_heads,
        heads: HeadRange { first, count },
        head_dim,
    };
    let payload = u32_at(36);
    if payload as usize != layout.payload_bytes() {
        return Err(LayoutError::Field {
            field: "payload bytes",
            found: payload,
        });
    }
    Ok((layout, layer, tokens))
}

fn write_header(layout: &BlockLayout, layer: usize, tokens: usize, out: &mut Vec<u8>) {
    let dtype = match layout.dtype {
        KvDtype::F16 => 0,
        KvDtype::F32 => 1,
        KvDtype::Bf16 => 2,
        KvDtype::Int8 => 3,
    };
    let order = match layout.key_order {
        KeyOrder::Pairs => 0,
        KeyOrder::Halves => 1,
    };
    out.extend_from_slice(&MAGIC);
    out.extend_from_slice(&VERSION.to_le_bytes());
    out.extend_from_slice(&[dtype, order]);
    for count in [layout.block_tokens, tokens] {
        out.extend_from_slice(&(count as u16).to_le_bytes());
    }
    for count in [
        layout.layers,
        layer,
        layout.kv_heads,
        layout.heads.first,
        layout.heads.count,
        layout.head_dim,
        layout.payload_bytes(),
    ] {
        out.extend_from_slice(&(count as u32).to_le_bytes());
    }
}

fn checksum_of(bytes: &[u8]) -> [u8; CHECKSUM_BYTES] {
    let mut checksum = [0; CHECKSUM_BYTES];
    checksum.copy_from_slice(&blake3::hash(bytes).as_bytes()[..CHECKSUM_BYTES]);
    checksum
}
