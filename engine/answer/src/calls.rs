//! Where is this text in a call's form?
//!
//! States, in the order of a call:
//! - `Text`: outside of calls.
//! - `Section`: the calls were opened; a call must follow.
//! - `Opened`: a call was opened; its object or its name must follow. Llama's answers begin here.
//! - `Name`, `Id`, `Separated`: a name outside of JSON (Mistral, DeepSeek, Kimi), Mistral's id, and
//!   DeepSeek's middle, which comes before the name or after it.
//! - `Bare`: arguments after such a name.
//! - `Object`: name and arguments in one object (Hermes, Llama, Mistral's array).
//! - `FirstItem`, `NextItem`, `AfterItem`: between the objects of an array, or of Llama's list.
//!
//! Until a call counts, all its text is kept; a refusal gives it back as content. Afterwards a
//! refusal ends the call. Both leave the character refused to `Text`.

use crate::ToolFormat;
use crate::arguments::Arguments;
use crate::head::{self, Head};
use crate::json::{Step, is_space};
use crate::lexer::{Item, Mark, Marker};
use crate::object::{Object, OtherKeys};
use crate::sink::Sink;

/// The most text that is held for a call that does not count yet. Names come first in practice; a
/// model that writes the arguments first gets this much room.
const HELD_MAX_BYTES: usize = 64 << 10;

#[derive(Debug)]
enum State {
    Text,
    Section,
    Opened,
    Name(String),
    Id(Head),
    Separated {
        head: String,
        name: String,
    },
    Bare {
        head: Head,
        fence: String,
        arguments: Arguments,
    },
    Object(Object),
    FirstItem,
    NextItem,
    AfterItem,
}

/// What a character or marker did to the state.
enum Taken {
    /// It belongs to the call's text.
    Yes,
    /// It cannot stand here.
    No,
    /// It ended the call's arguments or object.
    Ends,
}

/// Finds calls in an answer without its reasoning.
#[derive(Debug)]
pub(crate) struct Calls {
    format: Option<ToolFormat>,
    offered: Vec<String>,
    state: State,
    /// The call's text so far, until it counts.
    held: String,
    /// The call counts: the client knows of it.
    counts: bool,
    /// The object stands in an array.
    in_array: bool,
}

impl Calls {
    pub(crate) fn new(format: Option<ToolFormat>, offered: Vec<String>) -> Self {
        let begins_with_call = format == Some(ToolFormat::Llama3);
        Self {
            format,
            offered,
            state: if begins_with_call {
                State::Opened
            } else {
                State::Text
            },
            held: String::new(),
            counts: false,
            in_array: false,
        }
    }

    /// Takes what comes next.
    pub(crate) fn take(&mut self, item: Item<'_>, sink: &mut Sink) {
        match item {
            Item::Text(text) => self.text(text, sink),
            Item::Marker((_, text)) if self.is_in_text() => self.text(text, sink),
            Item::Marker(marker) => self.marker(marker, sink),
        }
        self.deliver(sink);
    }

    /// The answer is over: a call that does not count is text.
    pub(crate) fn finish(&mut self, sink: &mut Sink) {
        self.deliver(sink);
        self.give_up(sink);
    }

    fn is_in_text(&self) -> bool {
        match &self.state {
            State::Object(object) => object.is_in_text(),
            State::Bare { arguments, .. } => arguments.is_in_text(),
            _ => false,
        }
    }

    fn text(&mut self, text: &str, sink: &mut Sink) {
        for (at, c) in text.char_indices() {
            if matches!(self.state, State::Text) {
                return sink.content(&text[at..]);
            }
            match self.character(c) {
                Taken::Yes => self.keep(c.encode_utf8(&mut [0; 4]), sink),
                Taken::Ends => {
                    self.keep(c.encode_utf8(&mut [0; 4]), sink);
                    self.end(sink);
                }
                Taken::No => {
                    self.deliver(sink);
                    self.give_up(sink);
                    sink.content(c.encode_utf8(&mut [0; 4]));
                }
            }
        }
    }

    /// Text of a call was taken: it is held, unless the call counts.
    fn keep(&mut self, text: &str, sink: &mut Sink) {
        if self.counts {
            return;
        }
        if matches!(self.state, State::Text) {
            return self.held.clear();
        }
        self.held.push_str(text);
        if !self.count(sink) || self.held.len() > HELD_MAX_BYTES {
            self.give_up(sink);
        }
    }

