//! What does the simulator say of a cell before it is run?
//!
//! The same conversations at the same times, in the nodes' own tokens: what a simulated node answers
//! follows from the prompt, so every prompt of the run is known. They are played on a virtual clock
//! (`simulate::conversations`) over the same model of a node with the same pace and pool, placed by
//! the product's policy as the simulator drives it. The gateway lives in real time, in which nodes are
//! faster by the bench's speed, and some of what it weighs is in milliseconds; so the prediction is in
//! real time too, and its figures are brought to model time as the run's are. What it leaves out is what
//! the run has beside the model: the way to the gateway and back and its work, and events that take a
//! moment.

use std::collections::{HashMap, HashSet};
use std::path::Path;

use cache_index::block::{BLOCK_TOKENS, BlockHash, Namespace, creditable_blocks, hash_chain};
use serde_json::json;
use simulate::conversations::{Played, Turn, play};
use simulate::engine::Params;
use simulate::homing::{Homing, Knowledge, Settings};
use simulate::scenario;

use super::apart::{Timed, good_per_s};
use super::figures::Sample;
use super::{Args, Cell};
use crate::agent;
use crate::error::LoadError;
use crate::measure::{Summary, ratio};
use crate::node::prompts::Prompts;
use crate::workload::{self, Session};

/// What turns a workload into tokens, as the nodes do it.
pub(super) struct Predictor {
    prompts: Prompts,
}

impl Predictor {
    /// With the nodes' own model file.
    pub(super) fn load(gguf: &Path) -> Result<Self, LoadError> {
        let prompts = Prompts::load(Some(gguf))?;
        Ok(Self { prompts })
    }

    /// A cell's figures; none where the gateway is told what the simulator does not know.
    pub(super) fn predict(
        &self,
        args: &Args,
        cell: Cell,
        load: &agent::Args,
    ) -> Result<Option<Sample>, LoadError> {
        let Some(settings) = settings(&args.policy) else {
            return Ok(None);
        };
        let sessions = workload::plan(&load.shape()?);
        let mut numbers = Numbers::default();
        let conversation = |session: &Session| self.conversation(session, load, &mut numbers);
        let conversations = sessions.iter().map(conversation);
        let conversations: Vec<Vec<Turn>> = conversations.collect::<Result<_, _>>()?;
        let fleet = fleet(args, cell);
        let mut router = Homing::new((&fleet).into(), settings);
        let played = play(&fleet, &conversations, &mut router);
        Ok(Some(sample(&fleet, &conversations, &played, args)))
    }

    /// A session's turns, its answers and what becomes of them included.
    fn conversation(
        &self,
        session: &Session,
        load: &agent::Args,
        numbers: &mut Numbers,
    ) -> Result<Vec<Turn>, LoadError> {
        let mut messages = vec![json!({"role": "system", "content": session.system})];
        let mut turns = Vec::with_capacity(session.turns.len());
        for (number, planned) in session.turns.iter().enumerate() {
            messages.push(json!({"role": "user", "content": planned.message}));
            let prompt = self
                .prompts
                .tokens(&json!({"messages": messages}))
                .map_err(|why| LoadError::program("a prediction", why))?;
            let answer = self.prompts.answer(&prompt, load.max_tokens as usize);
            let text: String = answer
                .iter()
                .map(|token| self.prompts.text(*token))
                .collect();
            messages.push(json!({"role": "assistant", "content": text}));
            let pause = if number == 0 {
                session.arrival
            } else {
                planned.think
            };
            turns.push(Turn {
                path: numbers.path(&prompt, &answer),
                prompt_blocks: prompt.len() / BLOCK_TOKENS,
                prompt_tokens: count(prompt.len()),
                output_tokens: count(answer.len()),
                pause_ms: pause.as_secs_f64() * 1000.0,
            });
        }
        Ok(turns)
    }
}

fn count(tokens: usize) -> u32 {
    u32::try_from(tokens).unwrap_or(u32::MAX).max(1)
}

/// The gateway's policy lines as the simulator's settings.
fn settings(lines: &[String]) -> Option<Settings> {
    let mut settings = Settings {
        knowledge: Knowledge::Events,
        ..Settings::default()
    };
    for line in lines {
        let (key, value) = line.split_once('=')?;
        let value = value.trim().parse().ok()?;
        settings.set(key.trim(), value).then_some(())?;
    }
    Some(settings)
}

/// The pace of `homing-load node` where no flag changes it, at this rate.
fn pace(prefill_tokens_per_s: f64) -> Params {
    Params {
        block_tokens: BLOCK_TOKENS as u32,
        prefill_tokens_per_s,
        ..Params::default()
    }
}

/// A pace in real time, of which so many milliseconds of the model pass in one.
fn hastened(pace: Params, speed: f64) -> Params {
    Params {
        prefill_tokens_per_s: pace.prefill_tokens_per_s * speed,
        step_ms: pace.step_ms / speed,
        step_ms_per_answer: pace.step_ms_per_answer / speed,
        step_ms_per_context_token: pace.step_ms_per_context_token / speed,
        ..pace
    }
}

fn fleet(args: &Args, cell: Cell) -> scenario::Fleet {
    let params = Params {
        chunk_tokens: args.apart.chunk,
        ..hastened(pace(args.prefill_rate), args.speed)
    };
    scenario::Fleet {
        seed: args.seed,
        prefill_nodes: usize::from(cell.prefill_nodes),
        handover_gb_per_s: args.apart.handover_gb_per_s * args.speed,
        ..scenario::Fleet::alike(params, usize::from(args.nodes), cell.capacity)
    }
}

