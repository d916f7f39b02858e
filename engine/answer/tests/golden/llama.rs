//! Llama 3: the answer is the call, or it is not.

use answer::ToolFormat::Llama3;

use crate::check::check;

#[test]
fn calls() {
    check(
        Llama3,
        &[
            (
                "{\"name\": \"get_weather\", \"parameters\": {\"city\": \"Paris\"}}",
                &["call get_weather {\"city\": \"Paris\"}"],
            ),
            (
                "<|python_tag|>{\"name\": \"search\", \"parameters\": {\"q\": \"x\"}}",
                &["call search {\"q\": \"x\"}"],
            ),
            (
                "{\"name\": \"search\", \"parameters\": {}}; {\"name\": \"now\", \"parameters\": {}}",
                &["call search {}", "call now {}"],
            ),
            (
                "<|python_tag|>{\"name\": \"search\", \"parameters\": {}};<|python_tag|>{\"name\": \"now\", \"parameters\": {\"a\": 1}}",
                &["call search {}", "call now {\"a\": 1}"],
            ),
            (
                " \n{\"type\": \"function\", \"name\": \"now\", \"parameters\": {}}\n",
                &["call now {}"],
            ),
            (
                "{\"name\": \"now\", \"arguments\": {\"a\": {\"b\": \"}\"}}}",
                &["call now {\"a\": {\"b\": \"}\"}}"],
            ),
            (
                "{\"parameters\": {\"ü\": \"🦀\"}, \"name\": \"search\"}",
                &["call search {\"ü\": \"🦀\"}"],
            ),
            (
                "{\"name\": \"now\", \"parameters\": \"{\\\"a\\\": 1}\"}",
                &["call now {\"a\": 1}"],
            ),
            ("{\"name\": \"now\"}", &["call now {}"]),
            (
                "{\"name\": \"now\", \"parameters\": {}} That is it.",
                &["call now {}", "say: That is it."],
            ),
            (
                "{\"name\": \"search\", \"parameters\": {\"q\": \"\\\"; {\\\"\"}}",
                &["call search {\"q\": \"\\\"; {\\\"\"}"],
            ),
            (
                "{\"name\": \"search\", \"parameters\": {\"q\": \"cu",
                &["call search {\"q\": \"cu"],
            ),
            (
                "{\"name\": \"now\", \"parameters\": {}}; {\"name\": \"now\", \"param",
                &["call now {}", "say: ; {\"name\": \"now\", \"param"],
            ),
        ],
    );
}

#[test]
fn what_is_no_call() {
    check(
        Llama3,
        &[
            ("", &[]),
            (" Hello\n", &["say:  Hello\n"]),
            ("{\"answer\": 42}", &["say: {\"answer\": 42}"]),
            (
                "{\"name\": \"Alice\", \"age\": 5}",
                &["say: {\"name\": \"Alice\", \"age\": 5}"],
            ),
            // Without a marker, only an offered name makes a call.
            (
                "{\"name\": \"rm\", \"parameters\": {}} ",
                &["say: {\"name\": \"rm\", \"parameters\": {}} "],
            ),
            (
                "Call {\"name\": \"now\", \"parameters\": {}}",
                &["say: Call {\"name\": \"now\", \"parameters\": {}}"],
            ),
            ("<|python_tag|>print(1)", &["say: <|python_tag|>print(1)"]),
            (
                "[{\"name\": \"now\", \"parameters\": {}}]",
                &["say: [{\"name\": \"now\", \"parameters\": {}}]"],
            ),
            (
                "{\"name\": \"now\", \"parameters\": 7}",
                &["say: {\"name\": \"now\", \"parameters\": 7}"],
            ),
            (
                "{\"name\": \"now\", \"parameters\": {}}; and more",
                &["call now {}", "say: ; and more"],
            ),
            (
                "{\"name\": \"now\", \"parameters\"",
                &["say: {\"name\": \"now\", \"parameters\""],
            ),
            (
                "I call <|python_tag|>{\"name\": \"now\", \"parameters\": {}}",
                &["say: I call", "call now {}"],
            ),
        ],
    );
}
