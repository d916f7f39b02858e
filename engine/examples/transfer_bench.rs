//! What does it cost to hand a prompt's KV from one node to another?
//!
//! Two engines of the same model, one thread each, as two nodes on one machine would be: over TCP on
//! loopback and over shared memory. For a prompt of 2,048 tokens, medians of some rounds:
//!
//! - *alone*: the prompt is computed and pinned, and then fetched, from the order to the first token, into
//!   a pool whose memory was in use before; beside it a plain copy of as many bytes the same way (as many
//!   connections and as large blocks, out of one memory into another, no encryption, no engines), in turns;
//! - *while it is computed*: how long after the prefill's own end the first token comes at the other node,
//!   against the time of *alone*: the rest is hidden;
//! - *moved*: a session whose 2,048 tokens of history are in the other node's cache and which has 32 new
//!   ones, from the request to the first token, against computing the history alone.
//!
//!     cargo run --release -p homing-engine --example transfer_bench -- [MODEL] [ROUNDS]

use std::error::Error;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::sync_channel;
use std::time::{Duration, Instant};

use cache_index::block::{BLOCK_TOKENS, BlockHash, Namespace, hash_chain};
use engine::engine::{HandOver, Handle, Job, OnFailure, Output, Parts, Remote, TakeOver, Ticket};
use engine::kv::table::Scope;
use engine::kv::transfer::auth::{Identity, prompt_digest};
use engine::kv::transfer::client::{self, STREAMS};
use engine::kv::transfer::server::Desk;
use engine::kv::transfer::{Endpoint, TransferId, window_places};
use engine::metrics::Metrics;
use engine::model::{Model, ModelFile, ModelOptions, OpsKind};
use engine::parallel::RankGroup;
use engine::scheduler::pace::Beside;
use engine::sys::shared::SharedMemory;

type Outcome<T> = Result<T, Box<dyn Error>>;

const PROMPT_TOKENS: usize = 2_048;
const SENDER_BLOCKS: usize = 1_024;
/// Room for one prompt: what came for the one before is evicted.
const RECEIVER_BLOCKS: usize = 160;
/// Transfers *alone* in a round: with the prompt in the sender's cache each takes a moment.
const ALONE_IN_ROUND: usize = 8;

struct Node {
    handle: Handle,
    id: Arc<str>,
    tcp: Endpoint,
    unix: Endpoint,
    body_bytes: usize,
}

impl Node {
    fn start(path: &Path, id: &str, folder: &Path, kv_blocks: usize) -> Outcome<Node> {
        let options = ModelOptions {
            ops: OpsKind::Cpu,
            threads: 1,
            kv_blocks,
        };
        let model = Model::load(&ModelFile::open(path)?, &options, &mut |_| ())?;
        let layout = model.block_layout();
        let (orders, to_fetch) = sync_channel(16);
        let parts = Parts {
            vocab: model.shape().vocab,
            layers: model.shape().layers,
            device: Box::new(RankGroup::alone(model)),
            token_bytes: Box::new(|_, _| Vec::new()),
            drafter: None,
            kv_blocks: u32::try_from(kv_blocks)?,
            host_blocks: 0,
            disk: None,
            shared: None,
            orders: Some(orders),
            step_tokens: 256,
            beside_decode: Beside::Paced,
            queue_max: 16,
            metrics: Arc::new(Metrics::new("bench", kv_blocks)),
            events: None,
        };
        let (handle, _thread) = engine::engine::start(parts)?;
        let identity = Identity {
            engine_id: id.to_owned(),
            layout,
            model: [0; 32],
            key: [7; 32],
        };
        let tcp = TcpListener::bind("127.0.0.1:0")?;
        let address: SocketAddr = tcp.local_addr()?;
        let socket = folder.join(id);
        let desk = Desk::new(identity.clone(), "bench".into(), handle.clone());
        desk.serve_tcp(tcp)?;
        desk.serve_unix(UnixListener::bind(&socket)?)?;
        client::start(to_fetch, identity, handle.clone())?;
        Ok(Node {
            handle,
            id: id.into(),
            tcp: Endpoint::Tcp(address),
            unix: Endpoint::Unix(socket),
            body_bytes: layout.body_bytes(),
        })
    }

