//! The engine's binary: command line in, exit code out.
//!
//! Exit codes: 0 ended as told, 1 could not start or broke, 2 the command line is wrong.

use std::io::IsTerminal;
use std::process::ExitCode;

use clap::Parser;
use engine::cli::{Cli, Task};
use engine::hub::{self, Settings};
use engine::kv::store::disk;
use engine::serve;
use tracing_subscriber::EnvFilter;

/// What is logged unless `HOMING_LOG` says otherwise.
const LOG_DEFAULT: &str = "info";

fn main() -> ExitCode {
    let filter = EnvFilter::try_from_env("HOMING_LOG").unwrap_or_else(|_| LOG_DEFAULT.into());
    let colours = std::io::stderr().is_terminal();
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_ansi(colours)
        .with_writer(std::io::stderr)
        .init();
    match Cli::parse().task() {
        Ok(Task::Serve(config)) => match serve::run(*config) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => failed(1, &error),
        },
        Ok(Task::Fetch(reference)) => match hub::fetch(&reference, &Settings::from_env()) {
            Ok(path) => {
                println!("{}", path.display());
                ExitCode::SUCCESS
            }
            Err(error) => failed(1, &error),
        },
        Ok(Task::Wipe(dir, scope)) => match disk::wipe(&dir, &scope) {
            Ok(wiped) => {
                println!("{{\"wiped\": {wiped}}}");
                ExitCode::SUCCESS
            }
            Err(error) => failed(1, &error),
        },
        Err(error) => failed(2, &error),
    }
}

fn failed(code: u8, error: &dyn std::error::Error) -> ExitCode {
    eprintln!("homing-engine: {error}");
    ExitCode::from(code)
}
