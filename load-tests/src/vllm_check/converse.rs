//! How does one turn go, and what is known of it from all sides?
//!
//! A turn goes through the gateway with `return_token_ids`, so that vLLM says itself which tokens the
//! prompt had. What the gateway thought stands in its headers and, once it is over, in the decision
//! that `homing explain` shows. After a turn that was alone, nothing else is sent before its blocks have been
//! told of and the gateway's index holds what the account holds.

mod settle;

use std::path::Path;
use std::time::{Duration, Instant};

use cache_index::block::{Namespace, hash_chain};
use hyper::{HeaderMap, Method};
use serde_json::{Value, json};

use super::Args;
use super::account::{History, Listener};
use super::calls::{call, get, metric};
use super::servers::{Gateway, Vllm, make_key};
use super::verdict::{Alone, Compared, Done};
use crate::error::LoadError;

/// A decision is written down just after the client has read its answer.
const DECISION_TIMEOUT: Duration = Duration::from_secs(30);
const POLL: Duration = Duration::from_millis(20);
/// Tokens of an answer at most.
const ANSWER_TOKENS: usize = 16;

/// Whose prompts they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Tenant {
    First,
    Second,
}

/// A conversation so far.
#[derive(Clone)]
pub(super) struct Conversation {
    pub(super) tenant: Tenant,
    id: String,
    pub(super) messages: Vec<Value>,
}

impl Conversation {
    pub(super) fn new(tenant: Tenant, id: &str, system: &str) -> Self {
        Self {
            tenant,
            id: id.to_owned(),
            messages: vec![json!({"role": "system", "content": system})],
        }
    }

    pub(super) fn says(&mut self, text: &str) {
        self.messages.push(json!({"role": "user", "content": text}));
    }
}

/// A turn that was answered.
pub(super) struct Turn {
    pub(super) tenant: Tenant,
    pub(super) sent: Instant,
    pub(super) answered: Instant,
    /// What the model said.
    text: String,
    /// By vLLM's own word.
    pub(super) prompt: Vec<u32>,
    pub(super) output: Vec<u32>,
    pub(super) prompt_tokens: u64,
    pub(super) cached: u64,
    /// By the gateway's.
    pub(super) request_id: String,
    pub(super) expected: u64,
    gateway_tokens: u64,
    last_block: String,
}

/// Everything that the check holds.
pub(super) struct Check {
    pub(super) args: Args,
    pub(super) vllm: Vllm,
    gateway: Gateway,
    listener: Listener,
    keys: [String; 2],
    salts: Vec<Box<str>>,
    begun: Instant,
    done: Done,
}

impl Check {
    pub(super) async fn start(args: &Args, folder: &Path) -> Result<Self, LoadError> {
        let begun = Instant::now();
        say(begun, "starting vLLM (half a minute and more)");
        let vllm = Vllm::start(args, folder).await?;
        let listener = Listener::connect(&vllm.events()).await?;
        let keys = [
            make_key(&args.homing, folder, "first")?,
            make_key(&args.homing, folder, "second")?,
        ];
        let gateway = Gateway::start(args, &vllm, folder)?;
        gateway.wait_ready().await?;
        let version = get(&vllm.url("version")).await?;
        let done = Done {
            vllm: version["version"].as_str().unwrap_or_default().to_owned(),
            pool_blocks: args.blocks as u64,
            ..Done::default()
        };
        Ok(Self {
            args: args.clone(),
            vllm,
            gateway,
            listener,
            keys,
            salts: Vec::new(),
            begun,
            done,
        })
    }

    /// Tells the person who waits what comes next.
    pub(super) fn say(&self, next: &str) {
        say(self.begun, next);
    }

    /// One turn by itself: sends it, waits until all have heard of it, compares.
    pub(super) async fn alone(
        &mut self,
        step: &'static str,
        conversation: &mut Conversation,
    ) -> Result<Turn, LoadError> {
        let turn = self.ask(conversation).await?;
        conversation
            .messages
            .push(json!({"role": "assistant", "content": turn.text}));
        self.settle(Some(&turn)).await?;
        let compared = self.compared(step, &turn).await?;
        self.done.compared.push(compared.alone(Alone::Yes));
        Ok(turn)
    }

