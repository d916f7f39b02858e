//! A model file of a real model's shape whose weights are random: what speed is measured on where
//! no trained model of that size is at hand.
//!
//! Shape and vocabulary decide about speed, and what the weights say does not; so the shape is that
//! of Llama 3.2 1B (16 layers of 2,048, feed-forward 8,192, 32 heads over 8 key heads of 64, tied
//! embeddings, 128,256 tokens; rope is not scaled, whose factors cost nothing), and the vocabulary comes
//! from a file that has nothing else. Weights are BF16, nearly normal, with a variance that keeps the residual stream in
//! bounds; llama.cpp's quantiser makes other formats of it.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use prompt::gguf::{Header, Value};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use crate::error::LoadError;

const LAYERS: usize = 16;
const WIDTH: usize = 2048;
const FF: usize = 8192;
const HEADS: usize = 32;
const KV_HEADS: usize = 8;
const HEAD_DIM: usize = 64;
const CONTEXT: u64 = 131_072;
/// GGUF's own default.
const ALIGNMENT: u64 = 32;
/// Numbers of formats in a GGUF file.
const F32: u32 = 0;
const BF16: u32 = 30;

/// Flags of `homing-load random-model`.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// A GGUF file whose tokenizer the model gets
    #[arg(long)]
    pub vocabulary: PathBuf,
    /// The file to write, 2.5 GB with a vocabulary of 128,256 tokens
    #[arg(long)]
    pub out: PathBuf,
    /// Seed of the weights
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
}

struct Tensor {
    name: String,
    /// Fastest first.
    dims: Vec<u64>,
    filling: Filling,
}

enum Filling {
    /// Nearly normal values of this deviation.
    Random(f32),
    Exactly(Vec<f32>),
}

impl Tensor {
    fn values(&self) -> u64 {
        self.dims.iter().product()
    }

    fn bytes(&self) -> u64 {
        match self.filling {
            Filling::Random(_) => 2 * self.values(),
            Filling::Exactly(_) => 4 * self.values(),
        }
    }
}

/// Writes the file.
pub fn run(args: &Args) -> Result<(), LoadError> {
    let bytes = std::fs::read(&args.vocabulary).map_err(LoadError::file(&args.vocabulary))?;
    let header = Header::parse(&bytes).map_err(|e| {
        LoadError::program(
            "the vocabulary",
            format!("{}: {e}", args.vocabulary.display()),
        )
    })?;
    let metadata = metadata(header.metadata);
    let tokens = metadata.get("tokenizer.ggml.tokens");
    let vocab = tokens.and_then(Value::as_array).map_or(0, <[Value]>::len);
    if vocab == 0 {
        let what = format!("{} has no tokens", args.vocabulary.display());
        return Err(LoadError::program("the vocabulary", what));
    }
    write(&args.out, &metadata, &tensors(vocab), args.seed).map_err(LoadError::file(&args.out))
}

/// The vocabulary's metadata with the shape's numbers.
fn metadata(mut metadata: BTreeMap<String, Value>) -> BTreeMap<String, Value> {
    metadata.retain(|key, _| key.starts_with("tokenizer."));
    let mut put = |key: &str, value| metadata.insert(key.to_owned(), value);
    put("general.architecture", Value::Str("llama".into()));
    put(
        "general.name",
        Value::Str("random weights, shape of Llama 3.2 1B".into()),
    );
    put(
        "tokenizer.chat_template",
        Value::Str(
            "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
                .into(),
        ),
    );
    let numbers = [
        ("block_count", LAYERS as u64),
        ("embedding_length", WIDTH as u64),
        ("feed_forward_length", FF as u64),
        ("attention.head_count", HEADS as u64),
        ("attention.head_count_kv", KV_HEADS as u64),
        ("rope.dimension_count", HEAD_DIM as u64),
        ("context_length", CONTEXT),
    ];
    for (key, number) in numbers {
        put(&format!("llama.{key}"), Value::U64(number));
    }
    put("llama.rope.freq_base", Value::F64(500_000.0));
    put("llama.attention.layer_norm_rms_epsilon", Value::F64(1e-5));
    metadata
}

