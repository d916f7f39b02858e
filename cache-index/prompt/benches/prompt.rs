//! What does a prompt cost? A chat request whose content is known, one that has grown by a turn,
//! and cold text of several kinds. `cargo bench -p prompt` prints medians; docs/MEASUREMENTS.md
//! keeps them with the machine they were taken on.

#![expect(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a benchmark stops at the first surprise"
)]
#![expect(
    clippy::disallowed_methods,
    reason = "a benchmark reads files and the clock"
)]

use std::hint::black_box;
use std::time::Instant;

use prompt::gguf::Header;
use prompt::{ChatInput, PromptBuilder, SegmentCache};
use serde_json::{Value, json};

/// Median microseconds of a call.
fn median_us(calls: usize, mut call: impl FnMut()) -> f64 {
    let mut times: Vec<f64> = (0..calls)
        .map(|_| {
            let begin = Instant::now();
            call();
            begin.elapsed().as_secs_f64() * 1e6
        })
        .collect();
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

/// A conversation whose JSON body is about `bytes` long, in messages of about `message_bytes`.
fn conversation(text: &str, bytes: usize, message_bytes: usize) -> Vec<Value> {
    let mut messages = vec![json!({"role": "system", "content": "You are a careful agent."})];
    let mut at = 0;
    for turn in 0..bytes / message_bytes {
        let role = if turn % 2 == 0 { "user" } else { "assistant" };
        let chars = text.chars().cycle().skip(at).take(message_bytes);
        messages.push(json!({"role": role, "content": chars.collect::<String>()}));
        at = (at + message_bytes) % text.len();
    }
    messages
}

fn input(messages: &[Value]) -> ChatInput<'_> {
    ChatInput {
        messages,
        tools: None,
        template_kwargs: None,
        unix_seconds: 1_700_000_000,
    }
}

fn main() {
    let path = std::env::var("HOMING_MODEL").unwrap_or_else(|_| {
        let root = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");
        format!("{root}/models/SmolLM2-135M-Instruct.Q4_1.gguf")
    });
    let file = std::fs::read(&path).unwrap_or_else(|e| panic!("{path}: {e}; run `make setup`"));
    let header_us = median_us(5, || drop(black_box(Header::parse(&file).unwrap())));
    let header = Header::parse(&file).unwrap();
    let load_us = median_us(3, || {
        drop(black_box(PromptBuilder::from_gguf(&header).unwrap()))
    });
    println!(
        "load: header {:.1} ms, tokenizer and template {:.1} ms",
        header_us / 1e3,
        load_us / 1e3
    );
    let builder = PromptBuilder::from_gguf(&header).unwrap();

    let code = include_str!("../src/segments.rs");
    for (kilobytes, message_bytes) in [(4, 512), (64, 1024), (64, 8192), (64, 65_536), (512, 4096)]
    {
        let messages = conversation(code, kilobytes << 10, message_bytes);
        let known = SegmentCache::new(256 << 20);
        let tokens = builder.chat(&input(&messages), &known).unwrap().len();
        let warm = median_us(200, || {
            drop(black_box(builder.chat(&input(&messages), &known)))
        });
        let cold = median_us(20, || {
            drop(black_box(
                builder.chat(&input(&messages), &SegmentCache::new(256 << 20)),
            ));
        });
        println!(
            "chat {kilobytes} KB in {} messages, {tokens} tokens: known {warm:.0} µs, cold {cold:.0} µs",
            messages.len()
        );
    }

    let english = "The quick brown fox jumps over the lazy dog, and nobody minds; they've seen it \
                   before. In 1984, about 12 of 100 people thought otherwise!\n";
    for (name, text) in [
        ("English", english),
        ("code", code),
        (
            "Chinese",
            "人工智能正在改变我们的生活方式，许多公司都在研究新的模型。",
        ),
        ("emoji", "👩‍👩‍👧‍👦👋🏽🇩🇪 "),
        ("digits", "3141592653589793"),
        ("one word", "abcdefghijklmnopqrstuvwxyz"),
        ("blanks", "    \n\t  "),
    ] {
        let text = text.repeat((1 << 20) / text.len() + 1);
        let us = median_us(9, || {
            drop(black_box(builder.tokenizer().encode_text(&text)))
        });
        println!("cold {name}: {:.1} MB/s", text.len() as f64 / us);
    }
}
