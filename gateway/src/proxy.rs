//! The table of contents: what happens to a request in each phase of Pingora's.
//!
//! Only three phases are used. `early_request_filter` bounds what came; `request_filter` answers
//! every request itself and forwards turns through a connector of ours, because Pingora's own
//! forwarding can replay no body past 64 KiB, hold back no bytes for the ledger and retry no
//! stream; `logging` writes the one line.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, RwLock};

use async_trait::async_trait;
use pingora::protocols::http::ServerSession;
use pingora::proxy::{ProxyHttp, Session};
use pingora::upstreams::peer::HttpPeer;
use pingora::{Error, ErrorType, Result};
use policies::pick::Params;
use policies::price::PriceBook;
use policies::retry::Budget;

use crate::admit::Gates;
use crate::aliases::Aliases;
use crate::config::Config;
use crate::ctx::Ctx;
use crate::decisions::{Decided, Decisions};
use crate::endpoint::{Endpoint, endpoint, shape};
use crate::fleet::Fleet;
use crate::hold::Holds;
use crate::ledger::Ledger;
use crate::metrics::Metrics;
use crate::prompt::{Model, Prompts};
use crate::responses::{Responses, socket};
use crate::secrets::Secrets;
use crate::session::Bindings;
use crate::store::{Store, TenantId};
use crate::tasks::{Phase, Tasks};
use crate::tokens::{self, Reply};
use crate::turn::{self, Over};
use crate::upstream::Upstream;
use crate::{models, read, respond, responses};
use dialects::Dialect;
use dialects::error::{ApiError, ErrorKind};
use dialects::known::Known;

/// How long an idle client connection is kept, seconds. Agents think for tens of seconds.
const CLIENT_IDLE_S: u64 = 120;

/// What requests were read as is remembered up to this: messages and tools of a thousand
/// conversations of 64 KB.
const KNOWN_BYTES_MAX: usize = 256 << 20;

/// The status in log and metrics of a request whose client left before it saw one (nginx's 499).
const CLIENT_GONE: u16 = 499;

/// What a gateway is made of.
pub struct GatewayParts {
    /// What the operator decided.
    pub config: Arc<Config>,
    /// Tenants and keys.
    pub store: Arc<Store>,
    /// The journal of usage records.
    pub ledger: Arc<Ledger>,
    /// The nodes.
    pub fleet: Arc<Fleet>,
    /// Background work and the state of the process.
    pub tasks: Tasks,
    /// The fleet's and the nodes' secrets.
    pub secrets: Arc<Secrets>,
    /// What is counted.
    pub metrics: Arc<Metrics>,
    /// Tokenizers and templates.
    pub prompts: Prompts,
    /// Stored responses and conversations.
    pub(crate) responses: Arc<Responses>,
    /// Why turns went where they went.
    pub(crate) decisions: Arc<Decisions>,
}

/// One gateway.
pub struct Gateway {
    pub(crate) config: Arc<Config>,
    pub(crate) store: Arc<Store>,
    pub(crate) ledger: Arc<Ledger>,
    pub(crate) fleet: Arc<Fleet>,
    pub(crate) tasks: Tasks,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) prompts: Prompts,
    /// What requests were read as before.
    pub(crate) known: Known,
    pub(crate) responses: Arc<Responses>,
    pub(crate) decisions: Arc<Decisions>,
    pub(crate) aliases: Aliases,
    pub(crate) salts: Salts,
    pub(crate) gates: Gates,
    pub(crate) holds: Arc<Holds>,
    pub(crate) bindings: Bindings,
    pub(crate) upstream: Upstream,
    pub(crate) prices: PriceBook,
    pub(crate) policy: Params,
    pub(crate) retry_budget: Mutex<Budget>,
}

