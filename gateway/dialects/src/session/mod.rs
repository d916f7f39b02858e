//! Which session does a request say it belongs to?
//!
//! Clients say it in many places: headers, fields of the body, the id of the response that they
//! continue. One [`Table`] lists all of these signals in their order of trust (`rows`); the first
//! one that the request has decides, and nothing below it is looked at. So an id that cannot be
//! used (too long, not printable, two different values) gives no session, rather than the session
//! of a weaker signal that may cover other conversations as well: the caller then goes by the
//! conversation's own beginning ([`fingerprint()`]). An empty value says nothing and counts as absent.
//!
//! The id of a chain (`previous_response_id`, `conversation`) is no session by itself: the caller
//! knows whose session the chain began as. Ids are claims: scoping them by tenant is the caller's.

mod fingerprint;
mod rows;

use std::borrow::Cow;

use http::HeaderMap;
use serde_json::value::RawValue;

use crate::answer::Continues;
use crate::{Dialect, Fields};
pub use fingerprint::fingerprint;
use rows::{ByDefault, Chain, Place, ROWS, Row};

/// Longest id taken; a longer one is no id but data. Clients send up to 255 characters.
pub const ID_CHARS_MAX: usize = 255;

/// The signals in use, in their order.
#[derive(Debug, Clone)]
pub struct Table {
    entries: Vec<Entry>,
    /// Headers that the pattern of names must not take.
    excluded: Vec<String>,
}

#[derive(Debug, Clone)]
enum Entry {
    Known(&'static Row),
    /// A header that the operator named.
    Own(String),
}

/// What a request says about its session; `'t` is the table's life.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Found<'t> {
    /// It names its session.
    Session(Signal<'t>),
    /// It continues a response or a conversation, whose session is this one's too.
    Chain(Continues),
    /// The signal of this row is there, but its id cannot be used.
    Unusable(&'t str),
    /// It says nothing.
    Nothing,
}

/// A session's name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Signal<'t> {
    /// The id; a sub-agent that shares its session's id has its own appended.
    pub id: String,
    /// The row of the table that it comes from.
    pub source: &'t str,
    /// The session that started this one, of a sub-agent.
    pub parent: Option<String>,
}

/// What an operator may change about the table.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Choices {
    /// Names of more headers, tried right behind `x-session-affinity`, in this order.
    pub headers: Vec<String>,
    /// Rows to use that are off by default.
    pub enable: Vec<String>,
    /// Rows, or headers that the pattern of names would take, to leave out.
    pub disable: Vec<String>,
}

/// A name in [`Choices`] that is no header, or no row.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// No header can have this name.
    #[error("'{0}' cannot be the name of a header")]
    Header(String),
    /// The table has no such row.
    #[error("'{0}' is no signal; there are {known}", known = Table::known())]
    Row(String),
}

impl Default for Table {
    fn default() -> Self {
        let is_on = |row: &&Row| row.by_default == ByDefault::On;
        Self {
            entries: ROWS.iter().filter(is_on).map(Entry::Known).collect(),
            excluded: Vec::new(),
        }
    }
}

impl Table {
    /// The table as an operator wants it.
    pub fn new(choices: &Choices) -> Result<Self, Refused> {
        let lower = |names: &[String]| -> Vec<String> {
            names.iter().map(|name| name.to_ascii_lowercase()).collect()
        };
        let Choices {
            headers,
            enable,
            disable,
        } = choices;
        let (headers, enable, disable) = (lower(headers), lower(enable), lower(disable));
        let is_header = |name: &&String| http::HeaderName::from_bytes(name.as_bytes()).is_ok();
        if let Some(name) = headers.iter().find(|name| !is_header(name)) {
            return Err(Refused::Header(name.clone()));
        }
        let is_row = |name: &str| ROWS.iter().any(|row| row.name == name);
        let unknown = |name: &&String| !is_row(name);
        let unknown_header = |name: &&String| !is_row(name) && !is_session_header(name);
        let mistaken = enable.iter().find(unknown);
        if let Some(name) = mistaken.or_else(|| disable.iter().find(unknown_header)) {
            return Err(Refused::Row(name.clone()));
        }
        let is_named = |names: &[String], row: &Row| names.iter().any(|name| row.name == name);
        let mut entries: Vec<Entry> = ROWS
            .iter()
            .filter(|row| row.by_default == ByDefault::On || is_named(&enable, row))
            .filter(|row| !is_named(&disable, row))
            .map(Entry::Known)
            .collect();
        let is_first =
            |entry: &Entry| matches!(entry, Entry::Known(row) if row.name == ROWS[0].name);
        let behind_first = usize::from(entries.first().is_some_and(is_first));
        entries.splice(
            behind_first..behind_first,
            headers.into_iter().map(Entry::Own),
        );
        Ok(Self {
            entries,
            excluded: disable,
        })
    }

