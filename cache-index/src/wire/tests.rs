//! Catches: a shape of vLLM's events that is read wrongly, a field lost on the way through our own
//! encoder, and payloads that panic or allocate more than they carry.

use super::{WireError, decode_batch, encode_batch};
use crate::event::{EngineHash, EventBatch, ExtraKey, ExtraKeys, GroupKind, KvEvent, Medium};

fn stored(hashes: Vec<EngineHash>, parent: Option<EngineHash>, tokens: Vec<u32>) -> KvEvent {
    KvEvent::Stored {
        block_size: tokens.len() / hashes.len().max(1),
        block_hashes: hashes,
        parent,
        token_ids: tokens,
        medium: Some(Medium::Device),
        lora_name: None,
        extra_keys: ExtraKeys::none(),
        group_idx: None,
        group_kind: GroupKind::Unsaid,
    }
}

fn full_batch() -> EventBatch {
    let bytes = |value: u8| EngineHash::Bytes(vec![value; 16].into());
    let mut first = stored(
        vec![bytes(1), bytes(2)],
        None,
        (0..32).map(|t| t * 7919).collect(),
    );
    if let KvEvent::Stored {
        extra_keys,
        lora_name,
        group_idx,
        group_kind,
        ..
    } = &mut first
    {
        *extra_keys = ExtraKeys(vec![
            vec![
                ExtraKey::Text("adapter".into()),
                ExtraKey::Text("salt".into()),
            ],
            vec![],
            vec![ExtraKey::Other],
        ]);
        *lora_name = Some("adapter".to_owned());
        *group_idx = Some(3);
        *group_kind = GroupKind::Full;
    }
    let removed = |medium, group_idx| KvEvent::Removed {
        block_hashes: vec![EngineHash::Int(u64::MAX), EngineHash::Int(0)],
        medium,
        group_idx,
    };
    EventBatch {
        timestamp: 1_795_967_974.8,
        events: vec![
            KvEvent::Cleared,
            first,
            stored(
                vec![EngineHash::Int(1 << 63)],
                Some(bytes(2)),
                vec![u32::MAX; 16],
            ),
            removed(None, None),
            removed(Some(Medium::Host), Some(1)),
            removed(Some(Medium::Disk), None),
            removed(Some(Medium::Shared), None),
            removed(Some(Medium::Other("TAPE".into())), None),
        ],
        dp_rank: Some(1),
        boot_id: Some("boot".to_owned()),
    }
}

#[test]
fn what_is_encoded_comes_back() {
    for batch in [full_batch(), EventBatch::default()] {
        assert_eq!(decode_batch(&encode_batch(&batch)), Ok(batch));
    }
}

/// MessagePack by hand, so that decoder and encoder do not share a mistake.
fn pack(parts: &[&[u8]]) -> Vec<u8> {
    parts.concat()
}

fn text(value: &str) -> Vec<u8> {
    let mut out = vec![0xa0 | u8::try_from(value.len()).unwrap()];
    out.extend(value.bytes());
    out
}

/// `[1.0, [event]]`
fn one_event(event: &[u8]) -> Vec<u8> {
    let mut out = vec![0x92, 0xcb];
    out.extend(1.0_f64.to_be_bytes());
    out.push(0x91);
    out.extend(event);
    out
}

fn check(event: &[u8], expected: Result<KvEvent, WireError>) {
    let decoded = decode_batch(&one_event(event));
    assert_eq!(
        decoded.map(|batch| batch.events),
        expected.map(|event| vec![event]),
        "{event:x?}"
    );
}

#[test]
fn both_shapes_of_an_event_are_read() {
    let expected = |medium, parent| {
        let mut event = stored(vec![EngineHash::Int(7)], parent, vec![1, 2]);
        if let KvEvent::Stored { medium: slot, .. } = &mut event {
            *slot = medium;
        }
        event
    };
    // The array form stops where defaults begin; hashes are signed here (-1 is 2^64 - 1).
    let name = text("BlockStored");
    let array = pack(&[&[0x95], &name, &[0x91, 7], &[0xff], &[0x92, 1, 2], &[2]]);
    check(&array, Ok(expected(None, Some(EngineHash::Int(u64::MAX)))));
    let gpu = text("GPU");
    let array = pack(&[
        &[0x97],
        &name,
        &[0x91, 7],
        &[0xc0],
        &[0x92, 1, 2],
        &[2],
        &[0xc0],
        &gpu,
    ]);
    check(&array, Ok(expected(Some(Medium::Device), None)));
    // The map form in another order, with a field that nobody knows.
    let map = pack(&[
        &[0x86],
        &text("token_ids"),
        &[0x92, 1, 2],
        &text("session_id"),
        &[0x91, 0x81, 0x01, 0x02],
        &text("block_size"),
        &[2],
        &text("block_hashes"),
        &[0x91, 0xcf, 0, 0, 0, 0, 0, 0, 0, 7],
        &text("parent_block_hash"),
        &[0xc0],
        &text("type"),
        &name,
    ]);
    check(&map, Ok(expected(None, None)));
    check(
        &pack(&[&[0x91], &text("AllBlocksCleared")]),
        Ok(KvEvent::Cleared),
    );
    let removed = KvEvent::Removed {
        block_hashes: vec![EngineHash::Bytes([9_u8, 8].into())],
        medium: Some(Medium::Host),
        group_idx: Some(2),
    };
    let host = text("CPU_PINNED");
    let array = pack(&[
        &[0x94],
        &text("BlockRemoved"),
        &[0x91, 0xc4, 2, 9, 8],
        &host,
        &[2],
    ]);
    check(&array, Ok(removed));
}