impl Gateway {
    /// Puts a gateway together.
    pub fn new(parts: GatewayParts) -> Self {
        let GatewayParts {
            config,
            store,
            ledger,
            fleet,
            tasks,
            secrets,
            metrics,
            prompts,
            responses,
            decisions,
        } = parts;
        let holds = Arc::new(Holds::new(
            config.policy.hold,
            metrics.held.clone(),
            metrics.hold_refusals.clone(),
        ));
        let asking = Arc::clone(&holds).watch(Arc::clone(&fleet), tasks.drain());
        tasks.spawn("hold", asking);
        Self {
            aliases: Aliases::new(&config.aliases),
            gates: Gates::new(&config.limits, metrics.waiting.clone()),
            holds,
            bindings: Bindings::new(),
            upstream: Upstream::new(secrets.node_token(), config.limits.request_timeout),
            prices: config.price_book(),
            policy: config.policy_params(),
            retry_budget: Mutex::new(Budget::default()),
            salts: Salts {
                secrets,
                known: RwLock::new(HashMap::new()),
            },
            config,
            store,
            ledger,
            fleet,
            tasks,
            metrics,
            prompts,
            known: Known::new(KNOWN_BYTES_MAX),
            responses,
            decisions,
        }
    }

    /// The model that a tenant means by this name; a name that means none is told what there is.
    pub(crate) fn model(&self, tenant: &TenantId, asked: &str) -> Result<&Arc<Model>, ApiError> {
        let named = self.prompts.model(asked).or_else(|| {
            let id = self.aliases.resolve(tenant, asked)?;
            self.prompts.model(id)
        });
        named.ok_or_else(|| {
            let ids = self.prompts.models().map(|model| &*model.id);
            let aliases = self.aliases.of(tenant).map(|alias| alias.name.as_str());
            dialects::models::unknown(asked, ids.chain(aliases))
        })
    }

    async fn serve(&self, session: &mut Session, ctx: &mut Ctx) -> Result<Over, ApiError> {
        let request = session.req_header();
        let path = request.uri.path().to_owned();
        ctx.shape = shape(&path, &request.headers);
        if path == "/v1/responses" && socket::is_upgrade(request) {
            ctx.endpoint = "socket";
            return Box::pin(socket::run(self, session.as_downstream_mut(), ctx)).await;
        }
        match endpoint(&request.method, &path)? {
            Endpoint::Health => self.health(session, ctx).await,
            Endpoint::Models => {
                let list = models::list(self, ctx, session.req_header())?;
                self.answer(session, ctx, list).await
            }
            Endpoint::Model(id) => {
                let model = models::show(self, ctx, session.req_header(), id)?;
                self.answer(session, ctx, model).await
            }
            Endpoint::CountTokens => {
                ctx.endpoint = "count_tokens";
                let tokens = turn::count_tokens(self, session.as_downstream_mut(), ctx).await?;
                self.answer(session, ctx, tokens).await
            }
            Endpoint::Tokens(wanted) => {
                ctx.endpoint = wanted.as_str();
                let client = session.as_downstream_mut();
                match Box::pin(tokens::run(self, client, ctx, wanted)).await? {
                    Some((status, body)) => self.reply(session, ctx, (status, body)).await,
                    None => Ok(Over::ClientGone),
                }
            }
            Endpoint::Stored(resource) => {
                ctx.endpoint = "stored";
                let client = session.as_downstream_mut();
                let answer = responses::serve(self, client, ctx, resource).await?;
                self.answer(session, ctx, answer).await
            }
            Endpoint::Turn(dialect) => self.turn(session.as_downstream_mut(), ctx, dialect).await,
        }
    }

    /// Runs a turn.
    pub(crate) async fn turn(
        &self,
        client: &mut ServerSession,
        ctx: &mut Ctx,
        dialect: Dialect,
    ) -> Result<Over, ApiError> {
        ctx.endpoint = dialect.as_str();
        let budget = self.retry_budget.lock();
        budget.unwrap_or_else(PoisonError::into_inner).on_request();
        turn::run(self, client, ctx, dialect).await
    }

    /// A request has ended: the one log line, what is counted, and why it went where it went.
    pub(crate) fn note(&self, ctx: &mut Ctx) {
        let status = ctx.status.to_string();
        self.metrics
            .requests
            .with_label_values(&[ctx.endpoint, &status])
            .inc();
        let seconds = ctx.started.elapsed().as_secs_f64();
        self.metrics
            .duration
            .with_label_values(&[ctx.endpoint])
            .observe(seconds);
        ctx.log();
        if let Some(routed) = ctx.routed.take() {
            self.decisions.note(Decided::pending(ctx, routed));
        }
    }

