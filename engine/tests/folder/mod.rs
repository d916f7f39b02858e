//! Writes the model of a GGUF file as a folder in Hugging Face's layout: the same values under the other
//! names, llama's queries and keys in the order in which they were trained.

#![expect(clippy::panic, reason = "a helper of a test fails the test")]

use std::collections::BTreeMap;
use std::path::Path;

use half::{bf16, f16};
use prompt::gguf::{Dtype, Header, TensorInfo};
use serde_json::{Map, Value as Json, json};

/// How matrices are stored; vectors stay as they are.
#[derive(Clone, Copy, PartialEq, Eq)]
#[expect(dead_code, reason = "each test takes some of them")]
pub(crate) enum Stored {
    AsTheyAre,
    F32,
    F16,
    BF16,
}

const PARTS: &[(&str, &str)] = &[
    ("attn_q_norm", "self_attn.q_norm"),
    ("attn_k_norm", "self_attn.k_norm"),
    ("attn_q", "self_attn.q_proj"),
    ("attn_k", "self_attn.k_proj"),
    ("attn_v", "self_attn.v_proj"),
    ("attn_output", "self_attn.o_proj"),
    ("ffn_gate", "mlp.gate_proj"),
    ("ffn_up", "mlp.up_proj"),
    ("ffn_down", "mlp.down_proj"),
    ("attn_norm", "input_layernorm"),
    ("ffn_norm", "post_attention_layernorm"),
];

fn trained_name(name: &str) -> String {
    match name {
        "token_embd.weight" => return "model.embed_tokens.weight".to_owned(),
        "output_norm.weight" => return "model.norm.weight".to_owned(),
        "output.weight" => return "lm_head.weight".to_owned(),
        _ => {}
    }
    let mut parts = name.split('.');
    let [Some("blk"), Some(layer), Some(part), Some(kind)] = [(); 4].map(|()| parts.next()) else {
        panic!("{name}");
    };
    let (_, trained) = PARTS.iter().find(|(ggml, _)| *ggml == part).expect(name);
    format!("model.layers.{layer}.{trained}.{kind}")
}

/// A tensor of a checkpoint.
struct Tensor {
    dtype: &'static str,
    shape: Vec<u64>,
    bytes: Vec<u8>,
}

/// Writes the folder, its weights over so many files.
pub(crate) fn write(gguf: &Path, config: &Json, stored: Stored, files: usize, to: &Path) {
    let file = std::fs::read(gguf).expect("the model can be read");
    let header = Header::parse(&file).expect("a GGUF file");
    let mut tensors = BTreeMap::new();
    for tensor in &header.tensors {
        // Follows from the configuration.
        if tensor.name != "rope_freqs.weight" {
            let trained = tensor_of(&header, tensor, &file, stored);
            tensors.insert(trained_name(&tensor.name), trained);
        }
    }
    let each = tensors.len().div_ceil(files);
    let mut map = Map::new();
    let all: Vec<_> = tensors.into_iter().collect();
    for (number, tensors) in all.chunks(each).enumerate() {
        let name = match files {
            1 => "model.safetensors".to_owned(),
            _ => format!("model-{:05}-of-{files:05}.safetensors", number + 1),
        };
        for (tensor, _) in tensors {
            map.insert(tensor.clone(), name.clone().into());
        }
        std::fs::write(to.join(name), safetensors(tensors)).expect("it can be written");
    }
    let write = |name: &str, json: &Json| {
        std::fs::write(to.join(name), json.to_string()).expect("it can be written");
    };
    if files > 1 {
        write(
            "model.safetensors.index.json",
            &json!({"metadata": {}, "weight_map": map}),
        );
    }
    write("config.json", config);
    write("tokenizer.json", &tokenizer(&header));
    write("tokenizer_config.json", &tokenizer_config(&header));
}

