//! Start, end, and what a pool under pressure does. Catches a node that outlives its parent, cuts
//! answers when told to end, starts on a broken file, or never finishes when memory is short.

use std::io::Write;
use std::process::{Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::json;

use crate::common::{Node, chat_body, content, engine, model_path, shared, until, user};

const CHAT: &str = "/v1/chat/completions";

#[test]
fn a_drain_lets_answers_finish() {
    let mut node = Node::start(&[]);
    let body = chat_body(json!({"max_tokens": 150, "ignore_eos": true, "stream": true}));
    let mut events = node.stream(CHAT, &body);
    (0..3).for_each(|_| drop(events.next().expect("it runs")));
    node.signal("-TERM");
    until("health says so", || node.get("/health").status == 503);
    let refused = node.post(CHAT, &chat_body(json!({"max_tokens": 1})));
    assert_eq!(refused.error(), (503, "node_draining".into(), None));
    assert!(refused.headers.contains_key("retry-after"));
    let chunks = events.chunks();
    let last = chunks.last().expect("a last chunk");
    assert_eq!(
        last["choices"][0]["finish_reason"], "length",
        "nothing was cut"
    );
    assert_eq!(node.exit_code(), Some(0));
}

#[test]
fn a_drain_does_not_wait_for_ever() {
    let mut node = Node::start(&["--drain-s", "0.2"]);
    let body = chat_body(json!({"max_tokens": 8000, "ignore_eos": true, "stream": true}));
    let mut events = node.stream(CHAT, &body);
    drop(events.next());
    let told = Instant::now();
    node.signal("-INT");
    assert_eq!(node.exit_code(), Some(0));
    assert!(
        told.elapsed() < Duration::from_secs(20),
        "{:?}",
        told.elapsed()
    );
}

#[test]
fn a_node_dies_with_its_parent() {
    let mut node = Node::start(&[]);
    let mut events = node.stream(
        CHAT,
        &chat_body(json!({"max_tokens": 8000, "stream": true})),
    );
    drop(events.next());
    let told = Instant::now();
    drop(node.stdin.take());
    assert_eq!(node.exit_code(), Some(0));
    assert!(
        told.elapsed() < Duration::from_secs(2),
        "{:?}",
        told.elapsed()
    );
}

fn fails(args: &[&str], model: &std::path::Path) -> Output {
    let mut command = engine();
    command.arg("serve").arg("--model").arg(model).args(args);
    if !args.contains(&"--listen") {
        command.args(["--listen", "127.0.0.1:0"]);
    }
    command
        .stdin(Stdio::null())
        .output()
        .expect("the engine runs")
}

fn check_failure(output: &Output, code: i32, says: &[&str]) {
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{stderr}");
    assert!(output.stdout.is_empty(), "nothing on stdout");
    assert!(!stderr.contains("panicked"), "{stderr}");
    let lines: Vec<_> = stderr
        .lines()
        .filter(|line| line.starts_with("homing-engine:"))
        .collect();
    assert_eq!(lines.len(), 1, "one line says why: {stderr}");
    says.iter()
        .for_each(|part| assert!(lines[0].contains(part), "{part:?} in {}", lines[0]));
}

#[test]
fn a_broken_model_file_is_refused_in_one_line() {
    let whole = std::fs::read(model_path()).expect("the model can be read");
    let mut wrong_version = whole[..1 << 20].to_vec();
    wrong_version[4..8].copy_from_slice(&99_u32.to_le_bytes());
    let rows: [(&str, &[u8]); 7] = [
        ("empty", b""),
        ("foreign", b"PK\x03\x04 this is no model"),
        ("text", &[b'x'; 5000]),
        ("head-only", &whole[..20]),
        ("in-metadata", &whole[..100_000]),
        ("in-tensors", &whole[..whole.len() - 1]),
        ("version", &wrong_version),
    ];
    let directory = tempfile::tempdir().expect("a temporary directory");
    for (name, bytes) in rows {
        let path = directory.path().join(name).with_extension("gguf");
        let mut file = std::fs::File::create(&path).expect("a file");
        file.write_all(bytes).expect("it can be written");
        drop(file);
        check_failure(&fails(&[], &path), 1, &[name]);
    }
    let missing = directory.path().join("missing.gguf");
    check_failure(&fails(&[], &missing), 1, &["missing.gguf"]);
}

#[test]
fn wrong_options_are_refused_in_one_line() {
    let model = model_path();
    check_failure(
        &fails(&["--kv-memory", "1MiB"], &model),
        1,
        &["--kv-memory", "bytes"],
    );
    check_failure(
        &fails(&["--kv-memory", "900000GiB"], &model),
        1,
        &["--kv-memory", "memory"],
    );
    check_failure(&fails(&["--threads", "0"], &model), 2, &["--threads"]);
    check_failure(
        &fails(&["--listen", "0.0.0.0:0"], &model),
        2,
        &["node token"],
    );
    let taken = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = taken.local_addr().expect("an address").to_string();
    check_failure(&fails(&["--listen", &address], &model), 1, &[&address]);
    let endpoint = format!("tcp://{address}");
    check_failure(&fails(&["--events", &endpoint], &model), 1, &[&endpoint]);
    let usage = fails(&["--kv-memory", "512MB"], &model);
    assert_eq!(usage.status.code(), Some(2));
}

#[test]
fn a_small_pool_serves_many_with_the_same_answers() {
    // 40 blocks, 640 tokens: two or three of these conversations at a time.
    let small = Node::start(&["--kv-memory", "15MiB"]);
    assert_eq!(
        small.ready["max_model_len"],
        16 * small.ready["kv_blocks"].as_u64().expect("n")
    );
    let ask = |node: &Node, which: usize| {
        let text = format!(
            "Conversation {which}. {}",
            "Rivers run to the sea. ".repeat(which * 2)
        );
        node.chat(json!({
            "messages": user(&text), "max_tokens": 60, "ignore_eos": true, "temperature": 0.8,
            "seed": which,
        }))
    };
    let answers: Vec<_> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..16)
            .map(|which| {
                scope.spawn({
                    let small = &small;
                    move || ask(small, which)
                })
            })
            .collect();
        threads
            .into_iter()
            .map(|thread| thread.join().expect("it finishes"))
            .collect()
    });
    for (which, answer) in answers.iter().enumerate() {
        assert_eq!(answer["usage"]["completion_tokens"], 60);
        assert_eq!(
            content(answer),
            content(&ask(shared(), which)),
            "as alone, {which}"
        );
    }
    small.wait_for_metric("homing:kv_blocks_held", |held| held == 0.0);
}
