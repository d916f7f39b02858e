//! Where does the log go, and how much of it?
//!
//! One line an event, values as fields. `HOMING_LOG` takes tracing's filter syntax (`debug`,
//! `gateway::fleet=trace`). Libraries speak from `warn` up: Pingora reports each closed connection
//! at `info`, and clients close connections all day; its proxy module reports even those that close
//! within a header as errors, so it is silent, and what fails in a turn is on the turn's own line.

use std::fs::File;
use std::io::{self, IsTerminal as _};

use tracing_subscriber::EnvFilter;

const DEFAULT: &str = "warn,gateway=info,pingora_proxy=off";

fn filter() -> EnvFilter {
    EnvFilter::try_from_env("HOMING_LOG").unwrap_or_else(|_| EnvFilter::new(DEFAULT))
}

/// Logs to stderr.
pub fn to_stderr() {
    let log = tracing_subscriber::fmt()
        .with_env_filter(filter())
        .with_ansi(io::stderr().is_terminal())
        .with_writer(io::stderr);
    // A second initialisation (in tests) keeps the first.
    let _ = log.try_init();
}

/// Logs to a file, for a command whose terminal belongs to its user.
pub fn to_file(file: File) {
    let log = tracing_subscriber::fmt()
        .with_env_filter(filter())
        .with_ansi(false)
        .with_writer(std::sync::Mutex::new(file));
    let _ = log.try_init();
}
