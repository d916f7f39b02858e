//! How is the hub asked? Plain GETs with the redirects followed here: the token goes to the hub and to
//! nobody else, which is where its files usually lie. What may pass (no connection, 429, 5xx) is tried
//! again after a while, or after what `Retry-After` says.

use std::io::Read;
use std::time::Duration;

use ureq::http::{HeaderMap, Response};
use ureq::tls::{Certificate, RootCerts, TlsConfig};
use ureq::{Agent, Body};

use super::error::HubError;
use super::settings::Settings;

/// Redirects in a row; the hub needs two.
const REDIRECTS_MAX: usize = 6;
/// To reach a host.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(15);
/// Of silence, before and within an answer.
const SILENCE_TIMEOUT: Duration = Duration::from_secs(60);
/// Longest wait that a server may ask for.
const WAIT_MAX: Duration = Duration::from_secs(120);
/// Bytes of an error's body that are shown.
const SAID_BYTES_MAX: u64 = 300;

/// When a request is tried again.
#[derive(Debug, Clone, Copy)]
pub struct Retry {
    /// Tries in all, as long as nothing comes of them.
    pub tries: u32,
    /// Before the second try; doubled after each.
    pub first_wait: Duration,
}

impl Default for Retry {
    fn default() -> Self {
        Self {
            tries: 5,
            first_wait: Duration::from_secs(1),
        }
    }
}

impl Retry {
    /// How long to wait after so many tries; none if that was the last one.
    pub(super) fn wait(&self, tried: u32) -> Option<Duration> {
        let factor = 1 << tried.saturating_sub(1).min(10);
        (tried < self.tries).then(|| (self.first_wait * factor).min(WAIT_MAX))
    }
}

/// A connection to the hub.
pub(super) struct Client {
    agent: Agent,
    pub(super) endpoint: String,
    token: Option<String>,
    pub(super) retry: Retry,
}

/// What is asked for, in words for errors.
pub(super) struct Asked<'a> {
    pub(super) what: &'a str,
    /// Where a person reads more.
    pub(super) page: &'a str,
}

impl Client {
    pub(super) fn new(settings: &Settings) -> Self {
        let config = Agent::config_builder()
            .http_status_as_error(false)
            .max_redirects(0)
            .max_redirects_will_error(false)
            .user_agent(concat!("homing/", env!("CARGO_PKG_VERSION")))
            .timeout_connect(Some(CONNECT_TIMEOUT))
            .timeout_recv_response(Some(SILENCE_TIMEOUT))
            .timeout_per_read(Some(SILENCE_TIMEOUT))
            .tls_config(TlsConfig::builder().root_certs(roots()).build())
            .build();
        Self {
            agent: config.into(),
            endpoint: settings.endpoint.clone(),
            token: settings.token.clone(),
            retry: settings.retry,
        }
    }

    /// A good answer (2xx, or 416 to a range), tried for as often as makes sense.
    pub(super) fn get(
        &self,
        url: &str,
        headers: &[(&str, &str)],
        asked: &Asked<'_>,
    ) -> Result<Response<Body>, HubError> {
        let mut tried = 1;
        loop {
            let (error, wait) = match self.follow(url, headers) {
                Ok(answer) if is_good(answer.status().as_u16()) => return Ok(answer),
                Ok(answer) => {
                    let wait = retry_after(answer.headers());
                    let error = refusal(url, answer, asked);
                    if !matches!(error, HubError::Status { .. }) {
                        return Err(error);
                    }
                    (error, wait)
                }
                Err(error @ HubError::Network { .. }) => (error, None),
                Err(error) => return Err(error),
            };
            let Some(own) = self.retry.wait(tried) else {
                return Err(error);
            };
            let wait = wait.map_or(own, |wait| wait.min(WAIT_MAX));
            tracing::warn!(%error, tried, wait_s = wait.as_secs_f64(), "trying again");
            std::thread::sleep(wait);
            tried += 1;
        }
    }

    /// The headers of a file's first answer, where the hub describes it before it sends elsewhere.
    pub(super) fn headers(&self, url: &str, asked: &Asked<'_>) -> Result<HeaderMap, HubError> {
        let mut request = self.agent.head(url);
        if let Some(token) = &self.token {
            request = request.header("authorization", format!("Bearer {token}"));
        }
        let answer = request.call().map_err(|error| HubError::Network {
            url: url.to_owned(),
            why: error.to_string(),
        })?;
        if answer.status().as_u16() >= 400 {
            return Err(refusal(url, answer, asked));
        }
        Ok(answer.into_parts().0.headers)
    }

    /// One request, to where it leads.
    fn follow(&self, url: &str, headers: &[(&str, &str)]) -> Result<Response<Body>, HubError> {
        let mut at = url.to_owned();
        for _ in 0..REDIRECTS_MAX {
            let mut request = self.agent.get(&at);
            for (name, value) in headers {
                request = request.header(*name, *value);
            }
            if let Some(token) = &self.token
                && origin(&at) == origin(&self.endpoint)
            {
                request = request.header("authorization", format!("Bearer {token}"));
            }
            let answer = request.call().map_err(|error| HubError::Network {
                url: at.clone(),
                why: error.to_string(),
            })?;
            if !matches!(answer.status().as_u16(), 301 | 302 | 303 | 307 | 308) {
                return Ok(answer);
            }
            let location = header(answer.headers(), "location").unwrap_or_default();
            let next = resolved(&at, location);
            at = next.ok_or_else(|| {
                HubError::answer(&at, format!("a redirect to {:?}", cut(location)))
            })?;
        }
        Err(HubError::answer(
            url,
            format!("more than {REDIRECTS_MAX} redirects"),
        ))
    }
}

