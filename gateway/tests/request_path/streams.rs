//! Faults H01, H02, H03 and the hidden usage chunk: catches streams that lose, tear or add an
//! event, and usage that does not reach the ledger.

use crate::support::node::{
    Act, CHUNKS_END, Node, chunk, delta, stream_head, stream_of, usage, usage_chunk,
};
use crate::support::{Gateway, Stream, chat};

/// A stream of these raw events, written as one piece.
fn raw(events: &[String]) -> Vec<u8> {
    let mut out = stream_head();
    for event in events {
        out.extend(chunk(event.as_bytes()));
    }
    out.extend(CHUNKS_END);
    out
}

#[test]
fn h01_data_without_a_space_is_billed() {
    let node = Node::start();
    let gateway = Gateway::start(&[&node]);
    node.script(vec![Act::Send(raw(&[
        format!("data:{}\n\n", delta("hello")),
        format!("data:{}\n\n", usage_chunk(100, 0, 20)),
        "data:[DONE]\n\n".to_owned(),
    ]))]);
    let answer = gateway.chat(&chat(Stream::WithUsage, "hi"));
    assert_eq!(
        answer.events(),
        [delta("hello"), usage_chunk(100, 0, 20), "[DONE]".to_owned()]
    );
    let row = gateway.row(answer.header("x-request-id").unwrap());
    assert_eq!(
        (&row["input_tokens"], &row["output_tokens"]),
        (&100.into(), &20.into())
    );
    assert_eq!(row["status"], "complete");
    assert_eq!(
        gateway.metric("homing_time_to_first_token_seconds_count"),
        1.0
    );
    assert_eq!(gateway.metric("homing_tokens_total"), 120.0);
    gateway.assert_idle();
}

#[test]
fn h02_one_byte_a_write_keeps_every_character() {
    let node = Node::start();
    let gateway = Gateway::start(&[&node]);
    let tool = serde_json::json!({
        "choices": [{"index": 0, "delta": {"tool_calls": [{"index": 0, "id": "c", "type": "function",
            "function": {"name": "weather", "arguments": "{\"city\":\"杭州\"}"}}]}}],
    });
    for (separator, ending) in [("data: ", "\n\n"), ("data:", "\r\n\r\n")] {
        let events = [
            ": ping".to_owned() + ending,
            format!("{separator}{}{ending}", delta("你好🦀")),
            format!("{separator}{tool}{ending}"),
            format!("{separator}{}{ending}", usage_chunk(7, 0, 2)),
            format!("{separator}[DONE]{ending}"),
        ];
        node.script(vec![Act::Bytewise(raw(&events))]);
        let answer = gateway.chat(&chat(Stream::WithUsage, "hi"));
        assert_eq!(answer.text(), events.concat());
        assert_eq!(answer.content(), "你好🦀");
        let arguments =
            answer.chunks()[1]["choices"][0]["delta"]["tool_calls"][0]["function"]["arguments"]
                .clone();
        let arguments: serde_json::Value =
            serde_json::from_str(arguments.as_str().unwrap()).unwrap();
        assert_eq!(arguments["city"], "杭州");
        let row = gateway.row(answer.header("x-request-id").unwrap());
        assert_eq!(
            (&row["input_tokens"], &row["output_tokens"]),
            (&7.into(), &2.into())
        );
    }
    gateway.assert_idle();
}

#[test]
fn h03_a_quoted_terminator_does_not_end_the_stream() {
    let node = Node::start();
    let gateway = Gateway::start(&[&node]);
    let texts = [
        "say data: [DONE]\n\ndata: [DONE]\n\n now",
        "1",
        "2",
        "3",
        "4",
        "5",
    ];
    let mut events: Vec<String> = texts
        .iter()
        .map(|text| format!("data: {}\n\n", delta(text)))
        .collect();
    events.push(format!("data: {}\n\n", usage_chunk(10, 0, 6)));
    events.push("data: [DONE]\n\n".to_owned());
    let whole = raw(&events);
    // Inside the real terminator: between `[DO` and `NE]`.
    let at = whole.len() - CHUNKS_END.len() - b"NE]\n\n\r\n".len();
    let split = vec![
        Act::Send(whole[..at].to_vec()),
        Act::Pause(std::time::Duration::from_millis(20)),
        Act::Send(whole[at..].to_vec()),
    ];
    for script in [vec![Act::Send(whole.clone())], split] {
        node.script(script);
        let answer = gateway.chat(&chat(Stream::Yes, "hi"));
        assert_eq!(answer.content(), texts.concat());
        assert_eq!(
            answer
                .events()
                .iter()
                .filter(|event| *event == "[DONE]")
                .count(),
            1
        );
        let row = gateway.row(answer.header("x-request-id").unwrap());
        assert_eq!(
            (&row["input_tokens"], &row["output_tokens"]),
            (&10.into(), &6.into())
        );
    }
    gateway.assert_idle();
}

