//! Catches: a client whose session is read from another signal than the table names, and a turn
//! whose prompt no longer begins with the tokens of the one before. Input are requests recorded
//! from the real clients, which come with the project's shared files; without these the tests skip.

#![cfg(test)]

use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;

use dialects::answer::Continues;
use dialects::normalise::Options;
use dialects::session::{Found, Table, fingerprint};
use dialects::{Dialect, Fields, PromptInput, Turn, messages, responses};
use http::{HeaderMap, HeaderName, HeaderValue};
use prompt::gguf::Header;
use prompt::{ChatInput, PromptBuilder, SegmentCache};
use serde_json::{Map, Value, json};

/// One recorded request.
struct Recorded {
    dialect: Dialect,
    path: String,
    headers: HeaderMap,
    body: Value,
    /// It extends the request before it.
    append_only: bool,
}

/// What each client's requests say about their session: the row of the table, and how many
/// sessions the file has. Where they say nothing, `fingerprint`.
const SESSIONS: &[(&str, &str, usize)] = &[
    ("ai-sdk-anthropic", "fingerprint", 2),
    ("ai-sdk-compatible", "fingerprint", 2),
    ("anthropic-py-stream", "fingerprint", 1),
    ("claude-code", "x-claude-code-session-id", 1),
    ("cline", "fingerprint", 3),
    ("codex", "session-id", 1),
    ("langchain-py", "fingerprint", 1),
    ("litellm-openai", "fingerprint", 1),
    ("openai-agents-py-chat-stream", "fingerprint", 1),
    ("openai-py-chat-stream", "fingerprint", 1),
    // Its first turn has the key alone; the next ones continue the response of the one before.
    ("openai-py-responses-stream", "body.prompt_cache_key", 1),
    ("opencode", "x-session-affinity", 1),
    ("opencode-anthropic", "x-session-affinity", 1),
    ("opencode-openai", "x-session-affinity", 1),
    ("pi-affinity", "x-session-affinity", 1),
    ("pi-responses", "session_id", 1),
    ("pydantic-ai-chat", "fingerprint", 1),
    ("qwen-code", "fingerprint", 3),
];

/// The recordings by client; none without the shared files.
fn captures() -> Option<BTreeMap<String, Vec<Recorded>>> {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../../shared/agents/captures");
    let Ok(files) = std::fs::read_dir(&folder) else {
        eprintln!("skipped: {} is not there", folder.display());
        return None;
    };
    let mut all = BTreeMap::new();
    for file in files {
        let path = file.expect("a file").path();
        let text = std::fs::read_to_string(&path).expect("a recording");
        let client = path.file_stem().and_then(|stem| stem.to_str());
        let lines = text.lines().map(|line| recorded(&json_of(line)));
        all.insert(client.expect("a name").to_owned(), lines.collect());
    }
    Some(all)
}

fn json_of(text: &str) -> Value {
    serde_json::from_str(text).expect("JSON")
}

fn recorded(line: &Value) -> Recorded {
    let path = line["path"].as_str().expect("a path").to_owned();
    let mut headers = HeaderMap::new();
    for pair in line["headers"].as_array().expect("headers") {
        let name = HeaderName::from_bytes(pair[0].as_str().expect("a name").as_bytes());
        let value = HeaderValue::from_str(pair[1].as_str().expect("a value"));
        headers.append(name.expect("a name"), value.expect("a value"));
    }
    let mut body = line["body"].clone();
    for tool in body["tools"].as_array_mut().into_iter().flatten() {
        restore(tool, &path);
    }
    Recorded {
        dialect: match path.split('?').next() {
            Some("/v1/chat/completions") => Dialect::Chat,
            Some("/v1/messages" | "/v1/messages/count_tokens") => Dialect::Messages,
            Some("/v1/responses") => Dialect::Responses,
            _ => panic!("{path} is no turn"),
        },
        path,
        headers,
        body,
        append_only: line["append_only"] == true,
    }
}

/// Gives a tool that the recording cut its parameters again, in the dialect's own form.
fn restore(tool: &mut Value, path: &str) {
    // A tool without parameters was cut to its description; other kinds have none.
    let is_function = tool["type"] == "function" && !tool["sha256"].is_null();
    let names = match tool["params"].as_array() {
        Some(names) => names.clone(),
        None if is_function => Vec::new(),
        None => return,
    };
    let text = |name: Value| {
        (
            name.as_str().expect("a name").to_owned(),
            json!({"type": "string"}),
        )
    };
    let properties: Map<String, Value> = names.into_iter().map(text).collect();
    let schema = json!({"type": "object", "properties": properties});
    let cut = tool.as_object_mut().expect("a tool");
    for mark in ["params", "original_bytes", "sha256"] {
        cut.shift_remove(mark);
    }
    if path.starts_with("/v1/messages") {
        cut.insert("input_schema".to_owned(), schema);
        return;
    }
    cut.insert("parameters".to_owned(), schema);
    if path.starts_with("/v1/chat") {
        cut.shift_remove("type");
        *tool = json!({"type": "function", "function": cut.clone()});
    }
}

/// What a gateway remembers of a client between turns.
#[derive(Default)]
struct Memory {
    /// Items and session of each response.
    responses: HashMap<String, (Vec<Value>, String)>,
}

/// A request as the gateway sees it: where its session comes from, its name, and the prompt.
struct Seen {
    source: String,
    session: String,
    prompt: PromptInput,
}