fn safetensors(tensors: &[(String, Tensor)]) -> Vec<u8> {
    let (mut entries, mut data) = (Map::new(), Vec::new());
    for (name, tensor) in tensors {
        let begin = data.len();
        data.extend_from_slice(&tensor.bytes);
        let entry = json!({"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [begin, data.len()]});
        entries.insert(name.clone(), entry);
    }
    let mut header = Json::Object(entries).to_string();
    while !header.len().is_multiple_of(8) {
        header.push(' ');
    }
    [
        &(header.len() as u64).to_le_bytes()[..],
        header.as_bytes(),
        &data,
    ]
    .concat()
}

fn tensor_of(header: &Header, tensor: &TensorInfo, file: &[u8], stored: Stored) -> Tensor {
    let begin = (header.data_offset + tensor.offset) as usize;
    let bytes = &file[begin..begin + tensor.bytes as usize];
    let as_it_is = stored == Stored::AsTheyAre || tensor.dims.len() == 1;
    let (dtype, mut bytes) = match (tensor.dtype, stored) {
        (Dtype::F32, _) if as_it_is => ("F32", bytes.to_vec()),
        (Dtype::F16, _) if as_it_is => ("F16", bytes.to_vec()),
        (dtype, stored) => {
            let values = values(dtype, bytes).into_iter();
            match stored {
                Stored::F32 => ("F32", values.flat_map(f32::to_le_bytes).collect()),
                Stored::F16 => (
                    "F16",
                    values
                        .flat_map(|v| f16::from_f32(v).to_le_bytes())
                        .collect(),
                ),
                Stored::BF16 => (
                    "BF16",
                    values
                        .flat_map(|v| bf16::from_f32(v).to_le_bytes())
                        .collect(),
                ),
                Stored::AsTheyAre => panic!("{dtype:?} has no counterpart"),
            }
        }
    };
    let count = |key: &str| {
        let count = header.get(&format!("llama.attention.{key}"))?.as_u64()?;
        Some(count as usize)
    };
    let heads = match tensor.name.rsplit('.').nth(1) {
        Some("attn_q") => count("head_count"),
        Some("attn_k") => count("head_count_kv"),
        _ => None,
    };
    let shape: Vec<u64> = tensor.dims.iter().rev().copied().collect();
    if let Some(heads) = heads {
        bytes = halves(&bytes, shape[0] as usize, heads);
    }
    Tensor {
        dtype,
        shape,
        bytes,
    }
}

/// Rows `2i` and `2i + 1` of each head become `i` and `half + i`.
fn halves(bytes: &[u8], rows: usize, heads: usize) -> Vec<u8> {
    let (row_bytes, head) = (bytes.len() / rows, rows / heads);
    let from = |row: usize| {
        let (first, inside) = (row / head * head, row % head);
        first + 2 * (inside % (head / 2)) + inside / (head / 2)
    };
    let row = |row: usize| &bytes[from(row) * row_bytes..][..row_bytes];
    (0..rows).flat_map(row).copied().collect()
}

/// The values of a stored tensor, in the formats that test models have.
fn values(dtype: Dtype, bytes: &[u8]) -> Vec<f32> {
    let half = |bytes: &[u8]| f16::from_le_bytes([bytes[0], bytes[1]]).to_f32();
    match dtype {
        Dtype::F32 => {
            let (chunks, _) = bytes.as_chunks::<4>();
            chunks.iter().map(|c| f32::from_le_bytes(*c)).collect()
        }
        Dtype::F16 => bytes.chunks_exact(2).map(half).collect(),
        Dtype::Q8_0 => {
            let block = |block: &'_ [u8]| {
                let scale = half(block);
                let values = block[2..].iter().map(move |q| scale * f32::from(*q as i8));
                values.collect::<Vec<_>>()
            };
            bytes.chunks_exact(34).flat_map(block).collect()
        }
        Dtype::Q4_1 => {
            let block = |block: &'_ [u8]| {
                let (scale, least) = (half(block), half(&block[2..]));
                let low = block[4..].iter().map(|q| q & 15);
                let high = block[4..].iter().map(|q| q >> 4);
                let values = low.chain(high).map(|q| scale * f32::from(q) + least);
                values.collect::<Vec<_>>()
            };
            bytes.chunks_exact(20).flat_map(block).collect()
        }
        other => panic!("{other:?}"),
    }
}

fn strings(header: &Header, key: &str) -> Vec<String> {
    let values = header.get(key).and_then(|value| value.as_array());
    let values = values.unwrap_or_default().iter();
    values
        .filter_map(|v| v.as_str().map(str::to_owned))
        .collect()
}

/// `tokenizer.json` of a file with SmolLM2's pre-tokenizer; of one token for a file without tokenizer.
fn tokenizer(header: &Header) -> Json {
    let mut tokens = strings(header, "tokenizer.ggml.tokens");
    if tokens.is_empty() {
        tokens.push("a".to_owned());
    }
    let kinds = header
        .get("tokenizer.ggml.token_type")
        .and_then(|v| v.as_array());
    let is_control = |id: usize| {
        let kind = kinds.and_then(|kinds| kinds.get(id)?.as_u64());
        matches!(kind, Some(2 | 3))
    };
    let added = tokens.iter().enumerate().filter(|(id, _)| is_control(*id));
    let added = added.map(|(id, text)| json!({"id": id, "content": text, "special": true}));
    let added: Vec<_> = added.collect();
    let byte_level = json!({"type": "ByteLevel", "add_prefix_space": false, "use_regex": true});
    json!({
        "version": "1.0",
        "added_tokens": added,
        "normalizer": null,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
            {"type": "Digits", "individual_digits": true}, byte_level]},
        "post_processor": null,
        "decoder": byte_level,
        "model": {
            "type": "BPE", "unk_token": "<|endoftext|>", "byte_fallback": false,
            "vocab": tokens.iter().enumerate().map(|(id, t)| (t.clone(), id.into())).collect::<Map<_, _>>(),
            "merges": strings(header, "tokenizer.ggml.merges"),
        },
    })
}

fn tokenizer_config(header: &Header) -> Json {
    let tokens = strings(header, "tokenizer.ggml.tokens");
    let token = |key: &str| {
        let id = header.get(&format!("tokenizer.ggml.{key}"))?.as_u64()?;
        tokens.get(id as usize).cloned()
    };
    let template = header
        .get("tokenizer.chat_template")
        .and_then(|v| v.as_str());
    json!({
        "bos_token": token("bos_token_id"),
        "eos_token": token("eos_token_id"),
        "pad_token": token("padding_token_id"),
        "chat_template": template,
    })
}
