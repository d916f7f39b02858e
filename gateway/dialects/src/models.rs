//! What does `GET /v1/models` answer?
//!
//! The configured models, in the file's order, with the context length that their nodes report.

use serde::Serialize;

use crate::error::{ApiError, ErrorKind};

/// One model as OpenAI lists it, plus its context length where a node has told.
#[derive(Serialize)]
pub struct ModelObject<'a> {
    /// The id to put into requests.
    pub id: &'a str,
    /// Always `model`.
    pub object: &'static str,
    /// OpenAI's clients demand a time; a model file has none that means anything.
    pub created: u64,
    /// Who runs it.
    pub owned_by: &'static str,
    /// Most tokens of prompt and answer together.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_model_len: Option<u64>,
}

impl<'a> ModelObject<'a> {
    /// A model with its context length.
    pub fn new(id: &'a str, max_model_len: Option<u64>) -> Self {
        Self {
            id,
            object: "model",
            created: 0,
            owned_by: "homing",
            max_model_len,
        }
    }
}

/// The list's body.
pub fn list(models: &[ModelObject<'_>]) -> String {
    #[derive(Serialize)]
    struct List<'a> {
        object: &'static str,
        data: &'a [ModelObject<'a>],
    }
    // Plain strings and numbers always serialise.
    serde_json::to_string(&List {
        object: "list",
        data: models,
    })
    .unwrap_or_default()
}

/// The answer to a model that is not served: it names the ones that are.
pub fn unknown<'a>(asked: &str, served: impl Iterator<Item = &'a str>) -> ApiError {
    /// More names than this help nobody in an error message.
    const NAMES_MAX: usize = 20;
    let names: Vec<_> = served.take(NAMES_MAX).map(|id| format!("'{id}'")).collect();
    let asked: String = asked.chars().take(128).collect();
    let served = if names.is_empty() {
        "none".to_owned()
    } else {
        names.join(", ")
    };
    ApiError::param(
        ErrorKind::ModelNotFound,
        "model",
        format!("The model '{asked}' does not exist. Models served here: {served}."),
    )
}