    /// Turns that are sent at the same time, and again each conversation's next ones.
    pub(super) async fn at_once(
        &mut self,
        step: &'static str,
        conversations: &mut [Conversation],
    ) -> Result<(), LoadError> {
        let asked = conversations
            .iter()
            .map(|conversation| self.ask(conversation));
        let turns = futures_util::future::try_join_all(asked).await?;
        self.settle(None).await?;
        for (turn, conversation) in turns.iter().zip(conversations) {
            conversation
                .messages
                .push(json!({"role": "assistant", "content": turn.text}));
            let compared = self.compared(step, turn).await?;
            self.done.compared.push(compared.beside(turn, &turns));
        }
        Ok(())
    }

    /// A request that goes past the gateway, straight to vLLM; returns how much of it was cached.
    pub(super) async fn past(&self, conversation: &Conversation) -> Result<u64, LoadError> {
        let body = self.body(conversation);
        let url = self.vllm.url("v1/chat/completions");
        let answer = self.vllm.answer(&url, &[], &body).await?;
        let cached = "/usage/prompt_tokens_details/cached_tokens";
        Ok(number(&answer.body, cached))
    }

    /// Has vLLM drop its cache, of which it tells with its next step.
    pub(super) async fn clear(&mut self) -> Result<(), LoadError> {
        let url = self.vllm.url("reset_prefix_cache");
        call((Method::POST, &url), &[], None).await.map(drop)
    }

    /// Ends vLLM's process and starts another; its cache is empty, its numbers begin again.
    pub(super) async fn restart(&mut self) -> Result<(), LoadError> {
        self.take_history().await?;
        self.vllm.restart().await?;
        self.listener = Listener::connect(&self.vllm.events()).await?;
        self.gateway.wait_ready().await
    }

    /// Compares for the last time, if nothing has ended the check before.
    pub(super) async fn finish(mut self, steps: Result<(), LoadError>) -> Done {
        let ended = match steps {
            Ok(()) => self.last().await,
            Err(error) => Err(error),
        };
        if let Err(error) = ended {
            let error = match self.vllm.has_ended() {
                true => self.vllm.trouble(&format!("has ended: {error}")),
                false => error,
            };
            self.done.stopped = Some(error.to_string());
        }
        self.done
    }

    async fn last(&mut self) -> Result<(), LoadError> {
        self.settle(None).await?;
        self.take_history().await
    }

    /// What this life of the node has said and counted.
    async fn take_history(&mut self) -> Result<(), LoadError> {
        let history = self.listener.history();
        if self.args.keep.is_some() {
            let path = self.vllm.file("events", "hex");
            std::fs::write(&path, history.payloads()).map_err(LoadError::file(&path))?;
        }
        let (stored, removed) = history.told();
        let metrics = get(&self.vllm.url("metrics")).await?;
        self.done.hits_counted += metric(&metrics, "vllm:prefix_cache_hits_total");
        self.done.event_batches += history.batches();
        self.done.blocks_stored += stored;
        self.done.blocks_removed += removed;
        self.done.faults.extend(history.broken);
        Ok(())
    }

    /// A fault that a step has found.
    pub(super) fn fault(&mut self, what: String) {
        self.done.faults.push(what);
    }

    /// What was cached of a request that went past the gateway.
    pub(super) fn past_hits(&mut self, cached: u64) {
        self.done.hits_reported += cached;
    }

    pub(super) fn history(&self) -> History {
        self.listener.history()
    }

    /// A tenant's salt, once one of its turns was answered.
    pub(super) fn salt(&self, tenant: Tenant) -> &str {
        self.salts.get(tenant as usize).map_or("", |salt| salt)
    }

    /// Prompt tokens of a conversation, by the gateway's count; nothing is computed.
    pub(super) async fn count(&self, conversation: &Conversation) -> Result<usize, LoadError> {
        let body = json!({"model": self.vllm.served, "messages": conversation.messages});
        let url = self.gateway.url("tokenize");
        let key = self.bearer(conversation.tenant);
        let headers = [("authorization", key.as_str())];
        let answer = call((Method::POST, &url), &headers, Some(&body)).await?;
        Ok(number(&answer.body, "/count") as usize)
    }

    fn bearer(&self, tenant: Tenant) -> String {
        format!("Bearer {}", self.keys[tenant as usize])
    }

