//! How do weights lie in memory?
//!
//! Sixteen weight rows make a *group*; a group's rows sit side by side in the lanes of a vector,
//! so a product needs no sum across lanes and every output is summed over its columns in order.
//! Per block of 32 columns a group has 4 lines of nibbles or 8 lines of bytes (the layout is that
//! of [`Isa::nibbles`] and [`Isa::bytes`]; integers of five and six bits are bytes), 16 scales and,
//! for some formats, 16 minimums. The K formats keep these as they are stored, small integers, with
//! 16 f16 for each 256 columns. Weights that are not quantised keep their precision: one vector of 16
//! rows per column. No format loses a bit.
//!
//! The last group is filled up with rows of zeros.
//!
//! [`Isa::nibbles`]: super::isa::Isa::nibbles
//! [`Isa::bytes`]: super::isa::Isa::bytes

use prompt::gguf::Dtype;

use super::isa::{Halves, LANES, Line};
use crate::ops::reference::dequant::five_bits;
use crate::ops::reference::dequant::k::{K_BLOCK, KBlock, SixBits};
use crate::ops::{Pairs, RowOrder, Tensor};

/// Columns in a quantised block.
pub(crate) const BLOCK: usize = 32;

/// Sixteen scales, aligned so that no load of them crosses a cache line.
#[derive(Debug, Clone, Copy)]
#[repr(align(32))]
pub(crate) struct Scales(pub(crate) Halves);

/// A packed weight.
#[derive(Debug)]
pub(crate) struct Packed {
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    pub(crate) values: Values,
    order: RowOrder,
}

/// Small integers of 16 rows: scales or minimums.
pub(crate) type Small = [u8; LANES];

/// The packed values by format; groups follow one another in each vector.
#[derive(Debug)]
pub(crate) enum Values {
    /// weight = scale × (nibble - 8): Q4_0
    Nibbles {
        lines: Vec<Line>,
        scales: Vec<Scales>,
    },
    /// weight = scale × nibble + minimum: Q4_1
    NibblesAndMinimum {
        lines: Vec<Line>,
        scales: Vec<Scales>,
        minimums: Vec<Scales>,
    },
    /// weight = scale × (byte - 128): Q8_0, Q5_0
    Bytes {
        lines: Vec<Line>,
        scales: Vec<Scales>,
    },
    /// weight = scale × (byte - 128) + minimum: Q5_1
    BytesAndMinimum {
        lines: Vec<Line>,
        scales: Vec<Scales>,
        minimums: Vec<Scales>,
    },
    /// weight = unit × scale × nibble + minimum unit × minimum: Q4_K
    KNibbles(Vec<Line>, KScales),
    /// The same with byte - 128 for the nibble: Q5_K
    KBytes(Vec<Line>, KScales),
    /// weight = unit × scale × (byte - 128), with a scale for the first and one for the last 16 columns of a
    /// block, which count as minimums here: Q6_K
    KHalves(Vec<Line>, KScales),
    /// One f16 per row and column.
    F16 { columns: Vec<Scales> },
    /// One bf16 per row and column.
    BF16 { columns: Vec<Scales> },
    /// One f32 per row and column.
    F32 { columns: Vec<[f32; LANES]> },
}

/// Scales and minimums of a K format.
#[derive(Debug)]
pub(crate) struct KScales {
    /// Of each block of 32 columns.
    pub(crate) scales: Vec<Small>,
    /// The same.
    pub(crate) minimums: Vec<Small>,
    /// What one of its scales is worth, for each 256 columns.
    pub(crate) units: Vec<Scales>,
    /// What one of its minimums is worth; negative. None for a format without.
    pub(crate) minimum_units: Vec<Scales>,
}

impl KScales {
    fn new(blocks: usize) -> KScales {
        let units = vec![Scales([0; LANES]); blocks / BLOCKS_OF_K];
        KScales {
            scales: vec![[0; LANES]; blocks],
            minimums: vec![[0; LANES]; blocks],
            minimum_units: units.clone(),
            units,
        }
    }

    fn bytes(&self) -> usize {
        size_of_val(&self.scales[..])
            + size_of_val(&self.minimums[..])
            + size_of_val(&self.units[..])
            + size_of_val(&self.minimum_units[..])
    }
}

/// Blocks of 32 columns that share the units of a K format.
pub(crate) const BLOCKS_OF_K: usize = K_BLOCK / BLOCK;

