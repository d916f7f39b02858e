//! Which nodes are there, and what does each of them do?
//!
//! Where prompts and answers are computed apart, the roles have to fit together: a node that
//! computes prompts needs one that takes them over by the same connector, and the other way round.
//! Which model a node serves is not known here, so that pools are checked over all models together;
//! a model that lacks one of them is served without (`policies::pick`).

use std::collections::HashSet;
use std::net::{SocketAddr, ToSocketAddrs};

use cache_index::ids::NodeId;
use policies::view::{FetchCosts, Role};
use serde::Deserialize;

use super::disaggregation::DisaggregationConfig;
use super::file::value;
use super::{Bootstrap, ConfigError, ConnectorKind, Duty, NodeConfig};

/// One node in the file.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct NodeFile {
    id: String,
    url: String,
    events: Option<String>,
    replay: Option<String>,
    region: Option<String>,
    role: Option<RoleFile>,
    connector: Option<ConnectorFile>,
    bootstrap: Option<String>,
    kv_fetch_ms_per_block: Option<FetchFile>,
}

/// What fetching a block of 16 tokens costs, in milliseconds, by tier.
#[derive(Clone, Copy, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct FetchFile {
    host: f64,
    disk: f64,
    shared: f64,
}

#[derive(Clone, Copy, Deserialize)]
#[serde(rename_all = "lowercase")]
enum RoleFile {
    Mixed,
    Prefill,
    Decode,
}

#[derive(Clone, Copy, Deserialize)]
#[serde(rename_all = "lowercase")]
enum ConnectorFile {
    Homing,
    Nixl,
    Mooncake,
    Sglang,
}

/// Checks all nodes, each by itself and their roles together.
pub(super) fn checked(
    files: Vec<NodeFile>,
    disaggregation: &DisaggregationConfig,
) -> Result<Vec<NodeConfig>, ConfigError> {
    let files = files.into_iter().enumerate();
    let nodes = files.map(|(at, node)| node.check(at, disaggregation));
    let nodes = nodes.collect::<Result<Vec<_>, _>>()?;
    let mut names = HashSet::new();
    if let Some(twice) = nodes.iter().find(|node| !names.insert(node.id.clone())) {
        return Err(value("nodes.id", &twice.id, "each name once"));
    }
    for (at, node) in nodes.iter().enumerate() {
        has_partner(at, node, &nodes)?;
    }
    Ok(nodes)
}

/// A node with a part of the work needs another one with the rest.
fn has_partner(at: usize, node: &NodeConfig, nodes: &[NodeConfig]) -> Result<(), ConfigError> {
    let other = match node.duty.role {
        Role::Mixed => return Ok(()),
        Role::Prefill => Role::Decode,
        Role::Decode => Role::Prefill,
    };
    let connector = node.duty.connector;
    let fits = |node: &NodeConfig| node.duty.role == other && node.duty.connector == connector;
    if nodes.iter().any(fits) {
        return Ok(());
    }
    let allowed = format!(
        "{} only beside a node with the role {} and the connector {}",
        node.duty.role.as_str(),
        other.as_str(),
        connector.as_str()
    );
    Err(value(
        &format!("nodes[{at}].role"),
        node.duty.role.as_str(),
        allowed,
    ))
}

impl NodeFile {
    fn check(
        self,
        at: usize,
        disaggregation: &DisaggregationConfig,
    ) -> Result<NodeConfig, ConfigError> {
        let Self {
            id,
            url,
            events,
            replay,
            region,
            role,
            connector,
            bootstrap,
            kv_fetch_ms_per_block,
        } = self;
        // The name travels in a response header.
        if id.is_empty() || id.len() > 128 || !id.bytes().all(|byte| byte.is_ascii_graphic()) {
            return Err(value(
                &format!("nodes[{at}].id"),
                id,
                "1 to 128 visible ASCII characters",
            ));
        }
        let key = format!("nodes[{at}].url");
        let allowed = "http://host:port, a host that resolves, no path";
        let host = url
            .strip_prefix("http://")
            .map(|rest| rest.trim_end_matches('/'))
            .filter(|host| !host.contains('/'))
            .ok_or_else(|| value(&key, &url, allowed))?;
        let addr = resolved(host).ok_or_else(|| value(&key, &url, allowed))?;
        for (name, endpoint) in [("events", &events), ("replay", &replay)] {
            if endpoint
                .as_ref()
                .is_some_and(|endpoint| !endpoint.starts_with("tcp://"))
            {
                let shown = endpoint.as_deref().unwrap_or_default();
                return Err(value(
                    &format!("nodes[{at}].{name}"),
                    shown,
                    "tcp://host:port",
                ));
            }
        }
        Ok(NodeConfig {
            id: NodeId::new(&id),
            addr,
            host: host.to_owned(),
            events,
            replay,
            region: region.unwrap_or_else(|| "local".to_owned()),
            duty: duty(at, (role, connector, bootstrap), disaggregation)?,
            fetch_ms_per_block: fetch_costs(at, kv_fetch_ms_per_block.unwrap_or_default())?,
        })
    }
}

