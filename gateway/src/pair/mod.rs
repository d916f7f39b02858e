//! How do two nodes share a turn?
//!
//! One computes the prompt, the other answers (`policies::pick` chose both together). What tells
//! them so is their connector's affair; here both requests are sent, watched and given up together:
//!
//! 1. Both are counted as load, each with its part.
//! 2. Both are asked at once, or the second with the first one's answer. The first has a deadline of
//!    its own; from its answer on the second has one for the first byte of a stream.
//! 3. A failure of either drops the other request, which closes its connection. Nothing was relayed
//!    by then, so that the turn is tried again elsewhere (`recover`), under a new name.
//! 4. Both have done their part: the answer is relayed as any other, with the first node's cached
//!    tokens in its usage. The turn has one record, whatever was asked of how many nodes.
//!
//! Which node is to blame decides where the turn goes next. A second node that answers with an error
//! of its own making, or breaks its stream off before it began, most likely did not get the KV: it
//! is alive, and can compute the prompt itself; so the first node is avoided. One that is gone, busy
//! or silent is to blame itself.

use std::sync::Arc;
use std::time::{Duration, Instant};

use policies::pick::Fetched;
use policies::retry::Outcome;
use policies::view::{Role, Splits};

use self::asked::{Asked, Done, Fault, Side};
use self::connector::{Half, Handover, connector};
use crate::fleet::{Dispatch, InFlight, KvInfo, Node, Part};
use crate::recover::{Failed, answered, cancelled, prefetch_tokens};
use crate::relay::{Answer, End, Flow, Heard, Prefilled, Refusal, Waited, watched};
use crate::route::Chosen;
use crate::turn::{Job, stopped};
use dialects::Dialect;

mod asked;
mod connector;
mod homing;
mod sglang;
mod vllm;

/// Whether two nodes may share a turn: one prompt, and one answer that does not repeat it.
pub(crate) fn splits(job: &Job<'_>) -> Splits {
    let repeats = || memchr::memmem::find(&job.body, br#""echo""#).is_some();
    match job.dialect {
        Dialect::Embeddings => Splits::No,
        Dialect::Completions if repeats() => Splits::No,
        _ if job.choices == 1 => Splits::Yes,
        _ => Splits::No,
    }
}

/// The two nodes of one attempt.
struct Two {
    prefill: Arc<Node>,
    decode: Arc<Node>,
    prefill_kv: Arc<KvInfo>,
    decode_kv: Arc<KvInfo>,
    /// Names the transfer.
    id: u128,
}

impl Two {
    fn of(chosen: &Chosen, prefill: &Arc<Node>) -> Option<Self> {
        debug_assert_eq!(prefill.duty.role, Role::Prefill);
        Some(Self {
            prefill: Arc::clone(prefill),
            decode: Arc::clone(&chosen.node),
            prefill_kv: prefill.facts().kv.clone()?,
            decode_kv: chosen.node.facts().kv.clone()?,
            id: rand::random(),
        })
    }

    fn handover(&self) -> Handover<'_> {
        Handover {
            id: self.id,
            prefill: Half {
                kv: &self.prefill_kv,
                bootstrap: self.prefill.duty.bootstrap.as_ref(),
            },
            decode: Half {
                kv: &self.decode_kv,
                bootstrap: self.decode.duty.bootstrap.as_ref(),
            },
        }
    }
}

/// Both nodes' shares of the load.
struct Loads {
    prefill: InFlight,
    decode: InFlight,
}

impl Loads {
    fn of(flow: &Flow<'_>, chosen: &Chosen, two: &Two) -> Self {
        let job = flow.job;
        let decision = &chosen.decision;
        let moved = decision.pair().map_or(0, |pair| pair.moved_tokens);
        let dispatch = |part, (cached_tokens, fetched), output_tokens| Dispatch {
            prompt_tokens: job.prompt.tokens,
            cached_tokens,
            fetched,
            output_tokens,
            chain: &job.prompt.chain.hashes,
            session: job.session.id.key,
            part,
        };
        let prompt = dispatch(
            Part::Prompt,
            (decision.expected_cached_tokens, decision.fetched()),
            0,
        );
        let held = job.prompt.tokens.saturating_sub(moved);
        let answer = dispatch(
            Part::Answer,
            (held, Fetched::default()),
            job.output_tokens_expected,
        );
        let fleet = &flow.gateway.fleet;
        Self {
            prefill: fleet.dispatch(&two.prefill, &prompt),
            decode: fleet.dispatch(&two.decode, &answer),
        }
    }
}

