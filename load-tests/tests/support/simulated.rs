//! How does a test get the real gateway in front of simulated nodes?
//!
//! `homing-load node` and `homing gateway` from this build, on ports that the system picks. Nothing
//! waits for a time: a test waits until the gateway says what it should, with a deadline far above
//! what that takes, and what must hold *at once* is asked of the very next answer.

#![expect(clippy::panic, reason = "a helper fails its test with what it saw")]
#![expect(dead_code, reason = "each test file uses its own part of this module")]

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use load_tests::chat::{self, Outcome, Turn};
use load_tests::http::{Connection, Target};
use load_tests::process::{Program, wait_until};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::runtime::Runtime;

use crate::support::{MODEL, START, binary, get, homing, model_path};

/// Far above what anything here takes.
pub(crate) const SOON: Duration = Duration::from_secs(30);

/// One node, as its process printed it.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Place {
    pub(crate) id: String,
    pub(crate) role: String,
    pub(crate) url: String,
    pub(crate) events: String,
    pub(crate) replay: String,
}

#[derive(Clone, Debug, Deserialize)]
struct Printed {
    control: String,
    nodes: Vec<Place>,
}

/// A process of simulated nodes.
pub(crate) struct Nodes {
    pub(crate) program: Program,
    pub(crate) places: Vec<Place>,
    control: String,
}

impl Nodes {
    /// So many nodes with these further flags, on free ports.
    pub(crate) fn start(folder: &Path, nodes: usize, flags: &[&str]) -> Self {
        Self::start_at(folder, nodes, flags, None)
    }

    /// One node at the addresses of another that is gone.
    pub(crate) fn start_again(folder: &Path, place: &Place, flags: &[&str]) -> Self {
        Self::start_at(folder, 1, flags, Some(place))
    }

    fn start_at(folder: &Path, nodes: usize, flags: &[&str], at: Option<&Place>) -> Self {
        let mut command = Command::new(binary("homing-load"));
        command.args(["node", "--exit-with-stdin", "--model", MODEL, "--gguf"]);
        command.arg(model_path());
        command.args(["--nodes", &nodes.to_string()]);
        let any = || "127.0.0.1:0".to_owned();
        let address = |url: &str| url.split("://").nth(1).expect("a scheme").to_owned();
        let of = |pick: fn(&Place) -> &String| at.map_or_else(any, |at| address(pick(at)));
        command.args(["--listen", &of(|place| &place.url)]);
        command.args(["--events", &of(|place| &place.events)]);
        command.args(["--replay", &of(|place| &place.replay)]);
        // What is waited for is the gateway, not the model.
        command.args(["--speed", "20"]).args(flags);
        let log = folder.join("nodes.log");
        let program = Program::start("the nodes", &mut command, &log).expect("they start");
        let line = program.line(START).unwrap_or_else(|e| panic!("{e}"));
        let printed: Printed =
            serde_json::from_str(&line).unwrap_or_else(|e| panic!("{e} in {line:?}"));
        Self {
            program,
            places: printed.nodes,
            control: printed.control,
        }
    }

    /// Something goes wrong with a node from now on.
    pub(crate) fn suffer(&self, node: &str, fault: &str) {
        let target = Target::parse(&format!("{}/nodes/{node}", self.control)).expect("an address");
        let request = hyper::Request::post(target.path("fault"))
            .header("host", target.authority())
            .body(http_body_util::Full::from(fault.to_owned()))
            .expect("a request");
        let sent = async { Connection::new(&target).send(request).await };
        let status = runtime().block_on(sent).expect("an answer").status();
        assert_eq!(status, 200, "{node}: {fault}");
    }

    /// Asks a node by itself: status and body.
    pub(crate) fn post(&self, node: &str, body: &Value) -> (u16, Value) {
        let place = self.places.iter().find(|place| place.id == node);
        let url = &place.expect("a node").url;
        let target = Target::parse(&format!("{url}/v1")).expect("an address");
        let request = hyper::Request::post(target.path("chat/completions"))
            .header("host", target.authority())
            .body(http_body_util::Full::from(body.to_string()))
            .expect("a request");
        runtime().block_on(async {
            let answer = Connection::new(&target).send(request).await;
            let answer = answer.expect("an answer");
            let status = answer.status().as_u16();
            let body = http_body_util::BodyExt::collect(answer.into_body()).await;
            let body = body.expect("a body").to_bytes();
            (status, serde_json::from_slice(&body).expect("JSON"))
        })
    }