/// One number for each block of tokens behind the same beginning.
#[derive(Default)]
struct Numbers(HashMap<BlockHash, u32>);

impl Numbers {
    /// The full blocks of a prompt and its answer. The last token of an answer is never computed
    /// with, so it is in no cache.
    fn path(&mut self, prompt: &[u32], answer: &[u32]) -> std::sync::Arc<[u32]> {
        let computed = &answer[..answer.len().saturating_sub(1)];
        let namespace = Namespace::new("simulated", None, None);
        let chain = hash_chain(&namespace, &[prompt, computed].concat());
        let number = |hash: &BlockHash| {
            let next = count(self.0.len() + 1);
            *self.0.entry(*hash).or_insert(next)
        };
        chain.iter().map(number).collect()
    }
}

/// What the nodes and the agents would count.
fn sample(
    fleet: &scenario::Fleet,
    conversations: &[Vec<Turn>],
    played: &[Played],
    args: &Args,
) -> Sample {
    let speed = args.speed;
    let turn = |one: &Played| &conversations[one.conversation][one.turn];
    let prompts: f64 = played
        .iter()
        .map(|one| f64::from(turn(one).prompt_tokens))
        .sum();
    let cached: f64 = played.iter().map(|one| f64::from(one.cached_tokens)).sum();
    let mut computed = vec![0.0; fleet.nodes];
    for one in played {
        let node = one.prefill_node.unwrap_or(one.node);
        computed[node] += f64::from(turn(one).prompt_tokens - one.cached_tokens);
    }
    if fleet.prefill_nodes > 0 {
        computed.truncate(fleet.prefill_nodes);
    }
    let most = computed.iter().copied().fold(0.0, f64::max);
    let ttft = Summary::of(
        played
            .iter()
            .map(|one| (one.first_token_ms - one.due_ms) * speed),
    );
    let latency = Summary::of(played.iter().map(|one| (one.done_ms - one.due_ms) * speed));
    let timed: Vec<Timed> = played
        .iter()
        .map(|one| Timed {
            due_ms: one.due_ms * speed,
            done_ms: one.done_ms * speed,
            ttft_ms: Some((one.first_token_ms - one.due_ms) * speed),
            tpot_ms: {
                let later = f64::from(turn(one).output_tokens) - 1.0;
                let ms = (one.done_ms - one.first_token_ms) * speed;
                (later > 0.0).then(|| ms / later)
            },
        })
        .collect();
    Sample {
        hit_ratio: ratio(cached, prompts),
        one_cache_ratio: ratio(one_cache_tokens(conversations, played), prompts),
        imbalance: ratio(most * computed.len() as f64, computed.iter().sum()),
        ttft_mean_ms: ttft.mean,
        ttft_p99_ms: ttft.p99,
        latency_mean_ms: latency.mean,
        tpot_p90_ms: Summary::of(timed.iter().filter_map(|turn| turn.tpot_ms)).p90,
        good_per_s: good_per_s(&timed, &args.bounds),
        ..Sample::default()
    }
}

/// Prompt tokens that one cache shared by all, which never forgets, would have had.
fn one_cache_tokens(conversations: &[Vec<Turn>], played: &[Played]) -> f64 {
    let asked = played.iter().map(|one| (one.due_ms, true, one));
    let ended = played.iter().map(|one| (one.done_ms, false, one));
    let mut events: Vec<_> = asked.chain(ended).collect();
    events.sort_by(|a, b| a.0.total_cmp(&b.0));
    let mut seen: HashSet<u32> = HashSet::new();
    let mut tokens = 0;
    for (_, is_asked, one) in events {
        let turn = &conversations[one.conversation][one.turn];
        if !is_asked {
            seen.extend(turn.path.iter());
            continue;
        }
        let prompt = &turn.path[..turn.prompt_blocks];
        let held = prompt
            .iter()
            .take_while(|block| seen.contains(block))
            .count();
        tokens += held.min(creditable_blocks(turn.prompt_tokens as usize)) * BLOCK_TOKENS;
        seen.extend(prompt);
    }
    tokens as f64
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::node::Pace;

    #[derive(Parser)]
    struct Flags {
        #[command(flatten)]
        pace: Pace,
    }

    /// Catches nodes that run at another pace than the one that is predicted with.
    #[test]
    fn the_pace_is_that_of_the_nodes() {
        let flags = Flags::parse_from(["node", "--prefill-rate", "6000", "--speed", "4"]);
        let own = flags.pace.params().expect("valid");
        assert_eq!(own, pace(6000.0));
        let hastened = hastened(own, 4.0);
        for (prompt, cached) in [(6000, 0), (90_000, 40_000)] {
            let (slow, fast) = (
                own.floor_ms(prompt, cached),
                hastened.floor_ms(prompt, cached),
            );
            assert!((slow / fast - 4.0).abs() < 1e-9, "{slow} {fast}");
        }
    }

    /// Catches policy lines that are played as something else.
    #[test]
    fn what_the_simulator_does_not_know_is_not_predicted() {
        let lines = |lines: &[&str]| -> Vec<String> {
            lines.iter().map(|line| (*line).to_owned()).collect()
        };
        assert_eq!(settings(&lines(&["b = 4"])).expect("known").params.b, 4.0);
        assert!(settings(&[]).is_some());
        for unknown in ["hold_wait_s=1", "b=x", "b"] {
            assert!(settings(&lines(&["b=4", unknown])).is_none(), "{unknown}");
        }
    }
}
