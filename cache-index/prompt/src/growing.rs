//! What need not be made again when messages are added to a prompt that was made before?
//!
//! Where a template only appends (`append`), the prompt of a conversation and of its continuation
//! are the same up to the end of the last message. So what follows that is made alone: the new
//! messages are rendered behind the first one, as the template would meet them behind all; the
//! text since the last control token before them, which stands alone as well, is tokenized with
//! them. Everything else of the prompt is its tokens of last time.
//!
//! This way never refuses and never guesses: whatever it is not sure of (a result joined to the
//! results before it, a call that cannot be found, an error) it leaves to [`PromptBuilder`]'s full
//! way, which is its slow twin and says what is wrong.

use std::borrow::Borrow;

use minijinja::Value;
use serde_json::Value as Json;

use crate::answers::{Cut, Progress};
use crate::build::{ChatInput, ChatTokens, PromptBuilder};
use crate::error::PromptError;
use crate::segments::SegmentCache;
use crate::template::{Rendered, Template};

/// A conversation whose prompt was made, ready to be continued.
#[derive(Debug, Clone)]
pub struct Begun {
    /// How many messages of the request it covers.
    messages: usize,
    /// What the template was given as the first message, and as tools.
    first: Value,
    tools: Value,
    /// Whether the tools' place in the conversation is settled.
    is_introduced: bool,
    /// The text from the cut to the end of the last message.
    carry: String,
    cut: Cut,
}

impl Begun {
    /// How many messages of the request it covers.
    pub fn messages(&self) -> usize {
        self.messages
    }

    /// How many of the prompt's tokens its continuations share.
    pub fn tokens(&self) -> usize {
        self.cut.tokens
    }
}

impl PromptBuilder {
    /// The same as [`chat_with_answers`](Self::chat_with_answers), and where the template allows
    /// it, what continuing the conversation takes.
    pub fn chat_begun<M: Borrow<Json>>(
        &self,
        input: &ChatInput<'_, M>,
        known: &SegmentCache,
    ) -> Result<(ChatTokens, Option<Begun>), PromptError> {
        let template = self.template().ok_or(PromptError::NoTemplate)?;
        let messages: Vec<&Json> = input.messages.iter().map(Borrow::borrow).collect();
        let rendered = template.render_parts(&input.of(&messages))?;
        let mut tokens = Vec::with_capacity(rendered.text.len() / 3);
        let mut progress = Progress::new(known);
        progress.settled = rendered.settled;
        self.walk(
            template,
            &rendered.text,
            known,
            (&mut tokens, &mut progress),
            |_, _, _| true,
        );
        let begun = begun(input.messages.len(), &rendered, &mut progress);
        let answers = progress.answers;
        Ok((ChatTokens { tokens, answers }, begun))
    }

    /// The prompt of a conversation that continues one that was begun: `input` has the same tools
    /// and variables, and its first [`Begun::messages`] messages are the same; `before` are that
    /// prompt's tokens. None where only the full way can tell.
    pub fn chat_grown<M: Borrow<Json>>(
        &self,
        begun: &Begun,
        before: &[u32],
        input: &ChatInput<'_, M>,
        known: &SegmentCache,
    ) -> Option<(ChatTokens, Begun)> {
        let template = self.template()?;
        if !begun.is_introduced {
            return None;
        }
        let (earlier, new) = input.messages.split_at_checked(begun.messages)?;
        let new: Vec<&Json> = new.iter().map(Borrow::borrow).collect();
        let earlier = earlier.iter().rev().map(Borrow::borrow);
        let rendered = self.rendered_behind(template, begun, (earlier, &new), &input.of(&new))?;
        let text = [&*begun.carry, &*rendered.text].concat();
        let mut tokens = Vec::with_capacity(begun.cut.tokens + text.len() / 3);
        tokens.extend_from_slice(before.get(..begun.cut.tokens)?);
        let mut progress = Progress::new(known);
        progress.prefix = begun.cut.prefix.clone();
        progress.answers = begun.cut.answers;
        progress.settled = Some(begun.carry.len() + rendered.end);
        self.walk(
            template,
            &text,
            known,
            (&mut tokens, &mut progress),
            |_, _, _| true,
        );
        let cut = progress.cut.take()?;
        let begun = Begun {
            messages: input.messages.len(),
            first: begun.first.clone(),
            tools: begun.tools.clone(),
            is_introduced: true,
            carry: text[cut.offset..progress.settled?].to_owned(),
            cut,
        };
        let answers = progress.answers;
        Some((ChatTokens { tokens, answers }, begun))
    }

    /// What the template writes behind the messages of `begun`.
    fn rendered_behind<'m>(
        &self,
        template: &Template,
        begun: &Begun,
        (earlier, new): (impl Iterator<Item = &'m Json>, &[&'m Json]),
        input: &ChatInput<'_, &Json>,
    ) -> Option<Tail> {
        let normal = template.normaliser().more(earlier, new)?;
        let expected = normal.len() + 2;
        let mut messages = Vec::with_capacity(normal.len() + 1);
        messages.push(begun.first.clone());
        messages.extend(normal);
        let rendered = template
            .render_values(messages, begun.tools.clone(), input)
            .ok()?;
        // One boundary before each message and one behind the last.
        let (at, end) = match rendered.boundaries[..] {
            [_, at, .., end] if rendered.boundaries.len() == expected => (at, end),
            [_, at] if expected == 2 => (at, at),
            _ => return None,
        };
        Some(Tail {
            text: rendered.text[at..].to_owned(),
            end: end - at,
        })
    }
}

/// What stands behind a known beginning.
struct Tail {
    text: String,
    /// The end of the last message in it.
    end: usize,
}

fn begun(messages: usize, rendered: &Rendered, progress: &mut Progress) -> Option<Begun> {
    let settled = rendered.settled?;
    let cut = progress.cut.take()?;
    Some(Begun {
        messages,
        first: rendered.first.clone()?,
        tools: rendered.tools.clone(),
        is_introduced: rendered.is_introduced,
        carry: rendered.text[cut.offset..settled].to_owned(),
        cut,
    })
}
