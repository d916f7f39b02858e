//! A client that can misbehave: raw HTTP/1.1 over TCP, answers read to their end.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use serde_json::Value;

/// Longest wait for any byte; a test that needs longer is stuck.
const PATIENCE: Duration = Duration::from_secs(20);

/// An answer.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) head: String,
    pub(crate) body: Vec<u8>,
}

impl Answer {
    /// A header's value.
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.head.lines().skip(1).find_map(|line| {
            let (found, value) = line.split_once(':')?;
            found.eq_ignore_ascii_case(name).then(|| value.trim())
        })
    }

    /// The body as text.
    pub(crate) fn text(&self) -> String {
        String::from_utf8(self.body.clone()).expect("UTF-8")
    }

    /// The body as JSON.
    pub(crate) fn json(&self) -> Value {
        serde_json::from_slice(&self.body)
            .unwrap_or_else(|error| panic!("{error}: {:?}", String::from_utf8_lossy(&self.body)))
    }

    /// The `data` of every event.
    pub(crate) fn events(&self) -> Vec<String> {
        let text = self.text().replace("\r\n", "\n");
        text.split("\n\n")
            .filter_map(|event| Some(event.strip_prefix("data:")?.trim_start().to_owned()))
            .collect()
    }

    /// The JSON of every `data` line, in dialects that name their events too.
    pub(crate) fn chunks_of_lines(&self) -> Vec<Value> {
        let text = self.text();
        let lines = text.lines().filter_map(|line| line.strip_prefix("data:"));
        lines
            .filter_map(|data| serde_json::from_str(data.trim_start()).ok())
            .collect()
    }

    /// The text of all deltas.
    pub(crate) fn content(&self) -> String {
        self.chunks()
            .iter()
            .filter_map(|chunk| chunk["choices"][0]["delta"]["content"].as_str())
            .collect()
    }

    /// Every event that is JSON.
    pub(crate) fn chunks(&self) -> Vec<Value> {
        self.events()
            .iter()
            .filter_map(|event| serde_json::from_str(event).ok())
            .collect()
    }
}

/// A connection to the gateway.
pub(crate) struct Connection {
    pub(crate) stream: TcpStream,
    reader: BufReader<TcpStream>,
}

impl Connection {
    pub(crate) fn open(addr: SocketAddr) -> Self {
        let stream = TcpStream::connect(addr).expect("the gateway listens");
        stream.set_nodelay(true).expect("TCP");
        stream.set_read_timeout(Some(PATIENCE)).expect("TCP");
        let reader = BufReader::new(stream.try_clone().expect("a second handle"));
        Self { stream, reader }
    }

    /// Writes bytes as they are; a gateway that has answered and closed already is no failure.
    pub(crate) fn send(&mut self, bytes: &[u8]) -> &mut Self {
        let _ = self.stream.write_all(bytes);
        self
    }

    /// Writes a request with its length.
    pub(crate) fn request(
        &mut self,
        method: &str,
        path: &str,
        headers: &[&str],
        body: &[u8],
    ) -> &mut Self {
        let extra: String = headers
            .iter()
            .map(|header| format!("{header}\r\n"))
            .collect();
        let head = format!(
            "{method} {path} HTTP/1.1\r\nhost: gateway\r\ncontent-type: application/json\r\ncontent-length: {}\r\n{extra}\r\n",
            body.len()
        );
        self.send(head.as_bytes()).send(body)
    }

    /// Reads one line.
    pub(crate) fn line(&mut self) -> std::io::Result<String> {
        let mut line = String::new();
        self.reader.read_line(&mut line)?;
        Ok(line)
    }

    /// Reads the head of an answer.
    pub(crate) fn head(&mut self) -> (u16, String) {
        let mut head = String::new();
        loop {
            let line = self.line().expect("an answer's head");
            assert!(!line.is_empty(), "closed after {head:?}");
            if line == "\r\n" {
                break;
            }
            head.push_str(&line);
        }
        let status = head.split(' ').nth(1).and_then(|word| word.parse().ok());
        (status.expect("a status"), head)
    }

    /// Reads an answer to its end.
    pub(crate) fn answer(&mut self) -> Answer {
        let (mut status, mut head) = self.head();
        // Interim answers may come before it, any number of them.
        while status == 100 {
            (status, head) = self.head();
        }
        let mut answer = Answer {
            status,
            head,
            body: Vec::new(),
        };
        if answer.header("transfer-encoding").is_some() {
            while let Some(chunk) = self.chunk() {
                answer.body.extend(chunk);
            }
        } else if let Some(length) = answer.header("content-length") {
            answer.body = vec![0; length.parse().expect("a number")];
            self.reader
                .read_exact(&mut answer.body)
                .expect("the whole body");
        } else {
            self.reader
                .read_to_end(&mut answer.body)
                .expect("the whole body");
        }
        answer
    }

    /// Reads one HTTP chunk; none at the last.
    pub(crate) fn chunk(&mut self) -> Option<Vec<u8>> {
        let size = self.line().expect("a chunk's size");
        let size =
            usize::from_str_radix(size.trim(), 16).unwrap_or_else(|_| panic!("no size: {size:?}"));
        let mut chunk = vec![0; size + 2];
        self.reader.read_exact(&mut chunk).expect("the whole chunk");
        chunk.truncate(size);
        (size > 0).then_some(chunk)
    }

    /// Whether the gateway closed the connection.
    pub(crate) fn is_closed(&mut self) -> bool {
        matches!(self.reader.read(&mut [0]), Ok(0) | Err(_))
    }
}
