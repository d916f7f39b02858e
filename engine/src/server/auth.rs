//! Does the caller hold the node token?

use http::HeaderMap;
use http::header::AUTHORIZATION;

use crate::error::{ApiError, Kind};
use crate::request::Caller;

/// The shared secret of gateway and nodes. Kept as a hash: comparing two hashes takes the same
/// time wherever they differ, and the secret cannot slip into a log.
#[derive(Clone, Debug)]
pub struct NodeToken(blake3::Hash);

impl NodeToken {
    /// Takes a token; none if there is nothing in it but white space.
    pub fn new(token: &str) -> Option<Self> {
        let token = token.trim();
        (!token.is_empty()).then(|| Self(blake3::hash(token.as_bytes())))
    }

    /// The key by which nodes prove to each other that they hold the token.
    pub fn transfer_key(&self) -> [u8; 32] {
        blake3::derive_key("homing 2026-11 kv transfer", self.0.as_bytes())
    }

    /// The key by which nodes know each other's blocks in a store that others reach too.
    pub fn store_key(&self) -> [u8; 32] {
        blake3::derive_key("homing 2026-11 shared kv store", self.0.as_bytes())
    }

    fn matches(&self, presented: &str) -> bool {
        // `blake3::Hash` compares in constant time.
        self.0 == blake3::hash(presented.as_bytes())
    }
}

/// Who is asking; an error if a token is configured and not presented.
pub fn caller(token: Option<&NodeToken>, headers: &HeaderMap) -> Result<Caller, ApiError> {
    let Some(token) = token else {
        return Ok(Caller::Anonymous);
    };
    let presented = headers
        .get(AUTHORIZATION)
        .and_then(|value| value.to_str().ok());
    let presented = presented.and_then(|value| {
        let (scheme, presented) = value.split_once(' ')?;
        scheme
            .eq_ignore_ascii_case("bearer")
            .then(|| presented.trim())
    });
    match presented {
        Some(presented) if token.matches(presented) => Ok(Caller::TokenHolder),
        Some(_) => Err(refused("The node token is wrong.")),
        None => Err(refused(
            "This node wants its token: send `Authorization: Bearer <token>`.",
        )),
    }
}

fn refused(message: &str) -> ApiError {
    ApiError::new(Kind::Unauthorized, "invalid_api_key", message)
}
