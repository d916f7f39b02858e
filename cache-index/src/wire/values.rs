//! How does one field of an event become its type?
//!
//! One function for each kind of field, each with its own range and the name of what it reads in
//! its errors. Which field stands where is left to [`super::decode`].

use super::read::{Head, Int, Reader};
use super::{BLOCK_SIZE_MAX, HASH_BYTES_MAX, WireError};
use crate::event::{EngineHash, ExtraKey, ExtraKeys, GroupKind, Medium};

/// Longest name or salt that is kept; a longer extra key is one that we cannot name.
const TEXT_BYTES_MAX: usize = 1024;

pub(super) fn wrong(reading: &'static str, head: &Head<'_>) -> WireError {
    WireError::Type {
        reading,
        found: head.name(),
    }
}

pub(super) fn array(reader: &mut Reader<'_>, reading: &'static str) -> Result<usize, WireError> {
    match reader.head(reading)? {
        Head::Array(count) => Ok(count),
        other => Err(wrong(reading, &other)),
    }
}

pub(super) fn text<'a>(
    reader: &mut Reader<'a>,
    reading: &'static str,
) -> Result<Option<&'a [u8]>, WireError> {
    match reader.head(reading)? {
        Head::Nil => Ok(None),
        Head::Str(bytes) | Head::Bin(bytes) => Ok(Some(bytes)),
        other => Err(wrong(reading, &other)),
    }
}

/// A text that is kept, so its length and encoding matter.
pub(super) fn name(
    reader: &mut Reader<'_>,
    reading: &'static str,
) -> Result<Option<String>, WireError> {
    let Some(bytes) = text(reader, reading)? else {
        return Ok(None);
    };
    let valid = std::str::from_utf8(bytes)
        .ok()
        .filter(|text| text.len() <= TEXT_BYTES_MAX);
    valid
        .map(|text| Some(text.to_owned()))
        .ok_or(WireError::Range { reading })
}

pub(super) fn optional_int(
    reader: &mut Reader<'_>,
    reading: &'static str,
) -> Result<Option<Int>, WireError> {
    match reader.head(reading)? {
        Head::Nil => Ok(None),
        Head::Int(int) => Ok(Some(int)),
        other => Err(wrong(reading, &other)),
    }
}

pub(super) fn optional_u32(
    reader: &mut Reader<'_>,
    reading: &'static str,
) -> Result<Option<u32>, WireError> {
    match optional_int(reader, reading)? {
        None => Ok(None),
        Some(Int::Unsigned(value)) => u32::try_from(value)
            .map(Some)
            .map_err(|_| WireError::Range { reading }),
        Some(Int::Negative(_)) => Err(WireError::Range { reading }),
    }
}

#[expect(
    clippy::cast_precision_loss,
    reason = "whole seconds lie far below 2^53"
)]
pub(super) fn seconds(reader: &mut Reader<'_>) -> Result<f64, WireError> {
    let reading = "the timestamp";
    let value = match reader.head(reading)? {
        Head::Float(value) => value,
        Head::Int(Int::Unsigned(value)) => value as f64,
        Head::Int(Int::Negative(value)) => value as f64,
        other => return Err(wrong(reading, &other)),
    };
    if value.is_finite() {
        Ok(value)
    } else {
        Err(WireError::Range { reading })
    }
}

pub(super) fn boot_id(reader: &mut Reader<'_>) -> Result<Option<String>, WireError> {
    let reading = "boot_id";
    let pairs = match reader.head(reading)? {
        Head::Map(pairs) => pairs,
        // Another engine's fourth element: not ours to read.
        other => return reader.skip_rest(&other, reading).map(|()| None),
    };
    let mut boot = None;
    for _ in 0..pairs {
        match reader.head(reading)? {
            Head::Str(b"boot_id") => boot = name(reader, reading)?,
            other => {
                reader.skip_rest(&other, reading)?;
                reader.skip(reading)?;
            }
        }
    }
    Ok(boot)
}

