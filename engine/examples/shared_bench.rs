//! How fast do blocks go into a Mooncake Store and come back, as the engine sees it?
//!
//! Three clients on this machine: one gives memory and does nothing else, one puts, one gets; so every
//! byte crosses TCP on loopback. Counted is all that the tier's thread does for a block: copies to and
//! from the memory that it shares with its client, the MAC, the look at every value, and the store. Per
//! size of a block, medians of some rounds of one batch.
//!
//!     cargo run --release -p homing-engine --example shared_bench -- HOST:PORT PYTHON [ROUNDS]

use std::error::Error;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use cache_index::block::BlockHash;
use engine::kv::layout::{BlockLayout, HeadRange, KeyOrder, KvDtype};
use engine::kv::store::form::Form;
use engine::kv::store::shared::Seal;
use engine::kv::store::shared::mooncake::{Mooncake, MooncakeConfig};
use engine::kv::store::shared::objects::{Got, Objects, Put};

type Outcome<T> = Result<T, Box<dyn Error>>;

/// What the keeper gives: blocks of all rounds, and room for what was not evicted yet.
const MEMORY_BYTES: u64 = 1 << 30;
/// Sizes of a block's body: a quarter of the default model's, its own, and those of larger models.
const SIZES_KIB: [usize; 5] = [90, 360, 1_024, 2_048, 4_096];

struct Bench {
    seal: Seal,
    from: Mooncake,
    to: Mooncake,
    next: u64,
}

fn client(
    master: &str,
    python: &Path,
    segment_bytes: u64,
    object_bytes: usize,
) -> Outcome<Mooncake> {
    let config = MooncakeConfig {
        master: master.to_owned(),
        host: None,
        python: python.to_owned(),
        segment_bytes,
        device: None,
    };
    let mut client = Mooncake::new(config, object_bytes, Arc::default())?;
    let until = Instant::now() + Duration::from_secs(60);
    while let Some(wait) = client.tend() {
        if Instant::now() > until {
            return Err("the store cannot be reached".into());
        }
        std::thread::sleep(wait);
    }
    Ok(client)
}

fn seal(body_bytes: usize) -> Seal {
    let layout = BlockLayout {
        dtype: KvDtype::F16,
        key_order: KeyOrder::Halves,
        block_tokens: 16,
        layers: 1,
        kv_heads: 1,
        heads: HeadRange { first: 0, count: 1 },
        head_dim: body_bytes / 64,
    };
    // A key of this run's own: what is there of another is in nobody's way.
    let run = *uuid::Uuid::new_v4().as_bytes();
    let mut key = [0; 32];
    key[..16].copy_from_slice(&run);
    Seal::new(key, &layout, (Form::Exact, body_bytes), [0; 32])
}

impl Bench {
    /// Seconds to put a batch, and to get it.
    fn round(&mut self) -> Outcome<[f64; 2]> {
        let count = self.from.batch();
        let keys: Vec<_> = (0..count as u64)
            .map(|number| {
                let mut hash = [0; 16];
                hash[..8].copy_from_slice(&(self.next + number).to_le_bytes());
                self.seal.key_of(BlockHash(hash))
            })
            .collect();
        self.next += count as u64;
        let mut objects = vec![vec![0; self.seal.object_bytes()]; count];
        for (number, object) in objects.iter_mut().enumerate() {
            self.seal.body_mut(object).fill(number as u8);
        }
        let started = Instant::now();
        for (key, object) in keys.iter().zip(&mut objects) {
            self.seal.close(key, object);
        }
        let named: Vec<_> = keys.iter().map(String::as_str).collect();
        let batch: Vec<_> = named
            .iter()
            .copied()
            .zip(objects.iter().map(|o| &o[..]))
            .collect();
        let put = self.from.put(&batch)?;
        let put_s = started.elapsed().as_secs_f64();
        if put.iter().any(|put| *put != Put::Stored) {
            return Err(format!("not put: {put:?}").into());
        }
        let mut came = vec![vec![0; self.seal.object_bytes()]; count];
        let started = Instant::now();
        let buffers = came.iter_mut().map(|object| &mut object[..]);
        let mut wanted: Vec<_> = named.iter().copied().zip(buffers).collect();
        let got = self.to.get(&mut wanted)?;
        let whole = keys
            .iter()
            .zip(&came)
            .all(|(key, object)| self.seal.fits(key, object));
        let get_s = started.elapsed().as_secs_f64();
        if !whole || got.iter().any(|got| !matches!(got, Got::Found(_))) {
            return Err(format!("not what was put: {got:?}").into());
        }
        for key in &keys {
            self.from.remove(key)?;
        }
        Ok([put_s, get_s])
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn main() -> Outcome<()> {
    let mut args = std::env::args().skip(1);
    let (Some(master), Some(python)) = (args.next(), args.next()) else {
        return Err("usage: shared_bench HOST:PORT PYTHON [ROUNDS]".into());
    };
    let rounds = args.next().map_or(Ok(9), |rounds| rounds.parse())?;
    let python = Path::new(&python);
    let _keeper = client(&master, python, MEMORY_BYTES, 1)?;
    println!(
        "{:>10} {:>8} {:>10} {:>10}",
        "block KiB", "batch", "put MB/s", "get MB/s"
    );
    for kib in SIZES_KIB {
        let seal = seal(kib << 10);
        let mut bench = Bench {
            from: client(&master, python, 0, seal.object_bytes())?,
            to: client(&master, python, 0, seal.object_bytes())?,
            seal,
            next: 0,
        };
        let mut seconds = [Vec::new(), Vec::new()];
        bench.round()?;
        for _ in 0..rounds {
            for (all, one) in seconds.iter_mut().zip(bench.round()?) {
                all.push(one);
            }
        }
        let batch = bench.from.batch();
        let [put, get] = seconds.map(|all| ((batch * kib) << 10) as f64 / 1e6 / median(all));
        println!("{kib:>10} {batch:>8} {put:>10.0} {get:>10.0}");
    }
    Ok(())
}
