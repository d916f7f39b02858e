//! How does the index stand beside its peers?
//!
//! Builds each index with the same chains, asks it the same questions, and prints one line each:
//! medians over rounds that are interleaved, since the machine at hand is shared.
//! `--chains N` chains of 128 blocks (8000), `--group N` of them share their first 8 blocks (10),
//! `--rounds N` (5), `--only ours` for sizes that the others need not be built for.

mod measure;
mod peers;

use self::measure::{Figures, Percentiles, hashing_ns, round};
use self::peers::{Dynamo, KvIndex, Ours, Peer};
use crate::workload::{CHAIN_BLOCKS, NODES, Workload};

/// Measures as the flags say.
pub fn bench(flags: impl Iterator<Item = String>) -> Result<(), String> {
    run(&parse(flags)?);
    Ok(())
}

struct Options {
    workload: Workload,
    rounds: usize,
    only_ours: bool,
}

fn parse(mut args: impl Iterator<Item = String>) -> Result<Options, String> {
    let mut options = Options {
        workload: Workload {
            chains: 8000,
            group: 10,
        },
        rounds: 5,
        only_ours: false,
    };
    while let Some(name) = args.next() {
        let value = args.next().ok_or(format!("{name} needs a value"))?;
        let number = || match value.parse() {
            Ok(number) if number > 0 => Ok(number),
            _ => Err(format!("{name} {value}: a number above 0 is needed")),
        };
        match name.as_str() {
            "--chains" => options.workload.chains = number()?,
            "--group" => options.workload.group = number()?,
            "--rounds" => options.rounds = number()?,
            "--only" if value == "ours" => options.only_ours = true,
            _ => return Err(format!("{name} {value}: not known")),
        }
    }
    Ok(options)
}

fn run(options: &Options) {
    let Workload { chains, group } = options.workload;
    let blocks = chains * CHAIN_BLOCKS;
    println!(
        "{chains} chains of {CHAIN_BLOCKS} blocks ({blocks} entries) on {NODES} nodes, groups of {group}"
    );
    println!(
        "{:<22} {:>9} {:>8} {:>7} {:>12} {:>12} {:>12} {:>14} {:>12}",
        "",
        "insert ns",
        "alone ns",
        "B/entry",
        "128 of 128",
        "64 of 128",
        "0 of 128",
        "128, loaded",
        "changes/s"
    );
    let mut ours = Vec::new();
    let mut kv_index = Vec::new();
    let mut dynamo = Vec::new();
    let mut hashing = Vec::new();
    for _ in 0..options.rounds {
        ours.push(round::<Ours>(&options.workload));
        hashing.push(hashing_ns(&options.workload));
        if !options.only_ours {
            kv_index.push(round::<KvIndex>(&options.workload));
            dynamo.push(round::<Dynamo>(&options.workload));
        }
    }
    let hashing = median(&hashing, |ns| *ns);
    report::<Ours>(&ours, hashing);
    report::<KvIndex>(&kv_index, 0.0);
    report::<Dynamo>(&dynamo, 0.0);
    println!("lookups: p50/p99 in µs, each timed by itself; loaded: beside a writer without pause");
    println!(
        "alone: without hashing, {hashing:.0} ns a block, which the peers leave to their caller"
    );
}

/// One line of the table.
fn report<P: Peer>(rounds: &[Figures], hashing: f64) {
    if rounds.is_empty() {
        return;
    }
    let times = |of: fn(&Figures) -> Percentiles| {
        let p50 = median(rounds, |round| of(round).p50) / 1e3;
        let p99 = median(rounds, |round| of(round).p99) / 1e3;
        format!("{p50:.2}/{p99:.2}")
    };
    let insert = median(rounds, |round| round.insert_ns);
    println!(
        "{:<22} {:>9.0} {:>8.0} {:>7.1} {:>12} {:>12} {:>12} {:>14} {:>12.2e}",
        P::NAME,
        insert,
        insert - hashing,
        median(rounds, |round| round.bytes),
        times(|round| round.idle),
        times(|round| round.half),
        times(|round| round.miss),
        times(|round| round.loaded),
        median(rounds, |round| round.changes),
    );
}

fn median<T>(rounds: &[T], of: impl Fn(&T) -> f64) -> f64 {
    let mut values: Vec<f64> = rounds.iter().map(of).collect();
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
