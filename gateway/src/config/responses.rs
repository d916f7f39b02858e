//! How long and how much is kept of what tenants ask to be stored?

use std::time::Duration;

use serde::Deserialize;

use super::file::value;
use super::{ConfigError, ResponsesConfig};

/// `[responses]` in the file.
#[derive(Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct ResponsesFile {
    ttl_s: u64,
    rows_per_tenant: u64,
    bytes_per_tenant: u64,
}

impl Default for ResponsesFile {
    fn default() -> Self {
        Self {
            // OpenAI keeps responses for 30 days.
            ttl_s: 30 * 86_400,
            // A thousand agent sessions of a hundred turns.
            rows_per_tenant: 100_000,
            // With some 10 KB a turn, about as much as the rows; a disk has room for many tenants.
            bytes_per_tenant: 1 << 30,
        }
    }
}

impl ResponsesFile {
    /// Checks every value.
    pub(super) fn check(self) -> Result<ResponsesConfig, ConfigError> {
        let Self {
            ttl_s,
            rows_per_tenant,
            bytes_per_tenant,
        } = self;
        if !(1..=315_360_000).contains(&ttl_s) {
            let allowed = "1 second to 315,360,000 (ten years)";
            return Err(value("responses.ttl_s", ttl_s, allowed));
        }
        if !(1..=1_000_000_000).contains(&rows_per_tenant) {
            let allowed = "1 to 1,000,000,000";
            return Err(value("responses.rows_per_tenant", rows_per_tenant, allowed));
        }
        if !(1 << 20..=1 << 50).contains(&bytes_per_tenant) {
            let allowed = "1 MiB to 1 PiB";
            return Err(value(
                "responses.bytes_per_tenant",
                bytes_per_tenant,
                allowed,
            ));
        }
        Ok(ResponsesConfig {
            ttl: Duration::from_secs(ttl_s),
            rows_per_tenant,
            bytes_per_tenant,
        })
    }
}
