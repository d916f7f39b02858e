//! Does the engine come to rest, whatever is asked of it and however much at once?
//!
//! A small random model and its real forward pass behind the step loop, over pools far too small for
//! what is asked. Catches a lost block, memory that grows, a livelock, and an answer that depends on
//! who else was there.

#[path = "../bit_identity/tiny.rs"]
mod tiny;

use std::io::Write;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use cache_index::block::{Namespace, hash_chain};
use engine::engine::{Handle, Job, Output, Parts, Pooling, TicketId, Work};
use engine::kv::table::Scope;
use engine::metrics::{Ending, Metrics};
use engine::model::{Model, ModelFile, ModelOptions, OpsKind};
use engine::parallel::RankGroup;
use engine::sample::Sampling;
use engine::scheduler::pace::Beside;
use tiny::{Noise, Tiny, VOCAB};
use tokio::task::JoinSet;

struct Node {
    handle: Handle,
    metrics: Arc<Metrics>,
    thread: JoinHandle<()>,
}

impl Node {
    fn start(kv_blocks: u32) -> Self {
        let mut file = tempfile::NamedTempFile::new().expect("a temporary file");
        file.write_all(&Tiny::new(7).to_bytes())
            .expect("room for a small model");
        let file = ModelFile::open(file.path()).expect("the model opens");
        let options = ModelOptions {
            ops: OpsKind::Cpu,
            threads: 1,
            kv_blocks: kv_blocks as usize,
        };
        let model = Model::load(&file, &options, &mut |_| ()).expect("the model loads");
        let metrics = Arc::new(Metrics::new("tiny", kv_blocks as usize));
        let parts = Parts {
            vocab: model.shape().vocab,
            layers: model.shape().layers,
            device: Box::new(RankGroup::alone(model)),
            token_bytes: Box::new(|id, _| format!("{id} ").into_bytes()),
            drafter: None,
            kv_blocks,
            host_blocks: kv_blocks as usize,
            disk: None,
            shared: None,
            orders: None,
            step_tokens: 64,
            beside_decode: Beside::Paced,
            queue_max: 4096,
            metrics: Arc::clone(&metrics),
            events: None,
        };
        let (handle, thread) = engine::engine::start(parts).expect("a thread");
        Self {
            handle,
            metrics,
            thread,
        }
    }

    async fn end(self) {
        self.handle.idle().await;
        // The last to be cancelled leave in the engine's next step. Tickets run out by themselves;
        // their longest hold below is a few milliseconds.
        let metrics = Arc::clone(&self.metrics);
        let at_rest = || {
            let (running, waiting) = (metrics.running.get(), metrics.waiting.get());
            running + waiting + metrics.tickets.open.get() == 0
        };
        while !at_rest() {
            tokio::task::yield_now().await;
        }
        self.handle.stop();
        self.thread.join().expect("it ends in order");
        let metrics = &self.metrics;
        assert_eq!(metrics.kv_blocks_held.get(), 0, "every block is free");
        assert_eq!((metrics.running.get(), metrics.waiting.get()), (0, 0));
    }
}

fn job(prompt: Vec<u32>, output_max: usize, salt: Option<&str>) -> Job {
    let namespace = Namespace::new("tiny", None, salt);
    let salt = salt.map(Arc::from);
    let chain = hash_chain(&namespace, &prompt);
    Job::generate(prompt, chain, Scope { namespace, salt }, output_max)
}

fn tokens(noise: &mut Noise, count: usize) -> Vec<u32> {
    (0..count).map(|_| noise.below(VOCAB) as u32).collect()
}

async fn answer(handle: &Handle, prompt: Vec<u32>, output_max: usize) -> Vec<u32> {
    let mut ticket = handle
        .submit(job(prompt, output_max, None))
        .expect("the queue has room");
    let mut text = String::new();
    loop {
        match ticket.next().await.expect("the engine lives") {
            Output::Joined { .. } => {}
            Output::Text { text: more, .. } => text += &more,
            Output::Done { text: more, .. } => {
                text += &more;
                let ids = text.split_whitespace();
                return ids.map(|id| id.parse().expect("an id")).collect();
            }
            other => unreachable!("no answer: {other:?}"),
        }
    }
}

