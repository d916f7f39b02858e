//! Hermes and Qwen: `<tool_call>` around an object.

use answer::ToolFormat::Hermes;

use crate::check::check;

#[test]
fn calls_and_the_text_around_them() {
    check(
        Hermes,
        &[
            ("", &[]),
            ("Hello, world!\n", &["say: Hello, world!\n"]),
            (
                "<tool_call>\n{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Paris\"}}\n</tool_call>",
                &["call get_weather {\"city\": \"Paris\"}"],
            ),
            (
                "Let me look.\n<tool_call>\n{\"name\": \"search\", \"arguments\": {\"q\": \"x\"}}\n</tool_call>\n",
                &["say: Let me look.", "call search {\"q\": \"x\"}"],
            ),
            (
                "\n\n<tool_call>\n{\"name\": \"search\", \"arguments\": {}}\n</tool_call>\n<tool_call>\n{\"name\": \"now\", \"arguments\": {}}\n</tool_call>",
                &["call search {}", "call now {}"],
            ),
            (
                "One.\n<tool_call>{\"name\":\"now\",\"arguments\":{}}</tool_call>\nTwo.",
                &["say: One.", "call now {}", "say: \n\nTwo."],
            ),
            (
                "<tool_call>{\"name\":\"now\",\"arguments\":{}}</tool_call>\n\nDone.",
                &["call now {}", "say: Done."],
            ),
            (
                "<tool_call>\n{\"arguments\": {\"a\": [1, 2]}, \"name\": \"search\"}\n</tool_call>",
                &["call search {\"a\": [1, 2]}"],
            ),
            (
                "<tool_call>{\"name\": \"search\", \"arguments\": {\"deep\": {\"er\": [{\"x\": {}}, [], null, true, -1.5e+3]}}}</tool_call>",
                &["call search {\"deep\": {\"er\": [{\"x\": {}}, [], null, true, -1.5e+3]}}"],
            ),
            (
                "<tool_call>{\"name\": \"search\", \"arguments\": {\"s\": \"a } b { \\\" \\\\ </tool_call> <tool_call> \\u00e9\"}}</tool_call>",
                &["call search {\"s\": \"a } b { \\\" \\\\ </tool_call> <tool_call> \\u00e9\"}"],
            ),
            (
                "<tool_call>{\"name\": \"search\", \"arguments\": {\"stadt\": \"Zürich 🦀 你好\"}}</tool_call>",
                &["call search {\"stadt\": \"Zürich 🦀 你好\"}"],
            ),
            (
                "Grüße 🦀<tool_call>{\"name\": \"größe\", \"arguments\": {}}</tool_call>",
                &["say: Grüße 🦀", "call größe {}"],
            ),
        ],
    );
}

#[test]
fn what_models_write_instead() {
    check(
        Hermes,
        &[
            // Arguments as a string, absent, null, empty.
            (
                "<tool_call>{\"name\": \"search\", \"arguments\": \"{\\\"q\\\": \\\"a\\\\nb\\\", \\\"e\\\": \\\"\\u00e9\\ud83e\\udd80\\\"}\"}</tool_call>",
                &["call search {\"q\": \"a\\nb\", \"e\": \"é🦀\"}"],
            ),
            (
                "<tool_call>{\"name\": \"now\"}</tool_call>",
                &["call now {}"],
            ),
            (
                "<tool_call>{\"name\": \"now\", \"arguments\": null}</tool_call>",
                &["call now {}"],
            ),
            (
                "<tool_call>{\"name\": \"now\", \"arguments\": \"\"}</tool_call>",
                &["call now {}"],
            ),
            // A line break in a string, which JSON forbids.
            (
                "<tool_call>{\"name\": \"search\", \"arguments\": {\"code\": \"a\n\tb\u{1}\"}}</tool_call>",
                &["call search {\"code\": \"a\\n\\tb\\u0001\"}"],
            ),
            // Other keys, and keys twice: the first counts.
            (
                "<tool_call>{\"id\": 7, \"type\": \"function\", \"name\": \"now\", \"x\": [1, {}], \"arguments\": {\"a\": 1}, \"arguments\": {\"a\": 2}, \"name\": \"search\"}</tool_call>",
                &["call now {\"a\": 1}"],
            ),
            (
                "<tool_call>{\"name\": \"now\", \"parameters\": {\"a\": 1}}</tool_call>",
                &["call now {\"a\": 1}"],
            ),
            // A tool that nobody offered.
            (
                "<tool_call>{\"name\": \"rm\", \"arguments\": {}}</tool_call>",
                &["call rm {}"],
            ),
            // Without the end marker, without brackets at the end, with one too many.
            (
                "<tool_call>{\"name\": \"now\", \"arguments\": {}}",
                &["call now {}"],
            ),
            (
                "<tool_call>{\"name\": \"now\", \"arguments\": {\"a\": 1}</tool_call>",
                &["call now {\"a\": 1}"],
            ),
            (
                "<tool_call>{\"name\": \"now\", \"arguments\": {\"a\": [1</tool_call>!",
                &["call now {\"a\": [1]}", "say: !"],
            ),
            (
                "<tool_call>{\"name\": \"now\", \"arguments\": {}}}</tool_call>",
                &["call now {}", "say: }</tool_call>"],
            ),
            (
                "<tool_call>{\"name\": \"now\", \"arguments\": {}}<tool_call>{\"name\": \"now\", \"arguments\": {}}",
                &["call now {}", "call now {}"],
            ),
        ],
    );
}

