//! What must two nodes know of each other to share a turn?
//!
//! A node that does a part of turns is asked when it comes up, after a restart, and after an attempt
//! that failed there, since a restarted node has another identity. Our engine tells at
//! `GET /v1/kv/info`; vLLM's Mooncake connector at `GET /query` of its bootstrap server. NIXL's
//! nodes tell with each answer, and SGLang's are named by the configuration alone.
//! A node that does not tell takes no part in pairs; everything else goes on.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use http::StatusCode;
use policies::transfer::Handed;
use policies::view::{Handover, Role};
use serde::Deserialize;
use serde_json::Value;
use serde_json::value::RawValue;

use super::node::{Facts, Node};
use super::probe::Probe;
use crate::config::ConnectorKind;

/// What a node says of its KV.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KvInfo {
    /// Its name among those that exchange KV; empty where its connector has none.
    pub engine_id: String,
    /// Where its KV is fetched: a JSON array as the node wrote it.
    pub endpoints: String,
    /// Size of one token's KV; 0 where it does not tell.
    pub bytes_per_token: u64,
}

impl Node {
    /// What it said of its KV may not hold any more.
    pub(super) fn kv_is_doubtful(&self) {
        self.kv_doubtful.store(true, Ordering::Relaxed);
    }

    /// Whether it is to be asked about its KV now; `again` says whether it is time to repeat what
    /// was not answered.
    pub(super) fn wants_kv(&self, again: bool) -> bool {
        self.exchanges_kv()
            && (self.kv_doubtful.load(Ordering::Relaxed)
                || (again && self.facts.load().kv.is_none()))
    }

    /// Whether it may have a half of a turn, or give what it holds to others.
    fn exchanges_kv(&self) -> bool {
        self.duty.role != Role::Mixed || self.is_ours_to_ask()
    }

    /// How it hands KV over or takes it, as a decision about two nodes sees it.
    pub(super) fn handover(&self, facts: &Facts) -> Option<Handover> {
        let kv = facts.kv.as_ref()?;
        (self.duty.role != Role::Mixed).then(|| Handover {
            protocol: self.duty.connector.as_str(),
            bytes_per_token: self.kv_bytes_per_token(kv),
            bytes_per_s: self.kv_bytes_per_s(),
            overlaps_prefill: self.duty.connector.overlaps_prefill(),
        })
    }

    /// Size of one token's KV: as told, else configured, else 0.
    fn kv_bytes_per_token(&self, kv: &KvInfo) -> f64 {
        match kv.bytes_per_token {
            0 => to_f64(self.duty.kv_bytes_per_token),
            told => to_f64(told),
        }
    }

    /// How fast KV reaches it: measured, else configured, else 0.
    fn kv_bytes_per_s(&self) -> f64 {
        let transfers = self.transfers.lock();
        let measured = transfers
            .unwrap_or_else(PoisonError::into_inner)
            .bytes_per_s();
        if measured > 0.0 {
            measured
        } else {
            to_f64(self.duty.transfer_bytes_per_s)
        }
    }

    /// Milliseconds for each of so many blocks that it fetches from another node.
    pub(super) fn fetch_block_ms(&self, giver: &KvInfo, blocks: usize) -> f64 {
        let bytes_per_token = self.kv_bytes_per_token(giver);
        policies::transfer::fetch_block_ms(blocks, bytes_per_token, self.kv_bytes_per_s())
    }

    /// Whether it can do nothing by itself: SGLang's nodes in these roles wait for each other.
    pub(super) fn needs_partner(&self) -> bool {
        self.duty.role != Role::Mixed && self.duty.connector == ConnectorKind::Sglang
    }

    /// It has taken a prompt's KV and produced its first token.
    pub fn took(&self, handed: Handed) {
        let mut transfers = self
            .transfers
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        transfers.took(handed);
    }
}

#[expect(clippy::cast_precision_loss, reason = "far below 2^53 bytes")]
fn to_f64(bytes: u64) -> f64 {
    bytes as f64
}

/// Asks a node about its KV. One that does not answer takes no part in pairs until it does.
pub(super) async fn learn(node: &Node, probe: &Probe, timeout: Duration) {
    if !node.exchanges_kv() {
        return;
    }
    node.kv_doubtful.store(false, Ordering::Relaxed);
    let told = ask(node, probe, timeout).await;
    let before = node.facts.load().kv.is_some();
    if let Err(why) = &told {
        if before {
            tracing::warn!(node = %node.id, why, "the node does not tell about its KV: it shares no turns");
        } else {
            tracing::info!(node = %node.id, why, "the node does not tell about its KV yet");
        }
    }
    let kv = told.ok().map(Arc::new);
    node.set_facts(|facts| facts.kv = kv);
}

