//! The step loop over a forward pass that remembers what was written into which block.
//!
//! It checks every read: a sequence must find its own tokens in its own blocks at every position.
//! The next token is a hash of all of them, so an answer is right only if every block it was
//! computed from was. Catches blocks that are shared wrongly, reused too early, lost at a
//! preemption, or published with other content than their hash says. Engine and pool check
//! themselves after every step.

mod basics;
mod fair;
mod grammar;
mod many;
mod pinned;
mod receivers;
mod sending;
mod shared;
mod speculate;
mod stepper;
mod tiers;
mod transfers;
mod vectors;

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;

use cache_index::block::{BLOCK_TOKENS, Namespace, hash_chain};

use super::{Device, Handle, Job, Output, Parts, Ticket, Usage, start};
use crate::error::Kind;
use crate::kv::store::Blocks;
use crate::kv::table::Scope;
use crate::metrics::{Ending, Metrics};
use crate::model::{BlockId, ForwardError, Pass, PassOutput, SeqInput, Watch};
use crate::scheduler::pace::Beside;

const VOCAB: usize = 64;
/// Prompts with these tokens break the forward pass.
const PANICS: u32 = 63;
const NOT_A_NUMBER: u32 = 62;
const REFUSED: u32 = 61;
/// Tokens below this are ordinary.
const ORDINARY: usize = 60;

const LAYERS: usize = 2;

/// What the model's last layer leaves at a position.
fn hidden_state(token: u32, position: usize) -> [f32; 3] {
    [token as f32 - 20.0, (position as f32).sin(), 1.0]
}

/// What the model says after these tokens.
fn next_token(tokens: impl Iterator<Item = u32>) -> u32 {
    let hash = tokens.fold(17_u64, |hash, token| {
        (hash ^ u64::from(token))
            .wrapping_mul(0x0100_0000_01b3)
            .rotate_left(23)
    });
    (hash % ORDINARY as u64) as u32
}

fn answer(prompt: &[u32], count: usize) -> Vec<u32> {
    let mut tokens = prompt.to_vec();
    for _ in 0..count {
        tokens.push(next_token(tokens.iter().copied()));
    }
    tokens.split_off(prompt.len())
}

/// Lets a test hold the engine inside a forward pass.
#[derive(Default)]
struct Gate {
    closed: Mutex<bool>,
    changed: Condvar,
    passes: AtomicUsize,
    /// Done after the layers of a pass, one each.
    after_layers: Mutex<VecDeque<Hook>>,
}

type Hook = Box<dyn FnOnce() + Send>;

impl Gate {
    fn set_closed(&self, closed: bool) {
        *self.closed.lock().unwrap() = closed;
        self.changed.notify_all();
    }

    fn after_layers(&self, hooks: impl IntoIterator<Item = Hook>) {
        self.after_layers.lock().unwrap().extend(hooks);
    }

    fn layer(&self) {
        let hook = self.after_layers.lock().unwrap().pop_front();
        if let Some(hook) = hook {
            hook();
        }
    }

    fn pass(&self) {
        self.passes.fetch_add(1, Ordering::SeqCst);
        let closed = self.closed.lock().unwrap();
        drop(self.changed.wait_while(closed, |closed| *closed).unwrap());
    }
}

/// A forward pass over blocks that remember tokens.
struct Scripted {
    memory: Vec<[Option<u32>; BLOCK_TOKENS]>,
    gate: Arc<Gate>,
}

impl Scripted {
    fn new(blocks: usize, gate: Arc<Gate>) -> Self {
        let memory = vec![[None; BLOCK_TOKENS]; blocks];
        Self { memory, gate }
    }

    fn compute(&mut self, sequence: &SeqInput<'_>, output: &mut PassOutput) {
        let end = sequence.start + sequence.tokens.len();
        assert!(
            sequence.blocks.len() * BLOCK_TOKENS >= end,
            "blocks cover the tokens"
        );
        for (position, token) in (sequence.start..).zip(sequence.tokens) {
            let block = sequence.blocks[position / BLOCK_TOKENS].0 as usize;
            self.memory[block][position % BLOCK_TOKENS] = Some(*token);
            if let Some(hidden) = output.hidden.first_mut() {
                hidden.extend(hidden_state(*token, position));
            }
        }
        let read = |position: usize| {
            let block = sequence.blocks[position / BLOCK_TOKENS].0 as usize;
            self.memory[block][position % BLOCK_TOKENS].expect("a position that was computed")
        };
        for end in end - sequence.logits_last + 1..=end {
            let mut row = [0.0; VOCAB];
            row[next_token((0..end).map(read)) as usize] = 1.0;
            if (0..end).any(|position| read(position) == NOT_A_NUMBER) {
                row[5] = f32::NAN;
            }
            output.logits.extend(row);
        }
    }
}

/// A block's layers share its tokens out.
const LAYER_TOKENS: usize = BLOCK_TOKENS / LAYERS;

/// Only full blocks are copied, so every token of them is known.
fn copy_out(memory: &[Option<u32>], to: &mut [u8]) {
    for (to, token) in to.chunks_exact_mut(4).zip(memory) {
        let token = token.expect("a full block was computed");
        to.copy_from_slice(&token.to_le_bytes());
    }
}

fn tokens_of(layers: Range<usize>) -> Range<usize> {
    layers.start * LAYER_TOKENS..layers.end * LAYER_TOKENS
}

