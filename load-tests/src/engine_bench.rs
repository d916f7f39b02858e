//! How fast is our engine beside the server of llama.cpp, on the same file and threads?
//!
//! A row is one figure. Both programs are up while it is measured, and take turns: the one that
//! idles takes no processor, and a change of the machine's speed hits both. The opponent's flags
//! are chosen for each row: each listed set is measured once, and the best stays. A round during
//! which other processes took more than `quiet::OTHERS_MOST` of one core does not count; after
//! `REFUSED_MOST` such rounds the row is given as it is, marked as contended, with the load.
//! Figures are medians over rounds; ratios are what counts.

mod alone;
pub(crate) mod prompts;
mod quiet;
mod rows;
mod sides;

use std::path::PathBuf;

use serde::Serialize;

use self::alone::Alone;
use self::prompts::Prompts;
use self::quiet::Quiet;
use self::rows::{Better, Row};
use self::sides::{Running, Side};
use crate::error::LoadError;
use crate::measure::{median, ratio};

/// Rounds of one row that may be refused before it is reported as contended.
const REFUSED_MOST: usize = 10;

/// Flags of `homing-load engine-bench`.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// Our engine's binary
    #[arg(long)]
    pub ours: PathBuf,
    /// The binary of llama.cpp's server; without it only ours is measured
    #[arg(long)]
    pub theirs: Option<PathBuf>,
    /// The GGUF file that both serve
    #[arg(long)]
    pub model: PathBuf,
    /// Threads of each
    #[arg(long, default_value_t = 2)]
    pub threads: usize,
    /// Rounds of each row
    #[arg(long, default_value_t = 5)]
    pub rounds: usize,
    /// Rows to measure, all of them by default
    #[arg(long, value_enum, value_delimiter = ',')]
    pub rows: Vec<Row>,
    /// Also measure what ours alone can show: a busy core, memory, two nodes of one thread
    #[arg(long)]
    pub alone: bool,
    /// More flags for our engine
    #[arg(long, allow_hyphen_values = true, value_delimiter = ' ')]
    pub ours_flags: Vec<String>,
    /// Seed of the prompts
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Write the figures here as JSON
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
}

/// One row's result.
#[derive(Debug, Serialize)]
pub struct Measured {
    /// Which.
    pub row: Row,
    /// What the figures are in.
    pub unit: &'static str,
    /// Median of ours.
    pub ours: f64,
    /// Median of llama.cpp's.
    pub theirs: Option<f64>,
    /// Ours by theirs.
    pub ratio: Option<f64>,
    /// The least and the most of the rounds' ratios.
    pub ratios: Option<[f64; 2]>,
    /// The opponent's flags.
    pub flags: String,
    /// The share of a core that others took, when it was too much in too many rounds.
    pub contended: Option<f64>,
}

/// The bench's result.
#[derive(Debug, Serialize)]
pub struct Comparison {
    /// The file's name.
    pub model: String,
    /// Threads of each program.
    pub threads: usize,
    /// Rounds of each row.
    pub rounds: usize,
    /// The rows in order.
    pub rows: Vec<Measured>,
    /// What ours alone shows.
    pub alone: Option<Alone>,
}

/// Runs all rows.
pub async fn run(args: &Args) -> Result<Comparison, LoadError> {
    let mut prompts = Prompts::new(&args.model, args.seed)?;
    let rows = if args.rows.is_empty() {
        Row::all()
    } else {
        args.rows.clone()
    };
    let mut measured = Vec::new();
    for row in rows {
        let result = row_of(args, row, &mut prompts).await?;
        eprintln!("{}", result.line());
        measured.push(result);
    }
    let alone = match args.alone {
        true => Some(alone::measure(args, &mut prompts).await?),
        false => None,
    };
    Ok(Comparison {
        model: prompts.model_id().to_owned(),
        threads: args.threads,
        rounds: args.rounds,
        rows: measured,
        alone,
    })
}