#[test]
fn what_is_no_call() {
    check(
        Hermes,
        &[
            (
                "a < b and <tool> <tool_ca",
                &["say: a < b and <tool> <tool_ca"],
            ),
            ("<tool_call>", &["say: <tool_call>"]),
            (
                "<tool_call>now()</tool_call> ",
                &["say: <tool_call>now()</tool_call> "],
            ),
            (
                "<tool_call>{\"name\": \"now\", \"arg",
                &["say: <tool_call>{\"name\": \"now\", \"arg"],
            ),
            (
                "<tool_call>{\"name\": \"now\", \"arguments\": [1]}</tool_call>",
                &["say: <tool_call>{\"name\": \"now\", \"arguments\": [1]}</tool_call>"],
            ),
            (
                "<tool_call>{\"name\": \"now\", \"arguments\": \"text\"}</tool_call>",
                &["say: <tool_call>{\"name\": \"now\", \"arguments\": \"text\"}</tool_call>"],
            ),
            (
                "<tool_call>{\"name\": \"\", \"arguments\": {}}",
                &["say: <tool_call>{\"name\": \"\", \"arguments\": {}}"],
            ),
            (
                "<tool_call>{\"arguments\": {}}",
                &["say: <tool_call>{\"arguments\": {}}"],
            ),
            (
                "<tool_call>{\"name\": 5, \"arguments\": {}}",
                &["say: <tool_call>{\"name\": 5, \"arguments\": {}}"],
            ),
            (
                "<tool_call>{'name': 'now'}",
                &["say: <tool_call>{'name': 'now'}"],
            ),
            // A broken call, and then a good one.
            (
                "<tool_call>{\"name\": oops <tool_call>{\"name\": \"now\", \"arguments\": {}}</tool_call>",
                &["say: <tool_call>{\"name\": oops", "call now {}"],
            ),
            (
                "Use </tool_call> to close.",
                &["say: Use </tool_call> to close."],
            ),
        ],
    );
}

#[test]
fn a_call_that_breaks_or_is_cut_keeps_its_valid_beginning() {
    check(
        Hermes,
        &[
            (
                "<tool_call>\n{\"name\": \"search\", \"arguments\": {\"q\": \"half a sen",
                &["call search {\"q\": \"half a sen"],
            ),
            (
                "<tool_call>{\"name\": \"search\", \"arguments\": {\"q\": True}}</tool_call>",
                &["call search {\"q\": ", "say: True}}</tool_call>"],
            ),
            (
                "<tool_call>{\"name\": \"search\", \"arguments\": {\"q\": \"\\d\"}}</tool_call>",
                &["call search {\"q\": \"\\", "say: d\"}}</tool_call>"],
            ),
            (
                "<tool_call>{\"name\": \"search\", \"arguments\": {\"q\": \"a\"} oops",
                &["call search {\"q\": \"a\"}", "say: oops"],
            ),
        ],
    );
}
