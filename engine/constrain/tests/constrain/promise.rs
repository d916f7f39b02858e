//! Does a constrained answer always end, complete and valid, within its budget?

use constrain::{CallCount, Calls, Reasoning, Spec, Tool};
use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use serde_json::{Value, json};

use crate::schemas::Schemas;
use crate::vocabulary::{compiler, text};
use crate::walk::{End, Pick, walk};

const PICKS: [Pick; 3] = [Pick::Uniform, Pick::Opening, Pick::Endless];

/// Walks of one specification under many budgets; each text goes to `check`.
fn keeps_its_promise(
    spec: &Spec,
    reasoning: Option<&Reasoning>,
    seed: u64,
    rounds: usize,
    mut check: impl FnMut(&str),
) {
    let compiled = compiler().compile(spec, reasoning);
    let compiled = compiled.unwrap_or_else(|refused| panic!("{spec:?}: {refused}"));
    let shortest = compiled.shortest_tokens();
    let mut random = StdRng::seed_from_u64(seed);
    for round in 0..rounds {
        let pick = PICKS[round % PICKS.len()];
        let spare = [0, 1, 2, 3, 5, 8, 13, 40, 150][random.random_range(0..9)];
        let budget = shortest + spare;
        let forcing = random.random_bool(0.7);
        let (tokens, end) = walk(&compiled, budget, pick, forcing, &mut random);
        let written = text(&tokens);
        assert_eq!(
            end,
            End::Complete,
            "budget {budget}, {pick:?}: {written}\n{spec:?}"
        );
        assert!(
            tokens.len() <= budget,
            "{} > {budget}: {written}",
            tokens.len()
        );
        check(&written);
    }
}

fn valid(schema: &Value, written: &str) {
    let value: Value = match serde_json::from_str(written) {
        Ok(value) => value,
        // Where a schema says nothing, JSON's own numbers are allowed, and they have no end.
        Err(error) if error.to_string().contains("number out of range") => return,
        Err(error) => panic!("{error}: {written}\n{schema}"),
    };
    let validator = jsonschema::options()
        .should_validate_formats(true)
        .build(schema)
        .expect("a schema");
    if let Err(error) = validator.validate(&value) {
        panic!("{error}: {written}\n{schema}");
    }
}

/// Would catch an answer that is cut, invalid or too long, whatever the tokens picked.
#[test]
fn schemas_of_agents_are_kept_under_every_budget() {
    for seed in 0..100 {
        let schema = Schemas::new(seed).object();
        let spec = Spec::JsonSchema(schema.clone());
        keeps_its_promise(&spec, None, seed, 12, |written| valid(&schema, written));
    }
}

/// Would catch a branch that is entered too late to be finished: the hard cases by name.
#[test]
fn costly_branches_are_not_entered_too_late() {
    let costly = json!({
        "type": "object",
        "properties": (0..30).map(|i| (format!("required_{i}"), json!({"type": "integer"})))
            .collect::<serde_json::Map<_, _>>(),
        "required": (0..30).map(|i| format!("required_{i}")).collect::<Vec<_>>(),
        "additionalProperties": false,
    });
    let schemas = [
        json!({"anyOf": [{"type": "null"}, costly]}),
        json!({"type": "object", "properties": {"a": {"type": "string"}, "b": costly, "c": costly},
            "required": ["a"], "additionalProperties": false}),
        json!({"type": "array", "items": {"anyOf": [{"type": "boolean"}, costly]}}),
        json!({"type": "string", "pattern": "^(a|b[0-9]{60}|c.{20,})$"}),
        json!({"type": "string", "minLength": 30, "maxLength": 90}),
        json!({"$ref": "#/$defs/n", "$defs": {"n": {"anyOf": [
            {"type": "integer"},
            {"type": "object", "properties": {"left": {"$ref": "#/$defs/n"}, "right": {"$ref": "#/$defs/n"}},
             "required": ["left", "right"], "additionalProperties": false},
            {"type": "array", "items": {"$ref": "#/$defs/n"}, "minItems": 2},
        ]}}}),
        json!({}),
        json!({"type": "object"}),
        json!({"type": "array", "items": {}, "minItems": 3}),
        json!({"type": "integer", "multipleOf": 7, "minimum": 1000}),
    ];
    for (seed, schema) in (0..).zip(&schemas) {
        let spec = Spec::JsonSchema(schema.clone());
        keeps_its_promise(&spec, None, seed, 60, |written| valid(schema, written));
    }
}

