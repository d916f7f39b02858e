//! A small vocabulary.

use std::sync::Arc;

use constrain::{Compiler, TokenText, Vocabulary};

/// The token that ends answers.
pub(crate) const EOS: u32 = 0;

/// Texts that are tokens beside the single bytes. Some cross lexemes and open or close several
/// levels at once, which is what makes a budget hard to keep.
const WORDS: &[&str] = &[
    "{\"",
    "{}",
    "[]",
    "[[",
    "[[[[",
    "{\"a",
    "\": \"",
    "\": ",
    "\", \"",
    "\"}",
    "\"}}",
    "}}",
    "}]",
    "]}",
    "\"]",
    "], ",
    ", ",
    "}, {\"",
    "\": [",
    "\": {\"",
    "[{\"",
    "[\"",
    "\"\"",
    "\", ",
    "null",
    "true",
    "false",
    "null}",
    "0}",
    "1, ",
    "kind",
    "value",
    "first",
    "second",
    "label",
    "child",
    "children",
    "next",
    "path",
    "title",
    "owner",
    "query",
    "limit",
    "the",
    " of",
    " a",
    "hello",
    "2024",
    "-01",
    "00",
    "aaaa",
    "abc",
    "zz",
    " \"",
    "é",
    "ä",
    "x\": ",
    "x\": {\"",
    "\\n",
    "\\\"",
    "name",
    "arguments",
    "<tool",
    "\n{",
    "\n",
    "}\n",
    "tags",
    "tags\": [\"",
    "next\": null}",
];

/// Markers: control tokens.
pub(crate) const MARKERS: &[&str] = &[
    "<eos>",
    "<tool_call>",
    "</tool_call>",
    "[/THINK]",
    "[THINK]",
];

/// The vocabulary: markers, bytes, words; the tokenizer takes the longest token that fits.
pub(crate) fn vocabulary() -> Vocabulary {
    let mut tokens = Vec::new();
    for marker in MARKERS {
        tokens.push(TokenText {
            bytes: marker.as_bytes().to_vec(),
            control: true,
        });
    }
    for byte in 0..=255 {
        tokens.push(TokenText {
            bytes: vec![byte],
            control: false,
        });
    }
    for word in WORDS {
        tokens.push(TokenText {
            bytes: word.as_bytes().to_vec(),
            control: false,
        });
    }
    let texts: Vec<Vec<u8>> = tokens.iter().map(|token| token.bytes.clone()).collect();
    let tokenize = move |text: &[u8]| {
        let mut out = Vec::new();
        let mut at = 0;
        while at < text.len() {
            let (id, token) = texts
                .iter()
                .enumerate()
                .skip(MARKERS.len())
                .filter(|(_, token)| text[at..].starts_with(token))
                .max_by_key(|(_, token)| token.len())
                .expect("every byte is a token");
            out.push(u32::try_from(id).expect("a small vocabulary"));
            at += token.len();
        }
        out
    };
    Vocabulary::new(tokens, vec![EOS], Arc::new(tokenize)).expect("a vocabulary")
}

/// A compiler for it.
pub(crate) fn compiler() -> Compiler {
    Compiler::new(vocabulary())
}

/// How many tokens there are.
pub(crate) fn size() -> u32 {
    u32::try_from(MARKERS.len() + 256 + WORDS.len()).expect("small")
}

/// Whether a token opens an object, an array or another item.
pub(crate) fn opens(token: u32) -> bool {
    token as usize >= MARKERS.len() && text_of(token).iter().any(|byte| b"{[,(".contains(byte))
}

/// The text of tokens, markers by name.
pub(crate) fn text(tokens: &[u32]) -> String {
    let bytes: Vec<u8> = tokens.iter().flat_map(|token| text_of(*token)).collect();
    String::from_utf8(bytes).expect("an answer is UTF-8")
}

fn text_of(token: u32) -> Vec<u8> {
    let at = token as usize;
    if let Some(marker) = MARKERS.get(at) {
        return marker.as_bytes().to_vec();
    }
    match WORDS.get(at.wrapping_sub(MARKERS.len() + 256)) {
        Some(word) => word.as_bytes().to_vec(),
        None => vec![u8::try_from(at - MARKERS.len()).expect("a byte")],
    }
}
