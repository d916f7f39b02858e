//! A hub on loopback: its listing, its redirects to a host of its own for large files, and the faults that
//! a test asks for.

use std::collections::{BTreeMap, VecDeque};
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard};

use serde_json::{Value as Json, json};

/// The commit that every revision means.
pub(crate) const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

/// What goes wrong with one answer.
#[derive(Clone, Debug)]
pub(crate) enum Fault {
    /// This status, with this header.
    Status(u16, &'static str),
    /// The connection ends after so many bytes of the body.
    Cut(usize),
    /// The body has other bytes.
    Corrupt,
    /// The range is not honoured.
    Whole,
    /// A redirect to this place.
    To(String),
}

/// One request as it came.
#[derive(Clone, Debug)]
pub(crate) struct Request {
    pub(crate) method: String,
    pub(crate) path: String,
    pub(crate) headers: BTreeMap<String, String>,
}

#[derive(Default)]
pub(crate) struct State {
    pub(crate) files: BTreeMap<String, Vec<u8>>,
    /// Of the hub itself, by the beginning of a path.
    pub(crate) hub_faults: VecDeque<Fault>,
    /// Of the host of large files.
    pub(crate) store_faults: VecDeque<Fault>,
    pub(crate) hub: Vec<Request>,
    pub(crate) store: Vec<Request>,
    /// What the listing says of a file beside its name.
    pub(crate) bare: bool,
    /// In place of the listing.
    pub(crate) listing: Option<Json>,
    /// The store's ETag of everything.
    pub(crate) etag: String,
}

/// A hub, until the test ends.
pub(crate) struct Hub {
    pub(crate) url: String,
    state: Arc<Mutex<State>>,
}

pub(crate) fn sha256(bytes: &[u8]) -> String {
    hex(ring::digest::digest(&ring::digest::SHA256, bytes).as_ref())
}

pub(crate) fn git_sha1(bytes: &[u8]) -> String {
    let blob = [format!("blob {}\0", bytes.len()).as_bytes(), bytes].concat();
    hex(ring::digest::digest(&ring::digest::SHA1_FOR_LEGACY_USE_ONLY, &blob).as_ref())
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Large files are those that the hub would not keep in git.
pub(crate) fn is_large(name: &str) -> bool {
    name.ends_with(".gguf") || name.ends_with(".safetensors")
}

impl Hub {
    pub(crate) fn start(files: &[(&str, &[u8])]) -> Hub {
        let files = files
            .iter()
            .map(|(name, bytes)| ((*name).to_owned(), bytes.to_vec()));
        let state = Arc::new(Mutex::new(State {
            files: files.collect(),
            etag: "\"one\"".to_owned(),
            ..State::default()
        }));
        let store = listen(Arc::clone(&state), |state, request| {
            state.store.push(request.clone());
            let fault = state.store_faults.pop_front();
            let file = state
                .files
                .values()
                .find(|bytes| request.path.ends_with(&sha256(bytes)));
            let body = file.cloned().unwrap_or_default();
            Answer::file(&body, &state.etag, request, fault)
        });
        let url = listen(Arc::clone(&state), move |state, request| {
            state.hub.push(request.clone());
            match state.hub_faults.pop_front() {
                Some(fault @ (Fault::Status(..) | Fault::To(_))) => {
                    Answer::file(b"", "\"x\"", request, Some(fault))
                }
                fault => of_hub(state, request, &store, fault),
            }
        });
        Hub { url, state }
    }

    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no test has panicked with it")
    }
}

fn of_hub(state: &State, request: &Request, store: &str, fault: Option<Fault>) -> Answer {
    if request.path.starts_with("/api/models/org/repo/revision/") {
        let listing = state.listing.clone().unwrap_or_else(|| listing(state));
        return Answer::file(listing.to_string().as_bytes(), "\"x\"", request, fault);
    }
    let prefix = format!("/org/repo/resolve/{COMMIT}/");
    let name = request.path.strip_prefix(&prefix).unwrap_or_default();
    let Some(bytes) = state.files.get(name) else {
        return Answer::file(
            b"no",
            "\"x\"",
            request,
            Some(Fault::Status(404, "x-error-message: Entry not found")),
        );
    };
    if !is_large(name) {
        return Answer::file(bytes, &format!("\"{}\"", git_sha1(bytes)), request, fault);
    }
    let hash = sha256(bytes);
    let mut answer = Answer::new(302);
    answer.headers.push(format!("location: {store}/{hash}"));
    answer.headers.push(format!("x-linked-etag: \"{hash}\""));
    answer
        .headers
        .push(format!("x-linked-size: {}", bytes.len()));
    answer
}

fn listing(state: &State) -> Json {
    let entry = |(name, bytes): (&String, &Vec<u8>)| match (state.bare, is_large(name)) {
        (true, _) => json!({"rfilename": name}),
        (false, true) => {
            let hash = sha256(bytes);
            json!({"rfilename": name, "size": bytes.len(), "blobId": "0".repeat(40),
                "lfs": {"sha256": hash, "size": bytes.len(), "pointerSize": 130}})
        }
        (false, false) => {
            json!({"rfilename": name, "size": bytes.len(), "blobId": git_sha1(bytes)})
        }
    };
    let siblings: Vec<Json> = state.files.iter().map(entry).collect();
    json!({"sha": COMMIT, "siblings": siblings})
}

struct Answer {
    status: u16,
    headers: Vec<String>,
    body: Vec<u8>,
    /// Bytes of it that are sent.
    sent: usize,
}

impl Answer {
    fn new(status: u16) -> Self {
        Self {
            status,
            headers: Vec::new(),
            body: Vec::new(),
            sent: usize::MAX,
        }
    }

