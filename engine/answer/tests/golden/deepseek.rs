//! DeepSeek: V3 and R1 fence their arguments, V3.1 does not.

use answer::ToolFormat::DeepSeek;

use crate::check::check;

#[test]
fn fenced() {
    check(
        DeepSeek,
        &[
            (
                "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{\"city\": \"Paris\"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
                &["call get_weather {\"city\": \"Paris\"}"],
            ),
            (
                "Moment.\n\n<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>search\n```json\n{\"q\": \"```\"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
                &[
                    "say: Moment.",
                    "call search {\"q\": \"```\"}",
                    "call now {}",
                ],
            ),
            (
                "<｜tool▁call▁begin｜>function<｜tool▁sep｜>search\n```json\n{\"q\": {\"ü\": \"<｜tool▁call▁end｜> 🦀 \\\"}\"}}\n```<｜tool▁call▁end｜>",
                &["call search {\"q\": {\"ü\": \"<｜tool▁call▁end｜> 🦀 \\\"}\"}}"],
            ),
            (
                "<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```\n{\n  \"a\": 1\n}\n```<｜tool▁call▁end｜>",
                &["call now {\n  \"a\": 1\n}"],
            ),
            (
                "<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n{}<｜tool▁call▁end｜>",
                &["call now {}"],
            ),
            (
                "<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n```<｜tool▁call▁end｜>",
                &["call now {}"],
            ),
            (
                "<｜tool▁call▁begin｜>function<｜tool▁sep｜>now<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
                &["call now {}"],
            ),
            (
                "<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>```py\n1\n```",
                &["call now {}", "say: ```py\n1\n```"],
            ),
            (
                "<｜tool▁call▁begin｜>function<｜tool▁sep｜>search\n```json\n{\"q\": \"cut",
                &["call search {\"q\": \"cut"],
            ),
            (
                "<｜tool▁call▁begin｜>function<｜tool▁sep｜>search\n```json\n{\"q\": [1\n```<｜tool▁call▁end｜>",
                &["call search {\"q\": [1\n]}"],
            ),
            (
                "<｜tool▁call▁begin｜>function<｜tool▁sep｜>search\n```js",
                &["say: <｜tool▁call▁begin｜>function<｜tool▁sep｜>search\n```js"],
            ),
            (
                "<｜tool▁calls▁begin｜>What? <｜tool▁call▁begin｜>function<｜tool▁sep｜>two words\n{}",
                &[
                    "say: <｜tool▁calls▁begin｜>What? <｜tool▁call▁begin｜>function<｜tool▁sep｜>two words\n{}",
                ],
            ),
            (
                "Code:\n```json\n{}\n```\n",
                &["say: Code:\n```json\n{}\n```\n"],
            ),
        ],
    );
}

#[test]
fn bare() {
    check(
        DeepSeek,
        &[
            (
                "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{\"city\": \"Paris\"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
                &["call get_weather {\"city\": \"Paris\"}"],
            ),
            (
                "Sure: <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>search<｜tool▁sep｜>{\"q\": 1}<｜tool▁call▁end｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜> Done",
                &[
                    "say: Sure:",
                    "call search {\"q\": 1}",
                    "call now {}",
                    "say:   Done",
                ],
            ),
            (
                "<｜tool▁call▁begin｜>now<｜tool▁sep｜>\n{\"a\": \"\\n\"}",
                &["call now {\"a\": \"\\n\"}"],
            ),
            (
                "<｜tool▁call▁begin｜>now<｜tool▁sep｜><｜tool▁call▁end｜>",
                &["call now {}"],
            ),
            (
                "<｜tool▁call▁begin｜>größe<｜tool▁sep｜>{\"é\": \"🦀\"}<｜tool▁call▁end｜>",
                &["call größe {\"é\": \"🦀\"}"],
            ),
            (
                "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{\"a\": {\"b\": [",
                &["call now {\"a\": {\"b\": ["],
            ),
            (
                "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{\"a\": {\"b\": [1<｜tool▁call▁end｜>",
                &["call now {\"a\": {\"b\": [1]}}"],
            ),
            (
                "<｜tool▁call▁begin｜><｜tool▁sep｜>{}",
                &["say: <｜tool▁call▁begin｜><｜tool▁sep｜>{}"],
            ),
            (
                "<｜tool▁calls▁begin｜><｜tool▁calls▁end｜>",
                &["say: <｜tool▁calls▁begin｜><｜tool▁calls▁end｜>"],
            ),
            (
                "<｜tool▁call▁begin｜>now",
                &["say: <｜tool▁call▁begin｜>now"],
            ),
            ("<｜tool", &["say: <｜tool"]),
            ("a<｜tool▁sep｜>b", &["say: a<｜tool▁sep｜>b"]),
        ],
    );
}
