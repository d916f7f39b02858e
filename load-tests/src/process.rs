//! What does a program that we started cost, and is it gone when it should be?
//!
//! Reads Linux's `/proc`: CPU time of a whole process, its memory, its children. A started program
//! is ended when its guard is dropped, its children with it, so a failed bench or test leaves nothing
//! behind. A zombie counts as gone: it holds no port, no memory, no file.

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use crate::error::LoadError;

/// Lines of output waiting to be read; a program that prints more waits itself.
const LINES_WAITING_MAX: usize = 10_000;

/// What a program gets to end by itself before it is killed.
const GRACE: Duration = Duration::from_secs(2);

/// A program of ours: stdout is read line by line, stderr goes to a file for the error message.
pub struct Program {
    name: String,
    child: Child,
    lines: Receiver<String>,
    log: PathBuf,
}

impl Program {
    /// Starts it with its stderr in `log`. Its stdin stays open as long as this guard lives.
    pub fn start(name: &str, command: &mut Command, log: &Path) -> Result<Self, LoadError> {
        let stderr = fs::File::create(log).map_err(LoadError::file(log))?;
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(stderr)
            .spawn()
            .map_err(|e| LoadError::program(name, format!("cannot start: {e}")))?;
        let (sender, lines) = sync_channel(LINES_WAITING_MAX);
        if let Some(stdout) = child.stdout.take() {
            std::thread::spawn(move || {
                for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                    if sender.send(line).is_err() {
                        return;
                    }
                }
            });
        }
        Ok(Self {
            name: name.into(),
            child,
            lines,
            log: log.into(),
        })
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The next line of its stdout.
    pub fn line(&self, within: Duration) -> Result<String, LoadError> {
        self.try_line(within).map_err(|e| match e {
            RecvTimeoutError::Timeout => self.trouble(&format!("printed nothing in {within:?}")),
            RecvTimeoutError::Disconnected => self.trouble("closed its output"),
        })
    }

    /// The same, for a caller that knows more of what went wrong.
    pub fn try_line(&self, within: Duration) -> Result<String, RecvTimeoutError> {
        self.lines.recv_timeout(within)
    }

    /// Its stdin, which was held open until now; none the second time. It ends when the caller
    /// drops it.
    pub fn take_stdin(&mut self) -> Option<ChildStdin> {
        self.child.stdin.take()
    }

    /// Sends it a signal; that it is already gone is no error.
    pub fn signal(&self, signal: Signal) {
        signal_process(self.pid(), signal);
    }

    /// Waits for its end and gives the exit code, or `None` when a signal ended it.
    pub fn wait(&mut self, within: Duration) -> Result<Option<i32>, LoadError> {
        let deadline = Instant::now() + within;
        loop {
            match self.child.try_wait() {
                Ok(Some(status)) => return Ok(status.code()),
                Ok(None) if Instant::now() >= deadline => {
                    return Err(self.trouble(&format!("still runs after {within:?}")));
                }
                Ok(None) => std::thread::sleep(Duration::from_millis(5)),
                Err(e) => return Err(LoadError::program(&self.name, e.to_string())),
            }
        }
    }

