//! Catches: a turn that costs more than its new part, a cache past its bound, and tokens that cross
//! from one scope or tokenizer to another.

use prompt::gguf::Value;
use prompt::{ChatInput, PromptBuilder, SegmentCache};
use serde_json::json;

#[test]
fn a_turn_costs_its_new_part() {
    let known = SegmentCache::new(64 << 20);
    let words = "All work and no play makes Jack a dull boy; 12 times 3 is 36.\n".repeat(60);
    let mut messages = vec![json!({"role": "system", "content": words})];
    for turn in 0..12 {
        messages.push(json!({"role": "user", "content": format!("{turn} {words}")}));
        let before = known.counts();
        let input = ChatInput {
            messages: &messages,
            tools: None,
            template_kwargs: None,
            unix_seconds: 0,
        };
        let tokens = crate::common::builder().chat(&input, &known).unwrap();
        let afresh = crate::common::builder()
            .chat(&input, &crate::common::cache())
            .unwrap();
        assert_eq!(tokens, afresh);
        // Each token that is no control token is either encoded or known: two a message, and one
        // where the answer begins.
        let (now, controls) = (known.counts(), 2 * (turn + 2) + 1);
        let counted = (now.encoded_tokens + now.reused_tokens)
            - (before.encoded_tokens + before.reused_tokens);
        assert_eq!(counted as usize, tokens.len() - controls);
        let encoded = (known.counts().encoded_bytes - before.encoded_bytes) as usize;
        let new = if turn == 0 { 2 } else { 1 };
        // Besides the new text: role names and line ends, 13 bytes a message, are encoded afresh.
        assert!(
            encoded <= new * (words.len() + 16) + 16 * (turn + 2),
            "turn {turn}: {encoded}"
        );
    }
    // A growing plain prompt without any control token costs its new part and one piece.
    let mut text = String::new();
    for turn in 0..12 {
        text.push_str(&words.replace("12", &turn.to_string()));
        let before = known.counts();
        let tokens = crate::common::builder().completion(&text, &known);
        assert_eq!(
            tokens,
            crate::common::builder().completion(&text, &crate::common::cache())
        );
        let encoded = (known.counts().encoded_bytes - before.encoded_bytes) as usize;
        assert!(encoded <= words.len() + 2 * 2048, "turn {turn}: {encoded}");
    }
}

#[test]
fn a_cache_is_bounded_and_scoped() {
    let known = SegmentCache::new(1 << 20);
    let builder = crate::common::builder();
    for at in 0..4000 {
        let text = format!("{at} {}", "lorem ipsum dolor sit amet ".repeat(20));
        let tokens = builder.completion(&text, &known);
        assert_eq!(tokens, builder.tokenizer().encode_text(&text));
    }
    let held = known.held_bytes();
    assert!((256 << 10..=1 << 20).contains(&held), "{held}");

    let text = "what one tenant has sent, no other may find by timing";
    let (ours, theirs) = (known.for_scope("a"), known.for_scope("b"));
    let reused = |cache: &SegmentCache| {
        let before = known.counts().reused_bytes;
        builder.completion(text, cache);
        known.counts().reused_bytes - before
    };
    assert_eq!((reused(&ours), reused(&theirs), reused(&known)), (0, 0, 0));
    assert_eq!(
        (reused(&ours), reused(&theirs)),
        (text.len() as u64, text.len() as u64)
    );
    assert_eq!(SegmentCache::new(0).held_bytes(), 0);
    let nothing = SegmentCache::new(0);
    assert_eq!(
        builder.completion(text, &nothing),
        builder.completion(text, &known)
    );
    assert_eq!(nothing.held_bytes(), 0);
}

#[test]
fn one_cache_serves_several_tokenizers() {
    let mut header = crate::common::header().clone();
    header
        .metadata
        .insert("tokenizer.ggml.pre".into(), Value::Str("gpt-2".into()));
    let other = PromptBuilder::from_gguf(&header).unwrap();
    let known = crate::common::cache();
    let text = "the year 2024 and 1234567890 more, with  two blanks";
    for builder in [
        crate::common::builder(),
        &other,
        crate::common::builder(),
        &other,
    ] {
        assert_eq!(
            builder.completion(text, &known),
            builder.tokenizer().encode_text(text)
        );
    }
}