fn tensors(vocab: usize) -> Vec<Tensor> {
    let random = |name: String, cols: usize, rows: usize, deviation: f32| Tensor {
        name,
        dims: vec![cols as u64, rows as u64],
        filling: Filling::Random(deviation),
    };
    let exactly = |name: String, values: Vec<f32>| Tensor {
        name,
        dims: vec![values.len() as u64],
        filling: Filling::Exactly(values),
    };
    let keep = |cols: usize| 1.0 / (cols as f32).sqrt();
    let mut all = vec![
        random("token_embd.weight".into(), WIDTH, vocab, keep(WIDTH)),
        exactly("output_norm.weight".into(), vec![1.0; WIDTH]),
    ];
    let (queries, keys) = (HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM);
    for layer in 0..LAYERS {
        let name = |part: &str| format!("blk.{layer}.{part}.weight");
        let shapes = [
            ("attn_q", WIDTH, queries),
            ("attn_k", WIDTH, keys),
            ("attn_v", WIDTH, keys),
            ("attn_output", queries, WIDTH),
            ("ffn_gate", WIDTH, FF),
            ("ffn_up", WIDTH, FF),
            ("ffn_down", FF, WIDTH),
        ];
        for (part, cols, rows) in shapes {
            all.push(random(name(part), cols, rows, keep(cols)));
        }
        for part in ["attn_norm", "ffn_norm"] {
            all.push(exactly(name(part), vec![1.0; WIDTH]));
        }
    }
    all
}

fn write(
    path: &Path,
    metadata: &BTreeMap<String, Value>,
    tensors: &[Tensor],
    seed: u64,
) -> io::Result<()> {
    let mut head = Vec::new();
    head.extend_from_slice(b"GGUF");
    head.extend_from_slice(&3_u32.to_le_bytes());
    head.extend_from_slice(&(tensors.len() as u64).to_le_bytes());
    head.extend_from_slice(&(metadata.len() as u64).to_le_bytes());
    for (key, value) in metadata {
        put_string(&mut head, key);
        head.extend_from_slice(&kind(value).to_le_bytes());
        put_value(&mut head, value);
    }
    let mut offset = 0;
    for tensor in tensors {
        put_string(&mut head, &tensor.name);
        head.extend_from_slice(&(tensor.dims.len() as u32).to_le_bytes());
        for dim in &tensor.dims {
            head.extend_from_slice(&dim.to_le_bytes());
        }
        let format = match tensor.filling {
            Filling::Random(_) => BF16,
            Filling::Exactly(_) => F32,
        };
        head.extend_from_slice(&format.to_le_bytes());
        head.extend_from_slice(&u64::to_le_bytes(offset));
        offset += tensor.bytes().next_multiple_of(ALIGNMENT);
    }
    head.resize(head.len().next_multiple_of(ALIGNMENT as usize), 0);
    let mut file = BufWriter::with_capacity(1 << 20, File::create(path)?);
    file.write_all(&head)?;
    let mut random = StdRng::seed_from_u64(seed);
    for tensor in tensors {
        match &tensor.filling {
            Filling::Random(deviation) => {
                for _ in 0..tensor.values() {
                    let bits = (deviation * nearly_normal(random.random())).to_bits();
                    file.write_all(&((bits >> 16) as u16).to_le_bytes())?;
                }
            }
            Filling::Exactly(values) => {
                for value in values {
                    file.write_all(&value.to_le_bytes())?;
                }
            }
        }
        let bytes = tensor.bytes();
        let padding = bytes.next_multiple_of(ALIGNMENT) - bytes;
        file.write_all(&[0; ALIGNMENT as usize][..padding as usize])?;
    }
    file.into_inner()?.sync_all()
}

/// The sum of four uniform numbers, with mean 0 and deviation 1.
fn nearly_normal(bits: u64) -> f32 {
    let uniform = |at: u32| ((bits >> (16 * at)) & 0xffff) as f32 / 65_536.0;
    // Four uniform numbers have mean 2 and variance 4/12.
    (uniform(0) + uniform(1) + uniform(2) + uniform(3) - 2.0) * 3.0_f32.sqrt()
}

/// A value's type in a GGUF file: integers as 32 bits, floats as f32.
fn kind(value: &Value) -> u32 {
    match value {
        Value::U64(_) => 4,
        Value::I64(_) => 5,
        Value::F64(_) => 6,
        Value::Bool(_) => 7,
        Value::Str(_) => 8,
        Value::Array(_) => 9,
    }
}

fn put_value(out: &mut Vec<u8>, value: &Value) {
    match value {
        Value::U64(number) => out.extend_from_slice(&(*number as u32).to_le_bytes()),
        Value::I64(number) => out.extend_from_slice(&(*number as i32).to_le_bytes()),
        Value::F64(number) => out.extend_from_slice(&(*number as f32).to_le_bytes()),
        Value::Bool(flag) => out.push(u8::from(*flag)),
        Value::Str(text) => put_string(out, text),
        Value::Array(values) => {
            let of = values.first().map_or(8, kind);
            out.extend_from_slice(&of.to_le_bytes());
            out.extend_from_slice(&(values.len() as u64).to_le_bytes());
            for value in values {
                put_value(out, value);
            }
        }
    }
}

fn put_string(out: &mut Vec<u8>, text: &str) {
    out.extend_from_slice(&(text.len() as u64).to_le_bytes());
    out.extend_from_slice(text.as_bytes());
}