    /// Well as long as it takes requests; whether nodes are well is in the admin interface.
    async fn health(&self, session: &mut Session, ctx: &mut Ctx) -> Result<Over, ApiError> {
        ctx.endpoint = "health";
        if self.tasks.drain().phase() != Phase::Running {
            return Err(ApiError::new(
                ErrorKind::Stopping,
                "The gateway is stopping.",
            ));
        }
        let body = r#"{"status":"ok"}"#.to_owned();
        self.answer(session, ctx, body).await
    }

    async fn answer(
        &self,
        session: &mut Session,
        ctx: &mut Ctx,
        body: String,
    ) -> Result<Over, ApiError> {
        self.reply(session, ctx, (200, body.into())).await
    }

    async fn reply(
        &self,
        session: &mut Session,
        ctx: &mut Ctx,
        (status, body): Reply,
    ) -> Result<Over, ApiError> {
        match respond::json(session.as_downstream_mut(), ctx, status, body).await {
            Ok(()) => Ok(Over::Answered),
            Err(_) => Ok(Over::ClientGone),
        }
    }
}

#[async_trait]
impl ProxyHttp for Gateway {
    type CTX = Ctx;

    fn new_ctx(&self) -> Ctx {
        Ctx::new(&self.metrics)
    }

    async fn early_request_filter(&self, session: &mut Session, _ctx: &mut Ctx) -> Result<()> {
        if self.tasks.drain().phase() != Phase::Running {
            session.set_keepalive(None);
        } else if session.get_keepalive().is_some() {
            // Only where the client's version and headers allow it at all.
            session.set_keepalive(Some(CLIENT_IDLE_S));
        }
        // Bytes of a next request must neither get lost nor look like a client that left.
        session.as_downstream_mut().set_pipelining_enabled(true);
        session.set_write_timeout(Some(self.config.limits.client_timeout));
        Ok(())
    }

    async fn request_filter(&self, session: &mut Session, ctx: &mut Ctx) -> Result<bool> {
        let over = match read::check_headers(&session.req_header().headers, &self.config.limits) {
            Ok(()) => self.serve(session, ctx).await,
            Err(error) => Err(error),
        };
        if self.tasks.drain().phase() != Phase::Running {
            session.set_keepalive(None);
        }
        match over {
            Ok(Over::Answered) => {}
            Ok(Over::ClientGone) => {
                session.set_keepalive(None);
                if ctx.status == 0 {
                    ctx.status = CLIENT_GONE;
                }
            }
            Err(error) => {
                let client = session.as_downstream_mut();
                if respond::error(client, ctx, error).await.is_err() {
                    session.set_keepalive(None);
                }
            }
        }
        Ok(true)
    }

    async fn logging(&self, _session: &mut Session, _error: Option<&Error>, ctx: &mut Ctx) {
        self.note(ctx);
    }

    async fn upstream_peer(&self, _session: &mut Session, _ctx: &mut Ctx) -> Result<Box<HttpPeer>> {
        // `request_filter` answers everything; Pingora never gets as far as forwarding.
        Err(Error::new(ErrorType::InternalError))
    }
}

/// The cache salt of each scope, computed once and told to the index.
pub(crate) struct Salts {
    secrets: Arc<Secrets>,
    known: RwLock<HashMap<Arc<str>, Arc<str>>>,
}

impl Salts {
    /// The salt of a cache scope.
    pub(crate) fn of(&self, scope: &Arc<str>, fleet: &Fleet) -> Arc<str> {
        let known = self.known.read().unwrap_or_else(PoisonError::into_inner);
        if let Some(salt) = known.get(scope) {
            return Arc::clone(salt);
        }
        drop(known);
        let salt: Arc<str> = self.secrets.cache_salt(scope).into();
        fleet.issue_salt(&salt);
        let mut known = self.known.write().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(known.entry(Arc::clone(scope)).or_insert(salt))
    }
}
