//! How does a whole request body get in without hurting anyone?
//!
//! Any framing; bounded before and after decompression; bounded silence and bounded total time,
//! so that neither a large nor a slow client holds memory or a connection. `Expect: 100-continue`
//! is answered here, because nobody else does when the gateway forwards by itself.

use std::io::Read;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http::HeaderMap;
use http::header::{CONTENT_ENCODING, CONTENT_LENGTH, EXPECT};
use pingora::ErrorType;
use pingora::protocols::http::ServerSession;

use crate::config::Limits;
use dialects::error::{ApiError, ErrorKind};

/// A body may take this many times the longest silence: a client that sends a byte now and then
/// is as bad as one that is silent.
const SILENCES_PER_BODY: u32 = 10;
/// Largest zstd window accepted (2^23 bytes, what `zstd` uses up to level 19): the window is
/// allocated before a byte of output exists.
const ZSTD_WINDOW_LOG_MAX: u32 = 23;

/// Refuses headers that are larger in sum than the limit.
pub(crate) fn check_headers(headers: &HeaderMap, limits: &Limits) -> Result<(), ApiError> {
    // Two bytes for `: ` and two for the line end, as on the wire.
    let bytes: usize = headers
        .iter()
        .map(|(name, value)| name.as_str().len() + value.len() + 4)
        .sum();
    if bytes <= limits.header_bytes_max {
        return Ok(());
    }
    Err(ApiError::new(
        ErrorKind::HeadersTooLarge,
        format!(
            "The request headers have {bytes} bytes; at most {} are allowed.",
            limits.header_bytes_max
        ),
    ))
}

/// Reads the whole body and decompresses it.
pub(crate) async fn body(client: &mut ServerSession, limits: &Limits) -> Result<Bytes, ApiError> {
    let headers = &client.req_header().headers;
    let encoding = Encoding::of(headers)?;
    let declared = headers
        .get(CONTENT_LENGTH)
        .and_then(|value| value.to_str().ok())
        .and_then(|value| value.parse::<usize>().ok());
    if declared.is_some_and(|bytes| bytes > limits.body_bytes_max) {
        return Err(too_large(limits.body_bytes_max));
    }
    if headers
        .get(EXPECT)
        .is_some_and(|value| value.as_bytes().eq_ignore_ascii_case(b"100-continue"))
    {
        client
            .write_continue_response()
            .await
            .map_err(|error| broken(&error))?;
    }
    client.set_read_timeout(Some(limits.client_timeout));
    let time = limits.client_timeout.saturating_mul(SILENCES_PER_BODY);
    let read = read_all(client, declared, limits.body_bytes_max);
    let raw = match tokio::time::timeout(time, read).await {
        Ok(result) => result?,
        Err(_) => return Err(too_slow(time)),
    };
    match encoding {
        Encoding::Identity => Ok(raw),
        Encoding::Gzip => inflate(
            flate2::read::MultiGzDecoder::new(&raw[..]),
            limits.body_bytes_max,
        ),
        Encoding::Zstd => {
            let mut decoder =
                zstd::stream::read::Decoder::with_buffer(&raw[..]).map_err(garbled)?;
            decoder
                .window_log_max(ZSTD_WINDOW_LOG_MAX)
                .map_err(garbled)?;
            inflate(decoder, limits.body_bytes_max)
        }
    }
}

async fn read_all(
    client: &mut ServerSession,
    declared: Option<usize>,
    bytes_max: usize,
) -> Result<Bytes, ApiError> {
    let mut first = Bytes::new();
    let mut all = BytesMut::new();
    loop {
        let chunk = match client.read_request_body().await {
            Ok(Some(chunk)) => chunk,
            Ok(None) if all.is_empty() => return Ok(first),
            Ok(None) => return Ok(all.freeze()),
            Err(error) => return Err(broken(&error)),
        };
        if first.len().max(all.len()) + chunk.len() > bytes_max {
            return Err(too_large(bytes_max));
        }
        // Most bodies arrive in one piece and are never copied again.
        if first.is_empty() && all.is_empty() {
            first = chunk;
            continue;
        }
        if all.is_empty() {
            all.reserve(declared.unwrap_or(first.len() + chunk.len()));
            all.extend_from_slice(&first);
        }
        all.extend_from_slice(&chunk);
    }
}

#[derive(Clone, Copy)]
enum Encoding {
    Identity,
    Gzip,
    Zstd,
}

impl Encoding {
    fn of(headers: &HeaderMap) -> Result<Self, ApiError> {
        let Some(value) = headers.get(CONTENT_ENCODING) else {
            return Ok(Self::Identity);
        };
        match value.as_bytes().to_ascii_lowercase().as_slice() {
            b"" | b"identity" => Ok(Self::Identity),
            b"gzip" | b"x-gzip" => Ok(Self::Gzip),
            b"zstd" => Ok(Self::Zstd),
            _ => Err(ApiError::new(
                ErrorKind::UnsupportedEncoding,
                "This content-encoding is not supported; send the body plain, or as gzip or zstd.",
            )),
        }
    }
}

fn inflate(decoder: impl Read, bytes_max: usize) -> Result<Bytes, ApiError> {
    let mut out = Vec::new();
    // One byte past the limit tells a body at the limit from one beyond.
    let bound = u64::try_from(bytes_max)
        .unwrap_or(u64::MAX)
        .saturating_add(1);
    decoder.take(bound).read_to_end(&mut out).map_err(garbled)?;
    if out.len() > bytes_max {
        Err(too_large(bytes_max))
    } else {
        Ok(out.into())
    }
}

fn too_large(bytes_max: usize) -> ApiError {
    ApiError::new(
        ErrorKind::BodyTooLarge,
        format!("The request body is larger than {bytes_max} bytes; send a smaller one."),
    )
}

fn too_slow(time: Duration) -> ApiError {
    ApiError::new(
        ErrorKind::ClientTimeout,
        format!(
            "The request body did not arrive within {} s.",
            time.as_secs_f64()
        ),
    )
}

fn garbled(error: std::io::Error) -> ApiError {
    ApiError::new(
        ErrorKind::InvalidJson,
        format!("The request body does not match its content-encoding: {error}."),
    )
}

fn broken(error: &pingora::Error) -> ApiError {
    match error.etype() {
        ErrorType::ReadTimedout => {
            let message = "The request body stopped arriving; send it without long pauses.";
            ApiError::new(ErrorKind::ClientTimeout, message).because(error)
        }
        // The client may only have closed its sending half, and can still read this.
        _ => ApiError::new(
            ErrorKind::InvalidJson,
            "The request body ended early or its framing is broken; send it whole.",
        )
        .because(error),
    }
}
