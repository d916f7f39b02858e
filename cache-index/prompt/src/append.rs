//! Does this template write a conversation message by message, so that what it wrote of the
//! beginning stays when messages are added behind it?
//!
//! Asked of the source, once, since no number of trials proves it. It holds where the template
//! reads `messages` in one loop of its own level, from the first to the last, and else only
//! `messages[0]`; and where nothing else passes from one turn of that loop to the next: no
//! `namespace`, no `set` within it, of `loop` only `loop.first`. Then what a message becomes
//! depends on itself, on the first message, and on what all of a conversation shares (tools, extra
//! variables); so the loop over the first message and some later ones writes for each of them what
//! the loop over all of them would.
//!
//! Templates that look ahead (`loop.last`, `messages[-1]`), back (`loop.previtem`), at the number
//! of messages, or at the clock, do not pass; they are rendered whole every turn.
//!
//! To tell where in the text a message begins, [`with_boundaries`] writes one reserved character
//! at the top of the loop and one behind it.

use crate::marks::BOUNDARY;

/// Tags with which a template can leave the loop early, or reach what this reading does not see.
const FORBIDDEN_TAGS: &[&str] = &[
    "block", "break", "call", "extends", "filter", "from", "import", "include", "raw", "with",
];
/// Names with which it can carry something from turn to turn of the loop, or reach beyond it.
const FORBIDDEN_NAMES: &[&str] = &[
    "caller",
    "cycler",
    "debug",
    "joiner",
    "namespace",
    "random",
    "recursive",
    "self",
    "strftime_now",
    "super",
];
/// Tags that an `end…` closes; `set` only without `=`.
const BLOCKS: &[&str] = &["for", "if", "macro", "set", "autoescape"];

/// The source with a boundary before each message and one behind the last, if the template is one
/// that only appends.
pub(crate) fn with_boundaries(source: &str) -> Option<String> {
    let mut reading = Reading::default();
    for tag in tags(source)? {
        reading.tag(&tag)?;
    }
    let [top, bottom] = reading.edges[..] else {
        return None;
    };
    let mut out = String::with_capacity(source.len() + 128);
    let mut rest = 0;
    for edge in [top, bottom] {
        out.push_str(&source[rest..edge]);
        rest = edge;
        // Whatever white space the tag swallows behind it, the last of these tags swallows.
        let trim = match source.as_bytes().get(edge.wrapping_sub(3)) {
            Some(b'-') => "-",
            Some(b'+') => "+",
            _ => "",
        };
        out.push(BOUNDARY);
        out.push_str("{% set homing_boundary = 0 ");
        out.push_str(trim);
        out.push_str("%}");
    }
    out.push_str(&source[rest..]);
    Some(out)
}

/// A text without its boundaries, and where they were.
pub(crate) fn without_boundaries(text: String) -> (String, Vec<usize>) {
    let mut found = Vec::new();
    let mut pieces = text.split(BOUNDARY);
    let mut out = String::with_capacity(text.len());
    out.push_str(pieces.next().unwrap_or_default());
    for piece in pieces {
        found.push(out.len());
        out.push_str(piece);
    }
    if found.is_empty() {
        return (text, found);
    }
    (out, found)
}

/// A tag of a template: `{{ … }}` or `{% … %}`.
struct Tag<'s> {
    is_statement: bool,
    words: Vec<Word<'s>>,
    end: usize,
}

/// A part of a tag.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Word<'s> {
    Name(&'s str),
    Number(&'s str),
    Text,
    Sign(u8),
}

/// The tags of a source; none if they cannot be told apart.
fn tags(source: &str) -> Option<Vec<Tag<'_>>> {
    let mut tags = Vec::new();
    let mut at = 0;
    while let Some(open) = source[at..].find('{').map(|found| at + found) {
        let is_statement = match source.as_bytes().get(open + 1) {
            Some(b'#') => {
                at = open + 2 + source[open + 2..].find("#}")? + 2;
                continue;
            }
            Some(b'%') => true,
            Some(b'{') => false,
            _ => {
                at = open + 1;
                continue;
            }
        };
        let (words, end) = words(source, open + 2, is_statement)?;
        at = end;
        tags.push(Tag {
            is_statement,
            words,
            end,
        });
    }
    Some(tags)
}

