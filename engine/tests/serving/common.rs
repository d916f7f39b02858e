//! A running node, and a client that speaks plain HTTP/1.1 over a socket: what a library would
//! hide (framing, half-closed connections, interim answers) is what the tests look at.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

/// The token of the shared node.
pub(crate) const TOKEN: &str = "node-secret";
/// The model id that every node of these tests serves.
pub(crate) const MODEL: &str = "smol";
/// How long anything may take on a busy machine before a test fails.
const PATIENCE: Duration = Duration::from_secs(120);

pub(crate) fn model_path() -> PathBuf {
    let default = "../models/SmolLM2-135M-Instruct.Q4_1.gguf";
    let path = std::env::var_os("HOMING_MODEL").map(PathBuf::from);
    let path = path.unwrap_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(default));
    assert!(
        path.exists(),
        "{} is missing: run `make setup`",
        path.display()
    );
    path
}

pub(crate) fn engine() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_homing-engine"));
    command
        .env_remove("HOMING_NODE_TOKEN")
        .env_remove("HOMING_LOG");
    command
}

/// A node with its own process; it ends with this value, or with the test program.
pub(crate) struct Node {
    pub(crate) child: Child,
    pub(crate) stdin: Option<ChildStdin>,
    pub(crate) address: SocketAddr,
    pub(crate) ready: Value,
    token: Option<&'static str>,
}

/// The node that most tests share: with a token, and with a body limit that a test can exceed.
pub(crate) fn shared() -> &'static Node {
    static SHARED: OnceLock<Node> = OnceLock::new();
    SHARED.get_or_init(|| Node::start_with(&["--body-max", "1MiB"], Some(TOKEN)))
}

impl Node {
    pub(crate) fn start(args: &[&str]) -> Node {
        Self::start_with(args, None)
    }

    pub(crate) fn start_with(args: &[&str], token: Option<&'static str>) -> Node {
        Self::start_model(&model_path(), args, token)
    }

