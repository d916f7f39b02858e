//! Catches: an answer whose tokens the next turn's prompt does not repeat, tokens used where they
//! do not spell the answer or for another tenant, and a control token that no template wrote.

use prompt::{Answered, ChatInput, ChatTokens, PromptBuilder, SegmentCache};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use serde_json::{Value as Json, json};

use crate::common::{builder, cache, with_template};

const END: u32 = 2;

fn input(messages: &[Json]) -> ChatInput<'_> {
    ChatInput {
        messages,
        tools: None,
        template_kwargs: None,
        unix_seconds: 0,
    }
}

fn prompt(builder: &PromptBuilder, messages: &[Json], known: &SegmentCache) -> ChatTokens {
    builder.chat_with_answers(&input(messages), known).unwrap()
}

/// Tokens that spell a text, cut at random places: rarely the tokenizer's own.
fn odd_tokens(text: &str, rng: &mut StdRng) -> Vec<u32> {
    let tokenizer = builder().tokenizer();
    let mut tokens = Vec::new();
    let mut rest = text;
    while !rest.is_empty() {
        let ends: Vec<usize> = rest
            .char_indices()
            .map(|(at, c)| at + c.len_utf8())
            .collect();
        let end = ends[rng.random_range(0..ends.len().min(5))];
        tokens.extend(tokenizer.encode_text(&rest[..end]));
        rest = &rest[end..];
    }
    tokens
}

fn remember(
    builder: &PromptBuilder,
    messages: &[Json],
    message: &Json,
    tokens: &[u32],
    known: &SegmentCache,
) -> bool {
    let prompt = prompt(builder, messages, known).tokens;
    let answer = Answered {
        prompt: &prompt,
        message,
        tokens,
    };
    builder.remember(&input(messages), &answer, known)
}

fn user(content: &str) -> Json {
    json!({"role": "user", "content": content})
}

#[test]
fn a_conversations_prompts_repeat_what_was_produced() {
    let known = cache();
    let mut rng = StdRng::seed_from_u64(5);
    let mut messages = vec![user("Hi there")];
    let answers = [
        "Hello! How are you today?",
        "\n\n  fn main() {\n    println!(\"x\");\n}\n",
        "日本語 👋🏽 naïve",
        "{\"a\": [1, 2.50, true]}",
        "Hello! How are you today?",
    ];
    for (turn, answer) in answers.iter().enumerate() {
        let before = prompt(builder(), &messages, &known);
        assert_eq!(before.answers, turn);
        let mut produced = odd_tokens(answer, &mut rng);
        produced.push(END);
        let message = json!({"role": "assistant", "content": answer});
        assert!(remember(builder(), &messages, &message, &produced, &known));
        messages.push(message);
        messages.push(user("Go on"));
        let after = prompt(builder(), &messages, &known);
        let cached = [before.tokens.as_slice(), &produced].concat();
        assert!(after.tokens.starts_with(&cached), "turn {turn}: {answer:?}");
        // Without the memory, and in another scope, the tokens are the tokenizer's own.
        let fresh = builder().chat(&input(&messages), &known).unwrap();
        assert_eq!(prompt(builder(), &messages, &cache()).tokens, fresh);
        assert_eq!(
            prompt(builder(), &messages, &known.for_scope("b")).tokens,
            fresh
        );
        assert_eq!(
            builder().tokenizer().decode(&after.tokens),
            builder().tokenizer().decode(&fresh)
        );
    }
    // An edited answer, or another beginning, is not the one that was produced.
    let mut edited = messages.clone();
    edited[1]["content"] = json!("Hello!  How are you today?");
    assert_eq!(prompt(builder(), &edited, &known).answers, 0);
    let mut other = messages.clone();
    other[0] = user("Hi here");
    assert_eq!(prompt(builder(), &other, &known).answers, 0);
}

#[test]
fn calls_and_reasoning_are_kept_as_they_were_spelled() {
    let known = cache();
    let mut rng = StdRng::seed_from_u64(6);
    let messages = vec![user("Weather?")];
    // The model wrote no blank behind the colons; the replay's JSON has them.
    let produced_text = "<think>\nHm.\n</think>\n\nLet me look.\n<tool_call>\n{\"name\":\"w\",\"arguments\":\
                         {\"city\":\"Zürich\",\"n\":1}}\n</tool_call>\n<tool_call>\n{\"arguments\":{},\"name\":\"x\"}\n</tool_call>";
    let message = json!({"role": "assistant", "content": "Let me look.\n", "reasoning_content": "\nHm.\n", "tool_calls": [
        {"id": "call_1", "type": "function", "function": {"name": "w", "arguments": "{\"city\":\"Zürich\",\"n\":1}"}},
        {"id": "call_2", "type": "function", "function": {"name": "x", "arguments": "{}"}}]});
    let mut produced = odd_tokens(produced_text, &mut rng);
    produced.push(END);
    assert!(remember(builder(), &messages, &message, &produced, &known));
    let before = prompt(builder(), &messages, &known).tokens;
    let mut replayed = message.clone();
    // Clients spell the arguments as they like.
    replayed["tool_calls"][0]["function"]["arguments"] =
        json!("{ \"city\": \"Z\\u00fcrich\", \"n\": 1 }");
    for message in [message, replayed] {
        let mut next = messages.clone();
        next.push(message);
        next.push(json!({"role": "tool", "tool_call_id": "call_1", "content": "21"}));
        let after = prompt(builder(), &next, &known);
        assert_eq!(after.answers, 1);
        assert!(
            after
                .tokens
                .starts_with(&[before.as_slice(), &produced].concat())
        );
    }
}

