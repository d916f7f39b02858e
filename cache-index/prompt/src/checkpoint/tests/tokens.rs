//! Catches: a tokenizer that is read as another, and special tokens that are lost.

use super::*;

#[test]
fn special_tokens_and_templates() {
    let settings = json!({
        "bos_token": {"content": "<s>"}, "eos_token": "<tool>", "chat_template": [
            {"name": "rag", "template": "r"}, {"name": "default", "template": "d"}],
    })
    .to_string();
    let generation = json!({"eos_token_id": [3, 1]}).to_string();
    let more = [
        (TOKENIZER_CONFIG, settings.as_str()),
        (GENERATION_CONFIG, generation.as_str()),
        (CONFIG, "{\"eos_token_id\": 0}"),
    ];
    let metadata = tokens_of(&tokenizer(), &more).unwrap();
    let number = |key: &str| metadata[&format!("tokenizer.ggml.{key}")].as_u64();
    assert_eq!(
        (number("bos_token_id"), number("eos_token_id")),
        (Some(2), Some(3))
    );
    let ends = Value::Array(vec![Value::U64(1), Value::U64(3)]);
    assert_eq!(metadata["tokenizer.ggml.eos_token_ids"], ends);
    assert_eq!(metadata["tokenizer.ggml.add_bos_token"], Value::Bool(true));
    assert_eq!(metadata["tokenizer.ggml.pre"].as_str(), Some("gpt-2"));
    assert_eq!(metadata["tokenizer.chat_template"].as_str(), Some("d"));
    let kinds = [1, 1, 3, 4].map(Value::I64).to_vec();
    assert_eq!(metadata["tokenizer.ggml.token_type"], Value::Array(kinds));
    let own = [&more[..], &[(CHAT_TEMPLATE, "own")]].concat();
    let metadata = tokens_of(&tokenizer(), &own).unwrap();
    assert_eq!(metadata["tokenizer.chat_template"].as_str(), Some("own"));
    let metadata = tokens_of(&tokenizer(), &[(CONFIG, "{\"eos_token_id\": 0}")]).unwrap();
    assert_eq!(metadata["tokenizer.ggml.eos_token_id"].as_u64(), Some(0));
}