    /// A node of another model.
    pub(crate) fn start_model(model: &Path, args: &[&str], token: Option<&'static str>) -> Node {
        let mut command = engine();
        command.args(["serve", "--listen", "127.0.0.1:0", "--model-id", MODEL]);
        command.args(["--exit-with-stdin", "--threads", "2"]);
        command.arg("--model").arg(model).args(args);
        if let Some(token) = token {
            command.env("HOMING_NODE_TOKEN", token);
        }
        command.env("HOMING_LOG", "warn");
        command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::inherit());
        let mut child = command.spawn().expect("the engine starts");
        let mut line = String::new();
        let stdout = child.stdout.take().expect("stdout is piped");
        BufReader::new(stdout)
            .read_line(&mut line)
            .expect("a line on stdout");
        let ready: Value = serde_json::from_str(&line).expect("the ready line is JSON");
        let address = ready["listening"]
            .as_str()
            .and_then(|url| url.strip_prefix("http://"));
        let address = address
            .and_then(|a| a.parse().ok())
            .expect("the ready line says where");
        Node {
            stdin: child.stdin.take(),
            child,
            address,
            ready,
            token,
        }
    }

    pub(crate) fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(self.address).expect("the node listens");
        stream
            .set_read_timeout(Some(PATIENCE))
            .expect("a timeout can be set");
        stream.set_nodelay(true).expect("nodelay can be set");
        stream
    }

    /// Sends a request with extra header lines, each ending in CRLF, and reads the whole answer.
    pub(crate) fn send(&self, method: &str, path: &str, headers: &str, body: &[u8]) -> Reply {
        let mut stream = self.connect();
        let head = self.head(method, path, headers, body.len());
        // A node that refuses early may close before it has read everything.
        let _ = stream
            .write_all(head.as_bytes())
            .and_then(|()| stream.write_all(body));
        Reply::read(stream)
    }

    pub(crate) fn head(&self, method: &str, path: &str, headers: &str, length: usize) -> String {
        let token = match self.token {
            Some(token) if !headers.to_ascii_lowercase().contains("authorization") => {
                format!("authorization: Bearer {token}\r\n")
            }
            _ => String::new(),
        };
        format!(
            "{method} {path} HTTP/1.1\r\nhost: node\r\nconnection: close\r\n\
             content-length: {length}\r\n{token}{headers}\r\n"
        )
    }

    pub(crate) fn post(&self, path: &str, body: &Value) -> Reply {
        self.send("POST", path, "", body.to_string().as_bytes())
    }

    pub(crate) fn get(&self, path: &str) -> Reply {
        self.send("GET", path, "", b"")
    }

    /// A chat answer as JSON; the test fails if there is none.
    pub(crate) fn chat(&self, fields: Value) -> Value {
        let reply = self.post("/v1/chat/completions", &chat_body(fields));
        assert_eq!(reply.status, 200, "{}", reply.text());
        reply.json()
    }

    /// Opens a stream and leaves it open.
    pub(crate) fn stream(&self, path: &str, body: &Value) -> Events {
        let mut stream = self.connect();
        let body = body.to_string();
        let head = self.head("POST", path, "", body.len());
        stream
            .write_all((head + &body).as_bytes())
            .expect("the node reads");
        Events::open(stream)
    }

    /// The value of a metric, by the start of its line.
    pub(crate) fn metric(&self, name: &str) -> f64 {
        let text = self.get("/metrics").text();
        let line = text.lines().find(|line| line.starts_with(name));
        let value = line.and_then(|line| line.rsplit(' ').next()?.parse().ok());
        value.unwrap_or_else(|| panic!("no metric {name} in\n{text}"))
    }

    pub(crate) fn wait_for_metric(&self, name: &str, holds: impl Fn(f64) -> bool) {
        until(name, || holds(self.metric(name)));
    }

    pub(crate) fn signal(&self, signal: &str) {
        let pid = self.child.id().to_string();
        let sent = Command::new("kill")
            .args([signal, &pid])
            .status()
            .expect("kill runs");
        assert!(sent.success(), "kill {signal} {pid}");
    }

    /// Waits for the process to end and returns its exit code.
    pub(crate) fn exit_code(&mut self) -> Option<i32> {
        let child = &mut self.child;
        let mut code = None;
        until("the process ends", || {
            code = child
                .try_wait()
                .expect("the child is ours")
                .map(|status| status.code());
            code.is_some()
        });
        code.flatten()
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Polls a condition; the test fails if it does not come true.
pub(crate) fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !holds() {
        assert!(Instant::now() < deadline, "waited in vain: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

pub(crate) fn user(text: &str) -> Value {
    json!([{"role": "user", "content": text}])
}

/// A greedy chat request with these fields set or replaced.
pub(crate) fn chat_body(fields: Value) -> Value {
    let mut body =
        json!({"model": MODEL, "messages": user("Name three rivers."), "temperature": 0});
    for (name, value) in fields.as_object().expect("fields are an object") {
        body[name] = value.clone();
    }
    body
}

/// A tool with these parameters.
pub(crate) fn tool(name: &str, parameters: Value) -> Value {
    let description = format!("Does {name}.");
    let function = json!({"name": name, "description": description, "parameters": parameters});
    json!({"type": "function", "function": function})
}

pub(crate) fn content(answer: &Value) -> String {
    answer["choices"][0]["message"]["content"]
        .as_str()
        .expect("an answer has content")
        .to_owned()
}

pub(crate) fn cached(answer: &Value) -> u64 {
    answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        .as_u64()
        .expect("cached tokens")
}

/// An answer read to the end of the connection.
#[derive(Debug)]
pub(crate) struct Reply {
    pub(crate) status: u16,
    pub(crate) headers: HashMap<String, String>,
    pub(crate) body: Vec<u8>,
}

impl Reply {
    pub(crate) fn read(stream: TcpStream) -> Reply {
        let mut reader = BufReader::new(stream);
        let (mut status, mut headers) = read_head(&mut reader);
        while status == 100 {
            (status, headers) = read_head(&mut reader);
        }
        let mut body = Vec::new();
        if headers
            .get("transfer-encoding")
            .is_some_and(|encoding| encoding == "chunked")
        {
            while read_chunk(&mut reader, &mut body) {}
        } else if let Some(length) = headers.get("content-length") {
            let length: u64 = length.parse().expect("a length");
            let read = reader
                .take(length)
                .read_to_end(&mut body)
                .expect("a whole body");
            assert_eq!(read as u64, length, "the body is whole");
        }
        Reply {
            status,
            headers,
            body,
        }
    }

    pub(crate) fn text(&self) -> String {
        String::from_utf8(self.body.clone()).expect("UTF-8")
    }

    pub(crate) fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|_| panic!("not JSON: {}", self.text()))
    }

    /// Status, code and param of an error in OpenAI's shape.
    pub(crate) fn error(&self) -> (u16, String, Option<String>) {
        let error = &self.json()["error"];
        assert!(
            error["message"].as_str().is_some_and(|m| m.len() > 10),
            "{error}"
        );
        assert!(error["type"].is_string(), "{error}");
        let code = error["code"].as_str().expect("a code").to_owned();
        (
            self.status,
            code,
            error["param"].as_str().map(str::to_owned),
        )
    }
}

fn read_head(reader: &mut impl BufRead) -> (u16, HashMap<String, String>) {
    let mut line = String::new();
    reader.read_line(&mut line).expect("a status line");
    let status = line
        .split(' ')
        .nth(1)
        .and_then(|status| status.parse().ok());
    let status = status.unwrap_or_else(|| panic!("no status line: {line:?}"));
    let mut headers = HashMap::new();
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).expect("a header line");
        let Some((name, value)) = line.trim_end().split_once(':') else {
            break;
        };
        headers.insert(name.to_ascii_lowercase(), value.trim().to_owned());
    }
    (status, headers)
}

