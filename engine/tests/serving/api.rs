//! Catches a wrong answer, a wrong count and an error that does not say what is wrong.

use cache_index::block::{Namespace, hash_chain};
use prompt::{ChatInput, PromptBuilder, SegmentCache};
use serde_json::{Value, json};

use crate::common::{MODEL, Node, TOKEN, cached, chat_body, content, model_path, shared, user};

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";

/// The tokens of a conversation, by the code that the gateway uses.
fn tokens(messages: &Value) -> Vec<u32> {
    let file = std::fs::read(model_path()).expect("the model can be read");
    let header = prompt::gguf::Header::parse(&file).expect("a GGUF file");
    let prompts = PromptBuilder::from_gguf(&header).expect("a known tokenizer");
    let messages = messages.as_array().expect("messages");
    let input = ChatInput {
        messages,
        tools: None,
        template_kwargs: None,
        unix_seconds: 0,
    };
    prompts
        .chat(&input, &SegmentCache::new(1 << 20))
        .expect("a valid conversation")
}

#[test]
fn a_node_says_what_it_serves() {
    let node = shared();
    assert_eq!(node.get("/health").status, 200);
    let models = node.get("/v1/models").json();
    assert_eq!(models["object"], "list");
    assert_eq!(models["data"][0]["id"], MODEL);
    assert_eq!(models["data"][0]["max_model_len"], 8192);
    assert_eq!(node.ready["max_model_len"], 8192);
    let metrics = node.get("/metrics").text();
    for name in [
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
        "vllm:prompt_tokens_total",
        "vllm:generation_tokens_total",
        "vllm:prefix_cache_queries_total",
        "vllm:prefix_cache_hits_total",
        "vllm:time_to_first_token_seconds_bucket",
        "vllm:inter_token_latency_seconds_bucket",
        "vllm:request_success_total",
        "vllm:cache_config_info{block_size=\"16\"",
        "process_start_time_seconds",
    ] {
        assert!(metrics.contains(name), "{name} in\n{metrics}");
    }
}

fn bytes(fields: Value) -> Vec<u8> {
    chat_body(fields).to_string().into_bytes()
}

#[test]
fn a_token_is_demanded_everywhere_but_at_health() {
    let node = shared();
    let wrong = "authorization: Bearer node-secreT\r\n";
    let basic = "authorization: Basic node-secret\r\n";
    let none = "x-authorization: none\r\n";
    for headers in [wrong, basic, none] {
        for path in ["/v1/models", "/metrics"] {
            let reply = node.send("GET", path, headers, b"");
            assert_eq!(
                reply.error(),
                (401, "invalid_api_key".into(), None),
                "{path} {headers}"
            );
            assert_eq!(reply.headers["www-authenticate"], "Bearer");
        }
        let body = bytes(json!({"max_tokens": 1}));
        let reply = node.send("POST", CHAT, headers, &body);
        assert_eq!(reply.error(), (401, "invalid_api_key".into(), None));
        assert_eq!(node.send("GET", "/health", headers, b"").status, 200);
    }
    let right = format!("AUTHORIZATION: bearer {TOKEN}\r\n");
    let models = node.send("GET", "/v1/models", &right, b"");
    assert_eq!(models.status, 200);
    assert_eq!(models.json()["data"][0]["token_ids"], true);
}

#[test]
fn only_a_token_holder_names_tokens_and_sees_hashes() {
    let prompt = tokens(&user(
        "Which river is the longest in the world, and which the shortest?",
    ));
    let body = chat_body(json!({"prompt_token_ids": prompt, "max_tokens": 4, "messages": null}));
    let open = Node::start(&[]);
    // Nobody may there, and must not be led to try.
    let models = open.get("/v1/models").json();
    assert_eq!(models["data"][0]["token_ids"], false);
    let refused = open.post(CHAT, &body);
    let param = Some("prompt_token_ids".to_owned());
    assert_eq!(refused.error(), (403, "node_token_required".into(), param));
    let plain = open.post(CHAT, &chat_body(json!({"max_tokens": 1})));
    assert_eq!(plain.status, 200);
    assert!(
        !plain.headers.keys().any(|name| name.starts_with("x-node-")),
        "no hints"
    );

    let reply = shared().post(CHAT, &body);
    assert_eq!(reply.status, 200, "{}", reply.text());
    let chain = hash_chain(&Namespace::new(MODEL, None, None), &prompt);
    let last = chain.last().expect("a full block").to_string();
    assert_eq!(reply.headers["x-node-last-block"], last);
    assert_eq!(
        reply.headers["x-node-prompt-tokens"],
        prompt.len().to_string()
    );
    // The same tokens from text give the same answer, and the same names on a stream.
    let text = json!({
        "messages": user("Which river is the longest in the world, and which the shortest?"),
        "max_tokens": 4,
    });
    assert_eq!(
        content(&shared().chat(text.clone())),
        content(&reply.json())
    );
    let mut streamed = chat_body(text);
    streamed["stream"] = json!(true);
    streamed["cache_salt"] = json!("s");
    let events = shared().stream(CHAT, &streamed);
    let chain = hash_chain(&Namespace::new(MODEL, None, Some("s")), &prompt);
    let last = chain.last().expect("a full block").to_string();
    assert_eq!(
        events.headers["x-node-last-block"], last,
        "the salt enters the name"
    );
}

