//! A scripted node that does a part of turns: what does it demand of a request's fields, and what
//! does it answer?
//!
//! It takes exactly the fields of its connector, and refuses any that are missing, different or too
//! many. Two nodes that share turns meet under the transfer's name: the one that answers waits until
//! the other has computed, once. Its own usage counts all that was handed to it as cached, as real
//! nodes do; what the other one had cached is 640 tokens of 2000.

use std::collections::HashSet;
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use serde_json::{Value, json};

use super::node::{Act, CHUNKS_END, MODEL, chunk, delta, json, stream_head, usage, usage_chunk};

/// Tokens of every prompt, as these nodes count them.
pub(crate) const PROMPT: u64 = 2000;
/// Of these, what the node that computes had in its cache.
pub(crate) const CACHED: u64 = 640;
/// Longest wait for the other node.
const PATIENCE: Duration = Duration::from_secs(20);
/// What a prompt takes: long beside the two requests, or nobody would share it.
const COMPUTING: Duration = Duration::from_millis(40);

/// The kinds of nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Homing,
    Nixl,
    Mooncake,
    Sglang,
}

impl Kind {
    pub(crate) const ALL: [Self; 4] = [Self::Homing, Self::Nixl, Self::Mooncake, Self::Sglang];

    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Homing => "homing",
            Self::Nixl => "nixl",
            Self::Mooncake => "mooncake",
            Self::Sglang => "sglang",
        }
    }

    pub(crate) fn has_bootstrap(self) -> bool {
        matches!(self, Self::Mooncake | Self::Sglang)
    }
}

/// Which part of turns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    Prefill,
    Decode,
}

impl Role {
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Prefill => "prefill",
            Self::Decode => "decode",
        }
    }
}

/// Where nodes that share turns meet.
#[derive(Default)]
pub(crate) struct Meeting {
    computed: Mutex<HashSet<String>>,
    changed: Condvar,
}

impl Meeting {
    /// A prompt has been computed under this name.
    fn computed(&self, name: &str) {
        let mut computed = self.computed.lock().expect("no panic");
        computed.insert(name.to_owned());
        self.changed.notify_all();
    }

    /// Takes what was computed under a name, once; whether it ever was.
    fn take(&self, name: &str) -> bool {
        let computed = self.computed.lock().expect("no panic");
        let waited = self
            .changed
            .wait_timeout_while(computed, PATIENCE, |computed| !computed.contains(name));
        let (mut computed, _) = waited.expect("no panic");
        computed.remove(name)
    }
}

/// What a node does of turns.
#[derive(Clone)]
pub(crate) struct Duty {
    pub(crate) kind: Kind,
    pub(crate) role: Role,
    pub(crate) meeting: Arc<Meeting>,
    /// Its name among those that exchange KV; changes with every life.
    pub(crate) engine_id: Arc<Mutex<String>>,
}

impl Duty {
    fn engine(&self) -> String {
        self.engine_id.lock().expect("no panic").clone()
    }

    /// What it tells of its KV.
    pub(crate) fn told(&self, head: &str) -> Option<String> {
        let endpoints = json!([format!("tcp://{}:7000", self.role.as_str())]);
        match self.kind {
            Kind::Homing if head.starts_with("GET /v1/kv/info ") => Some(
                json!({"engine_id": self.engine(), "role": self.role.as_str(),
                    "endpoints": endpoints, "layout": {"version": 1}})
                .to_string(),
            ),
            Kind::Mooncake if head.starts_with("GET /query ") => Some(
                json!({"0": {"engine_id": self.engine(), "worker_addr": {"0": {"0": "h:1"}}}})
                    .to_string(),
            ),
            _ => None,
        }
    }

    /// The name of the transfer that a request is a part of; none if it is a whole turn. The error
    /// says what is wrong with its fields.
    pub(crate) fn transfer(&self, body: &Value) -> Result<Option<String>, String> {
        let params = &body["kv_transfer_params"];
        let room = ["bootstrap_host", "bootstrap_port", "bootstrap_room"];
        if self.kind == Kind::Sglang {
            if !params.is_null() {
                return Err(format!("kv_transfer_params {params}"));
            }
            let values = room.map(|name| &body[name]);
            let [Value::String(_), Value::Number(_), Value::Number(number)] = values else {
                return match values.iter().all(|value| value.is_null()) {
                    // It would wait for ever.
                    true => Err("a node in this role needs a room".to_owned()),
                    false => Err(format!("{values:?}")),
                };
            };
            let room = number.as_i64().filter(|room| *room >= 0);
            return room
                .map(|room| Some(room.to_string()))
                .ok_or(format!("room {number}"));
        }
        if room.iter().any(|name| !body[*name].is_null()) {
            return Err(format!("bootstrap fields in {body}"));
        }
        let Some(members) = params.as_object() else {
            return Ok(None);
        };
        if self.role == Role::Prefill {
            let asked = (&body["stream"], &body["max_tokens"]);
            let most = &body["max_completion_tokens"];
            let is_one = asked == (&json!(false), &json!(1)) && (most.is_null() || *most == 1);
            if !is_one || !body["stream_options"].is_null() || !body["min_tokens"].is_null() {
                return Err(format!("more than one token: {body}"));
            }
        }
        let id = params["transfer_id"]
            .as_str()
            .unwrap_or_default()
            .to_owned();
        let expected = self.expected(&id);
        let found: Value = members
            .clone()
            .into_iter()
            .filter(|(_, value)| *value != "ANY")
            .collect();
        match self.matches(&expected, &found) {
            true => Ok(Some(self.name(&id, params))),
            false => Err(format!("{found} in place of {expected}")),
        }
    }

