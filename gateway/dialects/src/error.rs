//! What does a client read when the gateway itself says no?
//!
//! One table from kind to HTTP status, OpenAI's `type` and `code`. What the client reads
//! ([`ApiError::message`]) and what the log says ([`ApiError::cause`]) are two fields: the first
//! says what to do, the second may name files and addresses.
//!
//! A client reads the error in its own dialect's [`Shape`]; so it does what a node refuses
//! ([`reshape`]).

mod anthropic;

use serde::Serialize;
use serde_json::Value;

/// What went wrong, as far as anyone acts on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorKind {
    /// The body is not JSON, or not UTF-8.
    InvalidJson,
    /// A parameter has the wrong type or value.
    InvalidValue,
    /// A parameter is missing.
    MissingParameter,
    /// A request that the Responses API refuses under a code of its own.
    Refused(Code),
    /// Prompt and requested output do not fit the model.
    ContextLength,
    /// No key, or one that does not exist.
    InvalidApiKey,
    /// No such path.
    UnknownUrl,
    /// No such model.
    ModelNotFound,
    /// What the request names is not stored.
    NotFound,
    /// The path exists, the method does not.
    MethodNotAllowed,
    /// The client stopped sending.
    ClientTimeout,
    /// The body is past the limit.
    BodyTooLarge,
    /// A `content-encoding` nobody asked for.
    UnsupportedEncoding,
    /// The headers are past the limit.
    HeadersTooLarge,
    /// Too many requests of one tenant at once.
    RateLimited,
    /// A bug of ours.
    Internal,
    /// Every node that was tried failed.
    NodeFailed,
    /// No node can serve the model now.
    NoNode,
    /// The gateway is stopping.
    Stopping,
    /// The usage record cannot be written.
    LedgerUnavailable,
    /// What is stored cannot be read.
    StoreUnavailable,
    /// The node stayed silent for too long.
    NodeTimeout,
}

/// Codes of refusals in the Responses API.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Code {
    /// None: `code` is null.
    Null,
    /// A value of another type.
    InvalidType,
    /// An integer below its range.
    IntegerBelow,
    /// An integer above its range.
    IntegerAbove,
    /// A number below its range.
    DecimalBelow,
    /// A number above its range.
    DecimalAbove,
    /// A string without a character.
    EmptyString,
    /// A string that is too long.
    LongString,
    /// A list that is too long.
    LongArray,
    /// An object with too many members.
    ManyProperties,
    /// Two parameters of which one is allowed.
    Exclusive,
    /// Something that is not served here.
    Unsupported,
    /// An earlier response that is not stored.
    PreviousResponse,
    /// A conversation that another turn is writing.
    ConversationLocked,
}

impl Code {
    fn as_str(self) -> Option<&'static str> {
        match self {
            Self::Null => None,
            Self::InvalidType => Some("invalid_type"),
            Self::IntegerBelow => Some("integer_below_min_value"),
            Self::IntegerAbove => Some("integer_above_max_value"),
            Self::DecimalBelow => Some("decimal_below_min_value"),
            Self::DecimalAbove => Some("decimal_above_max_value"),
            Self::EmptyString => Some("empty_string"),
            Self::LongString => Some("string_above_max_length"),
            Self::LongArray => Some("array_above_max_length"),
            Self::ManyProperties => Some("object_above_max_properties"),
            Self::Exclusive => Some("mutually_exclusive_parameters"),
            Self::Unsupported => Some("unsupported_parameter"),
            Self::ConversationLocked => Some("conversation_locked"),
            Self::PreviousResponse => Some("previous_response_not_found"),
        }
    }
}

/// One row of the table.
#[derive(Debug)]
struct Row {
    status: u16,
    r#type: &'static str,
    code: Option<&'static str>,
    /// Seconds to advise before a retry; none where a retry does not help.
    retry_after_s: Option<u64>,
}

const REQUEST: &str = "invalid_request_error";
const SERVER: &str = "server_error";

impl ErrorKind {
    fn row(self) -> Row {
        let row = |status, r#type, code| Row {
            status,
            r#type,
            code: Some(code),
            retry_after_s: None,
        };
        let again = |status, r#type, code| Row {
            retry_after_s: Some(1),
            ..row(status, r#type, code)
        };
        match self {
            Self::InvalidJson => row(400, REQUEST, "invalid_json"),
            Self::InvalidValue => row(400, REQUEST, "invalid_value"),
            Self::MissingParameter => row(400, REQUEST, "missing_required_parameter"),
            Self::Refused(code) => Row {
                code: code.as_str(),
                ..row(400, REQUEST, "")
            },
            Self::NotFound => Row {
                code: None,
                ..row(404, REQUEST, "")
            },
            Self::ContextLength => row(400, REQUEST, "context_length_exceeded"),
            Self::InvalidApiKey => row(401, REQUEST, "invalid_api_key"),
            Self::UnknownUrl => row(404, REQUEST, "unknown_url"),
            Self::ModelNotFound => row(404, REQUEST, "model_not_found"),
            Self::MethodNotAllowed => row(405, REQUEST, "method_not_allowed"),
            Self::ClientTimeout => row(408, REQUEST, "request_timeout"),
            Self::BodyTooLarge => row(413, REQUEST, "body_too_large"),
            Self::UnsupportedEncoding => row(415, REQUEST, "unsupported_content_encoding"),
            Self::HeadersTooLarge => row(431, REQUEST, "headers_too_large"),
            Self::RateLimited => again(429, "requests", "rate_limit_exceeded"),
            Self::Internal => row(500, SERVER, "internal_error"),
            Self::NodeFailed => row(502, SERVER, "node_failed"),
            Self::NoNode => again(503, SERVER, "no_node_available"),
            Self::Stopping => again(503, SERVER, "gateway_stopping"),
            Self::LedgerUnavailable => again(503, SERVER, "ledger_unavailable"),
            Self::StoreUnavailable => again(503, SERVER, "store_unavailable"),
            Self::NodeTimeout => row(504, SERVER, "node_timeout"),
        }
    }

    /// The HTTP status.
    pub fn status(self) -> u16 {
        self.row().status
    }

    /// The HTTP status in a dialect.
    pub fn status_in(self, shape: Shape) -> u16 {
        match (shape, self) {
            (Shape::Anthropic, Self::NoNode) => anthropic::overloaded(),
            _ => self.status(),
        }
    }

    /// OpenAI's `code`.
    pub fn code(self) -> Option<&'static str> {
        self.row().code
    }
}

