//! Does an answer depend on where its prefix was kept?
//!
//! The whole engine over pools that are far too small, with a host tier below them: the log
//! probabilities of every token, to the last bit, equal those of a pool that keeps everything.

use std::path::Path;
use std::sync::Arc;

use cache_index::block::{Namespace, hash_chain};
use engine::engine::{Handle, Job, Output, Parts};
use engine::kv::store::Tier;
use engine::kv::store::disk::{Disk, Identity};
use engine::kv::store::shared::SharedTier;
use engine::kv::table::Scope;
use engine::metrics::Metrics;
use engine::model::{BlockId, Model, ModelFile, ModelOptions, OpsKind};
use engine::parallel::RankGroup;

use super::file_of;
use super::tiny::{self, Noise, Tiny};

pub(super) fn group(path: &Path, ops: OpsKind, ranks: usize, kv_blocks: usize) -> RankGroup {
    let file = ModelFile::open(path).expect("the model opens");
    let options = ModelOptions {
        ops,
        threads: 1,
        kv_blocks,
    };
    RankGroup::in_process(ranks, &file, &options).expect("the model loads")
}

pub(super) struct Node {
    handle: Handle,
    thread: std::thread::JoinHandle<()>,
    pub(super) metrics: Arc<Metrics>,
}

impl Node {
    fn start(ranks: RankGroup, kv_blocks: usize, host_blocks: usize, disk: Option<Disk>) -> Node {
        Self::sharing(ranks, (kv_blocks, host_blocks), disk, None)
    }

    pub(super) fn sharing(
        ranks: RankGroup,
        (kv_blocks, host_blocks): (usize, usize),
        disk: Option<Disk>,
        shared: Option<SharedTier>,
    ) -> Node {
        let metrics = Arc::new(Metrics::new("tiny", kv_blocks));
        let parts = Parts {
            vocab: ranks.first().shape().vocab,
            layers: ranks.first().shape().layers,
            device: Box::new(ranks),
            token_bytes: Box::new(|id, _| format!("{id} ").into_bytes()),
            drafter: None,
            kv_blocks: kv_blocks as u32,
            host_blocks,
            disk,
            shared,
            orders: None,
            step_tokens: 24,
            beside_decode: engine::scheduler::pace::Beside::Paced,
            queue_max: 64,
            metrics: Arc::clone(&metrics),
            events: None,
        };
        let (handle, thread) = engine::engine::start(parts).expect("a thread");
        Node {
            handle,
            thread,
            metrics,
        }
    }

    /// Each token of the answer with the bits of its log probability, and the cached tokens.
    fn answer(&self, prompt: &[u32]) -> (Vec<(u32, u32)>, usize) {
        let namespace = Namespace::new("tiny", None, None);
        let chain = hash_chain(&namespace, prompt);
        let scope = Scope {
            namespace,
            salt: None,
        };
        let mut job = Job::generate(prompt.to_vec(), chain, scope, 10);
        job.logprobs = Some(0);
        let mut ticket = self.handle.submit(job).expect("the queue has room");
        let runtime = tokio::runtime::Builder::new_current_thread().build();
        let runtime = runtime.expect("a runtime");
        let mut produced = Vec::new();
        loop {
            match runtime.block_on(ticket.next()).expect("the engine lives") {
                Output::Text { tokens, .. } => produced.extend(tokens),
                Output::Done { tokens, usage, .. } => {
                    produced.extend(tokens);
                    let bits = produced.iter().map(|p| (p.id, p.logprob.to_bits()));
                    return (bits.collect(), usage.cached_tokens);
                }
                Output::Failed(error) => unreachable!("it failed: {error:?}"),
                Output::Joined { .. } | Output::Embedding(..) => {}
            }
        }
    }

    pub(super) fn end(self) {
        self.handle.stop();
        self.thread.join().expect("the engine ends");
    }
}

/// Growing conversations that take turns: by the time of its next turn each has been pushed out.
pub(super) fn play(node: &Node) -> (Vec<Vec<(u32, u32)>>, usize) {
    let mut noise = Noise(71);
    let mut tokens = |count: usize| -> Vec<u32> {
        (0..count)
            .map(|_| noise.below(tiny::VOCAB) as u32)
            .collect()
    };
    let mut all: Vec<_> = (0..5).map(|_| tokens(90)).collect();
    let (mut answers, mut cached) = (Vec::new(), 0);
    for _turn in 0..3 {
        for conversation in &mut all {
            let (answer, hits) = node.answer(conversation);
            cached += hits;
            conversation.extend(answer.iter().map(|(token, _)| token));
            conversation.extend(tokens(25));
            answers.push(answer);
        }
    }
    (answers, cached)
}

