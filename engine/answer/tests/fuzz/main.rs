//! Does any text, cut anywhere, upset the parsers?
//!
//! Random answers are made of each form's own fragments, so that most of them get far into a call
//! before they go wrong. Compared are the pieces of one cut with those of another, and with what a
//! slow twin, which sees the whole text, makes of it.

mod twin;

use answer::{Parser, Piece, ReasoningFormat, Syntax, ToolFormat};

const OFFERED: [&str; 2] = ["now", "search"];

/// What answers are made of.
const FRAGMENTS: [&str; 72] = [
    "{",
    "}",
    "[",
    "]",
    "\"",
    ":",
    ",",
    ";",
    " ",
    "\n",
    "\\",
    "\\\"",
    "\\n",
    "\\u00e9",
    "\\ud83d",
    "\\ude00",
    "0",
    "-1.5e3",
    "true",
    "null",
    "a",
    "é",
    "🦀",
    "now",
    "search",
    "rm",
    "\"name\"",
    "\"arguments\"",
    "\"parameters\"",
    "\"id\"",
    "\"now\"",
    "{}",
    "{\"a\": 1}",
    "{\"a\": {\"b\": [1, \"x\"]}}",
    "\"name\": \"now\"",
    "\"arguments\": {}",
    "\"arguments\": {\"q\": \"x\"}",
    "{\"name\": \"search\", \"arguments\": {\"q\": \"x\"}}",
    "{\"name\": \"now\", \"parameters\": {\"q\": [",
    "\"arguments\": \"{\\\"a\\\": 1}\"",
    "<tool_call>",
    "</tool_call>",
    "<tool_call>\n{\"name\": \"",
    "\", \"arguments\": {\"x\": ",
    "}}\n</tool_call>",
    "<|python_tag|>",
    "[TOOL_CALLS]",
    "[TOOL_CALLS] [{",
    "[ARGS]",
    "[CALL_ID]",
    "[ARGS]{",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "function<｜tool▁sep｜>",
    "<｜tool▁sep｜>",
    "```",
    "json\n",
    "\n```json\n{",
    "\n```<｜tool▁call▁end｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
    "<|tool_calls_section_begin|>",
    "<|tool_call_begin|>",
    "functions.now:0",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    "<|tool_calls_section_end|>",
    "<think>",
    "</think>",
    "[THINK]",
    "[/THINK]",
    "<tool",
];

fn syntax(byte: u8) -> Syntax {
    let tools = ToolFormat::ALL.get(usize::from(byte % 6)).copied();
    let reasoning = match byte / 6 % 4 {
        0 => Some(ReasoningFormat::Think),
        1 => Some(ReasoningFormat::Mistral),
        2 => Some(ReasoningFormat::KimiThink),
        _ => None,
    };
    Syntax {
        tools,
        reasoning,
        opened: byte / 24 % 2 == 1,
    }
}

/// Parses; adjacent pieces of a kind are joined.
fn parse<'a>(syntax: Syntax, pieces: impl IntoIterator<Item = &'a str>) -> Vec<Piece> {
    let mut parser = Parser::new(syntax, &OFFERED.map(String::from));
    let mut all = Vec::new();
    for piece in pieces {
        for new in parser.push(piece) {
            join(&mut all, new);
        }
    }
    for new in parser.finish() {
        join(&mut all, new);
    }
    all
}

/// Appends a piece to its like.
pub(crate) fn join(all: &mut Vec<Piece>, new: Piece) {
    match (all.last_mut(), new) {
        (Some(Piece::Content(last)), Piece::Content(new))
        | (Some(Piece::Reasoning(last)), Piece::Reasoning(new)) => last.push_str(&new),
        (Some(Piece::Arguments { json: last, .. }), Piece::Arguments { json, .. }) => {
            last.push_str(&json);
        }
        (_, new) => all.push(new),
    }
}

/// Whatever a call's arguments are, they begin a JSON object; nothing is empty or out of order.
fn check_pieces(pieces: &[Piece], text: &str) {
    let mut calls = 0;
    for piece in pieces {
        match piece {
            Piece::Content(part) | Piece::Reasoning(part) => assert!(!part.is_empty(), "{text}"),
            Piece::CallStart { index, name, .. } => {
                assert_eq!(*index, calls, "{text}");
                assert!(!name.is_empty(), "{text}");
                calls += 1;
            }
            Piece::Arguments { index, json } => {
                assert_eq!(index + 1, calls, "{text}");
                assert!(json.starts_with('{'), "{json} in {text}");
                assert!(twin::may_go_on(json), "{json} is no JSON in {text}");
            }
        }
    }
}

fn check_cuts(syntax: Syntax, text: &str, cuts: &[u8]) {
    let whole = parse(syntax, [text]);
    check_pieces(&whole, text);
    let single = text.split_inclusive(|_: char| true);
    assert_eq!(
        parse(syntax, single),
        whole,
        "{text} by characters, {syntax:?}"
    );
    let mut rest = text;
    let mut pieces = Vec::new();
    for &cut in cuts {
        let places = (0..=rest.len().min(usize::from(cut))).rev();
        let place = places.into_iter().find(|at| rest.is_char_boundary(*at));
        let (head, tail) = rest.split_at(place.unwrap_or(0));
        pieces.push(head);
        rest = tail;
    }
    pieces.push(rest);
    assert_eq!(
        parse(syntax, pieces.clone()),
        whole,
        "{pieces:?}, {syntax:?}"
    );
}

#[test]
fn fragments_of_calls_give_what_the_twin_sees() {
    bolero::check!()
        .with_type::<(u8, Vec<u8>, Vec<u8>)>()
        .for_each(|(form, fragments, cuts)| {
            let syntax = syntax(*form);
            let parts = fragments.iter().take(40);
            let text: String = parts
                .map(|at| FRAGMENTS[usize::from(*at) % FRAGMENTS.len()])
                .collect();
            check_cuts(syntax, &text, cuts);
            let expected = twin::parse(syntax, &OFFERED, &text);
            assert_eq!(
                parse(syntax, [text.as_str()]),
                expected,
                "{text}\n{syntax:?}"
            );
        });
}

#[test]
fn any_text() {
    bolero::check!()
        .with_type::<(u8, String, Vec<u8>)>()
        .for_each(|(form, text, cuts)| check_cuts(syntax(*form), text, cuts));
}
