//! A scripted node: what does the gateway make of an answer that comes just so?
//!
//! Speaks HTTP/1.1 over raw TCP, one thread a connection. `/health`, `/v1/models` and `/metrics`
//! answer like a healthy node; every POST plays the next script, or a short good answer if there
//! is none. One with a duty ([`super::duty`]) checks the fields of its part first. It keeps what it received, and counts the connections closed on it in mid-answer.

use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use serde_json::Value;

use super::duty::{Duty, Kind, Meeting, Role};

/// One step of a script.
#[derive(Clone, Debug)]
pub(crate) enum Act {
    /// One write.
    Send(Vec<u8>),
    /// One write for each byte.
    Bytewise(Vec<u8>),
    /// Silence.
    Pause(Duration),
    /// Silence until the gateway closes the connection, at most this long.
    AwaitClose(Duration),
    /// The connection ends here.
    Close,
    /// Silence until the other node of a shared turn has computed its part.
    Meet,
}

/// A request as the node read it.
#[derive(Clone, Debug)]
pub(crate) struct Received {
    /// Request line and headers.
    pub(crate) head: String,
    /// The body.
    pub(crate) body: Value,
}

impl Received {
    /// A header's value.
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.head.lines().skip(1).find_map(|line| {
            let (found, value) = line.split_once(':')?;
            found.eq_ignore_ascii_case(name).then(|| value.trim())
        })
    }
}

#[derive(Default)]
struct State {
    scripts: Mutex<VecDeque<Vec<Act>>>,
    received: Mutex<Vec<Received>>,
    hang_ups: Mutex<Vec<Instant>>,
    connections: AtomicUsize,
    dead: AtomicBool,
    duty: Option<Duty>,
    /// Blocks of its KV pool, of 16 tokens; 0 where it does not tell.
    pool_blocks: AtomicUsize,
    /// It does not tell about its KV.
    is_mute: AtomicBool,
    /// How often it was started anew.
    lives: AtomicUsize,
}

/// A running node.
pub(crate) struct Node {
    pub(crate) addr: SocketAddr,
    /// Where it publishes KV events, if it does.
    pub(crate) events: Option<String>,
    /// What fetching a block from its disk takes, in milliseconds, as configured.
    pub(crate) disk_ms: Option<f64>,
    state: Arc<State>,
}

/// The model every scripted node serves.
pub(crate) const MODEL: &str = "scripted";
/// Its context.
pub(crate) const CONTEXT: u64 = 8192;

impl Node {
    /// A node on a free port.
    pub(crate) fn start() -> Self {
        Self::serving(MODEL)
    }

    /// A node that reports the tokens of its answers and takes a prompt's tokens.
    pub(crate) fn reporting() -> Self {
        Self::launch(MODEL, ",\"token_ids\":true", None)
    }

    /// Nodes that do a part of turns together.
    pub(crate) fn sharing<const N: usize>(kind: Kind, roles: [Role; N]) -> [Self; N] {
        let meeting = Arc::new(Meeting::default());
        roles.map(|role| {
            let duty = Duty {
                kind,
                role,
                meeting: Arc::clone(&meeting),
                engine_id: Arc::new(Mutex::new("engine-0".to_owned())),
            };
            Self::launch(MODEL, "", Some(duty))
        })
    }

    /// A node whose KV pool has so many blocks of 16 tokens.
    pub(crate) fn with_pool(blocks: usize) -> Self {
        let node = Self::start();
        node.state.pool_blocks.store(blocks, Ordering::SeqCst);
        node
    }

    /// A node that serves this model.
    pub(crate) fn serving(model: &'static str) -> Self {
        Self::launch(model, "", None)
    }

