//! What happens at the limits?

use answer::{DEPTH_MAX, Parser, Piece, Syntax, ToolFormat};

fn parse(format: ToolFormat, text: &str) -> Vec<Piece> {
    let syntax = Syntax {
        tools: Some(format),
        ..Syntax::default()
    };
    let mut parser = Parser::new(syntax, &["now".into()]);
    let mut pieces = parser.push(text);
    pieces.extend(parser.finish());
    pieces
}

fn call(name: &str, json: String) -> [Piece; 2] {
    let start = Piece::CallStart {
        index: 0,
        name: name.into(),
        id: None,
    };
    [start, Piece::Arguments { index: 0, json }]
}

#[test]
fn arguments_nest_so_deep_and_no_deeper() {
    let nested = |depth: usize| {
        let lists = depth - 1;
        format!("{{\"a\": {}{}}}", "[".repeat(lists), "]".repeat(lists))
    };
    let deepest = nested(DEPTH_MAX);
    let text = format!("[TOOL_CALLS]now[ARGS]{deepest}");
    assert_eq!(parse(ToolFormat::Mistral, &text), call("now", deepest));
    let text = format!("[TOOL_CALLS]now[ARGS]{}", nested(DEPTH_MAX + 1));
    let opened = format!("{{\"a\": {}", "[".repeat(DEPTH_MAX - 1));
    let mut expected = call("now", opened).to_vec();
    expected.push(Piece::Content(format!("[{}}}", "]".repeat(DEPTH_MAX))));
    assert_eq!(parse(ToolFormat::Mistral, &text), expected);
}

#[test]
fn a_call_whose_name_does_not_come_is_text_in_the_end() {
    let filler = "x".repeat(100_000);
    let text = format!("<tool_call>{{\"arguments\": {{\"a\": \"{filler}\"}}, \"name\": \"now\"}}");
    assert_eq!(
        parse(ToolFormat::Hermes, &text),
        [Piece::Content(text.clone())]
    );
    let text = format!("[TOOL_CALLS]{filler}[ARGS]{{}}");
    assert_eq!(
        parse(ToolFormat::Mistral, &text),
        [Piece::Content(text.clone())]
    );
}

#[test]
fn a_call_that_counts_may_be_as_long_as_the_answer() {
    let arguments = format!("{{\"a\": \"{}\"}}", "x".repeat(1_000_000));
    let text = format!("<tool_call>{{\"name\": \"now\", \"arguments\": {arguments}}}</tool_call>");
    assert_eq!(parse(ToolFormat::Hermes, &text), call("now", arguments));
}

#[test]
fn arguments_come_as_they_are_written() {
    // Catches a parser that waits for the call's end.
    let syntax = Syntax {
        tools: Some(ToolFormat::Hermes),
        ..Syntax::default()
    };
    let mut parser = Parser::new(syntax, &["now".into()]);
    assert_eq!(parser.push("<tool_call>{\"name\": \"now\", "), []);
    assert_eq!(
        parser.push("\"arguments\": {\"a\": \"b"),
        call("now", "{\"a\": \"b".into())
    );
    let more = |json: &str| {
        [Piece::Arguments {
            index: 0,
            json: json.into(),
        }]
    };
    assert_eq!(parser.push("c"), more("c"));
    assert_eq!(parser.push("d\""), more("d\""));
    assert_eq!(parser.push("}"), more("}"));
    assert_eq!(parser.push("}\n</tool_"), []);
    assert_eq!(parser.push("call>"), []);
    assert_eq!(parser.finish(), []);
    assert_eq!(parser.calls(), 1);
}
