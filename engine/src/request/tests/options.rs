//! Catches an option of tools, forms, choices, tickets or vectors that is taken wrongly, or refused
//! under another name.

use serde_json::{Value, json};

use super::super::*;
use super::{chat, check, rules, with};

#[expect(clippy::too_many_lines, reason = "a table of one row each")]
#[test]
fn refusals_of_sampling() {
    let many: serde_json::Map<_, _> = (0..2000).map(|i| (i.to_string(), json!(1))).collect();
    check(&[
        (json!({"n": 0}), "invalid_value", "n"),
        (json!({"n": 129}), "invalid_value", "n"),
        (json!({"n": 1.5}), "invalid_type", "n"),
        (json!({"min_p": 1.5}), "invalid_value", "min_p"),
        (json!({"min_p": -0.1}), "invalid_value", "min_p"),
        (
            json!({"presence_penalty": 2.5}),
            "invalid_value",
            "presence_penalty",
        ),
        (
            json!({"presence_penalty": "a"}),
            "invalid_type",
            "presence_penalty",
        ),
        (
            json!({"frequency_penalty": -2.5}),
            "invalid_value",
            "frequency_penalty",
        ),
        (
            json!({"repetition_penalty": 0}),
            "invalid_value",
            "repetition_penalty",
        ),
        (
            json!({"repetition_penalty": 1e30}),
            "invalid_value",
            "repetition_penalty",
        ),
        (json!({"logit_bias": [1]}), "invalid_type", "logit_bias"),
        (
            json!({"logit_bias": {"100": 1}}),
            "invalid_value",
            "logit_bias.100",
        ),
        (
            json!({"logit_bias": {"-1": 1}}),
            "invalid_value",
            "logit_bias.-1",
        ),
        (
            json!({"logit_bias": {"word": 1}}),
            "invalid_value",
            "logit_bias.word",
        ),
        (
            json!({"logit_bias": {"5": 100.5}}),
            "invalid_value",
            "logit_bias.5",
        ),
        (
            json!({"logit_bias": {"5": -1000}}),
            "invalid_value",
            "logit_bias.5",
        ),
        (
            json!({"logit_bias": {"5": "much"}}),
            "invalid_type",
            "logit_bias.5",
        ),
        (json!({"logit_bias": many}), "invalid_value", "logit_bias"),
        (json!({"logprobs": 1}), "invalid_type", "logprobs"),
        (json!({"top_logprobs": 1}), "invalid_value", "top_logprobs"),
        (
            json!({"logprobs": true, "top_logprobs": 21}),
            "invalid_value",
            "top_logprobs",
        ),
        (
            json!({"logprobs": true, "top_logprobs": -1}),
            "invalid_value",
            "top_logprobs",
        ),
        (json!({"min_tokens": -1}), "invalid_value", "min_tokens"),
        (
            json!({"min_tokens": 9, "max_tokens": 8}),
            "invalid_value",
            "min_tokens",
        ),
        (json!({"echo": true}), "invalid_value", "echo"),
        (
            json!({"priority": 1_u64 << 40}),
            "invalid_value",
            "priority",
        ),
        (json!({"priority": "high"}), "invalid_type", "priority"),
        (json!({"timeout": 0}), "invalid_value", "timeout"),
        (json!({"timeout": 1e9}), "invalid_value", "timeout"),
        (json!({"seed": 1e20}), "invalid_type", "seed"),
        (json!({"best_of": 2}), "unsupported_parameter", "best_of"),
        (
            json!({"kv_transfer_params": {}}),
            "node_token_required",
            "kv_transfer_params",
        ),
    ]);
}

fn tool(name: &str) -> Value {
    json!({"type": "function", "function": {"name": name, "parameters": {"type": "object"}}})
}

