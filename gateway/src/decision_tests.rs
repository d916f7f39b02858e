//! What does a decision cost, and does it cost what is new? A turn of 100,000 tokens over 64 nodes,
//! known but for its last messages, beside the same turn cold and with a template that must be
//! rendered whole. `make bench-decision` prints the figures; docs/MEASUREMENTS.md keeps them.

use std::sync::Arc;
use std::time::{Duration, Instant};

use dialects::known::Known;
use dialects::normalise::Options;
use dialects::session::Found;
use dialects::{Fields, Turn, chat_known};
use policies::pick::Params;
use serde::de::IgnoredAny;
use serde_json::value::RawValue;
use serde_json::{Value, json};

use crate::fleet::Fleet;
use crate::prompt::{Hashed, Model, Planned, Prompts};
use crate::route::{Question, choose};
use crate::session::{Bindings, session_of};

/// The program's own: figures are to be its.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

const NODES: usize = 64;
const PROMPT_TOKENS: usize = 100_000;
const SALT: &str = "0123456789abcdef";
/// As for the default model, and so that the last message is written otherwise.
const LOOKING: &str = "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + \
    message['content'] + '<|im_end|>' + ('' if loop.last else '\n') }}{% endfor %}\
    {{ '<|im_start|>assistant\n' }}";

/// An agent's conversation: its tools, and turns of call and result until the prompt has the tokens.
struct Agent {
    tools: Value,
    messages: Vec<Value>,
}

impl Agent {
    fn new() -> Self {
        let tool = |at: usize| {
            let properties = (0..12).map(|n| {
                let about = json!({"type": "string", "description": format!(
                    "Option {n} of tool {at}: what to look at, and how it is to be shown.")});
                (format!("option_{n}"), about)
            });
            json!({"type": "function", "function": {"name": format!("tool_{at}"),
                "description": "Reads, searches or changes files of the project.",
                "parameters": {"type": "object",
                    "properties": properties.collect::<serde_json::Map<_, _>>()}}})
        };
        Self {
            tools: (0..16).map(tool).collect(),
            messages: vec![
                json!({"role": "system", "content": "You are a careful agent. ".repeat(200)}),
                json!({"role": "user", "content": "Mend the test that fails."}),
            ],
        }
    }

    fn turn(&mut self) {
        let at = self.messages.len();
        let result = include_str!("prompt.rs");
        let begin = result.floor_char_boundary(at * 997 % (result.len() / 2));
        let end = result.floor_char_boundary(begin + 3000);
        self.messages.extend([
            json!({"role": "assistant", "content": format!("I look at part {at}."), "tool_calls": [
                {"id": format!("call_{at}"), "type": "function", "function":
                    {"name": "tool_3", "arguments": format!("{{\"option_1\":\"part {at}\"}}")}}]}),
            json!({"role": "tool", "tool_call_id": format!("call_{at}"),
                "content": &result[begin..end]}),
        ]);
    }

    fn body(&self) -> String {
        json!({"model": "m", "temperature": 0.5, "tools": self.tools, "messages": self.messages})
            .to_string()
    }
}

/// A gateway as far as a decision needs one.
struct Gateway {
    known: Known,
    prompts: Prompts,
    model: Arc<Model>,
    fleet: Arc<Fleet>,
    bindings: Bindings,
    policy: Params,
}

impl Gateway {
    fn new(template: Option<&str>) -> Option<Self> {
        let path = std::env::var_os("HOMING_MODEL").map_or_else(
            || {
                concat!(
                    env!("CARGO_MANIFEST_DIR"),
                    "/../models/SmolLM2-135M-Instruct.Q4_1.gguf"
                )
                .into()
            },
            std::path::PathBuf::from,
        );
        let prompts = Prompts::of_model("m", &path, template)?;
        Some(Self {
            known: Known::new(64 << 20),
            model: Arc::clone(prompts.model("m")?),
            prompts,
            fleet: Fleet::of(NODES),
            bindings: Bindings::new(),
            policy: Params::default(),
        })
    }

    fn read<'a>(&self, fields: Fields<'a>) -> Turn<'a> {
        let reader = self.known.reader("scope", Options::default());
        chat_known(fields, &reader).expect("a turn")
    }

    fn plan(&self, turn: &Turn<'_>) -> (Planned, Hashed) {
        let session = session_of("t", "m", Found::Nothing, None, &turn.prompt);
        self.prompts
            .plan(&self.model, SALT, session.conversation, &turn.prompt, 0)
            .expect("a prompt")
    }

    /// Reads what is new, makes the prompt and chooses; how long each took.
    fn decide(&self, body: &str) -> Took {
        let begin = Instant::now();
        let fields = Fields::parse(body.as_bytes()).expect("JSON");
        let parsed = begin.elapsed();
        let begin = Instant::now();
        let turn = self.read(fields);
        let read = begin.elapsed();
        let begin = Instant::now();
        let (prompt, hashed) = self.plan(&turn);
        let planned = begin.elapsed();
        let begin = Instant::now();
        let session = session_of("t", "m", Found::Nothing, None, &turn.prompt);
        let known = self.bindings.get(&session, Instant::now());
        let question = Question {
            model: "m",
            prompt: &prompt,
            session: &session.id,
            known: &known,
            output_tokens: 256,
            excluded: &[],
            splits: policies::view::Splits::Yes,
        };
        let chosen = choose(&self.fleet, &self.bindings, &self.policy, &question);
        let chosen = chosen.map(|chosen| chosen.node.id.to_string());
        Took {
            parts: [parsed, read, planned, begin.elapsed()],
            hashed,
            tokens: prompt.token_ids().to_vec(),
            node: chosen.ok(),
        }
    }
}

