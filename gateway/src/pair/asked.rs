//! What are the two nodes of a turn asked, and what do they say before a byte is relayed?

use std::time::Instant;

use bytes::{Bytes, BytesMut};
use policies::retry::Outcome;
use serde::Deserialize;
use serde_json::value::RawValue;
use tokio::time::timeout;

use super::connector::{Computed, Connector, Order, Unusable, fields};
use super::{Deadlines, Two};
use crate::fleet::{InFlight, Node};
use crate::proxy::Gateway;
use crate::recover::{answer_token_field, hears, prompt_token_field};
use crate::relay::chunk::{NodeUsage, facts, usage_of_whole};
use crate::turn::{Job, beside_others};
use crate::upstream::{Exchange, NodeRequest, Upstream, outcome};
use dialects::Delivery;

/// Largest answer of a node that computes a prompt: one token, and where its KV is.
const COMPUTED_BYTES_MAX: usize = 4 << 20;

/// Which of the two.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Side {
    Prefill,
    Decode,
}

impl Side {
    /// A metric label: whose failure it was.
    pub(super) fn as_str(self) -> &'static str {
        match self {
            Self::Prefill => "prefill_failed",
            Self::Decode => "decode_failed",
        }
    }
}

/// Why there is no answer.
pub(super) enum Fault {
    /// It gave none.
    Nothing(Side, Outcome, String),
    /// It said no.
    Refused(Side, Box<Exchange>),
}

impl Fault {
    pub(super) fn side(&self) -> Side {
        match self {
            Self::Nothing(side, ..) | Self::Refused(side, _) => *side,
        }
    }

    fn of(side: Side, error: &pingora::Error) -> Self {
        Self::Nothing(side, outcome(error), error.to_string())
    }
}

/// A prompt that has been computed.
pub(super) struct Done {
    /// Prompt tokens that were read from cache; none where the node does not say.
    pub(super) cached_tokens: Option<u64>,
    /// When.
    pub(super) at: Instant,
    kv_transfer_params: Option<Box<RawValue>>,
    finish_reason: Option<String>,
}

impl Done {
    fn computed(&self) -> Computed<'_> {
        Computed {
            kv_transfer_params: self.kv_transfer_params.as_deref(),
            finish_reason: self.finish_reason.as_deref(),
        }
    }
}

/// Both requests.
pub(super) struct Asked<'a> {
    upstream: &'a Upstream,
    prefill: NodeRequest<'a>,
    /// Without the connector's members.
    decode: NodeRequest<'a>,
    deadlines: Deadlines,
    delivery: Delivery,
    /// Whether the answer tells its tokens.
    pub(super) hears: bool,
}

impl<'a> Asked<'a> {
    /// So many leading tokens are expected in slower tiers of the node that computes the prompt.
    pub(super) fn prefetch(self, tokens: Option<u64>) -> Self {
        let prefill = NodeRequest {
            prefetch_tokens: tokens,
            ..self.prefill
        };
        Self { prefill, ..self }
    }

    /// `about` is the gateway, the turn and its id.
    pub(super) fn of(
        (gateway, job, request_id): (&'a Gateway, &'a Job<'_>, &'a str),
        two: &Two,
        connector: &dyn Connector,
    ) -> Result<Self, String> {
        // A prompt's own tokens are sent to both or to none: their KV must be of the same ones.
        let both_take = [&two.prefill, &two.decode]
            .iter()
            .all(|node| takes_tokens(node));
        let tokens = match both_take {
            true => prompt_token_field(job),
            false => String::new(),
        };
        let hears = hears(job, &two.decode) && (both_take || job.prompt.answers == 0);
        let request = |body: Bytes, more: String| NodeRequest {
            path: job.dialect.node_path(),
            request_id,
            timeout_ms: job.timeout_left_ms(),
            retention_s: job.retention_s,
            prefetch_tokens: None,
            body,
            more,
        };
        let body = beside_others(job.body.len(), || body_for_prefill(job, two, connector))?;
        let own = if hears { answer_token_field(job) } else { "" };
        let config = &gateway.config.disaggregation;
        Ok(Self {
            upstream: &gateway.upstream,
            decode: request(job.body.clone(), format!("{own}{tokens}")),
            prefill: request(body, tokens),
            deadlines: Deadlines {
                prefill: config.prefill_timeout,
                first_byte: match job.delivery {
                    Delivery::Whole => None,
                    Delivery::Stream | Delivery::StreamWithUsage => Some(config.transfer_timeout),
                },
            },
            delivery: job.delivery,
            hears,
        })
    }

