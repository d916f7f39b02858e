//! What does a GGUF file say about itself?
//!
//! A header is magic, version, counts, key-value metadata and a table of tensors; tensor data
//! follows at an aligned offset. Files come from anywhere, so every count is checked against the
//! bytes that remain before anything is allocated, nesting is bounded, arithmetic is checked, and
//! each tensor must lie inside the file. No input may panic or allocate more than a small multiple
//! of the file's own header.
//!
//! Left out on purpose: GGUF version 1 (32-bit counts, gone since 2023) and big-endian files;
//! both are refused by name. Files split over several parts are read as what they are: one part.

mod cursor;
mod dtype;
mod error;
mod value;

use std::collections::BTreeMap;

pub use dtype::Dtype;
pub use error::GgufError;
pub use value::Value;

use cursor::Cursor;

/// Most metadata keys; real files have 20 to 60.
const KEYS_MAX: u64 = 65_536;
/// Most tensors; the largest published models have a few thousand.
const TENSORS_MAX: u64 = 262_144;
/// Most dimensions of a tensor, which is ggml's own limit.
const DIMS_MAX: u32 = 4;
/// Offset alignment where the file names none, by the GGUF specification.
const ALIGNMENT_DEFAULT: u64 = 32;
/// Largest alignment accepted; real files use 32, memory mapping never needs more than a page.
const ALIGNMENT_MAX: u64 = 65_536;

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

impl Header {
    /// Reads and checks the header; `file` is the whole file, so that tensor bounds are checked.
    pub fn parse(file: &[u8]) -> Result<Self, GgufError> {
        Self::parse_prefix(file, file.len() as u64)
    }

    /// The same from the beginning of a file of `file_bytes` bytes, for whoever needs no weights.
    /// Where `prefix` ends inside the header the error is that of a file cut there: try again with
    /// a longer one.
    pub fn parse_prefix(prefix: &[u8], file_bytes: u64) -> Result<Self, GgufError> {
        let mut cursor = Cursor::new(prefix);
        check_magic(&mut cursor)?;
        let tensor_count = cursor.u64()?;
        let key_count = cursor.u64()?;
        // A key needs at least its length, its type and one byte; a tensor its five fixed fields.
        cursor.check_count("metadata keys", key_count, KEYS_MAX, 13)?;
        cursor.check_count("tensors", tensor_count, TENSORS_MAX, 24)?;

        let mut metadata = BTreeMap::new();
        for _ in 0..key_count {
            let key = cursor.string()?;
            let value = Value::read(&mut cursor, &key)?;
            if metadata.insert(key.clone(), value).is_some() {
                return Err(GgufError::DuplicateKey { key });
            }
        }
        let alignment = alignment(&metadata)?;

        let mut tensors = Vec::with_capacity(tensor_count as usize);
        for _ in 0..tensor_count {
            tensors.push(TensorInfo::read(&mut cursor, alignment)?);
        }
        let data_offset = (cursor.position() as u64).next_multiple_of(alignment);
        let header = Self {
            metadata,
            tensors,
            data_offset,
            alignment,
        };
        header.check_tensors(file_bytes)?;
        Ok(header)
    }

    /// The value of a metadata key.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.metadata.get(key)
    }

    /// Names are unique, every tensor lies inside the file, and none over another.
    fn check_tensors(&self, file_bytes: u64) -> Result<(), GgufError> {
        let mut names = std::collections::HashSet::with_capacity(self.tensors.len());
        for tensor in &self.tensors {
            if !names.insert(tensor.name.as_str()) {
                return Err(GgufError::DuplicateTensor {
                    name: tensor.name.clone(),
                });
            }
            let end = self
                .data_offset
                .checked_add(tensor.offset)
                .and_then(|begin| begin.checked_add(tensor.bytes));
            if end.is_none_or(|end| end > file_bytes) {
                return Err(GgufError::TensorOutside {
                    name: tensor.name.clone(),
                    offset: tensor.offset,
                    bytes: tensor.bytes,
                    file_bytes,
                });
            }
        }
        let mut in_order: Vec<&TensorInfo> = self.tensors.iter().collect();
        in_order.sort_unstable_by_key(|tensor| tensor.offset);
        for pair in in_order.windows(2) {
            if pair[0].offset + pair[0].bytes > pair[1].offset {
                return Err(GgufError::Overlap {
                    name: pair[1].name.clone(),
                    other: pair[0].name.clone(),
                });
            }
        }
        Ok(())
    }
}

