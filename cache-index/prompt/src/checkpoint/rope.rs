//! How are a checkpoint's rotary frequencies scaled? `rope_parameters` of transformers 5, or
//! `rope_scaling` beside `rope_theta` of versions before it.

use std::f64::consts::TAU;

use serde_json::Value as Json;

use super::CheckpointError;
use super::json::Object;
use crate::gguf::Value;

/// Base of the frequencies where the file does not say.
const BASE_DEFAULT: f64 = 10_000.0;
/// Upper bound of a context.
const CONTEXT_MAX: u64 = 1 << 30;

/// Base and scaling.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Rope {
    base: f64,
    scaling: Scaling,
}

#[derive(Debug, Clone, PartialEq)]
enum Scaling {
    None,
    Linear {
        factor: f64,
    },
    Llama3 {
        factor: f64,
        low: f64,
        high: f64,
        original: f64,
    },
    Yarn {
        factor: f64,
        original: u64,
        fast: f64,
        slow: f64,
        /// What cosines and sines are multiplied by.
        attention: f64,
    },
}

impl Rope {
    pub(super) fn read(config: Object<'_>, context: u64) -> Result<Self, CheckpointError> {
        let base = config.positive("rope_theta")?;
        let new = config.object("rope_parameters")?;
        let (path, map) = match new {
            Some(map) => ("rope_parameters.", Some(map)),
            None => ("rope_scaling.", config.object("rope_scaling")?),
        };
        let Some(map) = map else {
            return Ok(Self {
                base: base.unwrap_or(BASE_DEFAULT),
                scaling: Scaling::None,
            });
        };
        let scaling = config.within(path, map);
        if let Some((key, _)) = map.iter().find(|(_, value)| value.is_object()) {
            return Err(scaling.wrong(key, "absent: all layers must turn alike"));
        }
        let within = scaling.positive("rope_theta")?;
        let partial = scaling.positive("partial_rotary_factor")?;
        if partial.is_some_and(|factor| factor != 1.0) {
            return Err(scaling.wrong("partial_rotary_factor", "1"));
        }
        Ok(Self {
            base: within.or(base).unwrap_or(BASE_DEFAULT),
            scaling: Scaling::read(scaling, context)?,
        })
    }

    /// Names without the architecture before them.
    pub(super) fn metadata(&self) -> Vec<(&'static str, Value)> {
        let mut metadata = vec![("rope.freq_base", Value::F64(self.base))];
        let kind = |name: &str| ("rope.scaling.type", Value::Str(name.to_owned()));
        match self.scaling {
            // The factors of the latter are a tensor.
            Scaling::None | Scaling::Llama3 { .. } => {}
            Scaling::Linear { factor } => {
                metadata.extend([kind("linear"), ("rope.scaling.factor", Value::F64(factor))]);
            }
            Scaling::Yarn {
                factor,
                original,
                fast,
                slow,
                attention,
            } => {
                // GGUF has what is multiplied to the paper's own value.
                let more = attention / magnitude(factor, 1.0);
                metadata.extend([
                    kind("yarn"),
                    ("rope.scaling.factor", Value::F64(factor)),
                    ("rope.scaling.original_context_length", Value::U64(original)),
                    ("rope.scaling.yarn_beta_fast", Value::F64(fast)),
                    ("rope.scaling.yarn_beta_slow", Value::F64(slow)),
                    ("rope.scaling.yarn_attn_factor", Value::F64(more)),
                ]);
            }
        }
        metadata
    }

    /// What each pair's frequency is divided by, of `llama3` scaling; else empty.
    pub(super) fn pair_factors(&self, head_dim: u64) -> Vec<f32> {
        let Scaling::Llama3 {
            factor,
            low,
            high,
            original,
        } = self.scaling
        else {
            return Vec::new();
        };
        let of_pair = |pair: u64| {
            // Positions in which the pair turns once.
            let length = TAU * self.base.powf(2.0 * pair as f64 / head_dim as f64);
            if length < original / high {
                1.0
            } else if length > original / low {
                factor
            } else {
                let smooth = (original / length - low) / (high - low);
                1.0 / ((1.0 - smooth) / factor + smooth)
            }
        };
        (0..head_dim / 2).map(|pair| of_pair(pair) as f32).collect()
    }
}

impl Scaling {
    fn read(scaling: Object<'_>, context: u64) -> Result<Self, CheckpointError> {
        // The older name of the same.
        let key = match scaling.get("rope_type") {
            Some(_) => "rope_type",
            None => "type",
        };
        let factor = || match scaling.demand_positive("factor")? {
            factor if factor >= 1.0 => Ok(factor),
            _ => Err(scaling.wrong("factor", "at least 1")),
        };
        match scaling.str(key)?.unwrap_or("default") {
            "default" => Ok(Self::None),
            "linear" => Ok(Self::Linear { factor: factor()? }),
            "llama3" => {
                let original = "original_max_position_embeddings";
                let (low, high) = (
                    scaling.demand_positive("low_freq_factor")?,
                    scaling.demand_positive("high_freq_factor")?,
                );
                if high <= low {
                    let allowed = format!("larger than low_freq_factor, which is {low}");
                    return Err(scaling.wrong("high_freq_factor", allowed));
                }
                Ok(Self::Llama3 {
                    factor: factor()?,
                    low,
                    high,
                    original: scaling.demand_size(original, CONTEXT_MAX)? as f64,
                })
            }
            "yarn" => Self::yarn(scaling, context),
            _ => Err(scaling.wrong(key, "default, linear, llama3 or yarn")),
        }
    }

    fn yarn(scaling: Object<'_>, context: u64) -> Result<Self, CheckpointError> {
        if scaling
            .get("truncate")
            .is_some_and(|value| *value != Json::Bool(true))
        {
            return Err(scaling.wrong("truncate", "true"));
        }
        let original = scaling.size("original_max_position_embeddings", CONTEXT_MAX)?;
        let original = original.unwrap_or(context);
        let factor = match scaling.positive("factor")? {
            None => context as f64 / original as f64,
            Some(factor) => factor,
        };
        if factor < 1.0 {
            return Err(scaling.wrong("factor", "at least 1"));
        }
        let mscale = (
            scaling.positive("mscale")?,
            scaling.positive("mscale_all_dim")?,
        );
        let attention = match (scaling.positive("attention_factor")?, mscale) {
            (Some(attention), _) => attention,
            (None, (Some(one), Some(all))) => magnitude(factor, one) / magnitude(factor, all),
            (None, _) => magnitude(factor, 1.0),
        };
        Ok(Self::Yarn {
            factor,
            original,
            fast: scaling.positive("beta_fast")?.unwrap_or(32.0),
            slow: scaling.positive("beta_slow")?.unwrap_or(1.0),
            attention,
        })
    }
}

/// How much longer queries and keys get, by the paper.
fn magnitude(factor: f64, scale: f64) -> f64 {
    0.1 * scale * factor.ln() + 1.0
}
