//! An engine whose steps a test runs itself: what happens when depends on nothing else.

use std::sync::mpsc::{Receiver, sync_channel};
use std::task::{Context, Poll, Waker};

use super::*;
use crate::engine::handle::Command;
use crate::engine::job::Held;
use crate::engine::{COMMANDS_MAX, Engine, Produced};
use crate::error::ApiError;

pub(super) struct Stepper {
    pub(super) engine: Engine,
    pub(super) handle: Handle,
    commands: Receiver<Command>,
    pub(super) steps: usize,
}

impl Stepper {
    pub(super) fn new(parts: Parts) -> Self {
        let (sender, commands) = sync_channel(COMMANDS_MAX);
        let (handle, receivers) = Handle::new(sender, parts.queue_max, parts.kv_blocks as usize);
        let mut engine = Engine::new(parts, handle.shared(), receivers);
        if let Some(store) = &mut engine.store {
            store.rates = crate::kv::store::choose::Rates::frozen();
        }
        Self {
            engine,
            handle,
            commands,
            steps: 0,
        }
    }

    /// Over a pool of `kv_blocks`.
    pub(super) fn of(kv_blocks: u32) -> Self {
        Self::new(parts(kv_blocks, Arc::default()))
    }

    /// Over a pool of `kv_blocks` and a host tier of `host_blocks`.
    pub(super) fn with_host(kv_blocks: u32, host_blocks: usize) -> Self {
        Self::new(Parts {
            host_blocks,
            ..parts(kv_blocks, Arc::default())
        })
    }

    pub(super) fn submit(&self, job: Job) -> Told {
        let ticket = self.handle.submit(job).expect("the queue has room");
        Told::new(ticket)
    }

    pub(super) fn step(&mut self) {
        while let Ok(command) = self.commands.try_recv() {
            self.engine.take(command);
        }
        self.engine.step();
        self.steps += 1;
    }

    /// Steps until this request has ended.
    pub(super) fn finish(&mut self, told: &mut Told) {
        for _ in 0..1_000_000 {
            if told.hear().ended.is_some() {
                return;
            }
            self.step();
        }
        unreachable!("it ends");
    }

    /// Tokens computed so far.
    pub(super) fn computed(&self) -> u64 {
        self.engine.parts.metrics.computed_tokens.get()
    }

    /// Hashes of everything that could be found, in some fixed order.
    pub(super) fn findable(&self) -> Vec<String> {
        let runs = self.engine.pool.snapshot();
        let mut hashes: Vec<_> = runs
            .iter()
            .flatten()
            .map(|stored| stored.content.hash.to_string())
            .collect();
        hashes.sort();
        hashes
    }

    /// Checks that nothing runs, waits or is held.
    pub(super) fn end(mut self) {
        self.step();
        assert!(self.engine.running.is_empty() && self.engine.waiting.is_empty());
        assert_eq!(self.engine.pool.held(), 0, "every block was given back");
        assert_eq!(self.handle.load().waiting, 0, "every place was given back");
    }
}

/// What a request's client has been told so far.
pub(super) struct Told {
    ticket: Ticket,
    pub(super) text: String,
    pub(super) produced: Vec<Produced>,
    pub(super) outputs: usize,
    pub(super) joined: Option<usize>,
    pub(super) ended: Option<Ended>,
}

#[derive(Debug)]
pub(super) enum Ended {
    Done(Ending, Usage, Option<Held>),
    Vector(Vec<f32>, Usage),
    Failed(ApiError),
}

impl Told {
    fn new(ticket: Ticket) -> Self {
        Self {
            ticket,
            text: String::new(),
            produced: Vec::new(),
            outputs: 0,
            joined: None,
            ended: None,
        }
    }

    /// Takes what has been said meanwhile.
    pub(super) fn hear(&mut self) -> &mut Self {
        let mut context = Context::from_waker(Waker::noop());
        while let Poll::Ready(Some(output)) = self.ticket.poll_next(&mut context) {
            assert!(self.ended.is_none(), "nothing follows the end");
            self.outputs += 1;
            match output {
                Output::Joined { cached_tokens } => self.joined = Some(cached_tokens),
                Output::Text { text, tokens, .. } => {
                    self.text += &text;
                    self.produced.extend(tokens);
                }
                Output::Done {
                    text,
                    tokens,
                    ending,
                    usage,
                    held,
                    stop: _,
                } => {
                    self.text += &text;
                    self.produced.extend(tokens);
                    self.ended = Some(Ended::Done(ending, usage, held));
                }
                Output::Embedding(vector, usage) => {
                    self.ended = Some(Ended::Vector(vector, usage));
                }
                Output::Failed(error) => self.ended = Some(Ended::Failed(error)),
            }
        }
        self
    }

    /// The ids in a text of the plain vocabulary.
    pub(super) fn tokens(&self) -> Vec<u32> {
        let ids = self.text.split_whitespace();
        ids.map(|id| id.parse().expect("an id")).collect()
    }

    pub(super) fn done(&self) -> (Ending, Usage, Option<Held>) {
        match &self.ended {
            Some(Ended::Done(ending, usage, held)) => (*ending, *usage, *held),
            other => unreachable!("not done: {other:?}"),
        }
    }

    pub(super) fn failed(&self) -> &ApiError {
        match &self.ended {
            Some(Ended::Failed(error)) => error,
            other => unreachable!("not failed: {other:?}"),
        }
    }
}
