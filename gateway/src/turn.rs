//! What are the steps of a turn, in order?
//!
//! identify → read → parse → session → admit → prompt → route → bill opened → attempts → bill
//! settled. Each step is a call into its own module; each can end the turn with an error, and
//! what was taken by then is given back by guards.

use std::pin::{Pin, pin};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use bytes::Bytes;
use cache_index::ids::NodeId;
use pingora::protocols::http::ServerSession;
use policies::price::Usage;
use serde_json::Value;

pub(crate) use self::asked::model;
use self::asked::{Understood, understood};
use crate::admit::Permit;
use crate::ctx::{Ctx, Wanted};
use crate::decisions::Routed;
use crate::hold::Goes;
use crate::identify::identify;
use crate::ledger::Status;
use crate::prompt::{Model, Planned};
use crate::proxy::Gateway;
use crate::relay::{End, Flow, Waited, watched};
use crate::responses::Keeping;
use crate::route::{Chosen, Question, check_context, choose, choose_among};
use crate::session::Session;
use crate::settle::{Account, Bill};
use crate::store::{KeyIdentity, TenantId};
use crate::tasks::Phase;
use crate::upstream::X_REQUEST_TIMEOUT_MS;
use crate::{pair, read, recover, respond};
use dialects::error::{ApiError, ErrorKind};
use dialects::normalise::normalise;
use dialects::{Delivery, Dialect, Fields, NodeParams, PromptInput, TokenIds, Turn, messages};

mod asked;

/// A turn, ready to be sent.
pub(crate) struct Job<'a> {
    pub(crate) dialect: Dialect,
    pub(crate) delivery: Delivery,
    pub(crate) model: Arc<str>,
    /// The client's name for the model, where that is an alias.
    pub(crate) alias: Option<Alias>,
    pub(crate) prompt: Planned,
    /// A name for each full 512 tokens of it, as gate and decision log know them.
    pub(crate) log_blocks: Vec<u64>,
    pub(crate) session: Session,
    pub(crate) output_tokens_expected: u64,
    /// How many answers the client wants.
    pub(crate) choices: u64,
    /// Whether the client sees tokens.
    pub(crate) token_ids: TokenIds,
    /// What separates the tenant's blocks from others'.
    pub(crate) salt: Arc<str>,
    /// How long the client gives the request, as it said.
    pub(crate) timeout_ms: Option<u64>,
    /// What of that it waited here before it went to a node.
    pub(crate) held: OnceLock<Duration>,
    /// For how long its prefix is wanted, in seconds.
    pub(crate) retention_s: Option<u32>,
    pub(crate) body: Bytes,
    pub(crate) debug: bool,
    /// Whether the client wants to read in the answer how it came about.
    pub(crate) detail: bool,
    pub(crate) identity: &'a KeyIdentity,
}

impl Job<'_> {
    /// What is left for the node of the time that the client gives.
    pub(crate) fn timeout_left_ms(&self) -> Option<u64> {
        let held = self.held.get().map_or(0, Duration::as_millis);
        let held = u64::try_from(held).unwrap_or(u64::MAX);
        self.timeout_ms.map(|ms| ms.saturating_sub(held).max(1))
    }
}

/// A name that stands for a model.
pub(crate) struct Alias {
    pub(crate) name: String,
    /// The same in JSON, as answers have it.
    pub(crate) json: String,
}

impl Alias {
    /// None if the name is the model's own.
    fn of(asked: &str, model: &Model) -> Option<Self> {
        (*asked != *model.id).then(|| Self {
            name: asked.to_owned(),
            json: Value::from(asked).to_string(),
        })
    }
}

/// Why a turn needs no answer any more.
pub(crate) enum Over {
    /// The client has its answer, or an error event in place of its end.
    Answered,
    /// The client is gone.
    ClientGone,
}

impl Over {
    /// What came of writing an answer.
    fn of(written: &pingora::Result<()>) -> Self {
        match written {
            Ok(()) => Self::Answered,
            Err(_) => Self::ClientGone,
        }
    }
}

