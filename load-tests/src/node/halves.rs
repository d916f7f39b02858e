//! Which half of a request is asked for, and how does a node get the other one?
//!
//! `kv_transfer_params` as our engine takes them (docs/engine-api.md), without the node token: the node
//! that computes the prompt offers it under the transfer's name, the node that answers claims it and waits
//! for what it has not got. What does not come is computed here, or fails the request, as it says.
//! Left out: `fetch_from` (moved sessions), and nodes of other processes; both are refused by name.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::time::Duration;

use serde_json::{Value, json};

use super::api::Api;
use super::handover::{About, Claim, Computed, NoKv, TransferId};
use super::life::Ticket;
use super::roles::Role;
use super::state::Half;

/// How long the other node may let this one wait: our engine's default and its most.
const TIMEOUT_MS: u64 = 30_000;
const TIMEOUT_MS_MAX: u64 = 120_000;
/// Hexadecimal digits of a transfer's name.
const ID_DIGITS: usize = 32;

/// What is done with the prompt.
pub(super) enum Task {
    /// All of it.
    Whole,
    /// It is computed for another node.
    HandOver(To),
    /// It is answered, from what another node has computed.
    TakeOver(From),
}

/// For whom.
pub(super) struct To {
    pub(super) id: TransferId,
    receiver: String,
    timeout: Duration,
}

/// From whom.
pub(super) struct From {
    id: TransferId,
    sender: String,
    timeout: Duration,
    on_failure: OnFailure,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum OnFailure {
    Recompute,
    Fail,
}

/// Why a request is not served.
pub(super) struct Refusal {
    pub(super) code: &'static str,
    /// Within `kv_transfer_params`.
    param: &'static str,
    message: String,
}

impl Refusal {
    fn of(param: &'static str, message: impl Into<String>) -> Self {
        Self {
            code: "invalid_value",
            param,
            message: message.into(),
        }
    }

    /// OpenAI's form.
    pub(super) fn to_json(&self) -> Value {
        json!({"error": {"message": self.message, "type": "invalid_request_error",
                         "param": format!("kv_transfer_params.{}", self.param), "code": self.code}})
    }
}

impl Task {
    /// Reads `kv_transfer_params`; `endpoint` is this process's.
    pub(super) fn read(request: &Value, role: Role, endpoint: &str) -> Result<Self, Refusal> {
        let params = &request["kv_transfer_params"];
        if !params["fetch_from"].is_null() {
            let message = "Simulated nodes do not fetch what another one has cached.";
            return Err(Refusal::of("fetch_from", message));
        }
        let is_set = |name: &str| params[name] == true;
        match (is_set("do_remote_decode"), is_set("do_remote_prefill")) {
            (false, false) => Ok(Self::Whole),
            (true, true) => {
                let message = "`do_remote_prefill` and `do_remote_decode` exclude each other.";
                Err(Refusal::of("do_remote_prefill", message))
            }
            (true, false) if role == Role::Decode => Err(wrong_role(role, "do_remote_decode")),
            (false, true) if role == Role::Prefill => Err(wrong_role(role, "do_remote_prefill")),
            (true, false) => Ok(Self::HandOver(To {
                id: id(params)?,
                receiver: engine_id(params)?,
                timeout: timeout(params)?,
            })),
            (false, true) => {
                check_endpoints(params, endpoint)?;
                Ok(Self::TakeOver(From {
                    id: id(params)?,
                    sender: engine_id(params)?,
                    timeout: timeout(params)?,
                    on_failure: on_failure(params)?,
                }))
            }
        }
    }
}

fn wrong_role(role: Role, param: &'static str) -> Refusal {
    let role = role.as_str();
    Refusal {
        code: "wrong_role",
        param,
        message: format!("This node's role is {role}: it does not serve `{param}`."),
    }
}

fn id(params: &Value) -> Result<TransferId, Refusal> {
    let text = params["transfer_id"].as_str().unwrap_or_default();
    let id = TransferId::from_str_radix(text, 16).ok();
    let id = id.filter(|_| text.len() == ID_DIGITS);
    let message = "`transfer_id` must be 32 hexadecimal digits.";
    id.ok_or_else(|| Refusal::of("transfer_id", message))
}

fn engine_id(params: &Value) -> Result<String, Refusal> {
    let text = params["remote_engine_id"].as_str().map(str::to_owned);
    text.ok_or_else(|| Refusal::of("remote_engine_id", "`remote_engine_id` is missing."))
}

fn timeout(params: &Value) -> Result<Duration, Refusal> {
    let ms = match &params["timeout_ms"] {
        Value::Null => Some(TIMEOUT_MS),
        given => given.as_u64(),
    };
    let ms = ms.filter(|ms| (1..=TIMEOUT_MS_MAX).contains(ms));
    let message = format!("`timeout_ms` must be from 1 to {TIMEOUT_MS_MAX}.");
    ms.map(Duration::from_millis)
        .ok_or_else(|| Refusal::of("timeout_ms", message))
}

fn on_failure(params: &Value) -> Result<OnFailure, Refusal> {
    match params["on_failure"].as_str() {
        None if params["on_failure"].is_null() => Ok(OnFailure::Recompute),
        Some("recompute") => Ok(OnFailure::Recompute),
        Some("error") => Ok(OnFailure::Fail),
        _ => {
            let message = "`on_failure` must be `recompute` or `error`.";
            Err(Refusal::of("on_failure", message))
        }
    }
}

fn check_endpoints(params: &Value, own: &str) -> Result<(), Refusal> {
    let listed = params["remote_endpoints"].as_array();
    if listed.is_some_and(|listed| listed.iter().any(|endpoint| endpoint == own)) {
        return Ok(());
    }
    let message = format!(
        "Simulated nodes hand KV over within one process alone, which is {own} here: start both nodes \
         with one `homing-load node`."
    );
    Err(Refusal::of("remote_endpoints", message))
}

impl Api {
    /// The half that this node does; what is to be computed for another node is offered from here on.
    pub(super) fn half(
        &self,
        task: &Task,
        prompt: &[u32],
        salt: Option<&str>,
    ) -> Result<Half, Refusal> {
        match task {
            Task::Whole => Ok(Half::Whole),
            Task::TakeOver(_) => Ok(Half::Answer),
            Task::HandOver(to) => {
                let about = About {
                    sender: self.life.engine_id.clone(),
                    receiver: to.receiver.clone(),
                    prompt: fingerprint(prompt, salt),
                };
                let name = (to.id, to.timeout);
                let offer = self.handovers.offer(name, about, &self.life.post);
                let message = "`transfer_id` was used before; draw a new one for each try.";
                let offer = offer.ok_or_else(|| Refusal::of("transfer_id", message))?;
                Ok(Half::Prompt(offer))
            }
        }
    }

