//! OpenAI Responses: requests in, events out.

use serde_json::Value;

use crate::answer::{Continues, Translation};
use crate::error::{ApiError, ErrorKind};
use crate::{Fields, Turn};

/// A request that may refer to earlier turns.
pub struct Request<'a> {
    fields: Fields<'a>,
}

/// What the caller decides about a response.
#[derive(Debug, Clone)]
pub struct Ids {
    /// `resp_` and 32 hex digits or more; the ids of items are derived from it.
    pub response: String,
    /// Unix seconds of its creation.
    pub created_s: i64,
}

/// Reads a Responses request.
pub fn parse(fields: Fields<'_>) -> Result<Request<'_>, ApiError> {
    Ok(Request { fields })
}

impl<'a> Request<'a> {
    /// What it continues: the caller looks it up.
    pub fn continues(&self) -> Option<Continues> {
        None
    }

    /// Whether the response is to be stored.
    pub fn stores(&self) -> bool {
        false
    }

    /// The turn, given the items of earlier ones: inputs and outputs in their order.
    pub fn turn(
        self,
        _history: Vec<Value>,
        _ids: Ids,
    ) -> Result<(Turn<'a>, Box<dyn Translation>), ApiError> {
        let _ = self.fields;
        Err(ApiError::new(
            ErrorKind::UnknownUrl,
            "Responses are not served yet.",
        ))
    }
}
