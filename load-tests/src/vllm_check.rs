//! Does the gateway know what a real vLLM holds?
//!
//! One vLLM with KV events, and the real gateway before it. Agents' conversations go through the
//! gateway: growing turns over shared system prompts, more of them than the pool holds, texts that
//! tokenizers trip over, prompts that end with a block, another tenant's and one that goes past the
//! gateway, a cleared cache, bursts, a restart. Each answer is judged by vLLM's own word: the prompt's
//! tokens, how many of them were cached. Beside the gateway, `account` listens to the same events
//! and keeps a naive account of them in vLLM's own names, which has to say the same as vLLM's report
//! and hold as many blocks as the gateway's index.
//!
//! Turns that are alone must agree exactly. Of those at the same time a difference is allowed where
//! another turn or an eviction explains it: what is expected is said before the node begins.

mod account;
pub(crate) mod calls;
mod converse;
mod patience;
mod servers;
mod steps;
mod verdict;

use std::path::PathBuf;

use serde::Serialize;

use crate::error::LoadError;

use self::converse::Check;
use self::verdict::{Compared, Row};

/// Flags of `homing-load vllm-check`.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// Our gateway's binary
    #[arg(long)]
    pub homing: PathBuf,
    /// Python of an environment that has vLLM
    #[arg(long)]
    pub python: PathBuf,
    /// The model as a folder, for vLLM
    #[arg(long)]
    pub model: PathBuf,
    /// The same model's GGUF, for the gateway
    #[arg(long)]
    pub gguf: PathBuf,
    /// Blocks in vLLM's pool, each of 32 tokens; at least 100, so few that there are evictions
    #[arg(long, default_value_t = 128)]
    pub blocks: usize,
    /// Sessions of the first step
    #[arg(long, default_value_t = 4)]
    pub sessions: usize,
    /// Turns of each
    #[arg(long, default_value_t = 4)]
    pub turns: usize,
    /// Texts are drawn from it
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Keep logs, configuration, events and every comparison in this folder, a new one
    #[arg(long, value_name = "FOLDER")]
    pub keep: Option<PathBuf>,
    /// Write the result here as JSON (`-` for stdout, in place of the table)
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
}

/// What came out.
#[derive(Debug, Serialize)]
pub struct Checked {
    /// What vLLM calls its version.
    pub vllm: String,
    /// Tokens in its blocks.
    pub block_tokens: u64,
    /// Blocks in its pool.
    pub pool_blocks: u64,
    /// Every step.
    pub rows: Vec<Row>,
    /// Batches of events that were heard, over all lives of the node.
    pub event_batches: usize,
    /// Blocks that they told of as stored, and as removed.
    pub blocks_stored: usize,
    /// See `blocks_stored`.
    pub blocks_removed: usize,
    /// How often the index was compared with the account, and how often both held the same.
    pub index_compared: usize,
    /// See `index_compared`.
    pub index_equal: usize,
    /// What vLLM counted as cached in all, by its metrics; and by the answers.
    pub hits_counted: u64,
    /// See `hits_counted`.
    pub hits_reported: u64,
    /// Differences that are explained, and by what.
    pub explained: Vec<String>,
    /// What must not be.
    pub faults: Vec<String>,
    /// What ended the check before all steps were done, if anything did.
    pub stopped: Option<String>,
}

impl Checked {
    /// Whether all steps were done, and nothing was found that must not be.
    pub fn is_good(&self) -> bool {
        self.faults.is_empty() && self.stopped.is_none()
    }

    /// The verdict in one line.
    pub fn verdict(&self) -> String {
        verdict::line(self)
    }

    /// The result for a person; the verdict is its last line.
    pub fn table(&self) -> String {
        verdict::table(self)
    }
}

/// Runs all of it.
pub async fn run(args: &Args) -> Result<Checked, LoadError> {
    if args.blocks < 100 || args.sessions == 0 || args.turns < 2 {
        return Err(LoadError::Flag {
            flag: "--blocks, --sessions, --turns",
            reason: "at least 100, 1 and 2".into(),
        });
    }
    let folder = tempfile::tempdir().map_err(LoadError::system("making a temporary folder"))?;
    let folder = match &args.keep {
        Some(kept) => {
            std::fs::create_dir_all(kept).map_err(LoadError::file(kept))?;
            // The gateway takes paths in its configuration as relative to that file.
            kept.canonicalize().map_err(LoadError::file(kept))?
        }
        None => folder.path().to_owned(),
    };
    let mut check = Check::start(args, &folder).await?;
    let steps = steps::all(&mut check).await;
    let done = check.finish(steps).await;
    if args.keep.is_some() {
        let lines = done.compared.iter().map(Compared::line);
        let path = folder.join("compared.txt");
        std::fs::write(&path, lines.collect::<String>()).map_err(LoadError::file(&path))?;
    }
    Ok(verdict::of(done))
}
