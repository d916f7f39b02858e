//! Which compiled grammar belongs to this specification?
//!
//! Compiling takes milliseconds and an agent sends the same tools with every turn, so compiled
//! grammars are kept, least recently used first to go. Compiling runs in the caller's thread and is
//! bounded by fuel, not by time, so that the same specification is always taken or always refused.

use std::num::NonZeroUsize;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use llguidance::api::TopLevelGrammar;
use llguidance::{Matcher, TokenParser};
use lru::LruCache;

use crate::constraint::Constraint;
use crate::error::Refused;
use crate::finish::{Finisher, Plan};
use crate::grammar::{self, Built};
use crate::lexemes::{Kind, Lexemes};
use crate::limits;
use crate::rules::{NEVER, Rules};
use crate::spec::{Reasoning, Spec};
use crate::vocabulary::Vocabulary;

/// Work of looking at all lexemes of a specification, in the unit of [`Lexemes::spent`]: some 0.3 s.
const COMPILE_WORK_MAX: u64 = 3_000_000;
/// Characters of the grammar library's errors that a client gets to see.
const ERROR_CHARS_MAX: usize = 400;

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
        if spec.is_deeper_than(limits::JSON_DEPTH_MAX) {
            return Err(Refused::new(format!(
                "the schema nests deeper than {} levels of JSON; flatten it or use $ref",
                limits::JSON_DEPTH_MAX
            )));
        }
        let key = key(spec, reasoning)?;
        if let Some(found) = self.lock().get(&key).filter(|found| !found.is_worn()) {
            return Ok(Arc::clone(found));
        }
        let built = grammar::build(spec, reasoning, &self.vocabulary)?;
        let entries = if spec.has_own_rules() {
            self.vocabulary.longest()
        } else {
            self.vocabulary.brackets()
        };
        let compiled = Arc::new(Compiled::new(&self.vocabulary, built, entries)?);
        let mut kept = self.lock();
        kept.put(key, Arc::clone(&compiled));
        let mut bytes: usize = kept.iter().map(|(key, one)| key.len() + one.bytes()).sum();
        while bytes > limits::CACHE_BYTES_MAX {
            let Some((key, one)) = kept.pop_lru() else {
                break;
            };
            bytes = bytes.saturating_sub(key.len() + one.bytes());
        }
        Ok(compiled)
    }

    fn lock(&self) -> MutexGuard<'_, LruCache<String, Arc<Compiled>>> {
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
    plan: Arc<Plan>,
    fresh: Mutex<TokenParser>,
    shortest: usize,
}

impl Compiled {
    fn new(vocabulary: &Vocabulary, built: Built, entries: usize) -> Result<Self, Refused> {
        let parser = parser(vocabulary, built.grammar)?;
        let plan = Arc::new(plan(vocabulary, &parser, entries, built.worst)?);
        let shortest = Finisher::new(Arc::clone(&plan))
            .shortest()
            .map(<[u32]>::to_vec);
        let Some(shortest) = shortest else {
            return Err(Refused::new(
                "no answer satisfies this, or even the shortest one is too long",
            ));
        };
        // The texts of a client's own rules may run into each other: `A: /a+/` never ends before an
        // `a`. Then what looks like an answer is none.
        let mut trial = Matcher::new(Ok(parser.clone()));
        let whole = trial.consume_tokens(&shortest).is_ok()
            && (trial.is_stopped() || trial.is_accepting().unwrap_or(false));
        if !whole {
            return Err(Refused::new(
                "no complete answer could be found: the texts of some rules run into each other",
            ));
        }
        Ok(Self {
            plan,
            fresh: Mutex::new(parser),
            shortest: shortest.len(),
        })
    }

    /// Tokens of the shortest complete answer, its end token not counted. A budget below it cannot
    /// be served.
    pub fn shortest_tokens(&self) -> usize {
        self.shortest
    }

    /// A walk along one answer, at its beginning.
    pub fn start(self: &Arc<Self>) -> Constraint {
        let matcher = Matcher::new(Ok(self.fresh().clone()));
        Constraint::new(Arc::clone(&self.plan), matcher)
    }

    fn fresh(&self) -> MutexGuard<'_, TokenParser> {
        self.fresh.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether its automata have grown so far that new answers had better begin with new ones: an
    /// automaton that reaches its limit breaks every answer that walks it.
    fn is_worn(&self) -> bool {
        let theirs = self.fresh().parser.lexer_stats();
        let worn = theirs.error || theirs.num_states > limits::LEXER_STATES_MAX / 2;
        worn || self.plan.lexemes().states() > limits::LEXER_STATES_MAX / 2
    }

    /// Bytes of memory, roughly: the automaton is there twice, and grows while answers walk it.
    fn bytes(&self) -> usize {
        2 * self.plan.lexemes().bytes() + self.plan.rules.rhs.len() * 64
    }
}

/// What finishing answers needs to know of the grammar.
fn plan(
    vocabulary: &Vocabulary,
    parser: &TokenParser,
    entries: usize,
    worst: Option<u32>,
) -> Result<Plan, Refused> {
    let grammar = parser.parser.grammar();
    let mut rules = Rules::new(grammar);
    let mut lexemes = Lexemes::new(grammar, vocabulary).map_err(Refused::new)?;
    let mut markers = Vec::new();
    rules.weigh(
        |lexeme| {
            if let Kind::Marker(token) = lexemes.kind(lexeme) {
                markers.push(token);
            }
            if lexemes.spent() > COMPILE_WORK_MAX {
                return (NEVER, NEVER);
            }
            let begin = lexemes.begin(&[lexeme]);
            let end = lexemes.end(begin, lexeme, false);
            let cost = end.map_or(NEVER, |end| end.cost());
            let worst = lexemes.worst(lexeme).or(worst).unwrap_or(NEVER);
            (cost, worst.max(cost))
        },
        entries,
    );
    if lexemes.is_exhausted() || lexemes.spent() > COMPILE_WORK_MAX {
        return Err(Refused::new(
            "its regular expressions take too much work; make them simpler or shorter",
        ));
    }
    markers.sort_unstable();
    markers.dedup();
    let opened = rules.symbols.iter().map(|symbol| symbol.depth).max();
    Ok(Plan {
        vocabulary: vocabulary.clone(),
        rules: Arc::new(rules),
        lexemes: Mutex::new(lexemes),
        opened: opened.unwrap_or(NEVER),
        markers,
    })
}

/// The grammar library's parser.
fn parser(vocabulary: &Vocabulary, grammar: TopLevelGrammar) -> Result<TokenParser, Refused> {
    let mut parser = vocabulary
        .factory()
        .create_parser(grammar)
        .map_err(|error| {
            let why = brief(&error.to_string());
            Refused::new(format!("no grammar can be made of this: {why}"))
        })?;
    parser.start_without_prompt();
    Ok(parser)
}

/// An error on one line, without what nobody reads to the end, and what to do about it where that
/// is not plain from it.
fn brief(error: &str) -> String {
    let words: Vec<&str> = error.split_whitespace().collect();
    let line: String = words.join(" ").chars().take(ERROR_CHARS_MAX).collect();
    match line.strip_prefix("Unimplemented keys: ") {
        Some(keys) => format!("these keywords are not supported, leave them out: {keys}"),
        None => line,
    }
}