/// Appends one chunk; false at the last one.
fn read_chunk(reader: &mut impl BufRead, body: &mut Vec<u8>) -> bool {
    let mut line = String::new();
    reader.read_line(&mut line).expect("a chunk size");
    let size = usize::from_str_radix(line.trim(), 16).unwrap_or_else(|_| panic!("size {line:?}"));
    let mut chunk = vec![0; size + 2];
    reader.read_exact(&mut chunk).expect("a whole chunk");
    body.extend_from_slice(&chunk[..size]);
    size > 0
}

/// A stream of server-sent events that is still open.
pub(crate) struct Events {
    pub(crate) status: u16,
    pub(crate) headers: HashMap<String, String>,
    reader: BufReader<TcpStream>,
    buffer: Vec<u8>,
    ended: bool,
}

impl Events {
    fn open(stream: TcpStream) -> Events {
        let mut reader = BufReader::new(stream);
        let (mut status, mut headers) = read_head(&mut reader);
        while status == 100 {
            (status, headers) = read_head(&mut reader);
        }
        Events {
            status,
            headers,
            reader,
            buffer: Vec::new(),
            ended: false,
        }
    }

    /// The data of the next event, comments skipped; none at the end of the body.
    pub(crate) fn next(&mut self) -> Option<String> {
        loop {
            if let Some(end) = self.buffer.windows(2).position(|pair| pair == b"\n\n") {
                let event: Vec<u8> = self.buffer.drain(..end + 2).collect();
                let event = String::from_utf8(event).expect("UTF-8");
                match event.strip_prefix("data: ") {
                    Some(data) => return Some(data.trim_end().to_owned()),
                    None => assert!(event.starts_with(':'), "{event:?}"),
                }
            } else if self.ended {
                assert!(self.buffer.is_empty(), "an unfinished event at the end");
                return None;
            } else {
                self.ended = !read_chunk(&mut self.reader, &mut self.buffer);
            }
        }
    }

    /// All remaining chunks; the terminator must be the last event, once.
    pub(crate) fn chunks(mut self) -> Vec<Value> {
        let mut chunks = Vec::new();
        while let Some(data) = self.next() {
            if data == "[DONE]" {
                assert_eq!(self.next(), None, "nothing follows the terminator");
                return chunks;
            }
            chunks.push(serde_json::from_str(&data).expect("a chunk is JSON"));
        }
        panic!("a stream without terminator: {chunks:?}")
    }
}
