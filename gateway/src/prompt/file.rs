//! What does a model's file or folder say of its prompts? Read as far as that goes: the weights may be
//! larger than memory.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use ::prompt::checkpoint::{Texts, TextsError, prompt_header};
use ::prompt::gguf::Header;

/// No header is longer than this; what fails up to here is no model file.
const HEADER_BYTES_MAX: u64 = 1 << 30;

/// The metadata of a GGUF file, or of a folder in Hugging Face's layout.
pub(super) fn read_header(path: &Path) -> Result<Header, String> {
    if path.is_dir() {
        return read_folder(path);
    }
    /// Vocabularies of 128,000 tokens with their merges take about 8 MB.
    const FIRST_READ_BYTES: u64 = 16 << 20;
    let file = File::open(path).map_err(|error| error.to_string())?;
    let length = file.metadata().map_err(|error| error.to_string())?.len();
    let mut prefix = Vec::new();
    let mut most = FIRST_READ_BYTES;
    loop {
        let more = most.saturating_sub(prefix.len() as u64);
        (&file)
            .take(more)
            .read_to_end(&mut prefix)
            .map_err(|error| error.to_string())?;
        match Header::parse_prefix(&prefix, length) {
            Ok(header) => return Ok(header),
            Err(error) if prefix.len() as u64 >= length.min(HEADER_BYTES_MAX) => {
                return Err(error.to_string());
            }
            Err(_) => most = most.saturating_mul(4),
        }
    }
}

fn read_folder(folder: &Path) -> Result<Header, String> {
    let read = |name: &'static str, bytes_max: u64| -> Result<Option<Vec<u8>>, String> {
        let failed = |error: io::Error| format!("{name}: {error}");
        let file = match File::open(folder.join(name)) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(failed(error)),
        };
        let mut bytes = Vec::new();
        // One more than is allowed, so that a longer file is noticed.
        let read = file.take(bytes_max + 1).read_to_end(&mut bytes);
        read.map_err(failed)?;
        Ok(Some(bytes))
    };
    let texts = Texts::read(read).map_err(|error| match error {
        TextsError::Read(why) => why,
        TextsError::Text(error) => error.to_string(),
    })?;
    prompt_header(&texts).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    //! Catches a folder whose prompts have other tokens than the GGUF file's of the same model.
    use ::prompt::gguf::Value;
    use ::prompt::{PromptBuilder, SegmentCache};
    use serde_json::{Map, json};

    use super::*;

    #[test]
    fn a_folder_makes_the_prompts_of_its_gguf_file() {
        let gguf = concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/../models/SmolLM2-135M-Instruct.Q4_1.gguf"
        );
        let header = read_header(Path::new(gguf)).expect("the default model: run `make setup`");
        let strings = |key: &str| {
            let values = header.get(key).and_then(Value::as_array).unwrap().iter();
            values
                .map(|value| value.as_str().unwrap().to_owned())
                .collect::<Vec<_>>()
        };
        let tokens = strings("tokenizer.ggml.tokens");
        // The first 17 are control tokens.
        let added = tokens.iter().take(17).enumerate();
        let added = added.map(|(id, text)| json!({"id": id, "content": text, "special": true}));
        let byte_level = json!({"type": "ByteLevel", "add_prefix_space": false, "use_regex": true});
        let ids = tokens.iter().enumerate();
        let tokenizer = json!({
            "added_tokens": added.collect::<Vec<_>>(),
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
                {"type": "Digits", "individual_digits": true}, byte_level]},
            "model": {
                "type": "BPE", "merges": strings("tokenizer.ggml.merges"),
                "vocab": ids.map(|(id, text)| (text.clone(), id.into())).collect::<Map<_, _>>(),
            },
        });
        let template = header
            .get("tokenizer.chat_template")
            .and_then(Value::as_str);
        let folder = tempfile::tempdir().unwrap();
        let write =
            |name: &str, text: &str| std::fs::write(folder.path().join(name), text).unwrap();
        assert!(
            read_header(folder.path())
                .unwrap_err()
                .contains("tokenizer.json")
        );
        write("tokenizer.json", &tokenizer.to_string());
        write("chat_template.jinja", template.unwrap());
        write("tokenizer_config.json", "{\"eos_token\": \"<|im_end|>\"}");
        let of = |header: &Header| PromptBuilder::from_gguf(header).unwrap();
        let (found, expected) = (of(&read_header(folder.path()).unwrap()), of(&header));
        let text = "Hello, 12345 wörld!\n\n x<|im_end|>";
        let known = SegmentCache::new(0);
        assert_eq!(
            found.completion(text, &known),
            expected.completion(text, &known)
        );
        let messages = [json!({"role": "user", "content": text})];
        let input = ::prompt::ChatInput {
            messages: &messages,
            tools: None,
            template_kwargs: None,
            unix_seconds: 0,
        };
        assert_eq!(
            found.chat(&input, &known).unwrap(),
            expected.chat(&input, &known).unwrap()
        );
    }
}
