"""A GGUF as the folder that vLLM reads: GGUF FOLDER.

Weights are dequantised to bfloat16, the tokenizer and the chat template are written from the GGUF's
metadata. The folder appears whole or not at all. Only what the default model needs is known
(architecture llama, a byte-level BPE of the kind smollm); anything else is refused by name, since a
tokenizer that is nearly right would be worse than none.
"""

import json
import os
import shutil
import sys

import gguf
import numpy
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

CONTROL = 3  # In tokenizer.ggml.token_type.
SHARD = "model.safetensors"
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def main() -> int:
    source, folder = sys.argv[1:3]
    reader = gguf.GGUFReader(source)
    part = folder + ".part"
    shutil.rmtree(part, ignore_errors=True)
    os.makedirs(part)
    write_tokenizer(reader, part)
    write_config(reader, part)
    write_weights(reader, part)
    shutil.rmtree(folder, ignore_errors=True)
    os.rename(part, folder)
    return 0


def said(reader, name, default=None):
    field = reader.get_field(name)
    if field is not None:
        return field.contents()
    if default is None:
        sys.exit(f"hf_from_gguf: the file does not say {name}")
    return default


def wanted(reader, name, value):
    if said(reader, name) != value:
        sys.exit(f"hf_from_gguf: {name} is {said(reader, name)!r}, only {value!r} is known")


def write_json(folder, name, value):
    with open(os.path.join(folder, name), "w", encoding="utf-8") as file:
        json.dump(value, file, ensure_ascii=False, indent=1)


def write_tokenizer(reader, folder):
    wanted(reader, "tokenizer.ggml.model", "gpt2")
    wanted(reader, "tokenizer.ggml.pre", "smollm")
    tokens = said(reader, "tokenizer.ggml.tokens")
    merges = [tuple(pair.split(" ")) for pair in said(reader, "tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE({text: id for id, text in enumerate(tokens)}, merges))
    # Each digit by itself, then GPT-2's words over bytes.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    types = said(reader, "tokenizer.ggml.token_type")
    control = [text for text, kind in zip(tokens, types) if kind == CONTROL]
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in control])
    tokenizer.save(os.path.join(folder, "tokenizer.json"))
    named = {
        f"{role}_token": tokens[said(reader, f"tokenizer.ggml.{name}_token_id")]
        for role, name in [("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")]
    }
    write_json(
        folder,
        "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "chat_template": said(reader, "tokenizer.chat_template"),
            "model_max_length": said(reader, "llama.context_length"),
            "clean_up_tokenization_spaces": False,
            **named,
        },
    )


def write_config(reader, folder):
    wanted(reader, "general.architecture", "llama")
    tokens = said(reader, "tokenizer.ggml.tokens")
    hidden, heads = said(reader, "llama.embedding_length"), said(reader, "llama.attention.head_count")
    write_json(
        folder,
        "config.json",
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_act": "silu",
            "hidden_size": hidden,
            "intermediate_size": said(reader, "llama.feed_forward_length"),
            "num_hidden_layers": said(reader, "llama.block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": said(reader, "llama.attention.head_count_kv"),
            "head_dim": hidden // heads,
            "max_position_embeddings": said(reader, "llama.context_length"),
            "rms_norm_eps": said(reader, "llama.attention.layer_norm_rms_epsilon"),
            "rope_theta": said(reader, "llama.rope.freq_base", 10000.0),
            "tie_word_embeddings": not any(t.name == "output.weight" for t in reader.tensors),
            "vocab_size": len(tokens),
            "bos_token_id": said(reader, "tokenizer.ggml.bos_token_id"),
            "eos_token_id": said(reader, "tokenizer.ggml.eos_token_id"),
            "dtype": "bfloat16",
        },
    )


def write_weights(reader, folder):
    heads = {
        "attn_q": said(reader, "llama.attention.head_count"),
        "attn_k": said(reader, "llama.attention.head_count_kv"),
    }
    weights = {}
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        name, kind = named(tensor.name)
        if kind in heads:
            values = halves(values, heads[kind])
        weights[name] = torch.from_numpy(numpy.array(values)).to(torch.bfloat16)
    save_file(weights, os.path.join(folder, SHARD), metadata={"format": "pt"})


def named(name):
    """The name in the folder of a tensor in the GGUF, and which part of a layer it is."""
    stem, _, suffix = name.rpartition(".")
    if stem in WHOLE:
        return f"{WHOLE[stem]}.{suffix}", stem
    block, number, kind = (stem.split(".") + ["", ""])[:3]
    if block != "blk" or kind not in LAYER:
        sys.exit(f"hf_from_gguf: tensor {name} is not known")
    return f"model.layers.{number}.{LAYER[kind]}.{suffix}", kind


def halves(values, heads):
    """A GGUF has the pairs that a rotation turns side by side, the folder in two halves."""
    rows, columns = values.shape
    pairs = values.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


if __name__ == "__main__":
    sys.exit(main())
