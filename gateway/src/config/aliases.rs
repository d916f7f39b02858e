//! Which names may stand for a model?
//!
//! An alias that means nothing is refused at the start rather than by each request: one for a model
//! that is not configured, one that a model's own id hides, one that is there twice, and a price
//! for a name that is never priced.

use std::collections::HashSet;

use policies::price::DEFAULT_MODEL;
use serde::Deserialize;

use super::file::value;
use super::{AliasConfig, ConfigError, ModelConfig, Prices};
use crate::aliases::NAME_BYTES_MAX;
use crate::store::TenantId;

/// Aliases that a gateway takes: a request whose name is no model's looks at each of them.
const ALIASES_MAX: usize = 256;

/// An alias in the file.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct AliasFile {
    name: String,
    model: String,
    tenants: Option<Vec<String>>,
}

/// Checks all of them.
pub(super) fn checked(
    aliases: Vec<AliasFile>,
    models: &[ModelConfig],
) -> Result<Vec<AliasConfig>, ConfigError> {
    if aliases.len() > ALIASES_MAX {
        let most = format!("at most {ALIASES_MAX} of them");
        return Err(value("aliases", aliases.len(), most));
    }
    let mut seen = HashSet::new();
    let mut checked = Vec::with_capacity(aliases.len());
    for (at, alias) in aliases.into_iter().enumerate() {
        let alias = alias.check(at, models)?;
        let mut owners: Vec<_> = alias
            .tenants
            .iter()
            .map(|tenant| Some(tenant.clone()))
            .collect();
        if owners.is_empty() {
            owners.push(None);
        }
        for owner in owners {
            if !seen.insert((alias.name.clone(), owner)) {
                let key = format!("aliases[{at}].name");
                return Err(value(&key, alias.name, "each name once for a tenant"));
            }
        }
        checked.push(alias);
    }
    Ok(checked)
}

/// A price for an alias would never be charged.
pub(super) fn unpriced(aliases: &[AliasConfig], prices: &Prices) -> Result<(), ConfigError> {
    let is_alias =
        |name: &&String| *name != DEFAULT_MODEL && aliases.iter().any(|alias| alias.name == **name);
    match prices.models.iter().map(|(name, _)| name).find(is_alias) {
        Some(name) => Err(value(
            "prices",
            name,
            "the ids of models; an alias costs what its model costs",
        )),
        None => Ok(()),
    }
}

impl AliasFile {
    fn check(self, at: usize, models: &[ModelConfig]) -> Result<AliasConfig, ConfigError> {
        let Self {
            name,
            model,
            tenants,
        } = self;
        let key = |field: &str| format!("aliases[{at}].{field}");
        if name.is_empty() || name.len() > NAME_BYTES_MAX {
            return Err(value(&key("name"), name, "1 to 256 bytes"));
        }
        if models.iter().any(|model| model.id == name) {
            let allowed = "a name that is no model's id: an id always means its own model";
            return Err(value(&key("name"), name, allowed));
        }
        if !models.iter().any(|known| known.id == model) {
            let ids: Vec<_> = models.iter().map(|model| model.id.as_str()).collect();
            let allowed = match ids.as_slice() {
                [] => "the id of a model, and [[models]] has none".to_owned(),
                ids => format!("the id of a model in [[models]]: {}", ids.join(", ")),
            };
            return Err(value(&key("model"), model, allowed));
        }
        let tenants = match tenants {
            None => Vec::new(),
            Some(names) if names.is_empty() => {
                let allowed = "at least one tenant, or no such key for all of them";
                return Err(value(&key("tenants"), "[]", allowed));
            }
            Some(names) => names
                .into_iter()
                .map(|name| {
                    let allowed = "names of tenants: 1 to 64 of a-z A-Z 0-9 . _ -";
                    TenantId::new(&name).map_err(|_| value(&key("tenants"), name, allowed))
                })
                .collect::<Result<_, _>>()?,
        };
        Ok(AliasConfig {
            name,
            model,
            tenants,
        })
    }
}