    /// What it has written to stderr.
    pub fn stderr(&self) -> String {
        fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// An error about it, with the end of its stderr.
    pub fn trouble(&self, what: &str) -> LoadError {
        let stderr = self.stderr();
        let lines: Vec<&str> = stderr.lines().collect();
        let end = lines[lines.len().saturating_sub(20)..].join("\n");
        LoadError::program(&self.name, format!("{what}; the end of its log:\n{end}"))
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // Asked first: a program like nginx ends its own workers, and would leave them behind if
        // it were killed. What is still there then is killed, workers included.
        let family = family(self.pid());
        if !matches!(self.child.try_wait(), Ok(Some(_))) {
            self.signal(Signal::TERM);
            let _ = self.wait(GRACE);
        }
        for pid in family.into_iter().skip(1).filter(|pid| is_alive(*pid)) {
            signal_process(pid, Signal::KILL);
        }
        // Both fail only when it is gone already, which is what is wanted.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Signals a process by id; that it is gone is no error.
pub fn signal_process(pid: u32, signal: Signal) {
    if let Some(pid) = i32::try_from(pid).ok().and_then(Pid::from_raw) {
        let _ = kill_process(pid, signal);
    }
}

/// Whether a process runs (a zombie does not).
pub fn is_alive(pid: u32) -> bool {
    stat(pid).is_some_and(|fields| !matches!(fields.first().map(String::as_str), Some("Z" | "X")))
}

/// Waits for a process that is not our child to be gone.
pub fn wait_gone(pid: u32, within: Duration) -> bool {
    wait_until(within, || !is_alive(pid))
}

/// Polls a condition; whether it held before the deadline.
pub fn wait_until(within: Duration, mut condition: impl FnMut() -> bool) -> bool {
    let deadline = Instant::now() + within;
    while !condition() {
        if Instant::now() >= deadline {
            return false;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    true
}

/// CPU seconds that a process has used, all threads, user and system.
pub fn cpu_seconds(pid: u32) -> f64 {
    let fields = stat(pid).unwrap_or_default();
    let ticks = |at: usize| {
        fields
            .get(at)
            .and_then(|f| f.parse::<u64>().ok())
            .unwrap_or(0)
    };
    (ticks(11) + ticks(12)) as f64 / rustix::param::clock_ticks_per_second() as f64
}

/// The fields of `/proc/PID/stat` after the name, which may itself hold spaces and brackets.
fn stat(pid: u32) -> Option<Vec<String>> {
    let text = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let (_, rest) = text.rsplit_once(')')?;
    Some(rest.split_whitespace().map(str::to_owned).collect())
}

/// Memory of a process in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct Memory {
    /// All resident pages.
    pub resident: u64,
    /// Those of them that are the process's own.
    pub anonymous: u64,
    /// Those of them that belong to mapped files.
    pub file: u64,
    /// The most that was ever resident.
    pub peak: u64,
}

/// The memory of a process, zero when it is gone.
pub fn memory(pid: u32) -> Memory {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let kib = |name: &str| -> u64 {
        let line = status
            .lines()
            .find_map(|l| l.strip_prefix(name))
            .unwrap_or_default();
        line.split_whitespace()
            .next()
            .and_then(|n| n.parse().ok())
            .unwrap_or(0)
    };
    Memory {
        resident: kib("VmRSS:") << 10,
        anonymous: kib("RssAnon:") << 10,
        file: kib("RssFile:") << 10,
        peak: kib("VmHWM:") << 10,
    }
}

/// A process and all below it.
pub fn family(pid: u32) -> Vec<u32> {
    let mut found = vec![pid];
    let mut next = 0;
    while let Some(parent) = found.get(next).copied() {
        for task in fs::read_dir(format!("/proc/{parent}/task"))
            .into_iter()
            .flatten()
            .flatten()
        {
            let children = fs::read_to_string(task.path().join("children")).unwrap_or_default();
            found.extend(
                children
                    .split_whitespace()
                    .filter_map(|c| c.parse::<u32>().ok()),
            );
        }
        next += 1;
    }
    found
}

/// Reads a small file, for example one that another process is writing.
pub fn read_text(path: &Path) -> Result<String, LoadError> {
    let mut text = String::new();
    fs::File::open(path)
        .and_then(|mut file| file.read_to_string(&mut text))
        .map_err(LoadError::file(path))?;
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str, log: &Path) -> Program {
        Program::start("sh", Command::new("sh").args(["-c", script]), log).expect("sh starts")
    }

    /// Catches a guard that leaves its program running, and a zombie taken for a process.
    #[test]
    fn a_dropped_program_is_gone() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let program = shell("echo up; read line", &folder.path().join("log"));
        assert_eq!(program.line(Duration::from_secs(10)).expect("a line"), "up");
        let pid = program.pid();
        assert!(is_alive(pid));
        assert!(memory(pid).resident > 0);
        drop(program);
        assert!(wait_gone(pid, Duration::from_secs(10)));
        assert_eq!(memory(pid), Memory::default());
    }

    /// Catches CPU time that is read from the wrong field.
    #[test]
    fn cpu_time_of_a_busy_program_grows() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let program = shell("while :; do :; done", &folder.path().join("log"));
        assert!(wait_until(Duration::from_secs(20), || cpu_seconds(
            program.pid()
        ) > 0.05));
    }

    /// Catches an error that hides why a program did not start.
    #[test]
    fn trouble_quotes_the_log() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let mut program = shell("echo no such model >&2; exit 3", &folder.path().join("log"));
        assert_eq!(
            program.wait(Duration::from_secs(10)).expect("ends"),
            Some(3)
        );
        let error = program.line(Duration::from_secs(10)).expect_err("no line");
        assert!(error.to_string().contains("no such model"), "{error}");
    }
}