#[expect(clippy::too_many_lines, reason = "a table of one row each")]
#[test]
fn refusals_of_tools_and_forms() {
    let named = |name: &str| json!({"type": "function", "function": {"name": name}});
    let schema = |schema: Value| json!({"type": "json_schema", "json_schema": {"schema": schema}});
    let format = "response_format";
    check(&[
        (json!({"tools": [5]}), "invalid_type", "tools[0]"),
        (
            json!({"tools": [{"type": "custom"}]}),
            "unsupported_parameter",
            "tools[0].type",
        ),
        (
            json!({"tools": [{}]}),
            "missing_required_parameter",
            "tools[0].function",
        ),
        (
            json!({"tools": [{"function": 1}]}),
            "invalid_type",
            "tools[0].function",
        ),
        (
            json!({"tools": [tool("a"), {"function": {}}]}),
            "missing_required_parameter",
            "tools[1].function.name",
        ),
        (
            json!({"tools": [tool("a b")]}),
            "invalid_value",
            "tools[0].function.name",
        ),
        (
            json!({"tools": [{"function": {"name": "a", "parameters": "x"}}]}),
            "invalid_type",
            "tools[0].function.parameters",
        ),
        (
            json!({"tool_choice": "required"}),
            "invalid_value",
            "tool_choice",
        ),
        (
            json!({"tool_choice": named("a")}),
            "invalid_value",
            "tool_choice",
        ),
        (
            json!({"tool_choice": "any"}),
            "invalid_value",
            "tool_choice",
        ),
        (json!({"tool_choice": 5}), "invalid_type", "tool_choice"),
        (
            json!({"tool_choice": {"type": "x"}}),
            "invalid_value",
            "tool_choice.type",
        ),
        (
            json!({"tools": [tool("a")], "tool_choice": named("b")}),
            "invalid_value",
            "tool_choice.function.name",
        ),
        (
            json!({"parallel_tool_calls": 1}),
            "invalid_type",
            "parallel_tool_calls",
        ),
        (json!({format: "json"}), "invalid_type", "response_format"),
        (
            json!({format: {}}),
            "missing_required_parameter",
            "response_format.type",
        ),
        (
            json!({format: {"type": "xml"}}),
            "invalid_value",
            "response_format.type",
        ),
        (
            json!({format: {"type": "json_schema"}}),
            "missing_required_parameter",
            "response_format.json_schema",
        ),
        (
            json!({format: {"type": "json_schema", "json_schema": {"name": "x"}}}),
            "missing_required_parameter",
            "response_format.json_schema.schema",
        ),
        (
            json!({format: schema(json!(5))}),
            "invalid_type",
            "response_format.json_schema.schema",
        ),
        (json!({"guided_json": "{"}), "invalid_value", "guided_json"),
        (json!({"guided_regex": 5}), "invalid_type", "guided_regex"),
        (
            json!({"guided_choice": []}),
            "invalid_type",
            "guided_choice",
        ),
        (
            json!({"guided_choice": ["a", 1]}),
            "invalid_type",
            "guided_choice[1]",
        ),
        (
            json!({"structured_outputs": {}}),
            "invalid_value",
            "structured_outputs",
        ),
        (
            json!({"structured_outputs": {"regex": "a", "choice": ["b"]}}),
            "invalid_value",
            "structured_outputs",
        ),
        (
            json!({"guided_regex": "a", format: {"type": "json_object"}}),
            "invalid_value",
            "guided_regex",
        ),
        (
            json!({"guided_regex": "a", "min_tokens": 3}),
            "invalid_value",
            "min_tokens",
        ),
    ]);
}

