//! What form must the answer's content have?
//!
//! Three ways of asking for it: OpenAI's `response_format`, vLLM's `structured_outputs`, and its
//! older `guided_…` fields. At most one may be used.

use constrain::Spec;
use serde_json::Value;

use super::fields::{Fields, under, wrong};
use crate::error::{ApiError, Kind};

/// A demanded form.
#[derive(Clone, Debug)]
pub struct Format {
    /// The form.
    pub spec: Spec,
    /// The field that asked for it, for errors.
    pub field: &'static str,
    /// Whether it is the content's form (OpenAI's field), and not the whole answer's (vLLM's).
    pub is_of_content: bool,
}

/// Reads the demanded form; none for free text.
pub(super) fn format(fields: &Fields<'_>) -> Result<Option<Format>, ApiError> {
    let mut found: Option<Format> = None;
    let ways = [
        response_format(fields)?,
        structured(fields, "structured_outputs")?,
    ];
    for format in ways.into_iter().flatten().chain(guided(fields)?) {
        if let Some(first) = &found {
            let message = format!(
                "`{}` and `{}` both ask for a form of the answer; send one of them.",
                first.field, format.field
            );
            return Err(ApiError::field(format.field, message));
        }
        found = Some(format);
    }
    Ok(found)
}

fn response_format(fields: &Fields<'_>) -> Result<Option<Format>, ApiError> {
    const NAME: &str = "response_format";
    let Some(format) = fields.object(NAME)? else {
        return Ok(None);
    };
    let format = Fields(format);
    let here = |error| under(NAME, error);
    format.required("type").map_err(here)?;
    match format.text("type").map_err(here)? {
        Some("text") => Ok(None),
        Some("json_object") => Ok(Some(Format {
            spec: Spec::JsonObject,
            field: NAME,
            is_of_content: true,
        })),
        Some("json_schema") => {
            format.required("json_schema").map_err(here)?;
            let inner = format.object("json_schema").map_err(here)?;
            let schema = inner.and_then(|inner| inner.get("schema"));
            let field = "response_format.json_schema.schema";
            let schema = schema.filter(|schema| !schema.is_null());
            let schema = schema.ok_or_else(|| super::fields::missing(field))?;
            Ok(Some(Format {
                spec: schema_spec(field, schema)?,
                field,
                is_of_content: true,
            }))
        }
        _ => {
            let message = "`response_format.type` must be \"text\", \"json_object\" or \
                           \"json_schema\".";
            Err(ApiError::field("response_format.type", message))
        }
    }
}

/// The forms of vLLM's two ways: the name within `structured_outputs`, the older field.
const FORMS: [(&str, &str, &str); 5] = [
    ("json", "structured_outputs.json", "guided_json"),
    ("regex", "structured_outputs.regex", "guided_regex"),
    ("choice", "structured_outputs.choice", "guided_choice"),
    ("grammar", "structured_outputs.grammar", "guided_grammar"),
    (
        "json_object",
        "structured_outputs.json_object",
        "guided_json_object",
    ),
];

fn structured(fields: &Fields<'_>, name: &'static str) -> Result<Option<Format>, ApiError> {
    let Some(inner) = fields.object(name)? else {
        return Ok(None);
    };
    let inner = Fields(inner);
    if inner.get("structural_tag").is_some() {
        let message = "`structured_outputs.structural_tag` is not served here; use `tools` with \
                       `tool_choice`.";
        let error = ApiError::new(Kind::Invalid, "unsupported_parameter", message);
        return Err(error.with_param("structured_outputs.structural_tag"));
    }
    let mut found = Vec::new();
    for (form, field, _) in FORMS {
        found.extend(form_of(form, field, inner.get(form))?);
    }
    match found.len() {
        1 => Ok(found.pop()),
        count => {
            let message = format!(
                "`structured_outputs` must hold exactly one of json, regex, choice, grammar and \
                 json_object; it holds {count}."
            );
            Err(ApiError::field(name, message))
        }
    }
}

fn guided(fields: &Fields<'_>) -> Result<Vec<Format>, ApiError> {
    let mut found = Vec::new();
    for (form, _, field) in FORMS {
        found.extend(form_of(form, field, fields.get(field))?);
    }
    Ok(found)
}

fn form_of(
    form: &str,
    field: &'static str,
    value: Option<&Value>,
) -> Result<Option<Format>, ApiError> {
    let Some(value) = value else { return Ok(None) };
    let text = || {
        let text = value.as_str().map(str::to_owned);
        text.ok_or_else(|| wrong(field, "a string", value))
    };
    let spec = match form {
        "json" => schema_spec(field, value)?,
        "regex" => Spec::Regex(text()?),
        "grammar" => Spec::Lark(text()?),
        "choice" => Spec::Choice(choices(field, value)?),
        _ => match value.as_bool() {
            Some(true) => Spec::JsonObject,
            Some(false) => return Ok(None),
            None => return Err(wrong(field, "a boolean", value)),
        },
    };
    Ok(Some(Format {
        spec,
        field,
        is_of_content: false,
    }))
}

fn choices(field: &str, value: &Value) -> Result<Vec<String>, ApiError> {
    let items = value
        .as_array()
        .filter(|items| !items.is_empty())
        .ok_or_else(|| wrong(field, "an array with at least one string", value))?;
    let text = |(at, item): (usize, &Value)| {
        let text = item.as_str().map(str::to_owned);
        text.ok_or_else(|| wrong(&format!("{field}[{at}]"), "a string", item))
    };
    items.iter().enumerate().map(text).collect()
}

/// A schema: an object, `true` or `false`, or the JSON text of one, which vLLM also takes.
fn schema_spec(field: &str, value: &Value) -> Result<Spec, ApiError> {
    let schema = match value {
        Value::String(text) => serde_json::from_str(text).map_err(|error| {
            ApiError::field(
                field,
                format!("`{field}` is text that is no JSON: {error}."),
            )
        })?,
        other => other.clone(),
    };
    match schema {
        Value::Object(_) | Value::Bool(_) => Ok(Spec::JsonSchema(schema)),
        other => Err(wrong(field, "a JSON schema: an object", &other)),
    }
}