#[test]
fn request_ids_come_back() {
    let node = shared();
    let sent =
        |header: &str| node.send("GET", "/health", header, b"").headers["x-request-id"].clone();
    assert_eq!(sent("x-request-id: mine-7\r\n"), "mine-7");
    let long = format!("x-request-id: {}\r\n", "a".repeat(129));
    for header in ["", "x-request-id: with space\r\n", &long] {
        assert!(sent(header).starts_with("req-"), "{header}");
    }
}

#[test]
fn cached_tokens_are_exact_over_turns() {
    // Prompts alone are compared: with one output token nothing of an answer is computed.
    let node = shared();
    let salt = "cached_tokens_are_exact_over_turns";
    let filler = "You answer questions about rivers, briefly and in good order. ".repeat(12);
    let mut messages = vec![json!({"role": "system", "content": filler})];
    let mut held: Vec<Vec<u32>> = Vec::new();
    for turn in 0..12 {
        messages.push(json!({"role": "user", "content": format!("Question {turn}: why? ")}));
        if turn % 4 == 3 {
            // An agent that edits its history branches off an older prefix.
            messages.truncate(messages.len() - 3);
            messages.push(json!({"role": "user", "content": format!("Again, {turn}.")}));
        }
        let prompt = tokens(&json!(messages));
        let full_blocks =
            |held: &Vec<u32>| held.iter().zip(&prompt).take_while(|(a, b)| a == b).count() / 16;
        let longest = held.iter().map(full_blocks).max().unwrap_or(0);
        let expected = 16 * longest.min((prompt.len() - 1) / 16);
        let answer = node.chat(json!({"messages": messages, "max_tokens": 1, "cache_salt": salt}));
        assert_eq!(answer["usage"]["prompt_tokens"], prompt.len());
        assert_eq!(answer["usage"]["completion_tokens"], 1);
        assert_eq!(answer["usage"]["total_tokens"], prompt.len() + 1);
        assert_eq!(cached(&answer), expected as u64, "turn {turn}");
        assert!(
            turn == 0 || expected > 0,
            "the test would notice a cache that never hits"
        );
        messages.push(json!({"role": "assistant", "content": format!("Answer {turn}.")}));
        held.push(prompt);
    }
    let mut other = json!({"messages": messages, "max_tokens": 1});
    for salt in [json!("another tenant"), json!(null)] {
        other["cache_salt"] = salt.clone();
        assert_eq!(
            cached(&node.chat(other.clone())),
            0,
            "{salt} shares nothing"
        );
    }
}

#[test]
fn a_stream_is_the_whole_answer_in_pieces() {
    let node = shared();
    let fields = json!({"messages": user("Tell a short story about a bridge."), "max_tokens": 40});
    let whole = node.chat(fields.clone());
    let mut body = chat_body(fields);
    body["stream"] = json!(true);
    for include_usage in [false, true] {
        body["stream_options"] = json!({"include_usage": include_usage});
        let events = node.stream(CHAT, &body);
        assert_eq!(events.status, 200);
        assert!(events.headers["content-type"].starts_with("text/event-stream"));
        let mut chunks = events.chunks();
        if include_usage {
            let last = chunks.pop().expect("a usage chunk");
            assert_eq!(last["choices"], json!([]));
            for field in ["prompt_tokens", "completion_tokens", "total_tokens"] {
                assert_eq!(last["usage"][field], whole["usage"][field], "{field}");
            }
        }
        assert!(
            chunks.iter().all(|chunk| chunk["usage"].is_null()),
            "usage only where asked for"
        );
        let first = &chunks[0];
        assert_eq!(first["choices"][0]["delta"]["role"], "assistant");
        let mut text = String::new();
        for chunk in &chunks {
            assert_eq!(chunk["object"], "chat.completion.chunk");
            for field in ["id", "created", "model"] {
                assert_eq!(chunk[field], first[field], "{field} on every chunk");
            }
            text += chunk["choices"][0]["delta"]["content"]
                .as_str()
                .unwrap_or_default();
        }
        assert_eq!(text, content(&whole));
        let reasons: Vec<_> = chunks
            .iter()
            .map(|c| &c["choices"][0]["finish_reason"])
            .filter(|r| !r.is_null())
            .collect();
        assert_eq!(
            reasons,
            [&whole["choices"][0]["finish_reason"]],
            "one reason, at the end"
        );
        assert!(chunks.len() > 10, "it comes in pieces");
    }
}

