//! Does any model file, template, conversation or tool upset what makes prompts?
//!
//! Five targets: bytes that claim to be a model file, to be a file of weights, to be the small files of a
//! model folder (`cargo bolero test` fuzzes each for as long as one likes); templates put together from hostile pieces;
//! messages and tools with every oddity that a client can send. Nothing may panic or take long, and
//! whatever users write, control tokens come from the template alone.

#![expect(clippy::unwrap_used, reason = "a target stops at the first surprise")]

use std::panic::AssertUnwindSafe;
use std::time::{Duration, Instant};

use prompt::checkpoint::safetensors::SafeTensors;
use prompt::checkpoint::{self, Checkpoint, Texts};
use prompt::gguf::Header;
use prompt::{Answered, ChatInput, PromptBuilder, SegmentCache};
use serde_json::{Map, Value as Json, json};

/// One rendering; its fuel is spent in a fifth of this on an idle machine.
const RENDER_MAX: Duration = Duration::from_secs(5);
const CHATML: &str = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n\
                      {% endfor %}{{ '<|im_start|>assistant\n' }}";
const START: u32 = 256;
const END: u32 = 257;

/// A model file with a vocabulary of all bytes, a few control tokens and no tensors.
fn model_file(template: &str) -> Vec<u8> {
    let string = |out: &mut Vec<u8>, text: &str| {
        out.extend((text.len() as u64).to_le_bytes());
        out.extend(text.as_bytes());
    };
    let mut out = b"GGUF".to_vec();
    out.extend(3u32.to_le_bytes());
    out.extend(0u64.to_le_bytes());
    out.extend(7u64.to_le_bytes());
    for (key, value) in [
        ("tokenizer.ggml.model", "gpt2"),
        ("tokenizer.ggml.pre", "default"),
        ("tokenizer.chat_template", template),
    ] {
        string(&mut out, key);
        out.extend(8u32.to_le_bytes());
        string(&mut out, value);
    }
    let mut next = 0x100;
    let mut tokens: Vec<String> = (0..=255u8)
        .map(|byte| {
            let stands = matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
            let code = if stands { u32::from(byte) } else { next };
            next += u32::from(!stands);
            char::from_u32(code).unwrap().to_string()
        })
        .collect();
    let controls = ["<|im_start|>", "<|im_end|>", "<tool_call>"];
    tokens.extend(controls.map(str::to_owned));
    tokens.push("ab".to_owned());
    let mut kinds = vec![1i32; 256];
    kinds.extend([3, 3, 3, 1]);
    let array = |out: &mut Vec<u8>, key: &str, kind: u32, count: usize| {
        string(out, key);
        out.extend(9u32.to_le_bytes());
        out.extend(kind.to_le_bytes());
        out.extend((count as u64).to_le_bytes());
    };
    array(&mut out, "tokenizer.ggml.tokens", 8, tokens.len());
    tokens.iter().for_each(|token| string(&mut out, token));
    array(&mut out, "tokenizer.ggml.token_type", 5, kinds.len());
    kinds.iter().for_each(|kind| out.extend(kind.to_le_bytes()));
    array(&mut out, "tokenizer.ggml.merges", 8, 1);
    string(&mut out, "a b");
    string(&mut out, "tokenizer.ggml.eos_token_id");
    out.extend(4u32.to_le_bytes());
    out.extend(END.to_le_bytes());
    out
}

fn builder(template: &str) -> PromptBuilder {
    let header = Header::parse(&model_file(template)).unwrap();
    PromptBuilder::from_gguf(&header).unwrap()
}

/// Bytes as choices; zeros at their end.
struct Choices<'a>(&'a [u8]);

impl Choices<'_> {
    fn below(&mut self, most: usize) -> usize {
        let [byte, rest @ ..] = self.0 else {
            return 0;
        };
        self.0 = rest;
        usize::from(*byte) % most
    }

    fn of<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len())]
    }
}

#[test]
fn model_files() {
    let sound = model_file(CHATML);
    assert!(PromptBuilder::from_gguf(&Header::parse(&sound).unwrap()).is_ok());
    bolero::check!()
        .with_iterations(2000)
        .for_each(|bytes: &[u8]| {
            let mut choices = Choices(bytes);
            let mut file = match choices.below(3) {
                0 => [b"GGUF".as_slice(), &3u32.to_le_bytes(), bytes].concat(),
                _ => sound.clone(),
            };
            if file.len() == sound.len() {
                for _ in 0..choices.below(12) {
                    let at = choices.below(256) << 8 | choices.below(256);
                    let at = at % file.len();
                    match choices.below(4) {
                        0 => file.truncate(at.max(1)),
                        1 => file[at] = 0xff,
                        2 => file[at] ^= 1 << choices.below(8),
                        _ => file[at] = choices.below(256) as u8,
                    }
                }
            }
            let Ok(header) = Header::parse(&file) else {
                return;
            };
            if let Ok(builder) = PromptBuilder::from_gguf(&header) {
                let tokens = builder
                    .tokenizer()
                    .encode_with_specials("ab <|im_end|>\u{f0000}é");
                builder.tokenizer().decode(&tokens);
                let _ = builder.completion("ab", &SegmentCache::new(0));
            }
        });
}