impl Device for Scripted {
    fn run(
        &mut self,
        pass: &Pass<'_>,
        output: &mut PassOutput,
        watch: &mut Watch<'_>,
    ) -> Result<(), ForwardError> {
        self.gate.pass();
        output.logits.clear();
        output.hidden.clear();
        if let [layer] = pass.capture {
            assert_eq!(*layer, LAYERS + 1, "after the output norm");
            output.hidden.push(Vec::new());
        }
        for sequence in pass.batch {
            assert!(!sequence.tokens.contains(&PANICS), "broken on purpose");
            if sequence.tokens.contains(&REFUSED) {
                return Err(ForwardError::Empty { sequence: 0 });
            }
            self.compute(sequence, output);
        }
        let written = |sequence: &SeqInput<'_>, block: BlockId| {
            let from = sequence.start / BLOCK_TOKENS;
            sequence.blocks[from..].contains(&block)
        };
        for computed in 1..=LAYERS {
            watch(computed, &|block, layers, to| {
                let is_new = pass.batch.iter().any(|sequence| written(sequence, block));
                assert!(!is_new || layers.end <= computed, "not computed yet");
                copy_out(&self.memory[block.0 as usize][tokens_of(layers)], to);
            });
            self.gate.layer();
        }
        Ok(())
    }

    fn read_layers(&mut self, block: BlockId, layers: Range<usize>, to: &mut [u8]) {
        copy_out(&self.memory[block.0 as usize][tokens_of(layers)], to);
    }

    fn take_layers(&mut self, block: BlockId, layers: Range<usize>, from: &[u8]) -> bool {
        let tokens = &mut self.memory[block.0 as usize][tokens_of(layers)];
        for (token, bytes) in tokens.iter_mut().zip(from.as_chunks().0) {
            *token = Some(u32::from_le_bytes(*bytes));
        }
        true
    }
}

impl Blocks for Scripted {
    fn block_bytes(&self) -> usize {
        4 * BLOCK_TOKENS
    }

    fn read_block(&mut self, block: BlockId, to: &mut [u8]) {
        self.read_layers(block, 0..LAYERS, to);
    }

    fn write_block(&mut self, block: BlockId, from: &[u8]) {
        self.take_layers(block, 0..LAYERS, from);
    }
}

fn parts(kv_blocks: u32, gate: Arc<Gate>) -> Parts {
    Parts {
        device: Box::new(Scripted::new(kv_blocks as usize, gate)),
        token_bytes: Box::new(|id, _| format!("{id} ").into_bytes()),
        vocab: VOCAB,
        layers: LAYERS,
        drafter: None,
        kv_blocks,
        host_blocks: 0,
        disk: None,
        shared: None,
        orders: None,
        step_tokens: 64,
        beside_decode: Beside::Paced,
        queue_max: 4096,
        metrics: Arc::new(Metrics::new("m", kv_blocks as usize)),
        events: None,
    }
}

struct Bench {
    handle: Handle,
    metrics: Arc<Metrics>,
    gate: Arc<Gate>,
    thread: JoinHandle<()>,
    runtime: tokio::runtime::Runtime,
}

impl Bench {
    fn new(kv_blocks: u32, step_tokens: usize, queue_max: usize) -> Self {
        let gate = Arc::new(Gate::default());
        let parts = Parts {
            step_tokens,
            queue_max,
            ..parts(kv_blocks, Arc::clone(&gate))
        };
        let metrics = Arc::clone(&parts.metrics);
        let (handle, thread) = start(parts).expect("a thread");
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build();
        Self {
            handle,
            metrics,
            gate,
            thread,
            runtime: runtime.expect("a runtime"),
        }
    }

    fn submit(&self, prompt: &[u32], output_max: usize) -> Ticket {
        self.handle
            .submit(job(prompt, output_max, None))
            .expect("the queue has room")
    }

    fn wait(&self, mut ticket: Ticket) -> Result<(Vec<u32>, Ending, Usage), Kind> {
        let mut text = String::new();
        loop {
            match self
                .runtime
                .block_on(ticket.next())
                .expect("the engine lives")
            {
                Output::Joined { .. } => {}
                Output::Text { text: more, .. } => text += &more,
                Output::Done {
                    text: more,
                    ending,
                    usage,
                    ..
                } => {
                    text += &more;
                    let tokens = text.split_whitespace().map(|id| id.parse().expect("an id"));
                    return Ok((tokens.collect(), ending, usage));
                }
                Output::Embedding(..) => unreachable!("no vector was asked for"),
                Output::Failed(error) => return Err(error.kind),
            }
        }
    }

    /// Waits for the engine to come to rest, then checks that nothing is held.
    fn end(self) {
        self.runtime.block_on(self.handle.idle());
        self.handle.stop();
        self.thread
            .join()
            .expect("the engine's thread ended in order");
        assert_eq!(
            self.metrics.kv_blocks_held.get(),
            0,
            "every block was given back"
        );
        assert_eq!(
            (self.metrics.running.get(), self.metrics.waiting.get()),
            (0, 0)
        );
    }
}

fn job(prompt: &[u32], output_max: usize, salt: Option<&str>) -> Job {
    let namespace = Namespace::new("m", None, salt);
    let chain = hash_chain(&namespace, prompt);
    let salt = salt.map(Arc::from);
    Job::generate(
        prompt.to_vec(),
        chain,
        Scope { namespace, salt },
        output_max,
    )
}

struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963);
        (self.0 >> 33) as usize % bound
    }

    fn tokens(&mut self, count: usize) -> Vec<u32> {
        (0..count).map(|_| self.below(ORDINARY) as u32).collect()
    }
}
