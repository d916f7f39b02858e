//! SGLang: both nodes get the same body, with a room of the first one's bootstrap server.

use dialects::Fields;
use serde_json::json;

use super::connector::{Computed, Connector, Handover, Order, Unusable};

/// See the module.
pub(super) struct Sglang;

impl Connector for Sglang {
    fn order(&self) -> Order {
        Order::Together
    }

    fn prefill(&self, handover: &Handover<'_>, body: &Fields<'_>) -> Vec<u8> {
        let room = room(handover);
        let set = room.iter().map(|(name, json)| (*name, json.as_str()));
        body.rebuild(|_| false, &set.collect::<Vec<_>>())
    }

    fn decode(&self, handover: &Handover<'_>, _: Computed<'_>) -> Result<String, Unusable> {
        let room = room(handover);
        if room.is_empty() {
            return Err(Unusable::NoReference);
        }
        let member = |(name, json): &(&str, String)| format!(r#","{name}":{json}"#);
        Ok(room.iter().map(member).collect())
    }
}

/// Where the two meet; empty where the first one has no bootstrap server.
fn room(handover: &Handover<'_>) -> Vec<(&'static str, String)> {
    /// Rooms are below 2^63.
    const ROOM_MASK: u128 = (1 << 63) - 1;
    let Some(bootstrap) = handover.prefill.bootstrap else {
        return Vec::new();
    };
    vec![
        ("bootstrap_host", json!(bootstrap.host).to_string()),
        ("bootstrap_port", bootstrap.port.to_string()),
        ("bootstrap_room", (handover.id & ROOM_MASK).to_string()),
    ]
}
