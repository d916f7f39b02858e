//! Reasoning in front of the answer.

use answer::{ReasoningFormat, Syntax, ToolFormat};

use crate::check::check_syntax;

fn syntax(reasoning: ReasoningFormat, tools: Option<ToolFormat>, opened: bool) -> Syntax {
    Syntax {
        tools,
        reasoning: Some(reasoning),
        opened,
    }
}

#[test]
fn a_block_at_the_beginning() {
    let think = syntax(ReasoningFormat::Think, None, false);
    check_syntax(
        think,
        &[
            ("", &[]),
            ("Plain.\n", &["say: Plain.\n"]),
            (" \n", &["say:  \n"]),
            (
                "<think>\nWhy?\n\nSo.\n</think>\n\nBecause.\n",
                &["think: Why?\n\nSo.", "say: Because.\n"],
            ),
            ("\n<think>a</think>b", &["think: a", "say: b"]),
            ("<think>\n\n</think>\n\nNo thought.", &["say: No thought."]),
            ("<think>cut of", &["think: cut of"]),
            (
                "<think>a</think>b <think>c</think>",
                &["think: a", "say: b <think>c</think>"],
            ),
            ("b</think>", &["say: b</think>"]),
            (
                "Text first <think>a</think>",
                &["say: Text first <think>a</think>"],
            ),
            (
                "<think>é🦀 a < b </thin</think>  x",
                &["think: é🦀 a < b </thin", "say:   x"],
            ),
            ("<thin", &["say: <thin"]),
        ],
    );
    let opened = syntax(ReasoningFormat::Think, None, true);
    check_syntax(
        opened,
        &[
            ("Why?\n</think>\nSo.", &["think: Why?", "say: So."]),
            ("<think>\nWhy?</think>So.", &["think: Why?", "say: So."]),
            ("cut", &["think: cut"]),
            ("</think>", &[]),
        ],
    );
}

#[test]
fn calls_follow_reasoning() {
    let hermes = Some(ToolFormat::Hermes);
    let kimi = Some(ToolFormat::Kimi);
    let mistral = Some(ToolFormat::Mistral);
    check_syntax(
        syntax(ReasoningFormat::Think, hermes, false),
        &[
            (
                "<think>\nI could <tool_call>{\"name\": \"now\"}</tool_call>.\n</think>\n\n<tool_call>\n{\"name\": \"now\", \"arguments\": {\"s\": \"</think>\"}}\n</tool_call>",
                &[
                    "think: I could <tool_call>{\"name\": \"now\"}</tool_call>.",
                    "call now {\"s\": \"</think>\"}",
                ],
            ),
            (
                "\n <tool_call>{\"name\": \"now\"}</tool_call>",
                &["call now {}"],
            ),
        ],
    );
    check_syntax(
        syntax(ReasoningFormat::KimiThink, kimi, false),
        &[(
            "◁think▷Hm.◁/think▷So.<|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>{}<|tool_call_end|>",
            &["think: Hm.", "say: So.", "call now#functions.now:0 {}"],
        )],
    );
    check_syntax(
        syntax(ReasoningFormat::Think, kimi, true),
        &[
            // Without an end of the thought.
            (
                "Hm.\n<|tool_calls_section_begin|><|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
                &["think: Hm.", "call now#functions.now:0 {}"],
            ),
        ],
    );
    check_syntax(
        syntax(ReasoningFormat::Mistral, mistral, false),
        &[
            (
                "[THINK]Hm.[/THINK]So.[TOOL_CALLS]now[ARGS]{}",
                &["think: Hm.", "say: So.", "call now {}"],
            ),
            ("[T", &["say: [T"]),
        ],
    );
    check_syntax(
        syntax(ReasoningFormat::Think, Some(ToolFormat::Llama3), true),
        &[(
            "Hm.</think>\n\n{\"name\": \"now\", \"parameters\": {}}",
            &["think: Hm.", "call now {}"],
        )],
    );
}
