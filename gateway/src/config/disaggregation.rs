//! When are prompts and answers computed apart, and how long may each part take?

use std::time::Duration;

use serde::Deserialize;

use super::ConfigError;
use super::file::{seconds, value};

/// How turns are shared by two nodes.
#[derive(Debug, Clone, Copy)]
pub struct DisaggregationConfig {
    /// A prompt with fewer uncached tokens on the node that answers is computed there.
    pub uncached_tokens_min: u64,
    /// Weight of what a node's streams lose while a prompt is computed beside them.
    pub stall: f64,
    /// Longest wait for a prompt that another node computes.
    pub prefill_timeout: Duration,
    /// Longest wait from then to the first byte of a streamed answer.
    pub transfer_timeout: Duration,
    /// Size of one token's KV where nodes do not tell; 0 where the operator does not say either.
    pub kv_bytes_per_token: u64,
    /// How fast KV travels until it has been measured; 0 where the operator does not say.
    pub transfer_bytes_per_s: u64,
}

/// The same in the file.
#[derive(Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct DisaggregationFile {
    uncached_tokens_min: u64,
    stall: f64,
    prefill_timeout_s: f64,
    transfer_timeout_s: f64,
    kv_bytes_per_token: Option<u64>,
    transfer_bytes_per_s: Option<u64>,
}

impl Default for DisaggregationFile {
    fn default() -> Self {
        Self {
            uncached_tokens_min: policies::pick::Params::default().split_tokens_min,
            stall: policies::pick::Params::default().stall,
            // Half of what a node's answer may take: the rest is another node's chance.
            prefill_timeout_s: 300.0,
            // The time for which vLLM's NIXL connector keeps what was computed.
            transfer_timeout_s: 30.0,
            kv_bytes_per_token: None,
            transfer_bytes_per_s: None,
        }
    }
}

impl DisaggregationFile {
    pub(super) fn check(self) -> Result<DisaggregationConfig, ConfigError> {
        let Self {
            uncached_tokens_min,
            stall,
            prefill_timeout_s,
            transfer_timeout_s,
            kv_bytes_per_token,
            transfer_bytes_per_s,
        } = self;
        let checked = |key: &str, number: Option<u64>, most: u64| match number {
            None => Ok(0),
            Some(number) if (1..=most).contains(&number) => Ok(number),
            Some(number) => {
                let key = format!("disaggregation.{key}");
                Err(value(&key, number, format!("1 to {most}")))
            }
        };
        if !(0.0..=1000.0).contains(&stall) {
            return Err(value("disaggregation.stall", stall, "0 to 1000"));
        }
        let prefill = "disaggregation.prefill_timeout_s";
        let transfer = "disaggregation.transfer_timeout_s";
        Ok(DisaggregationConfig {
            uncached_tokens_min,
            stall,
            prefill_timeout: seconds(prefill, prefill_timeout_s)?,
            transfer_timeout: seconds(transfer, transfer_timeout_s)?,
            kv_bytes_per_token: checked("kv_bytes_per_token", kv_bytes_per_token, 1 << 30)?,
            transfer_bytes_per_s: checked("transfer_bytes_per_s", transfer_bytes_per_s, 1 << 50)?,
        })
    }
}
