//! `homing explain`: why a turn went where it went.

use std::fmt::Write as _;

use crate::decisions::{Attempt, Candidate, Decided, Legs};

/// One turn for a person.
pub(super) fn text(decided: &Decided) -> String {
    let mut text = String::new();
    // Writing to a String cannot fail.
    let _ = head(&mut text, decided);
    for (at, attempt) in decided.attempts.iter().enumerate() {
        let _ = writeln!(
            text,
            "\nattempt {}: {} ({}), {} of {} prompt tokens expected in its cache",
            at + 1,
            nodes(attempt),
            attempt.reason,
            attempt.expected_cached_tokens,
            decided.prompt_tokens,
        );
        let pair = attempt.legs.as_ref().and_then(|legs| legs.chosen.as_ref());
        let whole = pair.map_or(Some(&attempt.node), |_| None);
        text += &candidates(&attempt.candidates, whole);
        if let Some(legs) = &attempt.legs {
            text += &halves(legs);
        }
        for refused in &attempt.refused {
            let _ = writeln!(text, "  not {}: {}", refused.node, refused.why);
        }
    }
    text
}

fn head(text: &mut String, decided: &Decided) -> std::fmt::Result {
    let Decided {
        request_id,
        record_id,
        tenant,
        session_id,
        model,
        prompt_tokens,
        output_tokens,
        cached_tokens,
        duration_ms,
        outcome,
        ..
    } = decided;
    writeln!(text, "request {request_id} (record {record_id})")?;
    writeln!(
        text,
        "  tenant {tenant}, session {session_id}, model {model}"
    )?;
    let count = if decided.exact { "" } else { "about " };
    writeln!(
        text,
        "  {outcome}: {count}{prompt_tokens} prompt tokens, {output_tokens} of answer, in {duration_ms} ms"
    )?;
    if let Some(ttft_ms) = decided.ttft_ms {
        writeln!(text, "  first byte after {ttft_ms} ms")?;
    }
    let expected = decided
        .attempts
        .last()
        .map_or(0, |attempt| attempt.expected_cached_tokens);
    writeln!(
        text,
        "  cached tokens: {expected} expected, {cached_tokens} found"
    )
}

/// The node that took the turn, or the two that shared it.
fn nodes(attempt: &Attempt) -> String {
    let pair = attempt.legs.as_ref().and_then(|legs| legs.chosen.as_ref());
    match pair {
        Some(pair) => format!("{} computes, {} answers", pair.prefill, pair.decode),
        None => attempt.node.clone(),
    }
}

/// The two halves of a turn that two nodes could have shared, and what they came to.
fn halves(legs: &Legs) -> String {
    let Legs {
        prefill,
        decode,
        cheapest,
        chosen,
    } = legs;
    let of = |side: fn(&crate::decisions::Pair) -> &String| chosen.as_ref().map(side);
    let mut text = String::new();
    for (title, side, node) in [
        ("to compute the prompt", prefill, of(|pair| &pair.prefill)),
        ("to answer from it", decode, of(|pair| &pair.decode)),
    ] {
        text += &format!("  {title}:\n{}", candidates(side, node));
    }
    match chosen.as_ref().or(cheapest.as_ref()) {
        None => text += "  no two of them: too little is missing where it is answered\n",
        Some(pair) => {
            let word = if chosen.is_some() {
                "both"
            } else {
                "the cheapest two"
            };
            // Writing to a String cannot fail.
            let _ = writeln!(
                text,
                "  {word}: {} and {}, {:.1} ms, of which the prefill hides {:.1}; {} tokens to move",
                pair.prefill,
                pair.decode,
                pair.cost_ms + pair.hidden_ms,
                pair.hidden_ms,
                pair.moved_tokens,
            );
        }
    }
    text
}

/// Candidates as a table, the cheapest first; columns are the terms that any of them has.
fn candidates(candidates: &[Candidate], chosen: Option<&String>) -> String {
    if candidates.is_empty() {
        return String::new();
    }
    let mut terms: Vec<&str> = Vec::new();
    for candidate in candidates {
        for name in candidate.terms.keys() {
            if !terms.contains(&name.as_str()) {
                terms.push(name);
            }
        }
    }
    let mut rows = vec![
        ["node", "cached", "cost_ms"]
            .into_iter()
            .chain(terms.iter().copied())
            .map(str::to_owned)
            .collect::<Vec<_>>(),
    ];
    let mut sorted: Vec<_> = candidates.iter().collect();
    sorted.sort_by(|a, b| a.cost_ms.total_cmp(&b.cost_ms));
    rows.extend(sorted.into_iter().map(|candidate| {
        let mark = if Some(&candidate.node) == chosen {
            "*"
        } else {
            ""
        };
        let term = |name: &&str| candidate.terms.get(*name).copied().unwrap_or(0.0);
        [
            format!("{mark}{}", candidate.node),
            candidate.cached_tokens.to_string(),
            format!("{:.1}", candidate.cost_ms),
        ]
        .into_iter()
        .chain(terms.iter().map(|name| format!("{:.1}", term(name))))
        .collect()
    }));
    let width = |at: usize| rows.iter().map(|row| row[at].chars().count()).max();
    let widths: Vec<usize> = (0..rows[0].len())
        .map(|at| width(at).unwrap_or(0))
        .collect();
    let line = |row: &Vec<String>| {
        let cells = row.iter().zip(&widths).enumerate();
        let cells = cells.map(|(at, (cell, width))| match at {
            0 => format!("{cell:<width$}"),
            _ => format!("{cell:>width$}"),
        });
        format!("  {}\n", cells.collect::<Vec<_>>().join("  ").trim_end())
    };
    rows.iter().map(line).collect()
}
