//! What does the configuration file look like? The types serde fills, and their one conversion
//! into the checked [`Config`]. Conversions destructure without `..`, so that a new key does not
//! compile until someone decides what it means.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashSet};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Deserialize;

use super::aliases::{self, AliasFile};
use super::decisions::DecisionsFile;
use super::disaggregation::DisaggregationFile;
use super::nodes::{self, NodeFile};
use super::responses::ResponsesFile;
use super::sessions::{NormaliseFile, SessionsFile};
use super::{Config, ConfigError, Limits, ModelConfig, ModelPrice, PolicyConfig, Prices};

/// The file.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ConfigFile {
    listen: String,
    admin: Option<String>,
    data: PathBuf,
    #[serde(default)]
    models: Vec<ModelFile>,
    #[serde(default)]
    aliases: Vec<AliasFile>,
    #[serde(default)]
    nodes: Vec<NodeFile>,
    node_token_file: Option<PathBuf>,
    #[serde(default)]
    limits: LimitsFile,
    price_version: Option<String>,
    #[serde(default)]
    prices: BTreeMap<String, PriceFile>,
    #[serde(default)]
    policy: PolicyFile,
    #[serde(default)]
    disaggregation: DisaggregationFile,
    #[serde(default)]
    responses: ResponsesFile,
    #[serde(default)]
    decisions: DecisionsFile,
    #[serde(default)]
    sessions: SessionsFile,
    #[serde(default)]
    normalise: NormaliseFile,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ModelFile {
    id: String,
    gguf: Option<PathBuf>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct PriceFile {
    input_nano_usd_per_million: i64,
    cached_input_nano_usd_per_million: i64,
    output_nano_usd_per_million: i64,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, default)]
struct PolicyFile {
    b: f64,
    node_queue_s: f64,
    hold_wait_s: f64,
}

impl Default for PolicyFile {
    fn default() -> Self {
        let hold = policies::hold::Params::default();
        Self {
            b: policies::pick::Params::default().b,
            node_queue_s: hold.node_queue_ms / 1000.0,
            hold_wait_s: hold.wait_ms_max / 1000.0,
        }
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, default)]
struct LimitsFile {
    body_bytes_max: usize,
    header_bytes_max: usize,
    concurrency_per_tenant: usize,
    queue_per_tenant: usize,
    queue_wait_s: f64,
    client_timeout_s: f64,
    request_timeout_s: f64,
    drain_s: f64,
}

impl Default for LimitsFile {
    fn default() -> Self {
        Self {
            body_bytes_max: 32 << 20,
            // Agents send a few hundred bytes of headers; 64 KiB is also what one read buffer of
            // the server holds.
            header_bytes_max: 64 << 10,
            concurrency_per_tenant: 256,
            queue_per_tenant: 1024,
            queue_wait_s: 30.0,
            client_timeout_s: 30.0,
            // A long prompt on a slow CPU node may compute for minutes before its first byte.
            request_timeout_s: 600.0,
            drain_s: 30.0,
        }
    }
}

impl ConfigFile {
    /// Checks every value; `base` is what relative paths are relative to.
    pub(super) fn check(self, base: &Path) -> Result<Config, ConfigError> {
        let Self {
            listen,
            admin,
            data,
            models,
            aliases,
            nodes,
            node_token_file,
            limits,
            price_version,
            prices,
            policy,
            disaggregation,
            responses,
            decisions,
            sessions,
            normalise,
        } = self;
        let models = checked_models(models, base)?;
        let aliases = aliases::checked(aliases, &models)?;
        let prices = checked_prices(price_version, prices)?;
        aliases::unpriced(&aliases, &prices)?;
        let disaggregation = disaggregation.check()?;
        Ok(Config {
            listen: socket("listen", &listen)?,
            admin: admin.map(|admin| socket("admin", &admin)).transpose()?,
            data: base.join(data),
            models,
            aliases,
            nodes: nodes::checked(nodes, &disaggregation)?,
            node_token_file: node_token_file.map(|file| base.join(file)),
            limits: limits.check()?,
            prices,
            policy: policy.check()?,
            responses: responses.check()?,
            decisions_bytes_max: decisions.check()?,
            sessions: sessions.check()?,
            normalise: normalise.check()?,
            disaggregation,
        })
    }
}

pub(super) fn value(
    key: &str,
    value: impl ToString,
    allowed: impl Into<Cow<'static, str>>,
) -> ConfigError {
    ConfigError::Value {
        key: key.to_owned(),
        value: value.to_string(),
        allowed: allowed.into(),
    }
}