    /// The names of all signals that there are, for an operator.
    pub fn known() -> String {
        let names: Vec<&str> = ROWS.iter().map(|row| row.name).collect();
        names.join(", ")
    }

    /// The names of the signals in use, in their order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.entries.iter().map(|entry| match entry {
            Entry::Known(row) => row.name,
            Entry::Own(name) => name,
        })
    }

    /// What a request says about its session.
    pub fn find(&self, dialect: Dialect, headers: &HeaderMap, fields: &Fields<'_>) -> Found<'_> {
        for entry in &self.entries {
            let row = match entry {
                Entry::Known(row) => row,
                Entry::Own(name) => match header(headers, name) {
                    Value::Absent => continue,
                    Value::Unusable => return Found::Unusable(name),
                    Value::Id(id) => return Found::Session(Signal::of(id, name)),
                },
            };
            return match self.read(row, headers, fields) {
                Value::Absent => continue,
                Value::Unusable => Found::Unusable(row.name),
                Value::Id(id) => match row.place {
                    Place::Chain(_, chain) if dialect == Dialect::Responses => {
                        Found::Chain(match chain {
                            Chain::Response => Continues::Response(id),
                            Chain::Conversation => Continues::Conversation(id),
                        })
                    }
                    _ => with_relatives(row, id, headers),
                },
            };
        }
        Found::Nothing
    }

    fn read(&self, row: &Row, headers: &HeaderMap, fields: &Fields<'_>) -> Value {
        match row.place {
            Place::Header => header(headers, row.name),
            Place::HeaderPattern => self.pattern(headers),
            Place::HeaderMember(name, member) => match header_text(headers, name) {
                Some(text) => object_member(text.as_bytes(), member),
                None => Value::Absent,
            },
            Place::HeaderUpTo(name, end) => match header_text(headers, name) {
                Some(text) => checked(text.split(end).next().unwrap_or_default()),
                None => Value::Absent,
            },
            Place::Field(name) => field(fields, name),
            Place::Member(name, member) => match fields.get(name) {
                Some(raw) => object_member(raw.get().as_bytes(), member),
                None => Value::Absent,
            },
            Place::UserId => user_id(fields),
            // `conversation` may be an object with the id.
            Place::Chain(name, _) => match fields.get(name) {
                Some(raw) if raw.get().starts_with('{') => {
                    object_member(raw.get().as_bytes(), "id")
                }
                Some(raw) => string(raw),
                None => Value::Absent,
            },
        }
    }

    /// `x-<name>-session-id`; of several, the first by name, so that their order never matters.
    fn pattern(&self, headers: &HeaderMap) -> Value {
        let taken = |name: &&str| {
            is_session_header(name) && !self.excluded.iter().any(|excluded| excluded == name)
        };
        let name = headers
            .keys()
            .map(http::HeaderName::as_str)
            .filter(taken)
            .min();
        name.map_or(Value::Absent, |name| header(headers, name))
    }
}

/// Whether a header has the form that many clients use for a session's id. A parent's id has it
/// too, and is another session's.
fn is_session_header(name: &str) -> bool {
    name.strip_prefix("x-")
        .and_then(|rest| rest.strip_suffix("-session-id"))
        .is_some_and(|middle| !middle.is_empty() && !middle.contains("parent"))
}

