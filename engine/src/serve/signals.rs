//! What ends this process from outside?

use std::future::Future;
use std::io::Read;

use tokio::signal::unix::{Signal, SignalKind, signal};

use super::ServeError;

/// SIGTERM and SIGINT, which mean the same here.
pub(super) struct Signals {
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    pub(super) fn new() -> Result<Self, ServeError> {
        let install = |kind| {
            signal(kind).map_err(|source| ServeError::System {
                what: "cannot handle signals",
                source,
            })
        };
        Ok(Self {
            terminate: install(SignalKind::terminate())?,
            interrupt: install(SignalKind::interrupt())?,
        })
    }

    /// Waits for one of them.
    pub(super) async fn next(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }

    /// The future's value, or none if a signal came first.
    pub(super) async fn unless_ended<T>(&mut self, future: impl Future<Output = T>) -> Option<T> {
        tokio::select! {
            value = future => Some(value),
            () = self.next() => None,
        }
    }
}

/// Ends the process as soon as stdin does.
pub(super) fn exit_with_stdin() -> Result<(), ServeError> {
    let watch = || {
        let mut stdin = std::io::stdin().lock();
        let mut buffer = [0; 4096];
        while matches!(stdin.read(&mut buffer), Ok(1..)) {}
        #[expect(
            clippy::disallowed_methods,
            reason = "the parent was killed: nobody is left to drain for, and nothing is on disk"
        )]
        std::process::exit(0);
    };
    std::thread::Builder::new()
        .name("stdin".into())
        .spawn(watch)
        .map(drop)
        .map_err(|source| ServeError::System {
            what: "cannot watch stdin",
            source,
        })
}
