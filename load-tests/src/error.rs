//! What can go wrong before or outside a request, and what should the user do?
//!
//! A failed request is no error of the program: it is counted in the report by its
//! [`crate::chat::FailureKind`]. This type is for what ends a whole run.

use std::path::PathBuf;

/// Why a run could not be carried out.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// The address given on the command line.
    #[error("--url {url}: {reason}")]
    Url {
        /// As given.
        url: String,
        /// What is wrong with it and what to write instead.
        reason: String,
    },
    /// A flag whose value makes no sense.
    #[error("{flag}: {reason}")]
    Flag {
        /// The flag's name.
        flag: &'static str,
        /// What is allowed.
        reason: String,
    },
    /// A file that could not be read or written.
    #[error("{}: {source}", path.display())]
    File {
        /// Its path.
        path: PathBuf,
        /// The system's answer.
        source: std::io::Error,
    },
    /// A program that a bench compares did not start or went away.
    #[error("{program}: {reason}")]
    Program {
        /// Which one.
        program: String,
        /// What happened, with the end of its output where there is any.
        reason: String,
    },
    /// The machine refused a socket, a thread or a signal.
    #[error("{doing}: {source}")]
    System {
        /// What was being done.
        doing: &'static str,
        /// The system's answer.
        source: std::io::Error,
    },
    /// A signal ended the run early.
    #[error("interrupted")]
    Interrupted,
    /// Every request of the run failed, so there is nothing to report.
    #[error("all {requests} requests failed; the first with {first}")]
    AllFailed {
        /// How many were sent.
        requests: usize,
        /// The first failure.
        first: String,
    },
}

impl LoadError {
    /// Wraps the system's answer about a file.
    pub fn file(path: impl Into<PathBuf>) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.into();
        move |source| Self::File { path, source }
    }

    /// Wraps the system's answer about anything else.
    pub fn system(doing: &'static str) -> impl FnOnce(std::io::Error) -> Self {
        move |source| Self::System { doing, source }
    }

    /// A program that a bench or a test depends on.
    pub fn program(program: impl Into<String>, reason: impl Into<String>) -> Self {
        Self::Program {
            program: program.into(),
            reason: reason.into(),
        }
    }
}
