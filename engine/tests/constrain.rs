//! Constrained answers over the default model's own vocabulary and tokenizer.
//!
//! The crate `constrain` tests its promises over a small vocabulary. Here it has 49,152 tokens, and a
//! tokenizer that spells numbers digit by digit and words with the space before them.

#[path = "../constrain/tests/constrain/schemas.rs"]
mod schemas;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use constrain::{CallCount, Calls, Compiled, Compiler, Spec, TokenText, Tool, Vocabulary};
use prompt::Tokenizer;
use rand::rngs::StdRng;
use rand::seq::IndexedRandom as _;
use rand::{RngExt as _, SeedableRng as _};
use serde_json::{Value, json};

struct Model {
    tokenizer: Arc<Tokenizer>,
    compiler: Compiler,
}

fn model() -> Model {
    let path = std::env::var_os("HOMING_MODEL").map_or_else(
        || {
            PathBuf::from(env!("CARGO_MANIFEST_DIR"))
                .join("../models/SmolLM2-135M-Instruct.Q4_1.gguf")
        },
        PathBuf::from,
    );
    let file = std::fs::read(&path).expect("run `make setup`");
    let header = prompt::gguf::Header::parse(&file).expect("a GGUF file");
    let tokenizer = Arc::new(Tokenizer::from_gguf(&header).expect("a known tokenizer"));
    let size = u32::try_from(tokenizer.vocab_size()).expect("a vocabulary");
    let tokens = (0..size)
        .map(|id| TokenText {
            bytes: if tokenizer.is_control(id) {
                tokenizer.token_text(id).as_bytes().to_vec()
            } else {
                tokenizer.token_bytes(id).to_vec()
            },
            control: tokenizer.is_control(id),
        })
        .collect();
    let own = Arc::clone(&tokenizer);
    let tokenize = move |text: &[u8]| own.encode_text(&String::from_utf8_lossy(text));
    let eos = tokenizer.eos_ids().to_vec();
    let vocabulary = Vocabulary::new(tokens, eos, Arc::new(tokenize)).expect("a vocabulary");
    Model {
        tokenizer,
        compiler: Compiler::new(vocabulary),
    }
}

impl Model {
    fn compile(&self, spec: &Spec) -> Arc<Compiled> {
        self.compiler
            .compile(spec, None)
            .map_err(|refused| format!("{spec:?}: {refused}"))
            .expect("a grammar")
    }

    fn text(&self, tokens: &[u32]) -> String {
        String::from_utf8(self.tokenizer.decode(tokens)).expect("an answer is UTF-8")
    }
}

/// What a walk took, and how long its steps were.
struct Walk {
    tokens: Vec<u32>,
    forced: usize,
    complete: bool,
    steps: Vec<Duration>,
}

fn walk(model: &Model, compiled: &Arc<Compiled>, budget: usize, random: &mut StdRng) -> Walk {
    let eos = model.tokenizer.eos_ids();
    let mut constraint = compiled.start();
    let mut walk = Walk {
        tokens: Vec::new(),
        forced: 0,
        complete: false,
        steps: Vec::new(),
    };
    loop {
        let left = budget - walk.tokens.len();
        let began = Instant::now();
        if let Some(rest) = constraint.completion(left).expect("it goes on") {
            walk.tokens.extend(rest);
            walk.complete = true;
            return walk;
        }
        let forced = constraint.forced(left).expect("it goes on");
        walk.forced += forced.len();
        walk.tokens.extend(forced);
        if constraint.is_over() || walk.tokens.len() == budget {
            walk.complete = constraint.is_complete();
            return walk;
        }
        let mask = constraint.mask().expect("it goes on").clone();
        walk.steps.push(began.elapsed());
        let words = mask.words();
        let allowed: Vec<u32> = (0..u32::try_from(words.len() * 32).expect("small"))
            .filter(|token| mask.allows(*token))
            .collect();
        let token = *allowed.choose(random).expect("something is allowed");
        if eos.contains(&token) {
            walk.complete = constraint.is_complete();
            return walk;
        }
        constraint.commit(token).expect("it goes on");
        walk.tokens.push(token);
    }
}

