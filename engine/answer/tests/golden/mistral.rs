//! Mistral: an array behind a marker, or a name and its arguments.

use answer::ToolFormat::Mistral;

use crate::check::check;

#[test]
fn arrays() {
    check(
        Mistral,
        &[
            (
                "[TOOL_CALLS] [{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Paris\"}}]",
                &["call get_weather {\"city\": \"Paris\"}"],
            ),
            (
                "[TOOL_CALLS][{\"name\": \"search\", \"arguments\": {\"q\": \"[x], ]\"}, \"id\": \"abcdefghi\"}, {\"name\": \"now\", \"arguments\": {}, \"id\": \"123456789\"}]",
                &["call search {\"q\": \"[x], ]\"}", "call now {}"],
            ),
            (
                "Moment.[TOOL_CALLS] [ {\"arguments\": {\"a\": 1}, \"name\": \"now\"} ] ",
                &["say: Moment.", "call now {\"a\": 1}"],
            ),
            (
                "[TOOL_CALLS]{\"name\": \"now\", \"arguments\": {}}",
                &["call now {}"],
            ),
            ("[TOOL_CALLS][{\"name\": \"now\"}]", &["call now {}"]),
            (
                "[TOOL_CALLS][{\"name\": \"now\", \"arguments\": \"{\\\"a\\\": []}\"}]\nOk.",
                &["call now {\"a\": []}", "say: Ok."],
            ),
            (
                "[TOOL_CALLS][{\"name\": \"now\", \"arguments\": {\"s\": \"é [TOOL_CALLS] 🦀\"}}]",
                &["call now {\"s\": \"é [TOOL_CALLS] 🦀\"}"],
            ),
            (
                "[TOOL_CALLS][{\"name\": \"now\", \"arguments\": {}}",
                &["call now {}"],
            ),
            (
                "[TOOL_CALLS][{\"name\": \"now\", \"arguments\": {}}, oops]",
                &["call now {}", "say: , oops]"],
            ),
            (
                "[TOOL_CALLS][{\"name\": \"search\", \"arguments\": {\"q\": \"cut",
                &["call search {\"q\": \"cut"],
            ),
            ("[TOOL_CALLS][]", &["say: [TOOL_CALLS][]"]),
            ("[TOOL_CALLS][{\"name\"", &["say: [TOOL_CALLS][{\"name\""]),
        ],
    );
}

#[test]
fn names_and_arguments() {
    check(
        Mistral,
        &[
            (
                "[TOOL_CALLS]get_weather[ARGS]{\"city\": \"Paris\"}",
                &["call get_weather {\"city\": \"Paris\"}"],
            ),
            (
                "[TOOL_CALLS]search[ARGS]{\"q\": 1}[TOOL_CALLS]now[ARGS]{}",
                &["call search {\"q\": 1}", "call now {}"],
            ),
            (
                "[TOOL_CALLS]search[CALL_ID]abc123def[ARGS]{\"q\": 1}",
                &["call search#abc123def {\"q\": 1}"],
            ),
            (
                "Moment.\n[TOOL_CALLS]now{\"a\": {\"b\": \"[ARGS]}\"}} ",
                &["say: Moment.", "call now {\"a\": {\"b\": \"[ARGS]}\"}}"],
            ),
            ("[TOOL_CALLS] now [ARGS] {}", &["call now {}"]),
            (
                "[TOOL_CALLS]größe[ARGS]{\"ü\": \"\\u00fc🦀\"}",
                &["call größe {\"ü\": \"\\u00fc🦀\"}"],
            ),
            (
                "[TOOL_CALLS]now[ARGS]{}\n\nAnd so on",
                &["call now {}", "say: And so on"],
            ),
            (
                "[TOOL_CALLS]now[ARGS]{\"a\": \"cut",
                &["call now {\"a\": \"cut"],
            ),
            (
                "[TOOL_CALLS]now[ARGS]{\"a\": nope}",
                &["call now {\"a\": n", "say: ope}"],
            ),
            ("[TOOL_CALLS]now[ARGS]", &["say: [TOOL_CALLS]now[ARGS]"]),
            (
                "[TOOL_CALLS]now[ARGS]text",
                &["say: [TOOL_CALLS]now[ARGS]text"],
            ),
            (
                "[TOOL_CALLS]I think {\"a\": 1}",
                &["say: [TOOL_CALLS]I think {\"a\": 1}"],
            ),
            ("[TOOL_CALLS][ARGS]{}", &["say: [TOOL_CALLS][ARGS]{}"]),
            (
                "See [ARGS] and [1] and [TOOL",
                &["say: See [ARGS] and [1] and [TOOL"],
            ),
        ],
    );
}
