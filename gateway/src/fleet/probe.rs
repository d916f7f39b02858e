//! What does a node answer to a question of the gateway's own?
//!
//! `GET` on the node's side routes, with a bound on time and bytes, over kept connections; and the
//! few values the fleet needs, read out of the JSON and Prometheus text that come back.

use std::net::SocketAddr;
use std::time::Duration;

use bytes::Bytes;
use http::{Request, StatusCode};
use http_body_util::{BodyExt, Empty, Limited};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use serde::Deserialize;

use super::node::Node;
use super::tiers::NodeTiers;

/// Metrics of a large vLLM node are about 100 KB.
const ANSWER_BYTES_MAX: usize = 4 * 1024 * 1024;

/// Connecting to a living node takes milliseconds in a region, and up to 300 around the globe.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);

/// Asks nodes.
#[derive(Clone)]
pub(super) struct Probe {
    client: Client<HttpConnector, Empty<Bytes>>,
    authorization: String,
}

/// Why there was no answer.
#[derive(Debug, thiserror::Error)]
pub(super) enum ProbeError {
    #[error("no connection")]
    Connect,
    #[error("no answer within {0:?}")]
    Timeout(Duration),
    #[error("broken answer: {0}")]
    Broken(String),
}

impl Probe {
    pub(super) fn new(node_token: &str) -> Self {
        let mut connector = HttpConnector::new();
        connector.set_nodelay(true);
        connector.set_connect_timeout(Some(CONNECT_TIMEOUT));
        let client = Client::builder(TokioExecutor::new())
            .pool_max_idle_per_host(1)
            .pool_idle_timeout(Duration::from_secs(10))
            .build(connector);
        Self {
            client,
            authorization: format!("Bearer {node_token}"),
        }
    }

    pub(super) async fn get(
        &self,
        node: &Node,
        path: &str,
        timeout: Duration,
    ) -> Result<(StatusCode, Bytes), ProbeError> {
        self.get_at((node.addr, &node.host), path, timeout).await
    }

    /// Asks another server of a node.
    pub(super) async fn get_at(
        &self,
        (addr, host): (SocketAddr, &str),
        path: &str,
        timeout: Duration,
    ) -> Result<(StatusCode, Bytes), ProbeError> {
        let broken = |error: &dyn std::fmt::Display| ProbeError::Broken(error.to_string());
        let request = Request::get(format!("http://{addr}{path}"))
            .header(http::header::HOST, host)
            .header(http::header::AUTHORIZATION, &self.authorization)
            .body(Empty::new())
            .map_err(|error| broken(&error))?;
        let answer = async {
            let response = self.client.request(request).await.map_err(|error| {
                if error.is_connect() {
                    ProbeError::Connect
                } else {
                    broken(&error)
                }
            })?;
            let status = response.status();
            let body = Limited::new(response.into_body(), ANSWER_BYTES_MAX)
                .collect()
                .await;
            Ok((status, body.map_err(|error| broken(&error))?.to_bytes()))
        };
        tokio::time::timeout(timeout, answer)
            .await
            .map_err(|_| ProbeError::Timeout(timeout))?
    }
}

/// What a node says of the model that it serves.
#[derive(Debug, PartialEq, Eq, Deserialize)]
pub(super) struct Served {
    pub(super) id: String,
    pub(super) max_model_len: Option<u64>,
    /// It reports the tokens of its answers (`return_token_ids`), and takes a prompt's tokens
    /// beside its messages (`prompt_token_ids`).
    #[serde(default)]
    pub(super) token_ids: bool,
}

/// The first model of a `/v1/models` answer.
pub(super) fn first_model(body: &[u8]) -> Option<Served> {
    #[derive(Deserialize)]
    struct Models {
        data: Vec<Served>,
    }
    let models: Models = serde_json::from_slice(body).ok()?;
    models.data.into_iter().next()
}

/// What a node's `/metrics` say that the fleet can use.
#[derive(Debug, Default, PartialEq)]
pub(super) struct NodeMetrics {
    pub(super) started_s: Option<f64>,
    pub(super) pool_usage: Option<f64>,
    pub(super) pool_blocks: Option<u64>,
    pub(super) block_tokens: Option<u64>,
    pub(super) tiers: NodeTiers,
}

