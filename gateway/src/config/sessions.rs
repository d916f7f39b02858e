//! How are sessions found, and which spellings of a prompt are made one?

use std::collections::{BTreeMap, HashMap};

use dialects::normalise::Options;
use dialects::session::{Choices, Refused, Table};
use serde::Deserialize;

use super::file::value;
use super::{ConfigError, NormaliseConfig};
use crate::store::TenantId;

/// `[sessions]` in the file.
#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, default)]
pub(super) struct SessionsFile {
    headers: Vec<String>,
    enable: Vec<String>,
    disable: Vec<String>,
}

impl SessionsFile {
    /// The table with the operator's choices.
    pub(super) fn check(self) -> Result<Table, ConfigError> {
        let Self {
            headers,
            enable,
            disable,
        } = self;
        let choices = Choices {
            headers,
            enable,
            disable,
        };
        Table::new(&choices).map_err(|refused| match refused {
            Refused::Header(name) => value("sessions.headers", name, "names of headers"),
            Refused::Row(name) => {
                let rows = Table::known();
                let allowed = format!("signals of the table: {rows}");
                value("sessions.enable or sessions.disable", name, allowed)
            }
        })
    }
}

/// `[normalise]` in the file: everyone's switches, and where a tenant's differ.
#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, default)]
pub(super) struct NormaliseFile {
    billing_line: Option<bool>,
    content: Option<bool>,
    cache_marks: Option<bool>,
    schema_order: Option<bool>,
    arguments: Option<bool>,
    tenants: BTreeMap<String, SwitchesFile>,
}

/// Switches in the file; one that is not said is everyone's.
#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, default)]
struct SwitchesFile {
    billing_line: Option<bool>,
    content: Option<bool>,
    cache_marks: Option<bool>,
    schema_order: Option<bool>,
    arguments: Option<bool>,
}

impl NormaliseFile {
    /// Everyone's options and each tenant's.
    pub(super) fn check(self) -> Result<NormaliseConfig, ConfigError> {
        let Self {
            billing_line,
            content,
            cache_marks,
            schema_order,
            arguments,
            tenants,
        } = self;
        let switches = SwitchesFile {
            billing_line,
            content,
            cache_marks,
            schema_order,
            arguments,
        };
        let everyone = switches.over(Options::default());
        let named = |(name, switches): (String, SwitchesFile)| {
            let key = format!("normalise.tenants.{name}");
            let tenant =
                TenantId::new(&name).map_err(|error| value(&key, &name, error.to_string()))?;
            Ok((tenant, switches.over(everyone)))
        };
        Ok(NormaliseConfig {
            everyone,
            tenants: tenants
                .into_iter()
                .map(named)
                .collect::<Result<HashMap<_, _>, _>>()?,
        })
    }
}

impl SwitchesFile {
    fn over(self, others: Options) -> Options {
        let Self {
            billing_line,
            content,
            cache_marks,
            schema_order,
            arguments,
        } = self;
        Options {
            billing_line: billing_line.unwrap_or(others.billing_line),
            content: content.unwrap_or(others.content),
            cache_marks: cache_marks.unwrap_or(others.cache_marks),
            schema_order: schema_order.unwrap_or(others.schema_order),
            arguments: arguments.unwrap_or(others.arguments),
        }
    }
}

#[cfg(test)]
mod tests {
    //! Catches a switch that moves another one, and a name that is mistaken in silence.
    use std::path::Path;

    use dialects::normalise::Options;

    use crate::config::Config;
    use crate::store::TenantId;

    fn parsed(text: &str) -> Result<Config, String> {
        let text = format!("listen = \"127.0.0.1:0\"\ndata = \"d\"\n{text}");
        Config::parse(&text, Path::new("homing.toml")).map_err(|error| error.to_string())
    }

    #[test]
    fn tenants_differ_where_they_say_so() {
        let config = parsed(
            "[normalise]\ncontent = false\n[normalise.tenants.a]\ncontent = true\narguments = false",
        )
        .expect("valid");
        let of = |name| config.normalise.of(&TenantId::new(name).expect("a name"));
        let on = Options::default();
        let everyone = Options {
            content: false,
            ..on
        };
        assert_eq!(of("b"), everyone);
        let own = Options {
            arguments: false,
            ..on
        };
        assert_eq!(of("a"), own);
        let nothing = parsed("").expect("valid");
        let tenant = TenantId::new("a").expect("a name");
        assert_eq!(nothing.normalise.of(&tenant), on);
    }

    #[test]
    fn signals_are_chosen_by_name() {
        let config =
            parsed("[sessions]\nheaders = [\"X-Ticket\"]\ndisable = [\"body.prompt_cache_key\"]")
                .expect("valid");
        let names: Vec<&str> = config.sessions.names().take(2).collect();
        assert_eq!(names, ["x-session-affinity", "x-ticket"]);
        for (text, part) in [
            (
                "[sessions]\nheaders = [\"a b\"]",
                "`sessions.headers` is a b",
            ),
            (
                "[sessions]\nenable = [\"user\"]",
                "is user; allowed: signals",
            ),
            ("[sessions]\ndisable = [\"x-nonsense\"]", "is x-nonsense"),
            ("[sessions]\nrows = []", "rows"),
            ("[normalise]\nkeys = true", "keys"),
            ("[normalise.tenants.\"a b\"]\ncontent = true", "a b"),
            ("[normalise.tenants.a]\ncontents = true", "contents"),
        ] {
            let error = parsed(text).expect_err("a refusal");
            assert!(error.contains(part), "{error}");
        }
    }
}
