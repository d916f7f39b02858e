//! Who is asking?
//!
//! `Authorization: Bearer` or `x-api-key` → tenant and key. Everything after this is scoped by the
//! tenant. The key itself goes nowhere else: not to the node, not into a log.

use http::HeaderMap;
use http::header::AUTHORIZATION;

use crate::store::{KeyIdentity, Store};
use dialects::error::{ApiError, ErrorKind};

/// Finds the key in the headers and whose it is.
pub(crate) fn identify(store: &Store, headers: &HeaderMap) -> Result<KeyIdentity, ApiError> {
    let key = presented(headers).ok_or_else(|| {
        ApiError::new(
            ErrorKind::InvalidApiKey,
            "You didn't provide an API key. Send it as 'Authorization: Bearer sk-homing-…' or in 'x-api-key'.",
        )
    })?;
    store.identify(key).ok_or_else(|| {
        ApiError::new(
            ErrorKind::InvalidApiKey,
            "Incorrect API key provided. Keys start with 'sk-homing-'; `homing key create` makes one.",
        )
    })
}

fn presented(headers: &HeaderMap) -> Option<&str> {
    let bearer = headers
        .get(AUTHORIZATION)
        .and_then(|value| value.to_str().ok())
        .and_then(|value| {
            let (scheme, key) = value.split_once(' ')?;
            scheme.eq_ignore_ascii_case("bearer").then_some(key.trim())
        });
    bearer
        .or_else(|| {
            headers
                .get("x-api-key")
                .and_then(|value| value.to_str().ok())
        })
        .filter(|key| !key.is_empty())
}

#[cfg(test)]
mod tests {
    //! Catches a client whose way of sending its key is not understood.
    use super::*;

    #[test]
    fn both_headers_and_any_case_of_the_scheme() {
        for (name, value, expected) in [
            ("authorization", "Bearer k", Some("k")),
            ("authorization", "bearer  k ", Some("k")),
            ("authorization", "Basic k", None),
            ("authorization", "Bearer ", None),
            ("x-api-key", "k", Some("k")),
            ("x-other", "k", None),
        ] {
            let mut headers = HeaderMap::new();
            headers.insert(name, value.parse().expect("a header value"));
            assert_eq!(presented(&headers), expected, "{name}: {value}");
        }
    }
}