/// Reads the metrics that vLLM and our engine share.
pub(super) fn read_metrics(text: &str) -> NodeMetrics {
    let mut found = NodeMetrics::default();
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        let name = line.split(['{', ' ']).next().unwrap_or_default();
        let value = || {
            line.rsplit(' ')
                .next()
                .and_then(|value| value.parse::<f64>().ok())
        };
        match name {
            "process_start_time_seconds" => found.started_s = value(),
            "vllm:kv_cache_usage_perc" => found.pool_usage = value(),
            "vllm:cache_config_info" => {
                found.pool_blocks = label(line, "num_gpu_blocks");
                found.block_tokens = label(line, "block_size");
            }
            "homing:kv_tier_capacity_blocks" => {
                #[expect(
                    clippy::cast_possible_truncation,
                    clippy::cast_sign_loss,
                    reason = "the cast saturates, which is what is wanted"
                )]
                let blocks = value().unwrap_or(0.0) as u64;
                found
                    .tiers
                    .tell(text_label(line, "tier"), |tier| tier.blocks = blocks);
            }
            "homing:kv_tier_block_seconds" => {
                let ms = value().unwrap_or(0.0) * 1e3;
                found
                    .tiers
                    .tell(text_label(line, "tier"), |tier| tier.block_ms = ms);
            }
            _ => {}
        }
    }
    found
}

fn label(line: &str, name: &str) -> Option<u64> {
    text_label(line, name)?.parse().ok()
}

fn text_label<'a>(line: &'a str, name: &str) -> Option<&'a str> {
    let (_, rest) = line.split_once(&format!("{name}=\""))?;
    rest.split('"').next()
}

#[cfg(test)]
mod tests {
    use super::super::tiers::NodeTier;
    use super::*;

    /// Would catch a metric that is read from the wrong line or the wrong label.
    #[test]
    fn reads_what_vllm_writes() {
        let text = "# HELP process_start_time_seconds Start time\n\
            # TYPE process_start_time_seconds gauge\n\
            process_start_time_seconds 1.73e+09\n\
            vllm:cache_config_info{block_size=\"32\",cache_dtype=\"auto\",num_gpu_blocks=\"512\"} 1.0\n\
            vllm:kv_cache_usage_perc{engine=\"0\",model_name=\"m\"} 0.25\n";
        assert_eq!(
            read_metrics(text),
            NodeMetrics {
                started_s: Some(1.73e9),
                pool_usage: Some(0.25),
                pool_blocks: Some(512),
                block_tokens: Some(32),
                tiers: NodeTiers::default(),
            }
        );
        let text = "homing:kv_tier_capacity_blocks{model_name=\"m\",tier=\"disk\"} 4096\n\
            homing:kv_tier_block_seconds{model_name=\"m\",tier=\"disk\"} 0.002\n\
            homing:kv_tier_block_seconds{model_name=\"m\",tier=\"host\"} 0\n\
            homing:kv_tier_block_seconds{model_name=\"m\",tier=\"moon\"} 1\n";
        let disk = NodeTier {
            blocks: 4096,
            block_ms: 2.0,
        };
        let told = NodeTiers {
            disk,
            ..NodeTiers::default()
        };
        assert_eq!(read_metrics(text).tiers, told);
        assert_eq!(read_metrics("junk {\n\u{0}"), NodeMetrics::default());
        let models = br#"{"object":"list","data":[{"id":"m","max_model_len":8192},{"id":"n"}]}"#;
        let served = |id: &str, max_model_len, token_ids| {
            Some(Served {
                id: id.to_owned(),
                max_model_len,
                token_ids,
            })
        };
        assert_eq!(first_model(models), served("m", Some(8192), false));
        let ours = br#"{"data":[{"id":"n","owned_by":"homing","token_ids":true}]}"#;
        assert_eq!(first_model(ours), served("n", None, true));
        assert_eq!(first_model(b"{\"data\":[]}"), None);
    }
}
