//! Catches: a folder that is believed though it is damaged, or that one of our forward passes would answer
//! wrongly; and a spelling of the same model that is read as another.

mod tokens;
mod weights;

use serde_json::{Value as Json, json};

use super::*;

/// Texts of a folder.
fn texts(files: &[(&'static str, &str)]) -> Texts {
    let read = |name: &'static str, _| {
        let file = files.iter().find(|(n, _)| *n == name);
        Ok::<_, ()>(file.map(|(_, text)| text.as_bytes().to_vec()))
    };
    Texts::read(read).unwrap()
}

/// `config.json` of a small Llama, as transformers 5 writes it.
fn config() -> Json {
    json!({
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"},
        "tie_word_embeddings": true,
        "vocab_size": 4,
        "sliding_window": null,
    })
}

/// The same with some keys changed; `null` takes one out.
fn with(changes: Json) -> Json {
    merged(config(), changes)
}

fn merged(mut base: Json, changes: Json) -> Json {
    for (key, value) in changes.as_object().unwrap() {
        match value {
            Json::Null => base.as_object_mut().unwrap().remove(key),
            value => base
                .as_object_mut()
                .unwrap()
                .insert(key.clone(), value.clone()),
        };
    }
    base
}

/// A byte-level tokenizer of a few tokens, `<s>` in front of texts.
fn tokenizer() -> Json {
    json!({
        "added_tokens": [
            {"id": 2, "content": "<s>", "special": true},
            {"id": 3, "content": "<tool>", "special": false},
        ],
        "normalizer": null,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "use_regex": true},
        "post_processor": {"type": "TemplateProcessing", "single": [
            {"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}},
        ]},
        "model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []},
    })
}

fn metadata_of(config: &Json) -> Result<Metadata, String> {
    let (config, tokenizer) = (config.to_string(), tokenizer().to_string());
    let texts = texts(&[(CONFIG, &config), (TOKENIZER, &tokenizer)]);
    let read = Checkpoint::read(&texts).map_err(|error| error.to_string())?;
    Ok(read.metadata)
}

fn tokens_of(tokenizer: &Json, more: &[(&'static str, &str)]) -> Result<Metadata, String> {
    let tokenizer = tokenizer.to_string();
    let files = [&[(TOKENIZER, tokenizer.as_str())], more].concat();
    let header = prompt_header(&texts(&files)).map_err(|error| error.to_string())?;
    Ok(header.metadata)
}

fn refused<T: std::fmt::Debug>(read: Result<T, String>, expected: &[&str]) {
    let error = read.expect_err(expected[0]);
    for part in expected {
        assert!(error.contains(part), "{error:?} does not say {part:?}");
    }
}

#[test]
fn spellings_of_one_model_are_one_model() {
    let same = |one: Json, other: Json| {
        assert_eq!(
            metadata_of(&one).unwrap(),
            metadata_of(&other).unwrap(),
            "{other}"
        );
    };
    same(
        config(),
        with(json!({"rope_parameters": null, "rope_theta": 5e5, "rope_scaling": null})),
    );
    same(config(), with(json!({"architectures": null})));
    same(
        config(),
        with(json!({"head_dim": 32, "attention_bias": false})),
    );
    let yarn = json!({"factor": 4.0, "original_max_position_embeddings": 64});
    let new = merged(
        yarn.clone(),
        json!({"rope_type": "yarn", "rope_theta": 5e5}),
    );
    for kind in ["type", "rope_type"] {
        let old = merged(yarn.clone(), json!({kind: "yarn"}));
        same(
            with(json!({"rope_parameters": new})),
            with(json!({"rope_parameters": null, "rope_theta": 5e5, "rope_scaling": old})),
        );
    }
    // The reference's default where the file is silent.
    let silent = metadata_of(&with(json!({"rms_norm_eps": null}))).unwrap();
    assert_eq!(
        silent["llama.attention.layer_norm_rms_epsilon"],
        Value::F64(1e-6)
    );
}

#[test]
fn scaling_and_windows() {
    let mistral = json!({"architectures": ["MistralForCausalLM"], "model_type": "mistral"});
    let window = |changes: Json| {
        let changed = merged(merged(config(), mistral.clone()), changes);
        let metadata = metadata_of(&changed).unwrap();
        let window = metadata.get("llama.attention.sliding_window");
        window.and_then(Value::as_u64)
    };
    assert_eq!(window(json!({"sliding_window": 24})), Some(24));
    assert_eq!(window(json!({})), None, "null");
    assert_eq!(
        window(json!({"sliding_window": null})),
        Some(4096),
        "absent"
    );
    let of = |scaling: Json| {
        let scaling = merged(scaling, json!({"rope_theta": 1e4}));
        metadata_of(&with(json!({"rope_parameters": scaling}))).unwrap()
    };
    let linear = of(json!({"rope_type": "linear", "factor": 4}));
    assert_eq!(linear["llama.rope.scaling.factor"], Value::F64(4.0));
    let more = |changes: Json| {
        let yarn = merged(json!({"rope_type": "yarn", "factor": 4}), changes);
        of(yarn)["llama.rope.scaling.yarn_attn_factor"]
            .as_f64()
            .unwrap()
    };
    let paper = 0.1 * 4f64.ln() + 1.0;
    assert_eq!(more(json!({})), 1.0);
    assert_eq!(more(json!({"attention_factor": 1})), 1.0 / paper);
    assert_eq!(more(json!({"mscale": 1, "mscale_all_dim": 1})), 1.0 / paper);
    let llama3 = json!({"rope_type": "llama3", "factor": 8, "low_freq_factor": 1,
        "high_freq_factor": 4, "original_max_position_embeddings": 64, "rope_theta": 1e4});
    let text = with(json!({"rope_parameters": llama3})).to_string();
    let factors = Config::read(&text).unwrap().pair_factors;
    assert_eq!((factors.len(), factors[0], factors[15]), (16, 1.0, 8.0));
}

#[test]
fn a_config_that_cannot_be_run_is_refused_by_key() {
    let check = |changes: Json, expected: &[&str]| refused(metadata_of(&with(changes)), expected);
    let unknown = json!({"architectures": ["GemmaForCausalLM"]});
    check(
        unknown,
        &["config.json: architectures", "Gemma", "LlamaForCausalLM"],
    );
    check(json!({"architectures": []}), &["architectures", "[]"]);
    check(
        json!({"architectures": "LlamaForCausalLM"}),
        &["architectures"],
    );
    check(json!({"architectures": [1]}), &["architectures", "[1]"]);
    check(
        json!({"architectures": null, "model_type": 7}),
        &["model_type is 7", "a string"],
    );
    check(
        json!({"hidden_size": "64"}),
        &["hidden_size is \"64\"", "a whole number"],
    );
    check(json!({"hidden_size": 64.5}), &["hidden_size is 64.5"]);
    check(json!({"hidden_size": -1}), &["hidden_size is -1"]);
    check(json!({"hidden_size": 0}), &["hidden_size is 0"]);
    check(
        json!({"hidden_size": 1u64 << 60}),
        &["hidden_size", "16777216"],
    );
    check(json!({"hidden_size": null}), &["hidden_size is missing"]);
    check(
        json!({"hidden_size": 1}),
        &["hidden_size is 1", "num_attention_heads"],
    );
    check(
        json!({"num_hidden_layers": []}),
        &["num_hidden_layers is []"],
    );
    check(json!({"head_dim": 1 << 20}), &["head_dim", "1024"]);
}

#[test]
fn what_no_forward_pass_does_is_refused_by_key() {
    let check = |changes: Json, expected: &[&str]| refused(metadata_of(&with(changes)), expected);
    check(
        json!({"hidden_act": "gelu"}),
        &["hidden_act is \"gelu\"", "silu"],
    );
    check(json!({"hidden_act": 3}), &["hidden_act is 3", "a string"]);
    check(
        json!({"quantization_config": {"quant_method": "fp8"}}),
        &["fp8", "GGUF"],
    );
    check(
        json!({"rms_norm_eps": 0}),
        &["rms_norm_eps is 0", "positive"],
    );
    check(
        json!({"rms_norm_eps": 1e300}),
        &["rms_norm_eps", "positive"],
    );
    check(json!({"mlp_bias": true}), &["mlp_bias is true"]);
    check(
        json!({"partial_rotary_factor": 0.5}),
        &["partial_rotary_factor is 0.5"],
    );
    check(
        json!({"tie_word_embeddings": "yes"}),
        &["tie_word_embeddings", "true or false"],
    );
    check(
        json!({"layer_types": ["sliding_attention"]}),
        &["layer_types", "full_attention"],
    );
    check(json!({"layer_types": 3}), &["layer_types is 3", "a list"]);
    let qwen = json!({"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": true,
        "sliding_window": 8, "max_window_layers": 1});
    check(qwen, &["use_sliding_window is true"]);
}

#[test]
fn scaling_that_is_not_known_is_refused_by_key() {
    let check = |changes: Json, expected: &[&str]| refused(metadata_of(&with(changes)), expected);
    let rope = |rope: Json, expected: &[&str]| check(json!({"rope_parameters": rope}), expected);
    rope(json!([]), &["rope_parameters is []", "an object"]);
    rope(
        json!({"rope_type": "dynamic"}),
        &["rope_parameters.rope_type is \"dynamic\"", "yarn"],
    );
    rope(json!({"rope_type": 1}), &["rope_parameters.rope_type is 1"]);
    rope(
        json!({"rope_type": "linear"}),
        &["rope_parameters.factor is missing"],
    );
    rope(
        json!({"rope_type": "linear", "factor": 0.5}),
        &["factor is 0.5", "at least 1"],
    );
    rope(
        json!({"rope_type": "linear", "factor": "4"}),
        &["factor is \"4\""],
    );
    rope(
        json!({"rope_type": "llama3", "factor": 8}),
        &["low_freq_factor is missing"],
    );
    rope(
        json!({"rope_type": "yarn", "factor": 4, "truncate": false}),
        &["truncate is false"],
    );
    rope(
        json!({"full_attention": {"rope_type": "default"}}),
        &["full_attention", "alike"],
    );
}

#[test]
fn files_that_are_missing_or_no_json_are_refused_by_name() {
    refused(
        metadata_of(&json!([1])),
        &["config.json is [1], not an object"],
    );
    let tokenizer = tokenizer().to_string();
    let read = |files: &[(&'static str, &str)]| {
        let read = Checkpoint::read(&texts(files));
        read.map(|_| ()).map_err(|error| error.to_string())
    };
    refused(read(&[(TOKENIZER, &tokenizer)]), &["no config.json"]);
    refused(
        read(&[(CONFIG, "{"), (TOKENIZER, &tokenizer)]),
        &["config.json is not JSON", "line 1"],
    );
    let deep = "[".repeat(100_000);
    refused(
        read(&[(CONFIG, &deep), (TOKENIZER, &tokenizer)]),
        &["config.json", "recursion"],
    );
    refused(
        read(&[(CONFIG, &config().to_string())]),
        &["no tokenizer.json", "tokenizer.model"],
    );
}

#[test]
fn a_text_is_bounded_and_utf8() {
    let read = |bytes: &'static [u8], most_more: usize| {
        Texts::read(|name, most| {
            let longer = vec![b' '; most as usize + 1];
            let bytes = if most_more > 0 {
                longer
            } else {
                bytes.to_vec()
            };
            Ok::<_, ()>((name == CONFIG).then_some(bytes))
        })
    };
    let said = |read: Result<Texts, TextsError<()>>| match read {
        Err(TextsError::Text(error)) => Err(error.to_string()),
        other => Ok(format!("{other:?}")),
    };
    refused(
        said(read(b"\xff", 0)),
        &["config.json is not UTF-8 at byte 0"],
    );
    refused(said(read(b"", 1)), &["config.json has 4194305 bytes"]);
}