struct Took {
    parts: [Duration; 4],
    hashed: Hashed,
    tokens: Vec<u32>,
    node: Option<String>,
}

/// Medians of each part, µs.
fn medians(all: &[Took]) -> [f64; 4] {
    std::array::from_fn(|part| {
        let mut times: Vec<Duration> = all.iter().map(|took| took.parts[part]).collect();
        times.sort_unstable();
        times[times.len() / 2].as_secs_f64() * 1e6
    })
}

fn median_us(calls: usize, mut call: impl FnMut()) -> f64 {
    let mut times: Vec<Duration> = (0..calls)
        .map(|_| {
            let begin = Instant::now();
            call();
            begin.elapsed()
        })
        .collect();
    times.sort_unstable();
    times[times.len() / 2].as_secs_f64() * 1e6
}

fn shown(name: &str, all: &[Took]) {
    let [parsed, read, planned, chosen] = medians(all);
    println!(
        "{name:<28} decision {:>8.0} µs: read {read:.0}, prompt {planned:.0}, choice {chosen:.0}; \
         fields parsed before {parsed:.0}",
        read + planned + chosen
    );
}

/// Would catch a known turn that is read, rendered or hashed whole, and one that differs from it.
#[test]
fn a_known_turn_is_decided_by_what_is_new() {
    let (Some(known), Some(looking)) = (Gateway::new(None), Gateway::new(Some(LOOKING))) else {
        eprintln!("skipped: there is no model file; run `make setup`");
        return;
    };
    let mut agent = Agent::new();
    let mut first = known.decide(&agent.body());
    while first.tokens.len() < PROMPT_TOKENS {
        agent.turn();
        first = known.decide(&agent.body());
    }
    known.fleet.stand("m", SALT, &first.tokens);
    looking.fleet.stand("m", SALT, &first.tokens);
    looking.decide(&agent.body());

    let (mut grown, mut whole, mut cold) = (Vec::new(), Vec::new(), Vec::new());
    let mut bodies = Vec::new();
    for _ in 0..20 {
        agent.turn();
        let body = agent.body();
        grown.push(known.decide(&body));
        whole.push(looking.decide(&body));
        bodies.push(body);
    }
    for body in &bodies[..3] {
        let fresh = Gateway::new(None).expect("a model file");
        fresh.fleet.stand("m", SALT, &first.tokens);
        cold.push(fresh.decide(body));
    }
    for (one, other) in grown.iter().zip(&cold) {
        assert_eq!(one.tokens, other.tokens);
    }
    for took in grown.iter().chain(&cold) {
        // A session that is bound nowhere may go to any node that holds about as much as the best.
        let node = took.node.as_deref().and_then(|name| name.strip_prefix('n'));
        let node: usize = node.and_then(|number| number.parse().ok()).unwrap_or(0);
        assert!(
            node >= NODES * 9 / 10 - 1,
            "it holds little: {:?}",
            took.node
        );
    }
    for took in &grown {
        assert!(took.hashed.new < 200, "{:?}", took.hashed);
    }
    let body = bodies.last().map(String::as_bytes).unwrap_or_default();
    let scan = median_us(20, || {
        let fields: std::collections::HashMap<&str, &RawValue> =
            serde_json::from_slice(body).expect("JSON");
        std::hint::black_box(fields);
    });
    let ignored = median_us(20, || {
        std::hint::black_box(serde_json::from_slice::<IgnoredAny>(body).expect("JSON"));
    });
    println!(
        "{} tokens, {} messages, {} bytes, {NODES} nodes; a borrowed serde_json scan takes \
         {scan:.0} µs (values ignored: {ignored:.0})",
        grown[19].tokens.len(),
        agent.messages.len(),
        body.len()
    );
    shown("known but for its last turn", &grown);
    shown("rendered whole", &whole);
    shown("cold", &cold);
}

/// Would catch a conversation that goes back and is continued from where it no longer is.
#[test]
fn a_conversation_that_goes_back_is_made_as_if_it_were_new() {
    let Some(known) = Gateway::new(None) else {
        eprintln!("skipped: there is no model file; run `make setup`");
        return;
    };
    let mut agent = Agent::new();
    for back in [0, 0, 0, 2, 0, 4, 1, 0, 6, 3] {
        // Not always to the end of a turn.
        agent.messages.truncate(agent.messages.len() - back);
        agent.turn();
        let body = agent.body();
        let turn = known.read(Fields::parse(body.as_bytes()).expect("JSON"));
        let (prompt, hashed) = known.plan(&turn);
        let fresh = Gateway::new(None).expect("a model file");
        let (whole, _) = fresh.plan(&turn);
        assert_eq!(prompt.token_ids(), whole.token_ids());
        assert_eq!(prompt.chain.hashes, whole.chain.hashes);
        assert!(
            back > 0 || hashed.new < 200 || hashed.known == 0,
            "{hashed:?}"
        );
    }
}
