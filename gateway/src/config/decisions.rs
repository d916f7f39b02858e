//! How much is kept of why turns went where they went?

use serde::Deserialize;

use super::ConfigError;
use super::file::value;

/// `[decisions]` in the file.
#[derive(Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct DecisionsFile {
    keep_mib: u64,
}

impl Default for DecisionsFile {
    /// About a hundred thousand turns of long prompts.
    fn default() -> Self {
        Self { keep_mib: 256 }
    }
}

impl DecisionsFile {
    /// The bound in bytes; 0 keeps no log.
    pub(super) fn check(self) -> Result<u64, ConfigError> {
        if self.keep_mib > 1 << 20 {
            let allowed = "0 (no log) to 1,048,576 MiB";
            return Err(value("decisions.keep_mib", self.keep_mib, allowed));
        }
        Ok(self.keep_mib << 20)
    }
}
