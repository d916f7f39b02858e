//! What is this node to the others that serve the same model?

use clap::ValueEnum;
use serde_json::Value;

use crate::error::{ApiError, Kind};
use crate::request::Task;

/// The half of the work that a node is for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Role {
    /// Both.
    #[default]
    Mixed,
    /// Computes prompts; others decode.
    Prefill,
    /// Decodes prompts that others computed; computes those that nobody did.
    Decode,
}

impl Role {
    /// The word for it on the wire.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Mixed => "mixed",
            Self::Prefill => "prefill",
            Self::Decode => "decode",
        }
    }

    /// Refuses the half of a handover that the node is not for: whoever sent it takes it for another. A
    /// whole request is served by every role, so that a node can stand in for others.
    pub(super) fn allows(self, task: &Task) -> Result<(), ApiError> {
        let wrong = match (self, task) {
            (Self::Decode, Task::HandOver(_) | Task::Prefill) => "do_remote_decode",
            (Self::Prefill, Task::TakeOver(from)) if from.id.is_some() => "do_remote_prefill",
            _ => return Ok(()),
        };
        let message = format!(
            "This node's role is {}: it does not serve `{wrong}`. Send it to a node of the other role.",
            self.as_str()
        );
        let error = ApiError::new(Kind::Invalid, "wrong_role", message);
        Err(error.with_param(format!("kv_transfer_params.{wrong}")))
    }
}

/// What a node tells of its KV.
#[derive(Clone, Debug)]
pub struct KvNode {
    /// What it is for.
    pub role: Role,
    /// Where its blocks can be had.
    pub endpoints: Vec<String>,
    /// What they are like.
    pub layout: Value,
}