pub(super) fn block_size(reader: &mut Reader<'_>) -> Result<Option<usize>, WireError> {
    let reading = "block_size";
    let Some(size) = optional_u32(reader, reading)? else {
        return Ok(None);
    };
    let size = usize::try_from(size)
        .ok()
        .filter(|size| (1..=BLOCK_SIZE_MAX).contains(size));
    size.map(Some).ok_or(WireError::Range { reading })
}

pub(super) fn hash(
    reader: &mut Reader<'_>,
    reading: &'static str,
) -> Result<Option<EngineHash>, WireError> {
    match reader.head(reading)? {
        Head::Nil => Ok(None),
        Head::Int(Int::Unsigned(value)) => Ok(Some(EngineHash::Int(value))),
        Head::Int(Int::Negative(value)) => Ok(Some(EngineHash::Int(value.cast_unsigned()))),
        Head::Bin(bytes) | Head::Str(bytes) => {
            if bytes.is_empty() || bytes.len() > HASH_BYTES_MAX {
                return Err(WireError::Range { reading });
            }
            Ok(Some(EngineHash::Bytes(bytes.into())))
        }
        other => Err(wrong(reading, &other)),
    }
}

pub(super) fn hashes(reader: &mut Reader<'_>) -> Result<Vec<EngineHash>, WireError> {
    let reading = "block_hashes";
    let count = array(reader, reading)?;
    let one = |_| {
        hash(reader, reading)?.ok_or(WireError::Type {
            reading,
            found: "nil",
        })
    };
    (0..count).map(one).collect()
}

pub(super) fn tokens(reader: &mut Reader<'_>) -> Result<Vec<u32>, WireError> {
    let reading = "token_ids";
    let count = match reader.head(reading)? {
        Head::Array(count) => count,
        // Events of outer tiers may come without tokens.
        Head::Nil => 0,
        other => return Err(wrong(reading, &other)),
    };
    let mut tokens = Vec::with_capacity(count);
    for _ in 0..count {
        match optional_u32(reader, reading)? {
            Some(token) => tokens.push(token),
            None => {
                return Err(WireError::Type {
                    reading,
                    found: "nil",
                });
            }
        }
    }
    Ok(tokens)
}

pub(super) fn extra_keys(reader: &mut Reader<'_>) -> Result<ExtraKeys, WireError> {
    let reading = "extra_keys";
    let count = match reader.head(reading)? {
        Head::Nil => return Ok(ExtraKeys::none()),
        Head::Array(count) => count,
        other => return Err(wrong(reading, &other)),
    };
    let mut blocks = Vec::new();
    for _ in 0..count {
        blocks.push(match reader.head(reading)? {
            Head::Nil => Vec::new(),
            Head::Array(keys) => (0..keys)
                .map(|_| extra_key(reader, reading))
                .collect::<Result<_, _>>()?,
            other => return Err(wrong(reading, &other)),
        });
    }
    Ok(ExtraKeys(blocks))
}

pub(super) fn extra_key(
    reader: &mut Reader<'_>,
    reading: &'static str,
) -> Result<ExtraKey, WireError> {
    let head = reader.head(reading)?;
    if let Head::Str(bytes) = head
        && bytes.len() <= TEXT_BYTES_MAX
        && let Ok(text) = std::str::from_utf8(bytes)
    {
        return Ok(ExtraKey::Text(text.into()));
    }
    reader.skip_rest(&head, reading)?;
    Ok(ExtraKey::Other)
}

pub(super) fn medium(name: &[u8]) -> Medium {
    match name {
        b"GPU" => Medium::Device,
        b"CPU" | b"CPU_PINNED" => Medium::Host,
        b"STORAGE" | b"DISK" => Medium::Disk,
        b"EXTERNAL" => Medium::Shared,
        other => {
            let kept = other.get(..TEXT_BYTES_MAX).unwrap_or(other);
            Medium::Other(String::from_utf8_lossy(kept).into())
        }
    }
}

pub(super) fn kind(name: &[u8]) -> GroupKind {
    match name {
        b"full_attention" | b"mla_attention" | b"sink_full_attention" => GroupKind::Full,
        b"unknown" => GroupKind::Unsaid,
        _ => GroupKind::Other,
    }
}
