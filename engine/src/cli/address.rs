//! Addresses on the command line.

use std::net::{SocketAddr, ToSocketAddrs};

use super::ConfigError;

/// Where KV is given out.
pub(super) fn kv_listen(endpoint: &str) -> Result<SocketAddr, ConfigError> {
    let address = endpoint
        .strip_prefix("tcp://")
        .map(ToSocketAddrs::to_socket_addrs);
    let address = address.and_then(|addresses| addresses.ok()?.next());
    address.ok_or_else(|| ConfigError::Value {
        flag: "kv-listen",
        found: endpoint.to_owned(),
        allowed: "an address and port, such as tcp://10.0.0.5:8100".to_owned(),
    })
}

/// Where the API listens.
pub(super) fn resolve(listen: &str) -> Result<SocketAddr, ConfigError> {
    let address = listen
        .to_socket_addrs()
        .ok()
        .and_then(|mut addresses| addresses.next());
    address.ok_or_else(|| ConfigError::Value {
        flag: "listen",
        found: listen.to_owned(),
        allowed: "an address and port, such as 127.0.0.1:8000".to_owned(),
    })
}