#[test]
fn choices_tools_and_forms_are_taken() {
    let fields = json!({
        "n": 3, "logprobs": true, "top_logprobs": 20, "logit_bias": {"5": -100, "99": 2.5},
        "presence_penalty": -2, "frequency_penalty": 2, "repetition_penalty": 1.1, "min_p": 0.1,
        "min_tokens": 2, "priority": -7, "timeout": 1.5, "return_token_ids": true,
        "tools": [tool("a"), {"function": {"name": "b"}}], "tool_choice": "auto",
        "parallel_tool_calls": false,
    });
    let request = chat(&fields).expect("valid");
    assert_eq!((request.choices, request.logprobs), (3, Some(20)));
    assert_eq!(request.sampling.logit_bias, [(5, -100.0), (99, 2.5)]);
    assert_eq!((request.output_min, request.priority), (2, -7));
    assert_eq!(
        request.timeout,
        Some(std::time::Duration::from_millis(1500))
    );
    assert!(request.token_ids && request.tools.are_parsed() && !request.is_constrained());
    assert_eq!(request.tools.parallel, Parallel::One);
    let none = json!({"type": "object", "properties": {}, "additionalProperties": false});
    assert_eq!(request.tools.offered[1].parameters, none);

    let named = json!({"tools": [tool("a"), tool("b")],
        "tool_choice": {"type": "function", "function": {"name": "b"}}});
    let request = chat(&named).expect("valid");
    assert_eq!(request.tools.choice, ToolChoice::Named(1));
    assert!(request.is_constrained());
    for fields in [
        json!({"response_format": {"type": "json_object"}}),
        json!({"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}}),
        json!({"structured_outputs": {"json": {}}}),
        json!({"guided_json": "{}"}),
        json!({"guided_choice": ["a"]}),
        json!({"guided_grammar": "start: \"a\""}),
    ] {
        assert!(chat(&fields).expect("valid").is_constrained(), "{fields}");
    }
}

#[test]
fn only_a_token_holder_prefills_for_others() {
    let body = |params: Value, more: Value| {
        let mut fields = json!({"kv_transfer_params": params});
        fields
            .as_object_mut()
            .expect("an object")
            .extend(more.as_object().expect("an object").clone());
        parse(&with(&fields), Dialect::Chat, &rules(Caller::TokenHolder))
    };
    let prefill = json!({"do_remote_decode": true, "do_remote_prefill": false,
        "remote_engine_id": null, "remote_block_ids": null});
    let request = body(prefill.clone(), json!({})).expect("valid");
    assert_eq!(request.task, Task::Prefill);
    let request = body(json!({}), json!({"stream": true})).expect("valid");
    assert_eq!(request.task, Task::Answer);
    let id = "0123456789abcdef0123456789abcdef";
    let both = json!({"transfer_id": id, "remote_engine_id": "e", "remote_endpoints": ["unix:/s"]});
    let half = |name: &str| {
        let mut params = both.clone();
        params[name] = json!(true);
        // What is asked of the answer is not asked of its first half.
        let more = json!({"n": 3, "max_tokens": 1, "min_tokens": 2});
        let more = if name == "do_remote_decode" {
            more
        } else {
            json!({})
        };
        body(params, more).expect("valid").task
    };
    let Task::HandOver(to) = half("do_remote_decode") else {
        panic!("the first half");
    };
    assert_eq!((to.id.to_string().as_str(), &*to.receiver), (id, "e"));
    let Task::TakeOver(from) = half("do_remote_prefill") else {
        panic!("the second half");
    };
    assert_eq!(
        (from.id, &*from.sender, from.endpoints.len()),
        (Some(to.id), "e", 1)
    );
    let rows = [
        (prefill.clone(), json!({"stream": true}), "stream"),
        (prefill, json!({"n": 2}), "n"),
        (
            json!({"do_remote_prefill": true}),
            json!({}),
            "kv_transfer_params.transfer_id",
        ),
        (
            json!({"do_remote_decode": 1}),
            json!({}),
            "kv_transfer_params.do_remote_decode",
        ),
    ];
    for (params, more, param) in rows {
        let error = body(params, more).expect_err("refused");
        assert_eq!(error.param.as_deref(), Some(param));
    }
}

#[test]
fn embedding_inputs() {
    let read = |input: Value| {
        let body = json!({"model": "m", "input": input}).to_string();
        embedding(body.as_bytes(), &rules(Caller::Anonymous))
    };
    assert_eq!(read(json!("a")).expect("valid").inputs.len(), 1);
    assert_eq!(read(json!(["a", "b"])).expect("valid").inputs.len(), 2);
    let rows = [
        (json!(""), "invalid_value", "input"),
        (json!([]), "invalid_value", "input"),
        (json!(["a", ""]), "invalid_value", "input[1]"),
        (json!([1, 2]), "node_token_required", "input"),
        (json!([[1, 2]]), "node_token_required", "input[0]"),
        (json!(["a", 5]), "invalid_type", "input[1]"),
        (json!(5), "invalid_type", "input"),
        (json!(null), "missing_required_parameter", "input"),
        (json!(vec!["a"; INPUTS_MAX + 1]), "invalid_value", "input"),
    ];
    for (input, code, param) in rows {
        let error = read(input).expect_err("refused");
        assert_eq!((error.code, error.param.as_deref()), (code, Some(param)));
    }
}
