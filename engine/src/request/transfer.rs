//! Which half of the work is wanted, and who has the other one?
//!
//! `kv_transfer_params`, as routers send it: vLLM's names, and ours for what vLLM leaves to its
//! connectors. Only a caller with the node token may send it: whoever holds blocks keeps others waiting,
//! and whoever names a node has this one connect to it.

use std::sync::Arc;
use std::time::Duration;

use super::fields::{Fields, missing, under};
use super::source::token_demanded;
use super::{Caller, Rules};
use crate::engine::{HOLD_MAX, OnFailure};
use crate::error::{ApiError, Kind};
use crate::kv::transfer::auth::ENGINE_ID_CHARS_MAX;
use crate::kv::transfer::{Endpoint, TransferId};

const NAME: &str = "kv_transfer_params";
/// How long the other node may let this one wait: vLLM's lease.
const TIMEOUT_DEFAULT: Duration = Duration::from_secs(30);
/// Addresses of one node.
const ENDPOINTS_MAX: usize = 8;

/// What is done with the prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Task {
    /// An answer.
    Answer,
    /// Its KV alone, kept under a ticket for a node that decodes.
    Prefill,
    /// Its KV and the first token, for a node that is named.
    HandOver(TransferTo),
    /// An answer, from the KV that another node has.
    TakeOver(TransferFrom),
}

/// For whom a prompt is computed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TransferTo {
    /// The transfer.
    pub id: TransferId,
    /// The engine id of the node that decodes.
    pub receiver: Arc<str>,
    /// How long its blocks are kept.
    pub timeout: Duration,
}

/// Who has blocks of the prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TransferFrom {
    /// The transfer that was arranged; none for what is in the other node's cache.
    pub id: Option<TransferId>,
    /// The other node's engine id.
    pub sender: Arc<str>,
    /// Where it is.
    pub endpoints: Vec<Endpoint>,
    /// How long nothing may come.
    pub timeout: Duration,
    /// How long all of it may take, if that is bounded.
    pub total: Option<Duration>,
    /// What becomes of the request then.
    pub on_failure: OnFailure,
}

/// Reads `kv_transfer_params`.
pub(super) fn task(fields: &Fields<'_>, rules: &Rules<'_>) -> Result<Task, ApiError> {
    let Some(params) = fields.object(NAME)? else {
        return Ok(Task::Answer);
    };
    if rules.caller != Caller::TokenHolder {
        return Err(token_demanded(NAME, "`kv_transfer_params`", "Leave it out"));
    }
    read(&Fields(params)).map_err(|error| under(NAME, error))
}

fn read(params: &Fields<'_>) -> Result<Task, ApiError> {
    let flag = |name| Ok::<_, ApiError>(params.flag(name)?.unwrap_or(false));
    let id = id(params)?;
    let cached = params.list("fetch_from")?.is_some();
    match (flag("do_remote_decode")?, flag("do_remote_prefill")?, id) {
        (true, true, _) => {
            let message = "`do_remote_prefill` and `do_remote_decode` exclude each other.";
            Err(ApiError::field("do_remote_prefill", message))
        }
        (true, false, None) => Ok(Task::Prefill),
        (true, false, Some(id)) => Ok(Task::HandOver(TransferTo {
            id,
            receiver: engine_id(params)?,
            timeout: timeout(params)?,
        })),
        (false, true, None) => Err(missing("transfer_id")),
        (false, true, Some(id)) => from(params, "remote_endpoints", Some(id)),
        (false, false, _) if cached => from(params, "fetch_from", None),
        (false, false, _) => Ok(Task::Answer),
    }
}

fn from(
    params: &Fields<'_>,
    endpoints_in: &'static str,
    id: Option<TransferId>,
) -> Result<Task, ApiError> {
    let on_failure = match params.text("on_failure")? {
        None | Some("recompute") => OnFailure::Recompute,
        Some("error") => OnFailure::Fail,
        Some(_) => {
            let message = "`on_failure` must be `recompute` or `error`.";
            return Err(ApiError::field("on_failure", message));
        }
    };
    Ok(Task::TakeOver(TransferFrom {
        id,
        sender: engine_id(params)?,
        endpoints: endpoints(params, endpoints_in)?,
        timeout: timeout(params)?,
        total: duration(params, "total_timeout_ms")?,
        on_failure,
    }))
}

fn id(params: &Fields<'_>) -> Result<Option<TransferId>, ApiError> {
    let Some(text) = params.text("transfer_id")? else {
        return Ok(None);
    };
    text.parse().map(Some).map_err(|_| {
        let message = "`transfer_id` must be 32 hexadecimal digits.";
        ApiError::field("transfer_id", message)
    })
}

fn engine_id(params: &Fields<'_>) -> Result<Arc<str>, ApiError> {
    let text = params
        .text("remote_engine_id")?
        .ok_or_else(|| missing("remote_engine_id"))?;
    if (1..=ENGINE_ID_CHARS_MAX).contains(&text.chars().count()) {
        return Ok(Arc::from(text));
    }
    let message = format!("`remote_engine_id` must have 1 to {ENGINE_ID_CHARS_MAX} characters.");
    Err(ApiError::field("remote_engine_id", message))
}

fn timeout(params: &Fields<'_>) -> Result<Duration, ApiError> {
    Ok(duration(params, "timeout_ms")?.unwrap_or(TIMEOUT_DEFAULT))
}

fn duration(params: &Fields<'_>, name: &'static str) -> Result<Option<Duration>, ApiError> {
    let most = HOLD_MAX.as_millis() as usize;
    let asked = params.count(name, (1, most))?;
    Ok(asked.map(|ms| Duration::from_millis(ms as u64)))
}

fn endpoints(params: &Fields<'_>, name: &'static str) -> Result<Vec<Endpoint>, ApiError> {
    let listed = params.list(name)?.ok_or_else(|| missing(name))?;
    if !(1..=ENDPOINTS_MAX).contains(&listed.len()) {
        let found = listed.len();
        let message = format!("`{name}` has {found} entries; it must have 1 to {ENDPOINTS_MAX}.");
        return Err(ApiError::field(name, message));
    }
    let endpoint = |(at, value): (usize, &serde_json::Value)| {
        let endpoint = value.as_str().and_then(|text| text.parse().ok());
        endpoint.ok_or_else(|| {
            let param = format!("{name}[{at}]");
            let message = format!("`{param}` must be `unix:/path` or `tcp://ADDRESS:PORT`.");
            ApiError::new(Kind::Invalid, "invalid_value", message).with_param(param)
        })
    };
    listed.iter().enumerate().map(endpoint).collect()
}
