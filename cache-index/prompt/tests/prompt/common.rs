//! What the tests of this crate share: the default model's header, read once, and the reference
//! tokenizer built from it.

use std::path::PathBuf;
use std::sync::OnceLock;

use prompt::gguf::{Header, Value};
use prompt::{PromptBuilder, SegmentCache};

/// Bytes of a whole model file. Tests may touch files; the crate may not.
#[expect(
    clippy::disallowed_methods,
    reason = "a test reads the model that the crate is given"
)]
pub(crate) fn model_bytes() -> Vec<u8> {
    let path = std::env::var_os("HOMING_MODEL").map_or_else(
        || {
            let root = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..");
            root.join("models/SmolLM2-135M-Instruct.Q4_1.gguf")
        },
        PathBuf::from,
    );
    std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}; run `make setup`", path.display()))
}

/// The default model's header.
pub(crate) fn header() -> &'static Header {
    static HEADER: OnceLock<Header> = OnceLock::new();
    HEADER.get_or_init(|| Header::parse(&model_bytes()).unwrap())
}

/// Tokenizer and template of the default model.
pub(crate) fn builder() -> &'static PromptBuilder {
    static BUILDER: OnceLock<PromptBuilder> = OnceLock::new();
    BUILDER.get_or_init(|| PromptBuilder::from_gguf(header()).unwrap())
}

/// A cache large enough for any test.
pub(crate) fn cache() -> SegmentCache {
    SegmentCache::new(64 << 20)
}

/// The default model with another chat template.
pub(crate) fn with_template(template: &str) -> PromptBuilder {
    let mut header = header().clone();
    header.metadata.insert(
        "tokenizer.chat_template".into(),
        Value::Str(template.into()),
    );
    PromptBuilder::from_gguf(&header).unwrap()
}