    /// What a transfer is called: by the gateway's id, or by the first node's blocks.
    fn name(&self, id: &str, params: &Value) -> String {
        match (self.kind, self.role) {
            (Kind::Nixl, Role::Prefill) => "remote".to_owned(),
            (Kind::Nixl, Role::Decode) => params["remote_block_ids"].to_string(),
            _ => id.to_owned(),
        }
    }

    fn expected(&self, id: &str) -> Value {
        match (self.kind, self.role) {
            (Kind::Homing, Role::Prefill) => json!({"do_remote_decode": true, "transfer_id": id,
                "remote_engine_id": "ENGINE"}),
            (Kind::Homing, Role::Decode) => json!({"do_remote_prefill": true, "transfer_id": id,
                "remote_engine_id": "ENGINE", "remote_endpoints": ["tcp://prefill:7000"]}),
            (Kind::Nixl, Role::Prefill) => json!({"do_remote_decode": true,
                "do_remote_prefill": false, "remote_engine_id": null, "remote_block_ids": null,
                "remote_host": null, "remote_port": null}),
            (Kind::Nixl, Role::Decode) => json!({"do_remote_prefill": true,
                "do_remote_decode": false, "remote_engine_id": "p", "remote_block_ids": "BLOCKS",
                "remote_host": "10.0.0.1", "remote_port": 5600}),
            (Kind::Mooncake, Role::Prefill) => json!({"do_remote_decode": true,
                "do_remote_prefill": false, "transfer_id": id}),
            (Kind::Mooncake, Role::Decode) => json!({"do_remote_decode": false,
                "do_remote_prefill": true, "transfer_id": id, "remote_engine_id": "ENGINE",
                "remote_bootstrap_addr": "BOOTSTRAP"}),
            (Kind::Sglang, _) => Value::Null,
        }
    }

    /// Words in capitals stand for any text.
    fn matches(&self, expected: &Value, found: &Value) -> bool {
        let (Some(expected), Some(found)) = (expected.as_object(), found.as_object()) else {
            return false;
        };
        expected.len() == found.len()
            && expected.iter().all(|(name, value)| match value.as_str() {
                Some("ENGINE") => found
                    .get(name)
                    .is_some_and(|id| id.as_str().is_some_and(|id| id.starts_with("engine-"))),
                Some("BOOTSTRAP") => found.get(name).is_some_and(|address| {
                    address
                        .as_str()
                        .is_some_and(|text| text.starts_with("http://127.0.0.1:"))
                }),
                Some("BLOCKS") => found.get(name).is_some_and(Value::is_array),
                _ => found.get(name) == Some(value),
            })
    }

    /// Before an answer that has no script: the prompt is computed, or awaited.
    pub(crate) fn meet(&self, transfer: Option<&str>) -> Result<(), String> {
        match (transfer, self.role) {
            (None, _) => Ok(()),
            (Some(_), Role::Prefill) => {
                std::thread::sleep(COMPUTING);
                Ok(())
            }
            (Some(name), Role::Decode) if self.meeting.take(name) => Ok(()),
            (Some(name), Role::Decode) => Err(format!("nothing was computed as {name}")),
        }
    }

    /// After its answer: what was computed is there to be taken.
    pub(crate) fn answered(&self, transfer: Option<&str>) {
        if let (Some(name), Role::Prefill) = (transfer, self.role) {
            let name = if self.kind == Kind::Nixl {
                "[1,2,3]"
            } else {
                name
            };
            self.meeting.computed(name);
        }
    }

    /// The answer where there is no script.
    pub(crate) fn answer(&self, body: &Value, transfer: Option<&str>) -> Vec<Act> {
        match (self.role, transfer) {
            (Role::Prefill, Some(_)) if body["stream"] == true => {
                stream_saying(&["o"], usage_chunk(PROMPT, CACHED, 1))
            }
            (Role::Prefill, Some(_)) => {
                let mut answer = object("o", "length", usage(PROMPT, CACHED, 1));
                if self.kind == Kind::Nixl {
                    answer["kv_transfer_params"] = json!({"do_remote_prefill": true,
                        "do_remote_decode": false, "remote_engine_id": "p",
                        "remote_block_ids": [1, 2, 3], "remote_host": "10.0.0.1",
                        "remote_port": 5600});
                }
                vec![Act::Send(json(200, &[], &answer.to_string()))]
            }
            _ => {
                // All that was handed over counts as cached; alone, it has 64 tokens.
                let cached = if transfer.is_some() { PROMPT - 1 } else { 64 };
                if body["stream"] == true {
                    return stream_saying(&["o", "k"], usage_chunk(PROMPT, cached, 20));
                }
                let answer = object("ok", "stop", usage(PROMPT, cached, 20));
                vec![Act::Send(json(200, &[], &answer.to_string()))]
            }
        }
    }
}

fn object(text: &str, finish: &str, usage: Value) -> Value {
    json!({"id": "x", "object": "chat.completion", "model": MODEL, "usage": usage,
        "choices": [{"index": 0, "finish_reason": finish,
            "message": {"role": "assistant", "content": text}}]})
}

/// A good stream that ends with this usage.
pub(crate) fn stream_saying(texts: &[&str], usage: String) -> Vec<Act> {
    let mut out = stream_head();
    let end = json!({"id": "x", "object": "chat.completion.chunk", "model": MODEL,
        "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]});
    let deltas = texts.iter().map(|text| delta(text));
    for event in deltas.chain([end.to_string(), usage, "[DONE]".to_owned()]) {
        out.extend(chunk(format!("data: {event}\n\n").as_bytes()));
    }
    out.extend(CHUNKS_END);
    vec![Act::Send(out)]
}
