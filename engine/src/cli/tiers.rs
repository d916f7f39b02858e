//! What can be said of the tiers below the pool that are a node's own?

use std::path::PathBuf;

use clap::{Args, ValueEnum};

use super::{ConfigError, DiskConfig, parse_size};
use crate::kv::layout::KvDtype;
use crate::kv::store::form::Form;

#[derive(Debug, Args)]
pub(super) struct TierArgs {
    /// Memory for KV blocks that the pool has no room for: they are copied back instead of computed
    /// again. 0 for none; see docs/kv-tiers.md.
    #[arg(long, value_name = "SIZE", default_value = "0", value_parser = parse_size)]
    pub(super) kv_host_memory: u64,
    /// Folder for KV blocks that host memory has no room for; it survives the node. Each node needs
    /// one of its own. Needs --kv-host-memory: blocks pass through it.
    #[arg(long, value_name = "DIR")]
    kv_disk: Option<PathBuf>,
    /// What that folder may take.
    #[arg(long, value_name = "SIZE", default_value = "16GiB", value_parser = parse_size)]
    kv_disk_size: u64,
    /// How blocks are kept in host memory and below: exact, or int8 in about half of the memory, which
    /// changes answers a little; see docs/kv-tiers.md.
    #[arg(long, value_enum, default_value_t = FormFlag::Exact)]
    kv_tier_form: FormFlag,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum FormFlag {
    Exact,
    Int8,
}

impl TierArgs {
    pub(super) fn disk(self) -> Result<Option<DiskConfig>, ConfigError> {
        let Some(dir) = self.kv_disk else {
            return Ok(None);
        };
        if self.kv_host_memory == 0 {
            return Err(ConfigError::Value {
                flag: "kv-host-memory",
                found: "0".to_owned(),
                allowed: "above 0 beside --kv-disk: blocks pass through host memory".to_owned(),
            });
        }
        let bytes = self.kv_disk_size;
        Ok(Some(DiskConfig { dir, bytes }))
    }

    /// How blocks of a pool in this format are kept.
    pub(super) fn form(&self, pool: KvDtype) -> Result<Form, ConfigError> {
        match (self.kv_tier_form, pool) {
            (FormFlag::Exact, _) => Ok(Form::Exact),
            (FormFlag::Int8, KvDtype::F16 | KvDtype::Bf16 | KvDtype::F32) => Ok(Form::Int8),
            (FormFlag::Int8, KvDtype::Int8) => Err(ConfigError::Value {
                flag: "kv-tier-form",
                found: "int8".to_owned(),
                allowed: "exact beside --kv-dtype int8: blocks are in 8 bits already".to_owned(),
            }),
        }
    }
}
