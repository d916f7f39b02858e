//! Answers that a grammar holds to a form. Catches a token that the grammar forbids, an answer that
//! is cut before it is whole though the budget had room, and forced tokens that are computed wrongly.

use std::sync::Arc;

use constrain::{Compiler, Constraint, Spec, TokenText, Vocabulary};

use super::stepper::{Stepper, Told};
use super::*;
use crate::engine::Show;

/// One token for each character; the model says any of them.
const TEXT: &str = "abcdefghijklmnopqrstuvwxyz{}[]\":, 0123456789ABCDEFGHIJK.-\n";
const EOS: u32 = REFUSED - 1;

fn compiler() -> Compiler {
    assert!(TEXT.len() < EOS as usize);
    let mut tokens: Vec<_> = TEXT
        .bytes()
        .map(|byte| TokenText {
            bytes: vec![byte],
            control: false,
        })
        .collect();
    tokens.resize_with(VOCAB, || TokenText {
        bytes: b"<|end|>".to_vec(),
        control: true,
    });
    let tokenize = |text: &[u8]| {
        let id = |byte: &u8| TEXT.bytes().position(|b| b == *byte).unwrap_or(0) as u32;
        text.iter().map(id).collect()
    };
    let vocabulary = Vocabulary::new(tokens, vec![EOS], Arc::new(tokenize));
    Compiler::new(vocabulary.expect("a vocabulary"))
}

fn engine(kv_blocks: u32) -> Stepper {
    let bytes = |id: u32, _: Show| TEXT.as_bytes().get(id as usize).copied();
    Stepper::new(Parts {
        token_bytes: Box::new(move |id, show| bytes(id, show).into_iter().collect()),
        ..parts(kv_blocks, Arc::default())
    })
}

fn start(compiler: &Compiler, spec: &Spec) -> Constraint {
    compiler.compile(spec, None).expect("it compiles").start()
}

fn constrained(prompt: &[u32], output_max: usize, constraint: Constraint) -> Job {
    let mut job = job(prompt, output_max, None);
    job.constraint = Some(constraint);
    job.stop_tokens = vec![EOS];
    job
}

fn run(stepper: &mut Stepper, job: Job) -> Told {
    let mut told = stepper.submit(job);
    stepper.finish(&mut told);
    told
}

#[test]
fn a_choice_is_forced_once_it_is_certain() {
    let compiler = compiler();
    let spec = Spec::Choice(vec!["alphabetical".into(), "betamax".into()]);
    for seed in 0..20 {
        let mut stepper = engine(64);
        let prompt = Random(seed).tokens(20);
        let told = run(
            &mut stepper,
            constrained(&prompt, 50, start(&compiler, &spec)),
        );
        assert!(
            ["alphabetical", "betamax"].contains(&&told.text[..]),
            "{}",
            told.text
        );
        assert_eq!(told.done().0, Ending::Stop);
        assert_eq!(told.done().1.output_tokens, told.text.len());
        assert!(stepper.steps <= 4, "{} steps", stepper.steps);
        assert!(stepper.engine.parts.metrics.forced_tokens.get() > 5);
        stepper.end();
    }
}

#[test]
fn answers_are_whole_within_any_budget_that_has_room() {
    let compiler = compiler();
    let schema = serde_json::json!({
        "type": "object",
        "properties": {"name": {"type": "string"}, "on": {"enum": [0, 1]}, "list": {
            "type": "array", "items": {"type": "integer"}}},
        "required": ["name", "on", "list"],
        "additionalProperties": false,
    });
    let compiled = compiler
        .compile(&Spec::JsonSchema(schema), None)
        .expect("it compiles");
    let least = compiled.shortest_tokens();
    for seed in 0..40 {
        // Room for two at a time: some are preempted half-way.
        let mut stepper = engine(14);
        let mut random = Random(seed);
        let mut told: Vec<_> = (0..5)
            .map(|_| {
                let budget = least + random.below(60);
                let prompt = random.tokens(30);
                stepper.submit(constrained(&prompt, budget, compiled.start()))
            })
            .collect();
        for told in &mut told {
            stepper.finish(told);
            let value: serde_json::Value = serde_json::from_str(&told.text)
                .unwrap_or_else(|error| unreachable!("{error}: {}", told.text));
            assert!(value["name"].is_string() && value["list"].is_array());
            assert_eq!(told.done().0, Ending::Stop, "{}", told.text);
        }
        stepper.end();
    }
}

#[test]
fn log_probabilities_are_told_for_every_token() {
    let compiler = compiler();
    let spec = Spec::Choice(vec!["alphabetical".into(), "betamax".into()]);
    let mut stepper = engine(64);
    let mut job = constrained(&[1, 2, 3], 50, start(&compiler, &spec));
    job.logprobs = Some(2);
    let told = run(&mut stepper, job);
    assert_eq!(told.produced.len(), told.done().1.output_tokens);
    for token in &told.produced {
        assert!(token.logprob < 0.0 && token.top.len() == 2, "{token:?}");
    }
    stepper.end();
}

#[test]
fn forced_tokens_give_the_same_answer_as_single_ones() {
    let compiler = compiler();
    let spec = Spec::Regex("(abc[0-9]{3}def){1,4}\\.".into());
    for seed in 0..30 {
        let prompt = Random(seed).tokens(40);
        let answers = [None, Some(0)].map(|logprobs| {
            let mut stepper = engine(64);
            let mut job = constrained(&prompt, 60, start(&compiler, &spec));
            job.logprobs = logprobs;
            let told = run(&mut stepper, job);
            let findable = stepper.findable();
            stepper.end();
            (told.text.clone(), told.done().1, findable)
        });
        assert_eq!(answers[0].0, answers[1].0, "seed {seed}");
        assert_eq!(answers[0].1, answers[1].1, "seed {seed}");
    }
}

#[test]
fn nothing_ends_an_answer_before_its_least_tokens_unless_the_grammar_is_over() {
    let compiler = compiler();
    let mut stepper = engine(64);
    let mut job = constrained(&[7, 8], 40, start(&compiler, &Spec::Regex("[a-f]+".into())));
    job.output_min = 12;
    let told = run(&mut stepper, job);
    assert!(told.done().1.output_tokens > 12, "{}", told.text);
    let mut job = constrained(
        &[7, 8],
        40,
        start(&compiler, &Spec::Regex("[a-f]{3}".into())),
    );
    job.output_min = 12;
    let told = run(&mut stepper, job);
    assert_eq!((told.text.len(), told.done().0), (3, Ending::Stop));
    let mut job = super::job(&[7, 8], 40, None);
    job.output_min = 12;
    job.stops = TEXT.chars().map(String::from).collect();
    let told = run(&mut stepper, job);
    assert_eq!(
        (told.done().0, told.done().1.output_tokens),
        (Ending::Stop, 13)
    );
    stepper.end();
}
