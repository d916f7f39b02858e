//! What do agents send?
//!
//! A session is a system prompt with a tools text, shared by many sessions, then turns that each
//! append the model's answer and a new message shaped like a tool's result, with think time before
//! each. In the middle, a session may fork sub-agents: conversations of their own, with their own
//! system prompt over the same tools text, whose last answers go into the parent's next message.
//! Everything is drawn from one seed, so two runs send the same bytes at the same intended times
//! (but for the model's own answers, which become part of the next prompt).
//!
//! Text is made of plain words, about 1.1 tokens each in common vocabularies: lengths in tokens are
//! aims, not promises. The server's own usage report is what a run is measured by.

use std::sync::Arc;
use std::time::Duration;

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

/// Words a token, measured on the default model's vocabulary over this word list.
const WORDS_PER_TOKEN: f64 = 0.88;

/// Words of tool output and instructions, all lower-case so that they join into sentences.
const WORDS: &[&str] = &[
    "the", "file", "returns", "value", "when", "reading", "index", "each", "request", "holds", "a",
    "list", "of", "open", "tasks", "that", "must", "finish", "before", "next", "step", "writes",
    "result", "into", "table", "with", "name", "and", "size", "limit", "error", "path", "if",
    "server", "is", "slow", "then", "retry", "after", "second", "call", "function", "takes",
    "argument", "as", "text", "number", "or", "object", "use", "this", "tool", "to", "search",
    "code", "for", "pattern", "show", "lines", "around", "match", "change", "only", "what", "was",
    "asked", "keep", "tests", "green", "report", "build", "fails", "because", "module", "imports",
    "old", "version", "library", "update", "lock", "run", "again", "commit", "message", "says",
    "why", "not", "how", "user", "wants", "short", "answer", "without", "long", "lists", "cache",
    "prefix", "block", "token", "node", "region", "queue", "batch",
];

const TOOLS: &[&str] = &[
    "read_file",
    "search",
    "run_tests",
    "list_files",
    "write_file",
    "shell",
];

/// The shape of a workload.
#[derive(Clone, Debug)]
pub struct Shape {
    /// Conversations in all.
    pub sessions: usize,
    /// Turns of each.
    pub turns: usize,
    /// Sessions that begin in a second, on average (arrivals are Poisson).
    pub rate: f64,
    /// Different system prompts, dealt out in turn.
    pub system_prompts: usize,
    /// Length of a system prompt with its tools text, in tokens.
    pub system_tokens: usize,
    /// Length of each new message, in tokens.
    pub message_tokens: usize,
    /// Mean pause before a turn after the first.
    pub think: Duration,
    /// Sub-agents that each session forks in its middle.
    pub subagents: usize,
    /// Everything is drawn from it.
    pub seed: u64,
}

/// One conversation to come.
#[derive(Clone, Debug, PartialEq)]
pub struct Session {
    /// The `x-session-affinity` of every turn.
    pub id: String,
    /// When the first turn is due, from the start of the run (or of the fork).
    pub arrival: Duration,
    /// Shared by many.
    pub system: Arc<str>,
    /// In order.
    pub turns: Vec<PlannedTurn>,
}

/// One turn to come.
#[derive(Clone, Debug, PartialEq)]
pub struct PlannedTurn {
    /// The new message.
    pub message: String,
    /// Pause between the previous answer and this turn.
    pub think: Duration,
    /// Sub-agents that run before this turn, at the same time.
    pub forks: Vec<Session>,
}

/// Draws the whole workload.
pub fn plan(shape: &Shape) -> Vec<Session> {
    let mut random = StdRng::seed_from_u64(shape.seed);
    let tools = words(&mut random, shape.system_tokens * 2 / 3);
    let kinds = shape.system_prompts.max(1);
    let systems: Vec<Arc<str>> = (0..kinds)
        .map(|kind| system(&mut random, shape, kind, "agent", &tools))
        .collect();
    let helpers: Vec<Arc<str>> = (0..kinds)
        .map(|kind| system(&mut random, shape, kind, "sub-agent", &tools))
        .collect();
    let mut arrival = Duration::ZERO;
    (0..shape.sessions)
        .map(|number| {
            let id = format!("agent-{:x}-{number}", shape.seed);
            let mut session = conversation(
                &mut random,
                shape,
                &id,
                &systems[number % kinds],
                shape.turns,
            );
            session.arrival = arrival;
            arrival += exponential(&mut random, Duration::from_secs_f64(1.0 / shape.rate));
            let helper = &helpers[number % kinds];
            let middle = shape.turns / 2;
            if let Some(turn) = session.turns.get_mut(middle) {
                turn.forks = (0..shape.subagents)
                    .map(|n| {
                        let id = format!("{id}-sub-{n}");
                        conversation(&mut random, shape, &id, helper, (shape.turns / 3).max(1))
                    })
                    .collect();
            }
            session
        })
        .collect()
}