/// Would catch a block that is copied too late (after its place was written to), to the wrong
/// place, in part, or from another rank.
#[test]
fn a_host_round_trip_changes_no_bit() {
    let file = file_of(&Tiny::new(7).to_bytes());
    for (ops, ranks) in [
        (OpsKind::Cpu, 1),
        (OpsKind::Reference, 1),
        (OpsKind::Cpu, 2),
    ] {
        let whole = Node::start(group(file.path(), ops, ranks, 400), 400, 0, None);
        let (expected, most) = play(&whole);
        whole.end();
        let small = Node::start(group(file.path(), ops, ranks, 14), 14, 200, None);
        let (answers, cached) = play(&small);
        assert!(answers == expected, "{ops:?} on {ranks} ranks");
        assert_eq!(cached, most, "nothing was computed twice");
        let hits = small.metrics.tiers.hit_tokens(Tier::Host).get();
        assert!(hits as usize * 10 > cached * 8, "{hits} of {cached}");
        small.end();
    }
}

fn disk(dir: &Path, ranks: &mut RankGroup) -> Disk {
    let layouts: Vec<_> = ranks.ranks().map(|rank| rank.block_layout()).collect();
    let bytes = layouts.iter().map(|layout| layout.body_bytes()).sum();
    let identity = Identity::new(&layouts[0], [0; 32]);
    Disk::open(dir, 64 << 20, identity, bytes).expect("a folder of ours")
}

/// Would catch padding that is taken for values, a slot that two blocks share, and what a node left
/// on the disk being taken for something else by its next life.
#[test]
fn a_disk_round_trip_changes_no_bit_and_neither_does_a_restart() {
    let file = file_of(&Tiny::new(7).to_bytes());
    let whole = Node::start(group(file.path(), OpsKind::Cpu, 1, 400), 400, 0, None);
    let (expected, _) = play(&whole);
    whole.end();
    for ranks in [1, 2] {
        let folder = tempfile::tempdir().expect("a folder");
        for life in 0..2 {
            let mut small = group(file.path(), OpsKind::Cpu, ranks, 14);
            let disk = disk(folder.path(), &mut small);
            let small = Node::start(small, 14, 14, Some(disk));
            let (answers, _) = play(&small);
            if ranks == 1 {
                assert!(answers == expected, "life {life}");
            } else {
                let tokens = |all: &[Vec<(u32, u32)>]| all.concat().len();
                assert_eq!(tokens(&answers), tokens(&expected));
            }
            let tiers = &small.metrics.tiers;
            assert!(tiers.hit_tokens(Tier::Disk).get() > 0, "the disk was read");
            assert_eq!((tiers.damaged.get(), tiers.failed.get()), (0, 0));
            small.end();
        }
    }
}

/// The bytes of a block are those of its records, so that what a tier keeps can be sent as well.
#[test]
fn a_body_is_the_payloads_of_the_records() {
    let file = file_of(&Tiny::new(7).to_bytes());
    for ops in [OpsKind::Cpu, OpsKind::Reference] {
        let mut ranks = group(file.path(), ops, 1, 8);
        let model = ranks.ranks().next().expect("one rank");
        fill(model);
        let layout = model.block_layout();
        let mut body = vec![0; layout.body_bytes()];
        model.read_block(BlockId(5), &mut body);
        let payload = layout.body_bytes() / layout.layers;
        for (layer, part) in body.chunks_exact(payload).enumerate() {
            let mut record = Vec::new();
            model.export_block(BlockId(5), layer, 16, &mut record);
            let header = engine::kv::layout::HEADER_BYTES;
            assert!(part == &record[header..header + payload], "layer {layer}");
        }
        model.write_block(BlockId(2), &body);
        let mut copy = vec![0; body.len()];
        model.read_block(BlockId(2), &mut copy);
        assert!(copy == body);
    }
}

fn fill(model: &mut Model) {
    let tokens: Vec<u32> = (0..32).collect();
    let input = engine::model::SeqInput {
        tokens: &tokens,
        start: 0,
        blocks: &[BlockId(1), BlockId(5)],
        logits_last: 1,
    };
    model
        .forward(&[input], &mut Vec::new())
        .expect("a correct pass");
}
