//! The two programs: their flags, and how each is started and stopped.

use std::ffi::OsString;
use std::net::TcpListener;
use std::process::Command;
use std::time::{Duration, Instant};

use super::Args;
use super::prompts::Prompts;
use super::rows::{Row, complete};
use crate::error::LoadError;
use crate::http::Target;
use crate::process::{Program, cpu_seconds};

/// A program that is not up by then will not come up.
const START_TIMEOUT: Duration = Duration::from_secs(300);
/// Between two tries to reach a starting program: far below any start.
const START_POLL: Duration = Duration::from_millis(2);
/// Tokens of the prompt with which a start is measured.
const START_TOKENS: usize = 32;

/// A program with its flags, but for the address.
#[derive(Clone, Debug)]
pub(super) struct Side {
    program: OsString,
    /// What is listed in the report.
    shown: Vec<String>,
    hidden: Vec<OsString>,
    listen: fn(u16) -> Vec<String>,
}

impl Side {
    /// Our engine.
    pub(super) fn ours(args: &Args) -> Self {
        Self::ours_with(args, args.threads)
    }

    /// Our engine with so many threads.
    pub(super) fn ours_with(args: &Args, threads: usize) -> Self {
        let threads = threads.to_string();
        Self {
            program: args.ours.clone().into(),
            shown: args.ours_flags.clone(),
            hidden: [
                "serve".into(),
                "--threads".into(),
                threads.into(),
                "--model".into(),
            ]
            .into_iter()
            .chain([args.model.clone().into()])
            .collect(),
            listen: |port| vec!["--listen".into(), format!("127.0.0.1:{port}")],
        }
    }

    /// llama.cpp's server, once for each set of flags that could be its best at a row.
    pub(super) fn theirs(args: &Args, row: Row) -> Vec<Self> {
        let Some(program) = &args.theirs else {
            return Vec::new();
        };
        let threads = args.threads.to_string();
        let hidden: Vec<OsString> = [
            "--threads".into(),
            threads.clone().into(),
            "--threads-batch".into(),
            threads.into(),
            "--no-warmup".into(),
            "--model".into(),
            args.model.clone().into(),
        ]
        .into();
        let sets = row.opponent_flags();
        sets.iter()
            .map(|set| Self {
                program: program.clone().into(),
                shown: set.split_whitespace().map(str::to_owned).collect(),
                hidden: hidden.clone(),
                listen: |port| {
                    let port = port.to_string();
                    vec!["--host".into(), "127.0.0.1".into(), "--port".into(), port]
                },
            })
            .collect()
    }

    /// The flags that a report lists.
    pub(super) fn flags(&self) -> String {
        self.shown.join(" ")
    }
}

/// A side that is up, or will be when it is asked.
pub(super) struct Running {
    side: Side,
    up: Option<Up>,
    /// What earlier processes of this side used in the current round, and the current one before it.
    gone_seconds: f64,
    counted_from: f64,
}

struct Up {
    program: Program,
    target: Target,
    _folder: tempfile::TempDir,
}

impl Running {
    /// Not yet up.
    pub(super) fn new(side: Side) -> Self {
        Self {
            side,
            up: None,
            gone_seconds: 0.0,
            counted_from: 0.0,
        }
    }

    /// Where it listens; started first if it is not up.
    pub(super) async fn target(&mut self, prompts: &mut Prompts) -> Result<Target, LoadError> {
        if self.up.is_none() {
            self.start(prompts).await?;
        }
        let up = self.up.as_ref().expect("it was started");
        Ok(up.target.clone())
    }

    /// From process start to first token, in a new process.
    pub(super) async fn start(&mut self, prompts: &mut Prompts) -> Result<Duration, LoadError> {
        self.stop();
        let folder = tempfile::tempdir().map_err(LoadError::system("making a temporary folder"))?;
        let port = free_port()?;
        let target = Target::parse(&format!("http://127.0.0.1:{port}"))?;
        let mut command = Command::new(&self.side.program);
        command.args(&self.side.hidden).args(&self.side.shown);
        command.args((self.side.listen)(port));
        let prompt = prompts.next(START_TOKENS);
        let started = Instant::now();
        let program = Program::start("server", &mut command, &folder.path().join("log"))?;
        let mut last = String::new();
        while started.elapsed() < START_TIMEOUT {
            let outcome = complete(&target, prompts.model_id(), &prompt, 1).await;
            match (&outcome.failure, outcome.first_token) {
                (None, Some(at)) => {
                    let _folder = folder;
                    self.up = Some(Up {
                        program,
                        target,
                        _folder,
                    });
                    return Ok(at - started);
                }
                (Some(failure), _) => last = failure.message.clone(),
                (None, None) => last = "an answer without text".into(),
            }
            tokio::time::sleep(START_POLL).await;
        }
        Err(program.trouble(&format!("gave no token in {START_TIMEOUT:?} ({last})")))
    }

    /// Ends the process, if there is one.
    pub(super) fn stop(&mut self) {
        if let Some(up) = self.up.take() {
            self.gone_seconds += cpu_seconds(up.program.pid()) - self.counted_from;
            self.counted_from = 0.0;
        }
    }

    /// The process, if it is up.
    pub(super) fn pid(&self) -> Option<u32> {
        self.up.as_ref().map(|up| up.program.pid())
    }

    /// An error with what the program said.
    pub(super) fn trouble(&self, what: &str) -> LoadError {
        match &self.up {
            Some(up) => up.program.trouble(what),
            None => LoadError::program("the server", what.to_owned()),
        }
    }

    /// Processor seconds since the last [`Running::rewind`].
    pub(super) fn used_seconds(&self) -> f64 {
        let now = self.pid().map_or(0.0, cpu_seconds);
        self.gone_seconds + now - self.counted_from
    }

    /// Begins to count anew.
    pub(super) fn rewind(&mut self) {
        self.gone_seconds = 0.0;
        self.counted_from = self.pid().map_or(0.0, cpu_seconds);
    }
}

/// A port that was free a moment ago; the peer cannot be asked to pick one and say which.
fn free_port() -> Result<u16, LoadError> {
    let listener = TcpListener::bind("127.0.0.1:0").map_err(LoadError::system("listening"))?;
    Ok(listener
        .local_addr()
        .map_err(LoadError::system("asking for the port"))?
        .port())
}
