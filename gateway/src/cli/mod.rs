//! What can be typed after `homing`?
//!
//! Arguments as clap reads them, and for each command the one call that carries it out. Exit codes:
//! 0 done, 1 it failed (the reason is on stderr), 2 it was typed wrong. Results go to stdout,
//! everything else to stderr.

use std::io::{IsTerminal as _, Write as _};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, Parser, Subcommand};

use crate::report::{By, Format, Query, Report};

mod explain;
mod keys;
pub mod log;

/// An error of any command: only its text matters here.
pub type Failure = Box<dyn std::error::Error + Send + Sync>;

/// Homing: one address in front of nodes that remember your prompts.
#[derive(Debug, Parser)]
#[command(
    name = "homing",
    version,
    arg_required_else_help = true,
    max_term_width = 100
)]
pub struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Start a gateway and engine nodes on this machine
    Up(UpArgs),
    /// Start one gateway in front of the nodes that a file names
    Gateway {
        /// Configuration file (see docs/CONFIGURATION.md)
        #[arg(long, value_name = "FILE")]
        config: PathBuf,
    },
    /// Create or list tenants
    #[command(subcommand)]
    Tenant(keys::TenantCommand),
    /// Create, list or revoke API keys
    #[command(subcommand)]
    Key(keys::KeyCommand),
    /// Sum the usage records of the ledger
    Report(ReportArgs),
    /// Say why a turn went where it went: candidates, their costs, the choice, what came of it
    Explain {
        /// The request's id, as `x-request-id` of its answer or the report has it
        #[arg(value_name = "REQUEST-ID")]
        id: String,
        /// Data directory of the gateway; it may be running
        #[arg(long, value_name = "DIR", default_value = "data")]
        data: PathBuf,
        /// Print JSON: an array, since two tenants may have used one id
        #[arg(long)]
        json: bool,
    },
}

/// What `homing up` takes.
#[derive(Debug, Clone, Args)]
pub struct UpArgs {
    /// Model: a GGUF file, a folder with config.json and safetensors, or `hf:org/repo[/file][@revision]`
    /// on the Hugging Face hub; its id is the file's name without `.gguf`, the folder's, or org/repo
    #[arg(long, value_name = "MODEL", default_value = crate::up::DEFAULT_MODEL)]
    pub model: PathBuf,
    /// Another name for the model, so that a client which asks for a model of its own need not be
    /// told (repeat it for several; `*` in it stands for any characters; replaces the defaults)
    #[arg(long, value_name = "NAME", default_values = crate::up::DEFAULT_ALIASES)]
    pub alias: Vec<String>,
    /// Engine nodes to start that compute prompts and answers [default: 2, or none beside --prefill]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=64))]
    pub nodes: Option<u16>,
    /// Engine nodes to start that compute prompts for those of --decode
    #[arg(long, value_name = "N", requires = "decode", value_parser = clap::value_parser!(u16).range(1..=64))]
    pub prefill: Option<u16>,
    /// Engine nodes to start that answer from prompts which those of --prefill computed
    #[arg(long, value_name = "N", requires = "prefill", value_parser = clap::value_parser!(u16).range(1..=64))]
    pub decode: Option<u16>,
    /// Threads of each node [default: cores / nodes]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub threads_per_node: Option<u16>,
    /// Where clients connect
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1:8080")]
    pub listen: SocketAddr,
    /// Where the operator connects (metrics, node states)
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1:9090")]
    pub admin: SocketAddr,
    /// Directory of ledger, keys, secrets and logs
    #[arg(long, value_name = "DIR", default_value = "data")]
    pub data: PathBuf,
    /// Print one line of JSON when ready, and nothing for people
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
struct ReportArgs {
    /// Data directory of the gateway; it may be running
    #[arg(long, value_name = "DIR", default_value = "data")]
    data: PathBuf,
    /// Only this tenant
    #[arg(long, value_name = "T")]
    tenant: Option<String>,
    /// Only requests that arrived at or after this time (2026-11-29, 2026-11-29T10:00:00Z, unix ms)
    #[arg(long, value_name = "TIME")]
    from: Option<String>,
    /// Only requests that arrived before this time
    #[arg(long, value_name = "TIME")]
    to: Option<String>,
    /// What one row stands for
    #[arg(long, value_enum, default_value_t = By::Tenant)]
    by: By,
    /// How rows are printed
    #[arg(long, value_enum, default_value_t = Format::Table)]
    format: Format,
}

/// Reads the arguments of this process and does what they say.
pub fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            // Nobody left to tell if this fails.
            let _ = error.print();
            return if error.use_stderr() {
                ExitCode::from(2)
            } else {
                ExitCode::SUCCESS
            };
        }
    };
    match run(cli.command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let _ = writeln!(std::io::stderr(), "homing: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(command: Command) -> Result<(), Failure> {
    match command {
        Command::Up(args) => crate::up::run(&args),
        Command::Gateway { config } => {
            log::to_stderr();
            crate::serve::run(crate::config::Config::load(&config)?)
        }
        Command::Tenant(command) => keys::tenant(&command),
        Command::Key(command) => keys::key(&command),
        Command::Report(args) => {
            log::to_stderr();
            let ReportArgs {
                data,
                tenant,
                from,
                to,
                by,
                format,
            } = args;
            let report = Report::make(&Query {
                data,
                tenant,
                from,
                to,
                by,
            })?;
            print(&report.print(format))
        }
        Command::Explain { id, data, json } => {
            let found = crate::decisions::find_in(&data, &id)?;
            if found.is_empty() {
                return Err(format!(
                    "the decision log in {} has no request {id:?}: it may be older than what is kept ([decisions] in docs/CONFIGURATION.md), still run, or have been refused before a node was chosen",
                    data.display()
                )
                .into());
            }
            if json {
                return print(&format!("{}\n", serde_json::to_string_pretty(&found)?));
            }
            let texts: Vec<String> = found.iter().map(explain::text).collect();
            print(&texts.join("\n"))
        }
    }
}

/// Writes a result to stdout. A reader that has gone away (`| head`) is no failure.
fn print(text: &str) -> Result<(), Failure> {
    let mut stdout = std::io::stdout().lock();
    match stdout
        .write_all(text.as_bytes())
        .and_then(|()| stdout.flush())
    {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => Err(error.into()),
        _ => Ok(()),
    }
}

/// Says something to a person; says nothing to a script.
fn hint(text: &str) {
    if std::io::stderr().is_terminal() {
        let _ = writeln!(std::io::stderr(), "{text}");
    }
}