#[test]
fn names_that_would_give_wrong_credit_are_translated() {
    let name = text("BlockStored");
    let head: &[&[u8]] = &[&name, &[0x91, 7], &[0xc0], &[0x91, 1], &[1]];
    // lora_id 5 without a name.
    let array = pack(&[&[0x97], &head.concat(), &[5], &[0xc0]]);
    let batch = decode_batch(&one_event(&array)).unwrap();
    let KvEvent::Stored { lora_name, .. } = &batch.events[0] else {
        panic!("not stored")
    };
    assert_eq!(lora_name.as_deref(), Some("adapter number 5"));
    // Locality REMOTE.
    let tail = [&[0xc0][..], &text("GPU"), &[0xc0; 5], &text("REMOTE")].concat();
    let array = pack(&[&[0x9d], &head.concat(), &tail]);
    let batch = decode_batch(&one_event(&array)).unwrap();
    let KvEvent::Stored { medium, .. } = &batch.events[0] else {
        panic!("not stored")
    };
    assert_eq!(*medium, Some(Medium::Shared));
}

#[test]
fn an_unknown_event_is_read_over() {
    let batch = decode_batch(&one_event(&pack(&[
        &[0x92],
        &text("BlockMoved"),
        &[0x91, 1],
    ])));
    assert_eq!(batch.unwrap().events, vec![]);
}

#[test]
fn malformed_events_are_refused_by_name() {
    let name = text("BlockStored");
    let missing = |field| Err(WireError::Missing { field });
    check(&pack(&[&[0x91], &name]), missing("block_hashes"));
    check(&pack(&[&[0x92], &name, &[0x91, 7]]), missing("token_ids"));
    check(&[0x80], missing("type"));
    check(
        &[0x90],
        Err(WireError::Type {
            reading: "an event",
            found: "array",
        }),
    );
    check(
        &[0x01],
        Err(WireError::Type {
            reading: "an event",
            found: "int",
        }),
    );
    let parts: &[&[u8]] = &[&[0x95], &name, &[0x91, 7], &[0xc0]];
    let range = |reading| Err(WireError::Range { reading });
    check(
        &pack(&[&parts.concat(), &[0x91, 1], &[0]]),
        range("block_size"),
    );
    check(
        &pack(&[&parts.concat(), &[0x91, 0xff], &[1]]),
        range("token_ids"),
    );
    let huge = [0x91, 0xcf, 0, 0, 0, 1, 0, 0, 0, 0];
    check(&pack(&[&parts.concat(), &huge, &[1]]), range("token_ids"));
    check(
        &pack(&[&[0x92], &text("BlockRemoved"), &[0x91, 0xc4, 0]]),
        range("block_hashes"),
    );
    let nil = Err(WireError::Type {
        reading: "block_hashes",
        found: "nil",
    });
    check(&pack(&[&[0x92], &text("BlockRemoved"), &[0x91, 0xc0]]), nil);
}

#[test]
fn counts_and_depths_that_the_payload_cannot_hold_are_refused() {
    // Four billion events, tokens and hashes in a handful of bytes.
    let array32 = [0xdd, 0xff, 0xff, 0xff, 0xff];
    let counted = |payload: &[u8]| {
        assert!(
            matches!(decode_batch(payload), Err(WireError::Count { .. })),
            "{payload:x?}"
        );
    };
    counted(&array32);
    counted(&[&[0x92, 0x01], &array32[..]].concat());
    counted(&one_event(&pack(&[
        &[0x92],
        &text("BlockRemoved"),
        &array32,
    ])));
    let name = text("BlockStored");
    counted(&one_event(&pack(&[
        &[0x95],
        &name,
        &[0x91, 7],
        &[0xc0],
        &array32,
    ])));
    counted(&one_event(&[0xdf, 0xff, 0xff, 0xff, 0xff]));
    // Arrays in arrays, in a field that is read over.
    let deep = [&[0x92][..], &text("BlockMoved"), &[0x91; 100_000], &[0xc0]].concat();
    assert_eq!(decode_batch(&one_event(&deep)), Err(WireError::Depth));
    // A timestamp that compares with nothing.
    let mut nan = vec![0x92, 0xcb];
    nan.extend(f64::NAN.to_be_bytes());
    nan.push(0x90);
    assert_eq!(
        decode_batch(&nan),
        Err(WireError::Range {
            reading: "the timestamp"
        })
    );
    let trailing = [&encode_batch(&EventBatch::default())[..], &[0]].concat();
    assert_eq!(
        decode_batch(&trailing),
        Err(WireError::Trailing { left: 1 })
    );
}

#[test]
fn every_truncation_is_refused_and_no_flipped_bit_panics() {
    let payload = encode_batch(&full_batch());
    for length in 0..payload.len() {
        assert!(decode_batch(&payload[..length]).is_err(), "cut at {length}");
    }
    for position in 0..payload.len() {
        for bit in 0..8 {
            let mut flipped = payload.clone();
            flipped[position] ^= 1 << bit;
            let _ = decode_batch(&flipped);
        }
    }
}
