//! Catches a decoder or an index that vLLM's real events do not agree with: a capture of vLLM 0.32
//! with 32-token blocks, evictions and a cache reset, replayed against its own requests.

use std::collections::{HashMap, HashSet};
use std::path::PathBuf;

use cache_index::block::{Namespace, hash_chain};
use cache_index::event::{EngineHash, EventBatch, ExtraKey, KvEvent};
use cache_index::ids::NodeId;
use cache_index::index::{Index, Limits};
use cache_index::trust::{Replay, Step, Tracker, Trust};
use cache_index::wire::{decode_batch, encode_batch};

const MODEL: &str = "SmolLM2-135M";

/// The capture's messages; none where the checkout comes without it.
fn messages() -> Option<Vec<(u64, Vec<u8>)>> {
    let path =
        PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../shared/kv-events/vllm_kv_events.bin");
    #[expect(clippy::disallowed_methods, reason = "a test reads its data")]
    let Ok(bytes) = std::fs::read(&path) else {
        eprintln!("skipped: {} is not there", path.display());
        return None;
    };
    let mut rest = &bytes[..];
    let mut frame = || {
        let (length, after) = rest.split_first_chunk::<4>()?;
        let (frame, after) = after.split_at(u32::from_be_bytes(*length) as usize);
        rest = after;
        Some(frame.to_vec())
    };
    let mut messages = Vec::new();
    while let Some(_topic) = frame() {
        let seq = frame()
            .and_then(|seq| seq.try_into().ok())
            .expect("a number of 8 bytes");
        messages.push((u64::from_be_bytes(seq), frame().expect("a payload")));
    }
    Some(messages)
}

/// All tokens up to the end of a block, and the salt of their request.
#[derive(Clone, PartialEq, Default)]
struct Prefix {
    salt: Option<Box<str>>,
    tokens: Vec<u32>,
}

/// What vLLM holds, by its own hashes and the tokens that led to them.
#[derive(Default)]
struct Vllm {
    prefixes: HashMap<EngineHash, Prefix>,
    held: HashSet<EngineHash>,
}

impl Vllm {
    fn apply(&mut self, batch: &EventBatch) {
        for event in &batch.events {
            match event {
                KvEvent::Stored {
                    block_hashes,
                    parent,
                    token_ids,
                    block_size,
                    extra_keys,
                    ..
                } => {
                    let salt = match extra_keys.of(0) {
                        [ExtraKey::Text(salt)] => Some(salt.clone()),
                        _ => None,
                    };
                    let start = Prefix {
                        salt,
                        tokens: Vec::new(),
                    };
                    let mut prefix = parent
                        .as_ref()
                        .map_or(start, |hash| self.prefixes[hash].clone());
                    for (hash, tokens) in block_hashes.iter().zip(token_ids.chunks(*block_size)) {
                        prefix.tokens.extend(tokens);
                        self.prefixes.insert(hash.clone(), prefix.clone());
                        self.held.insert(hash.clone());
                    }
                }
                KvEvent::Removed { block_hashes, .. } => {
                    block_hashes
                        .iter()
                        .for_each(|hash| assert!(self.held.remove(hash)));
                }
                KvEvent::Cleared => self.held.clear(),
            }
        }
    }

    /// Leading blocks of 16 that are held, of a prompt that is one of the known prefixes.
    fn overlap(&self, prompt: &Prefix) -> usize {
        let is_held = |end: &usize| {
            let part = Prefix {
                salt: prompt.salt.clone(),
                tokens: prompt.tokens[..*end].to_vec(),
            };
            let named = self.prefixes.iter().find(|(_, prefix)| **prefix == part);
            named.is_some_and(|(hash, _)| self.held.contains(hash))
        };
        2 * (32..=prompt.tokens.len())
            .step_by(32)
            .take_while(is_held)
            .count()
    }
}

#[test]
fn the_index_agrees_with_a_real_vllm() {
    let Some(messages) = messages() else { return };
    assert_eq!(messages.len(), 18);
    let index = Index::new(MODEL, Limits::default());
    // One of the captured requests carries this salt.
    assert!(index.issue_salt("tenant-a"));
    let id = NodeId::new("vllm");
    let mut tracker = Tracker::new(Replay::Available);
    assert_eq!(
        tracker.on_connected(),
        vec![Step::Forget, Step::Replay { from: 0 }]
    );
    assert_eq!(tracker.on_replay_end(), vec![]);
    let mut vllm = Vllm::default();
    let mut seen = [0; 3];
    let mut salted = 0;
    for (seq, payload) in messages {
        let batch = decode_batch(&payload).unwrap();
        assert_eq!(
            decode_batch(&encode_batch(&batch)),
            Ok(batch.clone()),
            "message {seq}"
        );
        assert_eq!(
            tracker.on_live(seq, batch.clone()),
            vec![Step::Apply(batch.clone())]
        );
        for event in &batch.events {
            seen[match event {
                KvEvent::Stored { .. } => 0,
                KvEvent::Removed { .. } => 1,
                KvEvent::Cleared => 2,
            }] += 1;
        }
        let applied = index.apply(&id, &batch);
        assert_eq!(
            (applied.orphans, applied.uncreditable, applied.malformed),
            (0, 0, 0)
        );
        assert_eq!((applied.unknown_removals, applied.ignored), (0, 0));
        index.check_integrity();
        vllm.apply(&batch);
        assert_eq!(index.held(&id), 2 * vllm.held.len(), "message {seq}");
        for prompt in vllm.prefixes.values() {
            let blocks = |salt: Option<&str>| {
                let chain = hash_chain(&Namespace::new(MODEL, None, salt), &prompt.tokens);
                index
                    .overlap(&chain)
                    .first()
                    .map_or(0, |(_, blocks)| *blocks)
            };
            assert_eq!(
                blocks(prompt.salt.as_deref()),
                vllm.overlap(prompt),
                "message {seq}"
            );
            assert_eq!(blocks(Some("another")), 0);
            salted += usize::from(prompt.salt.is_some() && vllm.overlap(prompt) > 0);
        }
    }
    assert_eq!(tracker.trust(), Trust::Exact);
    assert!(
        seen.iter().all(|count| *count > 0) && salted > 0,
        "{seen:?} {salted}"
    );
}