/// All rounds of one row.
async fn row_of(args: &Args, row: Row, prompts: &mut Prompts) -> Result<Measured, LoadError> {
    let theirs = match &args.theirs {
        Some(_) => Some(best_flags(args, row, prompts).await?),
        None => None,
    };
    let mut running = [Some(Side::ours(args)), theirs.clone()].map(|side| side.map(Running::new));
    let mut figures: [Vec<f64>; 2] = [Vec::new(), Vec::new()];
    let (mut refused, mut loads) = (0, Vec::new());
    for running in running.iter_mut().flatten() {
        // Unmeasured: pages are touched for the first time, and packed weights come to the disk.
        row.measure(running, prompts).await?;
    }
    let mut number = 0;
    while number < args.rounds {
        let quiet = Quiet::begin(&mut running);
        let mut round = [0.0; 2];
        // Which goes first alternates: a slow drift of the machine then favours neither.
        for at in [number % 2, 1 - number % 2] {
            if let Some(running) = &mut running[at] {
                round[at] = row.measure(running, prompts).await?;
            }
        }
        let others = quiet.others(&running);
        if others > quiet::OTHERS_MOST && refused < REFUSED_MOST {
            refused += 1;
            continue;
        }
        eprintln!(
            "  {} round {}: {round:.2?}, others {others:.3}",
            row.name(),
            number + 1
        );
        loads.push(others);
        for (figures, figure) in figures.iter_mut().zip(round) {
            figures.push(figure);
        }
        number += 1;
    }
    Ok(Measured::of(row, figures, theirs, (refused, &loads)))
}

/// The set of flags with which the opponent is best at a row.
async fn best_flags(args: &Args, row: Row, prompts: &mut Prompts) -> Result<Side, LoadError> {
    let mut best: Option<(f64, Side)> = None;
    for side in Side::theirs(args, row) {
        let mut running = Running::new(side.clone());
        let mut figure = row.measure(&mut running, prompts).await?;
        if !row.is_long() {
            // Once more: pages were touched for the first time.
            figure = row.measure(&mut running, prompts).await?;
        }
        eprintln!("  {} llama.cpp {}: {figure:.2}", row.name(), side.flags());
        let better = match (&best, row.better()) {
            (None, _) => true,
            (Some((known, _)), Better::More) => figure > *known,
            (Some((known, _)), Better::Less) => figure < *known,
        };
        if better {
            best = Some((figure, side));
        }
    }
    let (_, side) = best.expect("the opponent has a set of flags for each row");
    Ok(side)
}

impl Measured {
    fn of(
        row: Row,
        [ours, theirs]: [Vec<f64>; 2],
        side: Option<Side>,
        (refused, loads): (usize, &[f64]),
    ) -> Self {
        let ratios: Vec<f64> = ours
            .iter()
            .zip(&theirs)
            .map(|(a, b)| ratio(*a, *b))
            .collect();
        let ends = ratios
            .iter()
            .fold([f64::MAX, 0.0], |[low, high], r| [r.min(low), r.max(high)]);
        let (ours, theirs) = (median(&ours), side.as_ref().map(|_| median(&theirs)));
        Self {
            row,
            unit: row.unit(),
            ours,
            theirs,
            ratio: theirs.map(|theirs| ratio(ours, theirs)),
            ratios: theirs.map(|_| ends),
            flags: side.map(|side| side.flags()).unwrap_or_default(),
            contended: (refused >= REFUSED_MOST).then(|| median(loads)),
        }
    }

    fn line(&self) -> String {
        let (unit, name) = (self.unit, self.row.name());
        let mut line = format!("{name:<14} ours {:.1} {unit}", self.ours);
        if let (Some(theirs), Some(ratio), Some([low, high])) =
            (self.theirs, self.ratio, self.ratios)
        {
            let flags = &self.flags;
            line +=
                &format!(", llama.cpp {theirs:.1}: {ratio:.2} ({low:.2} to {high:.2}); {flags}");
        }
        if let Some(others) = self.contended {
            line += &format!("; CONTENDED, others took {others:.2} of a core");
        }
        line
    }
}

impl Comparison {
    /// The result for a person.
    pub fn table(&self) -> String {
        let mut out = format!("{}, {} threads\n", self.model, self.threads);
        for row in &self.rows {
            out += &row.line();
            out.push('\n');
        }
        if let Some(alone) = &self.alone {
            out += &alone.lines();
        }
        out
    }
}