/// Runs a turn from its headers to its settled record.
pub(crate) async fn run(
    gateway: &Gateway,
    client: &mut ServerSession,
    ctx: &mut Ctx,
    dialect: Dialect,
) -> Result<Over, ApiError> {
    let identity = identify(&gateway.store, &client.req_header().headers)?;
    ctx.line.is_of(&identity);
    choose_request_id(gateway, client, ctx, &identity.tenant.id);
    let body = read::body(client, &gateway.config.limits).await?;
    let Understood {
        turn,
        model,
        session,
        translation,
        keeping,
        retention_s,
    } = understood(
        gateway,
        &client.req_header().headers,
        ctx,
        (&identity, dialect, &body),
    )
    .await?;
    if ctx.answer == Wanted::Preparation
        && let (Some(translation), Some(keeping)) = (&translation, &keeping)
    {
        let prepared = gateway
            .responses
            .prepare(keeping, &session.id, &**translation);
        let events = prepared.await;
        return Ok(Over::of(&respond::stream(client, ctx, events).await));
    }
    let tenant = &identity.tenant.id;
    let mut stopping = pin!(called_off(gateway, keeping.as_ref()));
    let Some(_permit) = admitted(gateway, client, tenant, stopping.as_mut()).await? else {
        return Ok(Over::ClientGone);
    };
    let asked = (dialect, &turn, retention_s);
    let job = plan(gateway, client, ctx, &identity, (asked, &model, session))?;
    // A long answer must not hold the client's copy of the request as well.
    drop(turn);
    drop(body);
    let known = gateway.bindings.get(&job.session, Instant::now());
    let question = Question {
        model: &job.model,
        prompt: &job.prompt,
        session: &job.session.id,
        known: &known,
        output_tokens: job.output_tokens_expected,
        excluded: &[],
        splits: pair::splits(&job),
    };
    let Some(first) = chosen(gateway, client, ctx, (&job, &question), stopping.as_mut()).await?
    else {
        return Ok(Over::ClientGone);
    };
    let mut bill = open_bill(gateway, ctx, &job, first.node.id.as_str())?;
    let mut flow = Flow {
        gateway,
        client,
        ctx,
        job: &job,
        bill: &mut bill,
        translation: translation.as_deref(),
        keeping: keeping.as_ref(),
        stopping: stopping.as_mut(),
    };
    let end = Box::pin(recover::run(&mut flow, first, &known)).await;
    finish(&mut flow, end)
}

/// Where a turn goes, once it may; none if the client left while it was held.
async fn chosen(
    gateway: &Gateway,
    client: &mut ServerSession,
    ctx: &mut Ctx,
    (job, question): (&Job<'_>, &Question<'_>),
    mut stopping: Stopping<'_>,
) -> Result<Option<Chosen>, ApiError> {
    let (fleet, bindings, policy) = (&gateway.fleet, &gateway.bindings, &gateway.policy);
    let choose = || choose(fleet, bindings, policy, question);
    let choose_at = |at: &NodeId| choose_among(fleet, bindings, policy, question, |id| id == at);
    let first = choose()?;
    let returns = question.known.node.is_some();
    let passes = gateway.holds.pass(&gateway.fleet, job, &first, returns);
    let passes = within(job.timeout_ms, passes);
    let came = Instant::now();
    let (going, goes) = match watched(client, &mut stopping, passes).await {
        Waited::Done(passed) => passed?,
        Waited::ClientGone => return Ok(None),
        Waited::Stopping => return Err(stopped()),
    };
    ctx.going = Some(going);
    if goes != Goes::AsChosen {
        let _ = job.held.set(came.elapsed());
    }
    match goes {
        Goes::AsChosen => Ok(Some(first)),
        Goes::Anywhere => choose().map(Some),
        // Where it has its place, unless that has just gone.
        Goes::To(node) => choose_at(&node).or_else(|_| choose()).map(Some),
    }
}

