//! The tiers behind the step loop. Catches a block that comes back with other content, one that
//! is lost between pool and host memory, cached tokens that are not there, and events from which a
//! reader learns something else than what is held.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use cache_index::event::{EngineHash, KvEvent, Medium};
use cache_index::wire::decode_batch;

use super::shared::Memory;
use super::stepper::Stepper;
use super::*;
use crate::events::EventLog;
use crate::kv::layout::{BlockLayout, HeadRange, KeyOrder, KvDtype};
use crate::kv::store::disk::{Disk, Drive, Identity};
use crate::kv::store::index::Slot;
use crate::kv::store::{Store, Tier};

pub(super) fn cached(stepper: &mut Stepper, prompt: &[u32], output: usize) -> usize {
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
            // A block on its way to the disk is nowhere.
            settle(&mut stepper);
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

/// Names scripted blocks; their bytes are tokens and no values.
pub(super) fn layout() -> BlockLayout {
    BlockLayout {
        dtype: KvDtype::F32,
        key_order: KeyOrder::Pairs,
        block_tokens: BLOCK_TOKENS,
        layers: 1,
        kv_heads: 1,
        heads: HeadRange { first: 0, count: 1 },
        head_dim: 2,
    }
}

/// A disk tier for blocks of scripted tokens.
pub(super) fn disk(dir: &Path, slots: usize) -> Disk {
    let layout = layout();
    let bytes = 4096 + slots * (4096 + 512);
    let identity = Identity::new(&layout, [0; 32]);
    Disk::open(dir, bytes as u64, identity, 4 * BLOCK_TOKENS).expect("a folder of ours")
}

fn with_disk(kv_blocks: u32, host_blocks: usize, disk: Disk) -> Stepper {
    Stepper::new(Parts {
        host_blocks,
        disk: Some(disk),
        ..parts(kv_blocks, Arc::default())
    })
}

/// Steps until the drive has nothing left to do.
pub(super) fn settle(stepper: &mut Stepper) {
    let busy = |stepper: &Stepper| stepper.engine.store.as_ref().is_some_and(Store::is_busy);
    while busy(stepper) {
        stepper.step();
        std::thread::yield_now();
    }
}

#[test]
fn what_host_memory_evicts_comes_back_from_the_disk_and_survives() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut random = Random(7);
    let prompts: Vec<_> = (0..5).map(|_| random.tokens(160)).collect();
    let mut stepper = with_disk(12, 10, disk(folder.path(), 200));
    for prompt in &prompts {
        assert_eq!(cached(&mut stepper, prompt, 1), 0);
        settle(&mut stepper);
    }
    let before = stepper.computed();
    assert_eq!(cached(&mut stepper, &prompts[0], 1), 144);
    assert_eq!(stepper.computed() - before, 16);
    let tiers = &stepper.engine.parts.metrics.tiers;
    assert!(tiers.hit_tokens(Tier::Disk).get() >= 144);
    assert!(tiers.blocks(Tier::Disk).get() >= 20);
    assert_eq!(
        (tiers.late.get(), tiers.damaged.get(), tiers.failed.get()),
        (0, 0, 0)
    );
    stepper.end();
    // The next life of the node.
    let mut stepper = with_disk(12, 10, disk(folder.path(), 200));
    assert_eq!(cached(&mut stepper, &prompts[0], 1), 144);
    assert_eq!(cached(&mut stepper, &prompts[1], 1), 144);
    stepper.end();
}

/// Would catch a hint that nobody heeds: behind a prompt that takes whole steps, nobody has a turn.
#[test]
fn what_is_expected_on_the_disk_is_read_while_others_have_their_turn() {
    // As much as half of host memory takes.
    for (hint, read) in [(0, 0), (144, 80)] {
        let folder = tempfile::tempdir().expect("a folder");
        let mut random = Random(9);
        let prompts: Vec<_> = (0..10).map(|_| random.tokens(160)).collect();
        let mut stepper = with_disk(40, 10, disk(folder.path(), 200));
        for prompt in &prompts {
            cached(&mut stepper, prompt, 1);
            settle(&mut stepper);
        }
        let mut long = stepper.submit(job(&random.tokens(500), 1, None));
        stepper.step();
        let mut later = job(&prompts[0], 1, None);
        later.priority = 1;
        later.prefetch_tokens = hint;
        let mut later = stepper.submit(later);
        stepper.step();
        while stepper.engine.store.as_ref().is_some_and(Store::is_busy) {
            std::thread::yield_now();
            stepper.engine.poll_disk();
        }
        assert!(long.hear().ended.is_none() && later.hear().joined.is_none());
        stepper.engine.count_tiers();
        let tiers = &stepper.engine.parts.metrics.tiers;
        assert_eq!(tiers.hit_tokens(Tier::Disk).get(), read);
        stepper.finish(&mut long);
        stepper.finish(&mut later);
        assert_eq!(later.joined, Some(144));
        stepper.end();
    }
}

