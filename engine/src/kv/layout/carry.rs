//! The way of a block's values from the pool into a record, and from a record into a pool.

use std::ops::Range;

use super::{
    BlockLayout, HeadRange, KeyOrder, KvDtype, LayoutError, Record, checksum_of, write_header,
};
use crate::kv::storage::{BLOCK_TOKENS, BlockId, KvStorage};

/// A value that a pool stores.
pub trait KvValue: Copy + Default + Send + Sync {
    /// Its format.
    const DTYPE: KvDtype;

    /// Appends values as they travel.
    fn write(values: &[Self], out: &mut Vec<u8>);

    /// Writes values as they travel over `to`, which has room for just them.
    fn copy_out(values: &[Self], to: &mut [u8]);

    /// Reads values back that [`KvValue::copy_out`] wrote.
    fn copy_in(from: &[u8], values: &mut [Self]);

    /// Whether attention can mask it.
    fn is_finite(self) -> bool;

    /// The value at some place of a record's tile; `None` if it is not finite or does not fit.
    fn read(dtype: KvDtype, tile: &[u8], place: usize) -> Option<Self>;
}

fn half_at(tile: &[u8], place: usize) -> half::f16 {
    half::f16::from_le_bytes([tile[2 * place], tile[2 * place + 1]])
}

/// The bits of an f16.
impl KvValue for u16 {
    const DTYPE: KvDtype = KvDtype::F16;

    fn write(values: &[u16], out: &mut Vec<u8>) {
        out.extend(values.iter().flat_map(|bits| bits.to_le_bytes()));
    }

    fn copy_out(values: &[u16], to: &mut [u8]) {
        let (to, _rest) = to.as_chunks_mut();
        to.iter_mut()
            .zip(values)
            .for_each(|(to, bits)| *to = bits.to_le_bytes());
    }

    fn copy_in(from: &[u8], values: &mut [u16]) {
        let (from, _rest) = from.as_chunks();
        values
            .iter_mut()
            .zip(from)
            .for_each(|(value, bytes)| *value = u16::from_le_bytes(*bytes));
    }

    fn is_finite(self) -> bool {
        const EXPONENT: u16 = 0x7c00;
        self & EXPONENT != EXPONENT
    }

    fn read(dtype: KvDtype, tile: &[u8], place: usize) -> Option<u16> {
        match dtype {
            KvDtype::F16 => {
                let value = half_at(tile, place);
                value.is_finite().then(|| value.to_bits())
            }
            KvDtype::F32 => None,
        }
    }
}

impl KvValue for f32 {
    const DTYPE: KvDtype = KvDtype::F32;

    fn write(values: &[f32], out: &mut Vec<u8>) {
        out.extend(values.iter().flat_map(|value| value.to_le_bytes()));
    }

    fn copy_out(values: &[f32], to: &mut [u8]) {
        let (to, _rest) = to.as_chunks_mut();
        to.iter_mut()
            .zip(values)
            .for_each(|(to, value)| *to = value.to_le_bytes());
    }

    fn copy_in(from: &[u8], values: &mut [f32]) {
        let (from, _rest) = from.as_chunks();
        values
            .iter_mut()
            .zip(from)
            .for_each(|(value, bytes)| *value = f32::from_le_bytes(*bytes));
    }

    fn is_finite(self) -> bool {
        f32::is_finite(self)
    }

    fn read(dtype: KvDtype, tile: &[u8], place: usize) -> Option<f32> {
        let value = match dtype {
            KvDtype::F16 => half_at(tile, place).to_f32(),
            KvDtype::F32 => f32::from_le_bytes(*tile[4 * place..].first_chunk()?),
        };
        value.is_finite().then_some(value)
    }
}

