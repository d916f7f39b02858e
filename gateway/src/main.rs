//! The `homing` program: see [`gateway::cli`].

use std::process::ExitCode;

fn main() -> ExitCode {
    gateway::cli::main()
}
