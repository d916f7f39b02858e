//! Which form must the answer's text have?
//!
//! `text.format` is flat where Chat Completions nests: the schema's members move into
//! `json_schema`. Whether the schema itself is sound is the node's business.

use serde_json::{Map, Value, json};

use super::read::{Object, Path};
use super::refuse;
use crate::error::ApiError;

const FORMATS: &[&str] = &["text", "json_object", "json_schema"];
/// The API's bound of a schema's name.
const NAME_CHARS_MAX: usize = 64;

/// The node's `response_format`; none for plain text.
pub(super) fn read(top: Object<'_, '_>) -> Result<Option<Value>, ApiError> {
    let path = Path::Key(top.path, "text");
    let Some(members) = top.object("text")? else {
        return Ok(None);
    };
    let text = Object {
        members,
        path: &path,
    };
    text.word("verbosity", &["low", "medium", "high"])?;
    let path = Path::Key(&path, "format");
    let Some(members) = text.object("format")? else {
        return Ok(None);
    };
    let format = Object {
        members,
        path: &path,
    };
    match format.word("type", FORMATS)? {
        None => Err(format.missing("type")),
        Some("json_schema") => schema(format).map(Some),
        Some("json_object") => Ok(Some(json!({"type": "json_object"}))),
        Some(_) => Ok(None),
    }
}

fn schema(format: Object<'_, '_>) -> Result<Value, ApiError> {
    let name = format.needed_text("name")?;
    let path = Path::Key(format.path, "name");
    let length = name.chars().count();
    if length > NAME_CHARS_MAX {
        return Err(refuse::text_too_long(&path, NAME_CHARS_MAX, length));
    }
    let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-');
    if name.is_empty() || !name.chars().all(allowed) {
        return Err(refuse::invalid(
            &path,
            format!(
                "Invalid '{path}': string does not match pattern. Expected a string that matches the pattern '^[a-zA-Z0-9_-]+$'."
            ),
        ));
    }
    let schema = format
        .object("schema")?
        .ok_or_else(|| format.missing("schema"))?;
    let mut json_schema = Map::new();
    json_schema.insert("name".to_owned(), name.into());
    if let Some(description) = format.text("description")? {
        json_schema.insert("description".to_owned(), description.into());
    }
    json_schema.insert("schema".to_owned(), Value::Object(schema.clone()));
    if let Some(strict) = format.flag("strict")? {
        json_schema.insert("strict".to_owned(), strict.into());
    }
    Ok(json!({"type": "json_schema", "json_schema": json_schema}))
}
