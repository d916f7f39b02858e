//! Kimi K2: the name stands in the call's id.

use answer::ToolFormat::Kimi;

use crate::check::check;

#[test]
fn calls() {
    check(
        Kimi,
        &[
            (
                "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{\"city\": \"Paris\"}<|tool_call_end|><|tool_calls_section_end|>",
                &["call get_weather#functions.get_weather:0 {\"city\": \"Paris\"}"],
            ),
            (
                "I look. <|tool_calls_section_begin|>\n<|tool_call_begin|>\nfunctions.search:3 <|tool_call_argument_begin|>\n{\"q\": \"a\"}\n<|tool_call_end|>\n<|tool_call_begin|>functions.now:4<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
                &[
                    "say: I look.",
                    "call search#functions.search:3 {\"q\": \"a\"}",
                    "call now#functions.now:4 {}",
                ],
            ),
            (
                "<|tool_call_begin|>functions.mcp.files:read:12<|tool_call_argument_begin|>{}<|tool_call_end|>",
                &["call mcp.files:read#functions.mcp.files:read:12 {}"],
            ),
            (
                "<|tool_call_begin|>now<|tool_call_argument_begin|>{}<|tool_call_end|>",
                &["call now#now {}"],
            ),
            (
                "<|tool_call_begin|>functions.now:0<|tool_call_argument_begin|><|tool_call_end|>",
                &["call now#functions.now:0 {}"],
            ),
            (
                "<|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>{\"s\": \"<|tool_call_end|> é🦀 \\\\\"}<|tool_call_end|>",
                &["call now#functions.now:0 {\"s\": \"<|tool_call_end|> é🦀 \\\\\"}"],
            ),
            (
                "<|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>\"{\\\"a\\\": 1}\"<|tool_call_end|>",
                &["call now#functions.now:0 {\"a\": 1}"],
            ),
            (
                "<|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>{\"a\": [{\"b\": {}}<|tool_call_end|><|tool_calls_section_end|>",
                &["call now#functions.now:0 {\"a\": [{\"b\": {}}]}"],
            ),
            (
                "<|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>{\"a\": \"cut",
                &["call now#functions.now:0 {\"a\": \"cut"],
            ),
            (
                "<|tool_calls_section_begin|><|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>\nSo.",
                &["call now#functions.now:0 {}", "say: So."],
            ),
        ],
    );
}

#[test]
fn what_is_no_call() {
    check(
        Kimi,
        &[
            (
                "<|tool_calls_section_begin|> hm",
                &["say: <|tool_calls_section_begin|> hm"],
            ),
            (
                "<|tool_call_begin|>functions.now:0",
                &["say: <|tool_call_begin|>functions.now:0"],
            ),
            (
                "<|tool_call_begin|>functions.:0<|tool_call_argument_begin|>{}",
                &["say: <|tool_call_begin|>functions.:0<|tool_call_argument_begin|>{}"],
            ),
            (
                "<|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>[1]<|tool_call_end|>",
                &[
                    "say: <|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>[1]<|tool_call_end|>",
                ],
            ),
            ("a<|tool_call_end|> b <|", &["say: a<|tool_call_end|> b <|"]),
            (
                "<|tool_call_begin|>x<|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}",
                &["say: <|tool_call_begin|>x", "call now#functions.now:1 {}"],
            ),
        ],
    );
}
