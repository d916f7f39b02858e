//! The shared tier behind the step loop, over a store in memory. Catches a block that reaches another node
//! with other content, one of another scope, and a store that holds up those who ask it, or others.

use std::collections::HashMap;
use std::time::Duration;

use super::stepper::{Stepper, Told};
use super::tiers::{cached, layout, settle};
use super::*;
use crate::kv::store::Tier;
use crate::kv::store::form::Form;
use crate::kv::store::shared::objects::{Away, Got, Objects, Put};
use crate::kv::store::shared::{Seal, SharedTier};

/// A store that several nodes have, which answers only while its gate is open.
#[derive(Clone, Default)]
pub(super) struct Memory {
    objects: Arc<Mutex<HashMap<String, Vec<u8>>>>,
    gate: Arc<Gate>,
}

impl Objects for Memory {
    fn tend(&mut self) -> Option<Duration> {
        None
    }

    fn batch(&self) -> usize {
        3
    }

    fn exist(&mut self, keys: &[String]) -> Result<Vec<bool>, Away> {
        self.gate.pass();
        let objects = self.objects.lock().unwrap();
        Ok(keys.iter().map(|key| objects.contains_key(key)).collect())
    }

    fn put(&mut self, objects: &[(&str, &[u8])]) -> Result<Vec<Put>, Away> {
        let mut held = self.objects.lock().unwrap();
        for (key, object) in objects {
            held.entry((*key).to_owned()).or_insert(object.to_vec());
        }
        Ok(vec![Put::Stored; objects.len()])
    }

    fn get(&mut self, wanted: &mut [(&str, &mut [u8])]) -> Result<Vec<Got>, Away> {
        self.gate.pass();
        let objects = self.objects.lock().unwrap();
        let found = wanted.iter_mut().map(|(key, to)| match objects.get(*key) {
            Some(object) => {
                to.copy_from_slice(object);
                Got::Found(object.len())
            }
            None => Got::Missing,
        });
        Ok(found.collect())
    }

    fn remove(&mut self, key: &str) -> Result<(), Away> {
        self.objects.lock().unwrap().remove(key);
        Ok(())
    }
}

/// A tier for blocks of scripted tokens, once its store is reached.
pub(super) fn tier(memory: &Memory) -> SharedTier {
    let seal = Seal::new([1; 32], &layout(), (Form::Exact, 4 * BLOCK_TOKENS), [0; 32]);
    let tier = SharedTier::start(seal, |_, _| Ok(Box::new(memory.clone())));
    let tier = tier.expect("a thread");
    while !tier.is_up() {
        std::thread::yield_now();
    }
    tier
}

fn node(memory: &Memory) -> Stepper {
    Stepper::new(Parts {
        host_blocks: 10,
        shared: Some(tier(memory)),
        ..parts(12, Arc::default())
    })
}

/// Prompts of ten blocks that one node computed and mostly lost; the first two at least are in the store.
fn lost(memory: &Memory) -> Vec<Vec<u32>> {
    let mut stepper = node(memory);
    let mut random = Random(7);
    let prompts: Vec<_> = (0..5).map(|_| random.tokens(160)).collect();
    for prompt in &prompts {
        assert_eq!(cached(&mut stepper, prompt, 1), 0);
        settle(&mut stepper);
    }
    stepper.end();
    prompts
}

fn hits(stepper: &Stepper) -> u64 {
    stepper
        .engine
        .parts
        .metrics
        .tiers
        .hit_tokens(Tier::Shared)
        .get()
}

#[test]
fn what_one_node_lost_another_goes_on_with() {
    let memory = Memory::default();
    let prompts = lost(&memory);
    let mut stepper = node(&memory);
    for prompt in &prompts[..2] {
        let before = stepper.computed();
        assert_eq!(cached(&mut stepper, prompt, 1), 144);
        assert_eq!(stepper.computed() - before, 16);
    }
    assert_eq!(hits(&stepper), 288);
    let tiers = &stepper.engine.parts.metrics.tiers;
    assert_eq!((tiers.late.get(), tiers.failed.get()), (0, 0));
    assert!(tiers.blocks(Tier::Shared).get() >= 18, "told");
    stepper.end();
}

#[test]
fn a_prompt_of_another_scope_finds_nothing() {
    let memory = Memory::default();
    let prompts = lost(&memory);
    let mut stepper = node(&memory);
    let mut told = stepper.submit(job(&prompts[0], 1, Some("theirs")));
    stepper.finish(&mut told);
    assert_eq!((told.joined, hits(&stepper)), (Some(0), 0));
    stepper.end();
}

/// A store that does not answer costs its asker as long as computing takes, and nobody else anything;
/// who comes while it is behind does not wait for it.
#[test]
fn a_slow_store_costs_one_wait_and_holds_up_nobody_else() {
    let memory = Memory::default();
    let prompts = lost(&memory);
    let mut stepper = node(&memory);
    memory.gate.set_closed(true);
    let mut waits = stepper.submit(job(&prompts[0], 1, None));
    stepper.step();
    let mut beside = stepper.submit(job(&Random(8).tokens(17), 3, None));
    stepper.finish(&mut beside);
    assert!(waits.hear().joined.is_none(), "it waits");
    stepper.finish(&mut waits);
    assert_eq!(waits.tokens(), answer(&prompts[0], 1));
    assert_eq!(waits.joined, Some(0), "computed after all");
    assert_eq!(stepper.engine.parts.metrics.tiers.late.get(), 1);
    memory.gate.set_closed(false);
    settle(&mut stepper);
    assert_eq!(
        cached(&mut stepper, &prompts[1], 1),
        144,
        "and served again"
    );
    stepper.end();
}

/// Many at once over the same chain: one question, and each block comes once.
#[test]
fn those_who_want_the_same_ask_once() {
    let memory = Memory::default();
    let prompts = lost(&memory);
    let mut stepper = node(&memory);
    let mut all: Vec<Told> = (0..4)
        .map(|_| stepper.submit(job(&prompts[0], 1, None)))
        .collect();
    for told in &mut all {
        stepper.finish(told);
        assert_eq!(told.joined, Some(144));
    }
    assert_eq!(hits(&stepper), 144);
    stepper.end();
}