/// The words from `at` to the end of the tag, and where that is.
fn words(source: &str, mut at: usize, is_statement: bool) -> Option<(Vec<Word<'_>>, usize)> {
    let bytes = source.as_bytes();
    let close: &[u8] = if is_statement { b"%}" } else { b"}}" };
    let is_name = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_';
    let mut words = Vec::new();
    let mut depth = 0_usize;
    loop {
        let byte = *bytes.get(at)?;
        if depth == 0 && bytes[at..].starts_with(close) {
            return Some((words, at + 2));
        }
        let begin = at;
        at += 1;
        match byte {
            b'"' | b'\'' => {
                while *bytes.get(at)? != byte {
                    at += if bytes[at] == b'\\' { 2 } else { 1 };
                }
                at += 1;
                words.push(Word::Text);
            }
            byte if is_name(byte) => {
                while bytes.get(at).is_some_and(|byte| is_name(*byte)) {
                    at += 1;
                }
                let text = &source[begin..at];
                words.push(match byte.is_ascii_digit() {
                    true => Word::Number(text),
                    false => Word::Name(text),
                });
            }
            byte if byte.is_ascii_whitespace() => {}
            // Names may be of other alphabets; no template in use has such.
            byte if !byte.is_ascii() => return None,
            byte => {
                match byte {
                    b'(' | b'[' | b'{' => depth += 1,
                    b')' | b']' | b'}' => depth = depth.checked_sub(1)?,
                    _ => {}
                }
                words.push(Word::Sign(byte));
            }
        }
    }
}

/// What was read of a template so far.
#[derive(Default)]
struct Reading<'s> {
    /// The blocks that are open; true for the loop over the messages.
    open: Vec<(&'s str, bool)>,
    /// Behind the tags that begin and end that loop.
    edges: Vec<usize>,
}

impl<'s> Reading<'s> {
    fn tag(&mut self, tag: &Tag<'s>) -> Option<()> {
        let mut words = &tag.words[..];
        // The signs of white space control.
        while let [Word::Sign(b'-' | b'+'), rest @ ..] = words {
            words = rest;
        }
        while let [rest @ .., Word::Sign(b'-' | b'+')] = words {
            words = rest;
        }
        if !tag.is_statement {
            return self.names(words);
        }
        if let [
            Word::Name("for"),
            Word::Name(item),
            Word::Name("in"),
            Word::Name("messages"),
        ] = words
        {
            let is_first = self.open.is_empty() && self.edges.is_empty();
            if !is_first || ["messages", "loop"].contains(item) {
                return None;
            }
            self.edges.push(tag.end);
            self.open.push(("for", true));
            return Some(());
        }
        let [Word::Name(keyword), rest @ ..] = words else {
            return None;
        };
        if let Some(closed) = keyword.strip_prefix("end") {
            let (opened, is_messages) = self.open.pop()?;
            if opened != closed {
                return None;
            }
            if is_messages {
                self.edges.push(tag.end);
            }
            return Some(());
        }
        let carries = *keyword == "set" && self.in_messages();
        if carries || FORBIDDEN_TAGS.contains(keyword) {
            return None;
        }
        self.names(words)?;
        let is_assignment = *keyword == "set" && rest.contains(&Word::Sign(b'='));
        if BLOCKS.contains(keyword) && !is_assignment {
            self.open.push((keyword, false));
        }
        Some(())
    }

    fn in_messages(&self) -> bool {
        self.open.iter().any(|(_, is_messages)| *is_messages)
    }

