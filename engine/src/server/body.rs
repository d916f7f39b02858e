//! How does a request's body come in, from a client that may be slow, huge or gone?

use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http::HeaderMap;
use http::header::CONTENT_ENCODING;
use http_body_util::BodyExt;
use hyper::body::{Body, Incoming};

use crate::error::{ApiError, Kind};

/// What is read of a request at most, and for how long.
#[derive(Clone, Copy, Debug)]
pub(super) struct ReadLimits {
    /// Bytes of a body.
    pub(super) body_bytes_max: usize,
    /// How long a client may send nothing; ten times that is all it has for the whole body.
    pub(super) idle: Duration,
}

/// Refuses an encoded body: the gateway decodes what clients compress, and a node is close by.
pub(super) fn plain(headers: &HeaderMap) -> Result<(), ApiError> {
    match headers.get(CONTENT_ENCODING) {
        None => Ok(()),
        Some(encoding) if encoding.as_bytes().eq_ignore_ascii_case(b"identity") => Ok(()),
        Some(_) => {
            let message = "This node reads no encoded bodies. Send it without Content-Encoding.";
            Err(ApiError::new(
                Kind::UnknownEncoding,
                "unsupported_encoding",
                message,
            ))
        }
    }
}

/// Reads the whole body.
pub(super) async fn read(body: Incoming, limits: &ReadLimits) -> Result<Bytes, ApiError> {
    if body.size_hint().lower() > limits.body_bytes_max as u64 {
        return Err(too_large(limits));
    }
    let total = limits.idle * 10;
    let read = tokio::time::timeout(total, read_frames(body, limits)).await;
    read.unwrap_or_else(|_elapsed| Err(too_slow(total)))
}

async fn read_frames(mut body: Incoming, limits: &ReadLimits) -> Result<Bytes, ApiError> {
    let mut whole = BytesMut::new();
    loop {
        let frame = tokio::time::timeout(limits.idle, body.frame()).await;
        let frame = match frame.map_err(|_elapsed| too_slow(limits.idle))? {
            None => return Ok(whole.freeze()),
            Some(Ok(frame)) => frame,
            Some(Err(error)) => return Err(cut(&error)),
        };
        let Ok(data) = frame.into_data() else {
            continue;
        };
        if whole.len() + data.len() > limits.body_bytes_max {
            return Err(too_large(limits));
        }
        whole.extend_from_slice(&data);
    }
}

fn too_large(limits: &ReadLimits) -> ApiError {
    let message = format!("The body is larger than {} bytes.", limits.body_bytes_max);
    ApiError::new(Kind::BodyTooLarge, "body_too_large", message)
}

fn too_slow(limit: Duration) -> ApiError {
    let message = format!(
        "The body did not arrive within {} s. Send it faster.",
        limit.as_secs_f64()
    );
    ApiError::new(Kind::TooSlow, "request_timeout", message)
}

fn cut(error: &hyper::Error) -> ApiError {
    let message = "The body ended before it was complete, or its framing is broken.";
    let mut cut = ApiError::new(Kind::Invalid, "incomplete_body", message);
    cut.detail = Some(error.to_string());
    cut
}
