//! What can be said of the store that nodes share?

use std::path::PathBuf;

use clap::Args;

use super::{ConfigError, parse_size};
use crate::kv::store::shared::mooncake::MooncakeConfig;
use crate::server::auth::NodeToken;

#[derive(Debug, Args)]
pub(super) struct SharedArgs {
    /// Store that nodes share for KV blocks that host memory has no room for: mooncake://HOST:PORT of a
    /// Mooncake master. Needs --kv-host-memory and a node token, and a private network; see
    /// docs/kv-tiers.md.
    #[arg(long, value_name = "URL")]
    kv_shared: Option<String>,
    /// Memory that this node gives to that store; 0 for none.
    #[arg(long, value_name = "SIZE", default_value = "1GiB", value_parser = parse_size)]
    kv_shared_memory: u64,
    /// Name or address under which other nodes reach that memory; the address from which the master is
    /// reached if not given.
    #[arg(long, value_name = "HOST", requires = "kv_shared")]
    kv_shared_host: Option<String>,
    /// Move blocks by RDMA over this device instead of TCP.
    #[arg(long, value_name = "DEVICE", requires = "kv_shared")]
    kv_shared_rdma: Option<String>,
    /// Python that has the store's package; its client runs there, in a process of its own.
    #[arg(long, value_name = "PATH", default_value = "python3")]
    kv_shared_python: PathBuf,
}

impl SharedArgs {
    /// What is asked for, beside so many bytes of host memory.
    pub(super) fn config(
        self,
        host_bytes: u64,
        token: Option<&NodeToken>,
    ) -> Result<Option<MooncakeConfig>, ConfigError> {
        let Some(url) = self.kv_shared else {
            return Ok(None);
        };
        let Some(master) = master(&url) else {
            return Err(ConfigError::Value {
                flag: "kv-shared",
                found: url,
                allowed: "mooncake://HOST:PORT, such as mooncake://10.0.0.5:50051".to_owned(),
            });
        };
        if host_bytes == 0 {
            return Err(ConfigError::Value {
                flag: "kv-host-memory",
                found: "0".to_owned(),
                allowed: "above 0 beside --kv-shared: blocks pass through host memory".to_owned(),
            });
        }
        if token.is_none() {
            return Err(ConfigError::SharedToken);
        }
        let named = [
            ("kv-shared-host", &self.kv_shared_host),
            ("kv-shared-rdma", &self.kv_shared_rdma),
        ];
        for (flag, name) in named {
            let name = name.as_deref().unwrap_or("-");
            if name.is_empty() || name.contains(|c: char| c.is_whitespace() || c.is_control()) {
                return Err(ConfigError::Value {
                    flag,
                    found: format!("{name:?}"),
                    allowed: "a name without white space".to_owned(),
                });
            }
        }
        Ok(Some(MooncakeConfig {
            master,
            host: self.kv_shared_host,
            python: self.kv_shared_python,
            segment_bytes: self.kv_shared_memory,
            device: self.kv_shared_rdma,
        }))
    }
}

/// `HOST:PORT` of a store's URL.
fn master(url: &str) -> Option<String> {
    let address = url.strip_prefix("mooncake://")?;
    let (host, port) = address.rsplit_once(':')?;
    let named = !host.is_empty() && !host.contains(|c: char| c.is_whitespace() || c == '/');
    let port: u16 = port.parse().ok()?;
    (named && port > 0).then(|| address.to_owned())
}