/// Turns of all sessions and their sub-agents.
pub fn count_turns(sessions: &[Session]) -> usize {
    sessions
        .iter()
        .flat_map(|s| &s.turns)
        .map(|turn| 1 + count_turns(&turn.forks))
        .sum()
}

fn system(random: &mut StdRng, shape: &Shape, kind: usize, role: &str, tools: &str) -> Arc<str> {
    let own = words(random, shape.system_tokens / 3);
    format!("You are {role} number {kind}. {own}\n\nTools:\n{tools}").into()
}

fn conversation(
    random: &mut StdRng,
    shape: &Shape,
    id: &str,
    system: &Arc<str>,
    turns: usize,
) -> Session {
    let turns = (0..turns)
        .map(|number| PlannedTurn {
            message: message(random, shape.message_tokens, number),
            think: if number == 0 {
                Duration::ZERO
            } else {
                exponential(random, shape.think)
            },
            forks: Vec::new(),
        })
        .collect();
    Session {
        id: id.to_owned(),
        arrival: Duration::ZERO,
        system: Arc::clone(system),
        turns,
    }
}

/// The first message is a task, each later one a tool's result.
fn message(random: &mut StdRng, tokens: usize, number: usize) -> String {
    let text = words(random, tokens);
    if number == 0 {
        return format!("Task {:06}: {text}", random.random_range(0..1_000_000));
    }
    let tool = TOOLS[random.random_range(0..TOOLS.len())];
    format!(
        "Result of {tool} (call {:05}): {text}",
        random.random_range(0..100_000)
    )
}

/// Sentences of about so many tokens.
pub(crate) fn words(random: &mut StdRng, tokens: usize) -> String {
    let count = (tokens as f64 * WORDS_PER_TOKEN).round().max(1.0) as usize;
    let mut text = String::with_capacity(count * 6);
    let mut left_in_sentence = 0_usize;
    for number in 0..count {
        let word = WORDS[random.random_range(0..WORDS.len())];
        if left_in_sentence == 0 {
            text.push_str(if number == 0 { "" } else { ". " });
            let mut letters = word.chars();
            text.extend(letters.next().map(|c| c.to_ascii_uppercase()));
            text.push_str(letters.as_str());
            left_in_sentence = random.random_range(6..14);
        } else {
            text.push(' ');
            text.push_str(word);
        }
        left_in_sentence -= 1;
    }
    text.push('.');
    text
}

/// A pause of a Poisson process. Capped at eight means, so that no run hangs on one draw.
fn exponential(random: &mut StdRng, mean: Duration) -> Duration {
    let uniform: f64 = random.random_range(f64::EPSILON..1.0);
    mean.mul_f64((-uniform.ln()).min(8.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape(seed: u64) -> Shape {
        Shape {
            sessions: 6,
            turns: 6,
            rate: 2.0,
            system_prompts: 2,
            system_tokens: 600,
            message_tokens: 40,
            think: Duration::from_millis(300),
            subagents: 2,
            seed,
        }
    }

    /// Catches a draw that depends on anything but the seed.
    #[test]
    fn the_seed_decides_everything() {
        assert_eq!(plan(&shape(7)), plan(&shape(7)));
        assert_ne!(plan(&shape(7)), plan(&shape(8)));
    }

    /// Catches a workload without the sharing that it is made for.
    #[test]
    fn sessions_share_system_prompts_and_sub_agents_have_their_own() {
        let sessions = plan(&shape(1));
        assert_eq!(sessions[0].system, sessions[2].system);
        assert_ne!(sessions[0].system, sessions[1].system);
        assert_ne!(sessions[0].turns[0].message, sessions[2].turns[0].message);
        let forks = &sessions[0].turns[3].forks;
        assert_eq!(forks.len(), 2);
        assert_eq!(forks[0].system, forks[1].system);
        assert_ne!(forks[0].system, sessions[0].system);
        assert_ne!(forks[0].id, forks[1].id);
        assert_eq!(count_turns(&sessions), 6 * (6 + 2 * 2));
        assert!(sessions.windows(2).all(|w| w[0].arrival <= w[1].arrival));
    }
}
