//! What of a call's arguments may the client have already?
//!
//! The arguments are an object, or a JSON string that holds an object's text, or `null`. What comes
//! out is the object's text, and always the beginning of valid JSON.

use crate::json::{Scanner, Step, is_space};

#[derive(Clone, Debug)]
enum Form {
    /// Nothing but white space yet.
    Before,
    /// The object itself.
    Plain,
    /// A string that holds the object.
    Quoted(Unquote),
    /// What is left of `null`.
    Null(&'static str),
    Complete,
}

/// Follows a call's arguments.
#[derive(Clone, Debug)]
pub(crate) struct Arguments {
    form: Form,
    scanner: Scanner,
    begun: bool,
    /// The object has ended; in a string, white space may follow.
    over: bool,
    /// What was not taken yet.
    out: String,
}

impl Arguments {
    /// In front of the value.
    pub(crate) fn new() -> Self {
        Self {
            form: Form::Before,
            scanner: Scanner::new(),
            begun: false,
            over: false,
            out: String::new(),
        }
    }

    /// Whether it is certain that this is an object.
    pub(crate) fn is_begun(&self) -> bool {
        self.begun
    }

    /// Whether nothing but white space has come.
    pub(crate) fn is_untouched(&self) -> bool {
        matches!(self.form, Form::Before)
    }

    /// Closes the object where only its brackets are missing.
    pub(crate) fn close(&mut self) {
        if let Some(brackets) = self.scanner.close_all() {
            self.out.push_str(&brackets);
            self.form = Form::Complete;
        }
    }

    /// Whether the next character is a string's own, not part of an escape.
    pub(crate) fn is_in_text(&self) -> bool {
        match self.form {
            Form::Plain | Form::Quoted(Unquote::Plain) => self.scanner.is_in_text(),
            Form::Quoted(_) | Form::Before | Form::Null(_) | Form::Complete => false,
        }
    }

    /// Takes what has come out.
    pub(crate) fn take(&mut self) -> String {
        std::mem::take(&mut self.out)
    }

    /// The call has no arguments.
    pub(crate) fn set_empty(&mut self) {
        self.begun = true;
        self.over = true;
        self.form = Form::Complete;
        self.out.push_str("{}");
    }

    /// Takes the next character.
    pub(crate) fn push(&mut self, c: char) -> Step {
        match &mut self.form {
            Form::Before if is_space(c) => Step::More,
            Form::Before => self.begin(c),
            Form::Plain => match self.object(c) {
                Step::End => {
                    self.form = Form::Complete;
                    Step::End
                }
                step => step,
            },
            Form::Quoted(unquote) => match unquote.push(c) {
                Unquoted::Nothing => Step::More,
                Unquoted::Char(c) => self.quoted(c),
                Unquoted::End => self.unquoted(),
                Unquoted::Broken => Step::Broken,
            },
            Form::Null(rest) => match rest.strip_prefix(c) {
                Some("") => {
                    self.set_empty();
                    Step::End
                }
                Some(rest) => {
                    self.form = Form::Null(rest);
                    Step::More
                }
                None => Step::Broken,
            },
            Form::Complete => Step::Broken,
        }
    }

    fn begin(&mut self, c: char) -> Step {
        self.form = match c {
            '{' => Form::Plain,
            '"' => Form::Quoted(Unquote::Plain),
            'n' => Form::Null("ull"),
            _ => return Step::Broken,
        };
        if c == '{' { self.object(c) } else { Step::More }
    }

    /// The object's own text.
    fn object(&mut self, c: char) -> Step {
        if c < ' ' && self.scanner.is_in_text() {
            self.out.push_str(&escape(c));
            return Step::More;
        }
        let step = self.scanner.push(c);
        if matches!(step, Step::More | Step::End) {
            self.begun = true;
            self.out.push(c);
        }
        step
    }

    /// A character of the text that a string holds.
    fn quoted(&mut self, c: char) -> Step {
        if is_space(c) && (self.over || !self.begun) {
            return Step::More;
        }
        if self.over || (!self.begun && c != '{') {
            return Step::Broken;
        }
        match self.object(c) {
            Step::Broken | Step::EndedBefore => Step::Broken,
            step => {
                self.over = step == Step::End;
                Step::More
            }
        }
    }

    /// The string that held the object has ended.
    fn unquoted(&mut self) -> Step {
        match (self.begun, self.over) {
            (false, _) => self.set_empty(),
            (true, true) => self.form = Form::Complete,
            (true, false) => return Step::Broken,
        }
        Step::End
    }
}

/// A control character as JSON writes it in a string.
fn escape(c: char) -> String {
    match c {
        '\n' => "\\n".into(),
        '\r' => "\\r".into(),
        '\t' => "\\t".into(),
        other => format!("\\u{:04x}", u32::from(other)),
    }
}

/// What a character of a JSON string stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Unquoted {
    Nothing,
    Char(char),
    End,
    Broken,
}

/// Decodes a JSON string. Control characters stand for themselves.
#[derive(Clone, Copy, Debug)]
enum Unquote {
    Plain,
    Escape,
    Hex {
        value: u32,
        left: u8,
        high: Option<u32>,
    },
    /// The second half of a surrogate pair must follow: its `\`, then its `u`.
    Pair {
        high: u32,
        backslash: bool,
    },
}

impl Unquote {
    fn push(&mut self, c: char) -> Unquoted {
        match *self {
            Self::Plain => match c {
                '"' => Unquoted::End,
                '\\' => self.go(Self::Escape),
                _ => Unquoted::Char(c),
            },
            Self::Escape => self.escape(c),
            Self::Hex { value, left, high } => match c.to_digit(16) {
                Some(digit) if left > 1 => self.go(Self::Hex {
                    value: value * 16 + digit,
                    left: left - 1,
                    high,
                }),
                Some(digit) => self.unit(value * 16 + digit, high),
                None => Unquoted::Broken,
            },
            Self::Pair { high, backslash } => match (backslash, c) {
                (false, '\\') => self.go(Self::Pair {
                    high,
                    backslash: true,
                }),
                (true, 'u') => self.go(Self::Hex {
                    value: 0,
                    left: 4,
                    high: Some(high),
                }),
                _ => Unquoted::Broken,
            },
        }
    }

    fn go(&mut self, next: Self) -> Unquoted {
        *self = next;
        Unquoted::Nothing
    }

    fn escape(&mut self, c: char) -> Unquoted {
        let plain = match c {
            '"' | '\\' | '/' => c,
            'b' => '\u{8}',
            'f' => '\u{c}',
            'n' => '\n',
            'r' => '\r',
            't' => '\t',
            'u' => {
                return self.go(Self::Hex {
                    value: 0,
                    left: 4,
                    high: None,
                });
            }
            _ => return Unquoted::Broken,
        };
        *self = Self::Plain;
        Unquoted::Char(plain)
    }

    /// A whole UTF-16 unit.
    fn unit(&mut self, unit: u32, high: Option<u32>) -> Unquoted {
        let code = match (high, unit) {
            (None, 0xd800..=0xdbff) => {
                return self.go(Self::Pair {
                    high: unit,
                    backslash: false,
                });
            }
            (None, _) => unit,
            (Some(high), 0xdc00..=0xdfff) => 0x1_0000 + ((high - 0xd800) << 10) + (unit - 0xdc00),
            (Some(_), _) => return Unquoted::Broken,
        };
        *self = Self::Plain;
        char::from_u32(code).map_or(Unquoted::Broken, Unquoted::Char)
    }
}
