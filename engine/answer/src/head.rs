//! What does a name outside of JSON say?

use crate::json::is_space;

/// The most bytes of such a name, Kimi's prefix and number included.
const NAME_MAX_BYTES: usize = 256;

/// What stands in front of a call's arguments.
#[derive(Debug, Default)]
pub(crate) struct Head {
    /// The tool's name; empty where the text is none.
    pub(crate) name: String,
    /// The call's id, if the model wrote one.
    pub(crate) id: Option<String>,
}

impl Head {
    /// A name as it stands.
    pub(crate) fn plain(text: &str) -> Self {
        let name = text.trim();
        let is_name = !name.contains(char::is_whitespace);
        Self {
            name: if is_name { name.into() } else { String::new() },
            id: None,
        }
    }

    /// Kimi's `functions.name:0` is the call's id, and holds the name.
    pub(crate) fn kimi(text: &str) -> Self {
        let id = Self::plain(text).name;
        let name = id.strip_prefix("functions.").unwrap_or(&id);
        let name = match name.rsplit_once(':') {
            Some((name, number)) if number.bytes().all(|b| b.is_ascii_digit()) => name,
            _ => name,
        };
        Self {
            name: name.into(),
            id: Some(id),
        }
    }
}

/// Takes a character of a name; `false`: it cannot be one.
pub(crate) fn lengthen(name: &mut String, c: char) -> bool {
    let is_name = name.len() < NAME_MAX_BYTES && !matches!(c, '{' | '"');
    if is_name {
        name.push(c);
    }
    is_name
}

/// Takes white space and DeepSeek's fence, in front of arguments; `false`: it is neither.
pub(crate) fn in_fence(fence: &mut String, c: char) -> bool {
    if is_space(c) {
        return true;
    }
    fence.push(c);
    fence.len() > 3 && "```json".starts_with(&*fence)
}