    /// Asks both, in the connector's order. `load` is the first one's share of the load.
    pub(super) async fn both(
        mut self,
        two: &Two,
        connector: &dyn Connector,
        load: &mut InFlight,
    ) -> Result<(Done, Exchange), Fault> {
        let unusable =
            |error: Unusable| Fault::Nothing(Side::Prefill, Outcome::BadAnswer, error.to_string());
        if connector.order() == Order::Together {
            let members = connector.decode(&two.handover(), Computed::default());
            self.decode.more.push_str(&members.map_err(unusable)?);
            return self.together(two, connector, load).await;
        }
        let done = Box::pin(self.computed(two, connector, load)).await?;
        let members = connector.decode(&two.handover(), done.computed());
        self.decode.more.push_str(&members.map_err(unusable)?);
        let begun = Box::pin(self.begun(two));
        let exchange = within(self.deadlines, begun).await?;
        Ok((done, exchange))
    }

    async fn together(
        &self,
        two: &Two,
        connector: &dyn Connector,
        load: &mut InFlight,
    ) -> Result<(Done, Exchange), Fault> {
        let mut computed = Box::pin(self.computed(two, connector, load));
        let mut begun = Box::pin(self.begun(two));
        let mut exchange = None;
        let done = loop {
            tokio::select! {
                biased;
                done = &mut computed => break done?,
                // The prompt is still being computed: only a failure says anything now.
                early = &mut begun, if exchange.is_none() => exchange = Some(early?),
            }
        };
        let exchange = match exchange {
            Some(exchange) => exchange,
            None => within(self.deadlines, begun).await?,
        };
        Ok((done, exchange))
    }

    /// The first node's whole answer.
    async fn computed(
        &self,
        two: &Two,
        connector: &dyn Connector,
        load: &mut InFlight,
    ) -> Result<Done, Fault> {
        let limit = self.deadlines.prefill;
        let answer = async {
            let mut exchange = self
                .sent(&two.prefill, &self.prefill, Side::Prefill)
                .await?;
            let body = whole(&mut exchange).await?;
            let is_stream = exchange
                .header("content-type")
                .is_some_and(|kind| kind.trim_start().starts_with("text/event-stream"));
            self.upstream.release(exchange).await;
            Ok((body, is_stream))
        };
        let late = |_| {
            let cause = format!("the prompt was not computed within {limit:?}");
            Fault::Nothing(Side::Prefill, Outcome::TimeoutBeforeFirstByte, cause)
        };
        let (body, is_stream) = timeout(limit, Box::pin(answer)).await.map_err(late)??;
        let bad = |cause: String| Fault::Nothing(Side::Prefill, Outcome::BadAnswer, cause);
        let done = if is_stream {
            from_stream(&body)
        } else {
            from_object(&body)
        };
        let done = done.map_err(bad)?;
        connector
            .accept(done.computed())
            .map_err(|error| bad(error.to_string()))?;
        load.first_token();
        if let Some(cached_tokens) = done.cached_tokens {
            load.reported(cached_tokens);
        }
        Ok(done)
    }

    /// The head of the second node's answer, and of a stream its first byte.
    async fn begun(&self, two: &Two) -> Result<Exchange, Fault> {
        let mut exchange = self.sent(&two.decode, &self.decode, Side::Decode).await?;
        if self.delivery != Delivery::Whole {
            let begins = exchange.begins().await;
            begins.map_err(|error| Fault::of(Side::Decode, &error))?;
        }
        Ok(exchange)
    }