/// An error on its way to the client.
#[derive(Debug, thiserror::Error)]
#[error("{message}")]
pub struct ApiError {
    /// What to act on.
    pub kind: ErrorKind,
    /// What the client reads: what is wrong and what to do.
    pub message: String,
    /// The parameter at fault.
    pub param: Option<String>,
    /// What only the log says.
    pub cause: Option<String>,
    /// The methods that a path takes; for 405.
    pub allow: Option<&'static str>,
    /// Seconds for the `retry-after` header, where more is known than the kind says.
    pub retry_after_s: Option<u64>,
}

impl ApiError {
    /// An error with a message and nothing else.
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Self {
            kind,
            message: message.into(),
            param: None,
            cause: None,
            allow: None,
            retry_after_s: kind.row().retry_after_s,
        }
    }

    /// An error about one parameter.
    pub fn param(kind: ErrorKind, param: impl Into<String>, message: impl Into<String>) -> Self {
        Self {
            param: Some(param.into()),
            ..Self::new(kind, message)
        }
    }

    /// A parameter with a wrong type or value.
    pub fn invalid(param: impl Into<String>, message: impl Into<String>) -> Self {
        Self::param(ErrorKind::InvalidValue, param, message)
    }

    /// The same error, with what the log is to say.
    pub fn because(self, cause: impl ToString) -> Self {
        Self {
            cause: Some(cause.to_string()),
            ..self
        }
    }

    /// The error object in the client's dialect.
    pub fn body(&self, shape: Shape) -> String {
        match shape {
            Shape::OpenAi => self.openai(),
            Shape::Anthropic if self.kind == ErrorKind::ContextLength => anthropic::body(
                self.kind.status(),
                &anthropic::context_length(&self.message),
            ),
            Shape::Anthropic => anthropic::body(self.kind.status_in(shape), &self.message),
        }
    }

    fn openai(&self) -> String {
        let row = self.kind.row();
        let envelope = Envelope {
            error: Body {
                message: &self.message,
                r#type: row.r#type,
                param: self.param.as_deref(),
                code: row.code,
            },
        };
        // Strings and options of strings always serialise.
        serde_json::to_string(&envelope).unwrap_or_default()
    }
}

/// Whose error object a client reads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Shape {
    /// `{"error": {"message", "type", "param", "code"}}`
    #[default]
    OpenAi,
    /// `{"type": "error", "error": {"type", "message"}}`
    Anthropic,
}

/// A node's refusal in the client's dialect: as it is, if it has that shape already.
pub fn reshape(shape: Shape, status: u16, body: &[u8]) -> Vec<u8> {
    let value: Option<Value> = serde_json::from_slice(body).ok();
    let spoken = value.as_ref().and_then(|value| {
        let is_object = value["error"].is_object();
        is_object.then_some(match value["type"] == "error" {
            true => Shape::Anthropic,
            false => Shape::OpenAi,
        })
    });
    if spoken == Some(shape) {
        return body.to_vec();
    }
    // OpenAI's shape, vLLM's older one, and FastAPI's.
    let told = value.as_ref().and_then(|value| {
        let named = ["message", "detail", "error"].into_iter();
        let mut plain = named.map(|name| &value[name]);
        value["error"]["message"]
            .as_str()
            .or_else(|| plain.find_map(Value::as_str))
    });
    let message = match told {
        Some(told) => told.to_owned(),
        None => format!("The node answered with status {status} and no explanation."),
    };
    match shape {
        Shape::Anthropic => {
            let code = value.as_ref().map(|value| &value["error"]["code"]);
            let is_too_long = code.is_some_and(|code| code == "context_length_exceeded")
                || anthropic::is_context_length(&message);
            let message = match is_too_long {
                true => anthropic::context_length(&message),
                false => message,
            };
            anthropic::body(status, &message).into_bytes()
        }
        Shape::OpenAi => {
            let kind = if status < 500 { REQUEST } else { SERVER };
            let error = Envelope {
                error: Body {
                    message: &message,
                    r#type: kind,
                    param: None,
                    code: None,
                },
            };
            serde_json::to_vec(&error).unwrap_or_default()
        }
    }
}

#[derive(Serialize)]
struct Envelope<'a> {
    error: Body<'a>,
}

#[derive(Serialize)]
struct Body<'a> {
    message: &'a str,
    r#type: &'static str,
    param: Option<&'a str>,
    code: Option<&'static str>,
}
