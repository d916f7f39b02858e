//! How does a request reach the server with nothing in between that hides time?
//!
//! One keep-alive connection per session, as an agent has, on hyper's HTTP/1 connection type: no
//! pool that shares or queues. A connection that the server closed while idle is opened anew, once,
//! before a byte of the request was sent; nothing else is ever sent twice. Left out: TLS, since
//! what is measured stands on this machine; an `https` address is refused with a word.

use std::time::Duration;

use bytes::Bytes;
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::client::conn::http1::{self, SendRequest};
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;

use crate::error::LoadError;

/// A connect to this machine that takes longer has failed.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// Where the OpenAI-compatible API stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    authority: String,
    prefix: String,
}

impl Target {
    /// Reads `http://host:port[/v1]`; without a path, `/v1` is meant.
    pub fn parse(url: &str) -> Result<Self, LoadError> {
        let wrong = |reason: &str| LoadError::Url {
            url: url.into(),
            reason: reason.into(),
        };
        let uri: hyper::Uri = url
            .parse()
            .map_err(|_| wrong("write http://HOST:PORT/v1"))?;
        match uri.scheme_str() {
            Some("http") => {}
            Some("https") => {
                return Err(wrong(
                    "https is not spoken here: give the plain http address",
                ));
            }
            _ => return Err(wrong("write http://HOST:PORT/v1")),
        }
        let host = uri.host().ok_or_else(|| wrong("the host is missing"))?;
        let authority = format!("{host}:{}", uri.port_u16().unwrap_or(80));
        let prefix = match uri.path().trim_end_matches('/') {
            "" => "/v1".to_owned(),
            path => path.to_owned(),
        };
        Ok(Self { authority, prefix })
    }

    /// `host:port`, for connecting and for the Host header.
    pub fn authority(&self) -> &str {
        &self.authority
    }

    /// The path of an endpoint such as `chat/completions`.
    pub fn path(&self, endpoint: &str) -> String {
        format!("{}/{endpoint}", self.prefix)
    }
}

/// Why no response head came back.
#[derive(Debug)]
pub enum SendFailure {
    /// No connection.
    Connect(String),
    /// The connection broke after the request was on its way.
    Broken(String),
}

/// One keep-alive connection.
pub struct Connection {
    authority: String,
    sender: Option<SendRequest<Full<Bytes>>>,
}

impl Connection {
    /// Opens nothing yet: the first request connects.
    pub fn new(target: &Target) -> Self {
        Self {
            authority: target.authority.clone(),
            sender: None,
        }
    }

    /// Sends one request and waits for the response's head. The body must be read, or the
    /// connection dropped, before the next.
    pub async fn send(
        &mut self,
        request: Request<Full<Bytes>>,
    ) -> Result<Response<Incoming>, SendFailure> {
        let mut request = request;
        if let Some(mut sender) = self.sender.take()
            && sender.ready().await.is_ok()
        {
            match sender.try_send_request(request).await {
                Ok(response) => {
                    self.sender = Some(sender);
                    return Ok(response);
                }
                Err(mut error) => match error.take_message() {
                    // Not a byte was sent: the server had closed the idle connection.
                    Some(unsent) => request = unsent,
                    None => return Err(SendFailure::Broken(describe(&error.into_error()))),
                },
            }
        }
        let mut sender = self.connect().await?;
        let response = sender
            .send_request(request)
            .await
            .map_err(|e| SendFailure::Broken(describe(&e)))?;
        self.sender = Some(sender);
        Ok(response)
    }

    /// Forgets the connection; the next request opens a new one.
    pub fn close(&mut self) {
        self.sender = None;
    }

    async fn connect(&self) -> Result<SendRequest<Full<Bytes>>, SendFailure> {
        let failed = |e: &dyn std::fmt::Display| SendFailure::Connect(e.to_string());
        let stream = tokio::time::timeout(CONNECT_TIMEOUT, TcpStream::connect(&self.authority))
            .await
            .map_err(|_| SendFailure::Connect("timed out".into()))?
            .map_err(|e| failed(&e))?;
        // A request is one write: waiting for more bytes would be counted as the server's time.
        stream.set_nodelay(true).map_err(|e| failed(&e))?;
        let (sender, connection) = http1::handshake(TokioIo::new(stream))
            .await
            .map_err(|e| failed(&e))?;
        // Ends by itself when the sender is dropped or the server closes.
        tokio::spawn(connection);
        Ok(sender)
    }
}

/// hyper's errors hide the cause in `source`.
pub(crate) fn describe(error: &hyper::Error) -> String {
    match std::error::Error::source(error) {
        Some(source) => format!("{error}: {source}"),
        None => error.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Catches an address that is silently read as something else.
    #[test]
    fn addresses() {
        let check = |url: &str, expected: Option<(&str, &str)>| {
            let found = Target::parse(url)
                .ok()
                .map(|t| (t.authority.clone(), t.path("models")));
            assert_eq!(
                found,
                expected.map(|(a, p)| (a.to_owned(), p.to_owned())),
                "{url}"
            );
        };
        check(
            "http://127.0.0.1:8080/v1",
            Some(("127.0.0.1:8080", "/v1/models")),
        );
        check(
            "http://127.0.0.1:8080",
            Some(("127.0.0.1:8080", "/v1/models")),
        );
        check(
            "http://127.0.0.1:8080/",
            Some(("127.0.0.1:8080", "/v1/models")),
        );
        check(
            "http://localhost/proxy/v1/",
            Some(("localhost:80", "/proxy/v1/models")),
        );
        check("https://127.0.0.1/v1", None);
        check("127.0.0.1:8080", None);
        check("", None);
    }
}