    /// `says` are more members of the model's object.
    fn launch(model: &'static str, says: &'static str, duty: Option<Duty>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let addr = listener.local_addr().expect("bound");
        let state = Arc::new(State {
            duty,
            ..State::default()
        });
        let shared = Arc::clone(&state);
        std::thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                if shared.dead.load(Ordering::SeqCst) {
                    return;
                }
                let state = Arc::clone(&shared);
                std::thread::spawn(move || serve(stream, &state, model, says));
            }
        });
        Self {
            addr,
            events: None,
            disk_ms: None,
            state,
        }
    }

    /// Its lines in the gateway's file beside its address.
    pub(crate) fn lines(&self) -> String {
        let Some(duty) = &self.state.duty else {
            return String::new();
        };
        let (role, kind) = (duty.role.as_str(), duty.kind);
        let mut lines = format!("role = \"{role}\"\nconnector = \"{}\"\n", kind.as_str());
        if kind.has_bootstrap() && duty.role == Role::Prefill {
            // Its bootstrap server is itself.
            lines += &format!("bootstrap = \"{}\"\n", self.addr);
        }
        lines
    }

    /// Another process at the same address, with another name; says which.
    pub(crate) fn restart(&self) -> String {
        let life = self.state.lives.fetch_add(1, Ordering::SeqCst) + 1;
        let name = format!("engine-{life}");
        if let Some(duty) = &self.state.duty {
            duty.engine_id.lock().expect("no panic").clone_from(&name);
        }
        name
    }

    /// Whether it tells about its KV.
    pub(crate) fn set_mute(&self, is_mute: bool) {
        self.state.is_mute.store(is_mute, Ordering::SeqCst);
    }

    /// Queues the answer to the next POST.
    pub(crate) fn script(&self, acts: Vec<Act>) {
        self.state.scripts.lock().expect("no panic").push_back(acts);
    }

    /// Takes back the answers that were not given.
    pub(crate) fn unscript(&self) {
        self.state.scripts.lock().expect("no panic").clear();
    }

    /// Every POST so far.
    pub(crate) fn received(&self) -> Vec<Received> {
        self.state.received.lock().expect("no panic").clone()
    }

    /// When the gateway closed connections in the middle of an answer.
    pub(crate) fn hang_ups(&self) -> Vec<Instant> {
        self.state.hang_ups.lock().expect("no panic").clone()
    }

    /// Connections that carried a POST.
    pub(crate) fn connections(&self) -> usize {
        self.state.connections.load(Ordering::SeqCst)
    }

    /// No more connections.
    pub(crate) fn kill(&self) {
        self.state.dead.store(true, Ordering::SeqCst);
        // Wakes the acceptor, which then drops the listener.
        drop(TcpStream::connect(self.addr));
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        self.kill();
    }
}

fn serve(mut stream: TcpStream, state: &State, model: &str, says: &str) {
    let _ = stream.set_nodelay(true);
    let Ok(clone) = stream.try_clone() else {
        return;
    };
    let mut reader = BufReader::new(clone);
    let mut counted = false;
    while let Some((head, body)) = read_request(&mut reader) {
        if state.dead.load(Ordering::SeqCst) {
            return;
        }
        if !head.starts_with("POST") {
            let answer = own(&head, model, says, state);
            if stream.write_all(&answer).is_err() {
                return;
            }
            continue;
        }
        if !counted {
            counted = true;
            state.connections.fetch_add(1, Ordering::SeqCst);
        }
        let body: Value = serde_json::from_slice(&body).unwrap_or(Value::Null);
        let streamed = body["stream"] == true;
        let duty = state.duty.as_ref();
        let transfer = duty.map_or(Ok(None), |duty| duty.transfer(&body));
        let asked = body.clone();
        state
            .received
            .lock()
            .expect("no panic")
            .push(Received { head, body });
        let script = state.scripts.lock().expect("no panic").pop_front();
        let name = transfer.as_ref().ok().and_then(Option::as_deref);
        let script = match (script, duty, &transfer) {
            (Some(script), ..) => script,
            (None, Some(_), Err(why)) => vec![Act::Send(refusal(why))],
            (None, Some(duty), Ok(_)) => match duty.meet(name) {
                Ok(()) => duty.answer(&asked, name),
                Err(why) => vec![Act::Send(json(500, &[], &why))],
            },
            (None, None, _) if streamed => stream_of(&["ok"]),
            (None, None, _) => whole_of("ok"),
        };
        if !play(&mut stream, script, (state, name)) {
            let _ = stream.shutdown(Shutdown::Both);
            return;
        }
        if let Some(duty) = duty {
            duty.answered(name);
        }
    }
}

/// Plays a script; says whether the connection may go on.
fn play(
    stream: &mut TcpStream,
    script: Vec<Act>,
    (state, transfer): (&State, Option<&str>),
) -> bool {
    for act in script {
        let sent = match act {
            Act::Send(bytes) => stream.write_all(&bytes),
            Act::Bytewise(bytes) => bytes.chunks(1).try_for_each(|byte| stream.write_all(byte)),
            Act::Close => return false,
            Act::Meet => {
                let met = state.duty.as_ref().map(|duty| duty.meet(transfer));
                met.unwrap_or(Ok(())).map_err(std::io::Error::other)
            }
            Act::Pause(time) => {
                std::thread::sleep(time);
                Ok(())
            }
            Act::AwaitClose(limit) => {
                let _ = stream.set_read_timeout(Some(limit));
                match stream.read(&mut [0]) {
                    Ok(0) => Err(std::io::ErrorKind::ConnectionAborted.into()),
                    Err(error) if error.kind() != std::io::ErrorKind::WouldBlock => Err(error),
                    _ => {
                        let _ = stream.set_read_timeout(None);
                        Ok(())
                    }
                }
            }
        };
        if sent.is_err() {
            state
                .hang_ups
                .lock()
                .expect("no panic")
                .push(Instant::now());
            return false;
        }
    }
    true
}

