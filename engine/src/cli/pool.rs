//! What can be said of the KV pool?

use clap::{Args, ValueEnum};

use super::{ConfigError, Ops, parse_size};
use crate::model::OpsKind;

#[derive(Debug, Args)]
pub(super) struct PoolArgs {
    /// Memory of the KV pool: bytes, or with KiB, MiB, GiB.
    #[arg(long, value_name = "SIZE", default_value = "512MiB", value_parser = parse_size)]
    pub(super) kv_memory: u64,
    /// How the pool stores keys and values: f16, bf16 (coarser, with the range of f32) or int8 (1.8 times
    /// the tokens in the same memory; answers change a little). Nodes that hand KV to each other need the
    /// same.
    #[arg(long, value_enum, value_name = "FORMAT", default_value_t = KvFlag::F16)]
    kv_dtype: KvFlag,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum KvFlag {
    F16,
    Bf16,
    Int8,
}

impl PoolArgs {
    /// The ops that store so. The reference ones have a format of their own.
    pub(super) fn ops(&self, ops: Ops) -> Result<OpsKind, ConfigError> {
        let stored = match self.kv_dtype {
            KvFlag::F16 => OpsKind::Cpu,
            KvFlag::Bf16 => OpsKind::CpuBf16,
            KvFlag::Int8 => OpsKind::CpuInt8,
        };
        match (ops, self.kv_dtype) {
            (Ops::Cpu, _) => Ok(stored),
            (Ops::Reference, KvFlag::F16) => Ok(OpsKind::Reference),
            (Ops::Reference, KvFlag::Bf16 | KvFlag::Int8) => Err(ConfigError::Value {
                flag: "kv-dtype",
                found: stored.kv_dtype().as_str().to_owned(),
                allowed: "left away beside --ops reference, which stores f32".to_owned(),
            }),
        }
    }
}
