//! How do weights lie in memory?
//!
//! Sixteen weight rows make a *group*; a group's rows sit side by side in the lanes of a vector,
//! so a product needs no sum across lanes and every output is summed over its columns in order.
//! Per block of 32 columns a group has 4 lines of nibbles or 8 lines of bytes (the layout is that
//! of [`Isa::nibbles`] and [`Isa::bytes`]), 16 scales and, for Q4_1, 16 minimums. Weights that are
//! not quantised keep their precision: one vector of 16 rows per column.
//!
//! The last group is filled up with rows of zeros.
//!
//! [`Isa::nibbles`]: super::isa::Isa::nibbles
//! [`Isa::bytes`]: super::isa::Isa::bytes

use prompt::gguf::Dtype;

use super::isa::{Halves, LANES, Line};
use crate::ops::{RowOrder, Tensor};

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

/// The packed values by format; groups follow one another in each vector.
#[derive(Debug)]
pub(crate) enum Values {
    /// weight = scale × (nibble - 8)
    Q4_0 {
        lines: Vec<Line>,
        scales: Vec<Scales>,
    },
    /// weight = scale × nibble + minimum
    Q4_1 {
        lines: Vec<Line>,
        scales: Vec<Scales>,
        minimums: Vec<Scales>,
    },
    /// weight = scale × (byte - 128)
    Q8_0 {
        lines: Vec<Line>,
        scales: Vec<Scales>,
    },
    /// One f16 per row and column.
    F16 { columns: Vec<Scales> },
    /// One f32 per row and column.
    F32 { columns: Vec<[f32; LANES]> },
}

impl Packed {
    /// Packs a tensor whose size the loader has checked.
    pub(crate) fn new(tensor: &Tensor<'_>, order: RowOrder) -> Packed {
        let (rows, cols) = (tensor.rows, tensor.cols);
        let groups = rows.div_ceil(LANES);
        let blocks = groups * (cols / BLOCK);
        let zero_lines = |lines: usize, fill: u8| vec![Line([fill; 64]); blocks * lines];
        let zero_scales = || vec![Scales([0; LANES]); blocks];
        let values = match tensor.dtype {
            // Rows of zeros: their scale is 0, whatever the quants.
            Dtype::Q4_0 => Values::Q4_0 {
                lines: zero_lines(4, 0),
                scales: zero_scales(),
            },
            Dtype::Q4_1 => Values::Q4_1 {
                lines: zero_lines(4, 0),
                scales: zero_scales(),
                minimums: zero_scales(),
            },
            Dtype::Q8_0 => Values::Q8_0 {
                lines: zero_lines(8, 128),
                scales: zero_scales(),
            },
            Dtype::F16 => Values::F16 {
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
            packed.put_row(place(order, row), bytes);
        }
        packed
    }

    /// Groups of 16 rows.
    pub(crate) fn groups(&self) -> usize {
        self.rows.div_ceil(LANES)
    }

    /// Whether products with it read the rows before quantisation.
    pub(crate) fn is_dense(&self) -> bool {
        matches!(self.values, Values::F16 { .. } | Values::F32 { .. })
    }

    /// Bytes in memory.
    pub(crate) fn bytes(&self) -> usize {
        match &self.values {
            Values::Q4_0 { lines, scales } | Values::Q8_0 { lines, scales } => {
                size_of_val(&lines[..]) + size_of_val(&scales[..])
            }
            Values::Q4_1 {
                lines,
                scales,
                minimums,
            } => size_of_val(&lines[..]) + size_of_val(&scales[..]) + size_of_val(&minimums[..]),
            Values::F16 { columns } => size_of_val(&columns[..]),
            Values::F32 { columns } => size_of_val(&columns[..]),
        }
    }

    fn put_row(&mut self, row: usize, bytes: &[u8]) {
        let (group, lane) = (row / LANES, row % LANES);
        let (cols, blocks) = (self.cols, self.cols / BLOCK);
        match &mut self.values {
            Values::Q4_0 { lines, scales } => {
                for (block, stored) in bytes.as_chunks::<18>().0.iter().enumerate() {
                    let block = group * blocks + block;
                    scales[block].0[lane] = u16::from_le_bytes([stored[0], stored[1]]);
                    put_nibbles(&mut lines[4 * block..][..4], lane, &stored[2..]);
                }
            }
            Values::Q4_1 {
                lines,
                scales,
                minimums,
            } => {
                for (block, stored) in bytes.as_chunks::<20>().0.iter().enumerate() {
                    let block = group * blocks + block;
                    scales[block].0[lane] = u16::from_le_bytes([stored[0], stored[1]]);
                    minimums[block].0[lane] = u16::from_le_bytes([stored[2], stored[3]]);
                    put_nibbles(&mut lines[4 * block..][..4], lane, &stored[4..]);
                }
            }
            Values::Q8_0 { lines, scales } => {
                for (block, stored) in bytes.as_chunks::<34>().0.iter().enumerate() {
                    let block = group * blocks + block;
                    scales[block].0[lane] = u16::from_le_bytes([stored[0], stored[1]]);
                    for (index, four) in stored[2..].as_chunks::<4>().0.iter().enumerate() {
                        let shifted = four.map(|byte| byte ^ 0x80);
                        lines[8 * block + index].0[4 * lane..][..4].copy_from_slice(&shifted);
                    }
                }
            }
            Values::F16 { columns } => {
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
        let half = |bits: u16| half::f16::from_bits(bits).to_f32();
        for (column, out) in out.iter_mut().enumerate() {
            let block = group * blocks + column / BLOCK;
            let (line, byte) = (column % BLOCK / 4, 4 * lane + column % 4);
            let nibble = |lines: &[Line]| {
                let both = lines[4 * block + line % 4].0[byte];
                f32::from(if line < 4 { both & 15 } else { both >> 4 })
            };
            *out = match &self.values {
                Values::Q4_0 { lines, scales } => {
                    half(scales[block].0[lane]) * (nibble(lines) - 8.0)
                }
                Values::Q4_1 {
                    lines,
                    scales,
                    minimums,
                } => half(scales[block].0[lane]) * nibble(lines) + half(minimums[block].0[lane]),
                Values::Q8_0 { lines, scales } => {
                    let value = f32::from(lines[8 * block + line].0[byte]) - 128.0;
                    half(scales[block].0[lane]) * value
                }
                Values::F16 { columns } => half(columns[group * cols + column].0[lane]),
                Values::F32 { columns } => columns[group * cols + column][lane],
            };
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

/// Where a row of the file goes. Rope's pairs `2i`, `2i + 1` become `i` and `half + i`, so that
/// both sides of a pair are whole vectors.
fn place(order: RowOrder, row: usize) -> usize {
    match order {
        RowOrder::Plain => row,
        RowOrder::Rotary { head_dim } => {
            let (head, inside) = (row / head_dim, row % head_dim);
            head * head_dim + inside / 2 + (inside % 2) * (head_dim / 2)
        }
    }
}