#[test]
fn completions_speak_their_own_dialect() {
    let node = shared();
    let mut body = json!({"model": MODEL, "prompt": "The capital of France is", "temperature": 0, "max_tokens": 8});
    let whole = node.post(COMPLETIONS, &body).json();
    assert_eq!(whole["object"], "text_completion");
    let text = whole["choices"][0]["text"]
        .as_str()
        .expect("text")
        .to_owned();
    assert!(text.contains("Paris"), "{text}");
    assert_eq!(whole["usage"]["completion_tokens"], 8);
    body["stream"] = json!(true);
    body["stream_options"] = json!({"include_usage": true, "continuous_usage_stats": true});
    let chunks = node.stream(COMPLETIONS, &body).chunks();
    let pieces = chunks
        .iter()
        .filter_map(|chunk| chunk["choices"][0]["text"].as_str());
    assert_eq!(pieces.collect::<String>(), text);
    let counted = chunks
        .iter()
        .map(|chunk| chunk["usage"]["completion_tokens"].as_u64());
    let counted: Vec<_> = counted
        .map(|count| count.expect("usage on every chunk"))
        .collect();
    assert!(
        counted.is_sorted() && counted.last() == Some(&8),
        "{counted:?}"
    );
}

#[test]
fn stop_strings_are_found_across_tokens() {
    let node = shared();
    let fields = json!({"messages": user("Tell a short story about a bridge."), "max_tokens": 40});
    let text = content(&node.chat(fields.clone()));
    let chars: Vec<char> = text.chars().collect();
    assert!(chars.len() > 60, "{text}");
    for start in [3, 11, 20, 33] {
        // Seven characters from the middle of a word span more than one token.
        let stop: String = chars[start..start + 7].iter().collect();
        let expected = &text[..text.find(&stop).expect("it is there")];
        let mut body = fields.clone();
        body["stop"] = json!(["never to be seen", stop]);
        let answer = node.chat(body.clone());
        assert_eq!(content(&answer), expected, "stop at {stop:?}");
        assert_eq!(answer["choices"][0]["finish_reason"], "stop");
        assert_eq!(answer["choices"][0]["stop_reason"], stop);
        let mut body = chat_body(body);
        body["stream"] = json!(true);
        let chunks = node.stream(CHAT, &body).chunks();
        let pieces = chunks
            .iter()
            .filter_map(|c| c["choices"][0]["delta"]["content"].as_str());
        assert_eq!(
            pieces.collect::<String>(),
            expected,
            "streamed, stop at {stop:?}"
        );
    }
}

#[test]
fn extremes_of_seed_and_temperature_are_answered() {
    let node = shared();
    for seed in [json!(0), json!(i64::MIN), json!(i64::MAX), json!(u64::MAX)] {
        for temperature in [json!(0), json!(1e-45), json!(2)] {
            let fields = json!({"seed": seed, "temperature": temperature, "max_tokens": 3,
                "top_p": 1e-30});
            let answer = node.chat(fields);
            assert_eq!(
                answer["usage"]["completion_tokens"], 3,
                "{seed} {temperature}"
            );
        }
    }
}

#[test]
fn a_seed_decides() {
    let node = shared();
    let ask = |seed: u64| {
        content(
            &node.chat(json!({"temperature": 1.2, "top_p": 0.95, "seed": seed, "max_tokens": 24})),
        )
    };
    let first = ask(1);
    assert_eq!(first, ask(1), "the same seed, the same answer");
    assert!(
        (2..6).any(|seed| ask(seed) != first),
        "another seed, another answer"
    );
}
