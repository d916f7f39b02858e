//! Catches a lookup that sees, while events are applied beside it, what was true at no moment: more
//! or less credit than the node had between its beginning and its end.
//!
//! The slow twin answers a set of questions after every event beforehand. Then one thread applies
//! the events and others ask; what they get must lie between the least and the most that was true
//! from the last event that had ended when they began to the last that had begun when they ended.
//! Events store, evict (with holes, and what fills them again), clear and forget.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};

use cache_index::block::{BlockHash, Namespace, hash_chain};
use cache_index::event::{EngineHash, EventBatch, ExtraKeys, GroupKind, KvEvent};
use cache_index::ids::NodeId;
use cache_index::index::{Index, Limits};
use cache_index::reference::Reference;

use crate::differential::{MODEL, SALTS, chain};
use crate::engine::{Engine, Random};

const EVENTS: usize = 240;
const QUESTIONS: usize = 8;
const READERS: usize = 2;

/// One change of the index.
enum Change {
    Event(NodeId, EventBatch),
    Forget(NodeId),
}

/// What a question is answered with: blocks by node.
type Answer = BTreeMap<NodeId, usize>;

struct Script {
    changes: Vec<Change>,
    questions: Vec<Vec<BlockHash>>,
    /// By the number of changes made, then by question.
    truth: Vec<Vec<Answer>>,
}

fn step(engines: &mut [Engine], ids: &[NodeId], random: &mut Random) -> Change {
    let node = random.below(engines.len());
    let id = ids[node].clone();
    if random.one_in(80) {
        engines[node] = Engine::new(engines[node].block_size, random);
        return Change::Forget(id);
    }
    let engine = &mut engines[node];
    let event = if random.one_in(60) {
        engine.clear()
    } else if engine.held.len() > 25 || random.one_in(3) {
        engine.evict(random).unwrap_or(KvEvent::Cleared)
    } else {
        engine.store(6, random)
    };
    let batch = EventBatch {
        events: vec![event],
        ..EventBatch::default()
    };
    Change::Event(id, batch)
}

fn script(seed: u64) -> Script {
    let random = &mut Random(seed);
    let sizes = [16, 16, 16, 32, 8];
    let ids: Vec<NodeId> = (0..sizes.len())
        .map(|i| NodeId::new(&format!("node-{i}")))
        .collect();
    let mut engines: Vec<Engine> = sizes
        .iter()
        .map(|size| Engine::new(*size, random))
        .collect();
    let mut changes = Vec::new();
    let mut questions = Vec::new();
    for at in 0..EVENTS {
        changes.push(step(&mut engines, &ids, random));
        if at % (EVENTS / QUESTIONS) == EVENTS / QUESTIONS - 1 {
            questions.push(chain(&engines, random));
        }
    }
    let mut twin = Reference::new(MODEL, Limits::default());
    SALTS.iter().for_each(|salt| assert!(twin.issue_salt(salt)));
    let answers = |twin: &Reference| {
        let answer = |chain: &Vec<BlockHash>| twin.overlap(chain).into_iter().collect();
        questions.iter().map(answer).collect()
    };
    let mut truth = vec![answers(&twin)];
    for change in &changes {
        match change {
            Change::Event(id, batch) => drop(twin.apply(id, batch)),
            Change::Forget(id) => twin.forget(id),
        }
        truth.push(answers(&twin));
    }
    Script {
        changes,
        questions,
        truth,
    }
}

/// Panics where an answer was true at no moment from one to another.
fn judge(script: &Script, question: usize, answer: &Answer, moments: (usize, usize)) {
    let truths = &script.truth[moments.0..=moments.1];
    let nodes = truths.iter().flat_map(|truth| truth[question].keys());
    for node in nodes.chain(answer.keys()) {
        let blocks = |answer: &Answer| answer.get(node).copied().unwrap_or(0);
        let was = truths.iter().map(|truth| blocks(&truth[question]));
        let (least, most) = (
            was.clone().min().expect("one moment"),
            was.max().expect("one moment"),
        );
        let got = blocks(answer);
        assert!(
            (least..=most).contains(&got),
            "{node}: {got}, not {least} to {most}, {moments:?}"
        );
    }
}