    /// Whether all names among the words are harmless.
    fn names(&self, words: &[Word<'s>]) -> Option<()> {
        for (at, word) in words.iter().enumerate() {
            let Word::Name(name) = word else { continue };
            let is_member = at > 0 && words[at - 1] == Word::Sign(b'.');
            if is_member {
                continue;
            }
            let behind = &words[at + 1..];
            let is_harmless = match *name {
                "messages" => matches!(
                    behind,
                    [Word::Sign(b'['), Word::Number("0"), Word::Sign(b']'), ..]
                ),
                "loop" => self.may_ask_loop(behind),
                name => !FORBIDDEN_NAMES.contains(&name),
            };
            if !is_harmless {
                return None;
            }
        }
        Some(())
    }

    /// Of the loop over the messages only whether it is at the first; of loops within, anything.
    fn may_ask_loop(&self, behind: &[Word<'s>]) -> bool {
        let [Word::Sign(b'.'), Word::Name(asked), ..] = behind else {
            return false;
        };
        let innermost = self.open.iter().rev().find(|(block, _)| *block == "for");
        match innermost {
            Some((_, true)) => *asked == "first",
            Some((_, false)) => true,
            None => false,
        }
    }
}

#[cfg(test)]
mod tests {
    //! Catches a template that looks beyond one message and is taken for one that does not.
    use super::with_boundaries;

    /// A loop over the messages in place of `LOOP(…)`.
    fn source(template: &str) -> String {
        template
            .replace("LOOP(", "{% for m in messages %}")
            .replace(")LOOP", "{% endfor %}")
    }

    #[test]
    fn templates_that_append_pass() {
        for template in [
            "LOOP({{ m.role }})LOOP",
            "LOOP({% if loop.first %}{{ messages[0].content }}{% endif %}{{ m }})LOOP",
            "LOOP({% for c in m.calls %}{% if not loop.last %},{% endif %}{% endfor %})LOOP",
            "LOOP({{ m.messages }}{{ 'messages loop.last' }}{# messages #})LOOP",
            "LOOP({% for call in m.calls %}{{ call }}{% endfor %})LOOP",
            "{% set a = messages[0] %}LOOP({{ a }})LOOP{{ a }}",
            "{% macro f(x) %}{{ x }}{% endmacro %}LOOP({{ f(m) }})LOOP",
        ] {
            assert!(with_boundaries(&source(template)).is_some(), "{template}");
        }
    }

    #[test]
    fn templates_that_look_elsewhere_do_not() {
        for template in [
            "no loop {{ messages[0].content }}",
            "LOOP({% if loop.last %}x{% endif %})LOOP",
            "LOOP({{ loop.index0 }})LOOP",
            "LOOP({{ loop }})LOOP",
            "LOOP({% for c in m.calls %}{% endfor %}{{ loop.last }})LOOP",
            "LOOP({% set x = 1 %})LOOP",
            "LOOP({% if m.stop %}{% break %}{% endif %})LOOP",
            "LOOP({{ messages[1].content }})LOOP",
            "LOOP({{ messages[0:2] }})LOOP",
            "LOOP({{ messages[-1] }})LOOP",
            "LOOP({{ messages|length }})LOOP",
            "LOOP({{ f(messages=1) }})LOOP",
            "LOOP({{ strftime_now('%d') }})LOOP",
            "LOOP({{ ' )LOOP",
            "LOOP({% raw %}{% endraw %})LOOP",
            "LOOP({% call f(m) %}{% endcall %})LOOP",
            "{% set ns = namespace(a=1) %}LOOP({{ m }})LOOP",
            "{% set m2 = messages %}LOOP({{ m }})LOOP",
            "LOOP({{ m }})LOOPLOOP({{ m }})LOOP",
            "{% if x %}LOOP({{ m }})LOOP{% endif %}",
            "{% for m in messages if m.role %}{{ m }}{% endfor %}",
            "{% for m in messages[1:] %}{{ m }}{% endfor %}",
            "{% for m in messages recursive %}{{ m }}{% endfor %}",
            "{% for messages in messages %}{{ m }}{% endfor %}",
        ] {
            assert!(with_boundaries(&source(template)).is_none(), "{template}");
        }
    }
}
