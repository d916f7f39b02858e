//! A small random model as a GGUF file: every storage format, odd sizes, two layers.

use half::f16;

/// A small generator of reproducible noise (splitmix64).
pub(crate) struct Noise(pub(crate) u64);

impl Noise {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut bits = self.0;
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        bits ^ (bits >> 31)
    }

    /// Below `limit`, which is not 0.
    pub(crate) fn below(&mut self, limit: usize) -> usize {
        (self.next() % limit as u64) as usize
    }

    /// Between -1 and 1.
    fn float(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }
}

/// Storage formats by ggml's numbers.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Format {
    F32 = 0,
    F16 = 1,
    Q4_0 = 2,
    Q4_1 = 3,
    Q8_0 = 8,
}

/// A metadata value.
#[derive(Clone)]
pub(crate) enum Value {
    U32(u32),
    F32(f32),
    Text(&'static str),
}

/// A tensor to be written.
#[derive(Clone)]
pub(crate) struct Tensor {
    pub(crate) name: String,
    pub(crate) dims: Vec<u64>,
    pub(crate) format: u32,
    pub(crate) bytes: Vec<u8>,
}

/// A model before it is written; tests damage it on purpose.
#[derive(Clone)]
pub(crate) struct Tiny {
    pub(crate) metadata: Vec<(&'static str, Value)>,
    pub(crate) tensors: Vec<Tensor>,
}

pub(crate) const VOCAB: usize = 101;
pub(crate) const CONTEXT: usize = 1024;
const WIDTH: usize = 96;
const FF: usize = 160;
const HEADS: usize = 6;
const KV_HEADS: usize = 2;
const HEAD_DIM: usize = 32;

impl Tiny {
    /// Weights are drawn wide enough that attention is peaked: flat softmax would hide errors.
    pub(crate) fn new(seed: u64) -> Tiny {
        let mut noise = Noise(seed);
        let mut tiny = Tiny {
            metadata: metadata(),
            tensors: Vec::new(),
        };
        tiny.add(&mut noise, "token_embd", Format::Q8_0, &[WIDTH, VOCAB]);
        let formats = [
            Format::Q4_1,
            Format::Q4_0,
            Format::Q8_0,
            Format::F16,
            Format::F32,
        ];
        for layer in 0..2 {
            let mut part = layer * 2;
            let mut format = || {
                part += 1;
                formats[part % formats.len()]
            };
            for (name, dims) in [
                ("attn_q", [WIDTH, HEADS * HEAD_DIM]),
                ("attn_k", [WIDTH, KV_HEADS * HEAD_DIM]),
                ("attn_v", [WIDTH, KV_HEADS * HEAD_DIM]),
                ("attn_output", [HEADS * HEAD_DIM, WIDTH]),
                ("ffn_gate", [WIDTH, FF]),
                ("ffn_up", [WIDTH, FF]),
                ("ffn_down", [FF, WIDTH]),
            ] {
                tiny.add(&mut noise, &format!("blk.{layer}.{name}"), format(), &dims);
            }
            for name in ["attn_norm", "ffn_norm"] {
                tiny.add(
                    &mut noise,
                    &format!("blk.{layer}.{name}"),
                    Format::F32,
                    &[WIDTH],
                );
            }
        }
        tiny.add(&mut noise, "output_norm", Format::F32, &[WIDTH]);
        tiny
    }

    fn add(&mut self, noise: &mut Noise, name: &str, format: Format, dims: &[usize]) {
        let values = dims.iter().product();
        self.tensors.push(Tensor {
            name: format!("{name}.weight"),
            dims: dims.iter().map(|dim| *dim as u64).collect(),
            format: format as u32,
            bytes: stored(noise, format, values),
        });
    }

    /// The file's bytes.
    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        let mut out = b"GGUF".to_vec();
        out.extend(3u32.to_le_bytes());
        out.extend((self.tensors.len() as u64).to_le_bytes());
        out.extend((self.metadata.len() as u64).to_le_bytes());
        let text = |out: &mut Vec<u8>, text: &str| {
            out.extend((text.len() as u64).to_le_bytes());
            out.extend(text.as_bytes());
        };
        for (key, value) in &self.metadata {
            text(&mut out, key);
            match value {
                Value::U32(value) => {
                    out.extend(4u32.to_le_bytes());
                    out.extend(value.to_le_bytes());
                }
                Value::F32(value) => {
                    out.extend(6u32.to_le_bytes());
                    out.extend(value.to_le_bytes());
                }
                Value::Text(value) => {
                    out.extend(8u32.to_le_bytes());
                    text(&mut out, value);
                }
            }
        }
        let mut offset = 0u64;
        for tensor in &self.tensors {
            text(&mut out, &tensor.name);
            out.extend((tensor.dims.len() as u32).to_le_bytes());
            tensor
                .dims
                .iter()
                .for_each(|dim| out.extend(dim.to_le_bytes()));
            out.extend(tensor.format.to_le_bytes());
            out.extend(offset.to_le_bytes());
            offset += (tensor.bytes.len() as u64).next_multiple_of(32);
        }
        for tensor in &self.tensors {
            out.resize(out.len().next_multiple_of(32), 0);
            out.extend(&tensor.bytes);
        }
        out.resize(out.len().next_multiple_of(32), 0);
        out
    }
}

fn metadata() -> Vec<(&'static str, Value)> {
    vec![
        ("general.architecture", Value::Text("llama")),
        ("llama.block_count", Value::U32(2)),
        ("llama.context_length", Value::U32(CONTEXT as u32)),
        ("llama.embedding_length", Value::U32(WIDTH as u32)),
        ("llama.feed_forward_length", Value::U32(FF as u32)),
        ("llama.attention.head_count", Value::U32(HEADS as u32)),
        ("llama.attention.head_count_kv", Value::U32(KV_HEADS as u32)),
        ("llama.attention.key_length", Value::U32(HEAD_DIM as u32)),
        ("llama.attention.layer_norm_rms_epsilon", Value::F32(1e-5)),
        ("llama.rope.freq_base", Value::F32(10_000.0)),
    ]
}

/// Random stored values of size about 0.3, whatever the format.
fn stored(noise: &mut Noise, format: Format, values: usize) -> Vec<u8> {
    let half = |value: f32| f16::from_f32(value).to_le_bytes();
    let mut out = Vec::new();
    match format {
        Format::F32 => (0..values).for_each(|_| out.extend((0.5 * noise.float()).to_le_bytes())),
        Format::F16 => (0..values).for_each(|_| out.extend(half(0.5 * noise.float()))),
        Format::Q4_0 | Format::Q4_1 | Format::Q8_0 => {
            for _ in 0..values / 32 {
                let (step, quants) = match format {
                    Format::Q8_0 => (0.004, 32),
                    _ => (0.06, 16),
                };
                out.extend(half(step * (1.0 + 0.5 * noise.float())));
                if format == Format::Q4_1 {
                    out.extend(half(-0.45 + 0.1 * noise.float()));
                }
                out.extend((0..quants).map(|_| noise.next() as u8));
            }
        }
    }
    out
}
