//! What went wrong, for the client and for the log?
//!
//! One type for every refusal that a client can read, in OpenAI's shape. A kind decides status and
//! `error.type`; `Kind::row` is the only table of them. What the client reads and what the log
//! says are two fields: the log may name insides that a client has no use for.

use http::StatusCode;
use serde_json::{Value, json};

/// Why a request was refused or failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The request itself is wrong; sending it again changes nothing.
    Invalid,
    /// No node token, or a wrong one.
    Unauthorized,
    /// The caller may not use this field or route.
    Forbidden,
    /// Nothing of that name here.
    NotFound,
    /// The path exists, for another method.
    MethodNotAllowed,
    /// The client was too slow to send its request.
    TooSlow,
    /// The body is larger than this node accepts.
    BodyTooLarge,
    /// The body is encoded in a way that this node does not read.
    UnknownEncoding,
    /// The header is larger than this node accepts.
    HeaderTooLarge,
    /// The request did not end within the time that it was given.
    TimedOut,
    /// This caller has too much waiting here already.
    TooMany,
    /// The node cannot take the request now; another can, or this one later.
    Overloaded,
    /// The node failed.
    Internal,
}

impl Kind {
    fn row(self) -> (StatusCode, &'static str) {
        match self {
            Self::Invalid => (StatusCode::BAD_REQUEST, "invalid_request_error"),
            Self::Unauthorized => (StatusCode::UNAUTHORIZED, "authentication_error"),
            Self::Forbidden => (StatusCode::FORBIDDEN, "permission_error"),
            Self::NotFound => (StatusCode::NOT_FOUND, "invalid_request_error"),
            Self::MethodNotAllowed => (StatusCode::METHOD_NOT_ALLOWED, "invalid_request_error"),
            Self::TooSlow => (StatusCode::REQUEST_TIMEOUT, "invalid_request_error"),
            Self::BodyTooLarge => (StatusCode::PAYLOAD_TOO_LARGE, "invalid_request_error"),
            Self::UnknownEncoding => (StatusCode::UNSUPPORTED_MEDIA_TYPE, "invalid_request_error"),
            Self::HeaderTooLarge => (
                StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE,
                "invalid_request_error",
            ),
            Self::TimedOut => (StatusCode::REQUEST_TIMEOUT, "timeout_error"),
            Self::TooMany => (StatusCode::TOO_MANY_REQUESTS, "rate_limit_error"),
            Self::Overloaded => (StatusCode::SERVICE_UNAVAILABLE, "overloaded_error"),
            Self::Internal => (StatusCode::INTERNAL_SERVER_ERROR, "server_error"),
        }
    }

    /// The HTTP status of this kind.
    pub fn status(self) -> StatusCode {
        self.row().0
    }
}

/// A refusal or failure, as the client reads it.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{message}")]
pub struct ApiError {
    /// What to act on.
    pub kind: Kind,
    /// What the client reads: what is wrong, and what to do about it.
    pub message: String,
    /// The field at fault, e.g. `messages[2].role`.
    pub param: Option<String>,
    /// A stable word for programs, e.g. `context_length_exceeded`.
    pub code: &'static str,
    /// What only the log says.
    pub detail: Option<String>,
    /// Seconds after which trying again makes sense, where whoever refused knows.
    pub retry_after_s: Option<u32>,
}

impl ApiError {
    /// An error of a kind, with its stable code and the client's message.
    pub fn new(kind: Kind, code: &'static str, message: impl Into<String>) -> Self {
        Self {
            kind,
            message: message.into(),
            param: None,
            code,
            detail: None,
            retry_after_s: None,
        }
    }

    /// A request whose field `param` is wrong.
    pub fn field(param: impl Into<String>, message: impl Into<String>) -> Self {
        Self::new(Kind::Invalid, "invalid_value", message).with_param(param)
    }

    /// A failure of the node: the client reads that it failed, the log reads why.
    pub fn internal(detail: impl Into<String>) -> Self {
        let message = "The node failed to compute this answer. Try again, or on another node.";
        let mut error = Self::new(Kind::Internal, "engine_error", message);
        error.detail = Some(detail.into());
        error
    }

    /// A request that did not end in time.
    pub fn timed_out() -> Self {
        let message = "The request did not end within its timeout. Give it more time, or ask for \
                       less.";
        Self::new(Kind::TimedOut, "request_timeout", message)
    }

    /// Says when trying again makes sense.
    #[must_use]
    pub fn with_retry_after(mut self, seconds: u32) -> Self {
        self.retry_after_s = Some(seconds);
        self
    }

    /// Names the field at fault.
    #[must_use]
    pub fn with_param(mut self, param: impl Into<String>) -> Self {
        self.param = Some(param.into());
        self
    }

    /// Replaces the stable code.
    #[must_use]
    pub fn with_code(mut self, code: &'static str) -> Self {
        self.code = code;
        self
    }

    /// The body in OpenAI's shape.
    pub fn body(&self) -> Value {
        let (_, error_type) = self.kind.row();
        json!({"error": {
            "message": self.message, "type": error_type, "param": self.param, "code": self.code,
        }})
    }

    /// Seconds after which trying again makes sense, where it does.
    pub fn retry_after_s(&self) -> Option<u32> {
        match self.kind {
            Kind::Overloaded | Kind::TooMany => Some(self.retry_after_s.unwrap_or(1)),
            Kind::Invalid
            | Kind::Unauthorized
            | Kind::Forbidden
            | Kind::NotFound
            | Kind::MethodNotAllowed
            | Kind::TooSlow
            | Kind::TimedOut
            | Kind::BodyTooLarge
            | Kind::UnknownEncoding
            | Kind::HeaderTooLarge
            | Kind::Internal => None,
        }
    }
}