fn socket(key: &str, text: &str) -> Result<SocketAddr, ConfigError> {
    text.parse()
        .map_err(|_| value(key, text, "an address like 127.0.0.1:8080"))
}

fn checked_models(models: Vec<ModelFile>, base: &Path) -> Result<Vec<ModelConfig>, ConfigError> {
    let mut seen = HashSet::new();
    models
        .into_iter()
        .map(|ModelFile { id, gguf }| {
            if id.is_empty() || id.len() > 256 || !seen.insert(id.clone()) {
                return Err(value("models.id", id, "1 to 256 bytes, each id once"));
            }
            Ok(ModelConfig {
                id,
                gguf: gguf.map(|gguf| base.join(gguf)),
            })
        })
        .collect()
}

fn checked_prices(
    version: Option<String>,
    prices: BTreeMap<String, PriceFile>,
) -> Result<Prices, ConfigError> {
    let models = prices
        .into_iter()
        .map(|(model, price)| {
            let PriceFile {
                input_nano_usd_per_million: input,
                cached_input_nano_usd_per_million: cached_input,
                output_nano_usd_per_million: output,
            } = price;
            // Ten thousand dollars per million tokens: above it, the unit was mistaken.
            let sane = 0..=10_000_000_000_000;
            match [input, cached_input, output]
                .into_iter()
                .find(|rate| !sane.contains(rate))
            {
                Some(rate) => Err(value(
                    &format!("prices.{model}"),
                    rate,
                    "0 to 10^13 nano-USD",
                )),
                None => Ok((
                    model,
                    ModelPrice {
                        input,
                        cached_input,
                        output,
                    },
                )),
            }
        })
        .collect::<Result<_, _>>()?;
    Ok(Prices {
        version: version.unwrap_or_else(|| "unversioned".to_owned()),
        models,
    })
}

impl PolicyFile {
    fn check(self) -> Result<PolicyConfig, ConfigError> {
        let Self {
            b,
            node_queue_s,
            hold_wait_s,
        } = self;
        if !(0.1..=100.0).contains(&b) {
            return Err(value("policy.b", b, "0.1 to 100"));
        }
        for (key, seconds) in [
            ("policy.node_queue_s", node_queue_s),
            ("policy.hold_wait_s", hold_wait_s),
        ] {
            if !(0.001..=3600.0).contains(&seconds) {
                return Err(value(key, seconds, "0.001 to 3600 seconds"));
            }
        }
        let hold = policies::hold::Params {
            node_queue_ms: node_queue_s * 1000.0,
            wait_ms_max: hold_wait_s * 1000.0,
            ..policies::hold::Params::default()
        };
        Ok(PolicyConfig { b, hold })
    }
}

impl LimitsFile {
    fn check(self) -> Result<Limits, ConfigError> {
        let Self {
            body_bytes_max,
            header_bytes_max,
            concurrency_per_tenant,
            queue_per_tenant,
            queue_wait_s,
            client_timeout_s,
            request_timeout_s,
            drain_s,
        } = self;
        if !(1024..=1 << 30).contains(&body_bytes_max) {
            return Err(value(
                "limits.body_bytes_max",
                body_bytes_max,
                "1 KiB to 1 GiB",
            ));
        }
        if !(1024..=1 << 20).contains(&header_bytes_max) {
            return Err(value(
                "limits.header_bytes_max",
                header_bytes_max,
                "1 KiB to 1 MiB",
            ));
        }
        if !(1..=1_000_000).contains(&concurrency_per_tenant) {
            return Err(value(
                "limits.concurrency_per_tenant",
                concurrency_per_tenant,
                "1 to 1,000,000",
            ));
        }
        if queue_per_tenant > 1_000_000 {
            return Err(value(
                "limits.queue_per_tenant",
                queue_per_tenant,
                "0 to 1,000,000",
            ));
        }
        Ok(Limits {
            body_bytes_max,
            header_bytes_max,
            concurrency_per_tenant,
            queue_per_tenant,
            queue_wait: seconds("limits.queue_wait_s", queue_wait_s)?,
            client_timeout: seconds("limits.client_timeout_s", client_timeout_s)?,
            request_timeout: seconds("limits.request_timeout_s", request_timeout_s)?,
            drain: seconds("limits.drain_s", drain_s)?,
        })
    }
}

pub(super) fn seconds(key: &str, number: f64) -> Result<Duration, ConfigError> {
    if !(0.001..=86_400.0).contains(&number) {
        return Err(value(key, number, "0.001 to 86400 seconds"));
    }
    Ok(Duration::from_secs_f64(number))
}