    fn endpoint(&self, way: Way) -> Endpoint {
        match way {
            Way::Tcp => self.tcp.clone(),
            Way::Shared => self.unix.clone(),
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    Tcp,
    Shared,
}

/// A prompt in a scope of its own, so that no cache has it.
struct Prompt {
    tokens: Vec<u32>,
    chain: Vec<BlockHash>,
    scope: Scope,
    id: TransferId,
}

impl Prompt {
    fn new(number: u32, count: usize) -> Prompt {
        let mut state = u64::from(number) + 1;
        let mut token = || {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963);
            1_000 + (state >> 33) as u32 % 40_000
        };
        let tokens: Vec<_> = (0..count).map(|_| token()).collect();
        let salt: Arc<str> = number.to_string().into();
        let namespace = Namespace::new("bench", None, Some(&salt));
        let mut id = [0; 16];
        id[..4].copy_from_slice(&number.to_le_bytes());
        Prompt {
            chain: hash_chain(&namespace, &tokens),
            scope: Scope {
                namespace,
                salt: Some(salt),
            },
            tokens,
            id: TransferId(id),
        }
    }

    /// The same prompt, to be handed over once more.
    fn again(&self, number: u32) -> Prompt {
        let mut id = [1; 16];
        id[..4].copy_from_slice(&number.to_le_bytes());
        Prompt {
            tokens: self.tokens.clone(),
            chain: self.chain.clone(),
            scope: self.scope.clone(),
            id: TransferId(id),
        }
    }

    fn job(&self, remote: Remote) -> Job {
        let scope = self.scope.clone();
        let mut job = Job::generate(self.tokens.clone(), self.chain.clone(), scope, 1);
        job.remote = remote;
        job
    }

    fn first_leg(&self, receiver: &Node) -> Job {
        self.job(Remote::HandOver(HandOver {
            id: self.id,
            receiver: Arc::clone(&receiver.id),
            prompt: prompt_digest(&self.chain, &self.tokens),
            hold: Duration::from_secs(30),
        }))
    }

    fn second_leg(&self, sender: &Node, way: Way, id: Option<TransferId>) -> Job {
        self.job(Remote::TakeOver(Box::new(TakeOver {
            id,
            sender: Arc::clone(&sender.id),
            endpoints: vec![sender.endpoint(way)],
            prompt: prompt_digest(&self.chain, &self.tokens),
            chain: self.chain.clone(),
            timeout: Duration::from_secs(30),
            total: None,
            on_failure: OnFailure::Fail,
        })))
    }
}

/// Waits for the end, which with one token is the first token too.
fn finish(runtime: &tokio::runtime::Runtime, mut ticket: Ticket) -> Outcome<Instant> {
    loop {
        match runtime
            .block_on(ticket.next())
            .ok_or("the engine has ended")?
        {
            Output::Done { .. } => return Ok(Instant::now()),
            Output::Failed(error) => return Err(format!("{error}: {:?}", error.detail).into()),
            Output::Joined { .. } | Output::Text { .. } | Output::Embedding(..) => {}
        }
    }
}

/// Blocks from one memory into another, over as many connections as a transfer has.
fn plain_tcp(from: &[u8], to: &mut [u8], body_bytes: usize) -> Outcome<Duration> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let address = listener.local_addr()?;
    let started = Instant::now();
    let each = (from.len() / body_bytes).div_ceil(STREAMS) * body_bytes;
    std::thread::scope(|scope| -> std::io::Result<()> {
        let parts = from.chunks(each).zip(to.chunks_mut(each));
        let mut ends = Vec::new();
        for (from, to) in parts {
            let mut far = TcpStream::connect(address)?;
            let (mut near, _) = listener.accept()?;
            ends.push(scope.spawn(move || -> std::io::Result<()> {
                let mut buffer = vec![0; body_bytes];
                for block in from.chunks_exact(body_bytes) {
                    buffer.copy_from_slice(block);
                    near.write_all(&buffer)?;
                }
                Ok(())
            }));
            ends.push(scope.spawn(move || -> std::io::Result<()> {
                let mut buffer = vec![0; body_bytes];
                for block in to.chunks_exact_mut(body_bytes) {
                    far.read_exact(&mut buffer)?;
                    block.copy_from_slice(&buffer);
                }
                Ok(())
            }));
        }
        ends.into_iter()
            .try_for_each(|end| end.join().unwrap_or(Ok(())))
    })?;
    Ok(started.elapsed())
}