impl Packed {
    /// Packs a tensor whose size the loader has checked.
    pub(crate) fn new(tensor: &Tensor<'_>, order: RowOrder) -> Packed {
        let (rows, cols) = (tensor.rows, tensor.cols);
        let groups = rows.div_ceil(LANES);
        let blocks = groups * (cols / BLOCK);
        let zero_lines = |lines: usize, fill: u8| vec![Line([fill; 64]); blocks * lines];
        let zero_scales = || vec![Scales([0; LANES]); blocks];
        // Rows of zeros: their scales are 0, whatever the quants.
        let values = match tensor.dtype {
            Dtype::Q4_0 => Values::Nibbles {
                lines: zero_lines(4, 0),
                scales: zero_scales(),
            },
            Dtype::Q4_1 => Values::NibblesAndMinimum {
                lines: zero_lines(4, 0),
                scales: zero_scales(),
                minimums: zero_scales(),
            },
            Dtype::Q8_0 | Dtype::Q5_0 => Values::Bytes {
                lines: zero_lines(8, 128),
                scales: zero_scales(),
            },
            Dtype::Q5_1 => Values::BytesAndMinimum {
                lines: zero_lines(8, 128),
                scales: zero_scales(),
                minimums: zero_scales(),
            },
            Dtype::Q4K => Values::KNibbles(zero_lines(4, 0), KScales::new(blocks)),
            Dtype::Q5K => Values::KBytes(zero_lines(8, 128), KScales::new(blocks)),
            Dtype::Q6K => Values::KHalves(zero_lines(8, 128), KScales::new(blocks)),
            Dtype::F16 => Values::F16 {
                columns: vec![Scales([0; LANES]); groups * cols],
            },
            Dtype::BF16 => Values::BF16 {
                columns: vec![Scales([0; LANES]); groups * cols],
            },
            Dtype::F32 | Dtype::Other(_) => Values::F32 {
                columns: vec![[0.0; LANES]; groups * cols],
            },
        };
        let mut packed = Packed {
            rows,
            cols,
            values,
            order,
        };
        let row_bytes = tensor.bytes.len() / rows;
        for (row, bytes) in tensor.bytes.chunks_exact(row_bytes).enumerate() {
            packed.put_row(tensor.dtype, place(order, row), bytes);
        }
        packed
    }

    /// Groups of 16 rows.
    pub(crate) fn groups(&self) -> usize {
        self.rows.div_ceil(LANES)
    }

    /// Whether products with it read the rows before quantisation.
    pub(crate) fn is_dense(&self) -> bool {
        use Values::{BF16, F16, F32};
        matches!(self.values, F16 { .. } | BF16 { .. } | F32 { .. })
    }

    /// Bytes in memory.
    pub(crate) fn bytes(&self) -> usize {
        match &self.values {
            Values::Nibbles { lines, scales } | Values::Bytes { lines, scales } => {
                size_of_val(&lines[..]) + size_of_val(&scales[..])
            }
            Values::NibblesAndMinimum {
                lines,
                scales,
                minimums,
            }
            | Values::BytesAndMinimum {
                lines,
                scales,
                minimums,
            } => size_of_val(&lines[..]) + size_of_val(&scales[..]) + size_of_val(&minimums[..]),
            Values::KNibbles(lines, scales)
            | Values::KBytes(lines, scales)
            | Values::KHalves(lines, scales) => size_of_val(&lines[..]) + scales.bytes(),
            Values::F16 { columns } | Values::BF16 { columns } => size_of_val(&columns[..]),
            Values::F32 { columns } => size_of_val(&columns[..]),
        }
    }

