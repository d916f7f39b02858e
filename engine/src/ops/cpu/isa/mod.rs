//! What may a kernel ask of the processor?
//!
//! Kernels are written once, over vectors of 16 lanes, and compiled for each instruction set that
//! implements [`Isa`]. Every operation here is defined per lane and correctly rounded, and sums
//! across lanes have one fixed order, so all variants give the same bits: the scalar one is the
//! slow twin of the others, and a node may move to another machine without moving a logit.
//!
//! An `Isa` value is a proof: it exists only where [`Isa::detect`] found the instructions, which is
//! what lets its methods be safe. Kernels and their helpers must be `#[inline(always)]` and free
//! of closures over vectors: they have to end up inside the one function per variant that
//! carries the `target_feature`, or vectors would go through memory at each call.

#[cfg(target_arch = "x86_64")]
pub(crate) mod avx2;
#[cfg(target_arch = "x86_64")]
pub(crate) mod avx512;
pub(crate) mod portable;

/// Runs the body for each index below a constant of at most 12. Where the instruction set has
/// registers enough, by copies of the body: left to itself the compiler keeps long bodies as
/// loops, and the vectors they index in memory.
macro_rules! unrolled {
    ($isa:ident, $index:ident < $count:ident, $body:block) => {
        if $isa::WIDE_TILES {
            unrolled!(@ $index $count $body 0 1 2 3 4 5 6 7 8 9 10 11);
        } else {
            let mut place = 0;
            while place < $count {
                let $index = place;
                $body
                place += 1;
            }
        }
    };
    (@ $index:ident $count:ident $body:block $($number:literal)+) => {
        $({
            const PLACE: usize = $number;
            if PLACE < $count {
                let $index = PLACE;
                $body
            }
        })+
    };
}
pub(crate) use unrolled;

/// Lanes of a vector.
pub(crate) const LANES: usize = 16;

/// One cache line of packed weights.
#[derive(Debug, Clone, Copy)]
#[repr(align(64))]
pub(crate) struct Line(pub(crate) [u8; 64]);

/// Sixteen f16 values by their bits: scales of 16 weight rows, or 16 stored keys or values.
pub(crate) type Halves = [u16; LANES];

/// Sums of products of 16 weight rows with each of `M` input rows.
pub(crate) type Dots<const M: usize> = [[i32; LANES]; M];

/// A computation to be compiled for an instruction set.
pub(crate) trait Kernel {
    /// What it computes.
    type Output;
    /// Runs it. Implementations are `#[inline(always)]`.
    fn run<I: Isa>(self, isa: I) -> Self::Output;
}

/// What becomes of the products of a block with `M` rows.
pub(crate) enum Finish<'a, F, const M: usize> {
    /// They are left here.
    Keep(&'a mut Dots<M>),
    /// They are added to sums.
    Add(Addition<'a, F, M>),
}

/// `scale × factor × product` is added to the rows' sums, and then `minimum × total`. Each row's
/// operations are the same, in the same order, wherever they are done.
pub(crate) struct Addition<'a, F, const M: usize> {
    /// Added to each row's products, if it is not 0 for all.
    pub(crate) starts: Option<&'a [i32; M]>,
    /// By how many bits each row's products are moved up, 0 or 7, and what is added then.
    pub(crate) lower: Option<(&'a [i32; M], &'a Dots<M>)>,
    pub(crate) scales: F,
    pub(crate) factors: &'a [f32; M],
    /// Minimums, and the rows' totals.
    pub(crate) minimums: Option<(F, &'a [f32; M])>,
    pub(crate) sums: &'a mut [[f32; LANES]; M],
}

impl<F: Copy, const M: usize> Finish<'_, F, M> {
    /// For one row, from its products.
    #[inline(always)]
    fn row<I: Isa<F = F>>(&mut self, isa: I, row: usize, mut dot: I::I) {
        let add = match self {
            Finish::Keep(dots) => return isa.store_int(dot, &mut dots[row]),
            Finish::Add(add) => add,
        };
        if let Some((ups, lower)) = add.lower {
            if ups[row] != 0 {
                dot = isa.up_7(dot);
            }
            dot = isa.add_int(dot, isa.load_int(&lower[row]));
        }
        if let Some(starts) = add.starts {
            dot = isa.add_int(dot, isa.splat_int(starts[row]));
        }
        let place = &mut add.sums[row];
        let scale = isa.mul(add.scales, isa.splat(add.factors[row]));
        let mut sums = isa.fma(isa.to_float(dot), scale, isa.load(place));
        if let Some((minimums, totals)) = add.minimums {
            sums = isa.fma(minimums, isa.splat(totals[row]), sums);
        }
        isa.store(sums, place);
    }
}