/// Would catch a promise that only JSON keeps.
#[test]
fn expressions_grammars_and_choices_are_kept_too() {
    let lark = r#"
start: expr
expr: expr OP expr | "(" expr ")" | NUMBER | call
call: "f" "(" expr "," expr "," expr ")"
OP: "+" | "*"
NUMBER: /[0-9]+/
%ignore / /
"#;
    let specs = [
        Spec::Regex("(yes|no|maybe, because [a-z ]{10,30}\\.)".into()),
        Spec::Regex("[0-9]{3}-[0-9]{4}".into()),
        Spec::Regex("a*".into()),
        Spec::Choice(vec!["red".into(), "green \"leaf\"".into(), "日本".into()]),
        Spec::Lark(lark.into()),
    ];
    for (seed, spec) in (0..).zip(&specs) {
        keeps_its_promise(spec, None, seed, 60, |_| {});
    }
    keeps_its_promise(&Spec::JsonObject, None, 5, 60, |written| {
        valid(&json!({"type": "object"}), written);
    });
}

fn tools() -> Vec<Tool> {
    vec![
        Tool {
            name: "get_weather".into(),
            parameters: json!({"type": "object", "properties": {"city": {"type": "string"},
                "unit": {"enum": ["celsius", "fahrenheit"]}}, "required": ["city"]}),
        },
        Tool {
            name: "noop".into(),
            parameters: Value::Null,
        },
    ]
}

/// Would catch calls that the family's parser does not read back.
#[test]
fn calls_are_kept_in_every_family_s_form() {
    for format in answer::ToolFormat::ALL {
        for most in [CallCount::One, CallCount::AtLeastOne] {
            let spec = Spec::Calls(Calls {
                form: answer::CallForm::of(format),
                tools: tools(),
                most,
            });
            keeps_its_promise(&spec, None, 7, 30, |written| {
                let syntax = answer::Syntax {
                    tools: Some(format),
                    ..answer::Syntax::default()
                };
                let names: Vec<String> = tools().into_iter().map(|tool| tool.name).collect();
                let mut parser = answer::Parser::new(syntax, &names);
                let mut pieces = parser.push(written);
                pieces.extend(parser.finish());
                let calls = parser.calls();
                assert!(calls >= 1, "{format}: no call in {written:?}: {pieces:?}");
                assert!(most == CallCount::AtLeastOne || calls == 1, "{written:?}");
                let stray = pieces
                    .iter()
                    .find(|p| matches!(p, answer::Piece::Content(_)));
                assert!(stray.is_none(), "{format}: {stray:?} in {written:?}");
            });
        }
    }
}

/// Would catch reasoning that eats the budget, or is not closed.
#[test]
fn reasoning_comes_first_and_is_closed() {
    let schema = json!({"type": "object", "properties": {"a": {"type": "integer"}},
        "required": ["a"], "additionalProperties": false});
    let spec = Spec::JsonSchema(schema.clone());
    for (format, opened) in [
        (answer::ReasoningFormat::Think, false),
        (answer::ReasoningFormat::Think, true),
        (answer::ReasoningFormat::KimiThink, false),
        (answer::ReasoningFormat::Mistral, true),
    ] {
        let reasoning = Reasoning { format, opened };
        keeps_its_promise(&spec, Some(&reasoning), 3, 45, |written| {
            let after = written.rsplit_once(format.close());
            assert!(!opened || after.is_some(), "{written:?}");
            valid(&schema, after.map_or(written, |(_, answer)| answer));
        });
    }
}
