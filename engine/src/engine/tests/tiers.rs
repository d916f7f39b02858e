//! The host tier behind the step loop. Catches a block that comes back with other content, one that
//! is lost between pool and host memory, cached tokens that are not there, and events from which a
//! reader learns something else than what is held.

use std::collections::{BTreeMap, BTreeSet};

use cache_index::event::{EngineHash, KvEvent, Medium};
use cache_index::wire::decode_batch;

use super::stepper::Stepper;
use super::*;
use crate::events::EventLog;
use crate::kv::store::Tier;

fn cached(stepper: &mut Stepper, prompt: &[u32], output: usize) -> usize {
    let mut told = stepper.submit(job(prompt, output, None));
    stepper.finish(&mut told);
    assert_eq!(told.tokens(), answer(prompt, output));
    told.joined.expect("it joined")
}

#[test]
fn what_the_pool_evicts_comes_back() {
    let mut stepper = Stepper::with_host(12, 30);
    let mut random = Random(1);
    let (first, second) = (random.tokens(160), random.tokens(160));
    assert_eq!(cached(&mut stepper, &first, 1), 0);
    assert_eq!(cached(&mut stepper, &second, 1), 0);
    let before = stepper.computed();
    assert_eq!(cached(&mut stepper, &first, 1), 144);
    assert_eq!(
        stepper.computed() - before,
        16,
        "the last block, whose logits are needed"
    );
    assert_eq!(cached(&mut stepper, &second, 1), 144);
    let tiers = &stepper.engine.parts.metrics.tiers;
    assert!(tiers.hit_tokens(Tier::Host).get() >= 128);
    assert!(tiers.stored(Tier::Host).get() >= 16);
    let held = tiers.blocks(Tier::Host).get();
    assert_eq!(tiers.bytes(Tier::Host).get(), held * 64);
    stepper.end();
}

/// Two small prompts that nobody comes back to, and one that somebody does.
#[test]
fn short_prompts_are_kept_once_somebody_comes_back() {
    let mut stepper = Stepper::with_host(12, 30);
    let mut random = Random(2);
    let (once, twice) = (random.tokens(40), random.tokens(40));
    for prompt in [&once, &twice, &twice] {
        cached(&mut stepper, prompt, 1);
    }
    cached(&mut stepper, &random.tokens(180), 1);
    assert_eq!(cached(&mut stepper, &once, 1), 0);
    assert_eq!(cached(&mut stepper, &twice, 1), 32);
    assert!(stepper.engine.parts.metrics.tiers.refused.get() >= 2);
    stepper.end();
}

/// Conversations that take turns, four times what the pool holds.
fn conversations(mut stepper: Stepper) -> usize {
    let mut random = Random(3);
    let mut all: Vec<_> = (0..8).map(|_| random.tokens(80)).collect();
    let mut hits = 0;
    for _turn in 0..6 {
        for conversation in &mut all {
            hits += cached(&mut stepper, conversation, 8);
            conversation.extend(answer(conversation, 8));
            conversation.extend(random.tokens(20));
        }
    }
    stepper.end();
    hits
}

#[test]
fn a_pool_with_a_tier_serves_as_much_as_one_pool_of_both() {
    let most = conversations(Stepper::of(1_000));
    let both = conversations(Stepper::with_host(30, 90));
    let none = conversations(Stepper::of(30));
    assert!(both * 10 >= most * 9, "{both} of {most}");
    assert!(none * 2 < most, "the pool alone is too small: {none}");
}

/// A reader of the events: the blocks of each tier, with their parents.
#[derive(Default)]
struct Reader {
    held: BTreeMap<Tier, BTreeSet<EngineHash>>,
}

impl Reader {
    fn tier(medium: Option<&Medium>) -> Tier {
        match medium {
            None => Tier::Device,
            Some(Medium::Host) => Tier::Host,
            Some(other) => unreachable!("no such tier here: {other:?}"),
        }
    }

    fn anywhere(&self, hash: &EngineHash) -> bool {
        self.held.values().any(|held| held.contains(hash))
    }

    fn apply(&mut self, event: &KvEvent) {
        match event {
            KvEvent::Stored {
                block_hashes,
                parent,
                medium,
                ..
            } => {
                if let Some(parent) = parent {
                    assert!(self.anywhere(parent), "a block whose parent is nowhere");
                }
                let held = self.held.entry(Self::tier(medium.as_ref())).or_default();
                for hash in block_hashes {
                    assert!(held.insert(hash.clone()), "stored twice");
                }
            }
            KvEvent::Removed {
                block_hashes,
                medium,
                ..
            } => {
                let held = self.held.entry(Self::tier(medium.as_ref())).or_default();
                for hash in block_hashes {
                    assert!(held.remove(hash), "removed what was not there");
                }
            }
            KvEvent::Cleared => self.held.clear(),
        }
    }

    fn of(payload: &[u8]) -> Self {
        let batch = decode_batch(payload).expect("our own batches decode");
        let mut reader = Self::default();
        batch.events.iter().for_each(|event| reader.apply(event));
        reader
    }
}

#[test]
fn the_events_tell_where_everything_lies() {
    let log = Arc::new(EventLog::new("boot".into(), 100_000));
    let mut stepper = Stepper::new(Parts {
        host_blocks: 40,
        events: Some(Arc::clone(&log)),
        ..parts(24, Arc::default())
    });
    let mut random = Random(5);
    let shared = random.tokens(200);
    let (mut reader, mut next) = (Reader::default(), 0);
    let mut told = Vec::new();
    for _ in 0..120 {
        let same = random.below(200);
        let length = 1 + random.below(250 - same);
        let rest = random.tokens(length);
        told.push(stepper.submit(job(&[&shared[..same], &rest[..]].concat(), 4, None)));
        for _ in 0..random.below(12) {
            stepper.step();
            for batch in log.from(next, 100) {
                let before = reader
                    .held
                    .values()
                    .flatten()
                    .cloned()
                    .collect::<BTreeSet<_>>();
                let batch_events = decode_batch(&batch.payload).expect("it decodes").events;
                for event in &batch_events {
                    reader.apply(event);
                }
                let gone = before.iter().filter(|hash| !reader.anywhere(hash)).count();
                let removed = batch_events
                    .iter()
                    .any(|e| matches!(e, KvEvent::Removed { .. }));
                assert!(gone == 0 || removed);
                next = batch.seq + 1;
            }
            let snapshot = log.snapshot(&stepper.engine.held());
            if let Some(snapshot) = snapshot {
                let fresh = Reader::of(&snapshot.payload);
                for (tier, held) in &fresh.held {
                    assert!(held.is_subset(&reader.held[tier]), "{tier:?}");
                }
                let device = |reader: &Reader| reader.held.get(&Tier::Device).cloned();
                assert_eq!(
                    device(&fresh).unwrap_or_default(),
                    device(&reader).unwrap_or_default()
                );
            }
        }
    }
    told.iter_mut().for_each(|told| stepper.finish(told));
    assert!(reader.held[&Tier::Host].len() > 20, "the tier was in use");
    stepper.end();
}