    /// The head of an answer that is not a refusal.
    async fn sent(
        &self,
        node: &Node,
        request: &NodeRequest<'_>,
        side: Side,
    ) -> Result<Exchange, Fault> {
        let sent = self.upstream.send(node, request).await;
        let exchange = sent.map_err(|error| Fault::Nothing(side, error.outcome, error.cause))?;
        match exchange.status() {
            200..300 => Ok(exchange),
            _ => Err(Fault::Refused(side, Box::new(exchange))),
        }
    }
}

/// Whether a node takes a prompt's tokens beside its messages.
fn takes_tokens(node: &Node) -> bool {
    node.facts().token_ids
}

fn body_for_prefill(job: &Job<'_>, two: &Two, connector: &dyn Connector) -> Result<Bytes, String> {
    let fields = fields(&job.body).map_err(|error| error.message)?;
    Ok(connector.prefill(&two.handover(), &fields).into())
}

/// Waits for the second node no longer than a handover may take. A stream that does not begin has
/// most likely not got its KV.
async fn within(
    deadlines: Deadlines,
    begun: impl Future<Output = Result<Exchange, Fault>>,
) -> Result<Exchange, Fault> {
    let Some(limit) = deadlines.first_byte else {
        return begun.await;
    };
    let late = |_| {
        let cause = format!("the answer did not begin within {limit:?} after its prompt");
        Fault::Nothing(Side::Prefill, Outcome::TimeoutBeforeFirstByte, cause)
    };
    timeout(limit, begun).await.map_err(late)?
}

async fn whole(exchange: &mut Exchange) -> Result<Bytes, Fault> {
    let mut all = BytesMut::new();
    loop {
        match exchange.next().await {
            Ok(Some(chunk)) if all.len() + chunk.len() > COMPUTED_BYTES_MAX => {
                let cause = format!("its answer is larger than {COMPUTED_BYTES_MAX} bytes");
                return Err(Fault::Nothing(Side::Prefill, Outcome::BadAnswer, cause));
            }
            Ok(Some(chunk)) => all.extend_from_slice(&chunk),
            Ok(None) => return Ok(all.freeze()),
            Err(error) => return Err(Fault::of(Side::Prefill, &error)),
        }
    }
}

/// What an answer in one object says.
fn from_object(body: &[u8]) -> Result<Done, String> {
    #[derive(Deserialize)]
    struct Wire {
        #[serde(default)]
        choices: Vec<Choice>,
        kv_transfer_params: Option<Box<RawValue>>,
        error: Option<serde::de::IgnoredAny>,
    }
    #[derive(Deserialize)]
    struct Choice {
        finish_reason: Option<String>,
    }
    let broken = |error| format!("its answer cannot be read: {error}");
    let wire: Wire = serde_json::from_slice(body).map_err(broken)?;
    if wire.error.is_some() {
        return Err("its answer is an error".to_owned());
    }
    let choice = wire.choices.into_iter().next();
    Ok(Done {
        cached_tokens: usage_of_whole(body).map(|usage| usage.cached),
        at: Instant::now(),
        kv_transfer_params: wire.kv_transfer_params.filter(|raw| raw.get() != "null"),
        finish_reason: choice.and_then(|choice| choice.finish_reason),
    })
}

/// What a stream says: the same body went to both nodes, and the client wants a stream.
fn from_stream(body: &[u8]) -> Result<Done, String> {
    let data = body.split(|byte| *byte == b'\n');
    let data = data.filter_map(|line| line.strip_prefix(b"data:"));
    let mut usage: Option<NodeUsage> = None;
    for chunk in data.filter_map(|data| facts(data.trim_ascii())) {
        if chunk.failed {
            return Err("its stream has an error".to_owned());
        }
        usage = chunk.usage.or(usage);
    }
    Ok(Done {
        cached_tokens: usage.map(|usage| usage.cached),
        at: Instant::now(),
        kv_transfer_params: None,
        finish_reason: None,
    })
}
