"""Makes logits.bin.gz: what Hugging Face transformers says the default model answers.

transformers reads the GGUF itself (it dequantises the weights and undoes the permutation of the
query and key rows), so the golden does not depend on any code of this repository. Run it only to
renew the golden; the tests read the file and need no Python:

    pip install torch transformers gguf accelerate
    python engine/goldens/make.py models/SmolLM2-135M-Instruct.Q4_1.gguf

Layout, little-endian, gzip around it all: "HGOLD001", u32 vocab, u32 sampled ids, u32 top ids,
u32 texts; the sampled ids (u32 each); then for each text u32 tokens, the token ids (u32 each), and
for each position: f32 log-sum-exp, f32 mean, f32 standard deviation over the whole vocabulary,
the sampled ids' logits (f32 each), the top ids (u32 each) and their logits (f32 each).
"""

import gzip
import pathlib
import sys

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

SAMPLED, TOP, POSITIONS = 512, 64, 1280
SHORT = 128  # positions of every text but the first, which takes what remains


def main(model_path: str) -> None:
    here = pathlib.Path(__file__).parent
    model_path = pathlib.Path(model_path)
    source = dict(gguf_file=model_path.name)
    tokenizer = AutoTokenizer.from_pretrained(model_path.parent, **source)
    model = AutoModelForCausalLM.from_pretrained(
        model_path.parent, **source, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    vocab = model.config.vocab_size
    sampled = np.sort(np.random.default_rng(20261129).choice(vocab, SAMPLED, replace=False))

    texts = sorted(here.glob("texts/*.txt"))
    first = POSITIONS - SHORT * (len(texts) - 1)
    out = [b"HGOLD001", np.array([vocab, SAMPLED, TOP, len(texts)], "<u4").tobytes()]
    out.append(sampled.astype("<u4").tobytes())
    for index, path in enumerate(texts):
        wanted = SHORT if index else first
        ids = tokenizer(path.read_text(encoding="utf-8"), add_special_tokens=False).input_ids
        assert len(ids) >= wanted, f"{path.name}: {len(ids)} tokens, {wanted} wanted"
        ids = ids[:wanted]
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0].double()
        out.append(np.array([len(ids), *ids], "<u4").tobytes())
        lse = torch.logsumexp(logits, -1)
        std, mean = torch.std_mean(logits, -1, correction=0)
        top = torch.topk(logits, TOP, -1)
        for row in range(len(ids)):
            out.append(np.array([lse[row], mean[row], std[row]], "<f4").tobytes())
            out.append(logits[row, sampled].numpy().astype("<f4").tobytes())
            out.append(top.indices[row].numpy().astype("<u4").tobytes())
            out.append(top.values[row].numpy().astype("<f4").tobytes())
        print(f"{path.name}: {len(ids)} tokens, mean std {std.mean():.3f}")
    target = here / "logits.bin.gz"
    target.write_bytes(gzip.compress(b"".join(out), 9, mtime=0))
    print(f"{target.name}: {target.stat().st_size} bytes")


if __name__ == "__main__":
    main(*sys.argv[1:])
