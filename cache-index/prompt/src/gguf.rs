//! What does a GGUF file say about itself? (skeleton: filled in the next commit)

use std::collections::BTreeMap;

/// The header of a GGUF file.
#[derive(Debug, Clone)]
pub struct Header {
    /// Key to value.
    pub metadata: BTreeMap<String, Value>,
    /// The tensors in file order.
    pub tensors: Vec<TensorInfo>,
    /// Where tensor data begins in the file.
    pub data_offset: u64,
    /// Alignment of tensor offsets.
    pub alignment: u64,
}

/// One tensor's place and shape.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorInfo {
    /// Name, such as `blk.0.attn_q.weight`.
    pub name: String,
    /// Sizes, fastest-varying first.
    pub dims: Vec<u64>,
    /// Storage format.
    pub dtype: Dtype,
    /// Offset from `Header::data_offset`.
    pub offset: u64,
    /// Length in bytes.
    pub bytes: u64,
}

/// Storage format of a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dtype {
    /// 32-bit floats.
    F32,
    /// 16-bit floats.
    F16,
    /// Blocks of 32: f16 scale, 4-bit values.
    Q4_0,
    /// Blocks of 32: f16 scale and minimum, 4-bit values.
    Q4_1,
    /// Blocks of 32: f16 scale, 8-bit values.
    Q8_0,
    /// Another ggml type, by its number.
    Other(u32),
}

/// A metadata value.
#[derive(Debug, Clone, PartialEq)]
pub enum Value {
    /// Any unsigned integer.
    U64(u64),
    /// Any signed integer.
    I64(i64),
    /// Any float.
    F64(f64),
    /// A bool.
    Bool(bool),
    /// A string.
    Str(String),
    /// An array.
    Array(Vec<Value>),
}

/// Why a header could not be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum GgufError {
    /// The file ends early.
    #[error("truncated GGUF file")]
    Truncated,
}

impl Header {
    /// Reads and checks the header; `file` is the whole file, so that tensor bounds are checked.
    pub fn parse(_: &[u8]) -> Result<Self, GgufError> {
        Err(GgufError::Truncated)
    }
}

impl Value {
    /// The value as an unsigned integer, if it is a non-negative integer.
    pub fn as_u64(&self) -> Option<u64> {
        match self {
            Self::U64(v) => Some(*v),
            Self::I64(v) => u64::try_from(*v).ok(),
            _ => None,
        }
    }

    /// The value as a float; integers convert.
    pub fn as_f64(&self) -> Option<f64> {
        match self {
            Self::F64(v) => Some(*v),
            Self::U64(v) => Some(*v as f64),
            Self::I64(v) => Some(*v as f64),
            _ => None,
        }
    }

    /// The value as a bool.
    pub fn as_bool(&self) -> Option<bool> {
        match self {
            Self::Bool(v) => Some(*v),
            _ => None,
        }
    }

    /// The value as a string.
    pub fn as_str(&self) -> Option<&str> {
        match self {
            Self::Str(v) => Some(v),
            _ => None,
        }
    }

    /// The value as an array.
    pub fn as_array(&self) -> Option<&[Value]> {
        match self {
            Self::Array(v) => Some(v),
            _ => None,
        }
    }
}
