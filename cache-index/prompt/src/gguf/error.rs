//! Why could a GGUF header not be read? Each kind names the place and what a sound file has there.

use super::Dtype;

/// Why a GGUF header could not be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum GgufError {
    /// The file does not begin with `GGUF`.
    #[error(
        "not a GGUF file: it begins with {}, not `GGUF`; convert the model to GGUF first",
        shown(found)
    )]
    NotGguf {
        /// The first bytes, as many as there are, up to four.
        found: Vec<u8>,
    },
    /// The file was written for big-endian machines.
    #[error("this GGUF file is big-endian; convert it to little-endian first")]
    BigEndian,
    /// A version that this reader does not know.
    #[error("GGUF version {version} is not supported; versions 2 and 3 are")]
    Version {
        /// The version found.
        version: u32,
    },
    /// The file ends inside its header.
    #[error(
        "the GGUF file is truncated: {wanted} more bytes wanted at byte {at}, {left} left; download it again"
    )]
    Truncated {
        /// Where the read began.
        at: usize,
        /// How much it wanted.
        wanted: u64,
        /// How much there was.
        left: usize,
    },
    /// A count that the file cannot hold, or that is past this reader's limit.
    #[error("damaged GGUF file: {count} {what} at byte {at}; at most {max} are possible there")]
    Count {
        /// What is counted.
        what: &'static str,
        /// The count found.
        count: u64,
        /// The most that could be there.
        max: u64,
        /// Where in the file.
        at: usize,
    },
    /// A string that is not UTF-8.
    #[error("damaged GGUF file: the string at byte {at} is not UTF-8")]
    Utf8 {
        /// Where the string begins.
        at: usize,
    },
    /// A metadata value that is not what its type or key demands.
    #[error("GGUF metadata `{key}`: {why}")]
    Value {
        /// The metadata key.
        key: String,
        /// What is wrong.
        why: String,
    },
    /// One key given twice.
    #[error("damaged GGUF file: metadata key `{key}` appears twice")]
    DuplicateKey {
        /// The key.
        key: String,
    },
    /// One tensor named twice.
    #[error("damaged GGUF file: tensor `{name}` appears twice")]
    DuplicateTensor {
        /// The tensor.
        name: String,
    },
    /// A tensor's sizes are impossible.
    #[error("damaged GGUF file: tensor `{name}` has {why}")]
    Dimensions {
        /// The tensor.
        name: String,
        /// What is wrong with its sizes.
        why: String,
    },
    /// A tensor's storage format is unknown, so its length is too.
    #[error(
        "tensor `{name}` has the storage format {dtype:?}, which is unknown; F32, F16, Q4_0, Q4_1 and Q8_0 can be served"
    )]
    UnknownTensorType {
        /// The tensor.
        name: String,
        /// Its format.
        dtype: Dtype,
    },
    /// A tensor's offset breaks the file's alignment.
    #[error("damaged GGUF file: tensor `{name}` at offset {offset} is not aligned to {alignment}")]
    Misaligned {
        /// The tensor.
        name: String,
        /// Its offset.
        offset: u64,
        /// The alignment promised.
        alignment: u64,
    },
    /// Two tensors share bytes.
    #[error("damaged GGUF file: tensors `{name}` and `{other}` lie over each other")]
    Overlap {
        /// The one that begins later.
        name: String,
        /// The one before it.
        other: String,
    },
    /// A tensor's data lies past the end of the file.
    #[error(
        "the GGUF file is truncated: tensor `{name}` ({bytes} bytes at offset {offset}) ends past the file's {file_bytes} bytes; download it again"
    )]
    TensorOutside {
        /// The tensor.
        name: String,
        /// Its offset from the start of tensor data.
        offset: u64,
        /// Its length.
        bytes: u64,
        /// The file's length.
        file_bytes: u64,
    },
}

fn shown(bytes: &[u8]) -> String {
    if bytes.is_empty() {
        "nothing".to_owned()
    } else {
        format!("`{}`", bytes.escape_ascii())
    }
}
