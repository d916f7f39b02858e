//! Which tokens did the model really produce for this assistant turn?
//!
//! An answer's tokens need not be those that the tokenizer would choose for its text, and a
//! template may spell a call's JSON otherwise than the model did. A prompt that tokenizes an answer
//! anew then leaves the cached blocks right there. So an answer's tokens are remembered under the
//! text that the template makes of it once the client sends it back, and under all tokens before
//! it: they are used only where the whole prompt up to there is the one that they answered.
//!
//! Conditions, each checked when an answer is remembered: the prompt of a next turn begins with
//! this turn's prompt; the tokens spell what the client was told (`same_turn`); and the template
//! writes the very control tokens among them, no others. Where one does not hold, nothing is
//! remembered, and the tokenizer decides as ever.
//!
//! An answer reaches from the last control token before it (the *opener*, learnt from the template)
//! to the next one that ends a turn. Left out: templates without a control token there.

use std::borrow::Borrow;

use serde_json::{Value as Json, json};

use crate::build::{ChatInput, PromptBuilder};
use crate::marks::{Marks, Part};
use crate::segments::{Prefix, SegmentCache};
use crate::tokenizer::{Piece, Tokenizer};

/// What the form of a call, or of reasoning, may add to an answer besides the pieces told to the
/// client: braces, field names, ids and markers. Kimi's form is the longest with about 120 bytes.
const FORM_BYTES_MAX: usize = 192;

/// An answer, as its client was told, and what the model produced for it.
#[derive(Debug, Clone, Copy)]
pub struct Answered<'a> {
    /// All tokens of the prompt that it answers.
    pub prompt: &'a [u32],
    /// The assistant's message: `content`, `reasoning_content`, `tool_calls`.
    pub message: &'a Json,
    /// Its tokens, the one that ended it included if there is one.
    pub tokens: &'a [u32],
}

impl PromptBuilder {
    /// Remembers an answer for `chat_with_answers`, called with the request that it answers. False
    /// if it cannot be used: the template drops parts of it, or its tokens are not its text.
    pub fn remember<M: Borrow<Json>>(
        &self,
        input: &ChatInput<'_, M>,
        answer: &Answered<'_>,
        known: &SegmentCache,
    ) -> bool {
        self.entry(input, answer, known)
            .map(|entry| known.put_answer(self.tokenizer(), entry))
            .is_some()
    }

    fn entry<M: Borrow<Json>>(
        &self,
        input: &ChatInput<'_, M>,
        answer: &Answered<'_>,
        known: &SegmentCache,
    ) -> Option<Entry> {
        let template = self.template()?;
        let opener = template.opener()?;
        let at = answer.prompt.iter().rposition(|token| *token == opener)?;
        let (before, tail) = answer.prompt.split_at(at + 1);
        let added = next_turn(answer.message);
        let messages: Vec<&Json> = input.messages.iter().map(Borrow::borrow).collect();
        let messages = [&messages[..], &added.iter().collect::<Vec<_>>()].concat();
        let rendered = template.render(&input.of(&messages)).ok()?;
        let (prefix, span) = self.span_behind(&rendered, before, known)?;
        let tokens = self.tokens_of(span, tail, answer)?;
        Some(Entry {
            prefix,
            text: span.into(),
            tokens,
        })
    }

    /// The tokens of a span that holds the answer: the prompt's own end, then what was produced.
    fn tokens_of(&self, span: &str, tail: &[u32], answer: &Answered<'_>) -> Option<Vec<u32>> {
        let tokenizer = self.tokenizer();
        let marks = self.template()?.marks();
        let ends = tokenizer.eos_ids();
        let mut produced = answer.tokens;
        if let [rest @ .., last] = produced
            && ends.contains(last)
        {
            produced = rest;
        }
        if produced.is_empty() || tail.iter().any(|token| tokenizer.is_control(*token)) {
            return None;
        }
        let (span_text, span_controls) = spelled(span, marks, tokenizer);
        let tail_text = String::from_utf8(tokenizer.decode_text(tail)).ok()?;
        let replayed = span_text.strip_prefix(&tail_text)?;
        let controls = produced
            .iter()
            .filter(|token| tokenizer.is_control(**token));
        if !controls.eq(span_controls.iter()) {
            return None;
        }
        let said = Said::of(answer.message);
        let text = text_of(produced, tokenizer);
        if said.is_plain() && text.len() > replayed.len() && text.starts_with(replayed) {
            // A stop string's tokens were produced and not told.
            return Some([tail, &cut(produced, replayed, tokenizer)].concat());
        }
        said.same_turn(&text, replayed)
            .then(|| [tail, produced].concat())
    }

