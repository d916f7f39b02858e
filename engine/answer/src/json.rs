//! Is this still the beginning of a JSON value?
//!
//! A scanner of RFC 8259's grammar, a character at a time: it keeps only which containers are open,
//! one bit's worth for each level, and never looks back. It does not judge values: a lone surrogate
//! escape and a number beyond every float are JSON.

use crate::DEPTH_MAX;

/// What a character did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// The value goes on.
    More,
    /// The value ended with this character.
    End,
    /// The value, a number, had ended before this character, which is not part of it.
    EndedBefore,
    /// This character cannot stand here; the scanner is as it was.
    Broken,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Container {
    Object,
    Array,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Number {
    Sign,
    Zero,
    Integer,
    Point,
    Fraction,
    Exponent,
    ExponentSign,
    ExponentDigits,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Value,
    FirstItem,
    FirstKey,
    Key,
    Colon,
    AfterValue,
    Text {
        is_key: bool,
    },
    Escape {
        is_key: bool,
    },
    Hex {
        is_key: bool,
        left: u8,
    },
    Number(Number),
    /// What is left of `true`, `false` or `null`.
    Word(&'static str),
}

/// Follows one JSON value.
#[derive(Clone, Debug)]
pub(crate) struct Scanner {
    open: Vec<Container>,
    state: State,
}

/// JSON's white space.
pub(crate) fn is_space(c: char) -> bool {
    matches!(c, ' ' | '\t' | '\n' | '\r')
}

impl Scanner {
    /// A scanner in front of a value.
    pub(crate) fn new() -> Self {
        Self {
            open: Vec::new(),
            state: State::Value,
        }
    }

    /// Whether the next character is a string's own, not part of an escape.
    pub(crate) fn is_in_text(&self) -> bool {
        matches!(self.state, State::Text { .. })
    }

    /// Ends the value with the brackets that it lacks; `None` where it lacks more than those.
    pub(crate) fn close_all(&mut self) -> Option<String> {
        use Number::{ExponentDigits, Fraction, Integer, Zero};
        match self.state {
            State::AfterValue | State::FirstItem | State::FirstKey => {}
            State::Number(Zero | Integer | Fraction | ExponentDigits) => {}
            _ => return None,
        }
        let brackets = self.open.drain(..).rev().map(|container| match container {
            Container::Object => '}',
            Container::Array => ']',
        });
        Some(brackets.collect())
    }

    /// Takes the next character.
    pub(crate) fn push(&mut self, c: char) -> Step {
        let next = match self.state {
            State::Text { is_key } => return self.in_text(c, is_key),
            State::Escape { is_key } => match c {
                '"' | '\\' | '/' | 'b' | 'f' | 'n' | 'r' | 't' => State::Text { is_key },
                'u' => State::Hex { is_key, left: 4 },
                _ => return Step::Broken,
            },
            State::Hex { is_key, left } => match (c.is_ascii_hexdigit(), left) {
                (true, 1) => State::Text { is_key },
                (true, _) => State::Hex {
                    is_key,
                    left: left - 1,
                },
                (false, _) => return Step::Broken,
            },
            State::Number(number) => return self.in_number(c, number),
            State::Word(rest) => match rest.strip_prefix(c) {
                Some("") => return self.ended(),
                Some(rest) => State::Word(rest),
                None => return Step::Broken,
            },
            _ if is_space(c) => self.state,
            State::FirstItem if c == ']' => return self.close(),
            State::Value | State::FirstItem => return self.value(c),
            State::FirstKey if c == '}' => return self.close(),
            State::FirstKey | State::Key if c == '"' => State::Text { is_key: true },
            State::Colon if c == ':' => State::Value,
            State::AfterValue => return self.after(c),
            State::FirstKey | State::Key | State::Colon => return Step::Broken,
        };
        self.state = next;
        Step::More
    }

    fn in_text(&mut self, c: char, is_key: bool) -> Step {
        self.state = match c {
            '"' if is_key => State::Colon,
            '"' => return self.ended(),
            '\\' => State::Escape { is_key },
            '\0'..='\u{1f}' => return Step::Broken,
            _ => return Step::More,
        };
        Step::More
    }

    fn value(&mut self, c: char) -> Step {
        self.state = match c {
            '{' | '[' if self.open.len() == DEPTH_MAX => return Step::Broken,
            '{' => {
                self.open.push(Container::Object);
                State::FirstKey
            }
            '[' => {
                self.open.push(Container::Array);
                State::FirstItem
            }
            '"' => State::Text { is_key: false },
            '-' => State::Number(Number::Sign),
            '0' => State::Number(Number::Zero),
            '1'..='9' => State::Number(Number::Integer),
            't' => State::Word("rue"),
            'f' => State::Word("alse"),
            'n' => State::Word("ull"),
            _ => return Step::Broken,
        };
        Step::More
    }

    fn in_number(&mut self, c: char, number: Number) -> Step {
        use Number::{
            Exponent, ExponentDigits, ExponentSign, Fraction, Integer, Point, Sign, Zero,
        };
        let next = match (number, c) {
            (Sign, '0') => Zero,
            (Sign, '1'..='9') | (Integer, '0'..='9') => Integer,
            (Zero | Integer, '.') => Point,
            (Point | Fraction, '0'..='9') => Fraction,
            (Zero | Integer | Fraction, 'e' | 'E') => Exponent,
            (Exponent, '+' | '-') => ExponentSign,
            (Exponent | ExponentSign | ExponentDigits, '0'..='9') => ExponentDigits,
            (Sign | Point | Exponent | ExponentSign, _) => return Step::Broken,
            (Zero | Integer | Fraction | ExponentDigits, _) => return self.number_ended(c),
        };
        self.state = State::Number(next);
        Step::More
    }

    /// A number ended in front of this character.
    fn number_ended(&mut self, c: char) -> Step {
        if self.open.is_empty() {
            return Step::EndedBefore;
        }
        let before = self.state;
        self.state = State::AfterValue;
        let step = self.push(c);
        if step == Step::Broken {
            self.state = before;
        }
        step
    }

    fn after(&mut self, c: char) -> Step {
        self.state = match (self.open.last(), c) {
            (Some(Container::Object), ',') => State::Key,
            (Some(Container::Array), ',') => State::Value,
            (Some(Container::Object), '}') | (Some(Container::Array), ']') => return self.close(),
            _ => return Step::Broken,
        };
        Step::More
    }

    fn close(&mut self) -> Step {
        self.open.pop();
        self.ended()
    }

    /// A value ended with this character.
    fn ended(&mut self) -> Step {
        self.state = State::AfterValue;
        if self.open.is_empty() {
            Step::End
        } else {
            Step::More
        }
    }
}