/// Blocks from one memory into another through a third, with a byte there and back for each.
fn plain_shared(from: &[u8], to: &mut [u8], body_bytes: usize) -> Outcome<Duration> {
    let started = Instant::now();
    let places = window_places(body_bytes);
    let memory = SharedMemory::create(places * body_bytes)?;
    let (mut here, mut there) = UnixStream::pair()?;
    std::thread::scope(|scope| -> std::io::Result<()> {
        let (memory, mut byte) = (&memory, [0]);
        let sent = scope.spawn(move || -> std::io::Result<()> {
            for (at, block) in from.chunks_exact(body_bytes).enumerate() {
                if at >= places {
                    there.read_exact(&mut byte)?;
                }
                let place = at % places * body_bytes;
                memory.write(place, body_bytes, &mut |to| to.copy_from_slice(block));
                there.write_all(&[0])?;
            }
            Ok(())
        });
        for (at, block) in to.chunks_exact_mut(body_bytes).enumerate() {
            here.read_exact(&mut [0])?;
            block.copy_from_slice(memory.read(at % places * body_bytes, body_bytes));
            // At the end nobody reads it any more.
            let _ = here.write_all(&[0]);
        }
        sent.join().unwrap_or(Ok(()))
    })?;
    Ok(started.elapsed())
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn seconds(from: Instant, until: Instant) -> f64 {
    // The first token may come before the prefill's client has heard of its end.
    until.saturating_duration_since(from).as_secs_f64()
}

struct Bench {
    sender: Node,
    receiver: Node,
    runtime: tokio::runtime::Runtime,
    next: u32,
    memory: (Vec<u8>, Vec<u8>),
}

impl Bench {
    fn prompt(&mut self) -> Prompt {
        self.next += 1;
        Prompt::new(self.next, PROMPT_TOKENS)
    }

    /// Two prompts that take turns, so that the receiver never has the one that comes next.
    fn taking_turns(&mut self) -> Outcome<[Prompt; 2]> {
        let pair = [self.prompt(), self.prompt()];
        for prompt in &pair {
            let computed = self.sender.handle.submit(prompt.job(Remote::None))?;
            finish(&self.runtime, computed)?;
        }
        Ok(pair)
    }

    /// Seconds of transfers alone, and of plain copies.
    fn alone(&mut self, way: Way, prompts: &[Prompt; 2]) -> Outcome<[f64; 2]> {
        let mut seconds: [Vec<f64>; 2] = Default::default();
        for turn in 0..ALONE_IN_ROUND {
            self.next += 1;
            let prompt = prompts[turn % 2].again(self.next);
            let all = [self.transfer(way, &prompt)?, self.plain(way)?];
            seconds
                .iter_mut()
                .zip(all)
                .for_each(|(all, one)| all.push(one));
        }
        Ok(seconds.map(median))
    }

    fn transfer(&self, way: Way, prompt: &Prompt) -> Outcome<f64> {
        let first = prompt.first_leg(&self.receiver);
        finish(&self.runtime, self.sender.handle.submit(first)?)?;
        let started = Instant::now();
        let job = prompt.second_leg(&self.sender, way, Some(prompt.id));
        let ended = finish(&self.runtime, self.receiver.handle.submit(job)?)?;
        Ok(seconds(started, ended))
    }

    fn plain(&mut self, way: Way) -> Outcome<f64> {
        let (from, to) = &mut self.memory;
        let body_bytes = self.sender.body_bytes;
        let copied = match way {
            Way::Tcp => plain_tcp(from, to, body_bytes)?,
            Way::Shared => plain_shared(from, to, body_bytes)?,
        };
        Ok(copied.as_secs_f64())
    }

    /// Seconds of the prefill, and between its end and the first token at the other node.
    fn while_computed(&mut self, way: Way) -> Outcome<(f64, f64)> {
        let prompt = self.prompt();
        let started = Instant::now();
        let job = prompt.second_leg(&self.sender, way, Some(prompt.id));
        let second = self.receiver.handle.submit(job)?;
        let first = self
            .sender
            .handle
            .submit(prompt.first_leg(&self.receiver))?;
        let computed = finish(&self.runtime, first)?;
        let ended = finish(&self.runtime, second)?;
        Ok((seconds(started, computed), seconds(computed, ended)))
    }

    /// Seconds to the first token of a session that moved.
    fn moved(&mut self, way: Way) -> Outcome<f64> {
        let history = self.prompt();
        finish(
            &self.runtime,
            self.sender.handle.submit(history.job(Remote::None))?,
        )?;
        let turn = Prompt::new(self.next, PROMPT_TOKENS + 2 * BLOCK_TOKENS);
        let started = Instant::now();
        let job = turn.second_leg(&self.sender, way, None);
        let ended = finish(&self.runtime, self.receiver.handle.submit(job)?)?;
        Ok(seconds(started, ended))
    }
}

fn main() -> Outcome<()> {
    let mut arguments = std::env::args().skip(1);
    let default = || "models/SmolLM2-135M-Instruct.Q4_1.gguf".into();
    let path = arguments.next().map_or_else(default, PathBuf::from);
    let rounds: usize = arguments.next().map_or(Ok(3), |rounds| rounds.parse())?;
    let folder = tempfile::tempdir()?;
    let sender = Node::start(&path, "sender", folder.path(), SENDER_BLOCKS)?;
    let bytes = PROMPT_TOKENS / BLOCK_TOKENS * sender.body_bytes;
    let mut bench = Bench {
        receiver: Node::start(&path, "receiver", folder.path(), RECEIVER_BLOCKS)?,
        sender,
        runtime: tokio::runtime::Builder::new_current_thread().build()?,
        next: 0,
        memory: (vec![1; bytes], vec![2; bytes]),
    };
    println!(
        "{PROMPT_TOKENS} tokens, {:.1} MB of KV, medians of {rounds} rounds",
        bytes as f64 / 1e6
    );
    for (name, way) in [("tcp", Way::Tcp), ("shared memory", Way::Shared)] {
        let mut all: [Vec<f64>; 5] = Default::default();
        let turns = bench.taking_turns()?;
        // The first round touches memory that the others find touched.
        for round in 0..=rounds {
            let [alone, plain] = bench.alone(way, &turns)?;
            let (prefill, exposed) = bench.while_computed(way)?;
            let values = [alone, plain, prefill, exposed, bench.moved(way)?];
            if round > 0 {
                all.iter_mut()
                    .zip(values)
                    .for_each(|(all, value)| all.push(value));
            }
        }
        let [alone, plain, prefill, exposed, moved] = all.map(median);
        println!(
            "{name}: alone {:.1} ms ({:.0} MB/s), plain copy {:.1} ms ({:.0} MB/s): {:.2} of it",
            alone * 1e3,
            bytes as f64 / alone / 1e6,
            plain * 1e3,
            bytes as f64 / plain / 1e6,
            plain / alone,
        );
        println!(
            "{name}: prefill {:.1} ms, first token {:.1} ms after it: {:.3} of the transfer hidden",
            prefill * 1e3,
            exposed * 1e3,
            1.0 - exposed / alone,
        );
        println!(
            "{name}: moved session {:.1} ms to the first token, {:.3} of computing its history",
            moved * 1e3,
            moved / prefill,
        );
    }
    Ok(())
}
