//! Catches a continued prompt that differs from the same prompt made whole: tokens, answers, and
//! what is refused.

use prompt::{Answered, Begun, ChatInput, ChatTokens, PromptBuilder, SegmentCache};
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{RngExt, SeedableRng};
use serde_json::{Map, Value as Json, json};

use crate::common::{builder, with_template};
use crate::sentencepiece::Kind;

fn input<'a>(messages: &'a [Json], tools: Option<&'a Json>) -> ChatInput<'a> {
    ChatInput {
        messages,
        tools,
        template_kwargs: None,
        unix_seconds: 1_700_000_000,
    }
}

/// A template that knows tools, calls, their results and reasoning, and only appends.
const KNOWING: &str = "{%- if tools %}{{ '<|im_start|>tools\n' }}\
    {%- for tool in tools %}{{ tool | tojson }}{% if not loop.last %},{% endif %}{% endfor %}\
    {{- '<|im_end|>\n' }}{% endif %}
{%- for m in messages -%}
    {%- if m.role == 'tool' %}{{ '<|im_start|>tool\n' + m.content + '<|im_end|>\n' }}
    {%- else %}{{ '<|im_start|>' + m.role + '\n' }}
    {%- if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}
    {{- m.content }}
    {%- for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>
    {%- endfor %}{{ '<|im_end|>\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";

/// No control token parts its messages; a system message at the beginning is refused.
const BARE: &str = "<|im_start|>{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}\
    {% for m in messages %}{{ m.content }}
{% endfor %}<|im_end|>{% for t in [1] %}{% endfor %}x";

/// Templates that look elsewhere than at one message.
const LOOKING: &[&str] = &[
    "{% for m in messages %}{{ '<|im_start|>' + m.content }}{% if loop.last %}!{% endif %}{% endfor %}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{{ ns.n }}{{ m.content }}{% endfor %}",
    "{{ messages[-1].content }}{% for m in messages %}{{ m.content }}{% endfor %}",
];

const WORDS: &[&str] = &[
    "hello",
    " ",
    "\n",
    "\n\n",
    "weather",
    "<|im_end|>",
    "<|im_start|>",
    "é",
    "\u{f0ffe}",
    "\u{f0fff}",
    "{\"a\": 1}",
    "1234",
    "  x",
    "Zürich",
    "\t",
];

fn text(random: &mut StdRng) -> String {
    let count = random.random_range(0..12);
    (0..count)
        .filter_map(|_| WORDS.choose(random))
        .copied()
        .collect()
}

/// A message that may follow any other; sometimes unsound.
fn message(random: &mut StdRng, at: usize) -> Json {
    let id = format!("c{}", random.random_range(0..6));
    match random.random_range(0..20) {
        0 if at == 0 => json!({"role": "system", "content": text(random)}),
        0 => json!({"role": "x", "content": text(random)}),
        1..=3 => json!({"role": "assistant", "content": null, "tool_calls": [
            {"id": id, "type": "function",
             "function": {"name": "f", "arguments": "{\"a\":[1,2]}"}}]}),
        4 => json!({"role": "assistant", "content": "", "tool_calls": [
            {"type": "function", "function": {"name": "f", "arguments": text(random)}}]}),
        5..=9 => json!({"role": "tool", "tool_call_id": id, "content": text(random)}),
        10 => json!({"role": "tool", "content": text(random)}),
        11..=13 => json!({"role": "assistant", "content": text(random)}),
        14 => {
            json!({"role": "assistant", "reasoning_content": text(random), "content": text(random)})
        }
        15 => json!({"role": "system", "content": text(random)}),
        16 => json!({"role": "user", "content": 7}),
        _ => json!({"role": "user", "content": [{"type": "text", "text": text(random)}]}),
    }
}

/// Continues random conversations turn by turn, each turn beside its slow twin. How many turns were
/// continued.
fn check(builder: &PromptBuilder, seed: u64, remembers: bool) -> usize {
    let mut random = StdRng::seed_from_u64(seed);
    let known = SegmentCache::new(8 << 20);
    let tools = json!([{"type": "function", "function": {"name": "f", "parameters": {}}}]);
    let tools = random.random_bool(0.5).then_some(tools);
    let mut messages: Vec<Json> = Vec::new();
    let mut begun: Option<(Begun, Vec<u32>)> = None;
    let mut grown = 0;
    for _ in 0..12 {
        let whole_before = messages.len();
        for _ in 0..random.random_range(0..4) {
            messages.push(message(&mut random, messages.len()));
        }
        let now = input(&messages, tools.as_ref());
        let whole = builder.chat_with_answers(&now, &known);
        let continued = begun
            .as_ref()
            .and_then(|(begun, tokens)| builder.chat_grown(begun, tokens, &now, &known));
        let Ok(whole) = whole else {
            assert!(continued.is_none(), "{messages:?}");
            messages.truncate(whole_before);
            continue;
        };
        if let Some((tokens, next)) = continued {
            assert_eq!(tokens, whole, "seed {seed}: {messages:?}");
            assert_eq!(next.messages(), messages.len());
            grown += 1;
            begun = Some((next, tokens.tokens));
        } else {
            let (tokens, next) = builder.chat_begun(&now, &known).unwrap();
            assert_eq!(tokens, whole);
            begun = next.map(|next| (next, tokens.tokens));
        }
        if remembers {
            answered(
                builder,
                &mut random,
                (&mut messages, tools.as_ref()),
                &whole,
                &known,
            );
        }
    }
    grown
}

/// Remembers an answer by tokens that the tokenizer would not choose, and adds it.
fn answered(
    builder: &PromptBuilder,
    random: &mut StdRng,
    (messages, tools): (&mut Vec<Json>, Option<&Json>),
    prompt: &ChatTokens,
    known: &SegmentCache,
) {
    let said = format!("hello {}", random.random_range(0..9));
    let single = |byte: u8| {
        builder
            .tokenizer()
            .encode_more(&char::from(byte).to_string())
    };
    let mut tokens: Vec<u32> = said.bytes().flat_map(single).collect();
    tokens.extend(builder.tokenizer().eos_ids().first());
    let message = json!({"role": "assistant", "content": said});
    let answer = Answered {
        prompt: &prompt.tokens,
        message: &message,
        tokens: &tokens,
    };
    builder.remember(&input(messages, tools), &answer, known);
    messages.push(message);
}

#[test]
fn a_continued_prompt_is_the_whole_one() {
    let models = [
        with_template(KNOWING),
        with_template(BARE),
        with_template(
            &builder()
                .template_source()
                .unwrap()
                .replace("loop.first and ", ""),
        ),
    ];
    let pieces: Vec<PromptBuilder> = Kind::ALL
        .iter()
        .flat_map(|kind| [KNOWING, BARE].map(|template| kind.builder(template)))
        .collect();
    let models: Vec<&PromptBuilder> = models.iter().chain([builder()]).chain(&pieces).collect();
    for (at, model) in models.into_iter().enumerate() {
        for remembers in [false, true] {
            let grown: usize = (0..60).map(|seed| check(model, seed, remembers)).sum();
            assert!(grown > 100, "template {at}: {grown} turns were continued");
        }
    }
}

#[test]
fn templates_that_look_elsewhere_are_rendered_whole() {
    for template in LOOKING {
        let model = with_template(template);
        assert_eq!(
            (0..10)
                .map(|seed| check(&model, seed, false))
                .sum::<usize>(),
            0
        );
    }
}

#[test]
fn other_variables_and_first_messages_count() {
    // The first message stands before those that are added, so templates may read it.
    let model = with_template(
        "{% for m in messages %}{{ '<|im_start|>' + messages[0].content + m.content + (x or '') }}{% endfor %}",
    );
    let mut variables = Map::new();
    variables.insert("x".into(), json!("<|im_end|>y"));
    let messages: Vec<Json> = (0..4)
        .map(|n| json!({"role": "user", "content": format!("m{n}")}))
        .collect();
    let known = SegmentCache::new(1 << 20);
    let of = |messages| ChatInput {
        template_kwargs: Some(&variables),
        ..input(messages, None)
    };
    let (tokens, begun) = model.chat_begun(&of(&messages[..2]), &known).unwrap();
    let all = of(&messages);
    let (grown, _) = model
        .chat_grown(&begun.unwrap(), &tokens.tokens, &all, &known)
        .unwrap();
    assert_eq!(grown, model.chat_with_answers(&all, &known).unwrap());
}