impl TensorInfo {
    fn read(cursor: &mut Cursor<'_>, alignment: u64) -> Result<Self, GgufError> {
        let name = cursor.string()?;
        let dim_count = cursor.u32()?;
        if dim_count == 0 || dim_count > DIMS_MAX {
            return Err(GgufError::Dimensions {
                name,
                why: format!("{dim_count} dimensions"),
            });
        }
        let mut dims = Vec::with_capacity(dim_count as usize);
        for _ in 0..dim_count {
            dims.push(cursor.u64()?);
        }
        let dtype = Dtype::from_ggml(cursor.u32()?);
        let offset = cursor.u64()?;
        if !offset.is_multiple_of(alignment) {
            return Err(GgufError::Misaligned {
                name,
                offset,
                alignment,
            });
        }
        let Some(bytes) = tensor_bytes(&name, &dims, dtype)? else {
            return Err(GgufError::Dimensions {
                name,
                why: format!("sizes {dims:?} overflow"),
            });
        };
        Ok(Self {
            name,
            dims,
            dtype,
            offset,
            bytes,
        })
    }
}

/// Length of a tensor's data; `None` where the product overflows.
fn tensor_bytes(name: &str, dims: &[u64], dtype: Dtype) -> Result<Option<u64>, GgufError> {
    let Some((block_values, block_bytes)) = dtype.block() else {
        return Err(GgufError::UnknownTensorType {
            name: name.to_owned(),
            dtype,
        });
    };
    let row = dims.first().copied().unwrap_or(0);
    if dims.contains(&0) || !row.is_multiple_of(block_values) {
        return Err(GgufError::Dimensions {
            name: name.to_owned(),
            why: format!("sizes {dims:?} do not divide into blocks of {block_values}"),
        });
    }
    let rows = dims
        .iter()
        .skip(1)
        .try_fold(1u64, |product, size| product.checked_mul(*size));
    let row_bytes = (row / block_values).checked_mul(block_bytes);
    Ok(rows
        .zip(row_bytes)
        .and_then(|(rows, row_bytes)| rows.checked_mul(row_bytes)))
}

fn check_magic(cursor: &mut Cursor<'_>) -> Result<(), GgufError> {
    let magic = cursor
        .take::<4>()
        .map_err(|_| GgufError::NotGguf { found: Vec::new() })?;
    if &magic == b"FUGG" {
        return Err(GgufError::BigEndian);
    }
    if &magic != b"GGUF" {
        return Err(GgufError::NotGguf {
            found: magic.to_vec(),
        });
    }
    match cursor.u32()? {
        2 | 3 => Ok(()),
        // A big-endian file keeps the magic's byte order and swaps everything behind it.
        version if version.swap_bytes() <= 0xffff => Err(GgufError::BigEndian),
        version => Err(GgufError::Version { version }),
    }
}

fn alignment(metadata: &BTreeMap<String, Value>) -> Result<u64, GgufError> {
    let Some(value) = metadata.get("general.alignment") else {
        return Ok(ALIGNMENT_DEFAULT);
    };
    match value.as_u64() {
        Some(alignment) if alignment.is_power_of_two() && alignment <= ALIGNMENT_MAX => {
            Ok(alignment)
        }
        _ => Err(GgufError::Value {
            key: "general.alignment".to_owned(),
            why: format!("must be a power of two up to {ALIGNMENT_MAX}"),
        }),
    }
}

#[cfg(test)]
mod tests;
