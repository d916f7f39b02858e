//! Why can the command line not be carried out?

use std::net::SocketAddr;
use std::path::PathBuf;

use super::TOKEN_ENV;

/// A flag with a value that cannot work.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The value is outside its range.
    #[error("--{flag} is {found}; it must be {allowed}")]
    Value {
        /// The flag.
        flag: &'static str,
        /// What was given.
        found: String,
        /// What would do.
        allowed: String,
    },
    /// The token file cannot be read.
    #[error("cannot read the node token from {path}: {source}")]
    TokenFile {
        /// The path as it was given.
        path: PathBuf,
        /// What the operating system said.
        source: std::io::Error,
    },
    /// A role that needs a token, and none.
    #[error(
        "--role {role} works together with other nodes, which must know each other by a node token: give \
         --node-token-file, or set {TOKEN_ENV}"
    )]
    RoleToken {
        /// The role.
        role: &'static str,
    },
    /// A shared store, and no token.
    #[error(
        "--kv-shared puts KV blocks where anybody on the network may write: nodes know their own by the node \
         token, so give --node-token-file, or set {TOKEN_ENV}"
    )]
    SharedToken,
    /// No token where one is demanded.
    #[error(
        "--listen {listen} reaches beyond this machine, so callers must present a node token: \
         give --node-token-file, set {TOKEN_ENV}, or listen at 127.0.0.1"
    )]
    TokenDemanded {
        /// The address.
        listen: SocketAddr,
    },
}
