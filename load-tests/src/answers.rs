//! How many tokens of an answer would the next turn compute again?
//!
//! A model's tokens for a text need not be the tokenizer's: a prompt that spells the answer as text
//! then leaves the cached blocks at the first token that differs, and everything of the answer
//! behind it is lost. Conversations over several kinds of text are held at several temperatures;
//! of every answer the server reports the tokens (`return_token_ids`), and they are compared with
//! what the model file's tokenizer makes of the next turn. Beside it stands what the server really
//! had cached in the next turn, which is the figure with whatever it does about it.

use std::path::PathBuf;
use std::time::Duration;

use prompt::gguf::Header;
use prompt::{ChatInput, PromptBuilder, SegmentCache};
use serde::Serialize;
use serde_json::{Value, json};

use crate::chat::{self, Turn};
use crate::error::LoadError;
use crate::http::{Connection, Target};

/// Tokens of a block, the unit of the cache.
const BLOCK_TOKENS: usize = 16;
/// Text and tokens that the comparison remembers.
const SEGMENT_BYTES_MAX: usize = 64 << 20;

/// Flags of `homing-load answers`.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// Address of the API, as in `http://127.0.0.1:8080/v1`
    #[arg(long)]
    pub url: String,
    /// API key
    #[arg(long, env = "HOMING_API_KEY")]
    pub key: Option<String>,
    /// The model's id
    #[arg(long)]
    pub model: String,
    /// The GGUF file that is served, for its tokenizer
    #[arg(long)]
    pub gguf: PathBuf,
    /// Temperatures to compare
    #[arg(long, value_delimiter = ',', default_values_t = [0.0, 1.0])]
    pub temperatures: Vec<f64>,
    /// Conversations of each kind of text
    #[arg(long, default_value_t = 6)]
    pub sessions: usize,
    /// Turns of each
    #[arg(long, default_value_t = 4)]
    pub turns: usize,
    /// Most tokens of an answer
    #[arg(long, default_value_t = 160)]
    pub max_tokens: u32,
    /// Seed of the sampling
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Write the figures here as JSON
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
}

/// What came of one kind of text at one temperature.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Row {
    /// The kind of text.
    pub kind: &'static str,
    /// The temperature.
    pub temperature: f64,
    /// Answers compared.
    pub answers: u64,
    /// Those of them whose tokens are not the tokenizer's.
    pub differing: u64,
    /// Tokens of all answers, without those that end a turn.
    pub tokens: u64,
    /// Those of them that a prompt of text would lose: from the first that differs on.
    pub lost: u64,
    /// Tokens of whole blocks that a next turn could have found cached.
    pub cacheable: u64,
    /// Those that it found.
    pub cached: u64,
}

/// The result.
#[derive(Debug, Serialize)]
pub struct Answers {
    /// By kind and temperature.
    pub rows: Vec<Row>,
}

/// Kinds of text with the first messages of their conversations.
const KINDS: &[(&str, &[&str])] = &[
    (
        "chat",
        &[
            "Tell me about the history of lighthouses.",
            "What should I cook tonight with rice, eggs and leeks?",
            "Explain to a child why the sky is blue.",
            "Schreibe mir einen kurzen Brief an meine Nachbarin.",
        ],
    ),
    (
        "code",
        &[
            "Write a Python function that merges two sorted lists.",
            "Write a bash script that renames all .jpeg files to .jpg.",
            "Write a small HTML page with a table of three cities.",
            "Write a Rust struct for a bank account with deposit and withdraw.",
        ],
    ),
    (
        "json",
        &[
            "Answer in JSON only: three books with title, author, year and tags.",
            "Answer in JSON only: the settings of a web server with nested objects.",
            "Write a JSON array of five people with name, age, e-mail and address.",
            "Answer in JSON only: a weather report for Zürich, in degrees and percent.",
        ],
    ),
];

/// What is said in the turns behind the first.
const FOLLOWING: &[&str] = &["Go on.", "Give me another example.", "Now make it longer."];

/// One server, one tokenizer.
struct Bench<'a> {
    args: &'a Args,
    target: Target,
    connection: Connection,
    builder: PromptBuilder,
    known: SegmentCache,
}

/// Holds all conversations.
pub async fn run(args: &Args) -> Result<Answers, LoadError> {
    let file = std::fs::read(&args.gguf).map_err(LoadError::file(&args.gguf))?;
    let unusable = |error: String| LoadError::Flag {
        flag: "--gguf",
        reason: format!("{}: {error}", args.gguf.display()),
    };
    let header = Header::parse(&file).map_err(|e| unusable(e.to_string()))?;
    let target = Target::parse(&args.url)?;
    let mut bench = Bench {
        args,
        connection: Connection::new(&target),
        target,
        builder: PromptBuilder::from_gguf(&header).map_err(|e| unusable(e.to_string()))?,
        known: SegmentCache::new(SEGMENT_BYTES_MAX),
    };
    drop(file);
    let mut rows = Vec::new();
    for temperature in &args.temperatures {
        for (kind, starts) in KINDS {
            let mut row = Row {
                kind,
                temperature: *temperature,
                ..Row::default()
            };
            for session in 0..args.sessions {
                let start = starts[session % starts.len()];
                bench.conversation(session, start, &mut row).await?;
            }
            eprintln!("{kind} at {temperature}: {} answers", row.answers);
            rows.push(row);
        }
    }
    Ok(Answers { rows })
}

