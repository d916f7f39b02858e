"""Makes formats.json: what ggml's own Python package makes of random blocks of each quantised format.

    pip install gguf==0.19.0 && python engine/goldens/formats.py

For each format two blocks (of 256 values each, or eight of 32) with random bytes, but for scales and
minimums, which are random f16 between -1 and 1; their bytes in hexadecimal, and the bits of the f32 values.
"""

import json
import pathlib

import numpy
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

# Where each format's block has its f16.
HALVES = {
    "Q4_0": [0],
    "Q4_1": [0, 2],
    "Q5_0": [0],
    "Q5_1": [0, 2],
    "Q8_0": [0],
    "Q4_K": [0, 2],
    "Q5_K": [0, 2],
    "Q6_K": [208],
}
VALUES = 512

random = numpy.random.default_rng(7)
golden = {}
for name, halves in HALVES.items():
    kind = GGMLQuantizationType[name]
    values, size = GGML_QUANT_SIZES[kind]
    blocks = random.integers(0, 256, (VALUES // values, size), dtype=numpy.uint8)
    for at in halves:
        scales = random.uniform(-1, 1, len(blocks)).astype(numpy.float16)
        blocks[:, at : at + 2] = scales.view(numpy.uint8).reshape(-1, 2)
    stored = blocks.reshape(1, -1)
    expected = dequantize(stored, kind).astype(numpy.float32).reshape(-1)
    golden[name] = {
        "number": int(kind),
        "stored": stored.tobytes().hex(),
        "bits": expected.view(numpy.uint32).tolist(),
    }
path = pathlib.Path(__file__).with_name("formats.json")
path.write_text(json.dumps(golden, separators=(",", ":")) + "\n")
print(path, path.stat().st_size, "bytes")