#[test]
fn the_usage_chunk_is_for_those_who_asked() {
    let node = Node::start();
    let gateway = Gateway::start(&[&node]);
    for (asked, events) in [(Stream::WithUsage, 4), (Stream::Yes, 3)] {
        node.script(stream_of(&["a", "b"]));
        let answer = gateway.chat(&chat(asked, "hi"));
        assert_eq!(answer.status, 200);
        assert_eq!(
            answer.events().len(),
            events,
            "{asked:?}: {}",
            answer.text()
        );
        assert_eq!(
            answer.text().contains("prompt_tokens"),
            asked == Stream::WithUsage
        );
        assert_eq!(answer.header("content-type"), Some("text/event-stream"));
        let sent = node.received().pop().unwrap();
        assert_eq!(sent.body["stream_options"]["include_usage"], true);
        let row = gateway.row(answer.header("x-request-id").unwrap());
        assert_eq!(
            (
                &row["input_tokens"],
                &row["cached_tokens"],
                &row["output_tokens"]
            ),
            (&100.into(), &64.into(), &20.into())
        );
        // 36 × 1 + 64 × .1 + 20 × 3 nano-dollars, rounded up once.
        assert_eq!(row["cost_nano_usd"], 103);
    }
    assert_eq!(node.connections(), 1, "the node's connection is used again");
    gateway.assert_idle();
}

#[test]
fn a_stream_without_terminator_or_usage() {
    let node = Node::start();
    let gateway = Gateway::start(&[&node]);
    let text = format!("data: {}\n\n", delta("a"));
    for (events, done, status) in [
        // The usage was there: only the terminator got lost.
        (
            vec![text.clone(), format!("data: {}\n\n", usage_chunk(9, 0, 1))],
            true,
            "complete",
        ),
        // Neither: the answer may be incomplete, and the client must know.
        (vec![text.clone()], false, "cut"),
        // A terminator without an empty line at its end.
        (
            vec![text.clone(), "data: [DONE]".to_owned()],
            true,
            "complete",
        ),
    ] {
        node.script(vec![Act::Send(raw(&events))]);
        let answer = gateway.chat(&chat(Stream::Yes, "hi"));
        assert_eq!(
            answer.events().last().map(String::as_str) == Some("[DONE]"),
            done,
            "{}",
            answer.text()
        );
        assert_eq!(
            answer.text().contains("\"error\""),
            !done,
            "{}",
            answer.text()
        );
        let row = gateway.row(answer.header("x-request-id").unwrap());
        assert_eq!(row["status"], status);
        assert_eq!(row["output_tokens"], 1);
    }
    gateway.assert_idle();
}

#[test]
fn an_answer_in_one_piece_is_untouched() {
    let node = Node::start();
    let gateway = Gateway::start(&[&node]);
    let body = serde_json::json!({"choices": [{"message": {"content": "x"}}], "unknown": 1.50, "usage": usage(30, 16, 2)}).to_string();
    node.script(vec![Act::Bytewise(crate::support::node::json(
        200,
        &["x-node-prompt-tokens: 30", "set-cookie: a"],
        &body,
    ))]);
    let answer = gateway.chat(&chat(Stream::No, "hi"));
    assert_eq!(answer.text(), body);
    assert!(
        answer.header("x-node-prompt-tokens").is_none() && answer.header("set-cookie").is_none()
    );
    let row = gateway.row(answer.header("x-request-id").unwrap());
    assert_eq!(
        (&row["input_tokens"], &row["cached_tokens"]),
        (&30.into(), &16.into())
    );
    gateway.assert_idle();
}
