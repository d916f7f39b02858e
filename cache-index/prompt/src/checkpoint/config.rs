//! What does `config.json` say of the model's shape? As metadata under GGUF's keys.
//!
//! Only what the forward pass of the family does is let through: another activation, windows in some of
//! the layers, or quantised weights would give wrong answers, so they are refused by name.

use serde_json::Map;
use serde_json::Value as Json;

use super::json::{self, Object};
use super::rope::Rope;
use super::{CONFIG, CheckpointError, Metadata};
use crate::gguf::{TensorInfo, Value};

/// Upper bound of any size; beyond every published model.
const SIZE_MAX: u64 = 1 << 24;
/// Upper bound of a head's width: factors are made for each pair of it.
const HEAD_DIM_MAX: u64 = 1024;
/// What the reference takes where the file says nothing.
const RMS_EPS_DEFAULT: f64 = 1e-6;
/// The same, of Qwen3.
const QWEN3_HEAD_DIM: u64 = 128;
/// The same, of Mistral's window.
const MISTRAL_WINDOW: u64 = 4096;
/// The same, of the layers below Qwen's windows.
const QWEN_FULL_LAYERS: u64 = 28;

/// A family of models, and where it differs from others in what its file leaves out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Family {
    Llama,
    Mistral,
    Qwen2,
    Qwen3,
}

/// Class, `model_type`, family.
const FAMILIES: [(&str, &str, Family); 4] = [
    ("LlamaForCausalLM", "llama", Family::Llama),
    ("MistralForCausalLM", "mistral", Family::Mistral),
    ("Qwen2ForCausalLM", "qwen2", Family::Qwen2),
    ("Qwen3ForCausalLM", "qwen3", Family::Qwen3),
];

impl Family {
    fn of(config: Object<'_>) -> Result<Self, CheckpointError> {
        let allowed = || {
            let classes = FAMILIES.map(|(class, ..)| class).join(", ");
            format!("one of {classes}")
        };
        let (key, found) = match config.get("architectures") {
            None => ("model_type", config.str("model_type")?),
            Some(Json::Array(names)) if names.len() == 1 => ("architectures", names[0].as_str()),
            Some(_) => return Err(config.wrong("architectures", allowed())),
        };
        let known = FAMILIES
            .into_iter()
            .find(|(class, kind, _)| found == Some(class) || found == Some(kind));
        known
            .map(|(.., family)| family)
            .ok_or_else(|| config.wrong(key, allowed()))
    }

    /// `general.architecture` of a GGUF file.
    fn ggml(self) -> &'static str {
        match self {
            Self::Llama | Self::Mistral => "llama",
            Self::Qwen2 => "qwen2",
            Self::Qwen3 => "qwen3",
        }
    }
}

/// A model's shape, checked.
#[derive(Debug)]
pub(super) struct Config {
    family: Family,
    layers: u64,
    width: u64,
    heads: u64,
    kv_heads: u64,
    head_dim: u64,
    ff: u64,
    context: u64,
    rms_eps: f64,
    window: Option<u64>,
    vocab: Option<u64>,
    /// Whether the output matrix is the table; none where the file does not say.
    tied: Option<bool>,
    rope: Rope,
    /// Of `llama3` scaling, one a pair; else empty.
    pub(super) pair_factors: Vec<f32>,
}

impl Config {
    pub(super) fn read(text: &str) -> Result<Self, CheckpointError> {
        let map: Map<String, Json> = json::parse(CONFIG, text)?;
        let config = Object::new(CONFIG, &map);
        let family = Family::of(config)?;
        check_plain(config)?;
        let size = |key: &str| config.demand_size(key, SIZE_MAX);
        let (width, heads, layers) = (
            size("hidden_size")?,
            size("num_attention_heads")?,
            size("num_hidden_layers")?,
        );
        let kv_heads = match (config.size("num_key_value_heads", SIZE_MAX)?, family) {
            (Some(kv_heads), _) => kv_heads,
            (None, Family::Llama) => heads,
            // Other families' defaults are numbers that fit one of their models.
            (None, _) => size("num_key_value_heads")?,
        };
        let head_dim = match (config.size("head_dim", HEAD_DIM_MAX)?, family) {
            (Some(head_dim), _) => head_dim,
            (None, Family::Qwen3) => QWEN3_HEAD_DIM,
            (None, _) => width / heads,
        };
        if !(1..=HEAD_DIM_MAX).contains(&head_dim) {
            let allowed = format!("at most {HEAD_DIM_MAX} times num_attention_heads, and not less");
            return Err(config.wrong("hidden_size", allowed));
        }
        let context = size("max_position_embeddings")?;
        let rope = Rope::read(config, context)?;
        Ok(Self {
            family,
            layers,
            width,
            heads,
            kv_heads,
            head_dim,
            ff: size("intermediate_size")?,
            context,
            rms_eps: config.positive("rms_norm_eps")?.unwrap_or(RMS_EPS_DEFAULT),
            window: window(config, family, layers)?,
            vocab: config.size("vocab_size", SIZE_MAX)?,
            tied: config.bool("tie_word_embeddings")?,
            pair_factors: rope.pair_factors(head_dim),
            rope,
        })
    }

