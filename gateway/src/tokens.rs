//! What are the steps of a request for tokens, or for their text?
//!
//! identify → read → admit → answer with the model's own tokenizer; where the gateway has none, a
//! node that serves the model answers, and another one where that fails. Nothing is computed by a
//! model, so nothing is billed.

use std::pin::pin;
use std::sync::Arc;

use bytes::Bytes;
use cache_index::ids::NodeId;
use pingora::protocols::http::ServerSession;
use serde_json::{Value, json};

use crate::ctx::Ctx;
use crate::fleet::Node;
use crate::identify::identify;
use crate::prompt::{Model, Planned};
use crate::proxy::Gateway;
use crate::read;
use crate::relay::{Body, Waited, failure, read_all, stopping as stopped, watched};
use crate::route::{Question, choose, context_max};
use crate::session::{Known, SessionId};
use crate::store::KeyIdentity;
use crate::tasks::Phase;
use crate::turn::{Stopping, admitted, beside_others, model};
use crate::upstream::NodeRequest;
use dialects::Fields;
use dialects::error::{ApiError, ErrorKind, reshape};
use dialects::tokens::{self, Tokenized};
use policies::retry::Outcome;
use policies::view::{SessionKey, Splits};

/// Nodes that are asked at most.
const ATTEMPTS_MAX: usize = 2;

/// What is wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Wanted {
    /// The tokens of a text.
    Tokens,
    /// The text of tokens.
    Text,
}

/// An answer: its status and body.
pub(crate) type Reply = (u16, Bytes);

impl Wanted {
    /// The path, here as on a node.
    fn path(self) -> &'static str {
        match self {
            Self::Tokens => "/tokenize",
            Self::Text => "/detokenize",
        }
    }

    /// The word in metrics and logs.
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Tokens => "tokenize",
            Self::Text => "detokenize",
        }
    }
}

/// Answers a request; none if the client left.
pub(crate) async fn run(
    gateway: &Gateway,
    client: &mut ServerSession,
    ctx: &mut Ctx,
    wanted: Wanted,
) -> Result<Option<Reply>, ApiError> {
    let identity = identify(&gateway.store, &client.req_header().headers)?;
    ctx.line.tenant = identity.tenant.id.as_str().to_owned();
    ctx.line.key_id = identity.key_id.to_string();
    let body = read::body(client, &gateway.config.limits).await?;
    let drain = gateway.tasks.drain();
    let mut stopping = pin!(drain.reached(Phase::Stopping));
    let tenant = &identity.tenant.id;
    let Some(_permit) = admitted(gateway, client, tenant, stopping.as_mut()).await? else {
        return Ok(None);
    };
    let work = || {
        let fields = Fields::parse(&body)?;
        match wanted {
            Wanted::Tokens => tokenize(gateway, ctx, &identity, fields),
            Wanted::Text => detokenize(gateway, ctx, &identity, fields),
        }
    };
    match beside_others(body.len(), work)? {
        Answered::Here(answer) => Ok(Some((200, answer.into()))),
        Answered::ByNode(asked) => {
            let mut stopping: Stopping<'_> = stopping;
            forward(gateway, client, ctx, &mut stopping, &asked).await
        }
    }
}

/// Who answers.
enum Answered {
    Here(String),
    ByNode(Asked),
}

/// What a node is asked.
struct Asked {
    wanted: Wanted,
    model: String,
    body: Bytes,
}

fn tokenize(
    gateway: &Gateway,
    ctx: &mut Ctx,
    identity: &KeyIdentity,
    fields: Fields<'_>,
) -> Result<Answered, ApiError> {
    let request = tokens::tokenize(&fields)?;
    let model = named(gateway, ctx, identity, request.model.as_deref())?;
    let salt = gateway
        .salts
        .of(&identity.tenant.cache_scope, &gateway.fleet);
    let seconds = ctx.t_ms.div_euclid(1000);
    let Some(found) = model.tokenize(&salt, &request, seconds) else {
        return Ok(by_node(Wanted::Tokens, model, fields));
    };
    let found = found?;
    let answer = Tokenized {
        count: found.tokens.len(),
        max_model_len: context_max(&gateway.fleet, &model.id),
        tokens: &found.tokens,
        token_strs: found.strings,
    };
    // Numbers and strings always serialise.
    Ok(Answered::Here(
        serde_json::to_string(&answer).unwrap_or_default(),
    ))
}

fn detokenize(
    gateway: &Gateway,
    ctx: &mut Ctx,
    identity: &KeyIdentity,
    fields: Fields<'_>,
) -> Result<Answered, ApiError> {
    let request = tokens::detokenize(&fields)?;
    let model = named(gateway, ctx, identity, request.model.as_deref())?;
    match model.detokenize(&request.tokens) {
        Some(text) => Ok(Answered::Here(json!({"prompt": text?}).to_string())),
        None => Ok(by_node(Wanted::Text, model, fields)),
    }
}

