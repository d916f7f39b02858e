//! Which endpoint does a path mean?
//!
//! One table of paths and methods; a 404 and a 405 say what exists.

use crate::tokens::Wanted;
use dialects::Dialect;
use dialects::error::{ApiError, ErrorKind, Shape};
use http::{HeaderMap, Method};

use crate::responses::Resource;

/// What a path and method mean.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Endpoint<'a> {
    /// Is the gateway well?
    Health,
    /// The list of models.
    Models,
    /// One model.
    Model(&'a str),
    /// A turn in this dialect.
    Turn(Dialect),
    /// How many tokens is this Messages request?
    CountTokens,
    /// Which tokens are this text, or which text are these tokens?
    Tokens(Wanted),
    /// Stored responses and conversations.
    Stored(Resource<'a>),
}

/// Whose errors a client of this path reads. Anthropic's clients name the version of its API in
/// every request, those to paths that do not exist included.
pub(crate) fn shape(path: &str, headers: &HeaderMap) -> Shape {
    let speaks_openai = [
        "/v1/chat/",
        "/v1/completions",
        "/v1/responses",
        "/v1/embeddings",
    ]
    .iter()
    .any(|start| path.starts_with(start));
    let is_anthropic = path.starts_with("/v1/messages")
        || (headers.contains_key("anthropic-version") && !speaks_openai);
    if is_anthropic {
        Shape::Anthropic
    } else {
        Shape::OpenAi
    }
}

/// Resolves path and method; 404 and 405 say what exists.
pub(crate) fn endpoint<'a>(method: &Method, path: &'a str) -> Result<Endpoint<'a>, ApiError> {
    let (endpoint, allow) = match path.strip_suffix('/').unwrap_or(path) {
        "/health" => (Endpoint::Health, "GET, HEAD"),
        "/v1/models" => (Endpoint::Models, "GET, HEAD"),
        "/v1/chat/completions" => (Endpoint::Turn(Dialect::Chat), "POST"),
        "/v1/completions" => (Endpoint::Turn(Dialect::Completions), "POST"),
        "/v1/embeddings" => (Endpoint::Turn(Dialect::Embeddings), "POST"),
        "/tokenize" => (Endpoint::Tokens(Wanted::Tokens), "POST"),
        "/detokenize" => (Endpoint::Tokens(Wanted::Text), "POST"),
        "/v1/messages" => (Endpoint::Turn(Dialect::Messages), "POST"),
        "/v1/messages/count_tokens" => (Endpoint::CountTokens, "POST"),
        "/v1/conversations" => (Endpoint::Stored(Resource::Conversations), "POST"),
        "/v1/responses" => (Endpoint::Turn(Dialect::Responses), "POST"),
        other if let Some((resource, allow)) = Resource::at(other) => {
            (Endpoint::Stored(resource), allow)
        }
        other => match other.strip_prefix("/v1/models/") {
            // Ids may hold slashes, as in `organisation/model`.
            Some(id) => (Endpoint::Model(id), "GET, HEAD"),
            None => {
                return Err(ApiError::new(
                    ErrorKind::UnknownUrl,
                    format!(
                        "Unknown path {}. There are POST /v1/chat/completions, POST /v1/completions, POST /v1/responses, POST /v1/conversations, POST /v1/messages, POST /v1/messages/count_tokens, POST /v1/embeddings, POST /tokenize, POST /detokenize, GET /v1/models and GET /health.",
                        path.chars().take(128).collect::<String>()
                    ),
                ));
            }
        },
    };
    if allow.split(", ").any(|allowed| allowed == method.as_str()) {
        return Ok(endpoint);
    }
    let message = format!("{path} takes {allow}, not {method}.");
    Err(ApiError {
        allow: Some(allow),
        ..ApiError::new(ErrorKind::MethodNotAllowed, message)
    })
}

#[cfg(test)]
mod tests {
    //! Catches a path that leads elsewhere, and a refusal with the wrong status.
    use super::*;

    #[test]
    fn paths_and_methods() {
        for (method, path, expected) in [
            (Method::GET, "/health", Ok(Endpoint::Health)),
            (Method::GET, "/v1/models", Ok(Endpoint::Models)),
            (Method::GET, "/v1/models/a/b", Ok(Endpoint::Model("a/b"))),
            (
                Method::POST,
                "/v1/chat/completions",
                Ok(Endpoint::Turn(Dialect::Chat)),
            ),
            (
                Method::POST,
                "/v1/completions/",
                Ok(Endpoint::Turn(Dialect::Completions)),
            ),
            (
                Method::POST,
                "/v1/embeddings",
                Ok(Endpoint::Turn(Dialect::Embeddings)),
            ),
            (
                Method::POST,
                "/detokenize",
                Ok(Endpoint::Tokens(Wanted::Text)),
            ),
            (Method::GET, "/tokenize", Err(405)),
            (Method::GET, "/v1/chat/completions", Err(405)),
            (Method::POST, "/v1/models", Err(405)),
            (Method::POST, "/v2", Err(404)),
            (Method::GET, "/", Err(404)),
        ] {
            let found = endpoint(&method, path).map_err(|error| error.kind.status());
            assert_eq!(found, expected, "{method} {path}");
        }
    }
}
