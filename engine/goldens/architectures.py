"""Makes architectures/: small random models of each family, and what transformers answers with them.

    pip install torch==2.15.0 transformers==5.24.0 gguf==0.19.0
    python engine/goldens/architectures.py
    python engine/goldens/architectures.py FOLDER      what transformers saves goes there too

Weights are drawn so that attention is peaked (scores of about 3): flat attention would hide errors. Each
model is written as GGUF (matrices F16, of which transformers computes as well; in the order and with the
names of ggml-org's converter) beside its golden: tokens, and the logits at some positions as base64 of
little-endian f32. `off` is what each feature that is switched off moves a logit by at most, in standard
deviations of its row: the test holds the engine to a hundredth of the least. `config.json` is as
`save_pretrained` writes it; the tests write the rest of a checkpoint from the GGUF file, or take what was
saved into FOLDER if HOMING_CHECKPOINTS names it.
"""

import base64
import copy
import json
import math
import pathlib
import sys
import tempfile

import numpy as np
import torch
from gguf import GGUFWriter
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

WIDTH, HEADS, KV_HEADS, DIM, FF, LAYERS, VOCAB = 32, 4, 2, 32, 64, 2, 96
CONTEXT, TOKENS, EVERY = 256, 160, 8
SHAPE = dict(
    hidden_size=WIDTH,
    num_attention_heads=HEADS,
    num_key_value_heads=KV_HEADS,
    head_dim=DIM,
    intermediate_size=FF,
    num_hidden_layers=LAYERS,
    vocab_size=VOCAB,
    max_position_embeddings=CONTEXT,
    rms_norm_eps=1e-5,
    attn_implementation="eager",
)


def without_head_norms(model):
    for layer in model.model.layers:
        layer.self_attn.q_norm = torch.nn.Identity()
        layer.self_attn.k_norm = torch.nn.Identity()
    return model


def without_biases(model):
    for name, value in model.named_parameters():
        if name.endswith("_proj.bias"):
            value.zero_()
    return model


def without(**config):
    """The same weights under another configuration."""

    def change(model):
        changed = copy.deepcopy(model.config)
        for key, value in config.items():
            setattr(changed, key, value)
        other = type(model)(changed).eval()
        other.load_state_dict(model.state_dict())
        return other

    return change


def models():
    def rope(kind, **more):
        return dict(rope_type=kind, rope_theta=10000.0, **more)

    def shape(kind="default", **more):
        return dict(rope_parameters=rope(kind, **more), **SHAPE)

    llama3 = shape(
        "llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=64,
    )
    yarn = shape("yarn", factor=4.0, original_max_position_embeddings=64)
    linear = shape("linear", factor=4.0)
    plain = without(rope_parameters=rope("default"))
    yield "llama", LlamaForCausalLM(LlamaConfig(tie_word_embeddings=True, **shape())), {}
    for name, scaling in [("linear", linear), ("llama3", llama3), ("yarn", yarn)]:
        yield f"llama-{name}", LlamaForCausalLM(LlamaConfig(**scaling)), {"rope scaling": plain}
    mistral = MistralForCausalLM(MistralConfig(sliding_window=24, **shape()))
    yield "mistral", mistral, {"window": without(sliding_window=None)}
    qwen2 = Qwen2ForCausalLM(Qwen2Config(tie_word_embeddings=True, **shape()))
    yield "qwen2", qwen2, {"biases": without_biases}
    qwen3 = Qwen3ForCausalLM(Qwen3Config(**shape()))
    yield "qwen3", qwen3, {"head norms": without_head_norms}


def draw(model, seed):
    random = torch.Generator().manual_seed(seed)

    def normal(value, mean, deviation):
        value.copy_(mean + deviation * torch.randn(value.shape, generator=random))

    for name, value in model.named_parameters():
        if name.endswith("bias"):
            normal(value, 0.0, 0.7)
        elif value.dim() == 1:
            # Of head norms: scores as peaked as the others'.
            normal(value, 1.8 if "q_norm" in name or "k_norm" in name else 1.0, 0.3)
        else:
            peaked = "q_proj" in name or "k_proj" in name
            gain = 1.8 if peaked else 1.0
            normal(value, 0.0, gain / math.sqrt(1 if "embed" in name else value.shape[1]))
            value.copy_(value.half().float())
    model.tie_weights()


