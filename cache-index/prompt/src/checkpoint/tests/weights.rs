//! Catches: tensors that are believed to lie where they do not, and shards that do not belong together.

use super::super::safetensors::SafeTensors;
use super::*;

/// A file of this header and so many bytes of data.
fn file(header: &str, data: usize) -> Vec<u8> {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.resize(bytes.len() + data, 0);
    bytes
}

fn parse(bytes: &[u8]) -> Result<SafeTensors, String> {
    SafeTensors::parse("m.safetensors", bytes).map_err(|error| error.to_string())
}

const ONE: &str = r#"{"t":{"dtype":"F16","shape":[2,3],"data_offsets":[0,12]}}"#;

#[test]
fn a_sound_file() {
    let header = r#"{"__metadata__":{"format":"pt"},"b":{"dtype":"F32","shape":[2],"data_offsets":[12,20]},"a":{"dtype":"BF16","shape":[2,3],"data_offsets":[0,12]}}  "#;
    let read = parse(&file(header, 20)).unwrap();
    let names: Vec<&str> = read.tensors.iter().map(|t| t.name.as_str()).collect();
    assert_eq!(names, ["a", "b"]);
    assert_eq!(
        (read.tensors[0].dims.as_slice(), read.tensors[0].bytes),
        (&[3, 2][..], 12)
    );
    assert_eq!(read.data_offset, 8 + header.len() as u64);
    assert!(parse(&file("{}", 0)).unwrap().tensors.is_empty());
}

