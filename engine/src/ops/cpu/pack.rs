//! How do weights lie in memory?
//!
//! Sixteen weight rows make a *group*; a group's rows sit side by side in the lanes of a vector,
//! so a product needs no sum across lanes and every output is summed over its columns in order.
//! Per block of 32 columns a group has 4 lines of nibbles, and for integers of five or six bits one
//! or two lines of what is above them, or 8 lines of bytes (the layout is that of [`Isa::four`] and
//! its sisters); 16 scales and, for some formats, 16 minimums. The K formats keep these as they are
//! stored, small integers, with 16 f16 for each 256 columns. Weights that are not quantised keep
//! their precision: one vector of 16 rows per column. No format loses a bit, and none grows.
//!
//! The last group is filled up with rows of zeros.
//!
//! The layout is the same for every instruction set, so that a packed file may move between
//! machines. Whoever changes it raises [`LAYOUT`].
//!
//! [`Isa::four`]: super::isa::Isa::four

mod row;

use prompt::gguf::Dtype;

use super::isa::{Halves, LANES, Line};
use crate::ops::reference::dequant::k::K_BLOCK;
use crate::ops::{Pairs, PartBytes, RowOrder, Tensor};
use crate::sys::stored::{Plain, Stored};

/// The version of this file's layout.
pub(crate) const LAYOUT: u32 = 1;

/// Columns in a quantised block.
pub(crate) const BLOCK: usize = 32;

/// Blocks of 32 columns that share the units of a K format.
pub(crate) const BLOCKS_OF_K: usize = K_BLOCK / BLOCK;

/// Sixteen scales, aligned so that no load of them crosses a cache line.
#[derive(Debug, Clone, Copy)]
#[repr(align(32))]
pub(crate) struct Scales(pub(crate) Halves);

/// Small integers of 16 rows: scales or minimums.
pub(crate) type Small = [u8; LANES];

#[expect(unsafe_code, reason = "a promise about types of this file")]
// SAFETY: 64 bytes, and 16 numbers of 16 bits, both without padding.
unsafe impl Plain for Line {}
#[expect(unsafe_code, reason = "a promise about types of this file")]
// SAFETY: as above.
unsafe impl Plain for Scales {}

/// A packed weight; groups follow one another in each vector of its parts.
#[derive(Debug)]
pub(crate) struct Packed {
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    /// The format of the file, which decides what the parts hold.
    pub(crate) dtype: Dtype,
    pub(crate) parts: Parts,
    order: RowOrder,
}

/// The vectors of a packed weight; a format has some of them.
#[derive(Debug)]
pub(crate) struct Parts {
    /// Integers of blocks.
    pub(crate) lines: Stored<Line>,
    /// Of each block, or of each 256 columns of a K format; a whole matrix of 16-bit weights, one
    /// a column.
    pub(crate) scales: Stored<Scales>,
    /// The same, for formats with minimums; negative in K formats.
    pub(crate) minimums: Stored<Scales>,
    /// Of each block of a K format: what its scale counts.
    pub(crate) small_scales: Stored<Small>,
    /// The same of its minimum; of Q6_K the scale of a block's second half.
    pub(crate) small_minimums: Stored<Small>,
    /// A whole matrix of f32, one a column.
    pub(crate) floats: Stored<[f32; LANES]>,
}

/// How many values each part holds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Lens {
    lines: usize,
    scales: usize,
    minimums: usize,
    small_scales: usize,
    small_minimums: usize,
    floats: usize,
}

impl Lens {
    fn of(dtype: Dtype, rows: usize, cols: usize) -> Lens {
        let groups = rows.div_ceil(LANES);
        let blocks = groups * (cols / BLOCK);
        let none = Lens::default();
        let lines = |of_block: usize| Lens {
            lines: of_block * blocks,
            scales: blocks,
            ..none
        };
        let minimums = |lens: Lens| Lens {
            minimums: blocks,
            ..lens
        };
        let k = |lens: Lens, minimums: usize| Lens {
            scales: blocks / BLOCKS_OF_K,
            minimums: minimums / BLOCKS_OF_K,
            small_scales: blocks,
            small_minimums: blocks,
            ..lens
        };
        match dtype {
            Dtype::Q4_0 => lines(4),
            Dtype::Q4_1 => minimums(lines(4)),
            Dtype::Q5_0 => lines(5),
            Dtype::Q5_1 => minimums(lines(5)),
            Dtype::Q8_0 => lines(8),
            Dtype::Q4K => k(lines(4), blocks),
            Dtype::Q5K => k(lines(5), blocks),
            Dtype::Q6K => k(lines(6), 0),
            Dtype::F16 | Dtype::BF16 => Lens {
                scales: groups * cols,
                ..none
            },
            Dtype::F32 | Dtype::Other(_) => Lens {
                floats: groups * cols,
                ..none
            },
        }
    }
}

