//! How many KV blocks does the given memory hold, and is that enough to serve?

use cache_index::block::BLOCK_TOKENS;

use crate::model::ModelConfig;

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
    /// More than the machine has.
    #[error("--kv-memory {given} bytes is more than this machine's memory of {memory} bytes")]
    TooLarge {
        /// What was given.
        given: u64,
        /// What there is.
        memory: u64,
    },
}

/// The pool of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PoolSize {
    /// Blocks in the pool.
    pub(super) blocks: u32,
    /// Prompt and answer together: the model's context, or the pool if that is smaller.
    pub(super) max_model_len: usize,
}

/// Sizes the pool, or says with numbers why that cannot be.
pub(super) fn pool_size(
    model: &ModelConfig,
    block_bytes: usize,
    given: u64,
    memory: Option<u64>,
) -> Result<PoolSize, PoolSizeError> {
    if let Some(memory) = memory.filter(|memory| *memory < given) {
        return Err(PoolSizeError::TooLarge { given, memory });
    }
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
        max_model_len: model.context.min(tokens),
    })
}

/// The machine's memory in bytes, where the operating system tells it.
pub(super) fn machine_memory() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix("MemTotal:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib * 1024)
}

#[cfg(test)]
mod tests {
    //! Catches a pool that is too small to serve or larger than the machine being accepted.
    use super::*;

    #[test]
    fn pools() {
        let model = ModelConfig {
            vocab: 10,
            layers: 1,
            width: 32,
            heads: 1,
            kv_heads: 1,
            head_dim: 32,
            ff: 32,
            context: 2048,
            rope_base: 1e4,
            rms_eps: 1e-5,
        };
        let size = |given| pool_size(&model, 1000, given, Some(1 << 20));
        let fits = |blocks, max_model_len| {
            Ok(PoolSize {
                blocks,
                max_model_len,
            })
        };
        assert_eq!(size(16_000), fits(16, 256));
        assert_eq!(size(16_999), fits(16, 256));
        assert_eq!(size(200_000), fits(200, 2048));
        let too_large = PoolSizeError::TooLarge {
            given: 1 << 21,
            memory: 1 << 20,
        };
        assert_eq!(size(1 << 21), Err(too_large));
        let error = size(15_999).expect_err("too small").to_string();
        for part in ["15999", "240 tokens", "16000 bytes", "128000", "2048"] {
            assert!(error.contains(part), "{part} in {error}");
        }
    }
}