    fn body(&self, conversation: &Conversation) -> Value {
        json!({
            "model": self.vllm.served,
            "messages": conversation.messages,
            "max_tokens": ANSWER_TOKENS,
            "temperature": 0,
            "return_token_ids": true,
        })
    }

    async fn ask(&self, conversation: &Conversation) -> Result<Turn, LoadError> {
        let body = self.body(conversation);
        let key = self.bearer(conversation.tenant);
        let headers = [
            ("authorization", key.as_str()),
            ("x-session-affinity", &conversation.id),
            ("x-homing-debug", "1"),
        ];
        let url = self.gateway.url("v1/chat/completions");
        let sent = Instant::now();
        let answer = self.vllm.answer(&url, &headers, &body).await?;
        let text = answer.body.pointer("/choices/0/message/content");
        let header = |name| text_of(&answer.headers, name);
        let count = |name| header(name).parse().unwrap_or(u64::MAX);
        Ok(Turn {
            tenant: conversation.tenant,
            sent,
            answered: Instant::now(),
            text: text.and_then(Value::as_str).unwrap_or_default().to_owned(),
            prompt: ids(&answer.body, "/prompt_token_ids"),
            output: ids(&answer.body, "/choices/0/token_ids"),
            prompt_tokens: number(&answer.body, "/usage/prompt_tokens"),
            cached: number(&answer.body, "/usage/prompt_tokens_details/cached_tokens"),
            request_id: header("x-request-id"),
            expected: count("x-homing-expected-cached"),
            gateway_tokens: count("x-homing-prompt-tokens"),
            last_block: header("x-homing-last-block"),
        })
    }

    /// Why a turn went where it went.
    async fn decision(&self, request_id: &str) -> Result<Value, LoadError> {
        let path = format!("admin/decisions/{request_id}");
        let deadline = Instant::now() + DECISION_TIMEOUT;
        loop {
            match self.gateway.admin(&path).await {
                Ok(found) => return Ok(found["decisions"][0].clone()),
                Err(error) if Instant::now() > deadline => return Err(error),
                Err(_) => tokio::time::sleep(POLL).await,
            }
        }
    }

    async fn compared(&mut self, step: &'static str, turn: &Turn) -> Result<Compared, LoadError> {
        let history = self.listener.history();
        let salt = self.salt(turn.tenant);
        let span = history.span(salt, &turn.prompt, turn.sent, turn.answered);
        let chain = hash_chain(
            &Namespace::new(&self.vllm.served, None, Some(salt)),
            &turn.prompt,
        );
        let last_block = chain.last().map(ToString::to_string).unwrap_or_default();
        let decision = self.decision(&turn.request_id).await?;
        let explained = (
            number(&decision, "/attempts/0/expected_cached_tokens"),
            number(&decision, "/cached_tokens"),
        );
        self.done.block_tokens = history.account().block_tokens() as u64;
        self.done.hits_reported += turn.cached;
        let is_same = turn.prompt.len() as u64 == turn.gateway_tokens
            && turn.prompt_tokens == turn.gateway_tokens
            && last_block == turn.last_block;
        Ok(Compared {
            step,
            request_id: turn.request_id.clone(),
            alone: Alone::Yes,
            prompt_tokens: turn.prompt_tokens,
            gateway_tokens: turn.gateway_tokens,
            same_prompt: is_same,
            expected: turn.expected,
            cached: turn.cached,
            span,
            block_tokens: self.done.block_tokens,
            explain_agrees: explained == (turn.expected, turn.cached),
        })
    }
}

fn say(begun: Instant, next: &str) {
    let seconds = begun.elapsed().as_secs();
    eprintln!("[{:2}:{:02}] {next}", seconds / 60, seconds % 60);
}

fn number(value: &Value, path: &str) -> u64 {
    value.pointer(path).and_then(Value::as_u64).unwrap_or(0)
}

fn ids(value: &Value, path: &str) -> Vec<u32> {
    let ids = value.pointer(path).and_then(Value::as_array);
    let ids = ids.into_iter().flatten().filter_map(Value::as_u64);
    ids.filter_map(|id| u32::try_from(id).ok()).collect()
}

fn text_of(headers: &HeaderMap, name: &str) -> String {
    let value = headers.get(name).and_then(|value| value.to_str().ok());
    value.unwrap_or_default().to_owned()
}
