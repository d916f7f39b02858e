//! A scripted node: what does the gateway make of an answer that comes just so?
//!
//! Speaks HTTP/1.1 over raw TCP, one thread a connection. `/health`, `/v1/models` and `/metrics`
//! answer like a healthy node; every POST plays the next script, or a short good answer if there
//! is none. It keeps what it received, and counts the connections closed on it in mid-answer.

use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use serde_json::Value;

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
}

/// A running node.
pub(crate) struct Node {
    pub(crate) addr: SocketAddr,
    /// Where it publishes KV events, if it does.
    pub(crate) events: Option<String>,
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
        Self::launch(MODEL, ",\"token_ids\":true")
    }

    /// A node that serves this model.
    pub(crate) fn serving(model: &'static str) -> Self {
        Self::launch(model, "")
    }

    /// `says` are more members of the model's object.
    fn launch(model: &'static str, says: &'static str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let addr = listener.local_addr().expect("bound");
        let state = Arc::new(State::default());
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
            state,
        }
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
            let answer = own(&head, model, says);
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
        state
            .received
            .lock()
            .expect("no panic")
            .push(Received { head, body });
        let script = state.scripts.lock().expect("no panic").pop_front();
        let script = script.unwrap_or_else(|| {
            if streamed {
                stream_of(&["ok"])
            } else {
                whole_of("ok")
            }
        });
        if !play(&mut stream, script, state) {
            let _ = stream.shutdown(Shutdown::Both);
            return;
        }
    }
}

/// Plays a script; says whether the connection may go on.
fn play(stream: &mut TcpStream, script: Vec<Act>, state: &State) -> bool {
    for act in script {
        let sent = match act {
            Act::Send(bytes) => stream.write_all(&bytes),
            Act::Bytewise(bytes) => bytes.chunks(1).try_for_each(|byte| stream.write_all(byte)),
            Act::Close => return false,
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

fn own(head: &str, model: &str, says: &str) -> Vec<u8> {
    let body = if head.starts_with("GET /v1/models") {
        format!(
            r#"{{"object":"list","data":[{{"id":"{model}","object":"model","owned_by":"homing","max_model_len":{CONTEXT}{says}}}]}}"#
        )
    } else if head.starts_with("GET /metrics") {
        "process_start_time_seconds 1\n".to_owned()
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
