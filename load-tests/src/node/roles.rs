//! What does each node do of a request, and what has it below its pool?

use simulate::engine::tiers::TierParams;

use crate::error::LoadError;

/// What a node does of a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Role {
    /// All of it.
    #[default]
    Mixed,
    /// It computes the prompt, for a node that answers.
    Prefill,
    /// It answers, from a prompt that another node has computed.
    Decode,
}

impl Role {
    /// The word for it on the wire.
    pub(super) fn as_str(self) -> &'static str {
        match self {
            Self::Mixed => "mixed",
            Self::Prefill => "prefill",
            Self::Decode => "decode",
        }
    }
}

/// Who does what.
#[derive(Clone, Copy, Debug, clap::Args)]
pub struct Roles {
    /// What every node does of a request: all of it, its prompt, or its answer
    #[arg(long, value_enum, default_value_t = Role::Mixed)]
    pub role: Role,
    /// The first so many nodes compute prompts for the others, which answer
    #[arg(
        long,
        value_name = "NODES",
        default_value_t = 0,
        conflicts_with = "role"
    )]
    pub prefill_nodes: u16,
    /// How fast KV travels from one node to another, GB (10^9 bytes) a second
    #[arg(long, value_name = "GB", default_value_t = 10.0)]
    pub handover_gb_per_s: f64,
}

impl Roles {
    /// The role of a node by its number.
    pub(super) fn of(&self, node: u16) -> Role {
        match self.prefill_nodes {
            0 => self.role,
            first if node < first => Role::Prefill,
            _ => Role::Decode,
        }
    }

    pub(super) fn check(&self, nodes: u16) -> Result<(), LoadError> {
        if self.prefill_nodes >= nodes.max(1) {
            let reason = format!("fewer than the {nodes} nodes: somebody has to answer");
            let flag = "--prefill-nodes";
            return Err(LoadError::Flag { flag, reason });
        }
        positive("--handover-gb-per-s", self.handover_gb_per_s)
    }
}

/// What is below a node's pool.
#[derive(Clone, Copy, Debug, clap::Args)]
pub struct Below {
    /// Memory of each node below its pool, in blocks of 16 tokens
    #[arg(long, value_name = "BLOCKS", default_value_t = 0)]
    pub host_capacity: usize,
    /// How fast a node reads from it, GB a second
    #[arg(long, value_name = "GB", default_value_t = 25.0)]
    pub host_gb_per_s: f64,
    /// A store that all nodes of this process share, in blocks of 16 tokens
    #[arg(long, value_name = "BLOCKS", default_value_t = 0)]
    pub store_capacity: usize,
    /// How fast each node reads from it, GB a second
    #[arg(long, value_name = "GB", default_value_t = 10.0)]
    pub store_gb_per_s: f64,
}

impl Below {
    pub(super) fn check(&self) -> Result<(), LoadError> {
        positive("--host-gb-per-s", self.host_gb_per_s)?;
        positive("--store-gb-per-s", self.store_gb_per_s)
    }

    /// Host memory, if there is any.
    pub(super) fn host(&self) -> Option<TierParams> {
        TierParams::of(self.host_capacity, self.host_gb_per_s)
    }

    /// The store, if there is one.
    pub(super) fn store(&self) -> Option<TierParams> {
        TierParams::of(self.store_capacity, self.store_gb_per_s)
    }
}

/// Refuses what is no positive number.
pub(crate) fn positive(flag: &'static str, value: f64) -> Result<(), LoadError> {
    if value.is_finite() && value > 0.0 {
        return Ok(());
    }
    let reason = format!("{value} is not above 0");
    Err(LoadError::Flag { flag, reason })
}
