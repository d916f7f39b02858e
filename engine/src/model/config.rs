//! The numbers a model is built from, read from the file's metadata and checked.

use prompt::gguf::Header;

use super::error::ModelError;
use super::rope::RopeScaling;
use crate::ops::Pairs;

/// Families that there is a forward pass for, by `general.architecture`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Architecture {
    /// Llama 2 and 3, SmolLM2, Mistral.
    Llama,
    /// Qwen2 and Qwen2.5: biases of queries, keys and values.
    Qwen2,
    /// Qwen3, dense: each head's queries and keys are normed.
    Qwen3,
}

impl Architecture {
    /// All of them.
    pub const ALL: [Architecture; 3] = [Self::Llama, Self::Qwen2, Self::Qwen3];

    /// The name in a file.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Llama => "llama",
            Self::Qwen2 => "qwen2",
            Self::Qwen3 => "qwen3",
        }
    }

    /// Which outputs of the query and key matrices rope turns together, as files store them.
    pub(crate) fn pairs(self) -> Pairs {
        match self {
            Self::Llama => Pairs::Neighbours,
            Self::Qwen2 | Self::Qwen3 => Pairs::Halves,
        }
    }
}

/// The hyperparameters of a model. Made only by [`ModelConfig::from_header`], so that every
/// value lies in a range the ops can run.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ModelConfig {
    /// The family.
    pub architecture: Architecture,
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
    /// What is done to them for longer contexts.
    pub rope_scaling: RopeScaling,
    /// Positions that a query sees, its own among them; none if it sees all before it.
    pub window: Option<usize>,
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
        let known = Architecture::ALL.into_iter();
        let architecture = known
            .into_iter()
            .find(|known| known.as_str() == architecture)
            .ok_or_else(|| ModelError::Architecture {
                found: architecture.to_owned(),
            })?;
        let key = |name: &str| format!("{}.{name}", architecture.as_str());
        let width = size(header, &key("embedding_length"))?;
        let heads = size(header, &key("attention.head_count"))?;
        let kv_heads = optional_size(header, &key("attention.head_count_kv"))?.unwrap_or(heads);
        if heads % kv_heads != 0 {
            return Err(ModelError::Value {
                key: key("attention.head_count_kv"),
                found: kv_heads.to_string(),
                allowed: format!("a divisor of the {heads} heads"),
            });
        }
        let head_dim = match optional_size(header, &key("attention.key_length"))? {
            Some(head_dim) => head_dim,
            None => width / heads,
        };
        let context = size(header, &key("context_length"))?;
        let eps = key("attention.layer_norm_rms_epsilon");
        let config = ModelConfig {
            architecture,
            vocab: vocabulary(header)?,
            layers: size(header, &key("block_count"))?,
            width,
            heads,
            kv_heads,
            head_dim,
            ff: size(header, &key("feed_forward_length"))?,
            context,
            rope_base: float(header, &key("rope.freq_base"))?.unwrap_or(10_000.0),
            rope_scaling: rope_scaling(header, &key, context)?,
            // Qwen's files may name one that the model does not use.
            window: match architecture {
                Architecture::Llama => optional_size(header, &key("attention.sliding_window"))?,
                Architecture::Qwen2 | Architecture::Qwen3 => None,
            },
            rms_eps: float(header, &eps)?.unwrap_or(1e-5),
        };
        config.check(header, &key)?;
        Ok(config)
    }

    fn check(&self, header: &Header, key: &dyn Fn(&str) -> String) -> Result<(), ModelError> {
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
            &key("embedding_length"),
            self.width,
            "a multiple of 32",
        )?;
        require(
            self.ff.is_multiple_of(32),
            &key("feed_forward_length"),
            self.ff,
            "a multiple of 32",
        )?;
        if let Some(rotated) = optional_size(header, &key("rope.dimension_count"))? {
            let name = key("rope.dimension_count");
            require(rotated == self.head_dim, &name, rotated, "the head size")?;
        }
        if let Some(values) = optional_size(header, &key("attention.value_length"))? {
            let name = key("attention.value_length");
            require(values == self.head_dim, &name, values, "the head size")?;
        }
        Ok(())
    }
}

/// The tensor with a factor for each pair of a head.
pub(crate) const PAIR_FACTORS: &str = "rope_freqs.weight";

fn rope_scaling(
    header: &Header,
    key: &dyn Fn(&str) -> String,
    context: usize,
) -> Result<RopeScaling, ModelError> {
    if header.tensors.iter().any(|t| t.name == PAIR_FACTORS) {
        return Ok(RopeScaling::PerPair);
    }
    let name = key("rope.scaling.type");
    let kind = header.metadata.get(&*name).and_then(|v| v.as_str());
    let number = |name: &str| float(header, &key(name));
    let factor = match number("rope.scaling.factor")? {
        // Older files have it under another name.
        None => number("rope.scale_linear")?.unwrap_or(1.0),
        Some(factor) => factor,
    };
    match kind {
        None if factor != 1.0 => Ok(RopeScaling::Linear { factor }),
        None | Some("none") => Ok(RopeScaling::None),
        Some("linear") => Ok(RopeScaling::Linear { factor }),
        Some("yarn") => {
            let original = optional_size(header, &key("rope.scaling.original_context_length"))?;
            let more = match number("rope.scaling.yarn_attn_factor")? {
                None => number("rope.scaling.attn_factor")?.unwrap_or(1.0),
                Some(more) => more,
            };
            Ok(RopeScaling::Yarn {
                factor,
                original: original.unwrap_or(context),
                fast: number("rope.scaling.yarn_beta_fast")?.unwrap_or(32.0),
                slow: number("rope.scaling.yarn_beta_slow")?.unwrap_or(1.0),
                attention: more * (0.1 * factor.ln() + 1.0),
            })
        }
        Some(other) => Err(ModelError::Value {
            key: name,
            found: other.to_owned(),
            allowed: "none, linear or yarn".into(),
        }),
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
