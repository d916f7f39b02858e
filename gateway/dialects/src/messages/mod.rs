//! Anthropic Messages: requests in, events out.

use crate::answer::Translation;
use crate::error::{ApiError, ErrorKind};
use crate::{ChatPrompt, Fields, Turn};

/// Reads a Messages request; the translation turns the answer back.
pub fn parse(_fields: Fields<'_>) -> Result<(Turn<'_>, Box<dyn Translation>), ApiError> {
    Err(ApiError::new(
        ErrorKind::UnknownUrl,
        "Messages are not served yet.",
    ))
}

/// Reads a request to count tokens: the model, and what becomes the prompt.
pub fn count_tokens(_fields: Fields<'_>) -> Result<(String, ChatPrompt), ApiError> {
    Err(ApiError::new(
        ErrorKind::UnknownUrl,
        "Messages are not served yet.",
    ))
}
