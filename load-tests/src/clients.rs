//! Do the clients that agents are made with run their whole loop through the gateway?
//!
//! Each client is a driver of a few dozen lines in `load-tests/clients`, in the client's own language:
//! its parsing, its errors and its usage objects are what is under test. `scripts/install-clients`
//! brings the clients. This file knows the list, starts what a client talks to ([`stacks`]), runs the
//! drivers one after another and prints what came out. The model is either the default one, made to
//! call its tool by `tool_choice`, or a scripted one that is free to choose; coding agents, whose
//! prompts the default model cannot hold, must end with the dialect's error there.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde::{Deserialize, Serialize};

use crate::error::LoadError;
use crate::process::{family, signal_process};

pub mod stacks;

use self::stacks::Endpoint;

/// A driver that takes longer hangs. The slowest, a coding agent with its retries, takes a minute.
const DRIVER_TIMEOUT: Duration = Duration::from_secs(600);
/// Where the installed clients are, below the repository.
const INSTALLED: &str = ".tools/clients";
/// Where the drivers are.
const DRIVERS: &str = "load-tests/clients";

/// Flags of `homing-load clients`.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// The repository, with clients installed by load-tests/scripts/install-clients
    #[arg(long, default_value = ".")]
    pub root: PathBuf,
    /// The gateway's binary; homing-engine stands beside it
    #[arg(long, value_name = "PATH")]
    pub homing: PathBuf,
    /// Model file for `homing up`
    #[arg(long, value_name = "PATH")]
    pub model: PathBuf,
    /// Only clients whose name contains this
    #[arg(long, default_value = "")]
    pub only: String,
    /// Write the result as JSON to this file (`-`: to stdout, without the table)
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
}

/// Who decides whether the tool is called.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// The model, a scripted one.
    Free,
    /// The client, by `tool_choice`: the default model is too small to decide.
    Forced,
}

impl Mode {
    fn as_str(self) -> &'static str {
        match self {
            Self::Free => "free",
            Self::Forced => "forced",
        }
    }
}

/// What runs a driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Runs {
    /// The Python of an installed environment.
    Python,
    /// The installed Node.
    Node,
    /// A coding agent of that name, driven as a program.
    Agent,
}

/// One client.
#[derive(Clone, Copy, Debug)]
pub struct Client {
    /// Its name, and the argument of the driver of agents.
    pub name: &'static str,
    /// Its folder below `.tools/clients`.
    installed: &'static str,
    driver: &'static str,
    runs: Runs,
}

const fn client(
    name: &'static str,
    installed: &'static str,
    driver: &'static str,
    runs: Runs,
) -> Client {
    Client {
        name,
        installed,
        driver,
        runs,
    }
}

/// Those that `make test` runs too.
pub const SDKS: &[Client] = &[
    client("openai-python", "sdks", "openai_py.py", Runs::Python),
    client("anthropic-python", "sdks", "anthropic_py.py", Runs::Python),
    client("openai-agents", "sdks", "openai_agents_py.py", Runs::Python),
    client("openai-node", "node-sdks", "openai_js.mjs", Runs::Node),
    client(
        "anthropic-node",
        "node-sdks",
        "anthropic_js.mjs",
        Runs::Node,
    ),
];

/// Frameworks and coding agents.
pub const OTHERS: &[Client] = &[
    client(
        "langchain-openai",
        "langchain",
        "langchain_py.py",
        Runs::Python,
    ),
    client(
        "pydantic-ai",
        "pydantic-ai",
        "pydantic_ai_py.py",
        Runs::Python,
    ),
    client("litellm", "litellm", "litellm_py.py", Runs::Python),
    client("ai-sdk", "ai-sdk", "ai_sdk.mjs", Runs::Node),
    client("codex", "codex", "coding_agent.py", Runs::Agent),
    client("claude-code", "claude-code", "coding_agent.py", Runs::Agent),
    client("opencode", "opencode", "coding_agent.py", Runs::Agent),
    client("pi", "pi", "coding_agent.py", Runs::Agent),
];

/// What a driver prints.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct Outcome {
    /// The package as its registry knows it.
    pub client: String,
    /// Its version.
    pub version: String,
    /// One conversation each.
    pub checks: Vec<Check>,
}

/// One conversation.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct Check {
    /// Dialect and form.
    pub check: String,
    /// Cached tokens of each turn, by the client's own usage object.
    pub cached: Option<Vec<u64>>,
    /// Why it failed.
    pub error: Option<String>,
}

impl Client {
    /// Whether it is there; coding agents ship programs for some machines only.
    pub fn is_installed(&self, root: &Path) -> bool {
        root.join(INSTALLED)
            .join(self.installed)
            .join("installed")
            .exists()
    }

