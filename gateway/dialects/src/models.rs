//! What does `GET /v1/models` answer?
//!
//! The configured models in the file's order, then the names that stand for one, each with the
//! context length that the model's nodes report. In OpenAI's shape, all at once; or in Anthropic's,
//! where its clients ask for pages.

use serde::Serialize;
use serde_json::{Value, json};

use crate::error::{ApiError, ErrorKind, Shape};

/// Models on a page of Anthropic's, where the client does not say.
const PAGE_DEFAULT: usize = 20;
/// Most models on a page.
const PAGE_MAX: usize = 1000;
/// A model file has no time that means anything; both APIs demand one.
const UNKNOWN_TIME: &str = "1970-01-01T00:00:00Z";

/// A name that a client may ask for.
#[derive(Debug, Clone)]
pub struct Listed<'a> {
    /// The id to put into requests.
    pub id: &'a str,
    /// Most tokens of prompt and answer together, where a node has told.
    pub context_max: Option<u64>,
}

/// Which part of the list is wanted.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Page<'a> {
    /// `limit`
    pub limit: Option<&'a str>,
    /// `after_id`
    pub after: Option<&'a str>,
    /// `before_id`
    pub before: Option<&'a str>,
}

/// The body of one model.
pub fn show(model: &Listed<'_>, shape: Shape) -> String {
    match shape {
        Shape::OpenAi => text(&OpenAi::from(model)),
        Shape::Anthropic => text(&anthropic(model)),
    }
}

/// The body of the list. OpenAI's has no pages and heeds no parameters.
pub fn list(models: &[Listed<'_>], shape: Shape, page: &Page<'_>) -> Result<String, ApiError> {
    match shape {
        Shape::OpenAi => {
            let data: Vec<_> = models.iter().map(OpenAi::from).collect();
            Ok(text(&json!({"object": "list", "data": data})))
        }
        Shape::Anthropic => {
            let (shown, has_more) = page.of(models)?;
            let data: Vec<_> = shown.iter().map(anthropic).collect();
            Ok(text(&json!({
                "data": data,
                "has_more": has_more,
                "first_id": shown.first().map(|model| model.id),
                "last_id": shown.last().map(|model| model.id),
            })))
        }
    }
}

/// The answer to a model that is not served: it names the ones that are, and the names that stand
/// for one.
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

impl Page<'_> {
    /// The models on this page, and whether there are more in its direction.
    fn of<'m, 'a>(&self, models: &'m [Listed<'a>]) -> Result<(&'m [Listed<'a>], bool), ApiError> {
        let limit = match self.limit {
            None => PAGE_DEFAULT,
            Some(text) => text
                .parse()
                .ok()
                .filter(|limit| (1..=PAGE_MAX).contains(limit))
                .ok_or_else(|| {
                    let text = format!("limit: must be an integer from 1 to {PAGE_MAX}.");
                    ApiError::invalid("limit", text)
                })?,
        };
        let at = |name: &str, id: &str| {
            let found = models.iter().position(|model| model.id == id);
            found.ok_or_else(|| ApiError::invalid(name, format!("{name}: there is no such model.")))
        };
        match (self.after, self.before) {
            (Some(_), Some(_)) => Err(ApiError::invalid(
                "after_id",
                "after_id and before_id exclude each other.",
            )),
            (None, Some(id)) => {
                let before = &models[..at("before_id", id)?];
                let skipped = before.len().saturating_sub(limit);
                Ok((&before[skipped..], skipped > 0))
            }
            (after, None) => {
                let begin = after.map_or(Ok(0), |id| at("after_id", id).map(|at| at + 1))?;
                let behind = &models[begin..];
                let shown = behind.len().min(limit);
                Ok((&behind[..shown], shown < behind.len()))
            }
        }
    }
}

#[derive(Serialize)]
struct OpenAi<'a> {
    id: &'a str,
    object: &'static str,
    created: u64,
    owned_by: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    max_model_len: Option<u64>,
}

impl<'a> From<&Listed<'a>> for OpenAi<'a> {
    fn from(model: &Listed<'a>) -> Self {
        Self {
            id: model.id,
            object: "model",
            created: 0,
            owned_by: "homing",
            max_model_len: model.context_max,
        }
    }
}

/// Prompt and answer share the context, so each may have nearly all of it.
fn anthropic(model: &Listed<'_>) -> Value {
    let answer_max = model.context_max.map(|most| most.saturating_sub(1));
    json!({
        "type": "model",
        "id": model.id,
        "display_name": model.id,
        "created_at": UNKNOWN_TIME,
        "max_input_tokens": model.context_max,
        "max_tokens": answer_max,
        "capabilities": null,
        "lifecycle": "active",
        "line": null,
        "deprecated_at": null,
        "retires_at": null,
    })
}

fn text(value: &impl Serialize) -> String {
    // Plain strings and numbers always serialise.
    serde_json::to_string(value).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    //! Catches a page that misses or repeats a model, and a walk that does not end.
    use super::*;

    fn ids(body: &str) -> Vec<String> {
        let value: Value = serde_json::from_str(body).expect("JSON");
        let data = value["data"].as_array().expect("a list");
        let id = |model: &Value| model["id"].as_str().expect("an id").to_owned();
        data.iter().map(id).collect()
    }

    fn check(names: &[&str], page: &Page<'_>, expected: Result<(&[&str], bool), &str>) {
        let models: Vec<_> = names
            .iter()
            .map(|id| Listed {
                id,
                context_max: Some(8192),
            })
            .collect();
        match (list(&models, Shape::Anthropic, page), expected) {
            (Ok(body), Ok((expected, has_more))) => {
                assert_eq!(ids(&body), expected, "{page:?}");
                let value: Value = serde_json::from_str(&body).expect("JSON");
                assert_eq!(value["has_more"], has_more, "{page:?}");
                assert_eq!(value["first_id"].as_str(), expected.first().copied());
                assert_eq!(value["last_id"].as_str(), expected.last().copied());
            }
            (Err(error), Err(param)) => {
                assert_eq!(error.param.as_deref(), Some(param), "{page:?}");
                assert_eq!(error.kind.status(), 400);
            }
            (found, expected) => panic!("{page:?}: {found:?}, expected {expected:?}"),
        }
        let all = list(&models, Shape::OpenAi, page).expect("no pages");
        assert_eq!(ids(&all), names);
    }

    #[test]
    fn pages_go_both_ways() {
        let names = ["a", "b", "c", "d"];
        let page = |limit, after, before| Page {
            limit,
            after,
            before,
        };
        for (page, expected) in [
            (page(None, None, None), Ok((&names[..], false))),
            (page(Some("2"), None, None), Ok((&names[..2], true))),
            (page(Some("2"), Some("b"), None), Ok((&names[2..], false))),
            (page(Some("1"), Some("b"), None), Ok((&names[2..3], true))),
            (page(Some("9"), Some("d"), None), Ok((&[][..], false))),
            (page(Some("2"), None, Some("d")), Ok((&names[1..3], true))),
            (page(Some("2"), None, Some("c")), Ok((&names[..2], false))),
            (page(None, None, Some("a")), Ok((&[][..], false))),
            (page(None, Some("x"), None), Err("after_id")),
            (page(None, None, Some("x")), Err("before_id")),
            (page(None, Some("a"), Some("b")), Err("after_id")),
            (page(Some("0"), None, None), Err("limit")),
            (page(Some("1001"), None, None), Err("limit")),
            (page(Some("x"), None, None), Err("limit")),
        ] {
            check(&names, &page, expected);
        }
        check(&[], &page(None, None, None), Ok((&[], false)));
    }
}