    /// Waits for what another node computes, until the first token is there or nothing comes any more.
    pub(super) async fn take_over(
        &self,
        ticket: &mut Ticket,
        from: &From,
        (prompt, salt): (&[u32], Option<&str>),
    ) -> Result<(), NoKv> {
        let about = About {
            sender: from.sender.clone(),
            receiver: self.life.engine_id.clone(),
            prompt: fingerprint(prompt, salt),
        };
        let why = match self.claimed(from, &about).await {
            Err(why) => why,
            Ok((computed, claim)) => {
                let gone = claim.gone();
                ticket.kv_comes(computed, claim);
                tokio::select! {
                    _ = ticket.beyond(0) => return Ok(()),
                    () = gone => NoKv::Gone,
                }
            }
        };
        match from.on_failure {
            OnFailure::Fail if ticket.fail() => Err(why),
            OnFailure::Fail => Ok(()),
            OnFailure::Recompute => {
                ticket.compute_here();
                Ok(())
            }
        }
    }

    async fn claimed(&self, from: &From, about: &About) -> Result<(Computed, Claim), NoKv> {
        let name = (from.id, from.timeout);
        let mut claim = self.handovers.claim(name, about).await?;
        // A node that lives tells so again and again, however long it takes.
        Ok((claim.computed().await?, claim))
    }
}

/// Where the KV is that this node has computed for another.
pub(super) fn reference(api: &Api, to: &To, prompt_blocks: usize) -> Value {
    let id = format!("{:032x}", to.id);
    json!({"do_remote_prefill": true, "do_remote_decode": false,
           "remote_engine_id": api.life.engine_id, "ticket": id, "transfer_id": id,
           "deadline_ms": u64::try_from(to.timeout.as_millis()).unwrap_or(u64::MAX),
           "blocks": prompt_blocks})
}

/// Stands for a prompt and its scope.
fn fingerprint(prompt: &[u32], salt: Option<&str>) -> u64 {
    let mut hasher = DefaultHasher::new();
    (prompt, salt).hash(&mut hasher);
    hasher.finish()
}
