//! How does an event batch become a payload?
//!
//! vLLM's map form, so that our engine can stand behind other routers too: every field that its
//! decoder requires is written, the optional ones only where they say something. The boot id goes
//! into a fourth element of the batch, which vLLM's consumers read over.

use std::convert::Infallible;

use rmp::encode::buffer::ByteBuf;
use rmp::encode::{
    ValueWriteError, write_array_len, write_bin, write_f64, write_map_len, write_nil, write_str,
    write_uint,
};

use crate::event::{EngineHash, EventBatch, ExtraKey, GroupKind, KvEvent, Medium};

type Written = Result<(), ValueWriteError<Infallible>>;

/// Encodes one payload in vLLM's map form.
pub fn encode_batch(batch: &EventBatch) -> Vec<u8> {
    let mut out = ByteBuf::new();
    write_batch(&mut out, batch).expect("a buffer in memory takes every write");
    out.into_vec()
}

fn write_batch(out: &mut ByteBuf, batch: &EventBatch) -> Written {
    write_array_len(out, if batch.boot_id.is_some() { 4 } else { 3 })?;
    write_f64(out, batch.timestamp)?;
    write_array_len(out, count(batch.events.len()))?;
    for event in &batch.events {
        write_event(out, event)?;
    }
    write_optional_uint(out, batch.dp_rank)?;
    if let Some(boot_id) = &batch.boot_id {
        write_map_len(out, 1)?;
        write_str(out, "boot_id")?;
        write_str(out, boot_id)?;
    }
    Ok(())
}

fn write_event(out: &mut ByteBuf, event: &KvEvent) -> Written {
    match event {
        KvEvent::Cleared => {
            write_map_len(out, 1)?;
            write_tag(out, "AllBlocksCleared")
        }
        KvEvent::Removed {
            block_hashes,
            medium,
            group_idx,
        } => {
            write_map_len(out, 3 + u32::from(group_idx.is_some()))?;
            write_tag(out, "BlockRemoved")?;
            write_str(out, "block_hashes")?;
            write_hashes(out, block_hashes)?;
            write_medium(out, medium.as_ref())?;
            write_group(out, *group_idx)
        }
        KvEvent::Stored { .. } => write_stored(out, event),
    }
}

fn write_stored(out: &mut ByteBuf, event: &KvEvent) -> Written {
    let KvEvent::Stored {
        block_hashes,
        parent,
        token_ids,
        block_size,
        medium,
        lora_name,
        extra_keys,
        group_idx,
        group_kind,
    } = event
    else {
        return Ok(());
    };
    let kind = match group_kind {
        GroupKind::Unsaid => None,
        GroupKind::Full => Some("full_attention"),
        GroupKind::Other => Some("other"),
    };
    let optional = [
        !extra_keys.0.is_empty(),
        group_idx.is_some(),
        kind.is_some(),
    ];
    write_map_len(out, 8 + optional.map(u32::from).iter().sum::<u32>())?;
    write_tag(out, "BlockStored")?;
    write_str(out, "block_hashes")?;
    write_hashes(out, block_hashes)?;
    write_str(out, "parent_block_hash")?;
    match parent {
        Some(parent) => write_hash(out, parent)?,
        None => write_nil(out).map_err(ValueWriteError::InvalidMarkerWrite)?,
    }
    write_str(out, "token_ids")?;
    write_array_len(out, count(token_ids.len()))?;
    for token in token_ids {
        write_uint(out, u64::from(*token))?;
    }
    write_str(out, "block_size")?;
    write_uint(out, u64::try_from(*block_size).unwrap_or(u64::MAX))?;
    write_str(out, "lora_id")?;
    write_nil(out).map_err(ValueWriteError::InvalidMarkerWrite)?;
    write_medium(out, medium.as_ref())?;
    write_str(out, "lora_name")?;
    match lora_name {
        Some(name) => write_str(out, name)?,
        None => write_nil(out).map_err(ValueWriteError::InvalidMarkerWrite)?,
    }
    if !extra_keys.0.is_empty() {
        write_str(out, "extra_keys")?;
        write_extra_keys(out, &extra_keys.0)?;
    }
    write_group(out, *group_idx)?;
    if let Some(kind) = kind {
        write_str(out, "kv_cache_spec_kind")?;
        write_str(out, kind)?;
    }
    Ok(())
}

fn write_tag(out: &mut ByteBuf, tag: &str) -> Written {
    write_str(out, "type")?;
    write_str(out, tag)
}

fn write_hashes(out: &mut ByteBuf, hashes: &[EngineHash]) -> Written {
    write_array_len(out, count(hashes.len()))?;
    hashes.iter().try_for_each(|hash| write_hash(out, hash))
}

fn write_hash(out: &mut ByteBuf, hash: &EngineHash) -> Written {
    match hash {
        EngineHash::Int(value) => write_uint(out, *value).map(|_| ()),
        EngineHash::Bytes(bytes) => write_bin(out, bytes),
    }
}

fn write_medium(out: &mut ByteBuf, medium: Option<&Medium>) -> Written {
    write_str(out, "medium")?;
    match medium {
        None => write_nil(out).map_err(ValueWriteError::InvalidMarkerWrite),
        Some(Medium::Device) => write_str(out, "GPU"),
        Some(Medium::Host) => write_str(out, "CPU"),
        Some(Medium::Disk) => write_str(out, "STORAGE"),
        Some(Medium::Shared) => write_str(out, "EXTERNAL"),
        Some(Medium::Other(name)) => write_str(out, name),
    }
}

fn write_group(out: &mut ByteBuf, group_idx: Option<u32>) -> Written {
    if group_idx.is_some() {
        write_str(out, "group_idx")?;
        write_optional_uint(out, group_idx)?;
    }
    Ok(())
}

fn write_optional_uint(out: &mut ByteBuf, value: Option<u32>) -> Written {
    match value {
        Some(value) => write_uint(out, u64::from(value)).map(|_| ()),
        None => write_nil(out).map_err(ValueWriteError::InvalidMarkerWrite),
    }
}

/// A key that cannot be named is written as nil, which the decoder takes for the same.
fn write_extra_keys(out: &mut ByteBuf, blocks: &[Vec<ExtraKey>]) -> Written {
    write_array_len(out, count(blocks.len()))?;
    for keys in blocks {
        if keys.is_empty() {
            write_nil(out).map_err(ValueWriteError::InvalidMarkerWrite)?;
            continue;
        }
        write_array_len(out, count(keys.len()))?;
        for key in keys {
            match key {
                ExtraKey::Text(text) => write_str(out, text)?,
                ExtraKey::Other => write_nil(out).map_err(ValueWriteError::InvalidMarkerWrite)?,
            }
        }
    }
    Ok(())
}

/// MessagePack counts in 32 bits; a pool of four billion blocks does not exist.
fn count(length: usize) -> u32 {
    u32::try_from(length).expect("fewer than 2^32 elements in one batch")
}