/// The machine's certificates, so that those of a company's own proxy count; else the ones built in.
fn roots() -> RootCerts {
    let found = rustls_native_certs::load_native_certs().unwrap_or_default();
    if found.is_empty() {
        return RootCerts::WebPki;
    }
    let certificates = found
        .iter()
        .map(|cert| Certificate::from_der(cert.as_ref()).to_owned());
    certificates.collect::<Vec<_>>().into()
}

fn is_good(status: u16) -> bool {
    (200..300).contains(&status) || status == 416
}

pub(super) fn header<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
    headers.get(name)?.to_str().ok()
}

fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    let seconds = header(headers, "retry-after")?.trim().parse().ok()?;
    Some(Duration::from_secs(seconds))
}

fn refusal(url: &str, answer: Response<Body>, asked: &Asked<'_>) -> HubError {
    let status = answer.status().as_u16();
    let said = said(answer);
    let what = asked.what.to_owned();
    match status {
        401 | 403 => HubError::Refused {
            what,
            status,
            said,
            page: asked.page.to_owned(),
        },
        404 | 410 => HubError::Missing { what, said },
        400..=499 if status != 408 && status != 429 => {
            HubError::answer(url, format!("status {status}{said}"))
        }
        _ => HubError::Status {
            url: url.to_owned(),
            status,
            said,
        },
    }
}

/// The server's own words: the hub puts them into a header, mirrors into the body.
fn said(answer: Response<Body>) -> String {
    let (parts, body) = answer.into_parts();
    let text = match header(&parts.headers, "x-error-message") {
        Some(text) => text.to_owned(),
        None => {
            let mut bytes = Vec::new();
            // What cannot be read says nothing.
            let _ = body
                .into_reader()
                .take(SAID_BYTES_MAX)
                .read_to_end(&mut bytes);
            String::from_utf8_lossy(&bytes).into_owned()
        }
    };
    let text = text.trim();
    // Pages are for browsers.
    if text.is_empty() || text.starts_with('<') || text.chars().any(char::is_control) {
        return String::new();
    }
    format!(" ({})", cut(text))
}

fn cut(text: &str) -> String {
    text.chars().take(SAID_BYTES_MAX as usize).collect()
}

/// Scheme, host and port: whom a token is meant for.
fn origin(url: &str) -> Option<(String, String)> {
    let (scheme, rest) = url.split_once("://")?;
    let authority = rest.split(['/', '?', '#']).next()?;
    Some((scheme.to_ascii_lowercase(), authority.to_ascii_lowercase()))
}

/// Where a redirect leads; none where it leads nowhere, or out of TLS.
fn resolved(from: &str, location: &str) -> Option<String> {
    let (scheme, host) = origin(from)?;
    let to = if location.starts_with("//") {
        format!("{scheme}:{location}")
    } else if location.starts_with('/') {
        format!("{scheme}://{host}{location}")
    } else {
        location.to_owned()
    };
    let (to_scheme, to_host) = origin(&to)?;
    let is_safe = to_scheme == "https" || (to_scheme == "http" && scheme == "http");
    (is_safe && !to_host.is_empty() && !to_host.contains('@')).then_some(to)
}

#[cfg(test)]
mod tests {
    //! Catches a token that another host is given, and a redirect out of TLS.
    use super::*;

    #[test]
    fn redirects() {
        let check = |from: &str, location: &str, expected: Option<&str>| {
            assert_eq!(resolved(from, location).as_deref(), expected, "{location}");
        };
        check("https://h/a?b", "/c", Some("https://h/c"));
        check("https://h/a", "//other/c", Some("https://other/c"));
        check(
            "https://h/a",
            "https://other:1/c",
            Some("https://other:1/c"),
        );
        check("http://h/a", "http://other/c", Some("http://other/c"));
        for wrong in [
            "",
            "c",
            "http://other/c",
            "ftp://h/c",
            "https://",
            "https://h@evil/c",
        ] {
            check("https://h/a", wrong, None);
        }
    }

    #[test]
    fn who_is_the_hub() {
        let same = |one: &str, other: &str| origin(one) == origin(other);
        assert!(same("https://hub", "https://HUB/api?x=https://y"));
        for other in [
            "http://hub/",
            "https://hub:444/",
            "https://hub.evil/",
            "https://hub@evil/",
        ] {
            assert!(!same("https://hub", other), "{other}");
        }
    }

    #[test]
    fn waiting() {
        let retry = Retry::default();
        let waits: Vec<_> = (1..=5).map(|tried| retry.wait(tried)).collect();
        let seconds = |s| Some(Duration::from_secs(s));
        assert_eq!(
            waits,
            [seconds(1), seconds(2), seconds(4), seconds(8), None]
        );
    }
}
