//! What does a request ask for, and what does it continue?
//!
//! Its dialect reads it, with what is known of earlier turns; a response or conversation that it
//! continues is looked up; its model and session follow.

use std::sync::Arc;

use http::HeaderMap;

use super::beside_others;
use crate::ctx::Ctx;
use crate::prompt::Model;
use crate::proxy::Gateway;
use crate::responses::Keeping;
use crate::session::{Session, SessionId, session_of};
use crate::store::{KeyIdentity, TenantId};
use dialects::answer::Translation;
use dialects::caching::{self, Retention};
use dialects::error::{ApiError, ErrorKind};
use dialects::known::Reader;
use dialects::{Dialect, Fields, Turn, messages, responses};

/// What a request asks for, and whose conversation it is.
pub(super) struct Understood<'a> {
    pub(super) turn: Turn<'a>,
    pub(super) model: Arc<Model>,
    pub(super) session: Session,
    pub(super) translation: Option<Box<dyn Translation>>,
    pub(super) keeping: Option<Keeping>,
    /// For how long its prefix is wanted, in seconds.
    pub(super) retention_s: Option<u32>,
}

/// Reads a request, what it continues, and which session it belongs to.
pub(super) async fn understood<'a>(
    gateway: &Gateway,
    headers: &HeaderMap,
    ctx: &mut Ctx,
    (identity, dialect, body): (&KeyIdentity, Dialect, &'a [u8]),
) -> Result<Understood<'a>, ApiError> {
    let tenant = &identity.tenant.id;
    let fields = beside_others(body.len(), || Fields::parse(body))?;
    let found = gateway.config.sessions.find(dialect, headers, &fields);
    let retention_s = caching::hint(&fields).and_then(Retention::seconds);
    let options = gateway.config.normalise.of(tenant);
    let reader = gateway.known.reader(&identity.tenant.cache_scope, options);
    let Asked {
        turn,
        translation,
        keeping,
        chain,
    } = match dialect {
        Dialect::Responses => {
            ask_responses(gateway, ctx, tenant, (fields, body.len(), &reader)).await?
        }
        _ => beside_others(body.len(), || ask(dialect, fields, &reader))?,
    };
    let model = Arc::clone(model(gateway, ctx, identity, &turn.model)?);
    let session = session_of(tenant.as_str(), &model.id, found, chain, &turn.prompt);
    ctx.line.session.clone_from(&session.id.text);
    ctx.line.session_from.clone_from(&session.source);
    Ok(Understood {
        turn,
        model,
        session,
        translation,
        keeping,
        retention_s,
    })
}

/// The model that the tenant means by this name.
pub(crate) fn model<'g>(
    gateway: &'g Gateway,
    ctx: &mut Ctx,
    identity: &KeyIdentity,
    asked: &str,
) -> Result<&'g Arc<Model>, ApiError> {
    let model = gateway.model(&identity.tenant.id, asked)?;
    ctx.line.model = model.id.to_string();
    ctx.line.model_asked = (*asked != *model.id).then(|| asked.to_owned());
    Ok(model)
}

/// A request, read.
struct Asked<'a> {
    turn: Turn<'a>,
    /// What turns the answer into the client's dialect.
    translation: Option<Box<dyn Translation>>,
    /// What is kept of it.
    keeping: Option<Keeping>,
    /// The session of the stored response that it continues.
    chain: Option<SessionId>,
}

/// Reads a request in its dialect, its prompt in its one spelling.
fn ask<'a>(
    dialect: Dialect,
    fields: Fields<'a>,
    reader: &Reader<'_>,
) -> Result<Asked<'a>, ApiError> {
    let same = |turn| Asked {
        turn,
        translation: None,
        keeping: None,
        chain: None,
    };
    let translated = |(turn, translation)| Asked {
        turn,
        translation: Some(translation),
        keeping: None,
        chain: None,
    };
    match dialect {
        Dialect::Chat => dialects::chat_known(fields, reader).map(same),
        Dialect::Completions => dialects::completions(fields).map(same),
        Dialect::Embeddings => dialects::embeddings(fields).map(same),
        Dialect::Messages => messages::parse_known(fields, reader).map(translated),
        // What these continue has to be looked up: `ask_responses`.
        Dialect::Responses => Err(ApiError::new(
            ErrorKind::Internal,
            "A Responses request was read without what it continues.",
        )),
    }
}

/// Reads a Responses request and what it continues.
async fn ask_responses<'a>(
    gateway: &Gateway,
    ctx: &Ctx,
    tenant: &TenantId,
    (fields, bytes, reader): (Fields<'a>, usize, &Reader<'_>),
) -> Result<Asked<'a>, ApiError> {
    let mut request = beside_others(bytes, || responses::parse_known(fields, reader))?;
    let ids = responses::Ids {
        response: format!("resp_{}", ctx.own_id.simple()),
        created_s: ctx.t_ms.div_euclid(1000),
    };
    let (keeping, earlier) = gateway
        .responses
        .begin(tenant, &ids.response, (&mut request, ctx.local.as_ref()))
        .await?;
    let all = bytes + earlier.bytes;
    let (turn, translation) = beside_others(all, || request.turn(earlier.items, ids))?;
    Ok(Asked {
        turn,
        translation: Some(translation),
        keeping: Some(keeping),
        chain: earlier.session,
    })
}