#[test]
fn tokens_that_are_not_the_answer_are_refused() {
    let tokenizer = builder().tokenizer();
    let known = cache();
    let messages = vec![user("u")];
    let message = json!({"role": "assistant", "content": "Yes."});
    let check = |text: &str, extra: &[u32], expected: bool| {
        let tokens = [tokenizer.encode_text(text), extra.to_vec()].concat();
        assert_eq!(
            remember(builder(), &messages, &message, &tokens, &known),
            expected,
            "{text:?} {extra:?}"
        );
    };
    check("Yes.", &[END], true);
    check("Yes.", &[], true);
    check(" Yes.\n", &[END], true);
    check("No.", &[END], false);
    check("Yes", &[END], false);
    check("", &[END], false);
    // Control tokens that the template would not write: within, and two at the end.
    check("Yes.", &[1, END], false);
    check("Yes.", &[END, END], false);
    // A call whose pieces are not what was produced.
    let message = json!({"role": "assistant", "content": null, "tool_calls": [
        {"id": "1", "function": {"name": "f", "arguments": "{\"a\":1}"}}]});
    let call = |text: &str| tokenizer.encode_text(text);
    for (text, expected) in [
        (
            "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\":1}}\n</tool_call>",
            true,
        ),
        (
            "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\":2}}\n</tool_call>",
            false,
        ),
        (
            "<tool_call>\n{\"name\": \"g\", \"arguments\": {\"a\":1}}\n</tool_call>",
            false,
        ),
    ] {
        let found = remember(builder(), &messages, &message, &call(text), &known);
        assert_eq!(found, expected, "{text}");
    }
    let long = format!(
        "{{\"name\": \"f\", \"arguments\": {{\"a\":1}}}}{}",
        "and more ".repeat(100)
    );
    assert!(!remember(
        builder(),
        &messages,
        &message,
        &call(&long),
        &known
    ));
}

#[test]
fn what_a_stop_string_cut_off_is_cut_off() {
    let tokenizer = builder().tokenizer();
    let known = cache();
    let messages = vec![user("Count")];
    let produced = tokenizer.encode_text("One, two, three. Done with that");
    let message = json!({"role": "assistant", "content": "One, two, thr"});
    assert!(remember(builder(), &messages, &message, &produced, &known));
    let mut next = messages.clone();
    next.extend([message, user("Go on")]);
    let after = prompt(builder(), &next, &known);
    assert_eq!(after.answers, 1);
    let plain = builder().chat(&input(&next), &known).unwrap();
    assert_eq!(tokenizer.decode(&after.tokens), tokenizer.decode(&plain));
}

#[test]
fn templates_that_change_answers_keep_their_way() {
    // Reasoning that the template drops, and a turn that does not begin with this one's prompt.
    let drops = with_template(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content.split('</think>')[-1] }}\
         <|im_end|>\n{% endfor %}<|im_start|>assistant\n",
    );
    let moves = with_template(
        "{{ messages | length }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}\
         <|im_end|>\n{% endfor %}<|im_start|>assistant\n",
    );
    let unopened = with_template(
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:",
    );
    let known = cache();
    let messages = vec![user("u")];
    let plain = json!({"role": "assistant", "content": "Yes."});
    let thought = json!({"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."});
    let check = |builder: &PromptBuilder, message: &Json, text: &str, expected: bool| {
        let tokens = builder.tokenizer().encode_text(text);
        let found = remember(builder, &messages, message, &tokens, &known);
        assert_eq!(found, expected, "{message}");
    };
    check(&drops, &plain, "Yes.", true);
    check(&drops, &thought, "<think>\nHm.\n</think>\n\nYes.", false);
    check(&moves, &plain, "Yes.", false);
    check(&unopened, &plain, "Yes.", false);
}

#[test]
fn the_memory_is_bounded() {
    let known = SegmentCache::new(1 << 20);
    let tokenizer = builder().tokenizer();
    for number in 0..500 {
        let messages = vec![user(&format!("question {number}"))];
        let text = format!("answer {number} ").repeat(100);
        let message = json!({"role": "assistant", "content": text});
        let tokens = tokenizer.encode_text(&text);
        remember(builder(), &messages, &message, &tokens, &known);
        assert!(known.held_bytes() <= 1 << 20);
    }
}