/// A file of weights with two tensors.
fn safetensors() -> Vec<u8> {
    let header = r#"{"__metadata__":{"format":"pt"},"model.embed_tokens.weight":{"dtype":"F16","shape":[3,2],"data_offsets":[0,12]},"model.norm.weight":{"dtype":"F32","shape":[2],"data_offsets":[12,20]}}"#;
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.as_bytes());
    file.extend([0; 20]);
    file
}

/// Damages bytes by choice; leaves them alone, too.
fn damaged(choices: &mut Choices<'_>, mut file: Vec<u8>) -> Vec<u8> {
    for _ in 0..choices.below(12) {
        if file.is_empty() {
            break;
        }
        let at = (choices.below(256) << 8 | choices.below(256)) % file.len();
        match choices.below(5) {
            0 => file.truncate(at.max(1)),
            1 => file[at] = 0xff,
            2 => file[at] ^= 1 << choices.below(8),
            3 => file[at] = choices.of(b"0123456789-.eE\"{}[],:"),
            _ => file[at] = choices.below(256) as u8,
        }
    }
    file
}

#[test]
fn weight_files() {
    let sound = safetensors();
    assert!(SafeTensors::parse("m", &sound).is_ok());
    bolero::check!()
        .with_iterations(5000)
        .for_each(|bytes: &[u8]| {
            let mut choices = Choices(bytes);
            let file = match choices.below(4) {
                0 => bytes.to_vec(),
                1 => [&(bytes.len() as u64).to_le_bytes(), bytes].concat(),
                _ => damaged(&mut choices, sound.clone()),
            };
            let Ok(read) = SafeTensors::parse("m", &file) else {
                return;
            };
            // Whatever is believed lies in the file.
            let data = file.len() as u64 - read.data_offset;
            assert!(read.tensors.iter().all(|t| t.offset + t.bytes <= data));
        });
}

const CONFIG_TEXT: &str = r#"{"architectures":["LlamaForCausalLM"],"hidden_size":64,"intermediate_size":128,"num_hidden_layers":2,"num_attention_heads":2,"num_key_value_heads":1,"max_position_embeddings":256,"rms_norm_eps":1e-5,"rope_parameters":{"rope_theta":1e4,"rope_type":"llama3","factor":8,"low_freq_factor":1,"high_freq_factor":4,"original_max_position_embeddings":64},"eos_token_id":[1,0]}"#;
const TOKENIZER_TEXT: &str = r#"{"added_tokens":[{"id":2,"content":"<s>","special":true}],"normalizer":{"type":"NFC"},"pre_tokenizer":{"type":"Sequence","pretokenizers":[{"type":"Split","pattern":{"Regex":"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"},"behavior":"Isolated"},{"type":"ByteLevel","add_prefix_space":false,"use_regex":false}]},"post_processor":{"type":"TemplateProcessing","single":[{"SpecialToken":{"id":"<s>"}}]},"model":{"type":"BPE","vocab":{"a":0,"b":1,"ab":3},"merges":["a b"]}}"#;
const SETTINGS_TEXT: &str = r#"{"bos_token":"<s>","eos_token":{"content":"<s>"},"chat_template":[{"name":"default","template":"{{ messages[0].content }}"}]}"#;

#[test]
fn model_folders() {
    let texts = |files: [Vec<u8>; 3]| {
        let mut files = files.into_iter();
        let names = [
            checkpoint::CONFIG,
            checkpoint::TOKENIZER,
            checkpoint::TOKENIZER_CONFIG,
        ];
        Texts::read(|name, _| Ok::<_, ()>(names.contains(&name).then(|| files.next()).flatten()))
    };
    let sound = [CONFIG_TEXT, TOKENIZER_TEXT, SETTINGS_TEXT].map(|text| text.as_bytes().to_vec());
    let whole = texts(sound.clone()).ok().unwrap();
    let header = checkpoint::prompt_header(&whole).unwrap();
    assert!(PromptBuilder::from_gguf(&header).is_ok() && Checkpoint::read(&whole).is_ok());
    bolero::check!()
        .with_iterations(5000)
        .for_each(|bytes: &[u8]| {
            let mut choices = Choices(bytes);
            let which = choices.below(4);
            let mut files = sound.clone();
            for (at, file) in files.iter_mut().enumerate() {
                if which == at || which == 3 {
                    *file = damaged(&mut choices, std::mem::take(file));
                }
            }
            let Ok(texts) = texts(files) else {
                return;
            };
            if let Ok(read) = Checkpoint::read(&texts) {
                assert!(read.pair_factors().len() <= 4 * 512);
            }
            if let Ok(header) = checkpoint::prompt_header(&texts)
                && let Ok(builder) = PromptBuilder::from_gguf(&header)
            {
                builder.tokenizer().encode_with_specials("ab <s>é");
            }
        });
}

