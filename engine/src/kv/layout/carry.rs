//! The way of a block's values from the pool into a record, and from a record into a pool.

use std::ops::Range;

use super::tile::Half;
use super::{
    BlockLayout, Element as _, HeadRange, KeyOrder, KvDtype, KvFormat, LayoutError, Record,
    checksum_of, write_header,
};
use crate::kv::storage::{BLOCK_TOKENS, BlockId, KvStorage};

/// Appends one layer of a block, of which the first `tokens` positions are computed.
pub(crate) fn export<F: KvFormat>(
    kv: &KvStorage<F>,
    own: &BlockLayout,
    (block, layer): (BlockId, usize),
    tokens: usize,
    out: &mut Vec<u8>,
) {
    let start = out.len();
    out.reserve(own.record_bytes());
    write_header(own, layer, tokens, out);
    let body = out.len();
    out.resize(body + own.payload_bytes(), 0);
    F::Element::copy_out(payload(kv, block, layer), &mut out[body..]);
    if tokens < BLOCK_TOKENS {
        let tiles = out[body..].chunks_exact_mut(own.tile_bytes());
        tiles.for_each(|tile| own.clear_from(tile, tokens));
    }
    let checksum = checksum_of(&out[start..]);
    out.extend_from_slice(&checksum);
}

/// Takes the heads of a record in that this pool has, and says which.
pub(crate) fn import<F: KvFormat>(
    kv: &mut KvStorage<F>,
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
    let theirs = &record.layout;
    let heads = theirs.fits(own)?;
    // Read twice, so that a record that is refused has changed nothing.
    if !(heads.first..heads.end()).all(|head| theirs.dtype.are_finite(record.tile(head))) {
        return Err(LayoutError::NotFinite);
    }
    let mut converted = vec![0; own.tile_bytes()];
    for head in heads.first..heads.end() {
        convert_tile((theirs, record.tile(head)), (own, &mut converted));
        let shape = kv.shape();
        let start = shape.tile_start::<F>(layer, block, head - own.heads.first);
        let to = &mut kv.elements_mut()[start..start + 2 * shape.half_tile::<F>()];
        F::Element::copy_in(&converted, to);
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
    if theirs.dtype == own.dtype && theirs.key_order == own.key_order {
        return to.copy_from_slice(from);
    }
    for (half, dimension, token) in own.each_value() {
        let from_dimension = match half {
            Half::Keys => moved(dimension, own, theirs.key_order),
            Half::Values => dimension,
        };
        let (here, there) = ((half, dimension, token), (half, from_dimension, token));
        if theirs.dtype == own.dtype {
            own.set_bytes(to, here, theirs.bytes_of(from, there));
        } else {
            assert_eq!(own.dtype, KvDtype::F32, "nothing else is wider");
            own.set_bytes(to, here, &theirs.number(from, there).to_le_bytes());
        }
    }
}

/// Copies a full block's body out: the payloads of its records, layer after layer.
pub(crate) fn read_body<F: KvFormat>(
    kv: &KvStorage<F>,
    own: &BlockLayout,
    block: BlockId,
    to: &mut [u8],
) {
    read_layers(kv, own, (block, 0..own.layers), to);
}

/// The same of some layers.
pub(crate) fn read_layers<F: KvFormat>(
    kv: &KvStorage<F>,
    own: &BlockLayout,
    (block, layers): (BlockId, Range<usize>),
    to: &mut [u8],
) {
    let each = own.payload_bytes();
    assert_eq!(to.len(), layers.len() * each, "bytes of a block's layers");
    for (layer, to) in layers.zip(to.chunks_exact_mut(each)) {
        F::Element::copy_out(payload(kv, block, layer), to);
    }
}

/// Copies a body in that this node's own [`read_body`] gave.
pub(crate) fn write_body<F: KvFormat>(
    kv: &mut KvStorage<F>,
    own: &BlockLayout,
    block: BlockId,
    from: &[u8],
) {
    write_layers(kv, own, (block, 0..own.layers), from);
}

fn write_layers<F: KvFormat>(
    kv: &mut KvStorage<F>,
    own: &BlockLayout,
    (block, layers): (BlockId, Range<usize>),
    from: &[u8],
) {
    let each = own.payload_bytes();
    assert_eq!(from.len(), layers.len() * each, "bytes of a block's layers");
    for (layer, from) in layers.zip(from.chunks_exact(each)) {
        F::Element::copy_in(from, payload_mut(kv, block, layer));
    }
}

/// Copies layers in that another node's [`read_layers`] gave. False, and zeros, if a value is not finite.
pub(crate) fn take_layers<F: KvFormat>(
    kv: &mut KvStorage<F>,
    own: &BlockLayout,
    (block, layers): (BlockId, Range<usize>),
    from: &[u8],
) -> bool {
    write_layers(kv, own, (block, layers.clone()), from);
    // Looked at where it is now: where it came from may change under the reader.
    let finite = |layer| F::are_finite(payload(kv, block, layer));
    let whole = layers.clone().all(finite);
    if !whole {
        layers.for_each(|layer| payload_mut(kv, block, layer).fill(F::Element::default()));
    }
    whole
}

/// All tiles of one layer of a block: they lie one after the other.
fn payload<F: KvFormat>(kv: &KvStorage<F>, block: BlockId, layer: usize) -> &[F::Element] {
    let shape = kv.shape();
    let start = shape.tile_start::<F>(layer, block, 0);
    &kv.elements()[start..start + shape.heads * 2 * shape.half_tile::<F>()]
}

fn payload_mut<F: KvFormat>(
    kv: &mut KvStorage<F>,
    block: BlockId,
    layer: usize,
) -> &mut [F::Element] {
    let shape = kv.shape();
    let start = shape.tile_start::<F>(layer, block, 0);
    &mut kv.elements_mut()[start..start + shape.heads * 2 * shape.half_tile::<F>()]
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
