//! How does a payload become an event batch?
//!
//! Both shapes of an event fill the same [`Fields`]: the map form by name, the array form by
//! position. What an engine adds in future is skipped: unknown fields, unknown event types, more
//! elements at the end. What it needs must be there.
//! Three translations keep wrong credit out. An adapter that is only numbered gets a name that no
//! request uses. A block that the engine says lies elsewhere (`locality`) counts as shared,
//! whatever its medium. A tokenless block keeps its empty token list, for the index to refuse.

use super::WireError;
use super::read::{Head, Int, Reader};
use super::values::{
    array, block_size, boot_id, extra_keys, hash, hashes, kind, medium, name, optional_int,
    optional_u32, seconds, text, tokens, wrong,
};
use crate::event::{EngineHash, EventBatch, ExtraKeys, GroupKind, KvEvent, Medium};

/// Fields of `BlockStored` in the order of the array form.
const STORED_FIELDS: &[Field] = &[
    Field::BlockHashes,
    Field::Parent,
    Field::TokenIds,
    Field::BlockSize,
    Field::LoraId,
    Field::Medium,
    Field::LoraName,
    Field::ExtraKeys,
    Field::GroupIdx,
    Field::SpecKind,
    Field::Unknown, // the sliding window's length
    Field::Locality,
];

/// Fields of `BlockRemoved` in the order of the array form.
const REMOVED_FIELDS: &[Field] = &[
    Field::BlockHashes,
    Field::Medium,
    Field::GroupIdx,
    Field::Locality,
];

/// Decodes one payload.
pub fn decode_batch(payload: &[u8]) -> Result<EventBatch, WireError> {
    let reader = &mut Reader::new(payload);
    let count = array(reader, "the batch")?;
    if count < 2 {
        return Err(WireError::Missing {
            field: "timestamp or events",
        });
    }
    let timestamp = seconds(reader)?;
    let events_count = array(reader, "the events")?;
    let mut batch = EventBatch {
        timestamp,
        ..EventBatch::default()
    };
    for _ in 0..events_count {
        batch.events.extend(event(reader)?);
    }
    if count > 2 {
        batch.dp_rank = optional_u32(reader, "data_parallel_rank")?;
    }
    if count > 3 {
        batch.boot_id = boot_id(reader)?;
    }
    for _ in 4..count {
        reader.skip("the end of the batch")?;
    }
    match reader.left() {
        0 => Ok(batch),
        left => Err(WireError::Trailing { left }),
    }
}

/// The names that an event's fields have.
#[derive(Clone, Copy)]
enum Field {
    Type,
    BlockHashes,
    Parent,
    TokenIds,
    BlockSize,
    LoraId,
    Medium,
    LoraName,
    ExtraKeys,
    GroupIdx,
    SpecKind,
    Locality,
    Unknown,
}

impl Field {
    fn named(name: &[u8]) -> Self {
        match name {
            b"type" => Self::Type,
            b"block_hashes" => Self::BlockHashes,
            b"parent_block_hash" => Self::Parent,
            b"token_ids" => Self::TokenIds,
            b"block_size" => Self::BlockSize,
            b"lora_id" => Self::LoraId,
            b"medium" => Self::Medium,
            b"lora_name" => Self::LoraName,
            b"extra_keys" => Self::ExtraKeys,
            b"group_idx" => Self::GroupIdx,
            b"kv_cache_spec_kind" => Self::SpecKind,
            b"locality" => Self::Locality,
            _ => Self::Unknown,
        }
    }
}

/// The event types that we know.
#[derive(Clone, Copy)]
enum Tag {
    Stored,
    Removed,
    Cleared,
    Unknown,
}

impl Tag {
    fn named(name: &[u8]) -> Self {
        match name {
            b"BlockStored" => Self::Stored,
            b"BlockRemoved" => Self::Removed,
            b"AllBlocksCleared" => Self::Cleared,
            _ => Self::Unknown,
        }
    }
}

