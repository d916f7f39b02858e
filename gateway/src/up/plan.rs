//! Which nodes will there be, at which addresses, with how many threads?
//!
//! Decided once before anything starts, because a node that dies is restarted at the same address.
//! Ports are picked below the range from which the system takes ports for outgoing connections,
//! so that nothing takes a port while its node is away.

use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::ops::Range;
use std::path::{Path, PathBuf};

use policies::view::Role;
use serde_json::json;

use crate::cli::{Failure, UpArgs};
use crate::config::Config;

use super::model::Model;

/// Linux hands 32768 and up to outgoing connections; services with a name are mostly below 20000.
const PORTS: Range<u16> = 20_000..32_000;
const PORT_TRIES: usize = 1000;
/// Nodes where nothing is said: two, so that a session's affinity shows.
const NODES_DEFAULT: u16 = 2;

/// Prices for a model that costs nothing to try, so that a first bill shows what a cache hit saves:
/// $0.60 / $3.00 per million tokens in and out, cached input at a sixth, as published by hosts of
/// models that are far larger. An operator's own prices are in the file of `homing gateway`.
const PRICE_VERSION: &str = "up-1";
const INPUT_NANO_USD_PER_MILLION: i64 = 600_000_000;
const CACHED_INPUT_NANO_USD_PER_MILLION: i64 = 100_000_000;
const OUTPUT_NANO_USD_PER_MILLION: i64 = 3_000_000_000;

/// What `homing up` is about to start.
pub(super) struct Plan {
    pub(super) model_path: PathBuf,
    pub(super) model: String,
    pub(super) threads: usize,
    pub(super) nodes: Vec<NodePlan>,
    pub(super) aliases: Vec<String>,
    listen: SocketAddr,
    admin: SocketAddr,
    data: PathBuf,
}

/// One node to start.
#[derive(Clone)]
pub(super) struct NodePlan {
    pub(super) id: String,
    pub(super) role: Role,
    pub(super) http: SocketAddr,
    pub(super) events: SocketAddr,
    pub(super) replay: SocketAddr,
}

impl Plan {
    pub(super) fn make(args: &UpArgs, model: Model) -> Result<Self, Failure> {
        let mixed = args.nodes.unwrap_or(match args.prefill {
            None => NODES_DEFAULT,
            Some(_) => 0,
        });
        let counts = [
            ("node", Role::Mixed, mixed),
            ("prefill", Role::Prefill, args.prefill.unwrap_or(0)),
            ("decode", Role::Decode, args.decode.unwrap_or(0)),
        ];
        let all: usize = counts.iter().map(|(.., count)| usize::from(*count)).sum();
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let threads = args
            .threads_per_node
            .map_or_else(|| (cores / all.max(1)).max(1), usize::from);
        // Held until all are picked, so that no port is picked twice.
        let mut held = Vec::new();
        let mut nodes = Vec::new();
        for (name, role, count) in counts {
            for number in 0..count {
                nodes.push(NodePlan {
                    id: format!("{name}-{number}"),
                    role,
                    http: free_port(&mut held)?,
                    events: free_port(&mut held)?,
                    replay: free_port(&mut held)?,
                });
            }
        }
        Ok(Self {
            model_path: model.path,
            model: model.id,
            threads,
            nodes,
            aliases: args.alias.clone(),
            listen: args.listen,
            admin: args.admin,
            data: args.data.clone(),
        })
    }

    /// The gateway's configuration, through the one path every configuration takes.
    pub(super) fn config(&self) -> Result<Config, Failure> {
        let nodes = self.nodes.iter().map(|node| {
            json!({
                "id": node.id,
                "role": node.role.as_str(),
                "url": format!("http://{}", node.http),
                "events": format!("tcp://{}", node.events),
                "replay": format!("tcp://{}", node.replay),
            })
        });
        let alias = |name| json!({ "name": name, "model": self.model });
        let file = json!({
            "listen": self.listen.to_string(),
            "admin": self.admin.to_string(),
            "data": self.data,
            "models": [{ "id": self.model, "gguf": self.model_path }],
            "aliases": self.aliases.iter().map(alias).collect::<Vec<_>>(),
            "nodes": nodes.collect::<Vec<_>>(),
            "price_version": PRICE_VERSION,
            "prices": { &self.model: {
                "input_nano_usd_per_million": INPUT_NANO_USD_PER_MILLION,
                "cached_input_nano_usd_per_million": CACHED_INPUT_NANO_USD_PER_MILLION,
                "output_nano_usd_per_million": OUTPUT_NANO_USD_PER_MILLION,
            }},
        });
        Ok(Config::parse(
            &toml::to_string(&file)?,
            Path::new("homing-up.toml"),
        )?)
    }
}

fn free_port(held: &mut Vec<TcpListener>) -> Result<SocketAddr, Failure> {
    for _ in 0..PORT_TRIES {
        let port = rand::random_range(PORTS);
        if let Ok(listener) = TcpListener::bind((Ipv4Addr::LOCALHOST, port)) {
            let addr = listener.local_addr()?;
            held.push(listener);
            return Ok(addr);
        }
    }
    Err("no free port on 127.0.0.1 between 20000 and 32000 for an engine node".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Would catch a plan whose configuration is refused, or a model that is served for nothing.
    #[test]
    fn the_plan_is_a_valid_configuration() {
        let dir = tempfile::tempdir().unwrap();
        let model = dir.path().join("My \"model\".Q4_1.gguf");
        std::fs::write(&model, "").unwrap();
        let args = UpArgs {
            model: model.clone(),
            alias: vec!["claude-*".to_owned()],
            nodes: Some(3),
            prefill: None,
            decode: None,
            threads_per_node: None,
            listen: ([127, 0, 0, 1], 0).into(),
            admin: ([127, 0, 0, 1], 0).into(),
            data: dir.path().join("data"),
            json: true,
        };
        let named = || Model::named(&args.model, || unreachable!()).unwrap();
        let plan = Plan::make(&args, named()).unwrap();
        assert!(plan.threads >= 1);
        let config = plan.config().unwrap();
        assert_eq!(config.nodes.len(), 3);
        assert_eq!(config.aliases[0].model, plan.model);
        let rates = config.price_book().models["My \"model\".Q4_1"];
        assert!(rates.cached_input > 0 && rates.cached_input < rates.input);
        let apart = UpArgs {
            nodes: None,
            prefill: Some(1),
            decode: Some(2),
            ..args.clone()
        };
        let config = Plan::make(&apart, named()).unwrap().config().unwrap();
        let roles = config.nodes.iter().map(|node| node.duty.role.as_str());
        assert_eq!(roles.collect::<Vec<_>>(), ["prefill", "decode", "decode"]);
    }
}