/// An id as a request has it.
#[derive(Debug, PartialEq, Eq)]
enum Value {
    Absent,
    Unusable,
    Id(String),
}

/// 1 to 255 visible ASCII characters; nothing at all says nothing.
fn checked(id: &str) -> Value {
    match id.len() {
        0 => Value::Absent,
        1..=ID_CHARS_MAX if id.bytes().all(|byte| byte.is_ascii_graphic()) => {
            Value::Id(id.to_owned())
        }
        _ => Value::Unusable,
    }
}

fn header(headers: &HeaderMap, name: &str) -> Value {
    let mut values = headers.get_all(name).iter();
    let Some(first) = values.next() else {
        return Value::Absent;
    };
    if values.any(|value| value != first) {
        return Value::Unusable;
    }
    // What is not ASCII is not UTF-8 to this method, and unusable either way.
    first.to_str().map_or(Value::Unusable, checked)
}

fn header_text<'h>(headers: &'h HeaderMap, name: &str) -> Option<&'h str> {
    headers.get(name).and_then(|value| value.to_str().ok())
}

fn string(raw: &RawValue) -> Value {
    match serde_json::from_str::<Cow<'_, str>>(raw.get()) {
        Ok(id) => checked(&id),
        Err(_) => Value::Unusable,
    }
}

fn field(fields: &Fields<'_>, name: &str) -> Value {
    fields.get(name).map_or(Value::Absent, string)
}

/// A member of an object; what is no object says nothing.
fn object_member(json: &[u8], member: &str) -> Value {
    Fields::parse(json).map_or(Value::Absent, |object| field(&object, member))
}

/// The session in Claude Code's `metadata.user_id`: a member of a JSON text, or, in older versions,
/// what follows `_session_`. Any other user id names a user, who may have many sessions.
fn user_id(fields: &Fields<'_>) -> Value {
    let Some(raw) = fields.get("metadata") else {
        return Value::Absent;
    };
    let Ok(metadata) = Fields::parse(raw.get().as_bytes()) else {
        return Value::Absent;
    };
    let text = metadata
        .get("user_id")
        .and_then(|raw| serde_json::from_str::<String>(raw.get()).ok());
    match text.as_deref() {
        Some(text) if text.starts_with('{') => object_member(text.as_bytes(), "session_id"),
        Some(text) if text.starts_with("user_") => match text.rsplit_once("_session_") {
            Some((_, id)) => checked(id),
            None => Value::Absent,
        },
        _ => Value::Absent,
    }
}

impl<'t> Signal<'t> {
    fn of(id: String, source: &'t str) -> Self {
        Self {
            id,
            source,
            parent: None,
        }
    }
}

/// The session with its sub-agent's id and its parent, where the headers have them.
fn with_relatives(row: &'static Row, session: String, headers: &HeaderMap) -> Found<'static> {
    let read = |name: Option<&str>| name.map_or(Value::Absent, |name| header(headers, name));
    let parent = match read(row.parent) {
        Value::Id(parent) => Some(parent),
        Value::Absent | Value::Unusable => None,
    };
    let agent = match read(row.child) {
        Value::Unusable => return Found::Unusable(row.name),
        // The main agent of some clients has the session's own id.
        Value::Id(agent) => Some(agent).filter(|agent| *agent != session),
        Value::Absent => None,
    };
    let signal = match agent {
        // Agents' ids count within their session; the session itself started the first level.
        Some(agent) => Signal {
            id: format!("{session}/{agent}"),
            parent: Some(match parent {
                Some(parent) => format!("{session}/{parent}"),
                None => session,
            }),
            source: row.name,
        },
        None => Signal {
            // Where agents count within their session, a parent without a child says nothing.
            parent: parent.filter(|parent| row.child.is_none() && *parent != session),
            ..Signal::of(session, row.name)
        },
    };
    Found::Session(signal)
}

#[cfg(test)]
mod tests;