/// A block's products with a panel of rows as they are made where they need no order of their own.
macro_rules! panel {
    ($what:literal, $name:ident, $lines:literal, $unpack:ident, $dot:ident) => {
        #[doc = concat!($what, " for `M` rows, from 0, and what becomes of it.")]
        #[inline(always)]
        fn $name<const M: usize>(
            self,
            lines: &[Line; $lines],
            inputs: &[[i8; 32]; M],
            mut finish: Finish<'_, Self::F, M>,
        ) {
            let weights = self.$unpack(lines);
            for (row, input) in inputs.iter().enumerate() {
                let dot = self.$dot(&weights, input, self.splat_int(0));
                finish.row(self, row, dot);
            }
        }
    };
}

/// An instruction set, as operations on 16 lanes.
pub(crate) trait Isa: Copy + Send + Sync + 'static {
    /// 16 lanes of f32.
    type F: Copy;
    /// 16 lanes of i32.
    type I: Copy;
    /// 32 unsigned bytes for each of 16 weight rows.
    type Weights: Copy;

    /// Whether 12 rows of results fit the registers beside a block of weights; 4 do in any case.
    const WIDE_TILES: bool;

    /// The proof, if this processor has the instructions.
    fn detect() -> Option<Self>;
    /// Runs a kernel compiled for this instruction set.
    fn run<K: Kernel>(self, kernel: K) -> K::Output;

    /// Asks for memory that will be read soon.
    #[inline(always)]
    fn prefetch<T>(self, _place: &T) {}

    fn splat(self, value: f32) -> Self::F;
    fn load(self, from: &[f32; LANES]) -> Self::F;
    fn store(self, value: Self::F, to: &mut [f32; LANES]);
    fn add(self, a: Self::F, b: Self::F) -> Self::F;
    fn sub(self, a: Self::F, b: Self::F) -> Self::F;
    fn mul(self, a: Self::F, b: Self::F) -> Self::F;
    fn div(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a * b + c`, rounded once.
    fn fma(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    fn max(self, a: Self::F, b: Self::F) -> Self::F;
    fn min(self, a: Self::F, b: Self::F) -> Self::F;
    fn abs(self, a: Self::F) -> Self::F;
    /// The largest lane.
    fn largest(self, a: Self::F) -> f32;
    /// The first `count` lanes of `a`, then those of `b`.
    fn split(self, count: usize, a: Self::F, b: Self::F) -> Self::F;
    /// The first `count` lanes of `a`, then `rest`.
    #[inline(always)]
    fn first(self, count: usize, a: Self::F, rest: f32) -> Self::F {
        self.split(count, a, self.splat(rest))
    }

    fn load_half(self, from: &Halves) -> Self::F;
    /// Rounds to nearest, ties to even.
    fn store_half(self, value: Self::F, to: &mut Halves);

    fn to_float(self, a: Self::I) -> Self::F;
    /// Rounds to nearest, ties to even.
    fn round(self, a: Self::F) -> Self::I;
    /// 2 to the power of each lane, for lanes from -126 to 127.
    fn power_of_two(self, a: Self::I) -> Self::F;
    /// The sum of all lanes.
    fn total(self, a: Self::I) -> i32;
    /// Stores the lanes as bytes; they fit.
    fn store_bytes(self, a: Self::I, to: &mut [i8; LANES]);

    /// A block of 4-bit weights: byte `4r + i` of line `l` holds, for row `r`, column `4l + i` in
    /// its low and column `16 + 4l + i` in its high nibble.
    fn four(self, lines: &[Line; 4]) -> Self::Weights;
    /// The same with a fifth bit: bit `l` of byte `4r + i` of the last line is that of column `4l + i`.
    fn five(self, lines: &[Line; 5]) -> Self::Weights;
    /// The same with two more: those of column `4l + i` are bits `2(l mod 4)` and the next of byte
    /// `4r + i` of line `4 + l / 4`.
    fn six(self, lines: &[Line; 6]) -> Self::Weights;
    /// A block of bytes: byte `4r + i` of line `l` is row `r`, column `4l + i`, plus 128.
    fn bytes(self, lines: &[Line; 8]) -> Self::Weights;
    /// For each row: `start` plus the sum of weight times input, for weights below 16.
    fn dot_four(self, weights: &Self::Weights, input: &[i8; 32], start: Self::I) -> Self::I;
    /// The same for weights below 64.
    #[inline(always)]
    fn dot_six(self, weights: &Self::Weights, input: &[i8; 32], start: Self::I) -> Self::I {
        let first = self.dot_half(weights, false, input, start);
        self.dot_half(weights, true, input, first)
    }
    /// The same over the first or the second 16 columns alone.
    fn dot_half(
        self,
        weights: &Self::Weights,
        second: bool,
        input: &[i8; 32],
        start: Self::I,
    ) -> Self::I;
    /// For each row: `start` plus the sum of (weight - 128 + `BYTES_OFFSET`) times input.
    fn dot_bytes(self, weights: &Self::Weights, input: &[i8; 32], start: Self::I) -> Self::I;
    /// What [`Isa::dot_bytes`] leaves to its caller: 128 where the instructions take unsigned
    /// weights, 0 where they do not.
    const BYTES_OFFSET: i32;

    /// Whether many rows are better multiplied by `add_four` and its sisters than by a
    /// block of weights that was unpacked before: where registers are few, they can go over the
    /// weights in an order that needs no more of them than there are.
    const BY_PANEL: bool = false;
    panel!("[`Isa::dot_four`]", add_four, 4, four, dot_four);
    panel!(
        "[`Isa::dot_six`] of 5-bit weights",
        add_five,
        5,
        five,
        dot_six
    );
    panel!("[`Isa::dot_bytes`]", add_bytes, 8, bytes, dot_bytes);
    /// [`Isa::dot_half`] of 6-bit weights for `M` rows, from 0, and what becomes of it.
    #[inline(always)]
    fn add_half<const M: usize>(
        self,
        (lines, second): (&[Line; 6], bool),
        inputs: &[[i8; 32]; M],
        mut finish: Finish<'_, Self::F, M>,
    ) {
        let weights = self.six(lines);
        for (row, input) in inputs.iter().enumerate() {
            let dot = self.dot_half(&weights, second, input, self.splat_int(0));
            finish.row(self, row, dot);
        }
    }

    /// [`Isa::dot_bytes`] for `M` rows that are all fine, upper and lower parts together, and what
    /// becomes of it.
    #[inline(always)]
    fn add_fine_bytes<const M: usize>(
        self,
        lines: &[Line; 8],
        (upper, lower): (&[[i8; 32]; M], &[[i8; 32]; M]),
        mut finish: Finish<'_, Self::F, M>,
    ) {
        let weights = self.bytes(lines);
        for (row, (upper, lower)) in upper.iter().zip(lower).enumerate() {
            let upper = self.dot_bytes(&weights, upper, self.splat_int(0));
            let lower = self.dot_bytes(&weights, lower, self.splat_int(0));
            finish.row(self, row, self.add_int(self.up_7(upper), lower));
        }
    }

    fn load_int(self, from: &[i32; LANES]) -> Self::I;
    fn store_int(self, value: Self::I, to: &mut [i32; LANES]);
    fn splat_int(self, value: i32) -> Self::I;
    fn add_int(self, a: Self::I, b: Self::I) -> Self::I;
    fn sub_int(self, a: Self::I, b: Self::I) -> Self::I;
    /// Each lane times 128.
    fn up_7(self, a: Self::I) -> Self::I;
    /// Each lane divided by 128, rounded down.
    fn down_7(self, a: Self::I) -> Self::I;

    /// Small integers as numbers.
    #[inline(always)]
    fn load_small(self, from: &[u8; LANES]) -> Self::F {
        let mut wide = [0.0; LANES];
        for (wide, small) in wide.iter_mut().zip(from) {
            *wide = f32::from(*small);
        }
        self.load(&wide)
    }

    /// The same with signs.
    #[inline(always)]
    fn load_signed(self, from: &[u8; LANES]) -> Self::F {
        let mut wide = [0.0; LANES];
        for (wide, small) in wide.iter_mut().zip(from) {
            *wide = f32::from(*small as i8);
        }
        self.load(&wide)
    }

    /// bf16 values by their bits.
    #[inline(always)]
    fn load_brain(self, from: &Halves) -> Self::F {
        let mut wide = [0.0; LANES];
        for (wide, bits) in wide.iter_mut().zip(from) {
            *wide = f32::from_bits(u32::from(*bits) << 16);
        }
        self.load(&wide)
    }

    /// The sum of all lanes, always in the same order: halves onto each other, four times.
    #[inline(always)]
    fn sum(self, a: Self::F) -> f32 {
        let mut lanes = [0.0; LANES];
        self.store(a, &mut lanes);
        let mut width = LANES / 2;
        while width > 0 {
            for lane in 0..width {
                lanes[lane] += lanes[lane + width];
            }
            width /= 2;
        }
        lanes[0]
    }

    /// e to the power of each lane, to about 1 part in 10^7, and exactly 1 for 0. Lanes beyond
    /// what f32 holds are taken for the nearest that fits.
    #[inline(always)]
    fn exp(self, a: Self::F) -> Self::F {
        const POLYNOMIAL: [f32; 6] = [
            1.0 / 720.0,
            1.0 / 120.0,
            1.0 / 24.0,
            1.0 / 6.0,
            1.0 / 2.0,
            1.0,
        ];
        // ln 2 in two parts, so that the multiple taken off is exact.
        const LN_2_HIGH: f32 = 0.693_359_4;
        const LN_2_LOW: f32 = -2.121_944_4e-4;
        let a = self.min(self.max(a, self.splat(-87.0)), self.splat(88.0));
        let power = self.round(self.mul(a, self.splat(std::f32::consts::LOG2_E)));
        let whole = self.to_float(power);
        let rest = self.fma(whole, self.splat(-LN_2_HIGH), a);
        let rest = self.fma(whole, self.splat(-LN_2_LOW), rest);
        let mut sum = self.splat(POLYNOMIAL[0]);
        for factor in &POLYNOMIAL[1..] {
            sum = self.fma(sum, rest, self.splat(*factor));
        }
        let sum = self.fma(sum, rest, self.splat(1.0));
        self.mul(sum, self.power_of_two(power))
    }
}