impl Bench<'_> {
    async fn conversation(
        &mut self,
        session: usize,
        start: &str,
        row: &mut Row,
    ) -> Result<(), LoadError> {
        // A number of its own keeps conversations from sharing more than their template.
        let system = format!(
            "You are assistant number {session} of run {}.",
            self.args.seed
        );
        let mut messages = vec![
            json!({"role": "system", "content": system}),
            json!({"role": "user", "content": start}),
        ];
        let mut cacheable = 0;
        for turn in 0..self.args.turns {
            let seed = self.args.seed + (session * self.args.turns + turn) as u64;
            let answer = self.ask(&messages, row.temperature, seed).await?;
            if turn > 0 {
                row.cacheable += cacheable;
                row.cached += answer.cached.min(cacheable);
            }
            let before = self.prompt(&messages)?;
            messages.push(json!({"role": "assistant", "content": answer.content}));
            let next = FOLLOWING[turn % FOLLOWING.len()];
            messages.push(json!({"role": "user", "content": next}));
            let after = self.prompt(&messages)?;
            let lost = lost(&before, &after, &answer.tokens);
            row.answers += 1;
            row.differing += u64::from(lost > 0);
            row.tokens += answer.tokens.len() as u64;
            row.lost += lost as u64;
            // The last token that was produced is never fed back.
            let computed = answer.prompt_tokens as usize + answer.completion_tokens as usize - 1;
            cacheable = (computed / BLOCK_TOKENS * BLOCK_TOKENS) as u64;
        }
        Ok(())
    }

    fn prompt(&self, messages: &[Value]) -> Result<Vec<u32>, LoadError> {
        let input = ChatInput {
            messages,
            tools: None,
            template_kwargs: None,
            unix_seconds: 0,
        };
        let prompt = self.builder.chat(&input, &self.known);
        prompt.map_err(|error| LoadError::Flag {
            flag: "--gguf",
            reason: error.to_string(),
        })
    }

    async fn ask(
        &mut self,
        messages: &[Value],
        temperature: f64,
        seed: u64,
    ) -> Result<Answer, LoadError> {
        let turn = Turn {
            endpoint: "chat/completions",
            body: json!({
                "model": self.args.model, "messages": messages, "temperature": temperature,
                "seed": seed, "max_tokens": self.args.max_tokens, "return_token_ids": true,
            }),
            headers: Vec::new(),
            timeout: Duration::from_secs(120),
        };
        let key = self.args.key.as_deref();
        let value = chat::ask(&mut self.connection, &self.target, key, &turn).await;
        let value = value.map_err(|failure| {
            LoadError::program(
                "the server",
                format!("{}: {}", failure.kind, failure.message),
            )
        })?;
        self.read(&value).ok_or_else(|| {
            let reason = "an answer without content, usage or token_ids".to_owned();
            LoadError::program("the server", reason)
        })
    }

    fn read(&self, value: &Value) -> Option<Answer> {
        let choice = value.pointer("/choices/0")?;
        let ids = choice.get("token_ids")?.as_array()?;
        let mut tokens: Vec<u32> = ids
            .iter()
            .map(|id| id.as_u64().and_then(|id| u32::try_from(id).ok()))
            .collect::<Option<_>>()?;
        let ends = self.builder.tokenizer().eos_ids();
        while tokens.last().is_some_and(|token| ends.contains(token)) {
            tokens.pop();
        }
        let count = |path: &str| value.pointer(path).and_then(Value::as_u64);
        Some(Answer {
            content: choice.pointer("/message/content")?.as_str()?.to_owned(),
            tokens,
            prompt_tokens: count("/usage/prompt_tokens")?,
            completion_tokens: count("/usage/completion_tokens")?,
            cached: count("/usage/prompt_tokens_details/cached_tokens").unwrap_or(0),
        })
    }
}

/// What is used of an answer.
struct Answer {
    content: String,
    tokens: Vec<u32>,
    prompt_tokens: u64,
    completion_tokens: u64,
    cached: u64,
}

/// How many of an answer's tokens are not where a prompt of text would have them.
fn lost(before: &[u32], after: &[u32], answer: &[u32]) -> usize {
    // An answer that begins with white space may join the end of the prompt.
    let Some(rest) = after.strip_prefix(before) else {
        return answer.len();
    };
    let same = rest.iter().zip(answer).take_while(|(a, b)| a == b).count();
    answer.len() - same
}

impl Answers {
    /// A table for people.
    pub fn table(&self) -> String {
        let percent = |part: u64, whole: u64| 100.0 * part as f64 / whole.max(1) as f64;
        let mut out = format!(
            "{:<6} {:>11} {:>8} {:>10} {:>8} {:>7} {:>16}\n",
            "text", "temperature", "answers", "differing", "tokens", "lost", "cached next turn"
        );
        for row in &self.rows {
            out += &format!(
                "{:<6} {:>11} {:>8} {:>9.1}% {:>8} {:>6.2}% {:>15.2}%\n",
                row.kind,
                row.temperature,
                row.answers,
                percent(row.differing, row.answers),
                row.tokens,
                percent(row.lost, row.tokens),
                percent(row.cached, row.cacheable),
            );
        }
        out
    }
}

#[cfg(test)]
mod tests {
    //! Catches tokens counted as lost that are where they were, and the other way round.
    use super::lost;

    #[test]
    fn everything_behind_the_first_difference_is_lost() {
        assert_eq!(lost(&[1, 2], &[1, 2, 3, 4, 9], &[3, 4]), 0);
        assert_eq!(lost(&[1, 2], &[1, 2, 3, 7, 5, 9], &[3, 4, 5]), 2);
        assert_eq!(lost(&[1, 2], &[1, 8, 3, 4], &[3, 4]), 2);
        assert_eq!(lost(&[1, 2], &[1, 2, 3], &[3, 4]), 1);
    }
}
