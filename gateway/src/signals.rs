//! Who may tell the process to leave?
//!
//! SIGINT and SIGTERM, alike: the first begins the drain, the next one ends it.

use std::io;

use tokio::signal::unix::{Signal, SignalKind, signal};

/// The signals that end the process; taken over for as long as the process lives.
pub struct Signals {
    interrupt: Signal,
    terminate: Signal,
}

impl Signals {
    /// Takes both signals over; needs a runtime.
    pub fn new() -> io::Result<Self> {
        Ok(Self {
            interrupt: signal(SignalKind::interrupt())?,
            terminate: signal(SignalKind::terminate())?,
        })
    }

    /// Resolves with the next signal.
    pub async fn next(&mut self) {
        tokio::select! {
            _ = self.interrupt.recv() => {}
            _ = self.terminate.recv() => {}
        }
    }
}
