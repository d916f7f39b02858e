//! How do the product's policies fare in somebody else's simulator?
//!
//! The `ext:` protocol on stdin and stdout: JSON lines, one answer for each request. All that is
//! decided is decided in `simulate::homing`; here lines are read and written.

use std::io::{BufRead, Write};

use clap::Args as ClapArgs;
use simulate::homing::Settings;
use simulate::homing::ext::Session;

use crate::error::LoadError;

/// `homing-load policy` has no options: a score is of what the product does by default.
#[derive(ClapArgs, Debug)]
pub struct Args {}

/// Answers until stdin ends.
pub fn run(_args: &Args) -> Result<(), LoadError> {
    let mut session = Session::new(Settings::default());
    let mut out = std::io::stdout().lock();
    for line in std::io::stdin().lock().lines() {
        let line = line.map_err(LoadError::system("reading stdin"))?;
        if line.trim().is_empty() {
            continue;
        }
        let answer = session
            .take(&line)
            .map_err(|error| LoadError::program("homing-load policy", error.to_string()))?;
        if let Some(answer) = answer {
            writeln!(out, "{answer}")
                .and_then(|()| out.flush())
                .map_err(LoadError::system("writing to stdout"))?;
        }
    }
    Ok(())
}
