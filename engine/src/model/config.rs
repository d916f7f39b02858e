//! The numbers a llama model is built from, read from the file's metadata and checked.

use prompt::gguf::Header;

use super::error::ModelError;

/// The hyperparameters of a llama model. Made only by [`ModelConfig::from_header`], so that every
/// value lies in a range the ops can run.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ModelConfig {
    /// Entries of the vocabulary.
    pub vocab: usize,
    /// Transformer layers.
    pub layers: usize,
    /// Width of the residual stream.
    pub width: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads; divides `heads`.
    pub kv_heads: usize,
    /// Width of one head.
    pub head_dim: usize,
    /// Width of the feed-forward part.
    pub ff: usize,
    /// Positions the model was trained for.
    pub context: usize,
    /// Base of the rotary frequencies.
    pub rope_base: f32,
    /// Added to the mean square in every norm.
    pub rms_eps: f32,
}

/// Upper bound of any single size in the metadata: 2^24 is beyond every published model and small
/// enough that products of three sizes cannot overflow 64 bits' worth of bytes.
const SIZE_MAX: u64 = 1 << 24;

impl ModelConfig {
    /// Reads and checks the hyperparameters.
    pub fn from_header(header: &Header) -> Result<ModelConfig, ModelError> {
        let architecture = header
            .metadata
            .get("general.architecture")
            .and_then(|value| value.as_str())
            .ok_or_else(|| ModelError::Metadata {
                key: "general.architecture".into(),
            })?;
        if architecture != "llama" {
            return Err(ModelError::Architecture {
                found: architecture.to_owned(),
            });
        }
        let width = size(header, "llama.embedding_length")?;
        let heads = size(header, "llama.attention.head_count")?;
        let kv_heads = optional_size(header, "llama.attention.head_count_kv")?.unwrap_or(heads);
        if heads % kv_heads != 0 {
            return Err(ModelError::Value {
                key: "llama.attention.head_count_kv".into(),
                found: kv_heads.to_string(),
                allowed: format!("a divisor of the {heads} heads"),
            });
        }
        let head_dim = match optional_size(header, "llama.attention.key_length")? {
            Some(head_dim) => head_dim,
            None => width / heads,
        };
        let config = ModelConfig {
            vocab: vocabulary(header)?,
            layers: size(header, "llama.block_count")?,
            width,
            heads,
            kv_heads,
            head_dim,
            ff: size(header, "llama.feed_forward_length")?,
            context: size(header, "llama.context_length")?,
            rope_base: float(header, "llama.rope.freq_base")?.unwrap_or(10_000.0),
            rms_eps: float(header, "llama.attention.layer_norm_rms_epsilon")?.unwrap_or(1e-5),
        };
        config.check(header)?;
        Ok(config)
    }

    fn check(&self, header: &Header) -> Result<(), ModelError> {
        // Heads are handled in vectors of 16, and rope splits a head in two halves.
        require(
            self.head_dim.is_multiple_of(32) && self.head_dim <= 256,
            "head size",
            self.head_dim,
            "a multiple of 32, at most 256",
        )?;
        // Weights and activations are quantised in blocks of 32.
        require(
            self.width.is_multiple_of(32),
            "llama.embedding_length",
            self.width,
            "a multiple of 32",
        )?;
        require(
            self.ff.is_multiple_of(32),
            "llama.feed_forward_length",
            self.ff,
            "a multiple of 32",
        )?;
        if let Some(rotated) = optional_size(header, "llama.rope.dimension_count")? {
            require(
                rotated == self.head_dim,
                "llama.rope.dimension_count",
                rotated,
                "the head size",
            )?;
        }
        let scaling = header
            .metadata
            .get("llama.rope.scaling.type")
            .and_then(|v| v.as_str());
        if let Some(kind) = scaling.filter(|kind| *kind != "none") {
            return Err(ModelError::Value {
                key: "llama.rope.scaling.type".into(),
                found: kind.to_owned(),
                allowed: "none (scaled rope is not supported yet)".into(),
            });
        }
        if header
            .tensors
            .iter()
            .any(|tensor| tensor.name == "rope_freqs.weight")
        {
            return Err(ModelError::Value {
                key: "rope_freqs.weight".into(),
                found: "present".into(),
                allowed: "absent (scaled rope is not supported yet)".into(),
            });
        }
        Ok(())
    }
}

fn require(holds: bool, key: &str, found: usize, allowed: &str) -> Result<(), ModelError> {
    if holds {
        return Ok(());
    }
    Err(ModelError::Value {
        key: key.into(),
        found: found.to_string(),
        allowed: allowed.into(),
    })
}

/// The vocabulary's size is that of the embedding table: some files carry no `vocab_size`, and
/// the table is what token ids index.
fn vocabulary(header: &Header) -> Result<usize, ModelError> {
    let table = header
        .tensors
        .iter()
        .find(|tensor| tensor.name == "token_embd.weight")
        .ok_or_else(|| ModelError::TensorMissing {
            name: "token_embd.weight".into(),
        })?;
    let rows = table.dims.get(1).copied().unwrap_or(0);
    in_range("vocabulary", rows)
}

fn size(header: &Header, key: &str) -> Result<usize, ModelError> {
    optional_size(header, key)?.ok_or_else(|| ModelError::Metadata { key: key.into() })
}

fn optional_size(header: &Header, key: &str) -> Result<Option<usize>, ModelError> {
    let Some(value) = header.metadata.get(key) else {
        return Ok(None);
    };
    let value = value
        .as_u64()
        .ok_or_else(|| ModelError::Metadata { key: key.into() })?;
    in_range(key, value).map(Some)
}

fn in_range(key: &str, value: u64) -> Result<usize, ModelError> {
    if (1..=SIZE_MAX).contains(&value) {
        return Ok(value as usize);
    }
    Err(ModelError::Value {
        key: key.into(),
        found: value.to_string(),
        allowed: format!("between 1 and {SIZE_MAX}"),
    })
}

fn float(header: &Header, key: &str) -> Result<Option<f32>, ModelError> {
    let Some(value) = header.metadata.get(key) else {
        return Ok(None);
    };
    match value.as_f64() {
        Some(number) if number.is_finite() && number > 0.0 => Ok(Some(number as f32)),
        _ => Err(ModelError::Value {
            key: key.into(),
            found: format!("{value:?}"),
            allowed: "a positive number".into(),
        }),
    }
}
