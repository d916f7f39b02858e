//! What can be read in a document, a search result or an image?
//!
//! Text that the request itself carries becomes text with its title. Everything else is checked as
//! the API checks it, and then refused by the name of the block: leaving an image out silently
//! would let the model answer about something it never saw.

use serde_json::Value;

use super::marks::Marks;
use super::path::{Object, Path};
use crate::error::ApiError;

/// The text of a block; none for a type that is not known.
pub(super) fn text(
    block: &mut Object<'_>,
    tag: &str,
    marks: &mut Marks,
) -> Result<Option<String>, ApiError> {
    match tag {
        "document" => document(block, marks).map(Some),
        "search_result" => search_result(block, marks).map(Some),
        "image" => Err(image(block)),
        "browser_state" => Err(block.path.refuse("this model cannot see a browser")),
        _ => Ok(None),
    }
}

fn search_result(block: &mut Object<'_>, marks: &mut Marks) -> Result<String, ApiError> {
    let title = block.required_text("title")?;
    let source = block.required_text("source")?;
    let content = block.take("content");
    let path = block.path.name("content");
    let body = match content {
        None => return Err(path.required()),
        Some(content) => texts(content, path, marks)?,
    };
    Ok(format!(
        "<search_result>\n<title>{title}</title>\n<source>{source}</source>\n{body}\n</search_result>"
    ))
}

fn document(block: &mut Object<'_>, marks: &mut Marks) -> Result<String, ApiError> {
    const KNOWN: &[&str] = &["base64", "text", "content", "url", "file"];
    let title = block.text("title")?;
    let context = block.text("context")?;
    let here = block.path;
    let mut source = block
        .object("source")?
        .ok_or_else(|| here.name("source").required())?;
    let tag = source.required_text("type")?;
    let path = source.path;
    let mut source = source.at(path.name(&tag));
    let body = match tag.as_str() {
        "text" => source.required_text("data")?,
        "content" => {
            let content = source.take("content");
            let path = source.path.name("content");
            let content = content.ok_or_else(|| path.required())?;
            texts(content, path, marks)?
        }
        "base64" | "url" | "file" => {
            if tag == "base64" {
                base64(&mut source, &["application/pdf"])?;
            }
            return Err(here.refuse(
                "this model reads no files; send the document's text with a source of type 'text'",
            ));
        }
        _ => return Err(path.unknown_tag(&tag, KNOWN)),
    };
    let line = |name: &str, value: Option<String>| {
        let value = value.filter(|value| !value.is_empty());
        value.map_or_else(String::new, |value| format!("<{name}>{value}</{name}>\n"))
    };
    let (title, context) = (line("title", title), line("context", context));
    Ok(format!("<document>\n{title}{context}{body}\n</document>"))
}

/// A string, or a list of text blocks.
fn texts(content: Value, path: Path<'_>, marks: &mut Marks) -> Result<String, ApiError> {
    let items = match content {
        Value::String(text) => return Ok(text),
        Value::Array(items) => items,
        _ => return Err(path.should_be("a valid list")),
    };
    let mut all = String::new();
    for (at, item) in items.into_iter().enumerate() {
        let path = path.at(at);
        let mut item = Object::new(item, path)?;
        let tag = item.required_text("type")?;
        let mut item = item.at(path.name(&tag));
        marks.take(&mut item)?;
        match tag.as_str() {
            "text" => all.push_str(&item.required_text("text")?),
            "image" => return Err(image(&mut item)),
            _ => return Err(path.unknown_tag(&tag, &["text", "image"])),
        }
    }
    Ok(all)
}

/// Why an image is refused.
fn image(block: &mut Object<'_>) -> ApiError {
    match checked_image(block) {
        Err(error) => error,
        Ok(()) => block
            .path
            .refuse("this model cannot see images; send text instead"),
    }
}

fn checked_image(block: &mut Object<'_>) -> Result<(), ApiError> {
    const TYPES: &[&str] = &["image/jpeg", "image/png", "image/gif", "image/webp"];
    let path = block.path;
    let source = block.object("source")?;
    let mut source = source.ok_or_else(|| path.name("source").required())?;
    let tag = source.required_text("type")?;
    let path = source.path;
    let mut source = source.at(path.name(&tag));
    match tag.as_str() {
        "base64" => base64(&mut source, TYPES),
        "url" => source.required_text("url").map(drop),
        "file" => source.required_text("file_id").map(drop),
        _ => Err(path.unknown_tag(&tag, &["base64", "url", "file"])),
    }
}

fn base64(source: &mut Object<'_>, types: &[&str]) -> Result<(), ApiError> {
    let kind = source.required_text("media_type")?;
    if !types.contains(&kind.as_str()) {
        let quoted: Vec<String> = types.iter().map(|kind| format!("'{kind}'")).collect();
        let path = source.path.name("media_type");
        return Err(path.should_be(&quoted.join(" or ")));
    }
    let data = source.required_text("data")?;
    if is_base64(&data) {
        Ok(())
    } else {
        Err(source.path.name("data").refuse("invalid base64 data"))
    }
}

fn is_base64(data: &str) -> bool {
    let digits = data.trim_end_matches('=');
    let is_digit = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'+' | b'/');
    !digits.is_empty()
        && data.len().is_multiple_of(4)
        && data.len() - digits.len() <= 2
        && digits.bytes().all(is_digit)
}
