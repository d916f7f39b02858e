//! How is a tensor stored? ggml's formats: the five that the engine computes with by name, the
//! rest by number, with the block sizes that checking a tensor's bounds needs.

/// Storage format of a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Dtype {
    /// 32-bit floats.
    F32,
    /// 16-bit floats.
    F16,
    /// Blocks of 32: f16 scale, 4-bit values.
    Q4_0,
    /// Blocks of 32: f16 scale and minimum, 4-bit values.
    Q4_1,
    /// Blocks of 32: f16 scale, 5-bit values.
    Q5_0,
    /// Blocks of 32: f16 scale and minimum, 5-bit values.
    Q5_1,
    /// Blocks of 32: f16 scale, 8-bit values.
    Q8_0,
    /// Blocks of 256 of 8 groups: 4-bit values, 6-bit scales and minimums, an f16 for each kind of these.
    Q4K,
    /// The same with 5-bit values.
    Q5K,
    /// Blocks of 256 of 16 groups: 6-bit values, 8-bit scales, an f16 for these.
    Q6K,
    /// 16-bit floats with the range of 32-bit ones.
    BF16,
    /// Another ggml type, by its number.
    Other(u32),
}

impl Dtype {
    /// From ggml's number.
    pub fn from_ggml(number: u32) -> Self {
        match number {
            0 => Self::F32,
            1 => Self::F16,
            2 => Self::Q4_0,
            3 => Self::Q4_1,
            6 => Self::Q5_0,
            7 => Self::Q5_1,
            8 => Self::Q8_0,
            12 => Self::Q4K,
            13 => Self::Q5K,
            14 => Self::Q6K,
            30 => Self::BF16,
            other => Self::Other(other),
        }
    }

    /// Values and bytes per block; `None` for a format whose size is unknown here.
    pub fn block(self) -> Option<(u64, u64)> {
        Some(match self {
            Self::F32 => (1, 4),
            Self::F16 | Self::BF16 => (1, 2),
            Self::Q4_0 => (32, 18),
            Self::Q4_1 => (32, 20),
            Self::Q5_0 => (32, 22),
            Self::Q5_1 => (32, 24),
            Self::Q8_0 => (32, 34),
            Self::Q4K => (256, 144),
            Self::Q5K => (256, 176),
            Self::Q6K => (256, 210),
            // ggml's table (gguf-py, GGML_QUANT_SIZES): legacy, K, IQ, plain, ternary, MXFP4.
            Self::Other(number) => match number {
                10 => (256, 84),
                11 => (256, 110),
                15 => (256, 292),
                16 => (256, 66),
                17 => (256, 74),
                18 => (256, 98),
                19 => (256, 50),
                20 => (32, 18),
                21 => (256, 110),
                22 => (256, 82),
                23 => (256, 136),
                24 => (1, 1),
                25 => (1, 2),
                26 => (1, 4),
                27 | 28 => (1, 8),
                29 => (256, 56),
                34 => (256, 54),
                35 => (256, 66),
                39 => (32, 17),
                _ => return None,
            },
        })
    }
}