    fn file(bytes: &[u8], etag: &str, request: &Request, fault: Option<Fault>) -> Self {
        let mut answer = Self::new(200);
        answer.headers.push(format!("etag: {etag}"));
        let first = request.headers.get("range").and_then(|range| {
            let first = range.strip_prefix("bytes=")?.strip_suffix('-')?;
            first.parse::<usize>().ok()
        });
        let is_same = request
            .headers
            .get("if-range")
            .is_none_or(|known| known == etag);
        answer.body = bytes.to_vec();
        match (first, &fault) {
            (_, Some(Fault::Whole)) | (None, _) => {}
            (Some(first), _) if first >= bytes.len() => answer.status = 416,
            (Some(first), _) if is_same => {
                answer.status = 206;
                let range = format!(
                    "content-range: bytes {first}-{}/{}",
                    bytes.len() - 1,
                    bytes.len()
                );
                answer.headers.push(range);
                answer.body = bytes[first..].to_vec();
            }
            _ => {}
        }
        match fault {
            Some(Fault::Status(status, header)) => {
                answer.status = status;
                answer.headers.push(header.to_owned());
                answer.body.clear();
            }
            Some(Fault::To(place)) => {
                answer.status = 307;
                answer.headers.push(format!("location: {place}"));
            }
            Some(Fault::Cut(sent)) => answer.sent = sent,
            Some(Fault::Corrupt) => answer.body.iter_mut().for_each(|byte| *byte ^= 1),
            Some(Fault::Whole) | None => {}
        }
        answer
    }

    fn write(self, method: &str, mut to: &TcpStream) -> std::io::Result<()> {
        let mut head = format!("HTTP/1.1 {} x\r\nconnection: close\r\n", self.status);
        head += &format!("content-length: {}\r\n", self.body.len());
        for header in &self.headers {
            head += &format!("{header}\r\n");
        }
        to.write_all((head + "\r\n").as_bytes())?;
        if method != "HEAD" {
            to.write_all(&self.body[..self.body.len().min(self.sent)])?;
        }
        to.flush()
    }
}

/// Answers at a port of its own, and says where.
fn listen(
    state: Arc<Mutex<State>>,
    answer: impl Fn(&mut State, &Request) -> Answer + Send + Sync + 'static,
) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let url = format!("http://{}", listener.local_addr().expect("an address"));
    let answer = Arc::new(answer);
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let (state, answer) = (Arc::clone(&state), Arc::clone(&answer));
            std::thread::spawn(move || {
                let Some(request) = read(&stream) else {
                    return;
                };
                let answer = answer(&mut state.lock().expect("a live test"), &request);
                // Whoever asked may be gone.
                let _ = answer.write(&request.method, &stream);
            });
        }
    });
    url
}

fn read(stream: &TcpStream) -> Option<Request> {
    let mut lines = BufReader::new(stream).lines().map_while(Result::ok);
    let first = lines.next()?;
    let mut words = first.split(' ');
    let (method, path) = (words.next()?.to_owned(), words.next()?.to_owned());
    let headers = lines
        .take_while(|line| !line.is_empty())
        .filter_map(|line| {
            let (name, value) = line.split_once(':')?;
            Some((name.to_ascii_lowercase(), value.trim().to_owned()))
        })
        .collect();
    Some(Request {
        method,
        path,
        headers,
    })
}