fn read_request(reader: &mut BufReader<TcpStream>) -> Option<(String, Vec<u8>)> {
    let mut head = String::new();
    loop {
        let before = head.len();
        if reader.read_line(&mut head).ok()? == 0 {
            return None;
        }
        if head[before..].trim().is_empty() {
            break;
        }
    }
    let length = head
        .lines()
        .find_map(|line| {
            line.to_ascii_lowercase()
                .strip_prefix("content-length:")?
                .trim()
                .parse()
                .ok()
        })
        .unwrap_or(0);
    let mut body = vec![0; length];
    reader.read_exact(&mut body).ok()?;
    Some((head, body))
}

fn refusal(why: &str) -> Vec<u8> {
    let body = serde_json::json!({"error": {"message": why, "type": "invalid_request_error"}});
    json(400, &[], &body.to_string())
}

fn own(head: &str, model: &str, says: &str, state: &State) -> Vec<u8> {
    let told = state.duty.as_ref().and_then(|duty| duty.told(head));
    let is_kv = head.starts_with("GET /v1/kv/info ") || head.starts_with("GET /query ");
    if is_kv && (told.is_none() || state.is_mute.load(Ordering::SeqCst)) {
        return json(404, &[], "{}");
    }
    if let Some(told) = told {
        return json(200, &[], &told);
    }
    let body = if head.starts_with("GET /v1/models") {
        format!(
            r#"{{"object":"list","data":[{{"id":"{model}","object":"model","owned_by":"homing","max_model_len":{CONTEXT}{says}}}]}}"#
        )
    } else if head.starts_with("GET /metrics") {
        let life = 1 + state.lives.load(Ordering::SeqCst);
        let started = format!("process_start_time_seconds {life}\n");
        match state.pool_blocks.load(Ordering::SeqCst) {
            0 => started,
            blocks => format!(
                "{started}vllm:cache_config_info{{block_size=\"16\",num_gpu_blocks=\"{blocks}\"}} 1.0\n"
            ),
        }
    } else {
        "{}".to_owned()
    };
    json(200, &[], &body)
}

/// A JSON answer with its length.
pub(crate) fn json(status: u16, headers: &[&str], body: &str) -> Vec<u8> {
    let extra: String = headers
        .iter()
        .map(|header| format!("{header}\r\n"))
        .collect();
    format!(
        "HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {}\r\n{extra}\r\n{body}",
        body.len()
    )
    .into_bytes()
}

/// A good answer in one piece.
pub(crate) fn whole_of(text: &str) -> Vec<Act> {
    let body = serde_json::json!({
        "id": "x", "object": "chat.completion", "model": MODEL,
        "choices": [{"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}],
        "usage": usage(100, 64, 20),
    });
    vec![Act::Send(json(200, &[], &body.to_string()))]
}

/// OpenAI's usage object.
pub(crate) fn usage(prompt: u64, cached: u64, completion: u64) -> Value {
    serde_json::json!({
        "prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    })
}

/// The head of a stream.
pub(crate) fn stream_head() -> Vec<u8> {
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\nx-homing-node: forged\r\nx-node-secret: 1\r\n\r\n"
        .to_vec()
}

/// One HTTP chunk.
pub(crate) fn chunk(bytes: &[u8]) -> Vec<u8> {
    [format!("{:x}\r\n", bytes.len()).as_bytes(), bytes, b"\r\n"].concat()
}

/// The last HTTP chunk.
pub(crate) const CHUNKS_END: &[u8] = b"0\r\n\r\n";

/// A delta's JSON.
pub(crate) fn delta(text: &str) -> String {
    serde_json::json!({
        "id": "x", "object": "chat.completion.chunk", "model": MODEL,
        "choices": [{"index": 0, "delta": {"content": text}, "finish_reason": null}],
    })
    .to_string()
}

/// The usage chunk's JSON.
pub(crate) fn usage_chunk(prompt: u64, cached: u64, completion: u64) -> String {
    serde_json::json!({
        "id": "x", "object": "chat.completion.chunk", "model": MODEL, "choices": [],
        "usage": usage(prompt, cached, completion),
    })
    .to_string()
}

/// A good stream of these deltas, an event a chunk.
pub(crate) fn stream_of(texts: &[&str]) -> Vec<Act> {
    let mut out = stream_head();
    for text in texts {
        out.extend(chunk(format!("data: {}\n\n", delta(text)).as_bytes()));
    }
    out.extend(chunk(
        format!("data: {}\n\n", usage_chunk(100, 64, 20)).as_bytes(),
    ));
    out.extend(chunk(b"data: [DONE]\n\n"));
    out.extend(CHUNKS_END);
    vec![Act::Send(out)]
}