    /// As a GGUF file has it.
    pub(super) fn metadata(&self) -> Metadata {
        let family = self.family.ggml();
        let key = |name: &str| format!("{family}.{name}");
        let mut metadata = Metadata::new();
        metadata.insert("general.architecture".into(), Value::Str(family.into()));
        for (name, size) in [
            ("block_count", self.layers),
            ("embedding_length", self.width),
            ("attention.head_count", self.heads),
            ("attention.head_count_kv", self.kv_heads),
            ("attention.key_length", self.head_dim),
            ("attention.value_length", self.head_dim),
            ("feed_forward_length", self.ff),
            ("context_length", self.context),
        ] {
            metadata.insert(key(name), Value::U64(size));
        }
        if let Some(window) = self.window {
            metadata.insert(key("attention.sliding_window"), Value::U64(window));
        }
        let eps = key("attention.layer_norm_rms_epsilon");
        metadata.insert(eps, Value::F64(self.rms_eps));
        for (name, value) in self.rope.metadata() {
            metadata.insert(key(name), value);
        }
        metadata
    }

    /// Whether the output matrix is the table, of a file that has one of its own or not.
    pub(super) fn is_tied(&self, has_head: bool) -> Result<bool, CheckpointError> {
        match (self.tied, has_head) {
            (Some(true), _) | (None, false) => Ok(true),
            (None | Some(false), true) => Ok(false),
            (Some(false), false) => Err(CheckpointError::value(
                CONFIG,
                "tie_word_embeddings",
                "false, but there is no tensor lm_head.weight",
                "true where the output matrix is the embedding table",
            )),
        }
    }

    /// The table has a row for each entry.
    pub(super) fn check_vocab(&self, tensors: &[TensorInfo]) -> Result<(), CheckpointError> {
        let table = tensors
            .iter()
            .find(|tensor| tensor.name == "token_embd.weight");
        let rows = table.and_then(|table| table.dims.get(1));
        match (self.vocab, rows) {
            (Some(vocab), Some(rows)) if vocab != *rows => Err(CheckpointError::value(
                CONFIG,
                "vocab_size",
                vocab.to_string(),
                format!("{rows}, the rows of model.embed_tokens.weight"),
            )),
            _ => Ok(()),
        }
    }
}

/// Refuses what no forward pass here does.
fn check_plain(config: Object<'_>) -> Result<(), CheckpointError> {
    let activation = config.str("hidden_act")?;
    if activation.is_some_and(|name| name != "silu") {
        return Err(config.wrong("hidden_act", "silu"));
    }
    if config.get("quantization_config").is_some() {
        let allowed =
            "absent: weights quantised in this layout are not read; name a GGUF file of the model";
        return Err(config.wrong("quantization_config", allowed));
    }
    if config
        .positive("partial_rotary_factor")?
        .is_some_and(|factor| factor != 1.0)
    {
        return Err(config.wrong("partial_rotary_factor", "1"));
    }
    if config.bool("mlp_bias")? == Some(true) {
        return Err(config.wrong("mlp_bias", "false"));
    }
    Ok(())
}

/// Positions that a query sees, where all layers are alike.
fn window(config: Object<'_>, family: Family, layers: u64) -> Result<Option<u64>, CheckpointError> {
    let window = config.size("sliding_window", SIZE_MAX)?;
    let kinds = match config.get("layer_types") {
        None => None,
        Some(Json::Array(kinds)) => Some(kinds),
        Some(_) => return Err(config.wrong("layer_types", "a list of kinds, one a layer")),
    };
    let all_are = |kind: &str| kinds.is_none_or(|kinds| kinds.iter().all(|k| *k == kind));
    match family {
        Family::Llama | Family::Qwen2 | Family::Qwen3 if kinds.is_some() => {
            if !all_are("full_attention") {
                return Err(config.wrong("layer_types", "full_attention in every layer"));
            }
            Ok(None)
        }
        Family::Llama => Ok(None),
        Family::Mistral => {
            if !all_are("sliding_attention") && !all_are("full_attention") {
                return Err(config.wrong("layer_types", "of one kind in all layers"));
            }
            if kinds.is_some() && all_are("full_attention") {
                return Ok(None);
            }
            let default = (!config.says("sliding_window")).then_some(MISTRAL_WINDOW);
            Ok(window.or(default))
        }
        Family::Qwen2 | Family::Qwen3 => {
            let full = match config.get("max_window_layers") {
                Some(value) if value == 0 => 0,
                _ => config
                    .size("max_window_layers", SIZE_MAX)?
                    .unwrap_or(QWEN_FULL_LAYERS),
            };
            let used = config.bool("use_sliding_window")? == Some(true);
            if used && window.is_some() && full < layers {
                let allowed = "false: windows in some of the layers are not supported";
                return Err(config.wrong("use_sliding_window", allowed));
            }
            Ok(None)
        }
    }
}