/// Would catch a promise that the model's own vocabulary breaks.
#[test]
fn answers_end_within_their_budget_in_the_model_s_own_tokens() {
    let model = model();
    let mut steps = Vec::new();
    let (mut forced, mut tokens) = (0, 0);
    for seed in 0..40 {
        let schema = schemas::Schemas::new(1000 + seed).object();
        let compiled = model.compile(&Spec::JsonSchema(schema.clone()));
        let mut random = StdRng::seed_from_u64(seed);
        for _ in 0..4 {
            let spare = [0, 1, 3, 10, 60, 300][random.random_range(0..6)];
            let budget = compiled.shortest_tokens() + spare;
            let walk = walk(&model, &compiled, budget, &mut random);
            let text = model.text(&walk.tokens);
            assert!(walk.complete, "budget {budget}: {text}\n{schema}");
            assert!(walk.tokens.len() <= budget, "{text}");
            if let Err(error) = serde_json::from_str::<Value>(&text) {
                let endless = error.to_string().contains("out of range");
                assert!(endless, "{error}: {text}\n{schema}");
            }
            steps.extend(walk.steps);
            forced += walk.forced;
            tokens += walk.tokens.len();
        }
    }
    steps.sort_unstable();
    eprintln!(
        "{} steps: median {:?}, p90 {:?}, p99 {:?}, most {:?}; {forced} of {tokens} tokens forced",
        steps.len(),
        steps[steps.len() / 2],
        steps[steps.len() * 9 / 10],
        steps[steps.len() * 99 / 100],
        steps[steps.len() - 1],
    );
    // Typical is far below it, also on a busy machine.
    assert!(steps[steps.len() / 2] < Duration::from_millis(2));
}

/// Would catch a shortest completion that is far from the shortest, which refuses budgets that are
/// enough.
#[test]
fn the_shortest_answer_is_as_short_as_its_own_tokens() {
    let model = model();
    let check = |spec: &Spec, text: &str| {
        let compiled = model.compile(spec);
        let tokens = model.tokenizer.encode_text(text).len();
        assert_eq!(compiled.shortest_tokens(), tokens, "{text}");
    };
    let weather = json!({"type": "object", "properties": {
        "location": {"type": "string", "description": "A city"},
        "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
        "days": {"type": "integer"}}, "required": ["location", "unit"]});
    check(
        &Spec::JsonSchema(weather.clone()),
        r#"{"location": "", "unit": "celsius"}"#,
    );
    let calls = Calls {
        form: answer::CallForm::of(answer::ToolFormat::Hermes),
        tools: vec![Tool {
            name: "get_weather".into(),
            parameters: weather,
        }],
        most: CallCount::One,
    };
    check(
        &Spec::Calls(calls),
        "<tool_call>\n{\"name\": \"get_weather\", \"arguments\": {\"location\": \"\", \"unit\": \
         \"celsius\"}}\n</tool_call>",
    );
    check(&Spec::JsonObject, "{}");
}

/// The cost of a step where any text is allowed, which is what a plain string in JSON is: the case
/// that decides how fast constrained answers are.
#[test]
fn a_step_inside_a_string_is_cheap() {
    let model = model();
    let compiled = model.compile(&Spec::Regex("(?s:.{0,100000})".into()));
    let string = model.compile(&Spec::JsonSchema(json!({"type": "string"})));
    for (name, compiled) in [("any text", compiled), ("a JSON string", string)] {
        let mut random = StdRng::seed_from_u64(1);
        let walk = walk(&model, &compiled, 400, &mut random);
        let mut steps = walk.steps;
        steps.sort_unstable();
        let median = steps[steps.len() / 2];
        eprintln!("{name}: {} steps, median {median:?}", steps.len());
        assert!(median < Duration::from_millis(2), "{name}: {median:?}");
    }
}
