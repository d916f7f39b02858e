//! What does the folder say about tokens? `tokenizer.json`, the names of special tokens in
//! `tokenizer_config.json`, what ends a generation, and the chat template, under GGUF's keys.

use hashbrown::{HashMap, HashSet};
use serde_json::{Map, Value as Json};

use super::json::{self, Object};
use super::split::{Rules, first_special};
use super::vocabulary::{Added, TokenizerFile};
use super::{
    CHAT_TEMPLATE, CONFIG, CheckpointError, GENERATION_CONFIG, Metadata, TOKENIZER,
    TOKENIZER_CONFIG, Texts,
};
use crate::gguf::Value;

/// llama.cpp's numbers for what a token is.
const NORMAL: i64 = 1;
const UNKNOWN: i64 = 2;
const CONTROL: i64 = 3;
const USER_DEFINED: i64 = 4;
const UNUSED: i64 = 5;
const BYTE: i64 = 6;

/// Name in tokenizer_config.json, key in GGUF, name of its id in other files.
const SPECIALS: [(&str, &str, &str); 4] = [
    ("bos_token", "tokenizer.ggml.bos_token_id", "bos_token_id"),
    ("eos_token", "tokenizer.ggml.eos_token_id", "eos_token_id"),
    (
        "unk_token",
        "tokenizer.ggml.unknown_token_id",
        "unk_token_id",
    ),
    (
        "pad_token",
        "tokenizer.ggml.padding_token_id",
        "pad_token_id",
    ),
];

pub(super) fn metadata(texts: &Texts) -> Result<Metadata, CheckpointError> {
    let file = TokenizerFile::parse(texts.demand(TOKENIZER)?)?;
    let parts = file.parts()?;
    let rules = Rules::of(&file, &parts)?;
    let parse = |name: &'static str| {
        texts
            .get(name)
            .map_or(Ok(Map::new()), |t| json::parse(name, t))
    };
    let (config, generation, settings) = (
        parse(CONFIG)?,
        parse(GENERATION_CONFIG)?,
        parse(TOKENIZER_CONFIG)?,
    );
    let settings = Object::new(TOKENIZER_CONFIG, &settings);
    let files = [
        Object::new(GENERATION_CONFIG, &generation),
        Object::new(CONFIG, &config),
    ];
    let vocabulary = file.texts()?;
    let mut metadata = vocabulary_metadata(&file, &vocabulary, rules);
    let ids = ids(&vocabulary);
    special_ids(settings, &ids, &files, &mut metadata)?;
    let adds_bos = match settings.bool("add_bos_token")? {
        Some(adds_bos) => adds_bos,
        None => first_special(&parts.post_processor).is_some(),
    };
    metadata.insert("tokenizer.ggml.add_bos_token".into(), Value::Bool(adds_bos));
    if let Some(template) = chat_template(texts, settings)? {
        check_stripped(&file.added_tokens, template)?;
        metadata.insert(
            "tokenizer.chat_template".into(),
            Value::Str(template.into()),
        );
    }
    Ok(metadata)
}

fn ids<'a>(vocabulary: &[Option<&'a str>]) -> HashMap<&'a str, u64> {
    let named = vocabulary.iter().enumerate();
    named
        .filter_map(|(id, text)| Some(((*text)?, id as u64)))
        .collect()
}

fn vocabulary_metadata(
    file: &TokenizerFile,
    vocabulary: &[Option<&str>],
    rules: Rules,
) -> Metadata {
    let added: HashMap<u64, &Added> = file.added_tokens.iter().map(|a| (a.id, a)).collect();
    let mut tokens = Vec::with_capacity(vocabulary.len());
    let mut kinds = Vec::with_capacity(vocabulary.len());
    for (id, text) in vocabulary.iter().enumerate() {
        let kind = match (text, added.get(&(id as u64))) {
            (None, _) => UNUSED,
            (Some(text), _) if file.model.unk_token.as_deref() == Some(text) => UNKNOWN,
            (Some(_), Some(added)) if is_control(added) => CONTROL,
            (Some(_), Some(_)) => USER_DEFINED,
            (Some(text), None) if matches!(rules, Rules::Pieces { .. }) && is_byte(text) => BYTE,
            (Some(_), None) => NORMAL,
        };
        // As converters to GGUF fill gaps.
        let text = text.map_or_else(|| format!("[PAD{id}]"), str::to_owned);
        tokens.push(Value::Str(text));
        kinds.push(Value::I64(kind));
    }
    let mut metadata = Metadata::new();
    let mut put = |key: &str, value| metadata.insert(format!("tokenizer.ggml.{key}"), value);
    put("tokens", Value::Array(tokens));
    put("token_type", Value::Array(kinds));
    let merges = &file.model.merges.0;
    match rules {
        Rules::ByteLevel(pre) => {
            let merges = merges.iter().map(|(left, right)| format!("{left} {right}"));
            put("model", Value::Str("gpt2".into()));
            put("pre", Value::Str(pre.into()));
            put("merges", Value::Array(merges.map(Value::Str).collect()));
        }
        Rules::Pieces { prefix } => {
            put("model", Value::Str("llama".into()));
            put("pre", Value::Str("default".into()));
            put("add_space_prefix", Value::Bool(prefix));
            put("scores", Value::Array(scores(vocabulary, merges)));
        }
    }
    metadata
}

