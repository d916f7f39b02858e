//! What does a request say about the cache of its prefix?
//!
//! Every prefix is cached here without being asked, and by its content: marks in the prompt
//! (`cache_control`, `prompt_cache_breakpoint`) move nothing, and `prompt_cache_key` is a signal of
//! the session. They are checked as the OpenAI APIs do, so that a mistake is told rather than lost.
//! What remains is for how long the prefix is wanted: the longest time that a request names is a
//! hint to the KV tiers.

use serde_json::{Map, Value};

use crate::check::{self, Kind};
use crate::error::ApiError;
use crate::fields::Fields;

/// For how long a prefix is wanted, the shortest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Retention {
    /// `in_memory`: for as long as it happens to stay.
    InMemory,
    /// `5m`
    Minutes5,
    /// `30m`
    Minutes30,
    /// `1h`
    Hour1,
    /// `12h`
    Hours12,
    /// `24h`
    Hours24,
}

/// The times that each place allows.
const RETENTIONS: &[(&str, Retention)] = &[
    ("in_memory", Retention::InMemory),
    // As the first version of the documentation had it.
    ("in-memory", Retention::InMemory),
    ("24h", Retention::Hours24),
];
const OPTION_TTLS: &[(&str, Retention)] =
    &[("30m", Retention::Minutes30), ("12h", Retention::Hours12)];
const MARK_TTLS: &[(&str, Retention)] = &[("5m", Retention::Minutes5), ("1h", Retention::Hour1)];

/// Checks the fields of a chat, completion or responses request that are about the cache; the
/// retention that they ask for.
pub fn retention(fields: &Fields<'_>) -> Result<Option<Retention>, ApiError> {
    check::string(fields, "prompt_cache_key")?;
    let old = match fields.get("prompt_cache_retention") {
        Some(raw) => Some(one_of(raw.get(), RETENTIONS, || {
            "prompt_cache_retention".to_owned()
        })?),
        None => None,
    };
    check::kind(fields, "prompt_cache_options", Kind::Object)?;
    let Some(raw) = fields.get("prompt_cache_options") else {
        return Ok(old);
    };
    let options = Fields::parse(raw.get().as_bytes())?;
    let param = |name: &str| format!("prompt_cache_options.{name}");
    if let Some(mode) = options.get("mode") {
        one_of(mode.get(), &[("implicit", ()), ("explicit", ())], || {
            param("mode")
        })?;
    }
    let Some(ttl) = options.get("ttl") else {
        return Ok(old);
    };
    // The one is how long at most, the other how long at least.
    let ttl = one_of(ttl.get(), OPTION_TTLS, || param("ttl"))?;
    Ok(old.max(Some(ttl)))
}

impl Retention {
    /// How long that is; none where it is as long as the cache happens to last.
    pub fn seconds(self) -> Option<u32> {
        match self {
            Self::InMemory => None,
            Self::Minutes5 => Some(5 * 60),
            Self::Minutes30 => Some(30 * 60),
            Self::Hour1 => Some(60 * 60),
            Self::Hours12 => Some(12 * 60 * 60),
            Self::Hours24 => Some(24 * 60 * 60),
        }
    }
}

/// The longest retention that a request of any dialect asks for, in its fields or by marks. It is a
/// hint: marks are looked for in the text as it came, where a quote within a string is escaped, so
/// that nobody's words are taken for one; whether they are right is checked where they are read.
pub fn hint(fields: &Fields<'_>) -> Option<Retention> {
    let asked = retention(fields).ok().flatten();
    let places = ["messages", "tools", "system", "input"];
    let marked = places
        .into_iter()
        .filter_map(|place| marked(fields.get(place)?.get()))
        .max();
    asked.max(marked)
}

