//! What does the model file say about its tokens? The metadata arrays, checked and taken apart:
//! bytes per token, kinds, merges as ids.

use hashbrown::HashMap;

use super::alphabet::Alphabet;
use crate::error::LoadError;
use crate::gguf::{Header, Value};

const TOKENS: &str = "tokenizer.ggml.tokens";
const TOKEN_TYPES: &str = "tokenizer.ggml.token_type";
const MERGES: &str = "tokenizer.ggml.merges";

/// What a token is for, from `tokenizer.ggml.token_type`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// Bytes, reached by merging.
    Normal,
    /// A mark that only the template and the model write; never shown.
    Control,
    /// Text that is one token wherever it stands (`<tool_call>` in Qwen): no control character,
    /// so it is recognised in users' text too, as in the reference.
    UserDefined,
}

/// One token of the vocabulary.
#[derive(Debug)]
pub(super) struct Entry {
    pub(super) kind: Kind,
    /// As in the file: byte-level spelling for normal tokens, plain text for the others.
    pub(super) text: String,
    /// What it adds to a text; empty for control tokens.
    pub(super) bytes: Vec<u8>,
    /// Is `bytes` the byte-level reading of `text`? Only then can merging lead to it.
    pub(super) is_byte_level: bool,
}

/// Tokens and merges.
#[derive(Debug)]
pub(super) struct Vocab {
    pub(super) entries: Vec<Entry>,
    /// Left, right, result; in order of rank.
    pub(super) merges: Vec<(u32, u32, u32)>,
}

impl Vocab {
    pub(super) fn from_gguf(header: &Header) -> Result<Self, LoadError> {
        let entries = entries(header)?;
        let merges = merges(header, &entries)?;
        Ok(Self { entries, merges })
    }

    /// Token of each single byte, where the vocabulary has one.
    pub(super) fn byte_tokens(&self) -> [Option<u32>; 256] {
        let mut tokens = [None; 256];
        for (id, entry) in self.entries.iter().enumerate() {
            if let (Kind::Normal, true, [byte]) =
                (entry.kind, entry.is_byte_level, entry.bytes.as_slice())
            {
                tokens[usize::from(*byte)] = Some(id as u32);
            }
        }
        tokens
    }

    /// A token id from the metadata, checked against the vocabulary.
    pub(super) fn id(&self, header: &Header, key: &str) -> Result<Option<u32>, LoadError> {
        let Some(value) = header.get(key) else {
            return Ok(None);
        };
        self.checked(value, key).map(Some)
    }

    /// Several of these: what checkpoints in Hugging Face's layout end a generation with.
    pub(super) fn ids(&self, header: &Header, key: &str) -> Result<Vec<u32>, LoadError> {
        let ids = header.get(key).and_then(|value| value.as_array());
        let ids = ids.unwrap_or_default().iter();
        ids.map(|value| self.checked(value, key)).collect()
    }

    fn checked(&self, value: &Value, key: &str) -> Result<u32, LoadError> {
        match value.as_u64() {
            Some(id) if id < self.entries.len() as u64 => Ok(id as u32),
            _ => Err(bad(
                key,
                format!("{value:?} is not one of {} tokens", self.entries.len()),
            )),
        }
    }
}

fn entries(header: &Header) -> Result<Vec<Entry>, LoadError> {
    let tokens = array(header, TOKENS)?;
    let types = array(header, TOKEN_TYPES)?;
    if tokens.is_empty() || tokens.len() != types.len() {
        let why = format!("{} tokens but {} types", tokens.len(), types.len());
        return Err(bad(TOKEN_TYPES, why));
    }
    let alphabet = Alphabet::new();
    let mut entries = Vec::with_capacity(tokens.len());
    for (id, (token, kind)) in tokens.iter().zip(types).enumerate() {
        let Some(text) = token.as_str() else {
            return Err(bad(TOKENS, format!("entry {id} is not a string")));
        };
        // llama.cpp's numbers: normal, unknown, control, user-defined, unused, byte.
        let kind = match kind.as_u64() {
            Some(1 | 5 | 6) => Kind::Normal,
            Some(2 | 3) => Kind::Control,
            Some(4) => Kind::UserDefined,
            _ => {
                return Err(bad(
                    TOKEN_TYPES,
                    format!("entry {id} is {kind:?}, not 1 to 6"),
                ));
            }
        };
        entries.push(entry(kind, text, &alphabet));
    }
    Ok(entries)
}

fn entry(kind: Kind, text: &str, alphabet: &Alphabet) -> Entry {
    let byte_level = match kind {
        Kind::Normal => alphabet.decode(text),
        Kind::Control => Some(Vec::new()),
        Kind::UserDefined => None,
    };
    let is_byte_level = byte_level.is_some();
    let bytes = byte_level.unwrap_or_else(|| text.as_bytes().to_vec());
    Entry {
        kind,
        text: text.to_owned(),
        bytes,
        is_byte_level,
    }
}

fn merges(header: &Header, entries: &[Entry]) -> Result<Vec<(u32, u32, u32)>, LoadError> {
    let ids: HashMap<&str, u32> = entries
        .iter()
        .enumerate()
        .map(|(id, entry)| (entry.text.as_str(), id as u32))
        .collect();
    let mut joined = String::new();
    let mut merges = Vec::new();
    for (rank, merge) in array(header, MERGES)?.iter().enumerate() {
        let Some((left, right)) = merge.as_str().and_then(|merge| merge.split_once(' ')) else {
            return Err(bad(
                MERGES,
                format!("entry {rank} is {merge:?}, not two tokens"),
            ));
        };
        joined.clear();
        joined.push_str(left);
        joined.push_str(right);
        let found = (ids.get(left), ids.get(right), ids.get(joined.as_str()));
        let (Some(left_id), Some(right_id), Some(joined_id)) = found else {
            let why = format!("entry {rank} ({left:?} {right:?}) names a token not in {TOKENS}");
            return Err(bad(MERGES, why));
        };
        merges.push((*left_id, *right_id, *joined_id));
    }
    Ok(merges)
}

fn array<'a>(header: &'a Header, key: &str) -> Result<&'a [Value], LoadError> {
    let value = header
        .get(key)
        .ok_or_else(|| bad(key, "is missing".to_owned()))?;
    value
        .as_array()
        .ok_or_else(|| bad(key, "is not an array".to_owned()))
}

pub(super) fn bad(key: &str, why: String) -> LoadError {
    LoadError::Metadata {
        key: key.to_owned(),
        why,
    }
}