/// Appends one layer of a block, of which the first `tokens` positions are computed.
pub(crate) fn export<T: KvValue>(
    kv: &KvStorage<T>,
    own: &BlockLayout,
    (block, layer): (BlockId, usize),
    tokens: usize,
    out: &mut Vec<u8>,
) {
    let start = out.len();
    out.reserve(own.record_bytes());
    write_header(own, layer, tokens, out);
    let zeros = vec![T::default(); (BLOCK_TOKENS - tokens) * own.head_dim];
    for head in 0..own.heads.count {
        let (keys, values) = tile(kv, (block, layer), head);
        for dimension in keys.chunks_exact(BLOCK_TOKENS) {
            T::write(&dimension[..tokens], out);
            T::write(&zeros[..BLOCK_TOKENS - tokens], out);
        }
        T::write(&values[..tokens * own.head_dim], out);
        T::write(&zeros, out);
    }
    let checksum = checksum_of(&out[start..]);
    out.extend_from_slice(&checksum);
}

/// Takes the heads of a record in that this pool has, and says which.
pub(crate) fn import<T: KvValue>(
    kv: &mut KvStorage<T>,
    own: &BlockLayout,
    (block, layer): (BlockId, usize),
    bytes: &[u8],
) -> Result<HeadRange, LayoutError> {
    let record = Record::parse(bytes)?;
    if record.layer != layer {
        return Err(LayoutError::Layer {
            found: record.layer,
            expected: layer,
        });
    }
    let heads = record.layout.fits(own)?;
    let dtype = record.layout.dtype;
    let half_tile = kv.shape().half_tile();
    // Read twice, so that a record that is refused has changed nothing.
    for head in heads.first..heads.end() {
        let tile = record.tile(head);
        if (0..2 * half_tile).any(|place| T::read(dtype, tile, place).is_none()) {
            return Err(LayoutError::NotFinite);
        }
    }
    for head in heads.first..heads.end() {
        let from = record.tile(head);
        let start = kv.shape().tile_start(layer, block, head - own.heads.first);
        let to = &mut kv.values_mut()[start..start + 2 * half_tile];
        for (place, value) in to.iter_mut().enumerate() {
            let place = if place < half_tile {
                let dimension = place / BLOCK_TOKENS;
                let theirs = moved(dimension, own, record.layout.key_order);
                theirs * BLOCK_TOKENS + place % BLOCK_TOKENS
            } else {
                place
            };
            *value = T::read(dtype, from, place).unwrap_or_default();
        }
    }
    Ok(heads)
}

/// Layers of blocks, a body or some of it, as a pool of layout `own` keeps them, from one of layout
/// `theirs`, which [fits](BlockLayout::fits_whole) it. Values are widened and never narrowed; whether they
/// are finite is not looked at.
///
/// # Panics
/// If these are not as many whole layers on both sides, or the layouts do not fit.
pub fn convert_layers(theirs: &BlockLayout, from: &[u8], own: &BlockLayout, to: &mut [u8]) {
    assert_eq!(theirs.fits_whole(own), Ok(()), "layouts that fit");
    let count = from.len() / theirs.payload_bytes();
    assert_eq!(
        from.len(),
        count * theirs.payload_bytes(),
        "bytes of layers"
    );
    assert_eq!(to.len(), count * own.payload_bytes(), "bytes of layers");
    let skipped = own.heads.first - theirs.heads.first;
    let layers = from.chunks_exact(theirs.payload_bytes());
    for (from, to) in layers.zip(to.chunks_exact_mut(own.payload_bytes())) {
        let heads = from.chunks_exact(theirs.tile_bytes()).skip(skipped);
        for (from, to) in heads.zip(to.chunks_exact_mut(own.tile_bytes())) {
            convert_tile((theirs, from), (own, to));
        }
    }
}

fn convert_tile((theirs, from): (&BlockLayout, &[u8]), (own, to): (&BlockLayout, &mut [u8])) {
    // Rows of one dimension each for the keys, of one position each for the values.
    let half = own.head_dim * own.block_tokens;
    let ours = to.chunks_exact_mut(own.dtype.bytes());
    for (place, to) in ours.enumerate() {
        let dimension = place / own.block_tokens;
        let place = if place < half {
            moved(dimension, own, theirs.key_order) * own.block_tokens + place % own.block_tokens
        } else {
            place
        };
        match (theirs.dtype, own.dtype) {
            (KvDtype::F16, KvDtype::F32) => {
                to.copy_from_slice(&half_at(from, place).to_f32().to_le_bytes());
            }
            _ => to.copy_from_slice(&from[place * to.len()..][..to.len()]),
        }
    }
}

