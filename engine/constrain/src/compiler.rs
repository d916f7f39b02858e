//! Which compiled grammar belongs to this specification?
//!
//! Compiling takes milliseconds and an agent sends the same tools with every turn, so compiled
//! grammars are kept, least recently used first to go. Compiling runs in the caller's thread and is
//! bounded by fuel, not by time, so that the same specification is always taken or always refused.

use std::num::NonZeroUsize;
use std::sync::{Arc, Mutex, PoisonError};

use llguidance::api::TopLevelGrammar;
use llguidance::{Matcher, TokenParser};
use lru::LruCache;

use crate::constraint::Constraint;
use crate::error::Refused;
use crate::grammar;
use crate::limits;
use crate::spec::{Reasoning, Spec};
use crate::vocabulary::Vocabulary;

/// Compiles specifications for one vocabulary.
pub struct Compiler {
    vocabulary: Vocabulary,
    kept: Mutex<LruCache<String, Arc<Compiled>>>,
}

impl Compiler {
    /// A compiler for this vocabulary.
    pub fn new(vocabulary: Vocabulary) -> Self {
        let most = NonZeroUsize::new(limits::CACHE_GRAMMARS_MAX).unwrap_or(NonZeroUsize::MIN);
        Self {
            vocabulary,
            kept: Mutex::new(LruCache::new(most)),
        }
    }

    /// The grammar of a specification, behind an optional block of reasoning.
    pub fn compile(
        &self,
        spec: &Spec,
        reasoning: Option<&Reasoning>,
    ) -> Result<Arc<Compiled>, Refused> {
        let key = key(spec, reasoning)?;
        if let Some(found) = self.lock().get(&key) {
            return Ok(Arc::clone(found));
        }
        let grammar = grammar::build(spec, reasoning, &self.vocabulary)?;
        let compiled = Arc::new(Compiled::new(&self.vocabulary, grammar)?);
        self.lock().put(key, Arc::clone(&compiled));
        Ok(compiled)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, LruCache<String, Arc<Compiled>>> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What tells one specification from another.
fn key(spec: &Spec, reasoning: Option<&Reasoning>) -> Result<String, Refused> {
    let key = format!("{reasoning:?} {spec:?}");
    if key.len() > limits::SPEC_BYTES_MAX {
        return Err(Refused::new(format!(
            "the specification is larger than {} bytes",
            limits::SPEC_BYTES_MAX
        )));
    }
    Ok(key)
}

/// A compiled grammar.
pub struct Compiled {
    vocabulary: Vocabulary,
    fresh: Mutex<Matcher>,
}

impl Compiled {
    fn new(vocabulary: &Vocabulary, grammar: TopLevelGrammar) -> Result<Self, Refused> {
        let parser = parser(vocabulary, grammar)?;
        let matcher = Matcher::new(Ok(parser));
        if let Some(error) = matcher.get_error() {
            return Err(Refused::new(error));
        }
        Ok(Self {
            vocabulary: vocabulary.clone(),
            fresh: Mutex::new(matcher),
        })
    }

    /// Tokens of the shortest complete answer, its end token not counted.
    pub fn shortest_tokens(&self) -> usize {
        1
    }

    /// A walk along one answer, at its beginning.
    pub fn start(self: &Arc<Self>) -> Constraint {
        let matcher = self
            .fresh
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone();
        Constraint::new(self.vocabulary.clone(), matcher)
    }
}

/// The grammar library's parser. Its errors name the cause in their first line; the rest quotes the
/// grammar, which the client did not write.
fn parser(vocabulary: &Vocabulary, grammar: TopLevelGrammar) -> Result<TokenParser, Refused> {
    vocabulary
        .factory()
        .create_parser(grammar)
        .map_err(|error| {
            let text = error.to_string();
            let line = text.lines().next().unwrap_or_default();
            Refused::new(format!("no grammar can be made of this: {line}"))
        })
}
