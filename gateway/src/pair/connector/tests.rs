//! Catches a field that is missing, misspelt or left over, and a body that is not the client's any
//! more.

use serde_json::{Value, json};

use super::*;

const ID: u128 = 0xfedc_ba98_7654_3210_0123_4567_89ab_cdef;

/// What each connector makes of a body: that of the node that computes, and that of the node that
/// answers.
fn bodies(kind: ConnectorKind, body: &Value, computed: Computed<'_>) -> (Value, Value) {
    let prefill = KvInfo {
        engine_id: "p-engine".to_owned(),
        endpoints: r#"["tcp://10.0.0.1:9000"]"#.to_owned(),
        bytes_per_token: 0,
    };
    let decode = KvInfo {
        engine_id: "d-engine".to_owned(),
        ..KvInfo::default()
    };
    let bootstrap = Bootstrap {
        host: "p.example".to_owned(),
        port: 8998,
        addr: ([10, 0, 0, 1], 8998).into(),
    };
    let handover = Handover {
        id: ID,
        prefill: Half {
            kv: &prefill,
            bootstrap: kind.needs_bootstrap().then_some(&bootstrap),
        },
        decode: Half {
            kv: &decode,
            bootstrap: None,
        },
    };
    let connector = connector(kind);
    let text = body.to_string();
    let fields = fields(text.as_bytes()).expect("an object");
    let first = connector.prefill(&handover, &fields);
    let more = connector.decode(&handover, computed).expect("members");
    let second = format!("{}{more}}}", &text[..text.len() - 1]);
    (
        serde_json::from_slice(&first).expect("JSON"),
        serde_json::from_str(&second).expect("JSON"),
    )
}

fn check(kind: ConnectorKind, computed: Computed<'_>, (first, second): (Value, Value)) {
    let body = json!({"model": "m", "messages": [{"role": "user", "content": "x"}], "stream": true,
        "max_tokens": 50, "max_completion_tokens": 60, "min_tokens": 5, "stop": ["x"],
        "stream_options": {"include_usage": true}, "response_format": {"type": "json_object"},
        "unknown": 1.5, "cache_salt": "s"});
    let merged = |mut into: Value, with: Value| {
        for (name, value) in with.as_object().expect("an object") {
            match value {
                Value::Null => into.as_object_mut().expect("an object").shift_remove(name),
                _ => into
                    .as_object_mut()
                    .expect("an object")
                    .insert(name.clone(), value.clone()),
            };
        }
        into
    };
    let (found_first, found_second) = bodies(kind, &body, computed);
    assert_eq!(found_first, merged(body.clone(), first), "{kind:?}");
    assert_eq!(found_second, merged(body, second), "{kind:?}");
}

/// A null takes a field out.
#[test]
fn every_connector_says_what_its_nodes_understand() {
    let one = |with: Value| {
        let mut all = json!({"stream": false, "max_tokens": 1, "max_completion_tokens": 1,
            "stream_options": null, "min_tokens": null});
        all.as_object_mut()
            .expect("an object")
            .extend(with.as_object().expect("an object").clone());
        all
    };
    let id = "fedcba98765432100123456789abcdef";
    check(
        ConnectorKind::Homing,
        Computed::default(),
        (
            one(json!({"kv_transfer_params": {
                "do_remote_decode": true, "transfer_id": id, "remote_engine_id": "d-engine"}})),
            json!({"kv_transfer_params": {
                "do_remote_prefill": true, "transfer_id": id, "remote_engine_id": "p-engine",
                "remote_endpoints": ["tcp://10.0.0.1:9000"]}}),
        ),
    );
    let xfer = format!("xfer-{id}");
    check(
        ConnectorKind::Mooncake,
        Computed::default(),
        (
            one(
                json!({"stop": null, "ignore_eos": true, "kv_transfer_params": {
                "do_remote_decode": true, "do_remote_prefill": false, "transfer_id": xfer}}),
            ),
            json!({"kv_transfer_params": {
                "do_remote_decode": false, "do_remote_prefill": true, "transfer_id": xfer,
                "remote_bootstrap_addr": "http://p.example:8998", "remote_engine_id": "p-engine"}}),
        ),
    );
    let room = json!({"bootstrap_host": "p.example", "bootstrap_port": 8998,
        "bootstrap_room": 0x0123_4567_89ab_cdef_u64});
    check(
        ConnectorKind::Sglang,
        Computed::default(),
        (room.clone(), room),
    );
    // The first node's own words, byte for byte.
    let told = r#"{"remote_block_ids": [1,2], "remote_port":5600,"x":1.50}"#.to_owned();
    let raw = RawValue::from_string(told).expect("JSON");
    let computed = Computed {
        kv_transfer_params: Some(&raw),
        finish_reason: Some("length"),
    };
    // As JSON values: a null within stays one.
    let (first, second) = bodies(ConnectorKind::Nixl, &json!({"model": "m"}), computed);
    assert_eq!(
        first,
        json!({"model": "m", "stream": false, "max_tokens": 1, "kv_transfer_params": {
            "do_remote_decode": true, "do_remote_prefill": false, "remote_engine_id": null,
            "remote_block_ids": null, "remote_host": null, "remote_port": null}})
    );
    assert_eq!(
        second["kv_transfer_params"],
        json!({"remote_block_ids": [1, 2], "remote_port": 5600, "x": 1.5})
    );
}

#[test]
fn an_answer_without_kv_is_not_gone_on_with() {
    let ended = |reason| Computed {
        finish_reason: reason,
        ..Computed::default()
    };
    for (kind, reason, expected) in [
        (
            ConnectorKind::Nixl,
            Some("length"),
            Err(Unusable::NoReference),
        ),
        (ConnectorKind::Mooncake, Some("stop"), Err(Unusable::Ended)),
        (ConnectorKind::Mooncake, Some("length"), Ok(())),
        (ConnectorKind::Homing, Some("stop"), Ok(())),
        (ConnectorKind::Sglang, None, Ok(())),
    ] {
        assert_eq!(connector(kind).accept(ended(reason)), expected, "{kind:?}");
    }
}