/// One attempt at a turn by two nodes.
pub(crate) async fn attempt(
    flow: &mut Flow<'_>,
    chosen: Chosen,
    prefill: Arc<Node>,
) -> Result<End, Failed> {
    let Some(two) = Two::of(&chosen, &prefill) else {
        let cause = "a node does not tell about its KV any more".to_owned();
        return Err(Failed::Elsewhere(prefill, Outcome::Status(503), cause));
    };
    let mut loads = Loads::of(flow, &chosen, &two);
    let connector = connector(two.prefill.duty.connector);
    let began = Instant::now();
    let about = (flow.gateway, flow.job, flow.ctx.request_id.as_str());
    let asked = Asked::of(about, &two, connector).map_err(|cause| {
        // A body that we have written ourselves.
        Failed::Elsewhere(Arc::clone(&prefill), Outcome::BadAnswer, cause)
    })?;
    let asked = asked.prefetch(prefetch_tokens(&chosen));
    let hears = asked.hears;
    let both = Box::pin(asked.both(&two, connector, &mut loads.prefill));
    let waited = watched(flow.client, &mut flow.stopping, both).await;
    let outcome = match &waited {
        Waited::Done(Ok(_)) => "computed",
        Waited::Done(Err(fault)) => fault.side().as_str(),
        Waited::ClientGone | Waited::Stopping => "left",
    };
    let handovers = &flow.gateway.metrics.handovers;
    handovers
        .with_label_values(&[prefill.id.as_str(), outcome])
        .inc();
    match waited {
        Waited::Done(Ok((done, exchange))) => {
            flow.gateway.fleet.succeeded(&prefill);
            let prefilled = prefilled(&chosen, &two, (done, began), loads.prefill);
            let answer = Answer {
                exchange,
                load: Some(loads.decode),
                heard: hears.then(Heard::default),
                prefilled: Some(Box::new(prefilled)),
                chosen,
            };
            blamed(answered(flow, answer).await, prefill)
        }
        Waited::Done(Err(fault)) => failed(flow, fault, (chosen, prefill, loads)).await,
        Waited::ClientGone => Ok(cancelled(flow)),
        Waited::Stopping => Ok(End::Refused(stopped())),
    }
}

/// What the answer owes to the node that computed its prompt.
fn prefilled(
    chosen: &Chosen,
    two: &Two,
    (done, began): (Done, Instant),
    load: InFlight,
) -> Prefilled {
    let decision = &chosen.decision;
    let first = decision.prefill_candidates().iter();
    let first = first.clone().find(|one| one.node == two.prefill.id);
    let queue_ms = first.map_or(0.0, |one| one.terms.queue_ms);
    let took_ms = done.at.duration_since(began).as_secs_f64() * 1000.0;
    Prefilled {
        node: Arc::clone(&two.prefill),
        cached_tokens: done
            .cached_tokens
            .unwrap_or(decision.expected_cached_tokens),
        load: Some(load),
        at: done.at,
        along_ms: if two.prefill.duty.connector.overlaps_prefill() {
            (took_ms - queue_ms).max(0.0)
        } else {
            0.0
        },
        bytes: decision.pair().map_or(0.0, |pair| pair.moved_bytes),
    }
}

/// One of them failed; the other's request is gone by now.
async fn failed(
    flow: &mut Flow<'_>,
    fault: Fault,
    (chosen, prefill, loads): (Chosen, Arc<Node>, Loads),
) -> Result<End, Failed> {
    match fault {
        Fault::Nothing(Side::Prefill, outcome, cause) => {
            Err(Failed::Elsewhere(prefill, outcome, cause))
        }
        Fault::Nothing(Side::Decode, outcome, cause) => {
            blamed(Err(Failed::Nothing(outcome, cause)), prefill)
        }
        Fault::Refused(side, exchange) => {
            let (chosen, load) = match side {
                Side::Decode => (chosen, loads.decode),
                // The client reads whose words these are.
                Side::Prefill => {
                    let chosen = Chosen {
                        node: Arc::clone(&prefill),
                        prefill: None,
                        giver: None,
                        decision: chosen.decision,
                    };
                    (chosen, loads.prefill)
                }
            };
            let answer = Answer {
                exchange: *exchange,
                load: Some(load),
                heard: None,
                prefilled: None,
                chosen,
            };
            let read = match Refusal::read(flow, answer).await {
                Ok(refusal) => Err(Failed::Refusal(refusal)),
                Err(End::Retry(outcome, cause)) => match side {
                    Side::Prefill => Err(Failed::Elsewhere(Arc::clone(&prefill), outcome, cause)),
                    Side::Decode => Err(Failed::Nothing(outcome, cause)),
                },
                Err(end) => Ok(end),
            };
            match side {
                Side::Prefill => read,
                Side::Decode => blamed(read, prefill),
            }
        }
    }
}

/// Blames the first node for what the second one most likely suffers from: see the module.
fn blamed(ended: Result<End, Failed>, prefill: Arc<Node>) -> Result<End, Failed> {
    let did_not_get_it = |outcome: Outcome| {
        matches!(
            outcome,
            Outcome::BadAnswer | Outcome::Status(500 | 502 | 504)
        )
    };
    match ended {
        Ok(End::Retry(outcome, cause)) if did_not_get_it(outcome) => {
            Err(Failed::Elsewhere(prefill, outcome, cause))
        }
        Err(failed) if did_not_get_it(failed.outcome()) => {
            Err(Failed::Elsewhere(prefill, failed.outcome(), failed.cause()))
        }
        ended => ended,
    }
}

/// How long each part may take.
#[derive(Clone, Copy)]
struct Deadlines {
    prefill: Duration,
    /// From the prompt's end to the first byte of an answer; none where that has no early first
    /// byte.
    first_byte: Option<Duration>,
}
