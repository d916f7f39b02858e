//! vLLM: its NIXL connector, one node after the other, and its Mooncake connector, both at once.

use dialects::Fields;
use serde_json::json;

use super::connector::{Computed, Connector, Handover, Order, Unusable, one_token};

/// The first node's answer says where its KV is; the second one fetches it from there.
pub(super) struct Nixl;

impl Connector for Nixl {
    fn order(&self) -> Order {
        Order::After
    }

    fn prefill(&self, _: &Handover<'_>, body: &Fields<'_>) -> Vec<u8> {
        let params = json!({
            "do_remote_decode": true,
            "do_remote_prefill": false,
            "remote_engine_id": null,
            "remote_block_ids": null,
            "remote_host": null,
            "remote_port": null,
        });
        let keep = |_: &str| false;
        one_token(body, keep, &[("kv_transfer_params", &params.to_string())])
    }

    fn decode(&self, _: &Handover<'_>, computed: Computed<'_>) -> Result<String, Unusable> {
        let params = computed.kv_transfer_params.ok_or(Unusable::NoReference)?;
        Ok(format!(r#","kv_transfer_params":{}"#, params.get()))
    }

    fn accept(&self, computed: Computed<'_>) -> Result<(), Unusable> {
        match computed.kv_transfer_params {
            Some(_) => Ok(()),
            None => Err(Unusable::NoReference),
        }
    }
}

/// Both nodes are told the transfer's name, and meet at the first one's bootstrap server.
pub(super) struct Mooncake;

impl Connector for Mooncake {
    fn order(&self) -> Order {
        Order::Together
    }

    fn prefill(&self, handover: &Handover<'_>, body: &Fields<'_>) -> Vec<u8> {
        let params = json!({
            "do_remote_decode": true,
            "do_remote_prefill": false,
            "transfer_id": transfer_id(handover),
        });
        // KV is handed over only where the request ends by its length.
        let may_end = |field: &str| matches!(field, "stop" | "stop_token_ids");
        let set = [
            ("ignore_eos", "true"),
            ("kv_transfer_params", &params.to_string()),
        ];
        one_token(body, may_end, &set)
    }

    fn decode(&self, handover: &Handover<'_>, _: Computed<'_>) -> Result<String, Unusable> {
        let bootstrap = handover.prefill.bootstrap.ok_or(Unusable::NoReference)?;
        let params = json!({
            "do_remote_decode": false,
            "do_remote_prefill": true,
            "remote_bootstrap_addr": format!("http://{}:{}", bootstrap.host, bootstrap.port),
            "remote_engine_id": handover.prefill.kv.engine_id,
            "transfer_id": transfer_id(handover),
        });
        Ok(format!(r#","kv_transfer_params":{params}"#))
    }

    fn accept(&self, computed: Computed<'_>) -> Result<(), Unusable> {
        match computed.finish_reason {
            Some("length") | None => Ok(()),
            Some(_) => Err(Unusable::Ended),
        }
    }
}

fn transfer_id(handover: &Handover<'_>) -> String {
    format!("xfer-{:032x}", handover.id)
}