def neighbours(matrix, heads):
    """Rope's pairs i and half + i become 2i and 2i + 1, as the converter does for llama."""
    rows, cols = matrix.shape
    halves = matrix.reshape(heads, 2, rows // heads // 2, cols)
    return halves.swapaxes(1, 2).reshape(rows, cols)


PARTS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def ggml_name(name):
    stem, kind = name.rsplit(".", 1)
    if stem in TOP:
        return f"{TOP[stem]}.{kind}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{PARTS[part]}.{kind}"


def pair_factors(scaling):
    """What the converter writes for llama3: each pair's frequency is divided by one of these."""
    factor, original = scaling["factor"], scaling["original_max_position_embeddings"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    factors = []
    for pair in range(DIM // 2):
        length = 2 * math.pi * 10000.0 ** (2 * pair / DIM)
        if length < original / high:
            factors.append(1.0)
        elif length > original / low:
            factors.append(factor)
        else:
            smooth = (original / length - low) / (high - low)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, np.float32)


def write(path, model):
    config = model.config
    family = "llama" if config.model_type == "mistral" else config.model_type
    writer = GGUFWriter(path, family)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FF)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(DIM)
    writer.add_value_length(DIM)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    if config.model_type == "mistral":
        writer.add_sliding_window(config.sliding_window)
    scaling = config.rope_parameters
    kind = scaling["rope_type"]
    if kind in ("linear", "yarn"):
        writer.add_string(f"{family}.rope.scaling.type", kind)
        writer.add_float32(f"{family}.rope.scaling.factor", scaling["factor"])
    if kind == "yarn":
        original = scaling["original_max_position_embeddings"]
        writer.add_uint32(f"{family}.rope.scaling.original_context_length", original)
    if kind == "llama3":
        writer.add_tensor("rope_freqs.weight", pair_factors(scaling))
    for name, value in model.state_dict().items():
        if name.startswith("lm_head") and config.tie_word_embeddings:
            continue
        array = value.numpy()
        if family == "llama" and "q_proj" in name:
            array = neighbours(array, HEADS)
        if family == "llama" and "k_proj" in name:
            array = neighbours(array, KV_HEADS)
        kind = np.float32 if array.ndim == 1 else np.float16
        writer.add_tensor(ggml_name(name), np.ascontiguousarray(array.astype(kind)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


TOKENIZER = {
    "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True},
    "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []},
}


def save(folder, name, model, saved):
    """As transformers saves it, with a tokenizer that nobody uses."""
    checkpoint = pathlib.Path(saved) / name
    model.save_pretrained(checkpoint)
    (checkpoint / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    config = (checkpoint / "config.json").read_text()
    (folder / f"{name}.config.json").write_text(config)


def main():
    kept = tempfile.TemporaryDirectory()
    saved = sys.argv[1] if len(sys.argv) > 1 else kept.name
    folder = pathlib.Path(__file__).with_name("architectures")
    folder.mkdir(exist_ok=True)
    tokens = torch.tensor([np.random.default_rng(5).integers(0, VOCAB, TOKENS).tolist()])
    for seed, (name, model, features) in enumerate(models()):
        model = model.eval()
        with torch.no_grad():
            draw(model, seed)
            write(folder / f"{name}.gguf", model)
            save(folder, name, model, saved)
            logits = model(tokens).logits[0]
            deviation = logits.std(-1, correction=0)
            off = {}
            for feature, change in features.items():
                other = change(copy.deepcopy(model))(tokens).logits[0]
                moved = (other - logits).abs().max(-1).values / deviation
                off[feature] = moved.max().item()
        rows = logits[EVERY - 1 :: EVERY].numpy().astype("<f4")
        golden = {
            "tokens": tokens[0].tolist(),
            "every": EVERY,
            "logits": base64.b64encode(rows.tobytes()).decode(),
            "off": off,
        }
        (folder / f"{name}.json").write_text(json.dumps(golden) + "\n")
        print(name, f"deviation {deviation.mean():.2f}", off)


if __name__ == "__main__":
    main()
