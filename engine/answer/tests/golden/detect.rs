//! Templates, and the forms that they teach.

use answer::{
    CallForm, Literal, Parser, Piece, ReasoningFormat, Syntax, ToolFormat, detect, markers,
};

#[test]
fn templates_show_their_form() {
    let rows = [
        ("{{ messages }}", ToolFormat::Hermes, None),
        // A template that knows no tools gets the preamble, which asks for Hermes' form.
        ("[TOOL_CALLS]", ToolFormat::Hermes, None),
        (
            "{% if tools %}<tool_call>{% endif %}",
            ToolFormat::Hermes,
            None,
        ),
        (
            "{% if tools %}<tool_call></think>",
            ToolFormat::Hermes,
            Some(ReasoningFormat::Think),
        ),
        (
            "{{ tools }}<|start_header_id|>{\"name\": \"x\", \"parameters\": {}}",
            ToolFormat::Llama3,
            None,
        ),
        ("{{ tools }}[TOOL_CALLS] [", ToolFormat::Mistral, None),
        (
            "{{ tools }}[TOOL_CALLS][ARGS][THINK]",
            ToolFormat::Mistral,
            Some(ReasoningFormat::Mistral),
        ),
        (
            "{{ tools }}<think><｜tool▁calls▁begin｜>",
            ToolFormat::DeepSeek,
            Some(ReasoningFormat::Think),
        ),
        ("{{ tools }}<|tool_call_begin|>", ToolFormat::Kimi, None),
        (
            "{{ tools }}tool_declare<|im_middle|>◁think▷",
            ToolFormat::Kimi,
            Some(ReasoningFormat::KimiThink),
        ),
    ];
    for (template, tools, reasoning) in rows {
        let detected = detect(template);
        assert_eq!(
            (detected.tools, detected.reasoning),
            (tools, reasoning),
            "{template}"
        );
    }
}

#[test]
fn names_of_formats() {
    for format in ToolFormat::ALL {
        assert_eq!(format.to_string().parse(), Ok(format));
    }
    let error = "yaml".parse::<ToolFormat>().expect_err("no such format");
    assert!(error.to_string().contains("hermes"), "{error}");
}

#[test]
fn a_prompt_that_opens_the_reasoning() {
    let think = ReasoningFormat::Think;
    assert!(think.is_open_at_end_of("<｜Assistant｜><think>\n"));
    assert!(!think.is_open_at_end_of("<think>\n\n</think>\n\n"));
    assert!(!think.is_open_at_end_of("<|im_start|>assistant\n"));
}

/// What the families' templates render for two past calls, as read from them.
#[test]
fn forms_are_those_of_the_templates_and_parse_back() {
    let one = ("get_weather", r#"{"city": "Paris"}"#);
    let two = ("now", "{}");
    let rows = [
        (
            ToolFormat::Hermes,
            "tools <tool_call>",
            "<tool_call>\n{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Paris\"}}\n</tool_call>\n<tool_call>\n{\"name\": \"now\", \"arguments\": {}}\n</tool_call>",
        ),
        (
            ToolFormat::Llama3,
            "tools <|python_tag|>",
            "{\"name\": \"get_weather\", \"parameters\": {\"city\": \"Paris\"}}; {\"name\": \"now\", \"parameters\": {}}",
        ),
        (
            ToolFormat::Mistral,
            "tools \"[TOOL_CALLS] [\"",
            "[TOOL_CALLS] [{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Paris\"}}, {\"name\": \"now\", \"arguments\": {}}]",
        ),
        (
            ToolFormat::Mistral,
            "tools [TOOL_CALLS]",
            "[TOOL_CALLS][{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Paris\"}}, {\"name\": \"now\", \"arguments\": {}}]",
        ),
        (
            ToolFormat::Mistral,
            "tools [TOOL_CALLS] [ARGS]",
            "[TOOL_CALLS]get_weather[ARGS]{\"city\": \"Paris\"}[TOOL_CALLS]now[ARGS]{}",
        ),
        (
            ToolFormat::DeepSeek,
            "tools <｜tool▁calls▁begin｜>```json",
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{\"city\": \"Paris\"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        ),
        (
            ToolFormat::DeepSeek,
            "tools <｜tool▁calls▁begin｜>",
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{\"city\": \"Paris\"}<｜tool▁call▁end｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        ),
        (
            ToolFormat::Kimi,
            "tools <|tool_call_begin|>",
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{\"city\": \"Paris\"}<|tool_call_end|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
        ),
    ];
    for (format, template, rendered) in rows {
        let detected = detect(template);
        assert_eq!(detected.tools, format, "{template}");
        assert_eq!(detected.form.render(&[one, two]), rendered);
        let syntax = Syntax {
            tools: Some(format),
            ..Syntax::default()
        };
        let mut parser = Parser::new(syntax, &["get_weather".into(), "now".into()]);
        let mut pieces = parser.push(rendered);
        pieces.extend(parser.finish());
        let found: Vec<(String, String)> = pieces
            .chunks(2)
            .map(|call| match call {
                [Piece::CallStart { name, .. }, Piece::Arguments { json, .. }] => {
                    (name.clone(), json.clone())
                }
                other => panic!("{other:?} in {rendered}"),
            })
            .collect();
        let expected = [one, two].map(|(name, json)| (name.to_owned(), json.to_owned()));
        assert_eq!(found, expected, "{rendered}");
        markers_are_announced(format, &detected.form);
    }
}

/// Every control token of a form is among those that must reach the parser.
fn markers_are_announced(format: ToolFormat, form: &CallForm) {
    let announced = markers(Some(format), None);
    let parts = [
        &form.open_all,
        &form.open_call,
        &form.name_to_arguments,
        &form.close_call,
        &form.separator,
        &form.close_all,
    ];
    for literal in parts.into_iter().flatten() {
        if let Literal::Marker(text) = literal {
            assert!(announced.contains(&text.as_str()), "{text}");
        }
    }
}