    fn put_row(&mut self, dtype: Dtype, row: usize, bytes: &[u8]) {
        let (group, lane) = (row / LANES, row % LANES);
        let cols = self.cols;
        let first = group * (cols / BLOCK);
        match &mut self.values {
            Values::Nibbles { lines, scales } => {
                for (block, stored) in (first..).zip(bytes.as_chunks::<18>().0) {
                    scales[block].0[lane] = half_bits(&stored[..2]);
                    put_nibbles(&mut lines[4 * block..][..4], lane, &stored[2..]);
                }
            }
            Values::NibblesAndMinimum {
                lines,
                scales,
                minimums,
            } => {
                for (block, stored) in (first..).zip(bytes.as_chunks::<20>().0) {
                    scales[block].0[lane] = half_bits(&stored[..2]);
                    minimums[block].0[lane] = half_bits(&stored[2..4]);
                    put_nibbles(&mut lines[4 * block..][..4], lane, &stored[4..]);
                }
            }
            Values::Bytes { lines, scales } if dtype == Dtype::Q5_0 => {
                for (block, stored) in (first..).zip(bytes.as_chunks::<22>().0) {
                    scales[block].0[lane] = half_bits(&stored[..2]);
                    let quants = five_bits(&stored[2..]).map(|quant| quant + 128 - 16);
                    put_bytes(&mut lines[8 * block..][..8], lane, &quants);
                }
            }
            Values::Bytes { lines, scales } => {
                for (block, stored) in (first..).zip(bytes.as_chunks::<34>().0) {
                    scales[block].0[lane] = half_bits(&stored[..2]);
                    let mut quants = [0; BLOCK];
                    for (quant, byte) in quants.iter_mut().zip(&stored[2..]) {
                        *quant = byte ^ 0x80;
                    }
                    put_bytes(&mut lines[8 * block..][..8], lane, &quants);
                }
            }
            Values::BytesAndMinimum {
                lines,
                scales,
                minimums,
            } => {
                for (block, stored) in (first..).zip(bytes.as_chunks::<24>().0) {
                    scales[block].0[lane] = half_bits(&stored[..2]);
                    minimums[block].0[lane] = half_bits(&stored[2..4]);
                    let quants = five_bits(&stored[4..]).map(|quant| quant + 128);
                    put_bytes(&mut lines[8 * block..][..8], lane, &quants);
                }
            }
            Values::KNibbles(lines, scales) => {
                put_k_row(lines, scales, (dtype, first, lane), bytes)
            }
            Values::KBytes(lines, scales) => put_k_row(lines, scales, (dtype, first, lane), bytes),
            Values::KHalves(lines, scales) => put_halves_row(lines, scales, (first, lane), bytes),
            Values::F16 { columns } | Values::BF16 { columns } => {
                let columns = &mut columns[group * cols..][..cols];
                for (column, stored) in columns.iter_mut().zip(bytes.as_chunks::<2>().0) {
                    column.0[lane] = u16::from_le_bytes(*stored);
                }
            }
            Values::F32 { columns } => {
                let columns = &mut columns[group * cols..][..cols];
                for (column, stored) in columns.iter_mut().zip(bytes.as_chunks::<4>().0) {
                    column[lane] = f32::from_le_bytes(*stored);
                }
            }
        }
    }

    /// Unpacks one row of the file, for looking tokens up in a table.
    pub(crate) fn row(&self, row: usize, out: &mut [f32]) {
        let row = place(self.order, row);
        let (group, lane) = (row / LANES, row % LANES);
        let (cols, blocks) = (self.cols, self.cols / BLOCK);
        for (column, out) in out.iter_mut().enumerate() {
            let block = group * blocks + column / BLOCK;
            let (line, byte) = (column % BLOCK / 4, 4 * lane + column % 4);
            let nibble = |lines: &[Line]| {
                let both = lines[4 * block + line % 4].0[byte];
                f32::from(if line < 4 { both & 15 } else { both >> 4 })
            };
            let signed = |lines: &[Line]| f32::from(lines[8 * block + line].0[byte]) - 128.0;
            let value = |scales: &[Scales]| half(scales[block].0[lane]);
            let k = |k: &KScales| {
                let unit = half(k.units[block / BLOCKS_OF_K].0[lane]);
                let minimum_unit = half(k.minimum_units[block / BLOCKS_OF_K].0[lane]);
                let scale = unit * f32::from(k.scales[block][lane]);
                (scale, minimum_unit * f32::from(k.minimums[block][lane]))
            };
            *out = match &self.values {
                Values::Nibbles { lines, scales } => value(scales) * (nibble(lines) - 8.0),
                Values::NibblesAndMinimum {
                    lines,
                    scales,
                    minimums,
                } => value(scales) * nibble(lines) + value(minimums),
                Values::Bytes { lines, scales } => value(scales) * signed(lines),
                Values::BytesAndMinimum {
                    lines,
                    scales,
                    minimums,
                } => value(scales) * signed(lines) + value(minimums),
                Values::KNibbles(lines, scales) => {
                    let (scale, minimum) = k(scales);
                    scale * nibble(lines) + minimum
                }
                Values::KBytes(lines, scales) => {
                    let (scale, minimum) = k(scales);
                    scale * signed(lines) + minimum
                }
                Values::KHalves(lines, scales) => {
                    let of_half = if line < 4 {
                        &scales.scales
                    } else {
                        &scales.minimums
                    };
                    let scale = f32::from(of_half[block][lane] as i8);
                    half(scales.units[block / BLOCKS_OF_K].0[lane]) * scale * signed(lines)
                }
                Values::F16 { columns } => half(columns[group * cols + column].0[lane]),
                Values::BF16 { columns } => {
                    f32::from_bits(u32::from(columns[group * cols + column].0[lane]) << 16)
                }
                Values::F32 { columns } => columns[group * cols + column][lane],
            };
        }
    }
}

