//! What is measured, and how.
//!
//! Every row goes through the same HTTP client for both programs, with greedy answers whose end is
//! not left to the model. Prompts are new words each time, so that nothing is cached that the row
//! does not say is.

use std::time::{Duration, Instant};

use futures_util::future::join_all;
use serde::Serialize;
use serde_json::{Value, json};

use super::prompts::Prompts;
use super::sides::Running;
use crate::chat::{self, Outcome, Turn};
use crate::error::LoadError;
use crate::http::{Connection, Target};

/// An answer that has not come by then never will.
const TIMEOUT: Duration = Duration::from_secs(600);
/// Tokens of a decode.
const DECODE_TOKENS: u32 = 128;
/// Tokens of each of many answers.
const MANY_TOKENS: u32 = 64;
/// Sequences of the rows with many.
const MANY: usize = 16;
/// Tokens of the prompts whose answers are decoded side by side: so few that all of them fit a step,
/// and no answer begins when another has ended.
const MANY_PROMPT: usize = 16;
/// What all of many requests have in common, and what each has of its own.
const SHARED: (usize, usize) = (1024, 256);
/// A conversation's first turn, and what the second one adds.
const TURNS: (usize, usize) = (1500, 60);

/// A row of the report.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Row {
    /// Prompts of 512 tokens.
    Prefill512,
    /// Prompts of 2,048 tokens.
    Prefill2048,
    /// One answer after a prompt of 128 tokens.
    Decode128,
    /// One answer after a prompt of 2,048 tokens.
    Decode2048,
    /// Sixteen answers at once.
    Decode16,
    /// Sixteen requests with 1,024 tokens in common and 256 of their own, 64 tokens each.
    SharedPrefix,
    /// First token of the second turn of a conversation of 1,500 tokens.
    SecondTurn,
    /// From process start to first token.
    Start,
}

/// Which way a row is good.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Better {
    More,
    Less,
}

impl Row {
    /// All rows in order.
    pub(super) fn all() -> Vec<Self> {
        use clap::ValueEnum;
        Self::value_variants().to_vec()
    }

    /// The name, as flags have it.
    pub(super) fn name(self) -> String {
        use clap::ValueEnum;
        let value = self.to_possible_value().expect("no row is left out");
        value.get_name().to_owned()
    }

    pub(super) fn better(self) -> Better {
        match self {
            Self::SharedPrefix | Self::SecondTurn | Self::Start => Better::Less,
            _ => Better::More,
        }
    }

    /// Whether the first time is so long that the start does not show in it.
    pub(super) fn is_long(self) -> bool {
        matches!(
            self,
            Self::Prefill2048 | Self::Decode16 | Self::SharedPrefix
        )
    }

    pub(super) fn unit(self) -> &'static str {
        match self.better() {
            Better::More => "tok/s",
            Better::Less => "ms",
        }
    }

    /// The sets of flags that may be the opponent's best.
    pub(super) fn opponent_flags(self) -> &'static [&'static str] {
        match self {
            Self::Start => &["--ctx-size 4096 --parallel 1"],
            Self::Prefill512 | Self::Prefill2048 | Self::SecondTurn => &[
                "--ctx-size 4096 --parallel 1 --poll 0",
                "--ctx-size 4096 --parallel 1 --poll 100",
                "--ctx-size 4096 --parallel 1 --poll 100 --flash-attn off",
                "--ctx-size 4096 --parallel 1 --poll 100 --ubatch-size 2048",
            ],
            Self::Decode128 | Self::Decode2048 => &[
                "--ctx-size 4096 --parallel 1 --poll 0",
                "--ctx-size 4096 --parallel 1 --poll 100",
                "--ctx-size 4096 --parallel 1 --poll 100 --flash-attn off",
            ],
            Self::Decode16 => &[
                "--ctx-size 8192 --parallel 16 --kv-unified --poll 100",
                "--ctx-size 8192 --parallel 16 --no-kv-unified --poll 100",
                "--ctx-size 8192 --parallel 16 --no-kv-unified --poll 0",
            ],
            Self::SharedPrefix => &[
                "--ctx-size 24576 --parallel 16 --kv-unified --poll 100",
                "--ctx-size 24576 --parallel 16 --no-kv-unified --poll 100",
                "--ctx-size 24576 --parallel 4 --kv-unified --poll 100",
                "--ctx-size 24576 --parallel 1 --poll 100",
            ],
        }
    }

    /// One figure of one program.
    pub(super) async fn measure(
        self,
        running: &mut Running,
        prompts: &mut Prompts,
    ) -> Result<f64, LoadError> {
        if self == Self::Start {
            return Ok(running.start(prompts).await?.as_secs_f64() * 1e3);
        }
        let target = running.target(prompts).await?;
        let mut asking = Asking {
            running,
            target: &target,
            prompts,
        };
        match self {
            Self::Prefill512 => asking.prefill(512).await,
            Self::Prefill2048 => asking.prefill(2048).await,
            Self::Decode128 => asking.decode(128).await,
            Self::Decode2048 => asking.decode(2048).await,
            Self::Decode16 => asking.decode_many().await,
            Self::SharedPrefix => asking.shared_prefix().await,
            Self::SecondTurn => asking.second_turn().await,
            Self::Start => unreachable!("measured above"),
        }
    }
}