    /// Runs its driver. An error means that no result came; failed checks are in the result.
    pub fn drive(&self, root: &Path, to: &Endpoint, mode: Mode) -> Result<Outcome, LoadError> {
        let trouble = |why: String| LoadError::program(self.name, why);
        // Absolute: coding agents run in folders of their own.
        let root = root.canonicalize().map_err(LoadError::file(root))?;
        let installed = root.join(INSTALLED);
        let program = match self.runs {
            Runs::Python => installed.join(self.installed).join("bin/python"),
            Runs::Node => installed.join("node/bin/node"),
            Runs::Agent => installed.join("node/bin/python"),
        };
        let output = tempfile::tempdir().map_err(LoadError::system("making a temporary folder"))?;
        let file = |name: &str| {
            let path = output.path().join(name);
            std::fs::File::create(&path).map_err(LoadError::file(&path))
        };
        let mut command = Command::new(&program);
        command
            .arg(root.join(DRIVERS).join(self.driver))
            .args([&to.url, &to.key, &to.model, mode.as_str()])
            .stdin(Stdio::null())
            .stdout(file("stdout")?)
            .stderr(file("stderr")?);
        if self.runs == Runs::Agent {
            command.arg(self.name).arg(&installed);
        }
        let mut child = command
            .spawn()
            .map_err(|e| trouble(format!("cannot start {}: {e}", program.display())))?;
        let deadline = Instant::now() + DRIVER_TIMEOUT;
        loop {
            match child.try_wait() {
                Ok(Some(_)) => break,
                Ok(None) if Instant::now() < deadline => {
                    std::thread::sleep(Duration::from_millis(20));
                }
                // What it started goes with it; waiting fails only when it is gone already.
                _ => {
                    for pid in family(child.id()) {
                        signal_process(pid, Signal::KILL);
                    }
                    let _ = child.wait();
                    break;
                }
            }
        }
        let read = |name: &str| std::fs::read_to_string(output.path().join(name));
        let printed = read("stdout").unwrap_or_default();
        let line = printed.lines().last().unwrap_or_default();
        serde_json::from_str(line).map_err(|_| {
            let stderr = read("stderr").unwrap_or_default();
            let lines: Vec<&str> = stderr.lines().collect();
            let end = lines[lines.len().saturating_sub(20)..].join("\n");
            trouble(format!(
                "no result, but {line:?}; the end of its stderr:\n{end}"
            ))
        })
    }
}

/// One row of the table.
#[derive(Debug, Serialize)]
pub struct Row {
    /// The client.
    pub client: &'static str,
    /// Against the scripted node or the default model.
    pub mode: Mode,
    /// What its driver found; absent where the client is not installed.
    pub outcome: Option<Outcome>,
}

/// All that was driven.
#[derive(Debug, Serialize)]
pub struct Clients {
    /// In the order in which they ran.
    pub rows: Vec<Row>,
}

/// Runs every client against both stacks.
pub async fn run(args: &Args) -> Result<Clients, LoadError> {
    let folder = tempfile::tempdir().map_err(LoadError::system("making a temporary folder"))?;
    let mut rows = Vec::new();
    for mode in [Mode::Free, Mode::Forced] {
        let stack = match mode {
            Mode::Free => stacks::scripted(&args.homing, folder.path()).await?,
            Mode::Forced => stacks::engine(&args.homing, &args.model, folder.path())?,
        };
        for client in SDKS.iter().chain(OTHERS) {
            if !client.name.contains(&args.only) {
                continue;
            }
            let outcome = if client.is_installed(&args.root) {
                eprintln!("{} ({})", client.name, mode.as_str());
                Some(client.drive(&args.root, &stack.endpoint, mode)?)
            } else {
                None
            };
            rows.push(Row {
                client: client.name,
                mode,
                outcome,
            });
        }
    }
    Ok(Clients { rows })
}

impl Clients {
    /// The result for a person: one line a conversation.
    pub fn table(&self) -> String {
        let mut out = String::new();
        for row in &self.rows {
            let model = match row.mode {
                Mode::Free => "scripted",
                Mode::Forced => "default model",
            };
            let Some(outcome) = &row.outcome else {
                out += &format!(
                    "{:<17} {:<10} {:<14} not installed\n",
                    row.client, "", model
                );
                continue;
            };
            for check in &outcome.checks {
                let result = match (&check.error, &check.cached) {
                    (Some(error), _) => format!("FAILED: {error}"),
                    (None, Some(cached)) => format!("ok, cached {cached:?}"),
                    (None, None) => "ok".to_owned(),
                };
                out += &format!(
                    "{:<17} {:<10} {:<14} {:<45} {result}\n",
                    row.client, outcome.version, model, check.check
                );
            }
        }
        let all: Vec<bool> = self.checks().map(|check| check.error.is_none()).collect();
        let passed = all.iter().filter(|passed| **passed).count();
        out + &format!("{passed} passed, {} failed\n", all.len() - passed)
    }

    /// The failed conversations.
    pub fn failed(&self) -> usize {
        self.checks().filter(|check| check.error.is_some()).count()
    }

    fn checks(&self) -> impl Iterator<Item = &Check> {
        let outcomes = self.rows.iter().filter_map(|row| row.outcome.as_ref());
        outcomes.flat_map(|outcome| &outcome.checks)
    }
}
