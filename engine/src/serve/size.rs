//! How many KV blocks does the given memory hold, and is that enough to serve?
//!
//! What a node will take is added up before anything is loaded: packed weights, KV pool, the host
//! tier below it, and what passes keep as scratch. A node that would not fit says so with all the numbers, instead of being
//! killed later, when the pool's pages are touched for the first time.

use cache_index::block::BLOCK_TOKENS;
use prompt::gguf::Header;

use super::memory::{Available, Of};
use crate::cli::Config;
use crate::kv::store::{disk, shared};
use crate::model::{Model, ModelConfig, OpsKind};
use crate::scheduler::RUNNING_MAX;

/// Tokens that a pool must hold at least: a system prompt and a short answer.
const POOL_TOKENS_MIN: usize = 256;
/// The KV pool does not fit the model or the machine; the message shows the arithmetic.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum PoolSizeError {
    /// Not enough for any conversation.
    #[error(
        "--kv-memory {given} bytes holds {tokens} tokens of this model ({block_bytes} bytes a \
         block of 16); at least {least} bytes are needed, and {whole} for its whole context of \
         {context} tokens"
    )]
    TooSmall {
        /// What was given.
        given: u64,
        /// Tokens that fit.
        tokens: usize,
        /// Bytes of one block.
        block_bytes: usize,
        /// Bytes that would do.
        least: u64,
        /// Bytes for a whole context.
        whole: u64,
        /// The model's context.
        context: usize,
    },
    /// More than there is.
    #[error(
        "this node does not fit: {weights} bytes of weights + {pool} of KV pool (--kv-memory) + \
         {host} of host tier (--kv-host-memory), --kv-shared-memory and buffers + {scratch} of scratch = {sum} bytes, and {of} has {available} bytes of memory available; \
         {advice}"
    )]
    TooLarge {
        /// Packed weights.
        weights: u64,
        /// The pool.
        pool: u64,
        /// The host tier.
        host: u64,
        /// What passes keep.
        scratch: u64,
        /// All of it.
        sum: u64,
        /// What there is.
        available: u64,
        /// Whose memory that is.
        of: Of,
        /// What would do.
        advice: String,
    },
}

/// What a node takes besides its pool, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Fixed {
    pub(super) weights: u64,
    pub(super) scratch: u64,
}

impl Fixed {
    /// Of a model in this file, in steps of so many tokens. The serving ops pack weights at their
    /// stored size, give or take the last rows; the reference ops take four bytes for each.
    pub(super) fn of(
        header: &Header,
        model: &ModelConfig,
        ops: OpsKind,
        step_tokens: usize,
    ) -> Self {
        let bytes = |tensor: &prompt::gguf::TensorInfo| match ops {
            OpsKind::Cpu | OpsKind::CpuBf16 | OpsKind::CpuInt8 => tensor.bytes,
            OpsKind::Reference => tensor.dims.iter().product::<u64>() * size_of::<f32>() as u64,
        };
        let tokens = step_tokens.max(RUNNING_MAX);
        Self {
            weights: header.tensors.iter().map(bytes).sum(),
            scratch: Model::scratch_bytes(model, tokens, RUNNING_MAX) as u64,
        }
    }
}

/// What was asked for on the command line, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Given {
    pub(super) pool: u64,
    pub(super) host: u64,
    /// For blocks on their way to and from disk and shared store, and what is given to that store.
    pub(super) buffers: u64,
}

impl Given {
    pub(super) fn of(config: &Config) -> Self {
        Self {
            pool: config.kv_memory_bytes,
            host: config.kv_host_bytes,
            buffers: {
                let disk = config.kv_disk.as_ref();
                let disk = disk.map_or(0, |_| disk::BUFFER_BYTES as u64);
                let shared = config.kv_shared.as_ref();
                let shared = shared.map_or(0, |store| {
                    store
                        .segment_bytes
                        .saturating_add(shared::BUFFER_BYTES as u64)
                });
                disk.saturating_add(shared)
            },
        }
    }
}

/// The pool of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PoolSize {
    /// Blocks in the pool.
    pub(super) blocks: u32,
    /// Blocks in the host tier.
    pub(super) host_blocks: usize,
    /// Prompt and answer together: the model's context, or the pool if that is smaller.
    pub(super) max_model_len: usize,
}

/// Sizes the pool, or says with numbers why that cannot be. A block has its bytes in the pool, and others
/// as it is kept below it.
pub(super) fn pool_size(
    model: &ModelConfig,
    (block_bytes, kept_bytes): (usize, usize),
    given: Given,
    fixed: Fixed,
    available: Option<Available>,
) -> Result<PoolSize, PoolSizeError> {
    fits(given, fixed, available)?;
    let Given {
        pool: given, host, ..
    } = given;
    let blocks = u32::try_from(given / block_bytes as u64).unwrap_or(u32::MAX);
    let tokens = blocks as usize * BLOCK_TOKENS;
    let bytes_for = |tokens: usize| (tokens.div_ceil(BLOCK_TOKENS) * block_bytes) as u64;
    let least = POOL_TOKENS_MIN.min(model.context);
    if tokens < least {
        return Err(PoolSizeError::TooSmall {
            given,
            tokens,
            block_bytes,
            least: bytes_for(least),
            whole: bytes_for(model.context),
            context: model.context,
        });
    }
    Ok(PoolSize {
        blocks,
        // One slot more than it holds, see `Store::new`.
        host_blocks: usize::try_from((host / kept_bytes as u64).saturating_sub(1))
            .unwrap_or(usize::MAX),
        max_model_len: model.context.min(tokens),
    })
}

