//! Catches an event that is torn, merged or lost by where the network cut the stream, a quoted
//! sentinel that ends it, and a usage that is not seen for want of a space.
use super::*;
use crate::relay::chunk::NodeUsage;

fn scan(stream: &[u8], cut: usize) -> Vec<Event> {
    let mut scanner = Scanner::default();
    let mut events = Vec::new();
    for chunk in stream.chunks(cut) {
        scanner
            .push(Bytes::copy_from_slice(chunk), &mut events)
            .expect("short events");
    }
    events.extend(scanner.finish());
    events
}

const STREAM: &str = concat!(
    ": keep-alive\r\n\r\n",
    "data: {\"choices\":[{\"delta\":{\"role\":\"assistant\",\"content\":\"\"}}]}\n\n",
    "data:{\"choices\":[{\"delta\":{\"content\":\"你好🦀\"}}],\"usage\":null}\n\n",
    "event: x\r\ndata:{\"choices\":[{\"delta\":{\"content\":\"data: [DONE]\\n\\n\"}}]}\r\n\r\n",
    "data: {\"choices\":[{\"delta\":{\"tool_calls\":[{\"index\":0}]}}]}\n\n",
    "data: {\"choices\":[{\"text\":\"a\"},{\"text\":\"b\",\"finish_reason\":\"stop\"}]}\n\n",
    "data: {\"choices\":\ndata: []}\n\n",
    "data: not json\n\n",
    "data:{\"choices\":[],\"usage\":{\"prompt_tokens\":100,\"completion_tokens\":20,\"prompt_tokens_details\":{\"cached_tokens\":64}}}\n\n",
    "data:[DONE]\r\n\r\n",
);

#[test]
fn every_cut_gives_the_same_events() {
    let chunk = |facts| EventKind::Chunk(facts);
    let text = |tokens| {
        chunk(ChunkFacts {
            tokens,
            tells: true,
            ..ChunkFacts::default()
        })
    };
    let usage = NodeUsage {
        input: 100,
        cached: 64,
        output: 20,
    };
    let expected = [
        EventKind::Comment,
        text(0),
        text(1),
        text(1),
        text(1),
        chunk(ChunkFacts {
            tokens: 2,
            finished: 1,
            tells: true,
            ..ChunkFacts::default()
        }),
        chunk(ChunkFacts {
            no_choices: true,
            tells: true,
            ..ChunkFacts::default()
        }),
        EventKind::Opaque,
        chunk(ChunkFacts {
            no_choices: true,
            usage: Some(usage),
            tells: true,
            ..ChunkFacts::default()
        }),
        EventKind::Done,
    ];
    for cut in 1..=STREAM.len() {
        let events = scan(STREAM.as_bytes(), cut);
        let kinds: Vec<_> = events.iter().map(|event| event.kind).collect();
        assert_eq!(kinds, expected, "cut every {cut} bytes");
        let bytes: Vec<u8> = events
            .iter()
            .flat_map(|event| event.bytes.to_vec())
            .collect();
        assert_eq!(bytes, STREAM.as_bytes(), "cut every {cut} bytes");
    }
}

#[test]
fn a_terminator_without_its_empty_line_still_counts() {
    for stream in ["data: [DONE]", "data: [DONE]\n", "data:[DONE]\r\n"] {
        let events = scan(stream.as_bytes(), 1);
        assert_eq!(events.len(), 1, "{stream:?}");
        assert_eq!(events[0].kind, EventKind::Done, "{stream:?}");
        assert!(events[0].bytes.ends_with(b"\n\n") || events[0].bytes.ends_with(b"\r\n\n"));
    }
}

#[test]
fn an_endless_event_is_refused() {
    let mut scanner = Scanner::default();
    let chunk = Bytes::from(vec![b'x'; EVENT_BYTES_MAX / 2 + 1]);
    assert_eq!(scanner.push(chunk.clone(), &mut Vec::new()), Ok(()));
    assert_eq!(scanner.push(chunk, &mut Vec::new()), Err(TooLong));
}

#[test]
fn odd_usage_is_never_more_cached_than_prompt() {
    for (data, expected) in [
        (
            r#"{"usage":{"prompt_tokens":5,"prompt_tokens_details":{"cached_tokens":9}}}"#,
            Some((5, 5, 0)),
        ),
        (
            r#"{"usage":{"prompt_tokens":5,"completion_tokens":2,"prompt_tokens_details":null}}"#,
            Some((5, 0, 2)),
        ),
        (r#"{"usage":null}"#, None),
        ("{}", None),
    ] {
        let found = facts(data.as_bytes()).expect("an object").usage;
        let expected = expected.map(|(input, cached, output)| NodeUsage {
            input,
            cached,
            output,
        });
        assert_eq!(found, expected, "{data}");
        assert_eq!(usage_of(data), expected, "{data}");
    }
}

fn usage_of(data: &str) -> Option<NodeUsage> {
    crate::relay::chunk::usage_of_whole(data.as_bytes())
}