    /// Walks a rendered conversation to the end of `before`, its expected beginning; says the
    /// prefix's fingerprint and the span that follows.
    fn span_behind<'r>(
        &'r self,
        rendered: &'r str,
        before: &[u32],
        known: &SegmentCache,
    ) -> Option<(u64, &'r str)> {
        let template = self.template()?;
        let mut tokens = Vec::with_capacity(before.len());
        let mut found = None;
        let mut progress = Progress {
            asks: true,
            ..Progress::new(known)
        };
        self.walk(
            template,
            rendered,
            known,
            (&mut tokens, &mut progress),
            |tokens, prefix, span| {
                if tokens.len() < before.len() {
                    return true;
                }
                found = (tokens == before).then_some((prefix, span));
                false
            },
        );
        found
    }
}

/// An answer on its way into the memory.
#[derive(Debug)]
pub(crate) struct Entry {
    /// Fingerprint of all tokens before the span.
    pub(crate) prefix: u64,
    /// The span as the template renders it, with marks.
    pub(crate) text: Box<str>,
    /// The span's tokens.
    pub(crate) tokens: Vec<u32>,
}

/// What the next turn will add. Templates treat the last message in their own ways, and drop
/// reasoning once the user speaks again: so something follows the answer.
fn next_turn(answer: &Json) -> Vec<Json> {
    let mut next = vec![answer.clone()];
    match answer["tool_calls"].as_array() {
        Some(calls) if !calls.is_empty() => next.extend(calls.iter().map(|call| {
            json!({"role": "tool", "tool_call_id": call["id"], "content": "-",
                "name": call["function"]["name"]})
        })),
        _ => next.push(json!({"role": "user", "content": "-"})),
    }
    next
}

/// A span's text, control tokens spelled out, and those tokens.
fn spelled(span: &str, marks: &Marks, tokenizer: &Tokenizer) -> (String, Vec<u32>) {
    let (mut text, mut controls) = (String::with_capacity(span.len()), Vec::new());
    for part in marks.parts(span) {
        match part {
            Part::Token(token) => {
                controls.push(token);
                text.push_str(tokenizer.token_text(token));
            }
            Part::Text(part) => text.push_str(&part),
        }
    }
    (text, controls)
}

