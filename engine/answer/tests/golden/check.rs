//! One row: an answer's text, and what comes out however it is cut.

use answer::{Parser, Piece, Syntax, ToolFormat};

/// The tools that the goldens' requests offer.
pub(crate) const OFFERED: [&str; 3] = ["get_weather", "search", "now"];

/// Parses the text in these pieces. `say:`, `think:` and `call` lines, in order.
fn parse<'a>(syntax: Syntax, pieces: impl IntoIterator<Item = &'a str>) -> Vec<String> {
    let offered = OFFERED.map(String::from);
    let mut parser = Parser::new(syntax, &offered);
    let mut out: Vec<Piece> = Vec::new();
    for piece in pieces {
        out.extend(parser.push(piece));
    }
    out.extend(parser.finish());
    let mut lines: Vec<String> = Vec::new();
    let mut begun = 0;
    for piece in out {
        match piece {
            Piece::Content(text) => add(&mut lines, "say: ", &text),
            Piece::Reasoning(text) => add(&mut lines, "think: ", &text),
            Piece::CallStart { index, name, id } => {
                assert_eq!(index, begun, "calls are counted");
                begun += 1;
                let id = id.map_or(String::new(), |id| format!("#{id}"));
                lines.push(format!("call {name}{id} "));
            }
            Piece::Arguments { index, json } => {
                assert_eq!(index + 1, begun, "arguments are the last call's");
                let last = lines.last_mut().expect("a call has begun");
                assert!(last.starts_with("call "), "{last} then {json}");
                last.push_str(&json);
            }
        }
    }
    assert_eq!(parser.calls(), begun);
    lines
}

fn add(lines: &mut Vec<String>, kind: &str, text: &str) {
    assert!(!text.is_empty(), "an empty piece");
    match lines.last_mut() {
        Some(last) if last.starts_with(kind) => last.push_str(text),
        _ => lines.push(format!("{kind}{text}")),
    }
}

/// Checks rows of one syntax.
pub(crate) fn check_syntax(syntax: Syntax, rows: &[(&str, &[&str])]) {
    let mut random = 0x9e37_79b9_7f4a_7c15_u64;
    let mut below = |limit: usize| {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        (random % limit as u64) as usize
    };
    for (text, expected) in rows {
        assert_eq!(parse(syntax, [*text]), *expected, "{text}");
        let starts: Vec<usize> = text.char_indices().map(|(at, _)| at).collect();
        for &cut in &starts {
            let (head, tail) = text.split_at(cut);
            assert_eq!(parse(syntax, [head, tail]), *expected, "{head}|{tail}");
        }
        let mut ends: Vec<usize> = starts.clone();
        ends.push(text.len());
        let single = ends.windows(2).map(|w| &text[w[0]..w[1]]);
        assert_eq!(parse(syntax, single), *expected, "{text} by characters");
        for _ in 0..20 {
            let cuts = (0..below(9)).map(|_| ends[below(ends.len())]);
            let mut cuts: Vec<usize> = cuts.chain([0, text.len()]).collect();
            cuts.sort_unstable();
            let pieces: Vec<&str> = cuts.windows(2).map(|w| &text[w[0]..w[1]]).collect();
            assert_eq!(parse(syntax, pieces.clone()), *expected, "{pieces:?}");
        }
    }
}

/// Checks rows of a family's calls, without reasoning.
pub(crate) fn check(format: ToolFormat, rows: &[(&str, &[&str])]) {
    let syntax = Syntax {
        tools: Some(format),
        ..Syntax::default()
    };
    check_syntax(syntax, rows);
    // Without tools, whatever looks like a call is text.
    for (text, _) in rows {
        let said = format!("say: {text}");
        let expected: &[&str] = if text.is_empty() { &[] } else { &[&said] };
        check_syntax(Syntax::default(), &[(text, expected)]);
    }
}
