//! How much text can a lexeme still need, wherever in it an answer is?
//!
//! Most lexemes have few states, and the worst of them is found by looking. A string of at most
//! 100,000 characters has hundreds of thousands. Their worst is bounded by the expression they were
//! made of: what its parts need at least, and the worst of any one part.

use regex_syntax::Parser;
use regex_syntax::hir::{Hir, HirKind, Look};

/// Bytes that end the text of this expression, from wherever in it, at most. None where that is not
/// known.
pub(crate) fn of_regex(regex: &str) -> Option<u32> {
    let hir = Parser::new().parse(regex).ok()?;
    u32::try_from(worst(&hir)?).ok()
}

/// The same for a JSON string with this text: a character may need an escape, an escape may have
/// begun, and the quote closes it.
pub(crate) fn of_json_string(text: u32) -> u32 {
    text.saturating_mul(2).saturating_add(8)
}

/// How long an expression is with its repetitions written out: about as many states as an automaton
/// needs for it. None where it is no expression; the grammar library says why.
pub(crate) fn written_out(regex: &str) -> Option<u64> {
    let hir = Parser::new().parse(regex).ok()?;
    Some(length(&hir))
}

fn length(hir: &Hir) -> u64 {
    match hir.kind() {
        HirKind::Empty | HirKind::Look(_) => 0,
        HirKind::Class(_) => 1,
        HirKind::Literal(literal) => literal.0.len() as u64,
        HirKind::Capture(capture) => length(&capture.sub),
        HirKind::Repetition(repeat) => {
            let times = repeat.max.unwrap_or(repeat.min.saturating_add(1));
            u64::from(times).saturating_mul(length(&repeat.sub))
        }
        HirKind::Alternation(parts) | HirKind::Concat(parts) => parts
            .iter()
            .fold(0, |sum: u64, part| sum.saturating_add(length(part))),
    }
}

fn worst(hir: &Hir) -> Option<usize> {
    match hir.kind() {
        HirKind::Empty => Some(0),
        HirKind::Literal(literal) => Some(literal.0.len()),
        HirKind::Class(_) => Some(4),
        HirKind::Look(Look::Start | Look::End) => Some(0),
        HirKind::Look(_) => None,
        HirKind::Capture(capture) => worst(&capture.sub),
        HirKind::Repetition(repeat) => {
            let again = usize::try_from(repeat.min.saturating_sub(1)).ok()?;
            let rest = again.checked_mul(least(&repeat.sub)?)?;
            worst(&repeat.sub)?.checked_add(rest)
        }
        HirKind::Alternation(options) => {
            let mut most = 0;
            for option in options {
                most = most.max(worst(option)?);
            }
            Some(most)
        }
        HirKind::Concat(parts) => {
            let (mut most, mut behind) = (0, 0_usize);
            for part in parts.iter().rev() {
                most = most.max(worst(part)?.checked_add(behind)?);
                behind = behind.checked_add(least(part)?)?;
            }
            Some(most)
        }
    }
}

/// The fewest bytes. None where nothing matches.
fn least(hir: &Hir) -> Option<usize> {
    hir.properties().minimum_len()
}

#[cfg(test)]
mod tests {
    use super::of_regex;

    /// Would catch a bound that is too small, with which a costly branch is entered too late.
    #[test]
    fn the_worst_place_of_an_expression() {
        let check = |regex: &str, expected: Option<u32>| {
            assert_eq!(of_regex(regex), expected, "{regex}");
        };
        check("(?s:.{0,100000})", Some(4));
        check("a{7}", Some(7));
        check("x|ab{3}c", Some(5));
        check("(ab){2,5}cd", Some(6));
        check("^a*$", Some(1));
        check(r"\bword\b", None);
        check("(", None);
    }
}
