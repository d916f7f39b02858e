//! Where does the text hold a marker?
//!
//! A marker may be cut anywhere, so the end of the text that could still become one is held back:
//! at most a marker's length. No marker is the beginning of another.

/// What a marker means. The closing ones are in the order in which they may follow a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Mark {
    /// Reasoning begins.
    ReasoningOpen,
    /// Reasoning ends.
    ReasoningClose,
    /// Calls begin.
    SectionOpen,
    /// A call begins.
    CallOpen,
    /// The call's id follows.
    CallId,
    /// What stands between a call's parts.
    Separator,
    /// A code fence around arguments.
    Fence,
    /// A call ends.
    CallClose,
    /// The calls end.
    SectionClose,
}

/// A marker: its meaning and its text.
pub(crate) type Marker = (Mark, &'static str);

/// A run of text without markers, or a marker.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Item<'a> {
    /// Text, not empty.
    Text(&'a str),
    /// A marker.
    Marker(Marker),
}

/// Finds markers in text that comes in pieces.
#[derive(Debug)]
pub(crate) struct Lexer {
    markers: Vec<Marker>,
    /// What may be the beginning of a marker.
    held: String,
}

impl Lexer {
    pub(crate) fn new(markers: Vec<Marker>) -> Self {
        Self {
            markers,
            held: String::new(),
        }
    }

    /// Adds text; `take` gets what is certain.
    pub(crate) fn push(&mut self, text: &str, mut take: impl FnMut(Item<'_>)) {
        let mut rest = text;
        while let Some(next) = rest.chars().next() {
            if self.held.is_empty() && !self.opens_marker(next) {
                let plain = rest.find(|c| self.opens_marker(c)).unwrap_or(rest.len());
                take(Item::Text(&rest[..plain]));
                rest = &rest[plain..];
                continue;
            }
            self.held.push(next);
            rest = &rest[next.len_utf8()..];
            self.settle(&mut take);
        }
    }

    /// The text is over: what was held is text.
    pub(crate) fn finish(&mut self, take: impl FnOnce(Item<'_>)) {
        let held = std::mem::take(&mut self.held);
        if !held.is_empty() {
            take(Item::Text(&held));
        }
    }

    fn opens_marker(&self, c: char) -> bool {
        self.markers.iter().any(|(_, text)| text.starts_with(c))
    }

    /// Gives away what is held as far as it is certain.
    fn settle(&mut self, take: &mut impl FnMut(Item<'_>)) {
        while !self.held.is_empty() {
            let mut begun = self.markers.iter().filter(|m| m.1.starts_with(&*self.held));
            match begun.next() {
                Some(&marker) if marker.1 == self.held => {
                    self.held.clear();
                    take(Item::Marker(marker));
                }
                Some(_) => return,
                None => {
                    let first = self.held.remove(0);
                    take(Item::Text(first.encode_utf8(&mut [0; 4])));
                }
            }
        }
    }
}