/// What produced tokens spell, control tokens included.
fn text_of(tokens: &[u32], tokenizer: &Tokenizer) -> String {
    let mut bytes = Vec::with_capacity(tokens.len() * 4);
    for token in tokens {
        if tokenizer.is_control(*token) {
            bytes.extend_from_slice(tokenizer.token_text(*token).as_bytes());
        } else {
            bytes.extend_from_slice(tokenizer.token_bytes(*token));
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

/// The produced tokens as far as they spell `text`, and the tokenizer's for the rest of it.
fn cut(produced: &[u32], text: &str, tokenizer: &Tokenizer) -> Vec<u32> {
    let (mut count, mut bytes) = (0, 0);
    let mut ends = 0;
    for (at, token) in produced.iter().enumerate() {
        ends += tokenizer.token_bytes(*token).len();
        if ends > text.len() {
            break;
        }
        if text.is_char_boundary(ends) {
            (count, bytes) = (at + 1, ends);
        }
    }
    let mut tokens = produced[..count].to_vec();
    tokens.extend(tokenizer.encode_more(&text[bytes..]));
    tokens
}

/// The pieces of an assistant's message.
struct Said<'a> {
    reasoning: &'a str,
    content: &'a str,
    /// Name and arguments.
    calls: Vec<(&'a str, &'a str)>,
}

impl<'a> Said<'a> {
    fn of(message: &'a Json) -> Self {
        let text = |value: &'a Json| value.as_str().unwrap_or_default().trim();
        let calls = message["tool_calls"].as_array();
        Self {
            reasoning: text(&message["reasoning_content"]),
            content: text(&message["content"]),
            calls: calls
                .into_iter()
                .flatten()
                .map(|call| {
                    let function = &call["function"];
                    (text(&function["name"]), text(&function["arguments"]))
                })
                .collect(),
        }
    }

    fn is_plain(&self) -> bool {
        self.reasoning.is_empty() && self.calls.is_empty()
    }

    /// Whether what was produced, and what the template makes of the message, are one turn: the
    /// same text but for white space around it, or all pieces of the message in both, and nothing
    /// else than the form around them.
    fn same_turn(&self, produced: &str, replayed: &str) -> bool {
        if produced.trim() == replayed.trim() {
            return true;
        }
        if self.is_plain() {
            return false;
        }
        let names = self.calls.iter().map(|(name, _)| *name);
        let arguments = self.calls.iter().map(|(_, arguments)| *arguments);
        let told: Vec<&str> = [self.reasoning, self.content]
            .into_iter()
            .chain(names)
            .collect();
        let pieces: Vec<&str> = told.iter().copied().chain(arguments).collect();
        let bytes: usize = pieces.iter().map(|piece| piece.len()).sum();
        let form = FORM_BYTES_MAX * (1 + self.calls.len());
        told.iter().all(|piece| replayed.contains(piece))
            && pieces.iter().all(|piece| produced.contains(piece))
            && produced.len() <= bytes + form
    }
}

/// How far a walk through a rendered text has come, besides its tokens.
#[derive(Debug)]
pub(crate) struct Progress {
    /// Whether answers are asked for at all.
    asks: bool,
    pub(crate) prefix: Prefix,
    /// Answers known by their own tokens.
    pub(crate) answers: usize,
    /// Up to where the text will stay as messages are added, and the last place before that at
    /// which the walk can be taken up.
    pub(crate) settled: Option<usize>,
    pub(crate) cut: Option<Cut>,
}

/// A control token at which a walk can be taken up: what stands before it is done.
#[derive(Debug, Clone)]
pub(crate) struct Cut {
    /// Where in the text it stands.
    pub(crate) offset: usize,
    /// How many tokens and answers are before it.
    pub(crate) tokens: usize,
    pub(crate) answers: usize,
    pub(crate) prefix: Prefix,
}

impl Progress {
    pub(crate) fn new(known: &SegmentCache) -> Self {
        Self {
            asks: known.holds_answers(),
            prefix: known.prefix(),
            answers: 0,
            settled: None,
            cut: None,
        }
    }

    /// A control token stands at `offset`, outside of an answer.
    fn pass(&mut self, offset: usize, tokens: usize) {
        if self.settled.is_some_and(|end| offset < end) {
            self.cut = Some(Cut {
                offset,
                tokens,
                answers: self.answers,
                prefix: self.prefix.clone(),
            });
        }
    }
}

impl PromptBuilder {
    /// Appends a rendered text's tokens, asking at each opener what is known of the span behind
    /// it. `visit` is told the tokens so far, their fingerprint and the span; it says whether to
    /// go on.
    pub(crate) fn walk<'r>(
        &self,
        template: &'r crate::template::Template,
        rendered: &'r str,
        known: &SegmentCache,
        (tokens, progress): (&mut Vec<u32>, &mut Progress),
        mut visit: impl FnMut(&[u32], u64, &'r str) -> bool,
    ) {
        let (tokenizer, marks) = (self.tokenizer(), template.marks());
        let ends = tokenizer.eos_ids();
        let mut walk = marks.walk(rendered);
        // The end of the answer that the walk is in.
        let mut span_end = 0;
        loop {
            let offset = rendered.len() - walk.left();
            let Some(piece) = walk.next() else { return };
            match piece {
                Piece::Text(text) => {
                    for part in marks.text_parts(text) {
                        match part {
                            Part::Token(token) => tokens.push(token),
                            Part::Text(text) => known.push_text(tokenizer, &text, tokens),
                        }
                    }
                }
                Piece::Token(token) => {
                    if offset >= span_end {
                        progress.pass(offset, tokens.len());
                    }
                    tokens.push(token);
                    if Some(token) != template.opener() {
                        continue;
                    }
                    let Some(span) = walk.until(ends).filter(|span| !span.is_empty()) else {
                        continue;
                    };
                    span_end = span_end.max(rendered.len() - walk.left() + span.len());
                    if !progress.asks {
                        continue;
                    }
                    let fingerprint = progress.prefix.of(tokens);
                    if !visit(tokens, fingerprint, span) {
                        return;
                    }
                    if known.push_answer(tokenizer, fingerprint, span, tokens) {
                        progress.answers += 1;
                        walk.pass(span.len());
                    }
                }
            }
        }
    }
}
