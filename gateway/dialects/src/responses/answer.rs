//! How does a node's answer become a response?
//!
//! States of a stream: *unbegun* (`response.created` not yet told), *begun* (items open and close,
//! see `output`), *over* (`response.completed`, `response.incomplete`, or `error` and
//! `response.failed`).

use std::sync::Arc;

use serde_json::Value;

use super::events::Sequence;
use super::node;
use super::output::{Output, Stage};
use super::plan::{Plan, Status};
use crate::answer::{End, Malformed, Stored, Translation, Usage};
use crate::error::ApiError;

/// One answer on its way.
pub(super) struct Answer {
    plan: Arc<Plan>,
    begun: bool,
    sequence: Sequence,
    output: Output,
    /// The response object as the client read it last.
    told: Vec<u8>,
}

impl Answer {
    pub(super) fn new(plan: Arc<Plan>) -> Self {
        Self {
            plan,
            begun: false,
            sequence: Sequence::default(),
            output: Output::default(),
            told: Vec::new(),
        }
    }

    /// Tells that there is a response.
    fn open(&mut self, out: &mut Vec<u8>) {
        if std::mem::replace(&mut self.begun, true) {
            return;
        }
        let mut response = Vec::new();
        self.plan.write(&mut response, &Status::InProgress, b"");
        for kind in ["response.created", "response.in_progress"] {
            self.sequence.event(out, kind, |members| {
                members.json("response", &response);
            });
        }
    }

    fn stage<'s>(&'s mut self, out: &'s mut Vec<u8>) -> (Stage<'s>, &'s mut Output) {
        let stage = Stage {
            plan: &self.plan,
            out,
            sequence: &mut self.sequence,
        };
        (stage, &mut self.output)
    }

    fn take(&mut self, json: &[u8], out: &mut Vec<u8>) -> Result<bool, Malformed> {
        let Some(mut choice) = node::choice(json)? else {
            return Ok(false);
        };
        let (mut stage, output) = self.stage(out);
        output.add(&mut stage, &mut choice)?;
        Ok(true)
    }

    /// Closes all items and tells the response as it stands in the end.
    fn finish(&mut self, end: &End, out: &mut Vec<u8>) {
        let (mut stage, output) = self.stage(out);
        let (finish, items) = output.end(&mut stage);
        let (kind, status) = match finish.incomplete() {
            None => ("response.completed", Status::Completed(end)),
            Some(reason) => ("response.incomplete", Status::Incomplete(reason, end)),
        };
        self.tell(kind, &status, &items, out);
    }

    /// Appends an event with the response object.
    fn tell(&mut self, kind: &str, status: &Status<'_>, items: &[u8], out: &mut Vec<u8>) {
        self.told.clear();
        self.plan.write(&mut self.told, status, items);
        let told = &self.told;
        self.sequence.event(out, kind, |members| {
            members.json("response", told);
        });
    }
}

impl Translation for Answer {
    fn fresh(&self) -> Box<dyn Translation> {
        Box::new(Self::new(Arc::clone(&self.plan)))
    }

    fn begin(&mut self, _expected: Usage) {}

    fn chunk(&mut self, json: &[u8], out: &mut Vec<u8>) -> Result<(), Malformed> {
        self.open(out);
        self.take(json, out).map(drop)
    }

    fn end(&mut self, end: &End, out: &mut Vec<u8>) {
        self.open(out);
        self.finish(end, out);
    }

    fn fail(&mut self, error: &ApiError, so_far: Usage, out: &mut Vec<u8>) {
        self.open(out);
        self.sequence.event(out, "error", |members| {
            match error.kind.code() {
                Some(code) => members.text("code", code),
                None => members.json("code", b"null"),
            };
            members.text("message", &error.message);
            match &error.param {
                Some(param) => members.text("param", param),
                None => members.json("param", b"null"),
            };
        });
        let items = self.output.so_far();
        let status = Status::Failed(error, so_far);
        self.tell("response.failed", &status, &items, out);
    }

    fn cancel(&mut self, so_far: Usage, out: &mut Vec<u8>) {
        self.open(out);
        let (mut stage, output) = self.stage(out);
        let items = output.cancel(&mut stage);
        // There is no event for it; the one that ends a stream early is what clients know.
        self.tell(
            "response.incomplete",
            &Status::Cancelled(so_far),
            &items,
            out,
        );
    }

    fn whole(&mut self, json: &[u8], end: &End) -> Result<Vec<u8>, Malformed> {
        // Events of an answer that is told whole are nobody's.
        let mut events = Vec::new();
        if !self.take(json, &mut events)? {
            return Err(Malformed("it has no choices".to_owned()));
        }
        self.finish(end, &mut events);
        Ok(match self.plan.kept {
            Some(_) => self.told.clone(),
            None => std::mem::take(&mut self.told),
        })
    }

    fn stored(&mut self) -> Option<Stored> {
        let kept = self.plan.kept.as_ref()?;
        let response: Value = serde_json::from_slice(&self.told).ok()?;
        Some(Stored {
            id: self.plan.ids.response.clone(),
            output: response["output"].as_array().cloned()?,
            response,
            input: kept.input.clone(),
            continues: kept.continues.clone(),
        })
    }
}