/// The longest retention that the marks in a piece of JSON ask for.
fn marked(json: &str) -> Option<Retention> {
    let is_object = |value: &&str| value.starts_with('{');
    let mut longest = values(json, r#""cache_control""#)
        .any(|value| is_object(&value))
        .then_some(Retention::Minutes5);
    if longest.is_none() && !json.contains(r#""prompt_cache_breakpoint""#) {
        return None;
    }
    for value in values(json, r#""ttl""#) {
        let told = MARK_TTLS.iter().chain(OPTION_TTLS).find(|(word, _)| {
            let quoted = value.strip_prefix('"').and_then(|v| v.strip_prefix(word));
            quoted.is_some_and(|rest| rest.starts_with('"'))
        });
        longest = longest.max(told.map(|(_, retention)| *retention));
    }
    longest
}

/// What stands behind each key of this name, up to the end of the text.
fn values<'j>(json: &'j str, key: &'static str) -> impl Iterator<Item = &'j str> {
    json.match_indices(key).filter_map(move |(at, _)| {
        let behind = json[at + key.len()..].trim_start();
        behind.strip_prefix(':').map(str::trim_start)
    })
}

/// Checks the marks of a chat request's messages and tools; the longest retention that they ask
/// for.
pub(crate) fn marks(
    messages: &[Value],
    tools: Option<&Value>,
) -> Result<Option<Retention>, ApiError> {
    let mut longest = None;
    let mut take = |object: &Map<String, Value>, param: &dyn Fn() -> String| {
        // Walking the few keys costs less than looking each up.
        for (name, mark) in object {
            if !mark.is_null() && (name == "cache_control" || name == "prompt_cache_breakpoint") {
                longest = longest.max(checked_mark(name, mark, &param())?);
            }
        }
        Ok(())
    };
    for (at, message) in messages.iter().enumerate() {
        let Some(message) = message.as_object() else {
            continue;
        };
        take(message, &|| format!("messages[{at}]"))?;
        let parts = message.get("content").and_then(Value::as_array);
        for (part_at, part) in objects(parts) {
            take(part, &|| format!("messages[{at}].content[{part_at}]"))?;
        }
        let calls = message.get("tool_calls").and_then(Value::as_array);
        for (call_at, call) in objects(calls) {
            take(call, &|| format!("messages[{at}].tool_calls[{call_at}]"))?;
        }
    }
    for (at, tool) in objects(tools.and_then(Value::as_array)) {
        take(tool, &|| format!("tools[{at}]"))?;
        if let Some(function) = tool.get("function").and_then(Value::as_object) {
            take(function, &|| format!("tools[{at}].function"))?;
        }
    }
    Ok(longest)
}

fn objects(list: Option<&Vec<Value>>) -> impl Iterator<Item = (usize, &Map<String, Value>)> {
    let items = list.into_iter().flatten().enumerate();
    items.filter_map(|(at, item)| Some((at, item.as_object()?)))
}

/// The time that a mark asks for; none where it does not say.
fn checked_mark(name: &str, mark: &Value, object: &str) -> Result<Option<Retention>, ApiError> {
    let param = format!("{object}.{name}");
    let Some(mark) = mark.as_object() else {
        return Err(wrong(param, &mark.to_string(), "an object"));
    };
    let (tag, tags, ttls): (_, &[(&str, ())], _) = match name {
        "cache_control" => ("type", &[("ephemeral", ())], MARK_TTLS),
        _ => ("mode", &[("explicit", ())], OPTION_TTLS),
    };
    let member = |name: &str| {
        mark.get(name)
            .map_or_else(|| "null".to_owned(), Value::to_string)
    };
    let told = member(tag);
    one_of(&told, tags, || format!("{param}.{tag}"))?;
    let ttl = member("ttl");
    if ttl == "null" {
        return Ok((name == "cache_control").then_some(Retention::Minutes5));
    }
    one_of(&ttl, ttls, || format!("{param}.ttl")).map(Some)
}

/// What a JSON string means, of the words that may stand there.
fn one_of<T: Copy>(
    json: &str,
    words: &[(&str, T)],
    param: impl FnOnce() -> String,
) -> Result<T, ApiError> {
    let told: Option<String> = serde_json::from_str(json).ok();
    let meant = words.iter().find(|(word, _)| told.as_deref() == Some(word));
    meant.map(|(_, meaning)| *meaning).ok_or_else(|| {
        let allowed: Vec<String> = words.iter().map(|(word, _)| format!("'{word}'")).collect();
        wrong(param(), json, &allowed.join(" or "))
    })
}

fn wrong(param: String, shown: &str, allowed: &str) -> ApiError {
    let message = format!(
        "'{param}' must be {allowed}, got {}.",
        check::clipped(shown)
    );
    ApiError::invalid(param, message)
}

#[cfg(test)]
mod tests {
    //! Catches a mistake about the cache that is taken in silence, and a hint that is lost.
    use super::*;
    use crate::Dialect;
    use serde_json::json;

    fn of(extra: &Value) -> Result<Option<Retention>, String> {
        let mut body = json!({"model": "m", "messages": [{"role": "user", "content": "hi"}]});
        let all = body.as_object_mut().expect("an object");
        all.extend(extra.as_object().cloned().expect("an object"));
        let text = body.to_string();
        let told =
            |error: ApiError| format!("{}: {}", error.param.unwrap_or_default(), error.message);
        crate::tests::parse(Dialect::Chat, text.as_bytes()).map_err(told)?;
        let fields = Fields::parse(text.as_bytes()).map_err(told)?;
        let messages = body["messages"].as_array().expect("messages");
        let asked = marks(messages, body.get("tools")).map_err(told)?;
        let all = retention(&fields).map_err(told)?.max(asked);
        assert_eq!(hint(&fields), all, "{text}");
        Ok(all)
    }

    #[test]
    fn hints_are_understood() {
        let marked = |mark: Value| {
            json!({"messages": [{"role": "user", "content": [
                {"type": "text", "text": "a", "cache_control": mark},
                {"type": "text", "text": "b"},
            ]}]})
        };
        let breakpoint = json!({"messages": [{"role": "user", "content": [
            {"type": "text", "text": "a", "prompt_cache_breakpoint": {"mode": "explicit", "ttl": "12h"}},
        ]}]});
        for (extra, expected) in [
            (json!({}), None),
            (json!({"prompt_cache_key": "k"}), None),
            (
                json!({"prompt_cache_retention": "24h"}),
                Some(Retention::Hours24),
            ),
            (
                json!({"prompt_cache_retention": "in_memory"}),
                Some(Retention::InMemory),
            ),
            (
                json!({"prompt_cache_retention": "in-memory"}),
                Some(Retention::InMemory),
            ),
            (json!({"prompt_cache_retention": null}), None),
            (json!({"prompt_cache_options": {}}), None),
            (json!({"prompt_cache_options": {"mode": "implicit"}}), None),
            (
                json!({"prompt_cache_options": {"mode": "explicit", "ttl": "30m"}}),
                Some(Retention::Minutes30),
            ),
            (
                marked(json!({"type": "ephemeral"})),
                Some(Retention::Minutes5),
            ),
            (
                marked(json!({"type": "ephemeral", "ttl": "1h"})),
                Some(Retention::Hour1),
            ),
            (marked(json!(null)), None),
            (breakpoint, Some(Retention::Hours12)),
            (
                json!({"tools": [{"type": "function", "function": {"name": "f",
                    "cache_control": {"type": "ephemeral"}}}]}),
                Some(Retention::Minutes5),
            ),
        ] {
            assert_eq!(of(&extra), Ok(expected), "{extra}");
        }
    }

    #[test]
    fn mistakes_are_told_by_name() {
        let message = |message: Value| json!({"messages": [message]});
        for (extra, expected) in [
            (
                json!({"prompt_cache_key": 7}),
                "prompt_cache_key: 'prompt_cache_key' must be a string, got 7.",
            ),
            (
                json!({"prompt_cache_retention": "1d"}),
                "prompt_cache_retention: 'prompt_cache_retention' must be 'in_memory' or 'in-memory' or '24h', got \"1d\".",
            ),
            (
                json!({"prompt_cache_options": "30m"}),
                "prompt_cache_options: 'prompt_cache_options' must be an object, got \"30m\".",
            ),
            (
                json!({"prompt_cache_options": {"mode": "off"}}),
                "prompt_cache_options.mode: 'prompt_cache_options.mode' must be 'implicit' or 'explicit', got \"off\".",
            ),
            (
                json!({"prompt_cache_options": {"ttl": 30}}),
                "prompt_cache_options.ttl: 'prompt_cache_options.ttl' must be '30m' or '12h', got 30.",
            ),
            (
                message(json!({"role": "user", "content": "hi", "cache_control": true})),
                "messages[0].cache_control: 'messages[0].cache_control' must be an object, got true.",
            ),
            (
                message(json!({"role": "user", "content": [
                    {"type": "text", "text": "a"},
                    {"type": "text", "text": "a", "cache_control": {"type": "ephemeral", "ttl": "2h"}},
                ]})),
                "messages[0].content[1].cache_control.ttl: 'messages[0].content[1].cache_control.ttl' must be '5m' or '1h', got \"2h\".",
            ),
            (
                message(json!({"role": "user", "content": [
                    {"type": "text", "text": "a", "prompt_cache_breakpoint": {}},
                ]})),
                "messages[0].content[0].prompt_cache_breakpoint.mode: 'messages[0].content[0].prompt_cache_breakpoint.mode' must be 'explicit', got null.",
            ),
            (
                json!({"tools": [{"type": "function", "cache_control": {"type": "forever"},
                    "function": {"name": "f"}}]}),
                "tools[0].cache_control.type: 'tools[0].cache_control.type' must be 'ephemeral', got \"forever\".",
            ),
        ] {
            assert_eq!(of(&extra), Err(expected.to_owned()), "{extra}");
        }
    }
}