/// A control token by its mark, or by its look: converters to GGUF do the same, so that users cannot
/// write those that Qwen's files do not mark.
fn is_control(added: &Added) -> bool {
    let between =
        |open: &str, close: &str| added.content.starts_with(open) && added.content.ends_with(close);
    added.special || between("<|", "|>") || between("<｜", "｜>")
}

fn is_byte(text: &str) -> bool {
    let digits = text
        .strip_prefix("<0x")
        .and_then(|rest| rest.strip_suffix('>'));
    digits.is_some_and(|digits| digits.len() == 2 && u8::from_str_radix(digits, 16).is_ok())
}

/// SentencePiece joins the pair whose result has the best score; the list of merges is made from these by
/// going through results from the best on. So a result's score is its place among results, negative.
fn scores(vocabulary: &[Option<&str>], merges: &[(String, String)]) -> Vec<Value> {
    let mut places: HashMap<String, usize> = HashMap::with_capacity(merges.len());
    for (left, right) in merges {
        let next = places.len();
        places.entry(format!("{left}{right}")).or_insert(next);
    }
    let last = places.len();
    let place = |text: &Option<&str>| text.and_then(|text| places.get(text).copied());
    let score = |text| Value::F64(-(place(text).unwrap_or(last) as f64));
    vocabulary.iter().map(score).collect()
}

/// The special tokens' ids, and all that end a generation.
fn special_ids(
    settings: Object<'_>,
    ids: &HashMap<&str, u64>,
    files: &[Object<'_>; 2],
    metadata: &mut Metadata,
) -> Result<(), CheckpointError> {
    for (name, key, id_name) in SPECIALS {
        let id = match token_text(settings, name)? {
            Some(text) => {
                let missing = || settings.wrong(name, format!("a token of {TOKENIZER}"));
                Some(*ids.get(text).ok_or_else(missing)?)
            }
            None => {
                let mut named = Vec::new();
                for file in files {
                    named.extend(file.ids(id_name)?);
                }
                named.first().copied()
            }
        };
        if let Some(id) = id {
            metadata.insert(key.to_owned(), Value::U64(id));
        }
    }
    let mut ends = HashSet::new();
    for file in files {
        let named = file.ids("eos_token_id")?;
        ends.extend(named.iter().copied());
        // The first file that names any decides, as in the reference.
        if !named.is_empty() {
            break;
        }
    }
    let mut ends: Vec<u64> = ends.into_iter().collect();
    ends.sort_unstable();
    let ends = ends.into_iter().map(Value::U64).collect();
    metadata.insert("tokenizer.ggml.eos_token_ids".into(), Value::Array(ends));
    Ok(())
}

/// A special token's text: a string, or an object around one.
fn token_text<'a>(settings: Object<'a>, name: &str) -> Result<Option<&'a str>, CheckpointError> {
    let text = match settings.get(name) {
        None => return Ok(None),
        Some(Json::Object(token)) => token.get("content").and_then(Json::as_str),
        Some(token) => token.as_str(),
    };
    let wrong = || settings.wrong(name, "a string, or an object with `content`");
    text.map(Some).ok_or_else(wrong)
}

/// The template in its own file goes before that in tokenizer_config.json; among named ones, `default`.
fn chat_template<'a>(
    texts: &'a Texts,
    settings: Object<'a>,
) -> Result<Option<&'a str>, CheckpointError> {
    if let Some(template) = texts.get(CHAT_TEMPLATE) {
        return Ok(Some(template));
    }
    let wrong = || settings.wrong("chat_template", "a string, or a list of named templates");
    match settings.get("chat_template") {
        None => Ok(None),
        Some(Json::String(template)) => Ok(Some(template)),
        Some(Json::Array(named)) => {
            let default = named.iter().find(|entry| entry["name"] == "default");
            match default {
                None => Ok(None),
                Some(entry) => entry["template"].as_str().map(Some).ok_or_else(wrong),
            }
        }
        Some(_) => Err(wrong()),
    }
}

/// Refuses tokens that take white space around them along, if the template writes them: what follows
/// would be other tokens than the model was trained on.
fn check_stripped(added: &[Added], template: &str) -> Result<(), CheckpointError> {
    let strips = |added: &&Added| added.lstrip || added.rstrip || added.single_word;
    let mut written = added.iter().filter(strips);
    match written.find(|added| !added.content.is_empty() && template.contains(&added.content)) {
        None => Ok(()),
        Some(added) => Err(CheckpointError::value(
            TOKENIZER,
            format!("added_tokens, {:?}", added.content),
            "one with lstrip, rstrip or single_word",
            "without, since the chat template writes it",
        )),
    }
}