/// Pieces of templates: what real ones do, and what nobody should.
const PIECES: &[&str] = &[
    "{% for m in messages %}",
    "{% endfor %}",
    "{% if m.role == 'tool' %}",
    "{% else %}",
    "{% endif %}",
    "{{ m.content }}",
    "{{ m.content.split('x')[-1] | trim }}",
    "{{ m.tool_calls[0].function.arguments | tojson }}",
    "{{ m.reasoning_content }}",
    "<|im_start|>",
    "<|im_end|>",
    "{{ '<|im_' ~ 'end|>' }}",
    "{{ tools | tojson(indent=4) }}",
    "{{ messages | tojson }}",
    "{% set ns = namespace(x='y') %}",
    "{{ ns.x }}",
    "{{ messages[::-1][0]['content'][::-1] }}",
    "{{ raise_exception('no') }}",
    "{{ strftime_now('%Y%%%') }}",
    "{% generation %}",
    "{% endgeneration %}",
    "{{ [1][5].x.y }}",
    "{{ 1 / 0 }}",
    "{{ 1 % 0 }}",
    "{{ (2 ** 63) * 9999999999 }}",
    "{% include 'x' %}",
    "{{ loop.index0 }}",
    "{{ bos_token ~ eos_token }}",
    "{{ 'é'.encode() }}",
    "{{ messages.pop() }}",
    "{%- if true -%}",
    "{{ \u{f0001} }}",
    "\u{f0001}",
    "{%",
    "}}",
];

