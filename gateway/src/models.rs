//! Which models may a tenant ask for?
//!
//! `GET /v1/models` and `/v1/models/{id}`: the configured models and the tenant's exact aliases.
//! Patterns are no names, so they are not listed; but a name that one of them covers can be shown.

use http::request::Parts;

use crate::ctx::Ctx;
use crate::identify::identify;
use crate::proxy::Gateway;
use crate::query::{Query, unescaped};
use crate::route::context_max;
use dialects::error::ApiError;
use dialects::models::{self, Listed, Page};

/// The body of the list.
pub(crate) fn list(gateway: &Gateway, ctx: &mut Ctx, request: &Parts) -> Result<String, ApiError> {
    ctx.endpoint = "models";
    let identity = identify(&gateway.store, &request.headers)?;
    let listed = |id, model: &str| Listed {
        id,
        context_max: context_max(&gateway.fleet, model),
    };
    let mut all: Vec<Listed<'_>> = gateway
        .prompts
        .models()
        .map(|model| listed(&*model.id, &model.id))
        .collect();
    for alias in gateway.aliases.names_of(&identity.tenant.id) {
        // A tenant's own meaning of a name hides everyone's.
        if !all.iter().any(|model| model.id == alias.name) {
            all.push(listed(&alias.name, &alias.model));
        }
    }
    let query = Query::parse(request.uri.query().unwrap_or_default());
    let page = Page {
        limit: query.get("limit"),
        after: query.get("after_id"),
        before: query.get("before_id"),
    };
    models::list(&all, ctx.shape, &page)
}

/// The body of one model, by its id or a name that stands for it, as the path has it.
pub(crate) fn show(
    gateway: &Gateway,
    ctx: &mut Ctx,
    request: &Parts,
    id: &str,
) -> Result<String, ApiError> {
    ctx.endpoint = "models";
    let identity = identify(&gateway.store, &request.headers)?;
    // Clients escape the slash of `organisation/model`.
    let id = unescaped(id);
    let model = gateway.model(&identity.tenant.id, &id)?;
    let shown = Listed {
        id: &id,
        context_max: context_max(&gateway.fleet, &model.id),
    };
    Ok(models::show(&shown, ctx.shape))
}
