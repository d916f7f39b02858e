//! Which tool does this JSON object call, and with what?
//!
//! `{"name": …, "arguments": …}` in either order, `parameters` for `arguments`, other keys in
//! between.

use crate::arguments::Arguments;
use crate::json::{Scanner, Step, is_space};

/// Which other keys a call's object may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OtherKeys {
    /// A marker has said that this is a call.
    Any,
    /// Nothing has: the first key that calls do not have shows that it is none.
    Known,
}

/// The keys with which models write calls; a second one of a kind is passed over.
const KNOWN_KEYS: [&str; 5] = ["type", "id", "name", "arguments", "parameters"];

#[derive(Debug)]
enum State {
    Open,
    FirstKey,
    NextKey,
    Key(Scanner, String),
    Colon(String),
    Name(Scanner, String),
    Arguments,
    Other(Scanner),
    AfterValue,
}

/// Follows a call's object.
#[derive(Debug)]
pub(crate) struct Object {
    state: State,
    others: OtherKeys,
    /// The tool's name, once it is known.
    pub(crate) name: Option<String>,
    /// Its arguments.
    pub(crate) arguments: Arguments,
}

impl Object {
    /// In front of the object.
    pub(crate) fn new(others: OtherKeys) -> Self {
        Self {
            state: State::Open,
            others,
            name: None,
            arguments: Arguments::new(),
        }
    }

    /// Whether the next character is a string's own, not part of an escape.
    pub(crate) fn is_in_text(&self) -> bool {
        match &self.state {
            State::Key(scanner, _) | State::Name(scanner, _) | State::Other(scanner) => {
                scanner.is_in_text()
            }
            State::Arguments => self.arguments.is_in_text(),
            _ => false,
        }
    }

    /// Takes the next character.
    pub(crate) fn push(&mut self, c: char) -> Step {
        match &mut self.state {
            State::Key(scanner, text) | State::Name(scanner, text) => {
                let step = scanner.push(c);
                text.push(c);
                match step {
                    Step::End => self.text_ended(),
                    step => step,
                }
            }
            State::Arguments => {
                let step = self.arguments.push(c);
                self.value_ended(step)
            }
            State::Other(scanner) => match scanner.push(c) {
                Step::EndedBefore => {
                    self.state = State::AfterValue;
                    self.push(c)
                }
                step => self.value_ended(step),
            },
            _ if is_space(c) => Step::More,
            State::Open if c == '{' => self.go(State::FirstKey),
            State::FirstKey | State::NextKey if c == '"' => {
                let mut scanner = Scanner::new();
                scanner.push(c);
                self.go(State::Key(scanner, c.into()))
            }
            State::Colon(key) if c == ':' => {
                let key = std::mem::take(key);
                self.value_of(&key)
            }
            State::AfterValue if c == ',' => self.go(State::NextKey),
            State::FirstKey | State::AfterValue if c == '}' => self.ended(),
            _ => Step::Broken,
        }
    }

    fn go(&mut self, state: State) -> Step {
        self.state = state;
        Step::More
    }

    /// A key or the name is complete.
    fn text_ended(&mut self) -> Step {
        let (State::Key(_, text) | State::Name(_, text)) = &self.state else {
            return Step::Broken;
        };
        let Ok(text) = serde_json::from_str::<String>(text.trim_start()) else {
            return Step::Broken;
        };
        if matches!(self.state, State::Key(..)) {
            return self.go(State::Colon(text));
        }
        if text.is_empty() {
            return Step::Broken;
        }
        self.name = Some(text);
        self.go(State::AfterValue)
    }

    fn value_ended(&mut self, step: Step) -> Step {
        match step {
            Step::End => self.go(State::AfterValue),
            step => step,
        }
    }

    fn value_of(&mut self, key: &str) -> Step {
        let state = match key {
            "name" if self.name.is_none() => State::Name(Scanner::new(), String::new()),
            "arguments" | "parameters" if !self.arguments.is_begun() => State::Arguments,
            other if self.others == OtherKeys::Any || KNOWN_KEYS.contains(&other) => {
                State::Other(Scanner::new())
            }
            _ => return Step::Broken,
        };
        self.go(state)
    }

    /// The object's end: a call without a name is none, one without arguments has empty ones.
    fn ended(&mut self) -> Step {
        if self.name.is_none() {
            return Step::Broken;
        }
        if !self.arguments.is_begun() {
            self.arguments.set_empty();
        }
        Step::End
    }
}