fn run(seed: u64) -> usize {
    let script = script(seed);
    let index = Index::new(MODEL, Limits::default());
    SALTS
        .iter()
        .for_each(|salt| assert!(index.issue_salt(salt)));
    let (begun, ended) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let asked = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        let ask = |reader: usize| {
            let (script, index, begun, ended, asked) = (&script, &index, &begun, &ended, &asked);
            scope.spawn(move || {
                let random = &mut Random(seed * 10 + reader as u64);
                loop {
                    let question = random.below(script.questions.len());
                    let from = ended.load(Ordering::SeqCst);
                    let answer = index.overlap(&script.questions[question]);
                    let to = begun.load(Ordering::SeqCst);
                    judge(script, question, &answer.into_iter().collect(), (from, to));
                    asked.fetch_add(1, Ordering::SeqCst);
                    if from == script.changes.len() {
                        return;
                    }
                }
            })
        };
        let readers: Vec<_> = (0..READERS).map(ask).collect();
        for (at, change) in script.changes.iter().enumerate() {
            // Events faster than questions would test nothing: every eighth waits for one.
            let before = asked.load(Ordering::SeqCst);
            begun.fetch_add(1, Ordering::SeqCst);
            match change {
                Change::Event(id, batch) => drop(index.apply(id, batch)),
                Change::Forget(id) => index.forget(id),
            }
            ended.fetch_add(1, Ordering::SeqCst);
            // A reader that has ended by now has failed.
            while at % 8 == 0
                && asked.load(Ordering::SeqCst) == before
                && !readers.iter().any(|reader| reader.is_finished())
            {
                std::thread::yield_now();
            }
        }
    });
    index.check_integrity();
    asked.into_inner()
}

#[test]
fn lookups_beside_events_see_what_was_true_at_some_moment() {
    let asked: usize = (0..8).map(run).sum();
    assert!(asked > EVENTS, "{asked}");
}

fn named(range: std::ops::Range<u64>) -> Vec<EngineHash> {
    range.map(EngineHash::Int).collect()
}

fn stored(names: std::ops::Range<u64>, parent: Option<u64>, tokens: &[u32]) -> EventBatch {
    let event = KvEvent::Stored {
        token_ids: tokens[names.start as usize * 16..names.end as usize * 16].to_vec(),
        block_hashes: named(names),
        parent: parent.map(EngineHash::Int),
        block_size: 16,
        medium: None,
        lora_name: None,
        extra_keys: ExtraKeys::none(),
        group_idx: None,
        group_kind: GroupKind::Unsaid,
    };
    EventBatch {
        events: vec![event],
        ..EventBatch::default()
    }
}

fn removed(names: std::ops::Range<u64>) -> EventBatch {
    let event = KvEvent::Removed {
        block_hashes: named(names),
        medium: None,
        group_idx: None,
    };
    EventBatch {
        events: vec![event],
        ..EventBatch::default()
    }
}

fn both(first: EventBatch, second: EventBatch) -> EventBatch {
    EventBatch {
        events: [first.events, second.events].concat(),
        ..EventBatch::default()
    }
}

/// Catches an answer that joins the beginning of a prompt as it was with the rest as it is: the node
/// has the whole beginning or the longer rest, and never both, also within one batch.
#[test]
fn two_parts_of_a_prompt_are_seen_as_they_were_together() {
    let tokens: Vec<u32> = (0..40 * 16).collect();
    let index = Index::new(MODEL, Limits::default());
    let (other, node) = (NodeId::new("other"), NodeId::new("node"));
    // The other's prompt parts from this one after eight blocks: the rest lies in another place.
    let mut others = tokens.clone();
    others[8 * 16..].iter_mut().for_each(|token| *token += 1000);
    index.apply(&other, &stored(0..20, None, &others));
    index.apply(&node, &stored(0..10, None, &tokens));
    let chain = hash_chain(&Namespace::new(MODEL, None, None), &tokens);
    let done = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            while done.load(Ordering::Relaxed) == 0 {
                index.apply(
                    &node,
                    &both(removed(3..4), stored(10..11, Some(9), &tokens)),
                );
                index.apply(
                    &node,
                    &both(removed(10..11), stored(3..4, Some(2), &tokens)),
                );
            }
        });
        for _ in 0..300_000 {
            let found = index.overlap(&chain);
            let own = found.iter().find(|(id, _)| *id == node);
            let blocks = own.map_or(0, |(_, blocks)| *blocks);
            if blocks != 3 && blocks != 10 {
                done.store(1, Ordering::Relaxed);
                panic!("{blocks} blocks, which it never had");
            }
        }
        done.store(1, Ordering::Relaxed);
        writer.join().expect("the writer ends");
    });
    index.check_integrity();
}
