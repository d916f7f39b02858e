//! The slow twin: it sees the whole answer, goes over it as often as it likes, and asks serde_json
//! about every beginning of every JSON text.

mod calls;
mod json;
mod object;

use answer::{Piece, ReasoningFormat, Syntax, ToolFormat};

use crate::join;
use calls::Twin;
pub(crate) use json::may_go_on;

/// What an answer consists of.
pub(crate) fn parse(syntax: Syntax, offered: &[&str], text: &str) -> Vec<Piece> {
    let (thought, answer) = match syntax.reasoning {
        Some(format) => split(format, syntax.tools, syntax.opened, text),
        None => ("", text),
    };
    let mut all = Vec::new();
    if !thought.is_empty() {
        all.push(Piece::Reasoning(thought.into()));
    }
    match syntax.tools {
        Some(format) => {
            let mut twin = Twin {
                format,
                offered,
                text: answer,
                found: Vec::new(),
                closing: 0,
            };
            twin.run();
            finish(twin.found, &mut all);
        }
        None if answer.is_empty() => {}
        None => all.push(Piece::Content(answer.into())),
    }
    all
}

/// The reasoning and the rest.
fn split(
    format: ReasoningFormat,
    tools: Option<ToolFormat>,
    opened: bool,
    text: &str,
) -> (&str, &str) {
    let breaks = ['\r', '\n'];
    let mut body = text;
    if !opened {
        match text.trim_start().strip_prefix(format.open()) {
            Some(rest) => body = rest,
            None => return ("", text),
        }
    }
    body = body.trim_start_matches(breaks);
    while let Some(rest) = body.strip_prefix(format.open()) {
        body = rest.trim_start_matches(breaks);
    }
    let section = match tools {
        Some(ToolFormat::Kimi) => Some("<|tool_calls_section_begin|>"),
        Some(ToolFormat::DeepSeek) => Some("<｜tool▁calls▁begin｜>"),
        _ => None,
    };
    let close = body.find(format.close());
    let call = section.and_then(|section| body.find(section));
    let (thought, answer) = match (close, call) {
        (None, None) => (body, ""),
        (Some(close), call) if call.is_none_or(|call| close < call) => {
            let rest = &body[close + format.close().len()..];
            (&body[..close], rest.trim_start_matches(breaks))
        }
        (_, call) => body.split_at(call.expect("a call ends the thought")),
    };
    (thought.trim_matches(breaks), answer)
}

enum Found {
    Say(String),
    Call(String, Option<String>, String),
}

/// Drops the white space that belongs to calls, and numbers the calls.
fn finish(found: Vec<Found>, all: &mut Vec<Piece>) {
    let calls = found
        .iter()
        .filter(|f| matches!(f, Found::Call(..)))
        .count();
    let mut space = String::new();
    let (mut said, mut index) = (false, 0);
    for found in found {
        match found {
            Found::Say(text) => {
                space += &text;
                if space.trim().is_empty() {
                    continue;
                }
                let mut solid = space.trim_end().to_owned();
                space = space[solid.len()..].to_owned();
                if !said && index > 0 {
                    solid = solid.trim_start().to_owned();
                }
                said = true;
                join(all, Piece::Content(solid));
            }
            Found::Call(name, id, json) => {
                if !said {
                    space.clear();
                }
                all.push(Piece::CallStart { index, name, id });
                all.push(Piece::Arguments { index, json });
                index += 1;
            }
        }
    }
    if calls == 0 && !space.is_empty() {
        join(all, Piece::Content(space));
    }
}
