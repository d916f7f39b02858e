//! Does a node whose pool is too small, or whose clients are unruly, still answer everybody, and has
//! it everything back afterwards?
//!
//! Against one real engine process. Catches a request that never ends, blocks that a cancelled
//! request keeps, an answer that depends on who else was there, a 5xx.

#![expect(clippy::panic, reason = "a helper fails its test with what it saw")]

mod support;

use std::process::Command;
use std::time::Duration;

use load_tests::chat::{self, Turn};
use load_tests::http::{Connection, Target};
use load_tests::process::{Program, wait_until};
use load_tests::soak::{self, Args};
use serde_json::{Value, json};
use support::{MODEL, START, binary, get, message, metric, model_path};

/// One engine, ended with the test.
struct Engine {
    url: String,
    kv_blocks: u64,
    program: Program,
    _folder: tempfile::TempDir,
}

impl Engine {
    fn start(kv_memory: &str) -> Self {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let mut command = Command::new(binary("homing-engine"));
        command
            .args(["serve", "--exit-with-stdin", "--listen", "127.0.0.1:0"])
            .args(["--threads", "2", "--kv-memory", kv_memory])
            .args(["--model-id", MODEL, "--model"])
            .arg(model_path());
        let log = folder.path().join("engine.log");
        let program = Program::start("homing-engine", &mut command, &log).expect("it starts");
        let line = program.line(START).unwrap_or_else(|e| panic!("{e}"));
        let ready: Value = serde_json::from_str(&line).unwrap_or_else(|e| panic!("{e} in {line}"));
        let url = ready["listening"].as_str().expect("an address").to_owned();
        Self {
            url,
            kv_blocks: ready["kv_blocks"].as_u64().expect("a number"),
            program,
            _folder: folder,
        }
    }

    fn metric(&self, name: &str) -> f64 {
        let (status, text) = get(&format!("{}/metrics", self.url), None);
        assert_eq!(status, 200, "{text}");
        metric(&text, name)
    }

    /// Sends a greedy turn and returns its tokens, its text and the tokens of prompt and answer.
    async fn ask(&self, messages: &[Value], salt: &str, max_tokens: u32) -> (Value, String, u64) {
        let turn = Turn {
            endpoint: "chat/completions",
            body: json!({
                "model": MODEL, "messages": messages, "max_tokens": max_tokens, "temperature": 0,
                "cache_salt": salt, "return_token_ids": true, "ignore_eos": true,
            }),
            headers: Vec::new(),
            timeout: Duration::from_secs(300),
        };
        let target = Target::parse(&self.url).expect("an address");
        let mut connection = Connection::new(&target);
        let answer = chat::ask(&mut connection, &target, None, &turn).await;
        let answer = answer.unwrap_or_else(|e| {
            panic!("{}: {}\n{}", e.kind, e.message, self.program.stderr());
        });
        let choice = &answer["choices"][0];
        assert_eq!(choice["finish_reason"], "length", "{answer}");
        let text = choice["message"]["content"].as_str().unwrap_or_default();
        let spent = answer["usage"]["total_tokens"].as_u64().expect("a usage");
        (choice["token_ids"].clone(), text.to_owned(), spent)
    }

    /// A conversation of two turns: the tokens of both answers, and how long it became.
    async fn converse(&self, number: usize, salt: &str) -> (Vec<Value>, u64) {
        let mut messages = vec![message(
            "user",
            &format!("Tell me the story of traveller number {number}, who came from the north."),
        )];
        let (first, text, _) = self.ask(&messages, salt, 24).await;
        messages.push(message("assistant", &text));
        messages.push(message(
            "user",
            "And where did the traveller go after that?",
        ));
        let (second, _, spent) = self.ask(&messages, salt, 24).await;
        (vec![first, second], spent)
    }
}

#[tokio::test]
async fn sixty_four_conversations_on_a_pool_for_sixteen_answer_as_if_alone() {
    // 128 blocks of the default model's 360 KiB.
    let engine = Engine::start("45MiB");
    let mut alone = Vec::new();
    let mut longest = 0;
    for number in 0..64 {
        let (tokens, spent) = engine.converse(number, "alone").await;
        alone.push(tokens);
        longest = longest.max(spent);
    }
    let room = engine.kv_blocks / longest.div_ceil(16);
    assert!(
        room <= 16,
        "the pool holds {room} conversations of {longest} tokens"
    );
    let engine = &engine;
    let together = (0..64).map(|number| engine.converse(number, "together"));
    let together = futures_util::future::join_all(together).await;
    for (number, ((tokens, _), alone)) in together.into_iter().zip(alone).enumerate() {
        assert_eq!(tokens, alone, "conversation {number}");
    }
    let is_free = wait_until(Duration::from_secs(10), || {
        engine.metric("homing:kv_blocks_held") == 0.0
    });
    assert!(
        is_free,
        "{} blocks are held",
        engine.metric("homing:kv_blocks_held")
    );
}

#[tokio::test]
async fn requests_of_every_kind_leave_nothing_behind() {
    let engine = Engine::start("96MiB");
    let args = Args {
        url: format!("{}/v1", engine.url),
        api_key: None,
        model: MODEL.into(),
        requests: 200,
        clients: 16,
        metrics: vec![format!("{}/metrics", engine.url)],
        // The pool's pages are touched one by one: memory is still growing into its bounds.
        pid: Vec::new(),
        stuck_s: 240,
        seed: 3,
        json: None,
    };
    let soak = soak::run(&args).await.expect("it runs");
    assert_eq!(soak.faults(), Vec::<String>::new(), "{}", soak.table());
    assert_eq!(soak.requests, 200);
    assert!(soak.endings.answered > 100, "{}", soak.table());
    assert!(
        soak.endings.refused > 5 && soak.endings.left > 5,
        "{}",
        soak.table()
    );
    assert_eq!(soak.left_over.len(), 5, "{}", soak.table());
}
