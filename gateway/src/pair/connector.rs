//! Which fields tell two nodes that they share a turn?
//!
//! One trait, and for each kind of node one implementation as pure functions over bodies: the
//! gateway's body for the node that answers is made once, and never edited for it (members are
//! added behind it); the body for the node that computes the prompt is made from it. Identities come
//! from what the nodes have told (`fleet::partner`), the transfer's name from the caller.
//! Fields as of vLLM's and SGLang's own routers in late 2026; no GPU node was asked.

use dialects::Fields;
use dialects::error::ApiError;
use serde_json::value::RawValue;

use super::homing::Homing;
use super::sglang::Sglang;
use super::vllm::{Mooncake, Nixl};
use crate::config::{Bootstrap, ConnectorKind};
use crate::fleet::KvInfo;

/// When the node that answers is asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Order {
    /// Together with the one that computes the prompt.
    Together,
    /// After it, with what it answered.
    After,
}

/// One half of a turn's two nodes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Half<'a> {
    /// What it told of its KV.
    pub(crate) kv: &'a KvInfo,
    /// Its bootstrap server, where it has one.
    pub(crate) bootstrap: Option<&'a Bootstrap>,
}

/// Two nodes that share one turn, once.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Handover<'a> {
    /// Names the transfer; drawn for each attempt.
    pub(crate) id: u128,
    /// The node that computes the prompt.
    pub(crate) prefill: Half<'a>,
    /// The node that answers.
    pub(crate) decode: Half<'a>,
}

/// What the node that computed the prompt said.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Computed<'a> {
    /// Its reference to the KV.
    pub(crate) kv_transfer_params: Option<&'a RawValue>,
    /// Why it ended.
    pub(crate) finish_reason: Option<&'a str>,
}

/// A node's answer to its half that leaves nothing to go on with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Unusable {
    /// It did not say where the KV is.
    #[error("the node that computed the prompt did not say where its KV is")]
    NoReference,
    /// It ended for another reason than its one token, so that its KV is not handed over.
    #[error("the node that computed the prompt ended before its KV could be handed over")]
    Ended,
}

/// The fields of one kind of node.
pub(crate) trait Connector: Sync {
    /// When the second node is asked.
    fn order(&self) -> Order;

    /// The body for the node that computes the prompt, from the one for a whole turn.
    fn prefill(&self, handover: &Handover<'_>, body: &Fields<'_>) -> Vec<u8>;

    /// More members for the body of the node that answers, each with a comma before it. `computed`
    /// is the first node's answer where that is asked before, and nothing otherwise.
    fn decode(&self, handover: &Handover<'_>, computed: Computed<'_>) -> Result<String, Unusable>;

    /// Whether the first node's answer leaves the KV where the second one finds it.
    fn accept(&self, _computed: Computed<'_>) -> Result<(), Unusable> {
        Ok(())
    }
}

/// The connector of a kind.
pub(crate) fn connector(kind: ConnectorKind) -> &'static dyn Connector {
    match kind {
        ConnectorKind::Homing => &Homing,
        ConnectorKind::Nixl => &Nixl,
        ConnectorKind::Mooncake => &Mooncake,
        ConnectorKind::Sglang => &Sglang,
    }
}

/// The body as it is asked for one token: not streamed, ended by that token, with more members
/// set and others dropped.
pub(super) fn one_token(
    body: &Fields<'_>,
    dropped: impl Fn(&str) -> bool,
    set: &[(&str, &str)],
) -> Vec<u8> {
    let mut all = vec![("stream", "false"), ("max_tokens", "1")];
    if body.get("max_completion_tokens").is_some() {
        all.push(("max_completion_tokens", "1"));
    }
    all.extend_from_slice(set);
    let dropped = |field: &str| matches!(field, "stream_options" | "min_tokens") || dropped(field);
    body.rebuild(dropped, &all)
}

/// A node's body, read for its members.
pub(super) fn fields(body: &[u8]) -> Result<Fields<'_>, ApiError> {
    Fields::parse(body)
}

#[cfg(test)]
mod tests;
