//! llm-d's scheduler: a weighted sum of scores between 0 and 1.
//!
//! `prefix · matched / all blocks + queue · (longest − own queue) / (longest − shortest) +
//! cache · (1 − share of the pool in use)`; the greatest is chosen. After the scorers
//! `prefix-cache-scorer`, `queue-scorer` and `kv-cache-utilization-scorer` of the Gateway API
//! Inference Extension, which llm-d configures with weights 3, 2 and 2 (llm-d.ai,
//! architecture/core/router/epp/scheduling, v0.8). Queues and pools are scraped, so they are as
//! old as the last scrape; which blocks a node holds is known from its KV events at once (llm-d's
//! precise prefix scorer). It is written in Go: no crate to call.

use super::choice::Ties;
use crate::engine::Node;
use crate::router::{Answer, Ask, Router};
use crate::scenario::Fleet;

/// Metrics are scraped this often, ms: between the extension's 50 ms and a loaded endpoint picker.
const SCRAPE_MS: f64 = 100.0;

/// The scorers' weights.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Weights {
    /// Of the prompt's share that a node holds.
    pub prefix: f64,
    /// Of a short queue.
    pub queue: f64,
    /// Of an empty pool.
    pub cache: f64,
}

#[derive(Clone, Copy, Debug)]
struct Scraped {
    waiting: f64,
    pool_used: f64,
}

/// llm-d's scheduler.
pub struct LlmD {
    weights: Weights,
    scraped_ms: f64,
    scraped: Vec<Scraped>,
    ties: Ties,
}

impl LlmD {
    /// With these weights.
    pub fn new(fleet: &Fleet, weights: Weights) -> Self {
        Self {
            weights,
            scraped_ms: f64::NEG_INFINITY,
            scraped: Vec::new(),
            ties: Ties::new(fleet.seed),
        }
    }

    fn scrape(&mut self, now_ms: f64, nodes: &[Node]) {
        if now_ms - self.scraped_ms < SCRAPE_MS {
            return;
        }
        self.scraped_ms = now_ms;
        let scrape = |node: &Node| Scraped {
            waiting: node.waiting() as f64,
            pool_used: node.pool_used(),
        };
        self.scraped = nodes.iter().map(scrape).collect();
    }

    fn score(&self, ask: &Ask<'_>, number: usize, node: &Node, queues: (f64, f64)) -> f64 {
        let Scraped { waiting, pool_used } = self.scraped[number];
        let (shortest, longest) = queues;
        let queue = if longest > shortest {
            (longest - waiting) / (longest - shortest)
        } else {
            1.0
        };
        let blocks = ask.blocks.len().max(1) as f64;
        self.weights.prefix * node.overlap(ask.blocks) as f64 / blocks
            + self.weights.queue * queue
            + self.weights.cache * (1.0 - pool_used)
    }
}

impl Router for LlmD {
    fn route(&mut self, now_ms: f64, ask: &Ask<'_>, nodes: &[Node]) -> Answer {
        self.scrape(now_ms, nodes);
        let waiting = self.scraped.iter().map(|s| s.waiting);
        let shortest = waiting.clone().fold(f64::INFINITY, f64::min);
        let longest = waiting.fold(0.0, f64::max);
        let score = |n: usize| self.score(ask, n, &nodes[n], (shortest, longest));
        let scores: Vec<f64> = (0..nodes.len()).map(score).collect();
        Answer::Send(self.ties.least(0..nodes.len(), |n| -scores[n]))
    }
}