    /// Lets the call count as soon as its name is known and its arguments have begun. `false`: it
    /// can never count.
    fn count(&mut self, sink: &mut Sink) -> bool {
        let (name, id) = match &mut self.state {
            State::Object(object) if object.arguments.is_begun() => (object.name.clone(), None),
            State::Bare {
                head, arguments, ..
            } if arguments.is_begun() => (Some(std::mem::take(&mut head.name)), head.id.take()),
            _ => return true,
        };
        let Some(name) = name else {
            return true;
        };
        let unmarked = self.format == Some(ToolFormat::Llama3);
        if unmarked && !self.offered.is_empty() && !self.offered.contains(&name) {
            return false;
        }
        sink.call(name, id);
        self.counts = true;
        self.held.clear();
        true
    }

    /// Hands out what arguments have come.
    fn deliver(&mut self, sink: &mut Sink) {
        let arguments = match &mut self.state {
            State::Object(object) => &mut object.arguments,
            State::Bare { arguments, .. } => arguments,
            _ => return,
        };
        if self.counts {
            sink.arguments(arguments.take());
        }
    }

    /// The call's arguments or its object ended.
    fn end(&mut self, sink: &mut Sink) {
        self.deliver(sink);
        if !self.counts {
            return;
        }
        sink.call_over();
        let is_list = self.in_array || self.format == Some(ToolFormat::Llama3);
        self.counts = false;
        self.state = if is_list {
            State::AfterItem
        } else {
            State::Text
        };
    }

    /// The form is broken, or the answer over.
    fn give_up(&mut self, sink: &mut Sink) {
        if self.counts {
            sink.call_over();
        }
        let held = std::mem::take(&mut self.held);
        if !held.is_empty() {
            sink.content(&held);
        }
        self.counts = false;
        self.in_array = false;
        self.state = State::Text;
    }

    fn character(&mut self, c: char) -> Taken {
        let format = self.format;
        match &mut self.state {
            State::Text => Taken::No,
            State::Section | State::FirstItem | State::NextItem | State::AfterItem
                if is_space(c) =>
            {
                Taken::Yes
            }
            State::Section => Taken::No,
            State::Opened => self.opened(c),
            State::Name(name) => match c {
                '{' if format == Some(ToolFormat::Mistral) => {
                    let head = Head::plain(name);
                    self.bare_with(head, c)
                }
                _ => kept(head::lengthen(name, c)),
            },
            State::Id(head) => kept(head::lengthen(head.id.get_or_insert_default(), c)),
            State::Separated { head, name } => match c {
                '{' => {
                    let head = Head::plain(if name.is_empty() { head } else { name });
                    self.bare_with(head, c)
                }
                '\n' if !name.is_empty() => {
                    let head = Head::plain(name);
                    self.bare(head)
                }
                _ if is_space(c) && name.is_empty() => Taken::Yes,
                _ => kept(head::lengthen(name, c)),
            },
            State::Bare {
                fence, arguments, ..
            } => {
                if arguments.is_untouched() && !matches!(c, '{' | '"') {
                    return kept(head::in_fence(fence, c));
                }
                if !matches!(fence.as_str(), "" | "```" | "```json") {
                    return Taken::No;
                }
                taken(arguments.push(c))
            }
            State::Object(object) => taken(object.push(c)),
            State::FirstItem | State::NextItem => match c {
                '{' => self.object(OtherKeys::Any, c),
                _ => Taken::No,
            },
            State::AfterItem => self.after_item(c),
        }
    }

    fn opened(&mut self, c: char) -> Taken {
        let is_mistral = self.format == Some(ToolFormat::Mistral);
        match (self.format, c) {
            _ if is_space(c) => Taken::Yes,
            (Some(ToolFormat::Hermes | ToolFormat::Mistral), '{') => self.object(OtherKeys::Any, c),
            (Some(ToolFormat::Llama3), '{') => self.object(OtherKeys::Known, c),
            (Some(ToolFormat::Hermes | ToolFormat::Llama3), _) => Taken::No,
            (_, '[') if is_mistral => {
                self.in_array = true;
                self.state = State::FirstItem;
                Taken::Yes
            }
            _ => {
                self.state = State::Name(String::new());
                self.character(c)
            }
        }
    }

