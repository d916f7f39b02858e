//! What does the scripted model say next?
//!
//! Pure: a Chat Completions request in, an answer out. It plays the part of a model that uses one
//! tool and then talks: the first turn with tools calls a tool, every other turn is text. Which tool
//! is the request's own business: one that runs shell commands where there is one, since coding
//! agents then do something visible, else the first. Arguments are made up to satisfy the schema.

use serde_json::{Map, Value, json};

/// What a shell tool is told to do; an agent's transcript shows that it did.
pub const COMMAND: &str = "echo tool-ok";

/// Names of tools that run commands, as coding agents have them; the first that is offered is taken.
const SHELL_TOOLS: &[&str] = &["exec_command", "bash", "shell", "shell_command", "Bash"];
/// Parameters of such tools that hold the command.
const COMMANDS: &[&str] = &["command", "cmd"];
/// Schemas nested deeper than this get `null`: they refer to themselves.
const DEPTH_MAX: usize = 16;
/// How much of a tool's result the answer repeats: agents put their own words before a command's output.
const QUOTE_CHARS: usize = 400;

/// One answer.
#[derive(Clone, Debug, PartialEq)]
pub struct Answer {
    /// What it thought first.
    pub reasoning: String,
    /// Text, or the calls.
    pub said: Said,
}

/// What comes after the reasoning.
#[derive(Clone, Debug, PartialEq)]
pub enum Said {
    /// Words for the user.
    Text(String),
    /// Calls of tools, in parallel: name and arguments.
    Calls(Vec<(String, Value)>),
}

/// Answers a request.
pub fn answer(request: &Value) -> Answer {
    let messages = request["messages"]
        .as_array()
        .map_or(&[][..], Vec::as_slice);
    let tools = request["tools"].as_array().map_or(&[][..], Vec::as_slice);
    let said = match tool(&request["tool_choice"], tools, messages) {
        Some(tool) => {
            let function = &tool["function"];
            let name = function["name"].as_str().unwrap_or_default().to_owned();
            let arguments = arguments(&name, &function["parameters"]);
            Said::Calls(vec![(name, arguments)])
        }
        None => Said::Text(text(messages)),
    };
    Answer {
        reasoning: format!("Message {} asks for this.", messages.len()),
        said,
    }
}

/// The tool to call, if this turn calls one.
fn tool<'a>(choice: &Value, tools: &'a [Value], messages: &[Value]) -> Option<&'a Value> {
    let named = |name: &str| tools.iter().find(|tool| tool["function"]["name"] == name);
    let suitable = || {
        let shell = SHELL_TOOLS.iter().find_map(|name| named(name));
        shell.or(tools.first())
    };
    match choice {
        Value::String(choice) if choice == "none" => None,
        Value::String(choice) if choice == "required" => suitable(),
        Value::Object(choice) => {
            let name = choice.get("function").and_then(|f| f["name"].as_str());
            name.and_then(named).or_else(suitable)
        }
        // Free to choose: once a conversation, so that every later turn is text.
        _ => {
            let has_called = messages.iter().any(|message| message["role"] == "tool");
            if has_called { None } else { suitable() }
        }
    }
}

/// Words that show what was heard: the beginning of a tool's result, or how long the talk is.
fn text(messages: &[Value]) -> String {
    match messages.last() {
        Some(last) if last["role"] == "tool" => {
            let heard: String = content(last).chars().take(QUOTE_CHARS).collect();
            format!("The tool says: {heard}")
        }
        _ => format!("This is the answer to message {}.", messages.len()),
    }
}

/// A message's text, whether it is one string or parts.
fn content(message: &Value) -> String {
    match &message["content"] {
        Value::String(text) => text.clone(),
        Value::Array(parts) => parts
            .iter()
            .filter_map(|part| part["text"].as_str())
            .collect(),
        _ => String::new(),
    }
}

/// Arguments that satisfy the tool's schema; a shell tool gets [`COMMAND`].
fn arguments(name: &str, schema: &Value) -> Value {
    let mut made = made_up(schema, schema, 0);
    if !made.is_object() {
        made = json!({});
    }
    if SHELL_TOOLS.contains(&name) {
        for parameter in COMMANDS {
            let known = &schema["properties"][parameter];
            if !known.is_null() {
                made[*parameter] = match known["type"].as_str() {
                    Some("array") => json!(["sh", "-c", COMMAND]),
                    _ => json!(COMMAND),
                };
            }
        }
    }
    made
}

