//! What goes on the bill, and when?
//!
//! A record is opened before the request is dispatched and settled before the client reads the
//! usage or the terminator: whatever a client has read, the ledger has. Tokens are the node's own
//! report where there is one; without it, the prompt's tokens and those relayed, with the cached
//! share that was expected.
//!
//! Left out: who rates (policies) and who writes (ledger).

use policies::price::{PriceBook, Usage};

use crate::ctx::Ctx;
use crate::ledger::{Ledger, LedgerError, OpenEntry, Status, UsageRecord};
use crate::metrics::Metrics;
use crate::relay::chunk::NodeUsage;
use dialects::error::{ApiError, ErrorKind};

/// One request's account.
pub(crate) struct Bill {
    entry: Option<OpenEntry>,
    opening: UsageRecord,
    /// What is on record so far.
    so_far: Usage,
}

/// The parts of a record that are known at dispatch.
pub(crate) struct Account<'a> {
    pub(crate) tenant: &'a str,
    pub(crate) key_id: &'a str,
    pub(crate) model: &'a str,
    pub(crate) model_asked: &'a str,
    pub(crate) session: &'a str,
    pub(crate) node: &'a str,
}

impl Bill {
    /// Opens the record; a ledger that cannot take it means that the request cannot run.
    pub(crate) fn open(
        ledger: &Ledger,
        prices: &PriceBook,
        ctx: &Ctx,
        account: &Account<'_>,
    ) -> Result<Self, ApiError> {
        let opening = UsageRecord {
            record_id: ctx.own_id.as_u128(),
            request_id: ctx.request_id.clone(),
            tenant: account.tenant.to_owned(),
            key_id: account.key_id.to_owned(),
            model: account.model.to_owned(),
            model_asked: account.model_asked.to_owned(),
            node: account.node.to_owned(),
            session: account.session.to_owned(),
            t_ms: ctx.t_ms,
            input_tokens: 0,
            cached_tokens: 0,
            output_tokens: 0,
            status: Status::Failed,
            cost_nano_usd: 0,
            cache_savings_nano_usd: 0,
            price_version: prices.version.clone(),
            ttft_ms: 0,
            duration_ms: 0,
        };
        let entry = ledger.begin(&opening).map_err(|error| {
            let message =
                "The usage of this request cannot be recorded right now. Try again in a moment.";
            ApiError::new(ErrorKind::LedgerUnavailable, message).because(error)
        })?;
        Ok(Self {
            entry: Some(entry),
            opening,
            so_far: Usage::default(),
        })
    }

    /// The request went to this node.
    pub(crate) fn at_node(&mut self, node: &str) {
        node.clone_into(&mut self.opening.node);
        if let Some(entry) = &mut self.entry {
            entry.at_node(node);
        }
    }

    /// So much has been relayed.
    pub(crate) fn checkpoint(&mut self, usage: Usage) {
        self.so_far = usage;
        if let Some(entry) = &mut self.entry {
            entry.checkpoint(usage.input, usage.cached, usage.output);
        }
    }

    /// Whether the record is final.
    pub(crate) fn is_settled(&self) -> bool {
        self.entry.is_none()
    }

    /// Writes the final record; it is with the kernel when this returns. Later calls do nothing.
    pub(crate) fn settle(
        &mut self,
        prices: &PriceBook,
        metrics: &Metrics,
        ctx: &mut Ctx,
        (status, usage): (Status, Usage),
    ) -> Result<(), LedgerError> {
        let Some(entry) = self.entry.take() else {
            return Ok(());
        };
        let rated = prices.rate(&self.opening.model, &usage);
        let record = UsageRecord {
            input_tokens: usage.input,
            cached_tokens: usage.cached,
            output_tokens: usage.output,
            status,
            cost_nano_usd: rated.cost_nano_usd,
            cache_savings_nano_usd: rated.cache_savings_nano_usd,
            ttft_ms: ctx.line.ttft_ms.unwrap_or(0),
            duration_ms: ctx.elapsed_ms(),
            ..self.opening.clone()
        };
        ctx.line.outcome = status.as_str();
        (ctx.line.input, ctx.line.cached, ctx.line.output) =
            (usage.input, usage.cached, usage.output);
        entry.settle(record)?;
        for (class, tokens) in [
            ("input", usage.input),
            ("cached", usage.cached),
            ("output", usage.output),
        ] {
            metrics
                .tokens
                .with_label_values(&[&self.opening.model, class])
                .inc_by(tokens);
        }
        Ok(())
    }
}

impl From<NodeUsage> for Usage {
    fn from(usage: NodeUsage) -> Self {
        let NodeUsage {
            input,
            cached,
            output,
        } = usage;
        Self {
            input,
            cached,
            output,
        }
    }
}
