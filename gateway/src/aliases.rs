//! Which model is meant by a name?
//!
//! Agents ask for models by names that are built into them (`claude-…`, `gpt-…`). The operator
//! says what each such name stands for: an alias is exact or has `*` for any run of characters, and
//! holds for every tenant or for some. The name is resolved before anything depends on the model
//! (session, hashes, price); the node hears the model's id, the client its own name, the ledger
//! both.
//!
//! Where several aliases fit, an exact one goes before a pattern, then the tenant's own before
//! everyone's, then the one with more characters beside its stars; equal ones in the file's order.
//! A model's own id always means that model, so a pattern may well cover it.
//!
//! Left out: aliases of aliases. The configuration refuses them, so that one look suffices.

use std::cmp::Reverse;

use crate::config::AliasConfig;
use crate::store::TenantId;

/// Longest name that any alias fits: as long as a model's id may be. The name goes into the ledger.
pub(crate) const NAME_BYTES_MAX: usize = 256;

/// The configured aliases, the strongest first.
#[derive(Debug, Default)]
pub(crate) struct Aliases {
    strongest_first: Vec<AliasConfig>,
}

impl Aliases {
    /// Sorts them once, so that the first that fits is the right one.
    pub(crate) fn new(aliases: &[AliasConfig]) -> Self {
        let mut strongest_first = aliases.to_vec();
        strongest_first.sort_by_key(|alias| {
            let literal = alias.name.len() - alias.name.matches('*').count();
            (
                is_pattern(&alias.name),
                alias.tenants.is_empty(),
                Reverse(literal),
            )
        });
        Self { strongest_first }
    }

    /// The id of the model that this tenant means by `asked`.
    pub(crate) fn resolve(&self, tenant: &TenantId, asked: &str) -> Option<&str> {
        if asked.len() > NAME_BYTES_MAX {
            return None;
        }
        self.of(tenant)
            .find(|alias| fits(&alias.name, asked))
            .map(|alias| alias.model.as_str())
    }

    /// Those of them that are names, not patterns.
    pub(crate) fn names_of(&self, tenant: &TenantId) -> impl Iterator<Item = &AliasConfig> {
        self.of(tenant).filter(|alias| !is_pattern(&alias.name))
    }

    /// The aliases that hold for this tenant, patterns included, the strongest first.
    pub(crate) fn of(&self, tenant: &TenantId) -> impl Iterator<Item = &AliasConfig> {
        let holds =
            |alias: &&AliasConfig| alias.tenants.is_empty() || alias.tenants.contains(tenant);
        self.strongest_first.iter().filter(holds)
    }
}

/// Whether a name stands for many.
fn is_pattern(name: &str) -> bool {
    name.contains('*')
}

/// Whether `name` is what `pattern` says, with `*` for any run of characters, the empty one too.
fn fits(pattern: &str, name: &str) -> bool {
    let mut parts = pattern.split('*');
    // The first part is a prefix, the last a suffix; those between are taken where they come
    // first, which leaves the most for those behind.
    let first = parts.next().unwrap_or_default();
    let Some(last) = parts.next_back() else {
        return name == pattern;
    };
    let Some(mut rest) = name
        .strip_prefix(first)
        .and_then(|rest| rest.strip_suffix(last))
    else {
        return false;
    };
    for part in parts {
        let Some(at) = rest.find(part) else {
            return false;
        };
        rest = &rest[at + part.len()..];
    }
    true
}

#[cfg(test)]
mod tests {
    //! Catches a name that means the wrong model, or one to a tenant that may not use the alias.
    use super::*;
    use rand::rngs::SmallRng;
    use rand::{RngExt as _, SeedableRng as _};

    fn alias(name: &str, model: &str, tenants: &[&str]) -> AliasConfig {
        AliasConfig {
            name: name.to_owned(),
            model: model.to_owned(),
            tenants: tenants
                .iter()
                .map(|tenant| TenantId::new(tenant).expect("a name"))
                .collect(),
        }
    }

    #[test]
    fn the_strongest_alias_wins() {
        let aliases = Aliases::new(&[
            alias("*", "any", &[]),
            alias("claude-*", "large", &[]),
            alias("claude-*-haiku-*", "small", &[]),
            alias("claude-*", "theirs", &["b"]),
            alias("claude-4-haiku-x", "exact", &[]),
            alias("only-b", "theirs", &["b", "c"]),
        ]);
        for (tenant, asked, expected) in [
            ("a", "claude-4", "large"),
            ("a", "claude-4-haiku-1", "small"),
            ("a", "claude-4-haiku-x", "exact"),
            ("a", "claude-", "large"),
            ("a", "Claude-4", "any"),
            ("a", "only-b", "any"),
            ("b", "claude-4", "theirs"),
            // Exact before the tenant's own pattern, which goes before a longer one of everyone's.
            ("b", "claude-4-haiku-x", "exact"),
            ("b", "claude-4-haiku-1", "theirs"),
            ("b", "only-b", "theirs"),
            ("c", "only-b", "theirs"),
            ("c", "", "any"),
        ] {
            let tenant = TenantId::new(tenant).expect("a name");
            assert_eq!(aliases.resolve(&tenant, asked), Some(expected), "{asked}");
        }
        let tenant = TenantId::new("a").expect("a name");
        assert_eq!(aliases.resolve(&tenant, &"x".repeat(257)), None);
        assert_eq!(Aliases::default().resolve(&tenant, "claude-4"), None);
    }

    /// What `*` means, written down without any cleverness.
    fn fits_slowly(pattern: &[u8], name: &[u8]) -> bool {
        match pattern {
            [] => name.is_empty(),
            [b'*', rest @ ..] => (0..=name.len()).any(|skip| fits_slowly(rest, &name[skip..])),
            [first, rest @ ..] => name.first() == Some(first) && fits_slowly(rest, &name[1..]),
        }
    }

    #[test]
    fn patterns_fit_as_their_slow_twin_says() {
        let mut random = SmallRng::seed_from_u64(7);
        let mut text = |letters: &[u8], most: usize| -> String {
            let length = random.random_range(0..=most);
            let letter = |_| char::from(letters[random.random_range(0..letters.len())]);
            (0..length).map(letter).collect()
        };
        let mut fitted = 0;
        for _ in 0..20_000 {
            let (pattern, name) = (text(b"ab*", 6), text(b"ab", 8));
            let expected = fits_slowly(pattern.as_bytes(), name.as_bytes());
            assert_eq!(fits(&pattern, &name), expected, "{pattern} {name}");
            fitted += usize::from(expected);
        }
        assert!(fitted > 1000, "{fitted}");
    }
}