#[test]
fn sentencepiece_has_scores_in_the_order_of_merges() {
    let pieces = json!({
        "added_tokens": [{"id": 0, "content": "<unk>", "special": true}],
        "normalizer": {"type": "Sequence", "normalizers": [
            {"type": "Prepend", "prepend": "▁"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]},
        "model": {"type": "BPE", "byte_fallback": true, "unk_token": "<unk>",
            "vocab": {"<unk>": 0, "<0x0A>": 1, "▁": 2, "a": 3, "b": 4, "ab": 5, "▁ab": 6},
            "merges": [["a", "b"], ["▁", "ab"]]},
    });
    let metadata = tokens_of(&pieces, &[]).unwrap();
    let get = |key: &str| &metadata[&format!("tokenizer.ggml.{key}")];
    assert_eq!(get("model").as_str(), Some("llama"));
    assert_eq!(get("add_space_prefix"), &Value::Bool(true));
    let scores = [-2.0, -2.0, -2.0, -2.0, -2.0, -0.0, -1.0].map(Value::F64);
    assert_eq!(get("scores"), &Value::Array(scores.to_vec()));
    let kinds = [2, 6, 1, 1, 1, 1, 1].map(Value::I64);
    assert_eq!(get("token_type"), &Value::Array(kinds.to_vec()));
}

#[test]
fn a_tokenizer_that_is_not_known_is_refused_by_its_rules() {
    let check = |changes: Json, expected: &[&str]| {
        refused(tokens_of(&merged(tokenizer(), changes), &[]), expected);
    };
    let model = |changes: Json| {
        let model = merged(tokenizer()["model"].clone(), changes);
        json!({"model": model})
    };
    check(
        json!({"model": null}),
        &["tokenizer.json", "missing field `model`"],
    );
    check(
        model(json!({"type": "WordPiece"})),
        &["model.type is WordPiece", "BPE"],
    );
    check(
        model(json!({"type": "Unigram", "vocab": [["a", -1.5]]})),
        &["model.type is Unigram"],
    );
    check(model(json!({"vocab": "a"})), &["a vocabulary of up to"]);
    check(model(json!({"vocab": {"a": -1}})), &["invalid value"]);
    check(
        model(json!({"vocab": {"a": 4_000_000_000u64}})),
        &["token id 4000000000", "at most"],
    );
    check(model(json!({"vocab": {"a": u64::MAX}})), &["at most"]);
    check(
        model(json!({"vocab": {"a": 0, "b": 0}})),
        &["two tokens of the id 0"],
    );
    check(
        model(json!({"vocab": {"<s>": 0}})),
        &["\"<s>\" twice, as 0 and 2"],
    );
    check(model(json!({"merges": ["ab"]})), &["two tokens"]);
    check(model(json!({"merges": [["a", "b", "c"]]})), &["two tokens"]);
    check(model(json!({"merges": 1})), &["a list of up to"]);
    check(
        model(json!({"ignore_merges": true})),
        &["model.ignore_merges is true"],
    );
    check(
        model(json!({"end_of_word_suffix": "</w>"})),
        &["</w>", "empty"],
    );
    check(
        model(json!({"byte_fallback": true})),
        &["normalizer with pre_tokenizer", "Metaspace"],
    );
}

#[test]
fn rules_around_merging_that_are_not_known_are_refused() {
    let check = |changes: Json, expected: &[&str]| {
        refused(tokens_of(&merged(tokenizer(), changes), &[]), expected);
    };
    check(
        json!({"normalizer": {"type": "NFC"}}),
        &["normalizer", "NFC", "must be null"],
    );
    check(
        json!({"normalizer": {"type": "Lowercase"}}),
        &["Lowercase", "null or NFC"],
    );
    check(
        json!({"pre_tokenizer": null}),
        &["pre_tokenizer is null", "ByteLevel"],
    );
    check(
        json!({"pre_tokenizer": {"type": "ByteLevel"}}),
        &["pre_tokenizer", "without a prefix space"],
    );
    let split = json!({"type": "Sequence", "pretokenizers": [
        {"type": "Split", "pattern": {"Regex": "\\w+"}, "behavior": "Isolated", "invert": false},
        {"type": "ByteLevel", "add_prefix_space": false, "use_regex": false}]});
    check(json!({"pre_tokenizer": split}), &["\\\\w+", "llama-bpe"]);
    let strips = json!([{"id": 2, "content": "<s>", "special": true, "rstrip": true}]);
    let stripped = merged(tokenizer(), json!({"added_tokens": strips}));
    assert!(tokens_of(&stripped, &[(CHAT_TEMPLATE, "plain")]).is_ok());
    refused(
        tokens_of(&stripped, &[(CHAT_TEMPLATE, "a<s>")]),
        &["<s>", "rstrip"],
    );
}

#[test]
fn names_of_special_tokens_are_checked() {
    let settings = |text: &str, expected: &[&str]| {
        refused(
            tokens_of(&tokenizer(), &[(TOKENIZER_CONFIG, text)]),
            expected,
        );
    };
    settings(
        "{\"eos_token\": \"</s>\"}",
        &["eos_token is \"</s>\"", "a token of"],
    );
    settings("{\"eos_token\": 1}", &["eos_token is 1", "content"]);
    settings("{\"chat_template\": 1}", &["chat_template is 1"]);
    settings("{\"add_bos_token\": 1}", &["add_bos_token is 1"]);
    let ends = [(GENERATION_CONFIG, "{\"eos_token_id\": \"2\"}")];
    refused(
        tokens_of(&tokenizer(), &ends),
        &["generation_config.json: eos_token_id"],
    );
}

#[test]
fn patterns_have_the_names_that_gguf_has() {
    let of = |pattern: Json, nfc: bool, ignore_merges: bool| {
        let mut changed = tokenizer();
        changed["pre_tokenizer"] = pattern;
        changed["model"]["ignore_merges"] = ignore_merges.into();
        if nfc {
            changed["normalizer"] = json!({"type": "NFC"});
        }
        let pre = tokens_of(&changed, &[]).unwrap()["tokenizer.ggml.pre"].clone();
        pre.as_str().unwrap().to_owned()
    };
    let byte_level = |use_regex: bool| json!({"type": "ByteLevel", "add_prefix_space": false, "use_regex": use_regex});
    let after = |step: Json, use_regex| json!({"type": "Sequence", "pretokenizers": [step, byte_level(use_regex)]});
    let split = |regex: &str| json!({"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": false});
    let digits = json!({"type": "Digits", "individual_digits": true});
    assert_eq!(of(byte_level(true), false, false), "gpt-2");
    assert_eq!(of(after(digits, true), false, false), "smollm");
    let three = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
    assert_eq!(of(after(split(three), false), false, true), "llama-bpe");
    let one = three.replace("{1,3}", "");
    assert_eq!(of(after(split(&one), false), true, false), "qwen2");
}
