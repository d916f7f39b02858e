//! Which tool calls and which reasoning does an answer's text hold?
