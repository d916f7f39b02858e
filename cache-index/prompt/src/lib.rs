//! What tokens does this request become? One answer, used by gateway and engine alike.
//!
//! The way of a prompt, module by module: `gguf` reads the model file's header, and `checkpoint` makes one
//! of a model folder in Hugging Face's layout; from its metadata come `tokenizer` and `template`. A chat request goes through `build`: `messages` checks and
//! normalises it, `template` renders it (with `clock` and `json` for what templates call), `marks`
//! tells the template's control tokens from users' text, and `segments` remembers what text became
//! which tokens; `append` finds templates that only append, of whose prompts `growing` makes only
//! the new part; `answers` remembers which tokens the model itself produced. `tools` and `calls` check tools, calls and results, and `hermes` shows them to models
//! whose templates do not know them. Pure: bytes and values in, values out; the
//! clock is an argument.
//!
//! Left out on purpose: reading files (callers map them), SentencePiece vocabularies and
//! pre-tokenizers not compared with their reference (refused by name), images and audio in
//! messages (refused by the name of the part).

pub mod checkpoint;
pub mod gguf;

mod answers;
mod append;
mod build;
mod calls;
mod clock;
mod counts;
mod error;
mod growing;
mod hermes;
mod json;
mod marks;
mod messages;
mod segments;
mod template;
mod tokenizer;
mod tools;

pub use answers::Answered;
pub use build::{ChatInput, ChatTokens, PromptBuilder};
pub use counts::SegmentCounts;
pub use error::{LoadError, PromptError};
pub use growing::Begun;
pub use segments::SegmentCache;
pub use tokenizer::Tokenizer;
