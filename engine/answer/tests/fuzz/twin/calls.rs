//! Where the calls are, and what stands around them.

use answer::{ToolFormat, markers};
use serde::de::IgnoredAny;

use super::Found;
use super::json::states;

pub(super) struct Twin<'a> {
    pub(super) format: ToolFormat,
    pub(super) offered: &'a [&'a str],
    pub(super) text: &'a str,
    pub(super) found: Vec<Found>,
    /// How far the last call is closed: 0 not at all, since other text came.
    pub(super) closing: usize,
}

/// A call as far as it goes.
#[derive(Default)]
pub(super) struct Call {
    pub(super) name: Option<String>,
    pub(super) id: Option<String>,
    pub(super) json: String,
    /// The arguments are certain, from this place on.
    pub(super) begun: Option<usize>,
    /// The call counts from this place on.
    pub(super) counts: Option<usize>,
}

/// Where the form goes on, or where it breaks.
pub(super) type At = Result<usize, usize>;

impl Twin<'_> {
    pub(super) fn run(&mut self) {
        let mut at = 0;
        if self.format == ToolFormat::Llama3 {
            at = self.calls(0, 0);
        }
        while at < self.text.len() {
            let Some((place, marker)) = self.next_marker(at) else {
                return self.say(at, self.text.len());
            };
            self.say(at, place);
            let after = place + marker.len();
            at = after;
            if is_section(marker) || is_open(marker) {
                at = self.calls(place, after);
                continue;
            }
            let rank = rank(marker);
            if self.closing > 0 && rank > self.closing {
                self.closing = rank;
            } else {
                self.say(place, after);
            }
        }
    }

    pub(super) fn say(&mut self, from: usize, to: usize) {
        if !self.text[from..to].trim().is_empty() {
            self.closing = 0;
        }
        self.found.push(Found::Say(self.text[from..to].into()));
    }

    pub(super) fn all_markers(&self) -> Vec<&'static str> {
        let mut all = markers(Some(self.format), None);
        if self.format == ToolFormat::DeepSeek {
            all.push("```");
        }
        all
    }

    pub(super) fn next_marker(&self, from: usize) -> Option<(usize, &'static str)> {
        let found = self.all_markers().into_iter().filter_map(|marker| {
            let at = self.text[from..].find(marker)?;
            Some((from + at, marker))
        });
        found.min()
    }

    pub(super) fn marker_at(&self, at: usize) -> Option<&'static str> {
        let rest = &self.text[at..];
        self.all_markers().into_iter().find(|m| rest.starts_with(m))
    }

    pub(super) fn char_at(&self, at: usize) -> Option<char> {
        match self.marker_at(at) {
            Some(_) => None,
            None => self.text[at..].chars().next(),
        }
    }

    /// Skips JSON's white space.
    pub(super) fn space(&self, at: usize) -> usize {
        let rest = self.text[at..].trim_start_matches([' ', '\t', '\r', '\n']);
        self.text.len() - rest.len()
    }

    pub(super) fn expect(&self, at: usize, text: &str) -> At {
        if self.text[at..].starts_with(text) {
            Ok(at + text.len())
        } else {
            Err(at)
        }
    }

    /// Calls from here on, whose text begins at `from`. Where plain text goes on.
    pub(super) fn calls(&mut self, from: usize, at: usize) -> usize {
        let mut from = from;
        let mut at = match self.opened(from, at) {
            Ok(at) => at,
            Err(at) => {
                self.say(from, at);
                return at;
            }
        };
        let is_array = self.format == ToolFormat::Mistral && self.char_at(at) == Some('[');
        if is_array {
            at = self.space(at + 1);
        }
        loop {
            let is_object = self.char_at(at) == Some('{');
            let mut call = Call::default();
            let end = match self.format {
                _ if is_array && !is_object => Err(at),
                ToolFormat::Hermes | ToolFormat::Llama3 => self.object(at, &mut call),
                ToolFormat::Mistral if is_object => self.object(at, &mut call),
                _ => self.bare(at, &mut call),
            };
            match (call.counts, call.name.take()) {
                (Some(counts), Some(name)) => {
                    let is_offered = self.offered.contains(&name.as_str());
                    if self.format == ToolFormat::Llama3 && !is_offered {
                        self.say(from, counts);
                        return counts;
                    }
                    if let Err(at) = end {
                        self.close(at, &mut call.json);
                    }
                    self.found.push(Found::Call(name, call.id, call.json));
                    self.closing = 1;
                }
                _ => {
                    let at = end.expect_err("a call that does not count broke");
                    self.say(from, at);
                    return at;
                }
            }
            let after = match end {
                Ok(after) => after,
                Err(at) => return at,
            };
            from = after;
            let next = match self.next_item(after, is_array) {
                Ok(Some(next)) => next,
                Ok(None) if is_array => return self.space(after) + 1,
                Ok(None) => return after,
                Err(at) => {
                    self.say(from, at);
                    return at;
                }
            };
            at = next;
        }
    }

    /// A section's beginning, a call's beginning, and what stands before a name or an object.
    pub(super) fn opened(&self, from: usize, at: usize) -> At {
        let mut at = at;
        if self.marker_at(from).is_some_and(is_section) {
            at = self.space(at);
            match self.marker_at(at) {
                Some(marker) if is_open(marker) => at += marker.len(),
                _ => return Err(at),
            }
        }
        Ok(self.llama_tag(self.space(at)))
    }

    pub(super) fn llama_tag(&self, at: usize) -> usize {
        match self.marker_at(at) {
            Some(tag) if self.format == ToolFormat::Llama3 => {
                self.llama_tag(self.space(at + tag.len()))
            }
            _ => at,
        }
    }

    /// Behind an item: the next one's place, or `None` after the last.
    pub(super) fn next_item(&self, at: usize, is_array: bool) -> Result<Option<usize>, usize> {
        let place = self.space(at);
        match (is_array, self.format, self.char_at(place)) {
            (true, _, Some(',')) => Ok(Some(self.space(place + 1))),
            (true, _, Some(']')) => Ok(None),
            (false, ToolFormat::Llama3, Some(';')) => {
                Ok(Some(self.llama_tag(self.space(place + 1))))
            }
            (false, ToolFormat::Llama3, _) | (true, ..) => Err(place),
            (false, ..) => Ok(None),
        }
    }

    /// A call that broke at its closing marker gets the brackets it lacks.
    pub(super) fn close(&self, at: usize, json: &mut String) {
        if self.marker_at(at).is_none_or(|marker| rank(marker) < 2) {
            return;
        }
        let mut open = Vec::new();
        for (c, in_string) in states(json) {
            match c {
                '{' if !in_string => open.push('}'),
                '[' if !in_string => open.push(']'),
                '}' | ']' if !in_string => drop(open.pop()),
                _ => {}
            }
        }
        let closed = json.clone() + &open.into_iter().rev().collect::<String>();
        if serde_json::from_str::<IgnoredAny>(&closed).is_ok() {
            *json = closed;
        }
    }
}
pub(super) fn is_section(marker: &str) -> bool {
    matches!(
        marker,
        "<｜tool▁calls▁begin｜>" | "<|tool_calls_section_begin|>"
    )
}

pub(super) fn is_open(marker: &str) -> bool {
    matches!(
        marker,
        "<tool_call>"
            | "<|python_tag|>"
            | "[TOOL_CALLS]"
            | "<｜tool▁call▁begin｜>"
            | "<|tool_call_begin|>"
    )
}

/// The order in which a call is closed; 0 for what closes nothing.
pub(super) fn rank(marker: &str) -> usize {
    match marker {
        "```" => 2,
        "</tool_call>" | "<｜tool▁call▁end｜>" | "<|tool_call_end|>" => 3,
        "<｜tool▁calls▁end｜>" | "<|tool_calls_section_end|>" => 4,
        _ => 0,
    }
}
