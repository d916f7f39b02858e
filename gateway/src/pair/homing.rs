//! Our engine: both nodes are asked at once, and KV travels while the prompt is computed.

use dialects::Fields;
use serde_json::json;
use serde_json::value::RawValue;

use super::connector::{Computed, Connector, Handover, Order, Unusable, one_token};

/// See the module.
pub(super) struct Homing;

impl Connector for Homing {
    fn order(&self) -> Order {
        Order::Together
    }

    fn prefill(&self, handover: &Handover<'_>, body: &Fields<'_>) -> Vec<u8> {
        let params = json!({
            "do_remote_decode": true,
            "transfer_id": transfer_id(handover),
            "remote_engine_id": handover.decode.kv.engine_id,
        });
        // The form of an answer stays: its first token is handed over as well, and the first node
        // knows then not to choose it.
        let keep = |_: &str| false;
        one_token(body, keep, &[("kv_transfer_params", &params.to_string())])
    }

    fn decode(&self, handover: &Handover<'_>, _: Computed<'_>) -> Result<String, Unusable> {
        let kv = handover.prefill.kv;
        let endpoints: &RawValue =
            serde_json::from_str(&kv.endpoints).map_err(|_| Unusable::NoReference)?;
        let params = json!({
            "do_remote_prefill": true,
            "transfer_id": transfer_id(handover),
            "remote_engine_id": kv.engine_id,
            "remote_endpoints": endpoints,
        });
        Ok(format!(r#","kv_transfer_params":{params}"#))
    }
}

/// 32 hexadecimal digits.
fn transfer_id(handover: &Handover<'_>) -> String {
    format!("{:032x}", handover.id)
}