impl Parts {
    /// Rows of zeros: their scales are 0, whatever the integers.
    fn zeros(lens: Lens) -> Parts {
        let scales = |len| vec![Scales([0; LANES]); len].into();
        let small = |len| vec![[0; LANES]; len].into();
        Parts {
            lines: vec![Line([0; 64]); lens.lines].into(),
            scales: scales(lens.scales),
            minimums: scales(lens.minimums),
            small_scales: small(lens.small_scales),
            small_minimums: small(lens.small_minimums),
            floats: vec![[0.0; LANES]; lens.floats].into(),
        }
    }

    fn lens(&self) -> Lens {
        Lens {
            lines: self.lines.len(),
            scales: self.scales.len(),
            minimums: self.minimums.len(),
            small_scales: self.small_scales.len(),
            small_minimums: self.small_minimums.len(),
            floats: self.floats.len(),
        }
    }
}

impl Packed {
    /// Packs a tensor whose size the loader has checked.
    pub(crate) fn new(tensor: &Tensor<'_>, order: RowOrder) -> Packed {
        let (rows, cols, dtype) = (tensor.rows, tensor.cols, tensor.dtype);
        let mut packed = Packed {
            rows,
            cols,
            dtype,
            parts: Parts::zeros(Lens::of(dtype, rows, cols)),
            order,
        };
        let row_bytes = tensor.bytes.len() / rows;
        for (row, bytes) in tensor.bytes.chunks_exact(row_bytes).enumerate() {
            packed.put_row(place(order, row), bytes);
        }
        packed
    }

    /// The parts in the order in which a file has them.
    pub(crate) fn stored(&self) -> [&[u8]; PartBytes::PARTS] {
        let Parts {
            lines,
            scales,
            minimums,
            small_scales,
            small_minimums,
            floats,
        } = &self.parts;
        [
            lines.bytes(),
            scales.bytes(),
            minimums.bytes(),
            small_scales.bytes(),
            small_minimums.bytes(),
            floats.bytes(),
        ]
    }

    /// A tensor that was packed before; `None` unless each part has the length that it must.
    pub(crate) fn restore(
        tensor: &Tensor<'_>,
        order: RowOrder,
        from: &PartBytes,
    ) -> Option<Packed> {
        let [
            lines,
            scales,
            minimums,
            small_scales,
            small_minimums,
            floats,
        ] = from.ranges.clone();
        let parts = Parts {
            lines: Stored::mapped(&from.file, lines)?,
            scales: Stored::mapped(&from.file, scales)?,
            minimums: Stored::mapped(&from.file, minimums)?,
            small_scales: Stored::mapped(&from.file, small_scales)?,
            small_minimums: Stored::mapped(&from.file, small_minimums)?,
            floats: Stored::mapped(&from.file, floats)?,
        };
        let (rows, cols, dtype) = (tensor.rows, tensor.cols, tensor.dtype);
        (parts.lens() == Lens::of(dtype, rows, cols)).then_some(Packed {
            rows,
            cols,
            dtype,
            parts,
            order,
        })
    }

    /// Groups of 16 rows.
    pub(crate) fn groups(&self) -> usize {
        self.rows.div_ceil(LANES)
    }

    /// Whether products with it read the rows before quantisation.
    pub(crate) fn is_dense(&self) -> bool {
        matches!(
            self.dtype,
            Dtype::F16 | Dtype::BF16 | Dtype::F32 | Dtype::Other(_)
        )
    }

    /// Bytes in memory.
    pub(crate) fn bytes(&self) -> usize {
        self.stored().map(<[u8]>::len).iter().sum()
    }
}

/// Where a row of the file goes. Rope's pairs are `i` and `half + i` here, so that both sides of a
/// pair are whole vectors.
fn place(order: RowOrder, row: usize) -> usize {
    order.place(row, Pairs::Halves)
}