/// A wait that the client's own limit bounds.
async fn within<T>(
    timeout_ms: Option<u64>,
    wait: impl Future<Output = Result<T, ApiError>>,
) -> Result<T, ApiError> {
    let Some(ms) = timeout_ms else {
        return wait.await;
    };
    let limited = tokio::time::timeout(Duration::from_millis(ms), wait);
    limited.await.unwrap_or_else(|_| {
        let message = format!(
            "No node could take the request within the {ms} ms that it gives. Try again, or give more."
        );
        Err(ApiError::new(ErrorKind::ClientTimeout, message))
    })
}

pub(crate) fn stopped() -> ApiError {
    let message = "The gateway is being stopped. Try again.";
    ApiError::new(ErrorKind::Stopping, message)
}

/// How many tokens a Messages request has, as its client reads it.
pub(crate) async fn count_tokens(
    gateway: &Gateway,
    client: &mut ServerSession,
    ctx: &mut Ctx,
) -> Result<String, ApiError> {
    let identity = identify(&gateway.store, &client.req_header().headers)?;
    ctx.line.is_of(&identity);
    let body = read::body(client, &gateway.config.limits).await?;
    beside_others(body.len(), || {
        let (asked, mut chat) = messages::count_tokens(Fields::parse(&body)?)?;
        normalise(&mut chat, gateway.config.normalise.of(&identity.tenant.id));
        let model = model(gateway, ctx, &identity, &asked)?;
        let salt = gateway
            .salts
            .of(&identity.tenant.cache_scope, &gateway.fleet);
        let seconds = ctx.t_ms.div_euclid(1000);
        let prompt = PromptInput::Chat(chat);
        let tokens = gateway.prompts.count(model, &salt, &prompt, seconds)?;
        Ok(format!(r#"{{"input_tokens":{tokens}}}"#))
    })
}

/// Resolves when the gateway has to stop, or the client cancels the turn by another request.
async fn called_off(gateway: &Gateway, keeping: Option<&Keeping>) {
    let drain = gateway.tasks.drain();
    let stopping = drain.reached(Phase::Stopping);
    match keeping.map(Keeping::cancelled) {
        None => stopping.await,
        Some(cancelled) => tokio::select! {
            () = stopping => {}
            () = cancelled.asked() => {}
        },
    }
}

/// Runs work on a body; where the body is large, without holding up the requests that share this
/// thread.
pub(crate) fn beside_others<T>(body_bytes: usize, work: impl FnOnce() -> T) -> T {
    /// Parsing and tokenising so much takes about 5 ms, as long as handing the thread over is worth.
    const INLINE_BYTES_MAX: usize = 256 << 10;
    if body_bytes > INLINE_BYTES_MAX {
        tokio::task::block_in_place(work)
    } else {
        work()
    }
}

/// Resolves when the gateway's grace period is over.
pub(crate) type Stopping<'a> = Pin<&'a mut (dyn Future<Output = ()> + Send + 'a)>;

/// The right to run; none if the client left the queue.
pub(crate) async fn admitted(
    gateway: &Gateway,
    client: &mut ServerSession,
    tenant: &TenantId,
    mut stopping: Stopping<'_>,
) -> Result<Option<Permit>, ApiError> {
    match watched(client, &mut stopping, gateway.gates.admit(tenant)).await {
        Waited::Done(permit) => permit.map(Some),
        Waited::ClientGone => Ok(None),
        Waited::Stopping => Err(stopped()),
    }
}

/// The client's own id where it is usable and new to its tenant, else ours.
fn choose_request_id(gateway: &Gateway, client: &ServerSession, ctx: &mut Ctx, tenant: &TenantId) {
    /// RFC 9110 token characters: safe in any header, log and query.
    fn is_token(byte: u8) -> bool {
        byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte)
    }
    const CHARS_MAX: usize = 128;
    let Some(sent) = client.req_header().headers.get("x-request-id") else {
        return;
    };
    let bytes = sent.as_bytes();
    let usable = (1..=CHARS_MAX).contains(&bytes.len()) && bytes.iter().all(|byte| is_token(*byte));
    if let Some(id) = sent.to_str().ok().filter(|_| usable)
        && !gateway.store.request_id_seen(tenant, id)
    {
        id.clone_into(&mut ctx.request_id);
    }
}

/// A request in its dialect, and for how many seconds its prefix is wanted.
type Wish<'a> = (Dialect, &'a Turn<'a>, Option<u32>);

/// Tokens, blocks and the body for the node.
fn plan<'a>(
    gateway: &Gateway,
    client: &ServerSession,
    ctx: &Ctx,
    identity: &'a KeyIdentity,
    ((dialect, turn, retention_s), model, session): (Wish<'_>, &Model, Session),
) -> Result<Job<'a>, ApiError> {
    let salt = gateway
        .salts
        .of(&identity.tenant.cache_scope, &gateway.fleet);
    let seconds = ctx.t_ms.div_euclid(1000);
    let (prompt, hashed) =
        gateway
            .prompts
            .plan(model, &salt, session.conversation, &turn.prompt, seconds)?;
    for (known, blocks) in [("yes", hashed.known), ("no", hashed.new)] {
        gateway
            .metrics
            .prompt_blocks
            .with_label_values(&[known])
            .inc_by(blocks as u64);
    }
    check_context(&gateway.fleet, &model.id, &prompt, turn.output_tokens_max)?;
    let before = gateway.bindings.get(&session, Instant::now()).output_tokens;
    let asks = |header: &str| {
        let sent = client.req_header().headers.get(header);
        sent.is_some_and(|value| value == "1")
    };
    let alias = Alias::of(&turn.model, model);
    let params = NodeParams {
        model: &model.id,
        is_alias: alias.is_some(),
        cache_salt: &salt,
        // Its first event tells the prompt's tokens.
        usage_always: dialect == Dialect::Messages,
    };
    Ok(Job {
        dialect,
        delivery: turn.delivery,
        model: Arc::clone(&model.id),
        alias,
        log_blocks: Routed::log_blocks(&prompt.chain.hashes),
        prompt,
        session,
        output_tokens_expected: turn
            .output_tokens_max
            .map_or(before, |most| before.min(most.saturating_mul(turn.choices))),
        choices: turn.choices,
        token_ids: turn.token_ids,
        timeout_ms: timeout_ms(client)?,
        held: OnceLock::new(),
        retention_s,
        body: turn.node_body(&params).into(),
        salt,
        debug: identity.tenant.debug && asks("x-homing-debug"),
        detail: asks("x-homing-detail"),
        identity,
    })
}

/// The client's own bound on the request, which the node keeps.
fn timeout_ms(client: &ServerSession) -> Result<Option<u64>, ApiError> {
    let Some(sent) = client.req_header().headers.get(X_REQUEST_TIMEOUT_MS) else {
        return Ok(None);
    };
    let ms = sent.to_str().ok().and_then(|text| text.parse().ok());
    ms.filter(|ms| *ms > 0).map(Some).ok_or_else(|| {
        let message = "The header x-request-timeout-ms must be a positive number of milliseconds.";
        ApiError::invalid(X_REQUEST_TIMEOUT_MS, message)
    })
}

fn open_bill(gateway: &Gateway, ctx: &Ctx, job: &Job<'_>, node: &str) -> Result<Bill, ApiError> {
    let account = Account {
        tenant: job.identity.tenant.id.as_str(),
        key_id: &job.identity.key_id,
        model: &job.model,
        model_asked: job.alias.as_ref().map_or(&*job.model, |alias| &alias.name),
        session: &job.session.id.text,
        node,
    };
    Bill::open(&gateway.ledger, &gateway.prices, ctx, &account)
}

/// Whatever the end, the record is settled; what the client still has to hear is returned.
fn finish(flow: &mut Flow<'_>, end: End) -> Result<Over, ApiError> {
    let over = match end {
        End::Answered => Ok(Over::Answered),
        End::Cut(cause) => {
            flow.ctx.line.cause = Some(cause);
            Ok(Over::Answered)
        }
        End::ClientGone => Ok(Over::ClientGone),
        End::Refused(error) => Err(error),
        End::Retry(_, cause) => {
            let message = "The node failed before it answered. Try again.";
            Err(ApiError::new(ErrorKind::NodeFailed, message).because(cause))
        }
    };
    if !flow.bill.is_settled() {
        flow.settle_quietly(Status::Failed, Usage::default());
    }
    over
}
