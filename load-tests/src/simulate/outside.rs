//! How does a simulation ask a policy that is a process of its own?
//!
//! `sh -c COMMAND`, lines in and out (the protocol is `simulate::outside`'s). Its stdin is written by
//! a thread, so that a policy that does not read cannot stop the run; its stdout is read by another.
//! A bad answer, an early end and silence end the run with an error that quotes the end of its
//! stderr. The process and what it started are gone when the run is over, however it ended: its
//! stdin is closed, and what is still there after that is killed.

use std::io::{BufWriter, Write};
use std::process::Command;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TrySendError, sync_channel};
use std::time::Duration;

use simulate::compare::Case;
use simulate::figures::Summary;
use simulate::outside::{Outside, Wanted};
use simulate::scenario::Scenario;
use simulate::trace::Trace;

use crate::error::LoadError;
use crate::process::Program;

/// A policy that has not answered by then will not: a decision takes milliseconds, loading what it
/// needs before the first one may take seconds.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// Lines that wait to be written. Between two requests, whose answers are waited for, a fleet tells
/// some hundreds; a policy that leaves this many unread reads nothing.
const LINES_WAITING_MAX: usize = 65_536;

/// What a policy gets to end by itself once its stdin has ended.
const GRACE: Duration = Duration::from_secs(5);

/// Plays a case whose policy is this command, and waits up to `patience` for each answer.
pub fn play(
    command: &str,
    case: &Case,
    (trace, scenario): (&Trace, &Scenario),
    patience: Duration,
) -> Result<Summary, LoadError> {
    let folder = tempfile::tempdir().map_err(LoadError::system("making a temporary folder"))?;
    let mut shell = Command::new("sh");
    shell.args(["-c", command]);
    let name = format!("ext:{command}");
    let program = Program::start(&name, &mut shell, &folder.path().join("policy.log"))?;
    let mut policy = Policy::new(program, patience);
    let exchange = Box::new(|line: &str, wanted: Wanted| policy.exchange(line, wanted));
    let mut router = Outside::new(&case.scenario(scenario).fleet, exchange);
    let summary = case.play_on(trace, scenario, &mut router);
    match router.trouble().map(str::to_owned) {
        None => {
            drop(router);
            policy.end();
            Ok(summary)
        }
        Some(trouble) => {
            drop(router);
            Err(policy.program.trouble(&trouble))
        }
    }
}

/// The process. Dropping it ends it at once.
struct Policy {
    program: Program,
    lines: SyncSender<String>,
    patience: Duration,
}

impl Policy {
    fn new(mut program: Program, patience: Duration) -> Self {
        let (lines, waiting) = sync_channel(LINES_WAITING_MAX);
        if let Some(stdin) = program.take_stdin() {
            std::thread::spawn(move || write_lines(&waiting, BufWriter::new(stdin)));
        }
        Self {
            program,
            lines,
            patience,
        }
    }

    fn exchange(&mut self, line: &str, wanted: Wanted) -> Result<Option<String>, String> {
        match self.lines.try_send(line.to_owned()) {
            Ok(()) => {}
            Err(TrySendError::Full(_)) => {
                return Err(format!(
                    "does not read: {LINES_WAITING_MAX} lines wait for it"
                ));
            }
            Err(TrySendError::Disconnected(_)) => return Err(self.gone()),
        }
        if wanted == Wanted::Nothing {
            return Ok(None);
        }
        match self.program.try_line(self.patience) {
            Ok(answer) => Ok(Some(answer)),
            Err(RecvTimeoutError::Timeout) => {
                Err(format!("did not answer within {:?}", self.patience))
            }
            Err(RecvTimeoutError::Disconnected) => Err(self.gone()),
        }
    }

    /// Why it can be neither written to nor read from.
    fn gone(&mut self) -> String {
        match self.program.wait(GRACE) {
            Ok(Some(code)) => format!("ended early, with exit code {code}"),
            Ok(None) => "ended early, by a signal".to_owned(),
            Err(_) => "closed its input or its output".to_owned(),
        }
    }

    /// Lets it end by itself.
    fn end(self) {
        let Self {
            mut program, lines, ..
        } = self;
        drop(lines);
        // One that still runs after that is killed when it is dropped, which is what is wanted.
        let _ = program.wait(GRACE);
    }
}

/// Writes until there is nobody to write to or for. What is at hand goes out together.
fn write_lines(waiting: &Receiver<String>, mut stdin: impl Write) {
    while let Ok(line) = waiting.recv() {
        let more = std::iter::from_fn(|| waiting.try_recv().ok());
        let mut all = std::iter::once(line).chain(more);
        let written = all.try_for_each(|line| writeln!(stdin, "{line}"));
        if written.and_then(|()| stdin.flush()).is_err() {
            return;
        }
    }
}
