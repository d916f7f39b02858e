//! How does an operator make tenants and keys?
//!
//! Directly in the database of a data directory; a running gateway notices within a second. A new
//! key is printed once, alone on stdout, so that a script can take it.

use std::fmt::Write as _;
use std::path::PathBuf;

use clap::{Args, Subcommand};
use serde_json::json;

use super::{Failure, hint, print};
use crate::store::{Debug, Store, TenantId};

#[derive(Debug, Args)]
pub(super) struct Common {
    /// Data directory of the gateway; it may be running
    #[arg(long, value_name = "DIR", default_value = "data")]
    data: PathBuf,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Subcommand)]
pub(super) enum TenantCommand {
    /// Create a tenant
    Create {
        /// Its name: 1 to 64 of a-z A-Z 0-9 . _ -
        #[arg(value_name = "NAME", required_unless_present = "named")]
        name: Option<String>,
        /// The same, as an option
        #[arg(
            long = "name",
            id = "named",
            value_name = "NAME",
            conflicts_with = "name"
        )]
        named: Option<String>,
        /// Let its keys ask for `x-homing-debug` headers
        #[arg(long)]
        debug: bool,
        #[command(flatten)]
        common: Common,
    },
    /// List tenants
    List {
        #[command(flatten)]
        common: Common,
    },
}

#[derive(Debug, Subcommand)]
pub(super) enum KeyCommand {
    /// Create an API key and print it, this once
    Create {
        /// Whose key
        #[arg(long, value_name = "NAME")]
        tenant: String,
        #[command(flatten)]
        common: Common,
    },
    /// List API keys (ids, never the keys)
    List {
        /// Only this tenant's
        #[arg(long, value_name = "NAME")]
        tenant: Option<String>,
        #[command(flatten)]
        common: Common,
    },
    /// Revoke an API key; a running gateway refuses it within a second
    Revoke {
        /// Id of the key, as listed (key_…)
        #[arg(value_name = "ID")]
        id: String,
        #[command(flatten)]
        common: Common,
    },
}

pub(super) fn tenant(command: &TenantCommand) -> Result<(), Failure> {
    match command {
        TenantCommand::Create {
            name,
            named,
            debug,
            common,
        } => {
            let name = TenantId::new(name.as_ref().or(named.as_ref()).map_or("", String::as_str))?;
            let debug = if *debug {
                Debug::Permitted
            } else {
                Debug::Refused
            };
            Store::open(&common.data)?.create_tenant(&name, debug)?;
            if common.json {
                return print(&format!("{}\n", json!({ "tenant": name.as_str() })));
            }
            hint(&format!("Give it a key: homing key create --tenant {name}"));
            print(&format!("{name}\n"))
        }
        TenantCommand::List { common } => {
            let tenants = Store::open(&common.data)?.tenants()?;
            if common.json {
                let rows = tenants
                    .iter()
                    .map(|tenant| json!({ "tenant": tenant.id.as_str(), "debug": tenant.debug }));
                return print(&format!("{:#}\n", rows.collect::<serde_json::Value>()));
            }
            let mut text = String::new();
            for tenant in tenants {
                let debug = if tenant.debug { "  (debug)" } else { "" };
                writeln!(text, "{}{debug}", tenant.id)?;
            }
            print(&text)
        }
    }
}

pub(super) fn key(command: &KeyCommand) -> Result<(), Failure> {
    match command {
        KeyCommand::Create { tenant, common } => {
            let tenant = TenantId::new(tenant)?;
            let key = Store::open(&common.data)?.create_key(&tenant)?;
            if common.json {
                let row = json!({ "id": key.id, "tenant": tenant.as_str(), "api_key": key.secret });
                return print(&format!("{row}\n"));
            }
            hint(&format!(
                "Key {} of {tenant}. It is shown this once.",
                key.id
            ));
            print(&format!("{}\n", key.secret))
        }
        KeyCommand::List { tenant, common } => {
            let mut keys = Store::open(&common.data)?.keys()?;
            keys.retain(|key| tenant.as_ref().is_none_or(|tenant| key.tenant == *tenant));
            if common.json {
                let rows = keys.iter().map(|key| {
                    json!({
                        "id": key.id, "tenant": key.tenant, "created_ms": key.created_ms,
                        "revoked_ms": key.revoked_ms,
                    })
                });
                return print(&format!("{:#}\n", rows.collect::<serde_json::Value>()));
            }
            let mut text = String::new();
            for key in keys {
                let state = if key.revoked_ms.is_some() {
                    "revoked"
                } else {
                    "valid"
                };
                writeln!(text, "{}  {:<7}  {}", key.id, state, key.tenant)?;
            }
            print(&text)
        }
        KeyCommand::Revoke { id, common } => {
            Store::open(&common.data)?.revoke_key(id)?;
            if common.json {
                return print(&format!("{}\n", json!({ "id": id, "revoked": true })));
            }
            print(&format!("{id} revoked\n"))
        }
    }
}
