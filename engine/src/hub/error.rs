//! Why could a model not be fetched? For whoever named it: what was asked, what came back, what to do.

use std::io;
use std::path::{Path, PathBuf};

/// Why a model could not be brought from the hub.
#[derive(Debug, thiserror::Error)]
pub enum HubError {
    /// No answer: no network, no such host, or a connection that breaks again and again.
    #[error("cannot reach {url}: {why}; check the network, or HF_ENDPOINT if a mirror is used")]
    Network {
        /// What was asked for.
        url: String,
        /// What happened.
        why: String,
    },
    /// 401 or 403.
    #[error(
        "the hub refuses {what} ({status}{said}): if it is private or gated, accept its terms at {page} and set \
         HF_TOKEN to a token that may read it; if it is not, check the name"
    )]
    Refused {
        /// Which model or file.
        what: String,
        /// The status.
        status: u16,
        /// The hub's own words, with a blank before them.
        said: String,
        /// Its page.
        page: String,
    },
    /// 404.
    #[error("the hub has no {what}{said}; check repository, file and revision")]
    Missing {
        /// What was asked for.
        what: String,
        /// The hub's own words, with a blank before them.
        said: String,
    },
    /// 429, 5xx, or anything else that is no answer.
    #[error("{url} answers {status}{said}{}", if *.status == 429 { "; try again later, or set HF_TOKEN: signed-in users may ask more often" } else { "; try again later" })]
    Status {
        /// What was asked for.
        url: String,
        /// The status.
        status: u16,
        /// The server's own words, with a blank before them.
        said: String,
    },
    /// An answer that makes no sense.
    #[error("{url} answers what the hub would not: {why}; check HF_ENDPOINT")]
    Answer {
        /// What was asked for.
        url: String,
        /// What is wrong with it.
        why: String,
    },
    /// Nothing in the repository can be served, or too much.
    #[error("{reference}: {why}")]
    Choice {
        /// The model.
        reference: String,
        /// What there is, and what to name.
        why: String,
    },
    /// The repository's own files contradict each other.
    #[error("{reference}: {source}")]
    Checkpoint {
        /// The model.
        reference: String,
        /// What is wrong.
        source: prompt::checkpoint::CheckpointError,
    },
    /// A file that is not what the hub says it is, twice.
    #[error(
        "{file} has the checksum {found}, the hub says {expected}: something on the way changes it; \
         nothing was kept"
    )]
    Checksum {
        /// The file in the repository.
        file: String,
        /// What the hub says.
        expected: String,
        /// What came.
        found: String,
    },
    /// Not enough room.
    #[error(
        "{folder} has room for {available} bytes, and {needed} more are needed: free some, or name another \
         folder in HF_HUB_CACHE; what is there already is kept"
    )]
    Space {
        /// The cache.
        folder: PathBuf,
        /// What is missing of the model.
        needed: u64,
        /// What there is.
        available: u64,
    },
    /// The operating system refused.
    #[error("{path}: {source}{}", advice(source))]
    Io {
        /// Where.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// Not whole in the cache, and nothing may be fetched.
    #[error("{reference} is not whole in {cache}, and HF_HUB_OFFLINE forbids to fetch it")]
    Offline {
        /// The model.
        reference: String,
        /// The cache.
        cache: PathBuf,
    },
}

impl HubError {
    pub(super) fn io(path: &Path) -> impl FnOnce(io::Error) -> HubError {
        let path = path.to_owned();
        move |source| HubError::Io { path, source }
    }

    pub(super) fn answer(url: &str, why: impl Into<String>) -> Self {
        Self::Answer {
            url: url.to_owned(),
            why: why.into(),
        }
    }
}

fn advice(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            "; free some room and start again: what has come is kept, and the rest follows"
        }
        io::ErrorKind::PermissionDenied
        | io::ErrorKind::ReadOnlyFilesystem
        | io::ErrorKind::NotADirectory
        | io::ErrorKind::NotFound => "; name a folder that can be written in HF_HUB_CACHE",
        _ => "",
    }
}
