//! A call's name and arguments, in JSON and outside of it.

use answer::ToolFormat;
use serde::de::IgnoredAny;

use super::calls::{At, Call, Twin, rank};
use super::json::{Json, ending, escaped, may_go_on, states, unfinished_hex};

impl Twin<'_> {
    pub(super) fn object(&self, at: usize, call: &mut Call) -> At {
        let mut at = self.space(self.expect(at, "{")?);
        if self.char_at(at) == Some('}') {
            return self.object_end(at, call);
        }
        loop {
            self.expect(at, "\"")?;
            let end = self.value(at)?;
            let key: String = serde_json::from_str(&self.text[at..end]).map_err(|_| end - 1)?;
            at = self.space(self.expect(self.space(end), ":")?);
            at = match key.as_str() {
                "name" if call.name.is_none() => {
                    let end = self.value(at)?;
                    let name = serde_json::from_str::<String>(&self.text[at..end]);
                    let name = name.ok().filter(|name| !name.is_empty());
                    call.name = Some(name.ok_or(last_char(self.text, end))?);
                    call.counts = call.begun.map(|_| end);
                    end
                }
                "arguments" | "parameters" if call.begun.is_none() => self.arguments(at, call)?,
                "type" | "id" | "name" | "arguments" | "parameters" => self.value(at)?,
                _ if self.format != ToolFormat::Llama3 => self.value(at)?,
                _ => return Err(self.expect(self.space(end), ":")? - 1),
            };
            at = self.space(at);
            match self.char_at(at) {
                Some(',') => at = self.space(at + 1),
                Some('}') => return self.object_end(at, call),
                _ => return Err(at),
            }
        }
    }

    pub(super) fn object_end(&self, at: usize, call: &mut Call) -> At {
        if call.name.is_none() {
            return Err(at);
        }
        if call.begun.is_none() {
            call.json = "{}".into();
            call.begun = Some(at + 1);
            call.counts = Some(at + 1);
        }
        Ok(at + 1)
    }

    /// A JSON value's end.
    pub(super) fn value(&self, from: usize) -> At {
        let from = self.space(from);
        let mut is_whole = false;
        for (at, c, in_string) in self.states(from) {
            if !in_string && self.marker_at(at).is_some() {
                return if is_whole { Ok(at) } else { Err(at) };
            }
            let end = at + c.len_utf8();
            match serde_json::from_str::<IgnoredAny>(&self.text[from..end]) {
                Ok(_) if c.is_ascii_digit() => is_whole = true,
                Ok(_) if is_whole => return Ok(at),
                Ok(_) => return Ok(end),
                Err(_) if may_go_on(&self.text[from..end]) => is_whole = false,
                Err(_) if is_whole => return Ok(at),
                Err(_) => return Err(at),
            }
        }
        Err(self.text.len())
    }

    /// Characters from here on, and whether each stands inside a string.
    pub(super) fn states(&self, from: usize) -> impl Iterator<Item = (usize, char, bool)> {
        let states = states(&self.text[from..]);
        let places = self.text[from..].char_indices();
        places
            .zip(states)
            .map(move |((at, c), (_, in_string))| (from + at, c, in_string))
    }

    pub(super) fn arguments(&self, from: usize, call: &mut Call) -> At {
        let from = self.space(from);
        let begin = |call: &mut Call, at: usize| {
            call.begun = Some(at);
            call.counts = call.name.as_ref().map(|_| at);
        };
        match self.char_at(from) {
            Some('{') => {
                begin(call, from + 1);
                let mut plain = Json::default();
                for (at, c, in_string) in self.states(from) {
                    if !in_string && self.marker_at(at).is_some() {
                        return Err(at);
                    }
                    let end = plain.add(c);
                    call.json.clone_from(&plain.text);
                    match end {
                        Some(true) => return Ok(at + 1),
                        Some(false) => {}
                        None => return Err(at),
                    }
                }
                Err(self.text.len())
            }
            Some('"') => self.quoted(from + 1, call, begin),
            Some('n') => {
                for (offset, c) in "null".char_indices() {
                    self.expect(from + offset, c.encode_utf8(&mut [0; 4]))?;
                }
                call.json = "{}".into();
                begin(call, from + 4);
                Ok(from + 4)
            }
            _ => Err(from),
        }
    }

    /// An object in a string, from behind the quote.
    pub(super) fn quoted(
        &self,
        from: usize,
        call: &mut Call,
        begin: impl Fn(&mut Call, usize),
    ) -> At {
        let mut inner = Json::default();
        let mut is_over = false;
        let mut at = from;
        loop {
            let in_text = ending(&inner.text) == (true, false) && !unfinished_hex(&inner.text);
            if !in_text && self.marker_at(at).is_some() {
                return Err(at);
            }
            let (c, last, end) = match self.text[at..].chars().next() {
                None => return Err(at),
                Some('"') if inner.text.is_empty() => {
                    call.json = "{}".into();
                    begin(call, at + 1);
                    return Ok(at + 1);
                }
                Some('"') if is_over => return Ok(at + 1),
                Some('"') => return Err(at),
                Some('\\') => escaped(self.text, at)?,
                Some(c) => (c, at, at + c.len_utf8()),
            };
            at = end;
            if matches!(c, ' ' | '\t' | '\r' | '\n') && (is_over || inner.text.is_empty()) {
                continue;
            }
            if is_over || (inner.text.is_empty() && c != '{') {
                return Err(last);
            }
            if inner.text.is_empty() {
                begin(call, end);
            }
            let step = inner.add(c);
            call.json.clone_from(&inner.text);
            is_over = step.ok_or(last)?;
        }
    }

    /// A name outside of JSON, and its arguments.
    pub(super) fn bare(&self, from: usize, call: &mut Call) -> At {
        let (head, marker_at) = self.name(from)?;
        if head.is_empty() {
            return Err(marker_at);
        }
        let mut at = marker_at;
        let mut name = head;
        let separator = match self.format {
            ToolFormat::DeepSeek => "<｜tool▁sep｜>",
            ToolFormat::Kimi => "<|tool_call_argument_begin|>",
            _ => "[ARGS]",
        };
        let is_mistral = self.format == ToolFormat::Mistral;
        if is_mistral && self.text[at..].starts_with("[CALL_ID]") {
            let place = at + "[CALL_ID]".len();
            let (id, next) = self.name(place)?;
            call.id = Some(id.to_owned()).filter(|id| !id.is_empty());
            at = self.expect(next, separator)?;
        } else if !(is_mistral && self.char_at(at) == Some('{')) {
            at = self.expect(at, separator)?;
        }
        match self.format {
            ToolFormat::DeepSeek => {
                at = self.space(at);
                let (after, next) = self.name_line(at)?;
                at = next;
                if !after.is_empty() {
                    name = after;
                }
            }
            ToolFormat::Kimi => {
                let id = name.trim();
                let bare = id.strip_prefix("functions.").unwrap_or(id);
                let parts = bare.rsplit_once(':');
                name = match parts {
                    Some((name, n)) if n.chars().all(|c| c.is_ascii_digit()) => name,
                    _ => bare,
                };
                call.id = Some(id.into());
            }
            _ => {}
        }
        let name = name.trim();
        if name.is_empty() || name.contains(char::is_whitespace) {
            return Err(marker_at.max(at));
        }
        call.name = Some(name.into());
        self.bare_arguments(at, call)
    }

    pub(super) fn bare_arguments(&self, at: usize, call: &mut Call) -> At {
        let mut at = self.space(at);
        let mut fenced = false;
        if self.format == ToolFormat::DeepSeek && self.text[at..].starts_with("```") {
            fenced = true;
            at = self.space(at + 3);
            for c in "json".chars() {
                // White space may stand anywhere in front of the arguments.
                match self.char_at(at) {
                    Some(next) if next == c => at = self.space(at + 1),
                    Some('{' | '"') if c == 'j' => break,
                    None if c == 'j' => break,
                    _ => {
                        let is_end = self.marker_at(at).is_some_and(|marker| rank(marker) > 1);
                        if is_end {
                            break;
                        }
                        return Err(at);
                    }
                }
            }
        }
        match self.marker_at(at) {
            Some(marker) if rank(marker) == 3 || (rank(marker) == 2 && fenced) => {
                call.json = "{}".into();
                call.begun = Some(at);
                call.counts = Some(at);
                Err(at)
            }
            _ if matches!(self.char_at(at), Some('{' | '"')) => self.arguments(at, call),
            _ => Err(at),
        }
    }

    /// A name up to a marker, a brace or a quote. What follows must be one that may.
    pub(super) fn name(&self, from: usize) -> Result<(&str, usize), usize> {
        let mut at = from;
        while let Some(c) = self.char_at(at) {
            if matches!(c, '{' | '"') {
                break;
            }
            at += c.len_utf8();
            if at - from > 300 {
                return Err(at);
            }
        }
        Ok((&self.text[from..at], at))
    }

    /// DeepSeek's name behind the separator: a line, or nothing.
    pub(super) fn name_line(&self, from: usize) -> Result<(&str, usize), usize> {
        let (name, at) = self.name(from)?;
        match name.find('\n') {
            Some(end) => Ok((&name[..end], from + end + 1)),
            None if self.char_at(at) == Some('"') || at == self.text.len() => Err(at),
            None => Ok((name, at)),
        }
    }
}

fn last_char(text: &str, end: usize) -> usize {
    end - text[..end].chars().next_back().map_or(0, char::len_utf8)
}
