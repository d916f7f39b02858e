//! What does GGUF call this tensor?

/// The output matrix.
pub(super) const HEAD: &str = "lm_head.weight";

/// Tensors that every model has once.
const TOP: &[(&str, &str)] = &[
    ("model.embed_tokens.weight", "token_embd.weight"),
    ("model.norm.weight", "output_norm.weight"),
    (HEAD, "output.weight"),
];

/// Tensors of a layer, without `.weight` or `.bias`.
const OF_LAYER: &[(&str, &str)] = &[
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn_v"),
    ("self_attn.o_proj", "attn_output"),
    ("self_attn.q_norm", "attn_q_norm"),
    ("self_attn.k_norm", "attn_k_norm"),
    ("mlp.gate_proj", "ffn_gate"),
    ("mlp.up_proj", "ffn_up"),
    ("mlp.down_proj", "ffn_down"),
    ("input_layernorm", "attn_norm"),
    ("post_attention_layernorm", "ffn_norm"),
];

/// The name in a GGUF file; that of the checkpoint where there is none, so that whoever loads the model
/// refuses it by the name that it has. `None` for what old checkpoints hold though it follows from the
/// configuration.
pub(super) fn ggml(name: &str) -> Option<String> {
    if name.ends_with(".rotary_emb.inv_freq") {
        return None;
    }
    let top = TOP.iter().find(|(known, _)| *known == name);
    let found = match top {
        Some((_, ggml)) => Some((*ggml).to_owned()),
        None => of_layer(name),
    };
    Some(found.unwrap_or_else(|| name.to_owned()))
}

fn of_layer(name: &str) -> Option<String> {
    let (layer, rest) = name.strip_prefix("model.layers.")?.split_once('.')?;
    // As it is printed, or two names would be one.
    let number: u32 = layer.parse().ok()?;
    if number.to_string() != layer {
        return None;
    }
    let (part, kind) = rest.rsplit_once('.')?;
    let (_, ggml) = OF_LAYER.iter().find(|(known, _)| *known == part)?;
    matches!(kind, "weight" | "bias").then(|| format!("blk.{layer}.{ggml}.{kind}"))
}
