//! Why can a node not start? One line for whoever started it.

use std::net::SocketAddr;
use std::path::PathBuf;

use zeromq::ZmqError;

use super::size::PoolSizeError;
use crate::hub::HubError;
use crate::kv::store::disk::DiskError;
use crate::model::ModelError;

/// Why a node could not start, or ended.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The model cannot be brought from the hub.
    #[error(transparent)]
    Hub(#[from] HubError),
    /// The model file cannot be served.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The model's tokenizer or template cannot be used.
    #[error("{path}: {source}")]
    Prompt {
        /// The model file.
        path: PathBuf,
        /// What is wrong with it.
        source: prompt::LoadError,
    },
    /// The tokenizer names tokens that the model does not have.
    #[error("{path}: the tokenizer has {tokens} tokens, the model only {vocab}")]
    Vocabulary {
        /// The model file.
        path: PathBuf,
        /// Tokens of the tokenizer.
        tokens: usize,
        /// Rows of the model's embedding.
        vocab: usize,
    },
    /// The KV pool would be too small or too large.
    #[error(transparent)]
    Pool(#[from] PoolSizeError),
    /// The disk tier cannot be used.
    #[error(transparent)]
    Disk(#[from] DiskError),
    /// The shared tier cannot be used.
    #[error("cannot start the shared KV tier: {0}")]
    Shared(std::io::Error),
    /// An address is taken or not ours.
    #[error("cannot listen at {address}: {source}")]
    Listen {
        /// The address.
        address: SocketAddr,
        /// What the operating system said.
        source: std::io::Error,
    },
    /// A ZMQ endpoint is taken or not ours.
    #[error("cannot bind the KV events' endpoint {endpoint}: {source}")]
    Endpoint {
        /// The endpoint.
        endpoint: String,
        /// What ZMQ said.
        source: ZmqError,
    },
    /// A thread, a signal handler or the like.
    #[error("{what}: {source}")]
    System {
        /// What was tried.
        what: &'static str,
        /// What the operating system said.
        source: std::io::Error,
    },
    /// The loading thread panicked.
    #[error("loading the model panicked; the file is broken in a way that was not foreseen")]
    LoadPanicked,
    /// The engine's thread panicked.
    #[error("the engine's thread has ended unexpectedly; see the log above")]
    EngineEnded,
}
