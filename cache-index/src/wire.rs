//! How do KV-cache events look on the wire?
use crate::event::EventBatch;

/// Why a payload was refused.
#[derive(Debug, thiserror::Error)]
pub enum WireError {
    /// Not yet.
    #[error("malformed")]
    Malformed,
}

/// Decodes one payload.
pub fn decode_batch(payload: &[u8]) -> Result<EventBatch, WireError> {
    let _ = payload;
    Err(WireError::Malformed)
}

/// Encodes one payload in vLLM's map form.
pub fn encode_batch(batch: &EventBatch) -> Vec<u8> {
    let _ = batch;
    Vec::new()
}