#[test]
fn each_kind_of_damage_has_a_name() {
    let check = |bytes: &[u8], expected: &[&str]| refused(parse(bytes), expected);
    let entry = |dtype: &str, shape: &str, offsets: &str, data: usize| {
        let header =
            format!(r#"{{"t":{{"dtype":"{dtype}","shape":{shape},"data_offsets":{offsets}}}}}"#);
        file(&header, data)
    };
    check(b"", &["m.safetensors is cut", "0 bytes"]);
    check(b"\x10\0\0\0", &["is cut", "4 bytes"]);
    check(
        &u64::MAX.to_le_bytes(),
        &["18446744073709551615", "100000000"],
    );
    check(
        b"version https://git-lfs.github.com/spec/v1",
        &["no safetensors file"],
    );
    check(
        &[&8u64.to_be_bytes()[..], b"{}      "].concat(),
        &["big-endian"],
    );
    check(
        &100u64.to_le_bytes(),
        &["is cut", "100 bytes, and 0 are left"],
    );
    check(&file("not", 0), &["does not begin with `{`"]);
    check(&file(" {}", 0), &["does not begin with `{`"]);
    check(&file("{\"a\"", 0), &["not JSON of tensors", "line 1"]);
    check(&file("{}{}", 0), &["trailing"]);
    check(&file("{\"t\":1}", 0), &["not JSON of tensors"]);
    check(&file("{\"t\":{\"dtype\":\"F32\"}}", 0), &["missing field"]);
    let mut latin = file("{\"a\":1}", 0);
    latin[10] = 0xe9;
    check(&latin, &["not UTF-8"]);
    check(
        &entry("I8", "[4]", "[0,4]", 4),
        &["tensor t", "stored as I8", "BF16"],
    );
    check(&entry("Q4_0", "[4]", "[0,4]", 4), &["stored as Q4_0"]);
    check(
        &entry("F32", "[1,1,1,1,1,1,1,1,1]", "[0,4]", 4),
        &["up to 8 sizes"],
    );
    check(&entry("F32", "[-1]", "[0,4]", 4), &["not JSON of tensors"]);
    check(
        &entry("F32", "[4294967296,4294967296]", "[0,4]", 4),
        &["overflows"],
    );
    check(
        &entry("F32", "[4611686018427387904]", "[0,4]", 4),
        &["overflows"],
    );
    check(
        &entry("F32", "[2]", "[0,4]", 4),
        &["from 0 to 4", "8 bytes"],
    );
    check(&entry("F32", "[1]", "[4,0]", 4), &["from 4 to 0"]);
    check(
        &entry("F32", "[1]", "[0,4]", 3),
        &["ends at 4, past", "3 bytes", "download"],
    );
    check(
        &entry("F32", "[1]", "[0,4]", 5),
        &["the last one", "4 of 5"],
    );
    check(&entry("F32", "[1]", "[4,8]", 8), &["leaves a gap"]);
}

#[test]
fn tensors_lie_beside_each_other() {
    let check = |bytes: &[u8], expected: &[&str]| refused(parse(bytes), expected);
    let two = |second: &str, name: &str| {
        let header = format!(
            r#"{{"t":{{"dtype":"F32","shape":[2],"data_offsets":[0,8]}},"{name}":{{"dtype":"F32","shape":[2],"data_offsets":{second}}}}}"#
        );
        file(&header, 16)
    };
    assert!(parse(&two("[8,16]", "u")).is_ok());
    check(&two("[4,12]", "u"), &["tensor u", "overlaps"]);
    check(&two("[8,16]", "t"), &["tensor t", "twice"]);
}

#[test]
fn every_cut_and_bit_flip_is_an_error_or_another_sound_file() {
    let whole = file(ONE, 12);
    for length in 0..whole.len() {
        assert!(parse(&whole[..length]).is_err(), "believed {length} bytes");
    }
    for byte in 0..whole.len() {
        for bit in 0..8 {
            let mut damaged = whole.clone();
            damaged[byte] ^= 1 << bit;
            let _ = parse(&damaged);
        }
    }
}

/// A tensor's name, rows and columns.
type Matrix = (&'static str, [u64; 2]);

/// A model's header from shards of these tensors.
fn header(config: Json, shards: &[(&str, &[Matrix])]) -> Result<Header, String> {
    let (config, tokenizer) = (config.to_string(), tokenizer().to_string());
    let texts = texts(&[(CONFIG, &config), (TOKENIZER, &tokenizer)]);
    let checkpoint = Checkpoint::read(&texts).unwrap();
    let read: Vec<(&str, SafeTensors)> = shards
        .iter()
        .map(|(name, tensors)| {
            let mut end = 0;
            let entries = tensors.iter().map(|(tensor, [rows, cols])| {
                let begin = end;
                end += rows * cols * 2;
                json!({ *tensor: {"dtype": "F16", "shape": [rows, cols], "data_offsets": [begin, end]} })
            });
            let all = entries.fold(json!({}), merged);
            let bytes = file(&all.to_string(), end as usize);
            (*name, SafeTensors::parse(name, &bytes).unwrap())
        })
        .collect();
    let shards: Vec<Shard<'_>> = read
        .iter()
        .enumerate()
        .map(|(at, (name, tensors))| Shard {
            name,
            tensors,
            begin: at as u64 * 10_000,
        })
        .collect();
    let header = checkpoint.header(&shards, 99_999);
    header.map_err(|error| error.to_string())
}

const TABLE: Matrix = ("model.embed_tokens.weight", [4, 64]);
const QUERY: Matrix = ("model.layers.10.self_attn.q_proj.weight", [64, 64]);

#[test]
fn tensors_get_the_names_of_gguf() {
    let found = header(config(), &[("one", &[TABLE]), ("two", &[QUERY])]).unwrap();
    let places: Vec<(&str, bool)> = found
        .tensors
        .iter()
        .map(|tensor| (tensor.name.as_str(), tensor.offset >= 10_000))
        .collect();
    assert_eq!(
        places,
        [("token_embd.weight", false), ("blk.10.attn_q.weight", true)]
    );
    let strange = [TABLE, ("model.layers.01.self_attn.q_proj.weight", [1, 1])];
    let found = header(config(), &[("one", &strange)]).unwrap();
    assert_eq!(
        found.tensors[1].name, strange[1].0,
        "kept, for whoever refuses it"
    );
    let derived = [
        TABLE,
        ("model.layers.0.self_attn.rotary_emb.inv_freq", [1, 1]),
    ];
    assert_eq!(
        header(config(), &[("one", &derived)])
            .unwrap()
            .tensors
            .len(),
        1
    );
    refused(
        header(config(), &[("one", &[TABLE]), ("two", &[TABLE])]),
        &["two", "appears twice"],
    );
    let more = with(json!({"vocab_size": 5}));
    refused(
        header(more, &[("one", &[TABLE])]),
        &["vocab_size is 5", "4, the rows"],
    );
}

#[test]
fn the_output_matrix_is_the_table_where_the_model_says_so() {
    let head = [TABLE, ("lm_head.weight", [4, 64])];
    let count = |tied: Json, tensors: &[Matrix]| {
        let config = with(json!({"tie_word_embeddings": tied}));
        header(config, &[("one", tensors)]).map(|header| header.tensors.len())
    };
    assert_eq!(count(json!(true), &head), Ok(1));
    assert_eq!(count(json!(false), &head), Ok(2));
    assert_eq!(count(Json::Null, &head), Ok(2));
    assert_eq!(count(Json::Null, &[TABLE]), Ok(1));
    refused(
        count(json!(false), &[TABLE]),
        &["tie_word_embeddings", "lm_head.weight"],
    );
}

#[test]
fn an_index_belongs_to_its_shards() {
    let index = |text: &str| Index::parse(text).map_err(|error| error.to_string());
    let sound = index(
        r#"{"metadata":{"total_size":8},"weight_map":{"a":"1.safetensors","b":"2.safetensors"}}"#,
    )
    .unwrap();
    assert_eq!(sound.files(), ["1.safetensors", "2.safetensors"]);
    refused(index("{}"), &[INDEX_FILE, "weight_map"]);
    refused(index(r#"{"weight_map":{}}"#), &["names no tensor"]);
    refused(index(r#"{"weight_map":{"a":1}}"#), &["not a map"]);
    for path in [
        "../x.safetensors",
        "/x.safetensors",
        ".x.safetensors",
        "x.bin",
        "",
    ] {
        let text = json!({"weight_map": {"a": path}}).to_string();
        refused(index(&text), &["tensor a", "no file name"]);
    }
    let shard = |name: &str| {
        let header = format!(r#"{{"{name}":{{"dtype":"F16","shape":[1],"data_offsets":[0,2]}}}}"#);
        SafeTensors::parse("x", &file(&header, 2)).unwrap()
    };
    let check = |first: &str, second: &str| {
        let (first, second) = (shard(first), shard(second));
        let of = |name, tensors| Shard {
            name,
            tensors,
            begin: 0,
        };
        let shards = [of("1.safetensors", &first), of("2.safetensors", &second)];
        sound.check(&shards).map_err(|error| error.to_string())
    };
    assert_eq!(check("a", "b"), Ok(()));
    refused(
        check("b", "a"),
        &["1.safetensors", "tensor b", "belongs into 2"],
    );
    refused(check("a", "c"), &["tensor c", "is not in"]);
    let first = shard("a");
    let only = [Shard {
        name: "1.safetensors",
        tensors: &first,
        begin: 0,
    }];
    let error = sound.check(&only).unwrap_err().to_string();
    assert!(
        error.contains("tensor b") && error.contains("download"),
        "{error}"
    );
}

#[test]
fn which_files_hold_the_weights() {
    let find = |names: &[&str]| {
        let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
        let index = || Ok(Index::parse(r#"{"weight_map":{"a":"1.safetensors"}}"#).unwrap());
        shard_names(&names, |error| error.to_string(), index).map(|(names, _)| names)
    };
    assert_eq!(
        find(&["model.safetensors", INDEX_FILE]).unwrap(),
        ["model.safetensors"]
    );
    assert_eq!(
        find(&["1.safetensors", INDEX_FILE]).unwrap(),
        ["1.safetensors"]
    );
    assert_eq!(
        find(&["other.safetensors", "x"]).unwrap(),
        ["other.safetensors"]
    );
    refused(
        find(&[INDEX_FILE]),
        &["names 1.safetensors, which is not there"],
    );
    refused(
        find(&["pytorch_model.bin"]),
        &["no model.safetensors", "pytorch_model.bin"],
    );
    refused(
        find(&["a.safetensors", "b.safetensors"]),
        &["a.safetensors, b.safetensors"],
    );
}
