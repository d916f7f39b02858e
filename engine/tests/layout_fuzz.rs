//! Can bytes from another node make the reader of KV records panic, or believe nonsense?
//!
//! An ordinary test runs a bounded number of inputs; `cargo bolero test` goes on.

use engine::kv::layout::{CHECKSUM_BYTES, HEADER_BYTES, LayoutError, Record};

/// A right checksum, so that the fuzzer gets behind it.
fn sealed(mut bytes: Vec<u8>) -> Vec<u8> {
    let checksum = blake3::hash(&bytes);
    bytes.extend_from_slice(&checksum.as_bytes()[..CHECKSUM_BYTES]);
    bytes
}

fn check(bytes: &[u8]) {
    match Record::parse(bytes) {
        Ok(record) => {
            let layout = record.layout;
            assert_eq!(layout.record_bytes(), bytes.len());
            assert!(record.layer < layout.layers);
            assert!((1..=layout.block_tokens).contains(&record.tokens));
            assert!(layout.heads.count > 0);
            assert!(layout.heads.first + layout.heads.count <= layout.kv_heads);
        }
        Err(error) => assert!(!error.to_string().is_empty()),
    }
}

/// Any bytes, and any bytes that begin as a record does and end with a right checksum.
#[test]
fn arbitrary_bytes_are_read_or_refused() {
    bolero::check!().for_each(|bytes: &[u8]| {
        check(bytes);
        let mut record = b"HKVB\x01\x00".to_vec();
        record.extend_from_slice(bytes);
        check(&sealed(record));
    });
}

/// Headers whose fields are small, so that many of them hang together, with payloads of any size.
#[test]
fn headers_that_hang_together_are_read_or_refused() {
    bolero::check!()
        .with_type::<([u8; 10], u8)>()
        .for_each(|(fields, extra)| {
            let [
                dtype,
                order,
                block_tokens,
                tokens,
                layers,
                layer,
                kv_heads,
                first,
                heads,
                dim,
            ] = fields.map(|field| field % 9);
            // 8 bits, a scale for 16 dimensions: other widths are refused.
            let dim = if dtype == 3 { 8 * dim } else { dim };
            let values = usize::from(dim) * usize::from(block_tokens);
            let tile = match dtype {
                0 | 2 => 4 * values,
                3 => 2 * (values + values / 8),
                _ => 8 * values,
            };
            let payload = tile * usize::from(heads);
            let mut record = b"HKVB\x01\x00".to_vec();
            record.extend_from_slice(&[dtype, order, block_tokens, 0, tokens, 0]);
            for field in [layers, layer, kv_heads, first, heads, dim] {
                record.extend_from_slice(&u32::from(field).to_le_bytes());
            }
            record.extend_from_slice(&(payload as u32).to_le_bytes());
            assert_eq!(record.len(), HEADER_BYTES);
            record.resize(HEADER_BYTES + payload + usize::from(extra / 200), 7);
            let record = sealed(record);
            check(&record);
            let right = dtype < 4
                && (dtype != 3 || dim % 16 == 0)
                && order < 2
                && (1..=block_tokens).contains(&tokens)
                && layer < layers
                && first < kv_heads
                && (1..=kv_heads - first).contains(&heads)
                && dim > 0
                && dim % 2 == 0;
            let found = Record::parse(&record).map(|record| record.layer);
            match (right, *extra < 200) {
                (true, true) => assert_eq!(found, Ok(usize::from(layer))),
                (true, false) => assert!(matches!(found, Err(LayoutError::Length { .. }))),
                (false, _) => assert!(found.is_err()),
            }
        });
}
