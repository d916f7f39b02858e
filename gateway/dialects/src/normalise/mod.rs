//! What of a prompt changes without meaning anything, and how is it spelled instead?
//!
//! Clients spell one conversation in several ways from turn to turn: content as a string or as a
//! list of one text, marks for another provider's cache, keys of a tool's schema in the order of a
//! hash table, a line with a new number at the very beginning. A cache of prefixes sees another
//! prompt each time. So before a prompt is hashed, and before a node sees it, such things get one
//! spelling ([`normalise`]), each by a switch of its own ([`Options`]): `messages` has those of
//! messages, `tools` and `arguments` those of tools. What a user wrote is never touched.
//!
//! The prompt is changed in place, without copying a text, and the caller learns what changed: a
//! body that needed nothing is passed on byte for byte.
//!
//! Left out on purpose: content that is absent, null or empty. Clients differ in it, and templates
//! do not.

mod arguments;
mod messages;
mod tools;

use serde_json::Value;

use crate::turn::{ChatPrompt, PromptInput, Turn, TurnBody};

/// Which spellings are made one. All are by default.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(
    clippy::struct_excessive_bools,
    reason = "each is a switch of its own in the configuration"
)]
pub struct Options {
    /// Claude Code's billing line, the first of the system prompt, is left out.
    pub billing_line: bool,
    /// Content that is a list of texts becomes the one text that they make.
    pub content: bool,
    /// `cache_control` and `prompt_cache_breakpoint` are left out.
    pub cache_marks: bool,
    /// The keys of a tool's definition and schema are put in one order.
    pub schema_order: bool,
    /// The arguments of earlier calls are spelled without blanks and needless escapes.
    pub arguments: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            billing_line: true,
            content: true,
            cache_marks: true,
            schema_order: true,
            arguments: true,
        }
    }
}

/// What of a prompt is spelled otherwise than the client did.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Changed {
    /// Its messages.
    pub messages: bool,
    /// Its tools.
    pub tools: bool,
}

impl Changed {
    /// Whether anything is.
    pub fn any(self) -> bool {
        self.messages || self.tools
    }
}

/// Gives a prompt its one spelling.
pub fn normalise(prompt: &mut ChatPrompt, options: Options) -> Changed {
    Changed {
        messages: messages::normalise(&mut prompt.messages, options),
        tools: prompt
            .tools
            .as_mut()
            .is_some_and(|tools| tools.edit(|tools| tools::normalise(tools, options))),
    }
}

/// Gives one message its spelling: an answer, as the next turn's prompt will have it.
pub fn normalise_message(message: &mut Value, options: Options) {
    message_alone(message, options);
}

/// The same; whether anything changed. A billing line stays.
pub(crate) fn message_alone(message: &mut Value, options: Options) -> bool {
    let message = message.as_object_mut();
    message.is_some_and(|message| messages::normalise_message(message, options))
}

/// Gives tools their spelling; whether anything changed.
pub(crate) fn tools_alone(tools: &mut Value, options: Options) -> bool {
    tools::normalise(tools, options)
}

pub(crate) use messages::{Billing, normalise as messages_alone, without_billing};

impl Turn<'_> {
    /// Gives the turn's prompt its one spelling, which its node's body then has too.
    pub fn normalise(&mut self, options: Options) -> Changed {
        let PromptInput::Chat(chat) = &mut self.prompt else {
            return Changed::default();
        };
        let changed = normalise(chat, options);
        if changed.any() {
            let body = std::mem::replace(&mut self.body, TurnBody::Chat(serde_json::Map::new()));
            self.body = match body {
                TurnBody::Same(fields) => TurnBody::Normalised(fields, changed),
                other => other,
            };
        }
        changed
    }
}

#[cfg(test)]
mod tests;
