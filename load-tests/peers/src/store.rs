//! What does a disk tier cost, ours and that of foyer (a hybrid cache of memory and disk)?
//!
//! `homing-peers store [--blocks N] [--rounds N] [--dir FOLDER]`: blocks of the default model's size (360 KiB)
//! are written, and read back 16 at a time, past the page cache, in turns. Both check what they read. Told
//! are MB/s and CPU time a block, medians of the rounds.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use cache_index::block::BlockHash;
use cpu_time::ProcessTime;
use engine::kv::layout::{BlockLayout, HeadRange, KeyOrder, KvDtype};
use engine::kv::pool::Stored;
use engine::kv::prefix::{Content, LastUse};
use engine::kv::store::disk::{Disk, Identity};
use engine::kv::store::index::Kept;
use foyer::{
    BlockEngineConfig, DeviceBuilder, FsDeviceBuilder, HybridCache, HybridCacheBuilder,
    HybridCachePolicy, PsyncIoEngineConfig,
};

/// 30 layers of 3 heads of 64, keys and values, 16 positions, in f16.
const LAYOUT: BlockLayout = BlockLayout {
    dtype: KvDtype::F16,
    key_order: KeyOrder::Pairs,
    block_tokens: 16,
    layers: 30,
    kv_heads: 3,
    heads: HeadRange { first: 0, count: 3 },
    head_dim: 64,
};
/// Blocks asked for at a time: 256 tokens.
const AT_ONCE: usize = 16;
/// How long to wait for the drive before looking again.
const LOOK: Duration = Duration::from_micros(100);

struct Options {
    blocks: usize,
    rounds: usize,
    dir: PathBuf,
}

/// What one round cost.
#[derive(Clone, Copy)]
struct Cost {
    write: Phase,
    read: Phase,
}

#[derive(Clone, Copy)]
struct Phase {
    seconds: f64,
    cpu_s: f64,
}

struct Clock(Instant, ProcessTime);

impl Clock {
    fn start() -> Clock {
        Clock(Instant::now(), ProcessTime::now())
    }

    fn stop(self) -> Phase {
        Phase {
            seconds: self.0.elapsed().as_secs_f64(),
            cpu_s: self.1.elapsed().as_secs_f64(),
        }
    }
}

/// Runs the bench.
pub fn store(args: impl Iterator<Item = String>) -> Result<(), String> {
    let options = parse(args)?;
    let bytes: Vec<Vec<u8>> = (0..options.blocks).map(body).collect();
    let dir = options.dir.join(format!("homing-store-bench-{}", std::process::id()));
    let mut costs: [Vec<Cost>; 2] = Default::default();
    for round in 0..options.rounds {
        let turns = if round % 2 == 0 { [0, 1] } else { [1, 0] };
        for which in turns {
            std::fs::create_dir_all(&dir).map_err(|e| format!("{}: {e}", dir.display()))?;
            let cost = match which {
                0 => ours(&dir, &bytes),
                _ => foyers(&dir, &bytes),
            };
            let gone = std::fs::remove_dir_all(&dir);
            gone.map_err(|e| format!("{}: {e}", dir.display()))?;
            costs[which].push(cost?);
        }
    }
    let mb = options.blocks as f64 * LAYOUT.body_bytes() as f64 / 1e6;
    println!("{} blocks, {mb:.0} MB, medians of {} rounds", options.blocks, options.rounds);
    for (name, costs) in ["ours", "foyer"].iter().zip(&costs) {
        let tell = |phase: fn(&Cost) -> Phase| {
            let seconds = median(costs.iter().map(|cost| phase(cost).seconds));
            let cpu_s = median(costs.iter().map(|cost| phase(cost).cpu_s));
            let us = 1e6 * cpu_s / options.blocks as f64;
            format!("{:.0} MB/s, {us:.0} µs of CPU a block", mb / seconds)
        };
        let (write, read) = (tell(|cost| cost.write), tell(|cost| cost.read));
        println!("{name}: written at {write}; read at {read}");
    }
    Ok(())
}

fn parse(mut args: impl Iterator<Item = String>) -> Result<Options, String> {
    let mut options = Options {
        blocks: 1024,
        rounds: 5,
        dir: std::env::temp_dir(),
    };
    while let Some(name) = args.next() {
        let value = args.next().ok_or(format!("{name} needs a value"))?;
        let number = || match value.parse() {
            Ok(number) if number > 0 => Ok(number),
            _ => Err(format!("{name} {value}: a number above 0 is needed")),
        };
        match &*name {
            "--blocks" => options.blocks = number()?,
            "--rounds" => options.rounds = number()?,
            "--dir" => options.dir = value.into(),
            _ => return Err(format!("no flag {name}; there are --blocks, --rounds and --dir")),
        }
    }
    Ok(options)
}

fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<_> = values.collect();
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Bytes that nothing can compress.
fn body(number: usize) -> Vec<u8> {
    let mut state = number as u64 + 1;
    let words = (0..LAYOUT.body_bytes() / 8).flat_map(|_| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()
    });
    words.collect()
}

fn hash(number: usize) -> BlockHash {
    let mut hash = [1; 16];
    hash[..8].copy_from_slice(&(number as u64).to_le_bytes());
    BlockHash(hash)
}

/// The block of a chain.
fn kept(number: usize) -> Kept {
    Kept {
        stored: Stored {
            content: Content {
                hash: hash(number),
                parent: None,
                tokens: [number as u32; 16],
                salt: None,
            },
            parent_hash: number.checked_sub(1).map(hash),
        },
        depth: number as u32 + 1,
        last_use: LastUse {
            wanted_ms: 0,
            tick: number as u64,
        },
    }
}

fn ours(dir: &Path, bytes: &[Vec<u8>]) -> Result<Cost, String> {
    let size = 2 * bytes.len() as u64 * LAYOUT.body_bytes() as u64;
    let identity = Identity::new(&LAYOUT, [0; 32]);
    let mut disk = Disk::open(dir, size, identity, LAYOUT.body_bytes()).map_err(|e| e.to_string())?;
    let clock = Clock::start();
    for (number, body) in bytes.iter().enumerate() {
        while !disk.write(&kept(number), |to| to.copy_from_slice(body)) {
            std::thread::sleep(LOOK);
            disk.poll();
        }
    }
    while disk.is_busy() {
        std::thread::sleep(LOOK);
        disk.poll();
    }
    let write = clock.stop();
    let clock = Clock::start();
    for first in (0..bytes.len()).step_by(AT_ONCE) {
        let numbers = first..(first + AT_ONCE).min(bytes.len());
        let chain: Vec<_> = numbers.clone().map(hash).collect();
        let mut left = chain.len();
        disk.read(&chain);
        while left > 0 {
            for arrived in disk.poll() {
                let number = arrived.kept().depth as usize - 1;
                if arrived.body(LAYOUT.body_bytes()) != bytes[number] {
                    return Err(format!("block {number} came back as another"));
                }
                disk.give_back(arrived);
                left -= 1;
            }
            std::thread::sleep(LOOK);
        }
    }
    let read = clock.stop();
    Ok(Cost { write, read })
}

fn foyers(dir: &Path, bytes: &[Vec<u8>]) -> Result<Cost, String> {
    let runtime = tokio::runtime::Builder::new_multi_thread();
    let runtime = { runtime }.worker_threads(2).enable_all().build();
    let runtime = runtime.map_err(|e| e.to_string())?;
    runtime.block_on(async {
        let size = 2 * bytes.len() * LAYOUT.body_bytes();
        let device = FsDeviceBuilder::new(dir).with_capacity(size).with_direct(true).build();
        let device = device.map_err(|e| e.to_string())?;
        let cache: HybridCache<u64, Vec<u8>> = HybridCacheBuilder::new()
            .with_policy(HybridCachePolicy::WriteOnInsertion)
            .memory(AT_ONCE * LAYOUT.body_bytes())
            .with_shards(1)
            .with_weighter(|_, value: &Vec<u8>| value.len())
            .storage()
            .with_io_engine_config(PsyncIoEngineConfig::new())
            .with_engine_config(BlockEngineConfig::new(device))
            .build()
            .await
            .map_err(|e| e.to_string())?;
        let clock = Clock::start();
        for (number, body) in bytes.iter().enumerate() {
            cache.insert(number as u64, body.clone());
            // More would be dropped and not wait.
            if number % AT_ONCE == AT_ONCE - 1 {
                cache.storage().wait().await;
            }
        }
        cache.storage().wait().await;
        let write = clock.stop();
        cache.memory().clear();
        let clock = Clock::start();
        for first in (0..bytes.len()).step_by(AT_ONCE) {
            let numbers = first..(first + AT_ONCE).min(bytes.len());
            let asked: Vec<_> = numbers
                .map(|number| {
                    let cache = cache.clone();
                    let got = tokio::spawn(async move { cache.get(&(number as u64)).await });
                    (number, got)
                })
                .collect();
            for (number, got) in asked {
                let got = got.await.map_err(|e| e.to_string())?;
                let got = got.map_err(|e| e.to_string())?;
                let got = got.ok_or(format!("foyer lost block {number}"))?;
                if *got.value() != bytes[number] {
                    return Err(format!("block {number} came back as another"));
                }
            }
        }
        let read = clock.stop();
        cache.close().await.map_err(|e| e.to_string())?;
        Ok(Cost { write, read })
    })
}