fn fetch_costs(at: usize, file: FetchFile) -> Result<FetchCosts, ConfigError> {
    /// A block that takes longer is never fetched.
    const MS_MAX: f64 = 60_000.0;
    let FetchFile { host, disk, shared } = file;
    for (tier, ms) in [("host", host), ("disk", disk), ("shared", shared)] {
        if !(0.0..=MS_MAX).contains(&ms) {
            let key = format!("nodes[{at}].kv_fetch_ms_per_block.{tier}");
            return Err(value(&key, ms, "0 (not counted on) to 60,000 milliseconds"));
        }
    }
    Ok(FetchCosts {
        host_ms: host,
        disk_ms: disk,
        shared_ms: shared,
    })
}

/// What a node does, and what its connector needs for it.
fn duty(
    at: usize,
    (role, connector, bootstrap): (Option<RoleFile>, Option<ConnectorFile>, Option<String>),
    disaggregation: &DisaggregationConfig,
) -> Result<Duty, ConfigError> {
    let role = match role {
        None | Some(RoleFile::Mixed) => Role::Mixed,
        Some(RoleFile::Prefill) => Role::Prefill,
        Some(RoleFile::Decode) => Role::Decode,
    };
    let named = connector;
    let connector = match named {
        None | Some(ConnectorFile::Homing) => ConnectorKind::Homing,
        Some(ConnectorFile::Nixl) => ConnectorKind::Nixl,
        Some(ConnectorFile::Mooncake) => ConnectorKind::Mooncake,
        Some(ConnectorFile::Sglang) => ConnectorKind::Sglang,
    };
    if named.is_some() && role == Role::Mixed {
        let key = format!("nodes[{at}].connector");
        let allowed = "only with role = \"prefill\" or role = \"decode\"";
        return Err(value(&key, connector.as_str(), allowed));
    }
    let key = format!("nodes[{at}].bootstrap");
    let needed = role == Role::Prefill && connector.needs_bootstrap();
    let bootstrap = match (needed, bootstrap) {
        (true, Some(text)) => Some(bootstrap_of(&key, &text)?),
        (true, None) => {
            let allowed = format!(
                "host:port of its bootstrap server, with connector = \"{}\"",
                connector.as_str()
            );
            return Err(value(&key, "missing", allowed));
        }
        (false, None) => None,
        (false, Some(text)) => {
            let allowed = "only with role = \"prefill\" and connector = \"mooncake\" or \"sglang\"";
            return Err(value(&key, text, allowed));
        }
    };
    Ok(Duty {
        role,
        connector,
        bootstrap,
        kv_bytes_per_token: disaggregation.kv_bytes_per_token,
        transfer_bytes_per_s: disaggregation.transfer_bytes_per_s,
    })
}

fn bootstrap_of(key: &str, text: &str) -> Result<Bootstrap, ConfigError> {
    let parts = text.rsplit_once(':').and_then(|(host, port)| {
        let port: u16 = port.parse().ok().filter(|port| *port > 0)?;
        (!host.is_empty() && !host.contains('/')).then_some((host, port))
    });
    let allowed = "host:port, a host that resolves, no path";
    let (host, port) = parts.ok_or_else(|| value(key, text, allowed))?;
    Ok(Bootstrap {
        host: host.to_owned(),
        port,
        addr: resolved(text).ok_or_else(|| value(key, text, allowed))?,
    })
}

fn resolved(host: &str) -> Option<SocketAddr> {
    host.to_socket_addrs().ok()?.next()
}