async fn ask(node: &Node, probe: &Probe, timeout: Duration) -> Result<KvInfo, String> {
    let told = |answer: Result<_, super::probe::ProbeError>| match answer {
        Ok((StatusCode::OK, body)) => Ok(body),
        Ok((status, _)) => Err(format!("it answers {status}")),
        Err(error) => Err(error.to_string()),
    };
    match (node.duty.connector, &node.duty.bootstrap) {
        (ConnectorKind::Homing, _) => {
            let body = told(probe.get(node, "/v1/kv/info", timeout).await)?;
            homing(&body, node.duty.role)
        }
        (ConnectorKind::Mooncake, Some(bootstrap)) => {
            let host = format!("{}:{}", bootstrap.host, bootstrap.port);
            let asked = probe.get_at((bootstrap.addr, &host), "/query", timeout);
            mooncake(&told(asked.await)?)
        }
        (ConnectorKind::Mooncake | ConnectorKind::Nixl | ConnectorKind::Sglang, _) => {
            Ok(KvInfo::default())
        }
    }
}

/// Our engine's answer.
fn homing(body: &[u8], role: Role) -> Result<KvInfo, String> {
    #[derive(Deserialize)]
    struct Info<'a> {
        engine_id: String,
        role: String,
        #[serde(borrow)]
        endpoints: &'a RawValue,
        #[serde(default)]
        layout: Value,
    }
    let broken = |error: serde_json::Error| format!("/v1/kv/info cannot be read: {error}");
    let info: Info<'_> = serde_json::from_slice(body).map_err(broken)?;
    if info.role != role.as_str() {
        return Err(format!(
            "it runs as {}, and is configured as {}",
            info.role,
            role.as_str()
        ));
    }
    if !info.endpoints.get().starts_with('[') {
        return Err("/v1/kv/info has no list of endpoints".to_owned());
    }
    Ok(KvInfo {
        engine_id: info.engine_id,
        endpoints: info.endpoints.get().to_owned(),
        bytes_per_token: bytes_per_token(&info.layout).unwrap_or(0),
    })
}

/// From what the engines tell each other of a block: the bytes of all its layers, and its tokens.
fn bytes_per_token(layout: &Value) -> Option<u64> {
    let figure = |name: &str| layout[name].as_u64().filter(|figure| *figure > 0);
    Some(figure("body_bytes")?.div_ceil(figure("block_tokens")?))
}

/// A Mooncake bootstrap server's answer: by data-parallel rank, of which a node has one here.
fn mooncake(body: &[u8]) -> Result<KvInfo, String> {
    #[derive(Deserialize)]
    struct Rank {
        engine_id: String,
    }
    let broken = |error: serde_json::Error| format!("/query cannot be read: {error}");
    let ranks: BTreeMap<String, Rank> = serde_json::from_slice(body).map_err(broken)?;
    let count = ranks.len();
    match ranks.into_values().next() {
        Some(rank) if count == 1 => Ok(KvInfo {
            engine_id: rank.engine_id,
            ..KvInfo::default()
        }),
        _ => Err(format!(
            "/query names {count} data-parallel ranks; a node that computes prompts must have one"
        )),
    }
}

#[cfg(test)]
mod tests {
    //! Catches an answer that is misread, and a node that runs in another role than it should.
    use super::*;

    #[test]
    fn engines_tell_who_they_are() {
        let info = br#"{"engine_id":"e","role":"prefill","endpoints":["tcp://h:1", {"shm":"x"}],
            "layout":{"version":1,"block_tokens":16,"body_bytes":393216},"more":1}"#;
        let told = homing(info, Role::Prefill).expect("it tells");
        assert_eq!(
            (told.engine_id.as_str(), told.bytes_per_token),
            ("e", 24_576)
        );
        assert_eq!(told.endpoints, r#"["tcp://h:1", {"shm":"x"}]"#);
        for (body, role, part) in [
            (
                &info[..],
                Role::Decode,
                "it runs as prefill, and is configured as decode",
            ),
            (
                br#"{"engine_id":"e","role":"decode","endpoints":{}}"#,
                Role::Decode,
                "no list",
            ),
            (b"{}", Role::Decode, "cannot be read"),
        ] {
            let why = homing(body, role).expect_err("a refusal");
            assert!(why.contains(part), "{why}");
        }
        let query = br#"{"0":{"engine_id":"m","worker_addr":{"0":{"0":"h:2"}}}}"#;
        assert_eq!(
            mooncake(query).map(|told| told.engine_id),
            Ok("m".to_owned())
        );
        let two = br#"{"0":{"engine_id":"m"},"1":{"engine_id":"n"}}"#;
        assert!(mooncake(two).is_err_and(|why| why.contains("2 data-parallel ranks")));
        assert!(mooncake(b"{}").is_err());
    }
}
