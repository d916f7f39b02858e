//! What can go wrong with a grammar: at load, at the request, while it runs?

use thiserror::Error;

/// A vocabulary that no grammar can work with.
#[derive(Debug, Error, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum BadVocabulary {
    /// There are no tokens.
    #[error("the vocabulary holds no tokens")]
    Empty,
    /// There is no token that ends an answer.
    #[error("the vocabulary names no token that ends an answer")]
    NoEnd,
    /// A token that should end an answer is none of the vocabulary's.
    #[error("token {0} should end answers, but the vocabulary is smaller than that")]
    NoSuchEnd(u32),
    /// There are more tokens than ids.
    #[error("the vocabulary is larger than 2^32 tokens")]
    TooLarge,
    /// A token is longer than any real one.
    #[error("token {0} is longer than 4096 bytes")]
    LongToken(usize),
    /// The grammar library cannot use it.
    #[error("the vocabulary cannot be used for grammars: {0}")]
    Unfit(String),
}

/// A specification that is not taken, in words for the client: what is wrong, and what to do.
#[derive(Debug, Error, Clone, PartialEq, Eq)]
#[error("{message}")]
pub struct Refused {
    /// What is wrong, and what to do about it.
    pub message: String,
    /// Which of the offered tools is at fault, where one is known to be.
    pub tool: Option<usize>,
}

impl Refused {
    pub(crate) fn new(message: impl Into<String>) -> Self {
        Self {
            message: message.into(),
            tool: None,
        }
    }
}

/// A constraint that cannot go on: the request has to end with an error.
#[derive(Debug, Error, Clone, PartialEq, Eq)]
#[error("the answer's grammar cannot go on: {0}")]
pub struct Broken(pub String);
