//! How are engine processes started, kept alive and stopped?
//!
//! One task a node. States: *running* → (process ends) → *waiting* ([`BACK_OFF`], doubled up to
//! [`BACK_OFF_MAX`], reset by a life longer than [`GOOD_LIFE`]) → *running*, at the same address;
//! from any of them → *stopped*: SIGTERM, and SIGKILL after [`TERM_GRACE`]. A first life that ends
//! before its node was ready is reported instead: starting it again would not help.
//!
//! The engine ends by itself when its stdin reaches its end (`--exit-with-stdin`), which happens
//! when this process dies in any way. Its node token travels in the environment, where other users
//! cannot read it.

use std::collections::VecDeque;
use std::fs::{File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::process::{ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use policies::view::Role;
use rustix::process::{Pid, Signal, kill_process};
use serde::Deserialize;
use tokio::io::{AsyncBufReadExt as _, AsyncRead, BufReader};
use tokio::process::{Child, Command};
use tokio::sync::mpsc;

use super::plan::{NodePlan, Plan};
use super::progress::Progress;
use crate::tasks::{Drain, Phase, Tasks};

const BACK_OFF: Duration = Duration::from_millis(250);
const BACK_OFF_MAX: Duration = Duration::from_secs(10);
const GOOD_LIFE: Duration = Duration::from_secs(30);

/// By then the gateway has drained, so that a node has nothing to finish.
const TERM_GRACE: Duration = Duration::from_secs(4);

/// Last lines of a node's log that explain why it did not start.
const LAST_LINES: usize = 5;

/// A log that has grown past this is begun anew at the next start of its node.
const LOG_BYTES_MAX: u64 = 16 * 1024 * 1024;

/// A node never became ready.
pub(super) struct NotStarted {
    pub(super) node: String,
    pub(super) why: String,
}

/// The engine processes.
pub(super) struct Nodes {
    engine: PathBuf,
    token: String,
    logs: PathBuf,
    pub(super) progress: Progress,
    /// All of them were up once: from now on an end is a reason to start again.
    all_started: AtomicBool,
    /// Process ids by node, 0 while there is none.
    pids: Mutex<Vec<Arc<AtomicU32>>>,
}

impl Nodes {
    pub(super) fn new(
        engine: PathBuf,
        token: String,
        logs: PathBuf,
        progress: Progress,
    ) -> io::Result<Self> {
        crate::secrets::private_dir(&logs)?;
        Ok(Self {
            engine,
            token,
            logs,
            progress,
            all_started: AtomicBool::new(false),
            pids: Mutex::default(),
        })
    }

    /// Starts every node; resolves only if one of them cannot be started.
    pub(super) fn start(
        self: &Arc<Self>,
        plan: &Plan,
        tasks: &Tasks,
    ) -> impl Future<Output = NotStarted> + use<> {
        let (failed, mut failure) = mpsc::channel(1);
        for (number, node) in plan.nodes.iter().enumerate() {
            let pid = Arc::new(AtomicU32::new(0));
            self.pids
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .push(Arc::clone(&pid));
            let keeper = Keeper {
                nodes: Arc::clone(self),
                number,
                node: node.clone(),
                arguments: arguments(plan, node),
                pid,
                tasks: tasks.clone(),
                was_ready: Arc::default(),
                last_lines: Arc::default(),
            };
            let failed = failed.clone();
            tasks.spawn("node-process", async move {
                if let Err(not_started) = keeper.keep().await {
                    // Only the first one is told.
                    let _ = failed.try_send(not_started);
                }
            });
        }
        async move {
            match failure.recv().await {
                Some(not_started) => not_started,
                None => std::future::pending().await,
            }
        }
    }

    /// All nodes are up: none of them is given up from now on.
    pub(super) fn mark_started(&self) {
        self.all_started.store(true, Ordering::Release);
    }

    /// Process id of a node now.
    pub(super) fn pid(&self, number: usize) -> u32 {
        let pids = self.pids.lock().unwrap_or_else(PoisonError::into_inner);
        pids.get(number)
            .map_or(0, |pid| pid.load(Ordering::Relaxed))
    }
}

fn arguments(plan: &Plan, node: &NodePlan) -> Vec<String> {
    let threads = plan.threads.to_string();
    let (events, replay) = (
        format!("tcp://{}", node.events),
        format!("tcp://{}", node.replay),
    );
    let listen = node.http.to_string();
    let mut arguments: Vec<String> = [
        "serve",
        "--model",
        &plan.model_path.to_string_lossy(),
        "--model-id",
        &plan.model,
        "--listen",
        &listen,
        "--threads",
        &threads,
        "--events",
        &events,
        "--replay",
        &replay,
        "--exit-with-stdin",
        "--progress-json",
    ]
    .map(str::to_owned)
    .into();
    if node.role != Role::Mixed {
        arguments.extend(["--role", node.role.as_str()].map(str::to_owned));
    }
    arguments
}

/// Keeps one node alive.
struct Keeper {
    nodes: Arc<Nodes>,
    number: usize,
    node: NodePlan,
    arguments: Vec<String>,
    pid: Arc<AtomicU32>,
    tasks: Tasks,
    was_ready: Arc<AtomicBool>,
    last_lines: Arc<Mutex<VecDeque<String>>>,
}

impl Keeper {
    async fn keep(self) -> Result<(), NotStarted> {
        let drain = self.tasks.drain();
        let mut back_off = BACK_OFF;
        loop {
            let since = Instant::now();
            let ended = match self.life(&drain).await {
                Ok(Some(status)) => status.to_string(),
                Ok(None) => return Ok(()),
                Err(error) => format!("{}: {error}", self.nodes.engine.display()),
            };
            let started = self.nodes.all_started.load(Ordering::Acquire);
            if !started && !self.was_ready.load(Ordering::Acquire) {
                return Err(self.not_started(&ended));
            }
            if since.elapsed() >= GOOD_LIFE {
                back_off = BACK_OFF;
            }
            tracing::warn!(
                node = self.node.id,
                ended,
                restart_in_ms = u64::try_from(back_off.as_millis()).unwrap_or(u64::MAX),
                "a node process ended"
            );
            tokio::select! {
                () = tokio::time::sleep(back_off) => {}
                () = drain.reached(Phase::Stopping) => return Ok(()),
            }
            back_off = (back_off * 2).min(BACK_OFF_MAX);
        }
    }

    /// One process from start to end; `None` if it was stopped on purpose.
    async fn life(&self, drain: &Drain) -> io::Result<Option<ExitStatus>> {
        let log = Arc::new(Mutex::new(self.open_log()?));
        let mut child = Command::new(&self.nodes.engine)
            .args(&self.arguments)
            .env("HOMING_NODE_TOKEN", &self.nodes.token)
            .env("NO_COLOR", "1")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .process_group(0)
            .kill_on_drop(true)
            .spawn()?;
        let pid = child.id().unwrap_or(0);
        self.pid.store(pid, Ordering::Relaxed);
        tracing::info!(node = self.node.id, pid, "node process starts");
        // Held open for as long as this process lives: its end is the node's end.
        let stdin = child.stdin.take();
        let out = child
            .stdout
            .take()
            .map(|out| self.follow(out, Arc::clone(&log)));
        let err = child.stderr.take().map(|err| self.follow(err, log));
        let status = tokio::select! {
            status = child.wait() => Some(status?),
            () = drain.reached(Phase::Stopping) => {
                stop(&mut child, pid).await?;
                None
            }
        };
        drop(stdin);
        self.pid.store(0, Ordering::Relaxed);
        // The last lines explain the end; the pipes are closed with the process.
        for reader in [out, err].into_iter().flatten() {
            let _ = tokio::time::timeout(Duration::from_secs(1), reader).await;
        }
        Ok(status)
    }

    fn open_log(&self) -> io::Result<File> {
        let path = self.nodes.logs.join(format!("{}.log", self.node.id));
        let too_long = path
            .metadata()
            .is_ok_and(|metadata| metadata.len() > LOG_BYTES_MAX);
        OpenOptions::new()
            .append(!too_long)
            .write(true)
            .create(true)
            .truncate(too_long)
            .mode(0o600)
            .open(path)
    }

    /// Takes the lines of one of the process's outputs.
    fn follow(
        &self,
        output: impl AsyncRead + Unpin + Send + 'static,
        log: Arc<Mutex<File>>,
    ) -> tokio::task::JoinHandle<()> {
        let (nodes, number) = (Arc::clone(&self.nodes), self.number);
        let (was_ready, last_lines) = (Arc::clone(&self.was_ready), Arc::clone(&self.last_lines));
        self.tasks.spawn("node-output", async move {
            let mut lines = BufReader::new(output).split(b'\n');
            while let Ok(Some(line)) = lines.next_segment().await {
                match serde_json::from_slice(&line) {
                    Ok(Said::Progress { progress }) => {
                        nodes.progress.set(number, progress);
                        continue;
                    }
                    Ok(Said::Ready { .. }) => {
                        nodes.progress.set(number, 1.0);
                        was_ready.store(true, Ordering::Release);
                    }
                    Err(_) => {}
                }
                let mut last = last_lines.lock().unwrap_or_else(PoisonError::into_inner);
                if last.len() == LAST_LINES {
                    last.pop_front();
                }
                last.push_back(String::from_utf8_lossy(&line).into_owned());
                drop(last);
                let mut log = log.lock().unwrap_or_else(PoisonError::into_inner);
                // A full disk takes the log first, and only the log.
                let _ = log.write_all(&[&line[..], b"\n"].concat());
            }
        })
    }

    fn not_started(&self, ended: &str) -> NotStarted {
        let last = self
            .last_lines
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let said = last
            .iter()
            .map(|line| format!("\n  {line}"))
            .collect::<String>();
        NotStarted {
            node: self.node.id.clone(),
            why: format!("{ended}{said}"),
        }
    }
}

/// Lines of the engine that mean something here.
#[derive(Deserialize)]
#[serde(untagged)]
enum Said {
    Progress {
        progress: f64,
    },
    Ready {
        #[serde(rename = "listening")]
        _listening: String,
    },
}

async fn stop(child: &mut Child, pid: u32) -> io::Result<()> {
    let target = i32::try_from(pid).ok().and_then(Pid::from_raw);
    if let Some(target) = target {
        // One that is gone already needs no signal.
        let _ = kill_process(target, Signal::TERM);
    }
    match tokio::time::timeout(TERM_GRACE, child.wait()).await {
        Ok(status) => status.map(|_| ()),
        Err(_) => child.kill().await,
    }
}