#[tokio::test]
async fn sixty_four_conversations_in_a_pool_for_sixteen_answer_as_if_alone() {
    // Two turns of 90 to 120 tokens and 40 more each: at most 21 blocks.
    let mut noise = Noise(5);
    let system = tokens(&mut noise, 48);
    let firsts: Vec<_> = (0..64)
        .map(|_| {
            let count = 40 + noise.below(30);
            [&system[..], &tokens(&mut noise, count)[..]].concat()
        })
        .collect();
    let second = tokens(&mut noise, 60);
    let run = |handle: Handle, first: Vec<u32>, second: Vec<u32>| async move {
        let one = answer(&handle, first.clone(), 40).await;
        let prompt = [first, one.clone(), second].concat();
        let two = answer(&handle, prompt, 40).await;
        [one, two]
    };
    let roomy = Node::start(64 * 21);
    let mut alone = Vec::new();
    for first in &firsts {
        alone.push(run(roomy.handle.clone(), first.clone(), second.clone()).await);
    }
    roomy.end().await;
    let crowded = Node::start(16 * 21);
    let mut running = JoinSet::new();
    for (number, first) in firsts.into_iter().enumerate() {
        let conversation = run(crowded.handle.clone(), first, second.clone());
        running.spawn(async move { (number, conversation.await) });
    }
    for (number, answers) in running.join_all().await {
        assert_eq!(answers, alone[number], "conversation {number}");
    }
    crowded.end().await;
}

/// A random request; what it is does not depend on how the others went.
fn request(noise: &mut Noise, shared: &[u32]) -> Job {
    let same = noise.below(shared.len());
    let count = 1 + noise.below(60);
    let prompt = [&shared[..same], &tokens(noise, count)[..]].concat();
    let output = 1 + noise.below(30);
    let mut job = job(prompt, output, [None, Some("a"), Some("b")][noise.below(3)]);
    job.priority = noise.below(5) as i32 - 2;
    job.output_min = noise.below(3) * noise.below(10);
    job.stop_tokens = tokens(noise, 2);
    job.logprobs = [None, None, Some(3)][noise.below(3)];
    job.token_ids = noise.below(2) == 0;
    if noise.below(2) == 0 {
        job.sampling = Sampling {
            temperature: 1.0,
            top_p: 0.9,
            seed: noise.next(),
            repetition_penalty: 1.1,
            ..Sampling::GREEDY
        };
    }
    job.work = match noise.below(10) {
        0 => Work::Embed(Pooling::Mean),
        1 => Work::Embed(Pooling::Last),
        2 => Work::PrefillOnly {
            hold: Duration::from_millis(noise.below(5) as u64),
        },
        _ => Work::Generate,
    };
    job
}

/// What a client does with its request: reads it to the end, or leaves after some outputs.
async fn client(handle: Handle, job: Job, patience: Option<usize>) {
    let work = job.work;
    let Ok(mut ticket) = handle.submit(job) else {
        return;
    };
    for heard in 0.. {
        if patience.is_some_and(|patience| heard >= patience) {
            return;
        }
        match ticket.next().await.expect("the engine lives") {
            Output::Joined { .. } | Output::Text { .. } => {}
            Output::Done { ending, held, .. } => {
                assert!(
                    matches!(ending, Ending::Stop | Ending::Length),
                    "{ending:?}"
                );
                if let Some(ticket) = held.map(|held| held.ticket) {
                    release(&handle, ticket).await;
                }
                return;
            }
            Output::Embedding(vector, _) => {
                let squares: f32 = vector.iter().map(|v| v * v).sum();
                assert!((squares - 1.0).abs() < 1e-3, "of length 1");
                return;
            }
            Output::Failed(error) => {
                let full = error.code == "kv_tickets_full";
                assert!(full && work != Work::Generate, "{error}");
                return;
            }
        }
    }
}

async fn release(handle: &Handle, ticket: TicketId) {
    if ticket.0.as_u128().is_multiple_of(2) {
        // It may have run out by now, but works at most once.
        let _ = handle.release(ticket).await;
        assert!(!handle.release(ticket).await);
    }
}

/// Memory of this process that is not a file's, in bytes.
fn anonymous() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|l| l.strip_prefix("RssAnon:"));
    let kib = line.and_then(|l| l.trim().strip_suffix("kB")?.trim().parse::<usize>().ok());
    kib.unwrap_or(0) * 1024
}

#[tokio::test]
async fn ten_thousand_mixed_requests_with_cancels_leave_nothing_behind() {
    const REQUESTS: usize = 10_000;
    let node = Node::start(40);
    let mut noise = Noise(11);
    let shared = tokens(&mut noise, 200);
    let mut clients = JoinSet::new();
    let mut settled = 0;
    for number in 0..REQUESTS {
        let job = request(&mut noise, &shared);
        let patience = (noise.below(4) == 0).then(|| noise.below(6));
        clients.spawn(client(node.handle.clone(), job, patience));
        while clients.len() >= 48 {
            let ended = clients.join_next().await.expect("some run");
            ended.expect("a client does not panic");
        }
        if number == REQUESTS / 4 {
            settled = anonymous();
        }
    }
    while let Some(ended) = clients.join_next().await {
        ended.expect("a client does not panic");
    }
    let grown = anonymous().saturating_sub(settled);
    assert!(grown < 8 << 20, "{grown} bytes more than after a quarter");
    assert!(node.metrics.preemptions.get() > 0, "the pool runs dry");
    node.end().await;
}