/// An event's fields as far as they were there.
#[derive(Default)]
struct Fields {
    tag: Option<Tag>,
    block_hashes: Option<Vec<EngineHash>>,
    parent: Option<EngineHash>,
    token_ids: Option<Vec<u32>>,
    block_size: Option<usize>,
    lora_id: Option<u64>,
    lora_name: Option<String>,
    medium: Option<Medium>,
    is_remote: bool,
    extra_keys: ExtraKeys,
    group_idx: Option<u32>,
    group_kind: GroupKind,
}

fn event(reader: &mut Reader<'_>) -> Result<Option<KvEvent>, WireError> {
    let mut fields = Fields::default();
    match reader.head("an event")? {
        Head::Map(pairs) => {
            for _ in 0..pairs {
                let name = match reader.head("a field's name")? {
                    Head::Str(name) => name,
                    other => return Err(wrong("a field's name", &other)),
                };
                fields.read(Field::named(name), reader)?;
            }
        }
        Head::Array(count @ 1..) => {
            fields.read(Field::Type, reader)?;
            let order = match fields.tag {
                Some(Tag::Stored) => STORED_FIELDS,
                Some(Tag::Removed) => REMOVED_FIELDS,
                _ => &[],
            };
            for position in 0..count - 1 {
                let field = order.get(position).copied().unwrap_or(Field::Unknown);
                fields.read(field, reader)?;
            }
        }
        other => return Err(wrong("an event", &other)),
    }
    fields.into_event()
}

impl Fields {
    fn read(&mut self, field: Field, reader: &mut Reader<'_>) -> Result<(), WireError> {
        match field {
            Field::Type => self.tag = text(reader, "type")?.map(Tag::named),
            Field::BlockHashes => self.block_hashes = Some(hashes(reader)?),
            Field::Parent => self.parent = hash(reader, "parent_block_hash")?,
            Field::TokenIds => self.token_ids = Some(tokens(reader)?),
            Field::BlockSize => self.block_size = block_size(reader)?,
            Field::LoraId => {
                self.lora_id = optional_int(reader, "lora_id")?.map(|int| match int {
                    Int::Unsigned(value) => value,
                    Int::Negative(value) => value.unsigned_abs(),
                });
            }
            Field::LoraName => self.lora_name = name(reader, "lora_name")?,
            Field::Medium => self.medium = text(reader, "medium")?.map(medium),
            Field::Locality => self.is_remote = text(reader, "locality")? == Some(b"REMOTE"),
            Field::ExtraKeys => self.extra_keys = extra_keys(reader)?,
            Field::GroupIdx => self.group_idx = optional_u32(reader, "group_idx")?,
            Field::SpecKind => {
                self.group_kind = text(reader, "kv_cache_spec_kind")?
                    .map(kind)
                    .unwrap_or_default();
            }
            Field::Unknown => reader.skip("an unknown field")?,
        }
        Ok(())
    }

    /// None where the event's type is not one of ours.
    fn into_event(self) -> Result<Option<KvEvent>, WireError> {
        let tag = self.tag.ok_or(WireError::Missing { field: "type" })?;
        let medium = if self.is_remote {
            Some(Medium::Shared)
        } else {
            self.medium
        };
        let block_hashes = self.block_hashes.ok_or(WireError::Missing {
            field: "block_hashes",
        });
        Ok(Some(match tag {
            Tag::Unknown => return Ok(None),
            Tag::Cleared => KvEvent::Cleared,
            Tag::Removed => KvEvent::Removed {
                block_hashes: block_hashes?,
                medium,
                group_idx: self.group_idx,
            },
            Tag::Stored => KvEvent::Stored {
                block_hashes: block_hashes?,
                parent: self.parent,
                token_ids: self
                    .token_ids
                    .ok_or(WireError::Missing { field: "token_ids" })?,
                block_size: self.block_size.ok_or(WireError::Missing {
                    field: "block_size",
                })?,
                medium,
                // A number without a name says that there is an adapter and not which.
                lora_name: self
                    .lora_name
                    .or(self.lora_id.map(|id| format!("adapter number {id}"))),
                extra_keys: self.extra_keys,
                group_idx: self.group_idx,
                group_kind: self.group_kind,
            },
        }))
    }
}