/// The model by the client's name, or the only one.
fn named<'g>(
    gateway: &'g Gateway,
    ctx: &mut Ctx,
    identity: &KeyIdentity,
    asked: Option<&str>,
) -> Result<&'g Model, ApiError> {
    if let Some(asked) = asked {
        return model(gateway, ctx, identity, asked).map(|model| &**model);
    }
    let mut all = gateway.prompts.models();
    match (all.next(), all.next()) {
        (Some(only), None) => {
            ctx.line.model = only.id.to_string();
            Ok(only)
        }
        _ => Err(ApiError::param(
            ErrorKind::MissingParameter,
            "model",
            "Missing required parameter: 'model' (there is more than one).",
        )),
    }
}

/// The client's own body, with the id under which nodes serve the model.
fn by_node(wanted: Wanted, model: &Model, fields: Fields<'_>) -> Answered {
    let id = Value::from(&*model.id).to_string();
    let body = fields.rebuild(|_| false, &[("model", &id)]);
    Answered::ByNode(Asked {
        wanted,
        model: model.id.to_string(),
        body: body.into(),
    })
}

/// Asks nodes until one answers.
async fn forward(
    gateway: &Gateway,
    client: &mut ServerSession,
    ctx: &mut Ctx,
    stopping: &mut Stopping<'_>,
    asked: &Asked,
) -> Result<Option<Reply>, ApiError> {
    let request_id = ctx.request_id.clone();
    let request = NodeRequest {
        path: asked.wanted.path(),
        request_id: &request_id,
        timeout_ms: None,
        retention_s: None,
        prefetch_tokens: None,
        body: asked.body.clone(),
        more: String::new(),
    };
    let mut excluded = Vec::new();
    let mut last = None;
    while excluded.len() < ATTEMPTS_MAX {
        let node = match node(gateway, ctx, asked, &excluded) {
            Ok(node) => node,
            // The last failure says more than "no other node is left".
            Err(none) => return Err(last.unwrap_or(none)),
        };
        node.id.as_str().clone_into(&mut ctx.line.node);
        ctx.line.attempts += 1;
        let (outcome, cause) = match once(gateway, client, stopping, (&node, &request)).await? {
            None => return Ok(None),
            Some(Ok((status, body))) if !Outcome::Status(status).is_retryable() => {
                gateway.fleet.succeeded(&node);
                let body = if status < 300 {
                    body
                } else {
                    reshape(ctx.shape, status, &body).into()
                };
                return Ok(Some((status, body)));
            }
            Some(Ok((status, _))) => (Outcome::Status(status), format!("status {status}")),
            Some(Err(failed)) => failed,
        };
        if let Some(why) = failure(outcome) {
            gateway.fleet.failed(&node, why);
        }
        let message = "No node could say. Try again.";
        let cause = format!("node {}: {cause}", node.id);
        last = Some(ApiError::new(ErrorKind::NodeFailed, message).because(cause));
        excluded.push(node.id.clone());
    }
    Err(last.unwrap_or_else(|| ApiError::new(ErrorKind::NodeFailed, "No node was asked.")))
}

/// A node that serves the model, the least busy first.
fn node(
    gateway: &Gateway,
    ctx: &Ctx,
    asked: &Asked,
    excluded: &[NodeId],
) -> Result<Arc<Node>, ApiError> {
    let question = Question {
        model: &asked.model,
        prompt: &Planned::nothing(),
        session: &SessionId {
            key: SessionKey(ctx.own_id.as_u128()),
            text: String::new(),
        },
        known: &Known {
            node: None,
            output_tokens: 0,
        },
        output_tokens: 0,
        excluded,
        splits: Splits::No,
    };
    let (fleet, bindings) = (&gateway.fleet, &gateway.bindings);
    choose(fleet, bindings, &gateway.policy, &question).map(|chosen| chosen.node)
}

/// One attempt; none if the client left.
async fn once(
    gateway: &Gateway,
    client: &mut ServerSession,
    stopping: &mut Stopping<'_>,
    (node, request): (&Node, &NodeRequest<'_>),
) -> Result<Option<Result<Reply, (Outcome, String)>>, ApiError> {
    let send = Box::pin(gateway.upstream.send(node, request));
    let mut exchange = match watched(client, stopping, send).await {
        Waited::Done(Ok(exchange)) => exchange,
        Waited::Done(Err(error)) => return Ok(Some(Err((error.outcome, error.cause)))),
        Waited::ClientGone => return Ok(None),
        Waited::Stopping => return Err(stopped()),
    };
    match read_all(client, stopping, &mut exchange).await {
        Body::Whole(body) => {
            let status = exchange.status();
            gateway.upstream.release(exchange).await;
            Ok(Some(Ok((status, body))))
        }
        Body::Broken(outcome, cause) => Ok(Some(Err((outcome, cause)))),
        Body::ClientGone => Ok(None),
        Body::Stopping => Err(stopped()),
    }
}
