//! What the tests of this dialect share.

use dialects::answer::{End, Translation, Usage};
use dialects::error::ApiError;
use dialects::responses::{self, Ids};
use dialects::{ChatPrompt, Fields, PromptInput, Turn, TurnBody};
use serde_json::{Map, Value, json};

pub(crate) const RESPONSE: &str = "resp_0123456789abcdef0123456789abcdef";

pub(crate) fn ids() -> Ids {
    Ids {
        response: RESPONSE.to_owned(),
        created_s: 1_764_460_000,
    }
}

/// What became of a request.
pub(crate) struct Asked {
    pub(crate) prompt: ChatPrompt,
    pub(crate) node: Map<String, Value>,
    pub(crate) translation: Box<dyn Translation>,
}

pub(crate) fn ask_after(history: Vec<Value>, body: &str) -> Result<Asked, ApiError> {
    let request = responses::parse(Fields::parse(body.as_bytes())?)?;
    let (turn, translation) = request.turn(history, ids())?;
    let Turn { prompt, body, .. } = turn;
    let asked = match (prompt, body) {
        (PromptInput::Chat(prompt), TurnBody::Chat(node)) => Some(Asked {
            prompt,
            node,
            translation,
        }),
        _ => None,
    };
    Ok(asked.expect("asked in Chat Completions"))
}

pub(crate) fn ask(body: &Value) -> Asked {
    ask_after(Vec::new(), &body.to_string()).expect("a sound request")
}

pub(crate) fn end() -> End {
    End {
        usage: Usage {
            input: 100,
            cached: 64,
            output: 20,
            reasoning: 5,
        },
        homing: None,
    }
}

/// The events of a stream: name and data; panics where they are not what SSE wants.
pub(crate) fn events(bytes: &[u8]) -> Vec<(String, Value)> {
    let text = std::str::from_utf8(bytes).expect("UTF-8");
    let events = text.split_terminator("\n\n").map(|event| {
        let (name, data) = event.split_once('\n').expect("two lines");
        let name = name.strip_prefix("event: ").expect("a name");
        let data = data.strip_prefix("data: ").expect("data");
        assert!(!data.contains(['\n', '\r']), "one line: {data}");
        let data: Value = serde_json::from_str(data).expect("JSON");
        assert_eq!(data["type"], name);
        (name.to_owned(), data)
    });
    let events: Vec<_> = events.collect();
    for (at, (_, data)) in events.iter().enumerate() {
        assert_eq!(data["sequence_number"], at, "{data}");
    }
    events
}

/// A chunk of a node's stream.
pub(crate) fn chunk(delta: &Value, finish: Option<&str>) -> Vec<u8> {
    json!({
        "id": "c", "object": "chat.completion.chunk", "created": 1, "model": "node-model",
        "choices": [{"index": 0, "delta": delta, "logprobs": null, "finish_reason": finish}],
    })
    .to_string()
    .into_bytes()
}

/// A whole answer of a node.
pub(crate) fn completion(message: &Value, finish: &str) -> Vec<u8> {
    json!({
        "id": "c", "object": "chat.completion", "created": 1, "model": "node-model",
        "choices": [{"index": 0, "message": message, "logprobs": null, "finish_reason": finish}],
    })
    .to_string()
    .into_bytes()
}

/// Everything that a client reads of a stream.
pub(crate) fn stream(
    translation: &mut dyn Translation,
    chunks: &[Vec<u8>],
) -> Vec<(String, Value)> {
    let mut out = Vec::new();
    translation.begin(Usage::default());
    for chunk in chunks {
        translation.chunk(chunk, &mut out).expect("a sound chunk");
    }
    translation.end(&end(), &mut out);
    events(&out)
}