fn half(bits: u16) -> f32 {
    half::f16::from_bits(bits).to_f32()
}

fn half_bits(stored: &[u8]) -> u16 {
    u16::from_le_bytes([stored[0], stored[1]])
}

/// A row of Q4_K or Q5_K.
fn put_k_row(
    lines: &mut [Line],
    k: &mut KScales,
    (dtype, first, lane): (Dtype, usize, usize),
    bytes: &[u8],
) {
    const SIGN: u16 = 0x8000;
    let (_, stored_bytes) = dtype.block().unwrap_or((1, 1));
    for (of_row, stored) in bytes.chunks_exact(stored_bytes as usize).enumerate() {
        let stored = KBlock::read(dtype, stored);
        let unit = first / BLOCKS_OF_K + of_row;
        k.units[unit].0[lane] = half_bits(&stored.scale);
        k.minimum_units[unit].0[lane] = half_bits(&stored.minimum) ^ SIGN;
        for (group, quants) in stored.quants.as_chunks::<BLOCK>().0.iter().enumerate() {
            let block = unit * BLOCKS_OF_K + group;
            k.scales[block][lane] = stored.scales[group];
            k.minimums[block][lane] = stored.minimums[group];
            if dtype == Dtype::Q5K {
                let quants = quants.map(|quant| quant + 128);
                put_bytes(&mut lines[8 * block..][..8], lane, &quants);
            } else {
                let mut both = [0; BLOCK / 2];
                for (place, both) in both.iter_mut().enumerate() {
                    *both = quants[place] | quants[place + BLOCK / 2] << 4;
                }
                put_nibbles(&mut lines[4 * block..][..4], lane, &both);
            }
        }
    }
}

/// A row of Q6_K.
fn put_halves_row(
    lines: &mut [Line],
    k: &mut KScales,
    (first, lane): (usize, usize),
    bytes: &[u8],
) {
    for (of_row, stored) in bytes.as_chunks::<210>().0.iter().enumerate() {
        let stored = SixBits::read(stored);
        let unit = first / BLOCKS_OF_K + of_row;
        k.units[unit].0[lane] = half_bits(&stored.scale);
        for (group, quants) in stored.quants.as_chunks::<BLOCK>().0.iter().enumerate() {
            let block = unit * BLOCKS_OF_K + group;
            k.scales[block][lane] = stored.scales[2 * group] as u8;
            k.minimums[block][lane] = stored.scales[2 * group + 1] as u8;
            let quants = quants.map(|quant| quant as u8 ^ 0x80);
            put_bytes(&mut lines[8 * block..][..8], lane, &quants);
        }
    }
}

/// The 16 bytes of a stored block: low nibbles are columns 0 to 15, high ones 16 to 31, which is
/// what a line holds too, four columns at a time.
fn put_nibbles(lines: &mut [Line], lane: usize, stored: &[u8]) {
    for (line, four) in lines.iter_mut().zip(stored.as_chunks::<4>().0) {
        line.0[4 * lane..][..4].copy_from_slice(four);
    }
}

/// 32 bytes of a block, four columns a line.
fn put_bytes(lines: &mut [Line], lane: usize, quants: &[u8; BLOCK]) {
    for (line, four) in lines.iter_mut().zip(quants.as_chunks::<4>().0) {
        line.0[4 * lane..][..4].copy_from_slice(four);
    }
}

/// Where a row of the file goes. Rope's pairs are `i` and `half + i` here, so that both sides of a
/// pair are whole vectors.
fn place(order: RowOrder, row: usize) -> usize {
    order.place(row, Pairs::Halves)
}