/// One program being asked.
struct Asking<'a> {
    running: &'a Running,
    target: &'a Target,
    prompts: &'a mut Prompts,
}

impl Asking<'_> {
    /// Prompt tokens a second of a prompt of which nothing is known.
    async fn prefill(&mut self, tokens: usize) -> Result<f64, LoadError> {
        let prompt = self.prompts.next(tokens);
        let outcome = self.good(&prompt, 1).await?;
        let usage = outcome.usage.unwrap_or_default();
        if usage.cached_tokens > 1 || usage.prompt_tokens.abs_diff(tokens as u64) > 1 {
            let what = format!("not a cold prompt of {tokens}: {usage:?}");
            return Err(self.running.trouble(&what));
        }
        let first = outcome.first_token.unwrap_or(outcome.done);
        Ok(usage.prompt_tokens as f64 / (first - outcome.sent).as_secs_f64())
    }

    /// Tokens a second after the first.
    async fn decode(&mut self, context: usize) -> Result<f64, LoadError> {
        let prompt = self.prompts.next(context);
        let outcome = self.good(&prompt, DECODE_TOKENS).await?;
        let ms = outcome.tpot_ms().ok_or_else(|| self.short(&outcome))?;
        Ok(1e3 / ms)
    }

    /// Tokens a second of all answers together, from the moment at which each has begun to the one
    /// at which the first ends: then all of them decode.
    async fn decode_many(&mut self) -> Result<f64, LoadError> {
        let prompts: Vec<String> = (0..MANY).map(|_| self.prompts.next(MANY_PROMPT)).collect();
        let outcomes = self.many(&prompts, 2 * DECODE_TOKENS).await?;
        let times = |pick: fn(&Outcome) -> Option<Instant>| outcomes.iter().filter_map(pick);
        let begin = times(|o| o.first_token).max();
        let end = times(|o| o.last_token).min();
        let (Some(begin), Some(end)) = (begin, end) else {
            return Err(self.short(&outcomes[0]));
        };
        if end <= begin {
            return Err(self.running.trouble("its answers never ran side by side"));
        }
        let within = |o: &Outcome| {
            let all = o.piece_times.len();
            let inside = o.piece_times.iter().filter(|t| **t > begin && **t <= end);
            // A piece of text may hold more than a token: those of an answer are spread evenly.
            let tokens = o.usage.unwrap_or_default().completion_tokens;
            inside.count() as f64 * tokens as f64 / all.max(1) as f64
        };
        let tokens: f64 = outcomes.iter().map(within).sum();
        Ok(tokens / (end - begin).as_secs_f64())
    }

    /// Milliseconds until all of many requests with a prefix in common are answered.
    async fn shared_prefix(&mut self) -> Result<f64, LoadError> {
        let shared = self.prompts.next(SHARED.0);
        let prompts: Vec<String> = (0..MANY)
            .map(|_| shared.clone() + &self.prompts.next(SHARED.1))
            .collect();
        let started = Instant::now();
        let outcomes = self.many(&prompts, MANY_TOKENS).await?;
        let wanted = u64::from(MANY_TOKENS);
        for outcome in &outcomes {
            if outcome.usage.unwrap_or_default().completion_tokens != wanted {
                return Err(self.short(outcome));
            }
        }
        let end = outcomes.iter().map(|o| o.done).max().unwrap_or(started);
        Ok((end - started).as_secs_f64() * 1e3)
    }

    /// Milliseconds to the first token of a conversation's second turn.
    async fn second_turn(&mut self) -> Result<f64, LoadError> {
        let first = self.prompts.next(TURNS.0);
        let answer = self.good(&first, 16).await?.text();
        let second = first + &answer + &self.prompts.next(TURNS.1);
        let outcome = self.good(&second, 1).await?;
        let cached = outcome.usage.unwrap_or_default().cached_tokens;
        if cached < TURNS.0 as u64 - 32 {
            let what = format!("only {cached} tokens of a second turn were cached");
            return Err(self.running.trouble(&what));
        }
        let came = outcome.first_token.unwrap_or(outcome.done);
        Ok((came - outcome.sent).as_secs_f64() * 1e3)
    }

    async fn many(&self, prompts: &[String], tokens: u32) -> Result<Vec<Outcome>, LoadError> {
        let all = prompts.iter().map(|prompt| self.good(prompt, tokens));
        join_all(all).await.into_iter().collect()
    }

    async fn good(&self, prompt: &str, tokens: u32) -> Result<Outcome, LoadError> {
        let outcome = complete(self.target, self.prompts.model_id(), prompt, tokens).await;
        match &outcome.failure {
            None => Ok(outcome),
            Some(failure) => Err(self.running.trouble(&failure.message)),
        }
    }

    fn short(&self, outcome: &Outcome) -> LoadError {
        let what = format!("an answer is too short: {:?}", outcome.usage);
        self.running.trouble(&what)
    }
}

/// One completion, greedy, of exactly so many tokens.
pub(super) async fn complete(
    target: &Target,
    model: &str,
    prompt: &str,
    max_tokens: u32,
) -> Outcome {
    let body: Value = json!({
        "model": model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": true,
        "stream_options": {"include_usage": true},
        "ignore_eos": true,
    });
    let turn = Turn {
        endpoint: "completions",
        body,
        headers: Vec::new(),
        timeout: TIMEOUT,
    };
    chat::send(&mut Connection::new(target), target, None, &turn).await
}