#[test]
fn a_pool_with_both_tiers_serves_as_much_as_one_pool_of_all() {
    let folder = tempfile::tempdir().expect("a folder");
    let most = conversations(Stepper::of(1_000));
    let all = conversations(with_disk(30, 20, disk(folder.path(), 400)));
    assert!(all * 10 >= most * 9, "{all} of {most}");
}

/// A drive in memory that reads only while its gate is open.
struct Gated {
    blocks: Mutex<BTreeMap<Slot, Vec<u8>>>,
    gate: Arc<Gate>,
}

impl Drive for Gated {
    fn read(&self, slot: Slot, to: &mut [u8]) -> std::io::Result<()> {
        self.gate.pass();
        to.copy_from_slice(&self.blocks.lock().unwrap()[&slot]);
        Ok(())
    }

    fn write(&self, slot: Slot, from: &[u8]) -> std::io::Result<()> {
        self.blocks.lock().unwrap().insert(slot, from.to_vec());
        Ok(())
    }

    fn write_entry(&self, _slot: Slot, _entry: &[u8]) -> std::io::Result<()> {
        Ok(())
    }
}

#[test]
fn a_slow_disk_costs_one_wait_and_holds_up_nobody_else() {
    let gate = Arc::<Gate>::default();
    let drive = Gated {
        blocks: Mutex::default(),
        gate: Arc::clone(&gate),
    };
    let slow = Disk::start(drive, 200, Vec::new(), 4 * BLOCK_TOKENS).expect("a thread");
    let mut stepper = with_disk(12, 10, slow);
    let mut random = Random(8);
    let prompts: Vec<_> = (0..5).map(|_| random.tokens(160)).collect();
    for prompt in &prompts {
        cached(&mut stepper, prompt, 1);
        settle(&mut stepper);
    }
    gate.set_closed(true);
    let mut waits = stepper.submit(job(&prompts[0], 1, None));
    stepper.step();
    let mut beside = stepper.submit(job(&random.tokens(20), 3, None));
    stepper.finish(&mut beside);
    assert!(
        waits.hear().joined.is_none(),
        "the other ended while it waited"
    );
    stepper.finish(&mut waits);
    assert_eq!(waits.tokens(), answer(&prompts[0], 1));
    assert_eq!(waits.joined, Some(0), "computed after all");
    assert_eq!(stepper.engine.parts.metrics.tiers.late.get(), 1);
    gate.set_closed(false);
    settle(&mut stepper);
    stepper.end();
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
            Some(Medium::Disk) => Tier::Disk,
            Some(Medium::Shared) => Tier::Shared,
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

    /// Takes what is new in the log.
    fn hear(&mut self, log: &EventLog, next: &mut u64) {
        for batch in log.from(*next, 100_000) {
            let events = decode_batch(&batch.payload).expect("it decodes").events;
            events.iter().for_each(|event| self.apply(event));
            *next = batch.seq + 1;
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
    let folder = tempfile::tempdir().expect("a folder");
    let log = Arc::new(EventLog::new("boot".into(), 100_000));
    let mut stepper = Stepper::new(Parts {
        host_blocks: 12,
        disk: Some(disk(folder.path(), 60)),
        shared: Some(super::shared::tier(&Memory::default())),
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
            reader.hear(&log, &mut next);
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
    settle(&mut stepper);
    reader.hear(&log, &mut next);
    assert!(reader.held[&Tier::Host].len() > 5, "the tier was in use");
    assert!(reader.held[&Tier::Disk].len() > 20, "and the disk");
    assert!(reader.held[&Tier::Shared].len() > 20, "and the store");
    stepper.end();
}