/// The smallest value of a schema: only what is required. Patterns and formats are left out; no
/// client that is tested here has them on a required parameter.
fn made_up(schema: &Value, root: &Value, depth: usize) -> Value {
    if depth > DEPTH_MAX {
        return Value::Null;
    }
    if let Some(reference) = schema["$ref"].as_str() {
        let found = reference.strip_prefix('#').and_then(|at| root.pointer(at));
        return found.map_or(Value::Null, |found| made_up(found, root, depth + 1));
    }
    if let Some(value) = schema.get("const") {
        return value.clone();
    }
    if let Some(value) = schema["enum"].as_array().and_then(|values| values.first()) {
        return value.clone();
    }
    for several in ["anyOf", "oneOf", "allOf"] {
        if let Some(first) = schema[several].as_array().and_then(|all| all.first()) {
            return made_up(first, root, depth + 1);
        }
    }
    match kind(schema) {
        "object" => {
            let names = schema["required"].as_array().map_or(&[][..], Vec::as_slice);
            let field = |name: &Value| {
                let name = name.as_str()?;
                let value = made_up(&schema["properties"][name], root, depth + 1);
                Some((name.to_owned(), value))
            };
            Value::Object(names.iter().filter_map(field).collect::<Map<_, _>>())
        }
        "array" => {
            let count = schema["minItems"].as_u64().unwrap_or(0);
            (0..count)
                .map(|_| made_up(&schema["items"], root, depth + 1))
                .collect()
        }
        "integer" | "number" => schema.get("minimum").cloned().unwrap_or(json!(1)),
        "boolean" => json!(false),
        "null" => Value::Null,
        _ => {
            let length = schema["minLength"].as_u64().unwrap_or(0);
            let length = usize::try_from(length).unwrap_or(usize::MAX).min(1 << 16);
            json!(format!("{:x<length$}", "word"))
        }
    }
}

fn kind(schema: &Value) -> &str {
    let first = match &schema["type"] {
        Value::Array(kinds) => kinds.first().unwrap_or(&Value::Null),
        kind => kind,
    };
    match first.as_str() {
        Some(kind) => kind,
        None if schema["properties"].is_object() => "object",
        None => "string",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn function(name: &str, parameters: Value) -> Value {
        json!({"type": "function", "function": {"name": name, "parameters": parameters}})
    }

    /// Catches made-up arguments that a client would refuse, by another validator.
    #[test]
    fn arguments_satisfy_their_schema() {
        let named = json!({"type": "object", "properties": {
            "city": {"type": "string", "minLength": 9},
            "unit": {"enum": ["celsius", "kelvin"]},
            "days": {"type": ["integer", "null"], "minimum": 3},
            "deep": {"$ref": "#/$defs/deep"},
            "list": {"type": "array", "items": {"type": "number"}, "minItems": 2},
            "free": {"anyOf": [{"type": "boolean"}, {"type": "string"}]},
            "left": {"type": "string"},
        }, "required": ["city", "unit", "days", "deep", "list", "free"],
           "$defs": {"deep": {"type": "object", "properties": {"a": {"const": 7}},
                              "required": ["a"]}}});
        for schema in [
            named,
            json!({"type": "object", "properties": {}}),
            json!({"type": "object"}),
        ] {
            let made = arguments("tool", &schema);
            assert!(jsonschema::is_valid(&schema, &made), "{made} for {schema}");
        }
        let cyclic = json!({"$ref": "#"});
        assert_eq!(arguments("tool", &cyclic), json!({}));
    }

    /// Catches a script that never ends its calls, or that ignores what it was told to choose.
    #[test]
    fn one_call_and_then_words() {
        let shell = json!({"type": "object", "properties": {"command": {"type": "string"}},
                           "required": ["command"]});
        let tools = json!([
            function("read", json!({"type": "object"})),
            function("bash", shell)
        ]);
        let user = json!({"role": "user", "content": "Hello"});
        let result = json!({"role": "tool", "tool_call_id": "a", "content": [
            {"type": "text", "text": "sunny"}]});
        let check = |tools: &Value, choice: Value, messages: Value, expected: Said| {
            let request = json!({"tools": tools, "tool_choice": choice, "messages": messages});
            assert_eq!(answer(&request).said, expected, "{request}");
        };
        let call = |name: &str, arguments| Said::Calls(vec![(name.to_owned(), arguments)]);
        let bash = || call("bash", json!({"command": COMMAND}));
        let says = |text: &str| Said::Text(text.to_owned());
        check(&tools, Value::Null, json!([user]), bash());
        check(&tools, json!("auto"), json!([user, user]), bash());
        check(
            &tools,
            json!("none"),
            json!([user]),
            says("This is the answer to message 1."),
        );
        check(
            &tools,
            json!("auto"),
            json!([user, user, result]),
            says("The tool says: sunny"),
        );
        check(
            &tools,
            json!("required"),
            json!([user, result, user]),
            bash(),
        );
        let read = json!({"type": "function", "function": {"name": "read"}});
        check(&tools, read, json!([user, result]), call("read", json!({})));
        check(
            &json!([]),
            json!("auto"),
            json!([user]),
            says("This is the answer to message 1."),
        );
    }
}
