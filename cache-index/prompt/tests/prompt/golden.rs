//! Catches: tokens that differ from Hugging Face's Python stack on the same model file. The
//! goldens and how they were made: `golden/make.py`.

use prompt::gguf::Value;
use prompt::{ChatInput, PromptBuilder};
use serde_json::Value as Json;

fn goldens() -> Json {
    serde_json::from_str(include_str!("../golden/goldens.json")).unwrap()
}

fn ids(json: &Json) -> Vec<u32> {
    serde_json::from_value(json.clone()).unwrap()
}

#[test]
fn texts_encode_as_in_python() {
    let tokenizer = crate::common::builder().tokenizer();
    for golden in goldens()["texts"].as_array().unwrap() {
        let text = golden["text"].as_str().unwrap();
        assert_eq!(
            tokenizer.encode_text(text),
            ids(&golden["plain"]),
            "{text:?}"
        );
        assert_eq!(
            tokenizer.encode_with_specials(text),
            ids(&golden["special"]),
            "{text:?}"
        );
    }
}

#[test]
fn conversations_encode_as_in_python() {
    let mut header = crate::common::header().clone();
    let agent = include_str!("../golden/agent.jinja").to_owned();
    header
        .metadata
        .insert("tokenizer.chat_template".into(), Value::Str(agent));
    let agent = PromptBuilder::from_gguf(&header).unwrap();
    let goldens = goldens();
    // One cache for all, cold the first time and warm the second.
    let known = crate::common::cache();
    for _ in 0..2 {
        for golden in goldens["conversations"].as_array().unwrap() {
            let builder = if golden["template"] == "agent" {
                &agent
            } else {
                crate::common::builder()
            };
            let input = ChatInput {
                messages: golden["messages"].as_array().unwrap(),
                tools: Some(&golden["tools"]),
                template_kwargs: golden["kwargs"].as_object(),
                unix_seconds: goldens["unix_seconds"].as_i64().unwrap(),
            };
            let tokens = builder.chat(&input, &known).unwrap();
            assert_eq!(
                tokens,
                ids(&golden["tokens"]),
                "{} {}",
                golden["template"],
                golden["messages"]
            );
        }
    }
}