    /// What a node says of its KV.
    pub(crate) fn kv_info(&self, node: &str) -> Value {
        let place = self.places.iter().find(|place| place.id == node);
        let url = &place.expect("a node").url;
        let (status, text) = get(&format!("{url}/v1/kv/info"), None);
        assert_eq!(status, 200, "{text}");
        serde_json::from_str(&text).expect("JSON")
    }

    /// What a node says of itself.
    pub(crate) fn report(&self, node: &str) -> Value {
        let (status, text) = get(&format!("{}/nodes", self.control), None);
        assert_eq!(status, 200, "{text}");
        let value: Value = serde_json::from_str(&text).expect("JSON");
        row(&value, node)
    }
}

/// The real gateway.
pub(crate) struct Gateway {
    pub(crate) program: Program,
    pub(crate) client: Client,
    pub(crate) data: PathBuf,
    admin: String,
}

impl Gateway {
    /// In front of these nodes; ready once it believes what each of them says.
    pub(crate) fn start(folder: &Path, places: &[Place]) -> Self {
        Self::start_with(folder, places, ("", ""))
    }

    /// The same with these lines more for each node, and these for everything.
    pub(crate) fn start_with(
        folder: &Path,
        places: &[Place],
        (of_each, of_all): (&str, &str),
    ) -> Self {
        let (address, admin) = (free_address(), free_address());
        let data = folder.join("data");
        let mut config = format!(
            "listen = \"{address}\"\nadmin = \"{admin}\"\ndata = {data:?}\n\n[[models]]\n\
             id = \"{MODEL}\"\ngguf = {:?}\n",
            model_path()
        );
        for place in places {
            let Place {
                id,
                role,
                url,
                events,
                replay,
            } = place;
            config += &format!(
                "\n[[nodes]]\nid = \"{id}\"\nrole = \"{role}\"\nurl = \"{url}\"\n\
                 events = \"{events}\"\nreplay = \"{replay}\"\n{of_each}\n"
            );
        }
        // What is asked of a busy node here has to reach it: nothing is held back.
        config += &format!("\n[policy]\nnode_queue_s = 3600\n{of_all}\n");
        let path = folder.join("homing.toml");
        std::fs::write(&path, config).expect("a writable folder");
        let key = key(&data);
        let mut command = Command::new(binary("homing"));
        command.arg("gateway").arg("--config").arg(&path);
        let log = folder.join("homing.log");
        let program = Program::start("homing", &mut command, &log).expect("it starts");
        let gateway = Self {
            program,
            client: Client {
                target: Target::parse(&format!("http://{address}/v1")).expect("an address"),
                key,
            },
            data,
            admin: format!("http://{admin}"),
        };
        for place in places {
            gateway.until(&place.id, "it is believed", is_whole);
        }
        gateway
    }

    /// What it says of a node; null while it does not answer yet.
    pub(crate) fn node(&self, id: &str) -> Value {
        match get(&format!("{}/admin/nodes", self.admin), None) {
            (200, text) => row(&serde_json::from_str(&text).expect("JSON"), id),
            _ => Value::Null,
        }
    }

    /// How much farther the farthest node seems than the nearest.
    pub(crate) fn distances_differ_ms(&self) -> f64 {
        let (_, text) = get(&format!("{}/admin/nodes", self.admin), None);
        let listed: Value = serde_json::from_str(&text).expect("JSON");
        let rows = listed["nodes"].as_array().expect("nodes");
        let distances = rows.iter().filter_map(|row| row["round_trip_ms"].as_f64());
        let (least, most) = distances.fold((f64::INFINITY, 0.0_f64), |(least, most), ms| {
            (least.min(ms), most.max(ms))
        });
        most - least
    }

    /// Waits until what it says of a node is so.
    pub(crate) fn until(&self, id: &str, what: &str, is_so: impl Fn(&Value) -> bool) {
        let held = wait_until(SOON, || is_so(&self.node(id)));
        let node = self.node(id);
        assert!(
            held,
            "{}",
            self.program.trouble(&format!("{id}, {what}: {node}"))
        );
    }

    /// A metric's value for one node.
    pub(crate) fn metric(&self, name: &str, node: &str) -> f64 {
        let (_, text) = get(&format!("{}/metrics", self.admin), None);
        let begin = format!("{name}{{node=\"{node}\"}} ");
        let line = text.lines().find_map(|line| line.strip_prefix(&begin));
        line.and_then(|value| value.parse().ok())
            .unwrap_or_else(|| panic!("no {name} of {node} in {text}"))
    }

    /// Asks for one answer over a connection of its own.
    pub(crate) fn ask(&self, turn: &Turn) -> Answer {
        self.client.ask(turn)
    }