/// Copies a full block's body out: the payloads of its records, layer after layer.
pub(crate) fn read_body<T: KvValue>(
    kv: &KvStorage<T>,
    own: &BlockLayout,
    block: BlockId,
    to: &mut [u8],
) {
    read_layers(kv, own, (block, 0..own.layers), to);
}

/// The same of some layers.
pub(crate) fn read_layers<T: KvValue>(
    kv: &KvStorage<T>,
    own: &BlockLayout,
    (block, layers): (BlockId, Range<usize>),
    to: &mut [u8],
) {
    let each = own.payload_bytes();
    assert_eq!(to.len(), layers.len() * each, "bytes of a block's layers");
    for (layer, to) in layers.zip(to.chunks_exact_mut(each)) {
        T::copy_out(payload(kv, block, layer), to);
    }
}

/// Copies a body in that this node's own [`read_body`] gave.
pub(crate) fn write_body<T: KvValue>(
    kv: &mut KvStorage<T>,
    own: &BlockLayout,
    block: BlockId,
    from: &[u8],
) {
    write_layers(kv, own, (block, 0..own.layers), from);
}

fn write_layers<T: KvValue>(
    kv: &mut KvStorage<T>,
    own: &BlockLayout,
    (block, layers): (BlockId, Range<usize>),
    from: &[u8],
) {
    let each = own.payload_bytes();
    assert_eq!(from.len(), layers.len() * each, "bytes of a block's layers");
    for (layer, from) in layers.zip(from.chunks_exact(each)) {
        T::copy_in(from, payload_mut(kv, block, layer));
    }
}

/// Copies layers in that another node's [`read_layers`] gave. False, and zeros, if a value is not finite.
pub(crate) fn take_layers<T: KvValue>(
    kv: &mut KvStorage<T>,
    own: &BlockLayout,
    (block, layers): (BlockId, Range<usize>),
    from: &[u8],
) -> bool {
    write_layers(kv, own, (block, layers.clone()), from);
    // Looked at where it is now: where it came from may change under the reader.
    let finite = |layer| {
        let values = payload(kv, block, layer).iter();
        // Without a way out in the middle, so that many are looked at at once.
        values.fold(true, |finite, value| finite & value.is_finite())
    };
    let whole = layers.clone().all(finite);
    if !whole {
        layers.for_each(|layer| payload_mut(kv, block, layer).fill(T::default()));
    }
    whole
}

/// All tiles of one layer of a block: they lie one after the other.
fn payload<T: KvValue>(kv: &KvStorage<T>, block: BlockId, layer: usize) -> &[T] {
    let shape = kv.shape();
    let start = shape.tile_start(layer, block, 0);
    &kv.values()[start..start + shape.heads * 2 * shape.half_tile()]
}

fn payload_mut<T: KvValue>(kv: &mut KvStorage<T>, block: BlockId, layer: usize) -> &mut [T] {
    let shape = kv.shape();
    let start = shape.tile_start(layer, block, 0);
    &mut kv.values_mut()[start..start + shape.heads * 2 * shape.half_tile()]
}

/// Where the key dimension that lies at `dimension` here lies in the other order.
fn moved(dimension: usize, own: &BlockLayout, theirs: KeyOrder) -> usize {
    let half = own.head_dim / 2;
    match (own.key_order, theirs) {
        (KeyOrder::Pairs, KeyOrder::Halves) => dimension / 2 + dimension % 2 * half,
        (KeyOrder::Halves, KeyOrder::Pairs) => 2 * (dimension % half) + dimension / half,
        (KeyOrder::Pairs, KeyOrder::Pairs) | (KeyOrder::Halves, KeyOrder::Halves) => dimension,
    }
}

fn tile<T: KvValue>(
    kv: &KvStorage<T>,
    (block, layer): (BlockId, usize),
    head: usize,
) -> (&[T], &[T]) {
    let shape = kv.shape();
    let start = shape.tile_start(layer, block, head);
    kv.values()[start..start + 2 * shape.half_tile()].split_at(shape.half_tile())
}
