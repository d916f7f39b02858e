//! How are answers and refusals put into HTTP?

use std::time::Duration;

use bytes::Bytes;
use http::header::{ALLOW, CONTENT_LENGTH, CONTENT_TYPE, RETRY_AFTER, WWW_AUTHENTICATE};
use http::{HeaderValue, Response, StatusCode};
use http_body_util::{Either, Full};
use serde_json::Value;

use super::Answer;
use crate::error::{ApiError, Kind};

/// A JSON answer.
pub(super) fn json_answer(status: StatusCode, value: &Value) -> Answer {
    let mut answer = whole(status, value.to_string().into());
    answer
        .headers_mut()
        .insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    answer
}

pub(super) fn whole(status: StatusCode, body: Bytes) -> Answer {
    let length = HeaderValue::from(body.len());
    let mut answer = Response::new(Either::Left(Full::new(body)));
    *answer.status_mut() = status;
    answer.headers_mut().insert(CONTENT_LENGTH, length);
    answer
}

pub(super) fn error_answer(error: &ApiError) -> Answer {
    let mut answer = json_answer(error.kind.status(), &error.body());
    let headers = answer.headers_mut();
    if let Some(seconds) = error.retry_after_s() {
        headers.insert(RETRY_AFTER, HeaderValue::from(seconds));
    }
    match error.kind {
        Kind::Unauthorized => {
            headers.insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        Kind::MethodNotAllowed => {
            headers.insert(ALLOW, HeaderValue::from_static("GET, HEAD, POST"));
        }
        Kind::Invalid
        | Kind::Forbidden
        | Kind::NotFound
        | Kind::TooSlow
        | Kind::BodyTooLarge
        | Kind::UnknownEncoding
        | Kind::HeaderTooLarge
        | Kind::TimedOut
        | Kind::TooMany
        | Kind::Overloaded
        | Kind::Internal => {}
    }
    answer
}

/// The answer to a client that began a head and did not finish it, as bytes: hyper has given the
/// connection up by then.
pub(super) fn header_timeout(limit: Duration) -> String {
    let seconds = limit.as_secs_f64();
    let message = format!("The request's header did not arrive within {seconds} s.");
    let error = ApiError::new(Kind::TooSlow, "request_timeout", message);
    let body = error.body().to_string();
    format!(
        "HTTP/1.1 408 Request Timeout\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\
         connection: close\r\n\r\n{body}",
        body.len()
    )
}