    /// Why a turn went where it went; waits until that is known.
    pub(crate) fn decision(&self, request_id: &str) -> Value {
        let path = format!("{}/admin/decisions/{request_id}", self.admin);
        let mut text = String::new();
        let known = wait_until(SOON, || {
            let (status, body) = get(&path, None);
            text = body;
            status == 200
        });
        assert!(known, "{}", self.program.trouble(&text));
        let found: Value = serde_json::from_str(&text).expect("JSON");
        found["decisions"][0].clone()
    }
}

/// A client with a key.
#[derive(Clone)]
pub(crate) struct Client {
    target: Target,
    key: String,
}

impl Client {
    /// Asks for one answer.
    pub(crate) fn ask(&self, turn: &Turn) -> Answer {
        Answer::of(&runtime().block_on(self.send(turn)))
    }

    /// Asks for all of them at once.
    pub(crate) fn ask_all(&self, turns: &[Turn]) -> Vec<Answer> {
        self.send_all(turns).iter().map(Answer::of).collect()
    }

    /// Sends all of them at once, each over a connection of its own.
    pub(crate) fn send_all(&self, turns: &[Turn]) -> Vec<Outcome> {
        let sent = turns.iter().map(|turn| self.send(turn));
        runtime().block_on(futures_util::future::join_all(sent))
    }

    async fn send(&self, turn: &Turn) -> Outcome {
        let mut connection = Connection::new(&self.target);
        chat::send(&mut connection, &self.target, Some(&self.key), turn).await
    }
}

/// What came back for one turn.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Answer {
    /// Who answered.
    pub(crate) node: String,
    /// Who computed its prompt, where that was another node.
    pub(crate) prefill_node: Option<String>,
    /// The request's id.
    pub(crate) request_id: String,
    /// Tokens that it was expected to have cached.
    pub(crate) expected: u64,
    /// Tokens that it had.
    pub(crate) cached: u64,
    /// Tokens of the prompt.
    pub(crate) prompt: u64,
}

impl Answer {
    /// Reads a good answer.
    pub(crate) fn of(outcome: &Outcome) -> Self {
        assert!(outcome.failure.is_none(), "{outcome:?}");
        let expected = outcome.header("x-homing-expected-cached");
        let usage = outcome.usage.expect("an answer has usage");
        Self {
            node: outcome.header("x-homing-node").expect("a node").to_owned(),
            prefill_node: outcome.header("x-homing-prefill-node").map(str::to_owned),
            request_id: outcome.header("x-request-id").expect("an id").to_owned(),
            expected: expected.and_then(|e| e.parse().ok()).expect("a prediction"),
            cached: usage.cached_tokens,
            prompt: usage.prompt_tokens,
        }
    }
}

/// Up, and its cache is known exactly.
pub(crate) fn is_whole(node: &Value) -> bool {
    node["state"] == "up" && node["trust"] == "exact"
}

/// A turn of a session of its own with this one message.
pub(crate) fn turn(session: &str, message: &str, answer_tokens: u32) -> Turn {
    Turn {
        endpoint: "chat/completions",
        body: json!({
            "model": MODEL, "max_tokens": answer_tokens, "stream": true,
            "stream_options": {"include_usage": true},
            "messages": [{"role": "user", "content": message}],
        }),
        headers: vec![("x-session-affinity", session.to_owned())],
        timeout: SOON,
    }
}

/// A prompt of some hundreds of tokens that begins as no other does.
pub(crate) fn prompt(name: &str, sentences: usize) -> String {
    let sentences =
        (0..sentences).map(|n| format!("Sentence {n} of the story of {name} is here. "));
    sentences.collect()
}

fn row(listed: &Value, id: &str) -> Value {
    let rows = listed["nodes"].as_array().map_or(&[][..], Vec::as_slice);
    let found = rows.iter().find(|row| row["id"] == id);
    found.cloned().unwrap_or(Value::Null)
}

fn runtime() -> Runtime {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .expect("a runtime")
}

fn free_address() -> String {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
    listener.local_addr().expect("an address").to_string()
}

/// A tenant's key.
fn key(data: &Path) -> String {
    let made = homing(data, &["tenant", "create", "test"]);
    assert!(made.status.success(), "{made:?}");
    let made = homing(data, &["key", "create", "--tenant", "test"]);
    let text = String::from_utf8_lossy(&made.stdout).into_owned();
    let key = text.split_whitespace().find(|word| word.starts_with("sk-"));
    key.unwrap_or_else(|| panic!("no key in {made:?}"))
        .to_owned()
}