fn fits(given: Given, fixed: Fixed, available: Option<Available>) -> Result<(), PoolSizeError> {
    let Fixed { weights, scratch } = fixed;
    let Given {
        pool,
        host,
        buffers,
    } = given;
    // On the command line there is one figure for both.
    let host = host.saturating_add(buffers);
    let beside = weights.saturating_add(scratch).saturating_add(host);
    let sum = beside.saturating_add(pool);
    let Some(there) = available.filter(|there| there.bytes < sum) else {
        return Ok(());
    };
    let rest = there.bytes.saturating_sub(beside);
    let advice = if rest == 0 && host > 0 {
        "give less --kv-host-memory".to_owned()
    } else if rest == 0 {
        "take a smaller model".to_owned()
    } else {
        format!("give at most --kv-memory {rest}")
    };
    Err(PoolSizeError::TooLarge {
        weights,
        pool,
        host,
        scratch,
        sum,
        available: there.bytes,
        of: there.of,
        advice,
    })
}

#[cfg(test)]
mod tests {
    //! Catches a pool that is too small to serve or larger than the machine being accepted.
    use super::*;
    use crate::model::{Architecture, RopeScaling};

    const FIXED: Fixed = Fixed {
        weights: 1_000_000,
        scratch: 40_000,
    };
    const AVAILABLE: Available = Available {
        bytes: 2_000_000,
        of: Of::Cgroup,
    };

    fn model() -> ModelConfig {
        ModelConfig {
            architecture: Architecture::Llama,
            vocab: 10,
            layers: 1,
            width: 32,
            heads: 1,
            kv_heads: 1,
            head_dim: 32,
            ff: 32,
            context: 2048,
            rope_base: 1e4,
            rope_scaling: RopeScaling::None,
            window: None,
            rms_eps: 1e-5,
        }
    }

    #[test]
    fn pools() {
        let (fixed, available) = (FIXED, AVAILABLE);
        let model = model();
        let given = |pool, host| Given {
            pool,
            host,
            buffers: 0,
        };
        let size = |pool| pool_size(&model, (1000, 1000), given(pool, 0), fixed, Some(available));
        let fits = |blocks, max_model_len| {
            Ok(PoolSize {
                blocks,
                host_blocks: 0,
                max_model_len,
            })
        };
        assert_eq!(size(16_000), fits(16, 256));
        assert_eq!(size(16_999), fits(16, 256));
        assert_eq!(size(200_000), fits(200, 2048));
        assert_eq!(size(960_000), fits(960, 2048));
        let error = size(960_001).expect_err("too large").to_string();
        for part in [
            "1000000",
            "960001",
            "40000",
            "2000001",
            "2000000",
            "kv-memory 960000",
        ] {
            assert!(error.contains(part), "{part} in {error}");
        }
        assert!(error.contains("control group"), "{error}");
        let huge = size(u64::MAX).expect_err("too large").to_string();
        assert!(huge.contains("kv-memory 960000"), "{huge}");
        let less = Available {
            bytes: 1_000_000,
            of: Of::Machine,
        };
        let error = pool_size(&model, (1000, 1000), given(16_000, 0), fixed, Some(less))
            .expect_err("no room");
        assert!(error.to_string().contains("a smaller model"), "{error}");
        assert!(
            pool_size(&model, (1000, 1000), given(16_000, 0), fixed, None).is_ok(),
            "nobody knows"
        );
        let error = size(15_999).expect_err("too small").to_string();
        for part in ["15999", "240 tokens", "16000 bytes", "128000", "2048"] {
            assert!(error.contains(part), "{part} in {error}");
        }
    }

    #[test]
    fn a_host_tier_counts() {
        let both = |host| {
            pool_size(
                &model(),
                (1000, 1000),
                Given {
                    pool: 16_000,
                    host,
                    buffers: 0,
                },
                FIXED,
                Some(AVAILABLE),
            )
        };
        let host_blocks = both(944_000).map(|size| size.host_blocks);
        assert_eq!(host_blocks, Ok(943), "one slot is spare");
        assert_eq!(both(999).map(|size| size.host_blocks), Ok(0));
        let error = both(944_001).expect_err("too large").to_string();
        assert!(error.contains("944001 of host tier"), "{error}");
        assert!(error.contains("kv-memory 15999"), "{error}");
        let error = both(960_001).expect_err("too large").to_string();
        assert!(error.contains("less --kv-host-memory"), "{error}");
    }
}
