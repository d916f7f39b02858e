//! What travels at once: some layers of some blocks.
//!
//! A prompt that is being computed goes out layer by layer, the blocks of a pass together; what is
//! computed already goes out block by block with all layers. Either way it is a part: so many blocks from
//! one on, of each so many layers from one on, its bytes block after block. A part has no more bytes than
//! a block.

use super::TransferError;
use crate::kv::layout::BlockLayout;

/// Bytes of a part in the note of its frame.
pub(super) const NOTE_BYTES: usize = 10;

/// Some layers of blocks that follow one another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// The first block's number within the prompt.
    pub first: u32,
    /// Blocks; at least 1.
    pub blocks: u16,
    /// The first layer.
    pub layer: u16,
    /// Layers; at least 1.
    pub layers: u16,
}

impl Part {
    /// One block of a model with so many layers.
    pub fn block(number: u32, layers: usize) -> Part {
        Part {
            first: number,
            blocks: 1,
            layer: 0,
            // No model has more layers than a layout can say.
            layers: u16::try_from(layers).unwrap_or(u16::MAX),
        }
    }

    /// The numbers of its blocks.
    pub fn numbers(&self) -> std::ops::Range<usize> {
        let first = self.first as usize;
        first..first + usize::from(self.blocks)
    }

    /// Its layers.
    pub fn layer_range(&self) -> std::ops::Range<usize> {
        let first = usize::from(self.layer);
        first..first + usize::from(self.layers)
    }

    /// Its bytes, if blocks of this layout have such a part.
    pub fn bytes(&self, layout: &BlockLayout) -> Result<usize, TransferError> {
        let layers = usize::from(self.blocks) * usize::from(self.layers);
        if layers == 0 || layers > layout.layers || self.layer_range().end > layout.layers {
            return Err(TransferError::Malformed("a part that no block has"));
        }
        Ok(layers * layout.payload_bytes())
    }

    /// As it stands in a frame, numbers little-endian in the order of the fields.
    pub(super) fn to_note(self) -> [u8; NOTE_BYTES] {
        let mut note = [0; NOTE_BYTES];
        note[..4].copy_from_slice(&self.first.to_le_bytes());
        note[4..6].copy_from_slice(&self.blocks.to_le_bytes());
        note[6..8].copy_from_slice(&self.layer.to_le_bytes());
        note[8..].copy_from_slice(&self.layers.to_le_bytes());
        note
    }

    pub(super) fn from_note(note: [u8; NOTE_BYTES]) -> Part {
        let [a, b, c, d, rest @ ..] = note;
        let [blocks, layer, layers] =
            [0, 2, 4].map(|at| u16::from_le_bytes([rest[at], rest[at + 1]]));
        Part {
            first: u32::from_le_bytes([a, b, c, d]),
            blocks,
            layer,
            layers,
        }
    }
}

/// Which layers of a block are there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Layers(u128);

impl Layers {
    /// All of them.
    pub const ALL: Layers = Layers(u128::MAX);
    /// Blocks of more layers than these come whole.
    pub const MAX: usize = 128;

    /// All of a block that is there, none of one that is not.
    pub fn all_if(there: bool) -> Layers {
        if there {
            Layers::ALL
        } else {
            Layers::default()
        }
    }

    /// Whether every layer is there.
    pub fn is_whole(self) -> bool {
        self == Layers::ALL
    }

    /// Takes note of a part of the block, which has `of` layers. None if some were there, or cannot be
    /// told apart.
    #[must_use]
    pub fn with(self, part: &Part, of: usize) -> Option<Layers> {
        let new = mask(part.layer_range(), of)?;
        (self.0 & new == 0).then_some(Layers(self.0 | new))
    }

    /// The same of one that may come again.
    #[must_use]
    pub fn with_again(self, part: &Part, of: usize) -> Option<Layers> {
        Some(Layers(self.0 | mask(part.layer_range(), of)?))
    }
}

/// A bit for each layer; those that a block does not have go with its last one.
fn mask(layers: std::ops::Range<usize>, of: usize) -> Option<u128> {
    let below = |layer: usize| match layer {
        layer if layer >= of => Some(u128::MAX),
        0 => Some(0),
        layer if of <= Layers::MAX => Some((1 << layer) - 1),
        _ => None,
    };
    Some(below(layers.end)? & !below(layers.start)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Would catch a block that is taken for whole, or a layer for new, when it is not.
    #[test]
    fn layers_add_up_once_each() {
        for of in [1, 2, 3, 30, 126, 127, 128] {
            let part = |layer: usize, layers: usize| Part {
                layer: layer as u16,
                layers: layers as u16,
                ..Part::block(0, of)
            };
            for step in [1, 2, 7, of] {
                let mut there = Layers::default();
                let starts: Vec<_> = (0..of).step_by(step).collect();
                // The last first: they may overtake each other.
                for start in starts.iter().rev() {
                    assert!(!there.is_whole(), "{start} of {of}");
                    let new = part(*start, step.min(of - start));
                    there = there.with(&new, of).expect("new");
                    assert_eq!(there.with(&new, of), None, "twice");
                }
                assert!(there.is_whole(), "{of} by {step}");
            }
        }
        let whole = Part::block(3, 200);
        assert_eq!(Layers::default().with(&whole, 200), Some(Layers::ALL));
        let some = Part { layers: 7, ..whole };
        assert_eq!(Layers::default().with(&some, 200), None);
    }

    /// Would catch a part that is read as another than was written.
    #[test]
    fn notes_keep_every_bit() {
        let part = Part {
            first: 0x0102_0304,
            blocks: 0x0506,
            layer: 0x0708,
            layers: 0x090a,
        };
        let note = part.to_note();
        assert_eq!(note, [4, 3, 2, 1, 6, 5, 8, 7, 10, 9]);
        assert_eq!(Part::from_note(note), part);
    }
}
