//! How much may one grammar cost?
//!
//! A client's schema is a program that the engine runs. Everything here keeps a compile below a
//! second, a step below a few milliseconds and a grammar's memory below some tens of megabytes,
//! whatever the schema. What passes a limit is refused with its name.

use llguidance::api::ParserLimits;

/// Bytes of a specification as JSON or text. The largest real tool lists are about a tenth of it.
pub(crate) const SPEC_BYTES_MAX: usize = 512 * 1024;
/// How deep a schema's JSON may nest: what readers of JSON take.
pub(crate) const JSON_DEPTH_MAX: usize = 127;
/// How deep a schema may nest, which bounds the compiler's recursion.
pub(crate) const SCHEMA_DEPTH_MAX: usize = 48;
/// Subschemas of one specification.
pub(crate) const SUBSCHEMAS_MAX: usize = 10_000;
/// Properties of one object. Each optional one is a choice that the lexer has to keep apart.
pub(crate) const PROPERTIES_MAX: usize = 512;
/// Values of one `enum`, and texts of one choice.
pub(crate) const ENUM_MAX: usize = 4096;
/// `minItems`, `minProperties` and the like: what an answer has to hold at least.
pub(crate) const ITEMS_MIN_MAX: u64 = 1024;
/// `minLength`: what a string has to hold at least.
pub(crate) const LENGTH_MIN_MAX: u64 = 4096;
/// `maxLength`: counted by states of the lexer, one per character.
pub(crate) const LENGTH_MAX_MAX: u64 = 100_000;
/// Bytes of one regular expression.
pub(crate) const REGEX_BYTES_MAX: usize = 8 * 1024;
/// Characters of all patterns of a specification, with their repetitions written out. So many take
/// about half a second on an idle core.
pub(crate) const PATTERNS_MAX: u64 = 250_000;
/// Tools that may be offered at once: OpenAI's limit, and each takes one of 255 lexeme classes.
pub(crate) const TOOLS_MAX: usize = 128;
/// Calls in one answer where the client set no bound.
pub(crate) const CALLS_MAX: usize = 16;
/// Lexer states of one grammar, about 1 kB each.
pub(crate) const LEXER_STATES_MAX: usize = 50_000;
/// Compiled grammars that are kept, and their bytes.
pub(crate) const CACHE_GRAMMARS_MAX: usize = 64;
pub(crate) const CACHE_BYTES_MAX: usize = 256 * 1024 * 1024;

/// The grammar library's limits. Its own defaults are right but for memory, and its long errors,
/// which print the whole grammar.
pub(crate) fn parser() -> ParserLimits {
    ParserLimits {
        max_lexer_states: LEXER_STATES_MAX,
        verbose_errors: false,
        max_grammar_size: 200_000,
        ..ParserLimits::default()
    }
}
