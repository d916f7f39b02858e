//! Which tensors does a safetensors file hold, and where?
//!
//! Eight bytes of length, a JSON object of tensors, then their data. As the reference reader does, this one
//! demands that the data of all tensors fills the rest of the file without gap or overlap, and that each
//! one's length is what its shape and format say.

use std::collections::HashSet;
use std::fmt;

use serde::Deserialize;
use serde::de::{Deserializer, Error as _, IgnoredAny, MapAccess, SeqAccess, Visitor};

use super::{CheckpointError, TENSORS_MAX};
use crate::gguf::{Dtype, TensorInfo};

/// Longest header, which is the reference's own limit.
const HEADER_BYTES_MAX: u64 = 100_000_000;
/// Most dimensions of a tensor.
const DIMS_MAX: usize = 8;
/// Bytes before the header.
const LENGTH_BYTES: u64 = 8;

/// The header of a safetensors file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SafeTensors {
    /// The tensors in the order of their data, with the names that the file has and offsets from
    /// `data_offset`.
    pub tensors: Vec<TensorInfo>,
    /// Where tensor data begins in the file.
    pub data_offset: u64,
}

impl SafeTensors {
    /// Reads and checks the header; `bytes` is the whole file, `name` is for messages.
    pub fn parse(name: &str, bytes: &[u8]) -> Result<Self, CheckpointError> {
        let damaged = |why: String| CheckpointError::damaged(name, why);
        let (header, data_bytes) = split(bytes).map_err(damaged)?;
        let text = std::str::from_utf8(header)
            .map_err(|e| damaged(format!("has a header that is not UTF-8: {e}")))?;
        // The reference pads with blanks behind, and allows none before.
        if !text.starts_with('{') {
            return Err(damaged(
                "has a header that does not begin with `{`".to_owned(),
            ));
        }
        let Entries(entries) = serde_json::from_str(text)
            .map_err(|e| damaged(format!("has a header that is not JSON of tensors: {e}")))?;
        let mut names = HashSet::with_capacity(entries.len());
        let mut tensors = Vec::with_capacity(entries.len());
        for (tensor, entry) in &entries {
            let wrong = |why: String| CheckpointError::tensor(name, tensor, why);
            if !names.insert(tensor.as_str()) {
                return Err(wrong("appears twice".to_owned()));
            }
            tensors.push(entry.info(tensor, data_bytes).map_err(wrong)?);
        }
        tensors.sort_by_key(|tensor| (tensor.offset, tensor.bytes));
        check_filled(&tensors, data_bytes)
            .map_err(|(tensor, why)| CheckpointError::tensor(name, tensor, why))?;
        Ok(Self {
            tensors,
            data_offset: LENGTH_BYTES + header.len() as u64,
        })
    }
}

/// The header's bytes, and how many follow.
fn split(bytes: &[u8]) -> Result<(&[u8], u64), String> {
    let Some((length, rest)) = bytes.split_first_chunk::<8>() else {
        let have = bytes.len();
        return Err(format!(
            "is cut: {have} bytes, not even the length of a header; download it again"
        ));
    };
    let length = u64::from_le_bytes(*length);
    if length > HEADER_BYTES_MAX {
        let swapped = length.swap_bytes() <= rest.len() as u64;
        let or = if swapped { " (or is big-endian)" } else { "" };
        return Err(format!(
            "is no safetensors file{or}: its header would have {length} bytes, and at most {HEADER_BYTES_MAX} are allowed"
        ));
    }
    if length > rest.len() as u64 {
        return Err(format!(
            "is cut: its header has {length} bytes, and {} are left; download it again",
            rest.len()
        ));
    }
    let (header, data) = rest.split_at(length as usize);
    Ok((header, data.len() as u64))
}

/// Each tensor begins where the one before ends, the last one ends with the file.
fn check_filled(tensors: &[TensorInfo], data_bytes: u64) -> Result<(), (&str, String)> {
    let mut end = 0;
    for tensor in tensors {
        let begin = tensor.offset;
        if begin != end {
            let what = if begin < end {
                "overlaps"
            } else {
                "leaves a gap behind"
            };
            let why = format!("begins at {begin} and {what} the one before, which ends at {end}");
            return Err((&tensor.name, why));
        }
        end = begin + tensor.bytes;
    }
    match tensors.last() {
        Some(last) if end != data_bytes => {
            let why = format!("is the last one and ends at {end} of {data_bytes} bytes of data");
            Err((&last.name, why))
        }
        _ => Ok(()),
    }
}

/// What the header says of one tensor.
#[derive(Deserialize)]
struct Entry {
    dtype: String,
    shape: Shape,
    data_offsets: [u64; 2],
}

impl Entry {
    fn info(&self, name: &str, data_bytes: u64) -> Result<TensorInfo, String> {
        let (dtype, size) = match self.dtype.as_str() {
            "F32" => (Dtype::F32, 4),
            "F16" => (Dtype::F16, 2),
            "BF16" => (Dtype::BF16, 2),
            other => {
                let other: String = other.chars().take(20).collect();
                return Err(format!(
                    "is stored as {other}; F32, F16 and BF16 are read here"
                ));
            }
        };
        let Shape(shape) = &self.shape;
        let values = shape
            .iter()
            .try_fold(1u64, |all, size| all.checked_mul(*size));
        let bytes = values.and_then(|values| values.checked_mul(size));
        let bytes = bytes.ok_or_else(|| format!("has the shape {shape:?}, which overflows"))?;
        let [begin, end] = self.data_offsets;
        if end > data_bytes {
            return Err(format!(
                "ends at {end}, past the file's {data_bytes} bytes of data; download it again"
            ));
        }
        if end.checked_sub(begin) != Some(bytes) {
            return Err(format!(
                "lies from {begin} to {end}, but {shape:?} of {} take {bytes} bytes",
                self.dtype
            ));
        }
        Ok(TensorInfo {
            name: name.to_owned(),
            dims: shape.iter().rev().copied().collect(),
            dtype,
            offset: begin,
            bytes,
        })
    }
}

/// A list of a few sizes: a long one would take more memory than its text.
struct Shape(Vec<u64>);

impl<'de> Deserialize<'de> for Shape {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Sizes;
        impl<'de> Visitor<'de> for Sizes {
            type Value = Shape;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "a list of up to {DIMS_MAX} sizes")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Shape, A::Error> {
                let mut sizes = Vec::new();
                while let Some(size) = items.next_element()? {
                    if sizes.len() == DIMS_MAX {
                        return Err(A::Error::invalid_length(DIMS_MAX + 1, &self));
                    }
                    sizes.push(size);
                }
                Ok(Shape(sizes))
            }
        }
        from.deserialize_seq(Sizes)
    }
}

/// All tensors, doubles among them: a map would hide these.
struct Entries(Vec<(String, Entry)>);

impl<'de> Deserialize<'de> for Entries {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct All;
        impl<'de> Visitor<'de> for All {
            type Value = Entries;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "an object of up to {TENSORS_MAX} tensors")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut items: A) -> Result<Entries, A::Error> {
                let mut entries = Vec::new();
                while let Some(name) = items.next_key::<String>()? {
                    if name == "__metadata__" {
                        items.next_value::<IgnoredAny>()?;
                        continue;
                    }
                    if entries.len() == TENSORS_MAX {
                        return Err(A::Error::invalid_length(TENSORS_MAX + 1, &self));
                    }
                    entries.push((name, items.next_value()?));
                }
                Ok(Entries(entries))
            }
        }
        from.deserialize_map(All)
    }
}