/// Pieces that spend all fuel, a tenth of a second each time: rare, so that the target stays short.
const COSTLY: &[&str] = &[
    "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}",
    "{% set n = namespace(x='y') %}{% for a in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "{{ 'x' * 100000000 }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
];

#[test]
#[expect(
    clippy::disallowed_methods,
    reason = "a test may ask how long the crate takes"
)]
fn templates() {
    let messages = [
        json!({"role": "system", "content": "s"}),
        json!({"role": "user", "content": "uxu"}),
        json!({"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}]}),
        json!({"role": "tool", "tool_call_id": "1", "content": "t"}),
    ];
    let tools = json!([{"type": "function", "function": {"name": "f"}}]);
    bolero::check!()
        .with_iterations(800)
        .for_each(|bytes: &[u8]| {
            let mut choices = Choices(bytes);
            let mut source = String::new();
            let is_loop = choices.below(2) == 0;
            if is_loop {
                source += "{% for m in messages %}";
            }
            for _ in 0..choices.below(8) {
                source += match choices.below(256) {
                    255 => choices.of(COSTLY),
                    _ => choices.of(PIECES),
                };
            }
            if is_loop {
                source += "{% endfor %}";
            }
            let header = Header::parse(&model_file(&source)).unwrap();
            let Ok(builder) = PromptBuilder::from_gguf(&header) else {
                return;
            };
            let input = ChatInput {
                messages: &messages,
                tools: Some(&tools),
                template_kwargs: None,
                unix_seconds: -1,
            };
            let since = Instant::now();
            let rendered = builder.chat(&input, &SegmentCache::new(1 << 16));
            assert!(since.elapsed() < RENDER_MAX, "{source}");
            if let Err(error) = rendered {
                assert_eq!(error.param(), "messages", "{source}: {error}");
            }
        });
}

const TEXTS: &[&str] = &[
    "",
    "ab",
    "<|im_end|>",
    "<|im_start|>assistant\n",
    "<|im_",
    "end|>",
    "<tool_call>",
    "</tool_response>",
    "<think>",
    "{\"a\": 1}",
    "{\"<|im_end|>\": [1, 2.50, null]}",
    "{tru",
    "[1]",
    "\u{f0000}\u{f0001}\u{f0002}",
    "\u{f0fff}\u{f1000}",
    "é👋🏽\u{0}",
    "user",
];

/// Any value, of any depth that the choices allow.
fn any(choices: &mut Choices<'_>, depth: usize) -> Json {
    match choices.below(if depth == 0 { 5 } else { 7 }) {
        0 => Json::Null,
        1 => json!(choices.below(2) == 0),
        2 => json!(choices.of(&[0.0, -1.5, 1e300])),
        3 | 4 => json!(choices.of(TEXTS)),
        5 => (0..choices.below(3))
            .map(|_| any(choices, depth - 1))
            .collect(),
        _ => (0..choices.below(3))
            .map(|_| (choices.of(TEXTS).to_owned(), any(choices, depth - 1)))
            .collect::<Map<_, _>>()
            .into(),
    }
}

fn message(choices: &mut Choices<'_>) -> Json {
    let role = choices.of(&[
        "system",
        "user",
        "assistant",
        "tool",
        "function",
        "developer",
        "x",
    ]);
    let mut message =
        json!({"role": role, "content": format!("{}{}", choices.of(TEXTS), choices.of(TEXTS))});
    if choices.below(8) == 0 {
        message["content"] = any(choices, 2);
    }
    if choices.below(3) == 0 {
        message["reasoning_content"] = any(choices, 0);
    }
    if choices.below(3) == 0 {
        message["tool_calls"] = json!([{"id": choices.of(TEXTS), "function":
            {"name": choices.of(TEXTS), "arguments": choices.of(TEXTS)}}]);
    }
    if choices.below(12) == 0 {
        message["tool_calls"] = any(choices, 3);
    }
    if choices.below(4) == 0 {
        message["tool_call_id"] = any(choices, 0);
    }
    message
}

#[test]
fn messages_and_tools() {
    // A panic ends the target, so nobody sees a state that it left behind.
    let shared = AssertUnwindSafe((builder(CHATML), SegmentCache::new(1 << 20)));
    bolero::check!()
        .with_iterations(2000)
        .for_each(|bytes: &[u8]| {
            let (builder, known) = &*shared;
            let mut choices = Choices(bytes);
            let messages: Vec<Json> = (0..choices.below(6))
                .map(|_| message(&mut choices))
                .collect();
            let tools = match choices.below(3) {
                0 => None,
                1 => Some(any(&mut choices, 3)),
                _ => Some(
                    json!([{"type": "function", "function": {"name": choices.of(TEXTS),
                    "description": choices.of(TEXTS), "parameters": {"x": any(&mut choices, 2)}}}]),
                ),
            };
            let kwargs = any(&mut choices, 2);
            let input = ChatInput {
                messages: &messages,
                tools: tools.as_ref(),
                template_kwargs: kwargs.as_object(),
                unix_seconds: 0,
            };
            let tokens = match builder.chat(&input, known) {
                Ok(tokens) => tokens,
                Err(error) => {
                    assert!(!error.param().is_empty() && !error.to_string().is_empty());
                    return;
                }
            };
            // Each turn has one beginning and one end, the last no end: no user wrote any.
            let count = |token: u32| tokens.iter().filter(|found| **found == token).count();
            assert_eq!(count(START), count(END) + 1, "{messages:?}");
            remembered(builder, known, &input, &tokens, choices.of(TEXTS));
        });
}

/// An answer that is remembered changes tokens, never the text.
fn remembered(
    builder: &PromptBuilder,
    known: &SegmentCache,
    input: &ChatInput<'_>,
    prompt: &[u32],
    text: &str,
) {
    let produced: Vec<u32> = text.bytes().map(u32::from).chain([END]).collect();
    let byte_ids: Vec<u32> = (0..256)
        .filter(|id| !builder.tokenizer().token_bytes(*id).is_empty())
        .collect();
    assert_eq!(byte_ids.len(), 256);
    let message = json!({"role": "assistant", "content": text});
    let answer = Answered {
        prompt,
        message: &message,
        tokens: &produced,
    };
    let prompt_is_ours = builder
        .chat_with_answers(input, known)
        .is_ok_and(|found| found.tokens == prompt);
    if !builder.remember(input, &answer, known) {
        // Only what it cannot use: no text, or a prompt with other tokens in it.
        assert!(text.is_empty() || !prompt_is_ours, "{text:?}");
        return;
    }
    let mut next = input.messages.to_vec();
    next.extend([message, json!({"role": "user", "content": "-"})]);
    let next = ChatInput {
        messages: &next,
        ..*input
    };
    let with = builder.chat_with_answers(&next, known).unwrap();
    let without = builder.chat(&next, known).unwrap();
    let spelled = |tokens: &[u32]| -> Vec<u8> {
        let tokenizer = builder.tokenizer();
        let text = |id: &u32| match tokenizer.is_control(*id) {
            true => tokenizer.token_text(*id).as_bytes().to_vec(),
            false => tokenizer.token_bytes(*id).to_vec(),
        };
        tokens.iter().flat_map(text).collect()
    };
    assert_eq!(spelled(&with.tokens), spelled(&without));
    assert!(with.tokens.starts_with(&[prompt, &produced].concat()));
}
