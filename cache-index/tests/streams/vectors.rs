//! Catches an engine's published names being read as something else: the hash vectors that vLLM and
//! SGLang give for two blocks of tokens 1 to 32, in every shape that they send them in. Whatever an
//! engine calls a block, our own hash of its tokens is what is credited.

use std::error::Error;

use cache_index::block::{Namespace, hash_chain};
use cache_index::event::{EngineHash, KvEvent};
use cache_index::ids::NodeId;
use cache_index::index::{Index, Limits};
use cache_index::wire::decode_batch;
use rmp::encode as out;

const MODEL: &str = "model";
const SALT: &str = "tenant-a";

/// An engine's names for block A (1 to 16), B after A (17 to 32), and A under the salt, if it tells.
struct Vector {
    engine: &'static str,
    a: i64,
    b: i64,
    salted_a: Option<i64>,
}

const VECTORS: [Vector; 3] = [
    Vector {
        engine: "vLLM sha256_cbor",
        a: 8_866_452_693_264_111_234,
        b: 807_986_237_951_177_663,
        salted_a: Some(5_068_484_237_151_326_159),
    },
    Vector {
        engine: "vLLM sha256 (pickle)",
        a: 1_403_909_460_543_360_175,
        b: 1_643_945_449_041_937_783,
        salted_a: None,
    },
    Vector {
        engine: "SGLang",
        a: 8_635_429_971_592_222_890,
        b: 1_256_577_331_724_852_459,
        salted_a: None,
    },
];

/// How an event is written.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Shape {
    Map,
    Array,
}

/// A stored event of one block, as its engine writes it.
fn payload(
    shape: Shape,
    name: i64,
    parent: Option<i64>,
    first: u32,
    salt: Option<&str>,
) -> Result<Vec<u8>, Box<dyn Error>> {
    let mut bytes = Vec::new();
    let text = |bytes: &mut Vec<u8>, text: &str| out::write_str(bytes, text);
    out::write_array_len(&mut bytes, 2)?;
    out::write_f64(&mut bytes, 1.5)?;
    out::write_array_len(&mut bytes, 1)?;
    let fields = [
        "block_hashes",
        "parent_block_hash",
        "token_ids",
        "block_size",
        "lora_id",
        "medium",
        "lora_name",
        "extra_keys",
    ];
    let count = fields.len() as u32 + 1;
    match shape {
        Shape::Map => {
            out::write_map_len(&mut bytes, count)?;
            text(&mut bytes, "type")?;
        }
        Shape::Array => drop(out::write_array_len(&mut bytes, count)?),
    }
    text(&mut bytes, "BlockStored")?;
    for field in fields {
        if shape == Shape::Map {
            text(&mut bytes, field)?;
        }
        match field {
            "block_hashes" => {
                out::write_array_len(&mut bytes, 1)?;
                out::write_sint(&mut bytes, name)?;
            }
            "parent_block_hash" => match parent {
                Some(parent) => drop(out::write_sint(&mut bytes, parent)?),
                None => out::write_nil(&mut bytes)?,
            },
            "token_ids" => {
                out::write_array_len(&mut bytes, 16)?;
                for token in first..first + 16 {
                    out::write_u32(&mut bytes, token)?;
                }
            }
            "block_size" => drop(out::write_sint(&mut bytes, 16)?),
            "medium" => text(&mut bytes, "GPU")?,
            "extra_keys" => match salt {
                Some(salt) => {
                    out::write_array_len(&mut bytes, 1)?;
                    out::write_array_len(&mut bytes, 1)?;
                    text(&mut bytes, salt)?;
                }
                None => out::write_nil(&mut bytes)?,
            },
            _ => out::write_nil(&mut bytes)?,
        }
    }
    Ok(bytes)
}

#[test]
fn published_names_resolve_parents_and_nothing_else() {
    for vector in &VECTORS {
        for shape in [Shape::Map, Shape::Array] {
            let index = Index::new(MODEL, Limits::default());
            assert!(index.issue_salt(SALT));
            let node = NodeId::new(vector.engine);
            let apply = |payload: Result<Vec<u8>, Box<dyn Error>>, name: i64| {
                let batch = decode_batch(&payload.unwrap()).unwrap();
                let KvEvent::Stored { block_hashes, .. } = &batch.events[0] else {
                    panic!("{:?}", batch.events);
                };
                assert_eq!(block_hashes, &[EngineHash::Int(name as u64)]);
                assert_eq!(index.apply(&node, &batch).stored, 1);
            };
            apply(payload(shape, vector.a, None, 1, None), vector.a);
            apply(payload(shape, vector.b, Some(vector.a), 17, None), vector.b);
            let tokens: Vec<u32> = (1..=32).collect();
            let blocks = |salt| {
                let chain = hash_chain(&Namespace::new(MODEL, None, salt), &tokens);
                index
                    .overlap(&chain)
                    .first()
                    .map_or(0, |(_, blocks)| *blocks)
            };
            assert_eq!(
                (blocks(None), blocks(Some(SALT))),
                (2, 0),
                "{}",
                vector.engine
            );
            if let Some(name) = vector.salted_a {
                apply(payload(shape, name, None, 1, Some(SALT)), name);
                assert_eq!((blocks(None), blocks(Some(SALT))), (2, 1));
            }
            index.check_integrity();
        }
    }
}
