//! One row of a weight: from the file's layout into the packed one, and back to numbers.

use prompt::gguf::Dtype;

use super::{BLOCK, BLOCKS_OF_K, LANES, Line, Packed, Parts, Scales, place};
use crate::ops::reference::dequant::five_bits;
use crate::ops::reference::dequant::k::{KBlock, SixBits};
use crate::sys::stored::{Plain, Stored};

/// Nothing fills a weight that lies in a file.
fn own<T: Plain>(stored: &mut Stored<T>) -> &mut [T] {
    stored.owned_mut().expect("only a new weight is filled")
}

/// A block's place, and the row's in its group.
type At = (usize, usize);

impl Packed {
    /// Fills in a row, `row` being where it goes.
    pub(super) fn put_row(&mut self, row: usize, bytes: &[u8]) {
        let (group, lane) = (row / LANES, row % LANES);
        let (cols, dtype) = (self.cols, self.dtype);
        let first = group * (cols / BLOCK);
        let columns = group * cols..(group + 1) * cols;
        let parts = &mut self.parts;
        match dtype {
            Dtype::Q4_0 | Dtype::Q4_1 | Dtype::Q5_0 | Dtype::Q5_1 | Dtype::Q8_0 => {
                let (_, block_bytes) = dtype.block().unwrap_or((1, 1));
                let blocks = bytes.chunks_exact(block_bytes as usize);
                for (block, stored) in (first..).zip(blocks) {
                    parts.put_block(dtype, (block, lane), stored);
                }
            }
            Dtype::Q4K | Dtype::Q5K => parts.put_k_row(dtype, (first, lane), bytes),
            Dtype::Q6K => parts.put_six_bit_row((first, lane), bytes),
            Dtype::F16 | Dtype::BF16 => {
                let columns = &mut own(&mut parts.scales)[columns];
                for (column, stored) in columns.iter_mut().zip(bytes.as_chunks::<2>().0) {
                    column.0[lane] = u16::from_le_bytes(*stored);
                }
            }
            Dtype::F32 | Dtype::Other(_) => {
                let columns = &mut own(&mut parts.floats)[columns];
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
        let parts = &self.parts;
        let column = |column: usize| group * cols + column;
        match self.dtype {
            Dtype::F16 => {
                for (index, out) in out.iter_mut().enumerate() {
                    *out = half(parts.scales[column(index)].0[lane]);
                }
            }
            Dtype::BF16 => {
                for (index, out) in out.iter_mut().enumerate() {
                    let bits = parts.scales[column(index)].0[lane];
                    *out = f32::from_bits(u32::from(bits) << 16);
                }
            }
            Dtype::F32 | Dtype::Other(_) => {
                for (index, out) in out.iter_mut().enumerate() {
                    *out = parts.floats[column(index)][lane];
                }
            }
            dtype => {
                let stored = (group * blocks..).zip(out.as_chunks_mut::<BLOCK>().0);
                for (block, out) in stored {
                    parts.block(dtype, (block, lane), out);
                }
            }
        }
    }
}

impl Parts {
    fn put_block(&mut self, dtype: Dtype, (block, lane): At, stored: &[u8]) {
        own(&mut self.scales)[block].0[lane] = half_bits(&stored[..2]);
        let (minimum, quants) = match dtype {
            Dtype::Q4_1 | Dtype::Q5_1 => (Some(&stored[2..4]), &stored[4..]),
            _ => (None, &stored[2..]),
        };
        if let Some(minimum) = minimum {
            own(&mut self.minimums)[block].0[lane] = half_bits(minimum);
        }
        let lines = own(&mut self.lines);
        match dtype {
            Dtype::Q8_0 => {
                let mut bytes = [0; BLOCK];
                for (byte, quant) in bytes.iter_mut().zip(quants) {
                    *byte = quant ^ 0x80;
                }
                put_bytes(&mut lines[8 * block..][..8], lane, &bytes);
            }
            Dtype::Q5_0 | Dtype::Q5_1 => {
                put_five(&mut lines[5 * block..][..5], lane, &five_bits(quants));
            }
            // Low nibbles are columns 0 to 15, high ones 16 to 31, as in a line.
            _ => put_four_columns(&mut lines[4 * block..][..4], lane, quants),
        }
    }

    /// A row of Q4_K or Q5_K.
    fn put_k_row(&mut self, dtype: Dtype, (first, lane): At, bytes: &[u8]) {
        const SIGN: u16 = 0x8000;
        let (_, block_bytes) = dtype.block().unwrap_or((1, 1));
        for (of_row, stored) in bytes.chunks_exact(block_bytes as usize).enumerate() {
            let stored = KBlock::read(dtype, stored);
            let unit = first / BLOCKS_OF_K + of_row;
            own(&mut self.scales)[unit].0[lane] = half_bits(&stored.scale);
            own(&mut self.minimums)[unit].0[lane] = half_bits(&stored.minimum) ^ SIGN;
            for (group, quants) in stored.quants.as_chunks::<BLOCK>().0.iter().enumerate() {
                let block = unit * BLOCKS_OF_K + group;
                own(&mut self.small_scales)[block][lane] = stored.scales[group];
                own(&mut self.small_minimums)[block][lane] = stored.minimums[group];
                let lines = own(&mut self.lines);
                if dtype == Dtype::Q5K {
                    put_five(&mut lines[5 * block..][..5], lane, quants);
                } else {
                    put_nibbles(&mut lines[4 * block..][..4], lane, quants);
                }
            }
        }
    }

    /// A row of Q6_K.
    fn put_six_bit_row(&mut self, (first, lane): At, bytes: &[u8]) {
        for (of_row, stored) in bytes.as_chunks::<210>().0.iter().enumerate() {
            let stored = SixBits::read(stored);
            let unit = first / BLOCKS_OF_K + of_row;
            own(&mut self.scales)[unit].0[lane] = half_bits(&stored.scale);
            for (group, quants) in stored.quants.as_chunks::<BLOCK>().0.iter().enumerate() {
                let block = unit * BLOCKS_OF_K + group;
                own(&mut self.small_scales)[block][lane] = stored.scales[2 * group] as u8;
                own(&mut self.small_minimums)[block][lane] = stored.scales[2 * group + 1] as u8;
                let quants = quants.map(|quant| (quant + 32) as u8);
                put_six(&mut own(&mut self.lines)[6 * block..][..6], lane, &quants);
            }
        }
    }

    /// The numbers of one row's block.
    fn block(&self, dtype: Dtype, at: At, out: &mut [f32; BLOCK]) {
        let (block, lane) = at;
        let of = |scales: &[Scales], at: usize| half(scales[at].0[lane]);
        let unit = block / BLOCKS_OF_K;
        let (scales, offset, minimum) = match dtype {
            Dtype::Q4_0 => ([of(&self.scales, block); 2], 8, None),
            Dtype::Q5_0 => ([of(&self.scales, block); 2], 16, None),
            Dtype::Q8_0 => ([of(&self.scales, block); 2], 128, None),
            Dtype::Q4K | Dtype::Q5K => {
                let scale = of(&self.scales, unit) * f32::from(self.small_scales[block][lane]);
                let least = f32::from(self.small_minimums[block][lane]);
                ([scale; 2], 0, Some(of(&self.minimums, unit) * least))
            }
            Dtype::Q6K => {
                let scale = |of_half: u8| of(&self.scales, unit) * f32::from(of_half as i8);
                let (first, second) = (&self.small_scales[block], &self.small_minimums[block]);
                ([scale(first[lane]), scale(second[lane])], 32, None)
            }
            _ => {
                let minimum = of(&self.minimums, block);
                ([of(&self.scales, block); 2], 0, Some(minimum))
            }
        };
        for (column, out) in out.iter_mut().enumerate() {
            let quant = i32::from(self.quant(dtype, at, column)) - offset;
            let product = scales[column / 16] * quant as f32;
            *out = minimum.map_or(product, |minimum| product + minimum);
        }
    }

    /// The integer of one column of one row's block.
    fn quant(&self, dtype: Dtype, (block, lane): At, column: usize) -> u8 {
        let (line, byte) = (column / 4, 4 * lane + column % 4);
        let at = |of_block: usize, line: usize| self.lines[of_block * block + line].0[byte];
        let nibble = |of_block: usize| {
            let both = at(of_block, line % 4);
            if line < 4 { both & 15 } else { both >> 4 }
        };
        match dtype {
            Dtype::Q8_0 => at(8, line),
            Dtype::Q5_0 | Dtype::Q5_1 | Dtype::Q5K => nibble(5) | (at(5, 4) >> line & 1) << 4,
            Dtype::Q6K => nibble(6) | (at(6, 4 + line / 4) >> (2 * (line % 4)) & 3) << 4,
            _ => nibble(4),
        }
    }
}

fn half(bits: u16) -> f32 {
    half::f16::from_bits(bits).to_f32()
}

fn half_bits(stored: &[u8]) -> u16 {
    u16::from_le_bytes([stored[0], stored[1]])
}

/// Four bytes a line.
fn put_four_columns(lines: &mut [Line], lane: usize, stored: &[u8]) {
    for (line, four) in lines.iter_mut().zip(stored.as_chunks::<4>().0) {
        line.0[4 * lane..][..4].copy_from_slice(four);
    }
}

/// 32 bytes of a block, four columns a line.
fn put_bytes(lines: &mut [Line], lane: usize, quants: &[u8; BLOCK]) {
    put_four_columns(lines, lane, quants);
}

/// The lower four bits of 32 integers: columns 0 to 15 below, 16 to 31 above.
fn put_nibbles(lines: &mut [Line], lane: usize, quants: &[u8; BLOCK]) {
    let mut both = [0; BLOCK / 2];
    for (place, both) in both.iter_mut().enumerate() {
        *both = quants[place] & 15 | quants[place + BLOCK / 2] << 4;
    }
    put_four_columns(lines, lane, &both);
}

/// Integers of five bits: the fifth ones of columns `4l` to `4l + 3` are bits `l` of a fifth line.
fn put_five(lines: &mut [Line], lane: usize, quants: &[u8; BLOCK]) {
    let (nibbles, above) = lines.split_at_mut(4);
    put_nibbles(nibbles, lane, quants);
    for (column, quant) in quants.iter().enumerate() {
        above[0].0[4 * lane + column % 4] |= (quant >> 4) << (column / 4);
    }
}

/// Integers of six bits: the upper two of columns `4l` to `4l + 3` are bits `2(l mod 4)` and the
/// next of line `4 + l / 4`.
fn put_six(lines: &mut [Line], lane: usize, quants: &[u8; BLOCK]) {
    let (nibbles, above) = lines.split_at_mut(4);
    put_nibbles(nibbles, lane, quants);
    for (column, quant) in quants.iter().enumerate() {
        let line = column / 4;
        above[line / 4].0[4 * lane + column % 4] |= (quant >> 4) << (2 * (line % 4));
    }
}