    fn after_item(&mut self, c: char) -> Taken {
        match (self.in_array, c) {
            (true, ',') => {
                self.state = State::NextItem;
                Taken::Yes
            }
            (false, ';') => {
                self.state = State::Opened;
                Taken::Yes
            }
            (true, ']') => {
                self.in_array = false;
                self.state = State::Text;
                Taken::Yes
            }
            _ => Taken::No,
        }
    }

    fn object(&mut self, others: OtherKeys, c: char) -> Taken {
        let mut object = Object::new(others);
        let step = object.push(c);
        self.state = State::Object(object);
        taken(step)
    }

    /// The name is known; arguments follow. A call needs a name.
    fn bare(&mut self, head: Head) -> Taken {
        if head.name.is_empty() {
            return Taken::No;
        }
        self.state = State::Bare {
            head,
            fence: String::new(),
            arguments: Arguments::new(),
        };
        Taken::Yes
    }

    /// The arguments begin with this character.
    fn bare_with(&mut self, head: Head, c: char) -> Taken {
        match self.bare(head) {
            Taken::Yes => self.character(c),
            refused => refused,
        }
    }

    fn marker(&mut self, marker: Marker, sink: &mut Sink) {
        let (mark, text) = marker;
        match self.marked(mark) {
            Taken::Yes => return self.keep(text, sink),
            Taken::Ends => {
                self.keep("", sink);
                self.end(sink);
            }
            Taken::No => {
                if self.counts && mark >= Mark::Fence {
                    self.close_arguments();
                }
                self.deliver(sink);
                self.give_up(sink);
            }
        }
        self.between(marker, sink);
    }

    /// A model that closes its call has forgotten these brackets.
    fn close_arguments(&mut self) {
        match &mut self.state {
            State::Object(object) => object.arguments.close(),
            State::Bare { arguments, .. } => arguments.close(),
            _ => {}
        }
    }

    /// A marker inside of a call's form.
    fn marked(&mut self, mark: Mark) -> Taken {
        let format = self.format;
        match (&mut self.state, mark) {
            (State::Section, Mark::CallOpen) => self.state = State::Opened,
            (State::Opened, Mark::CallOpen) if format == Some(ToolFormat::Llama3) => {}
            (State::Name(name), Mark::CallId) => self.state = State::Id(Head::plain(name)),
            (State::Name(name), Mark::Separator) if format == Some(ToolFormat::DeepSeek) => {
                self.state = State::Separated {
                    head: std::mem::take(name),
                    name: String::new(),
                };
            }
            (State::Name(name), Mark::Separator) => {
                let is_kimi = format == Some(ToolFormat::Kimi);
                let head = if is_kimi {
                    Head::kimi(name)
                } else {
                    Head::plain(name)
                };
                return self.bare(head);
            }
            (State::Id(head), Mark::Separator) => {
                let head = std::mem::take(head);
                return self.bare(head);
            }
            (State::Separated { head, name }, Mark::CallClose | Mark::Fence) => {
                let head = Head::plain(if name.is_empty() { head } else { name });
                return match self.bare(head) {
                    Taken::Yes => self.marked(mark),
                    refused => refused,
                };
            }
            (
                State::Bare {
                    fence, arguments, ..
                },
                Mark::Fence | Mark::CallClose,
            ) if arguments.is_untouched() => {
                if mark == Mark::Fence && fence.is_empty() {
                    fence.push_str("```");
                } else {
                    arguments.set_empty();
                    return Taken::Ends;
                }
            }
            _ => return Taken::No,
        }
        Taken::Yes
    }

    /// A marker outside of calls.
    fn between(&mut self, marker: Marker, sink: &mut Sink) {
        let (mark, text) = marker;
        let state = match mark {
            Mark::SectionOpen => State::Section,
            Mark::CallOpen => State::Opened,
            _ if sink.closes(mark) => return,
            _ => return sink.content(text),
        };
        self.state = state;
        self.held.push_str(text);
    }
}

fn taken(step: Step) -> Taken {
    match step {
        Step::More => Taken::Yes,
        Step::End => Taken::Ends,
        Step::EndedBefore | Step::Broken => Taken::No,
    }
}

fn kept(is_kept: bool) -> Taken {
    if is_kept { Taken::Yes } else { Taken::No }
}
