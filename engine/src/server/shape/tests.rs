//! Catches a chunk that is no JSON, or says something else than the value that the obvious way
//! builds.

use std::path::PathBuf;
use std::sync::Arc;

use prompt::PromptBuilder;
use serde_json::{Value, json};

use super::*;
use crate::engine::{Pooling, Produced};
use crate::request::constraint::Formats;
use crate::request::prepare::ServedParts;
use crate::server::message::{CallDelta, CallStart, Delta};

fn served() -> Arc<Served> {
    let default = "../models/SmolLM2-135M-Instruct.Q4_1.gguf";
    let path = std::env::var_os("HOMING_MODEL").map(PathBuf::from);
    let path = path.unwrap_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(default));
    let file = std::fs::read(path).expect("the model is there: run `make setup`");
    let header = prompt::gguf::Header::parse(&file).expect("a GGUF file");
    let prompts = Arc::new(PromptBuilder::from_gguf(&header).expect("a known tokenizer"));
    Arc::new(Served::new(ServedParts {
        model_id: "smol \"2\"".into(),
        max_model_len: 100,
        boot_id: String::new(),
        formats: Formats::new(prompts.template_source(), Default::default()),
        prompts,
        pooling: Pooling::Mean,
        width: 1,
    }))
}

/// The obvious twin: the value of a chunk.
fn slow(shape: &Shape, choice: usize, delta: &Delta, offset: &mut Offset, usage: Value) -> Value {
    let (object, name, content) = match shape.dialect {
        Dialect::Chat => {
            let mut fields = json!({});
            if !delta.reasoning.is_empty() {
                fields["reasoning_content"] = json!(delta.reasoning);
            }
            if !delta.content.is_empty() {
                fields["content"] = json!(delta.content);
            }
            let call = |call: &CallDelta| match &call.start {
                Some(start) => json!({
                    "index": call.index, "id": start.id, "type": "function",
                    "function": {"name": start.name, "arguments": call.arguments},
                }),
                None => json!({"index": call.index, "function": {"arguments": call.arguments}}),
            };
            if !delta.calls.is_empty() {
                fields["tool_calls"] = delta.calls.iter().map(call).collect();
            }
            ("chat.completion.chunk", "delta", fields)
        }
        Dialect::Completions => ("text_completion", "text", json!(delta.content)),
    };
    let mut choice = json!({"index": choice, "finish_reason": delta.finish, "logprobs": null});
    choice[name] = content;
    if shape.logprobs && !delta.tokens.is_empty() {
        choice["logprobs"] = shape.logprobs_value(&delta.tokens, offset);
    }
    if let Some(stop) = &delta.stop {
        choice["stop_reason"] = json!(stop);
    }
    if shape.token_ids {
        choice["token_ids"] = delta.tokens.iter().map(|token| token.id).collect();
    }
    let mut chunk = json!({
        "id": shape.id, "object": object, "created": shape.created,
        "model": &*shape.served.model_id, "choices": [choice],
    });
    if usage != json!("absent") {
        chunk["usage"] = usage;
    }
    chunk
}

fn delta(mut bits: u32) -> Delta {
    let mut next = |choices: u32| {
        let drawn = bits % choices;
        bits /= choices;
        drawn as usize
    };
    let texts = ["", "plain", "\"quoted\"\n\u{1}\\", "你好 🦀\u{2028}"];
    let call = |index: usize, begins: bool, text: &str| CallDelta {
        index,
        start: begins.then(|| CallStart {
            id: format!("call_{text}"),
            name: text.to_owned(),
        }),
        arguments: text.to_owned(),
    };
    Delta {
        content: texts[next(4)].to_owned(),
        reasoning: texts[next(4)].to_owned(),
        calls: match next(4) {
            0 => vec![],
            1 => vec![call(0, true, texts[next(4)])],
            2 => vec![call(1, false, texts[next(4)])],
            _ => vec![call(0, false, "}"), call(1, true, texts[next(4)])],
        },
        tokens: (0..next(3))
            .map(|at| Produced {
                id: 500 + at as u32,
                logprob: if at == 0 { -0.5 } else { f32::NEG_INFINITY },
                top: vec![(7, -0.25), (900, -3.5)],
            })
            .collect(),
        finish: [None, Some("stop"), Some("tool_calls")][next(3)],
        stop: [None, Some("\n\"end\"".to_owned())][next(2)].clone(),
    }
}

#[test]
fn a_chunk_is_what_the_obvious_way_builds() {
    let served = served();
    for bits in 0..5000_u32 {
        let shape = Shape {
            dialect: [Dialect::Chat, Dialect::Completions][bits as usize % 2],
            id: "chatcmpl-1".into(),
            created: 17,
            served: Arc::clone(&served),
            token_ids: bits % 3 == 0,
            logprobs: bits % 5 == 0,
            echo: String::new(),
            prefix: Vec::new(),
        };
        let shape = shape.with_prefix();
        let took = Usage {
            prompt_tokens: 5,
            cached_tokens: 3,
            output_tokens: 2,
        };
        let (usage, slow_usage) = match bits % 7 {
            0 => (ChunkUsage::Absent, json!("absent")),
            1 => (ChunkUsage::Null, Value::Null),
            _ => (ChunkUsage::Is(&took), usage_value(&took)),
        };
        let delta = delta(bits.wrapping_mul(2_654_435_761));
        let (mut written, mut offset, mut slow_offset) = Default::default();
        shape.write_delta(&mut written, (bits as usize, &delta), &mut offset, usage);
        let text = String::from_utf8(written).expect("UTF-8");
        let event = text
            .strip_prefix("data: ")
            .and_then(|t| t.strip_suffix("\n\n"));
        let event = event.unwrap_or_else(|| panic!("no event: {text}"));
        assert!(!event.contains('\n'), "one line: {event}");
        let fast: Value = serde_json::from_str(event).unwrap_or_else(|_| panic!("{event}"));
        let slow = slow(&shape, bits as usize, &delta, &mut slow_offset, slow_usage);
        assert_eq!(fast, slow);
    }
}