fn see(recorded: &Recorded, memory: &mut Memory, next: Option<&Value>) -> Seen {
    let table = Table::default();
    let text = recorded.body.to_string();
    let fields = Fields::parse(text.as_bytes()).expect("an object");
    let found = table.find(recorded.dialect, &recorded.headers, &fields);
    let (mut turn, earlier) = read(recorded.dialect, fields, memory);
    turn.normalise(Options::default());
    let (source, session) = match found {
        Found::Session(signal) => (signal.source.to_owned(), signal.id),
        Found::Chain(Continues::Response(id)) => {
            let (_, session) = memory.responses.get(&id).expect("a response of before");
            ("chain".to_owned(), session.clone())
        }
        Found::Chain(Continues::Conversation(_)) | Found::Unusable(_) => panic!("not recorded"),
        Found::Nothing => {
            let fingerprint = fingerprint(&turn.prompt);
            ("fingerprint".to_owned(), format!("{fingerprint:x}"))
        }
    };
    if let Some(id) = next.and_then(|next| next["previous_response_id"].as_str()) {
        let mut items = earlier;
        items.extend(recorded.body["input"].as_array().cloned().expect("items"));
        items.push(answer(next.expect("a next turn")));
        memory
            .responses
            .insert(id.to_owned(), (items, session.clone()));
    }
    Seen {
        source,
        session,
        prompt: turn.prompt,
    }
}

/// The turn, and the items that it continues.
fn read<'a>(dialect: Dialect, fields: Fields<'a>, memory: &Memory) -> (Turn<'a>, Vec<Value>) {
    match dialect {
        Dialect::Chat => (dialects::chat(fields).expect("a turn"), Vec::new()),
        Dialect::Messages => (messages::parse(fields).expect("a turn").0, Vec::new()),
        Dialect::Responses => {
            let request = responses::parse(fields).expect("a request");
            let items = match request.continues() {
                Some(Continues::Response(id)) => memory.responses[&id].0.clone(),
                _ => Vec::new(),
            };
            let ids = responses::Ids {
                response: "resp_00000000000040008000000000000001".to_owned(),
                created_s: 0,
            };
            (request.turn(items.clone(), ids).expect("a turn").0, items)
        }
        other => panic!("{other:?} is not recorded"),
    }
}

/// An answer that the next turn can follow: answers themselves were not recorded.
fn answer(next: &Value) -> Value {
    match &next["input"][0]["call_id"] {
        Value::String(call) => json!({"type": "function_call", "call_id": call,
            "name": "get_weather", "arguments": "{\"city\":\"Paris\"}"}),
        _ => json!({"type": "message", "role": "assistant",
            "content": [{"type": "output_text", "text": "mild", "annotations": []}]}),
    }
}

/// The default model's template and tokenizer.
fn builder() -> PromptBuilder {
    let path = std::env::var_os("HOMING_MODEL").map_or_else(
        || {
            let root = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..");
            root.join("models/SmolLM2-135M-Instruct.Q4_1.gguf")
        },
        PathBuf::from,
    );
    let bytes = std::fs::read(&path)
        .unwrap_or_else(|error| panic!("{}: {error}; run `make setup`", path.display()));
    let header = Header::parse(&bytes).expect("a model");
    PromptBuilder::from_gguf(&header).expect("tokenizer and template")
}

fn tokens(builder: &PromptBuilder, known: &SegmentCache, prompt: &PromptInput) -> Vec<u32> {
    let PromptInput::Chat(chat) = prompt else {
        panic!("captures are chats")
    };
    let input = ChatInput {
        messages: &chat.messages,
        tools: chat.tools.as_deref(),
        template_kwargs: chat.template_kwargs.as_ref(),
        unix_seconds: 0,
    };
    builder.chat(&input, known).expect("a prompt")
}

#[test]
fn sessions_come_from_the_signal_and_prompts_grow_at_their_end() {
    let Some(captures) = captures() else {
        return;
    };
    let builder = builder();
    let known = SegmentCache::new(64 << 20);
    let names: Vec<&str> = captures.keys().map(String::as_str).collect();
    let expected: Vec<&str> = SESSIONS.iter().map(|(client, ..)| *client).collect();
    assert_eq!(names, expected, "each recording has its row");
    for (client, signal, sessions_expected) in SESSIONS {
        let mut memory = Memory::default();
        let mut sessions: Vec<String> = Vec::new();
        let mut before: Option<(String, Vec<u32>)> = None;
        let mut extended = 0;
        let recordings = &captures[*client];
        for (at, recorded) in recordings.iter().enumerate() {
            if recorded.path.ends_with("count_tokens") {
                continue;
            }
            let next = recordings.get(at + 1).map(|next| &next.body);
            let seen = see(recorded, &mut memory, next);
            let is_named = seen.source == *signal || seen.source == "chain";
            assert!(
                is_named,
                "{client} {at}: {} instead of {signal}",
                seen.source
            );
            if !sessions.contains(&seen.session) {
                sessions.push(seen.session.clone());
            }
            let tokens = tokens(&builder, &known, &seen.prompt);
            if recorded.append_only {
                let (session, prefix) = before.as_ref().expect("a turn before");
                assert_eq!(seen.session, *session, "{client} {at}");
                let shared = prefix
                    .iter()
                    .zip(&tokens)
                    .take_while(|(a, b)| a == b)
                    .count();
                assert_eq!(shared, prefix.len(), "{client} {at}: of {}", tokens.len());
                extended += 1;
            }
            before = Some((seen.session, tokens));
        }
        assert_eq!(sessions.len(), *sessions_expected, "{client}: {sessions:?}");
        assert!(extended > 0, "{client} has no turn that extends another");
    }
}
