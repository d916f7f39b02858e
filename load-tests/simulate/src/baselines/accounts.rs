//! What a gateway knows of the nodes from what it sent and what came back.

use std::collections::HashMap;
use std::sync::Arc;

use crate::engine::pool::NumberMap;

/// One request under way.
struct Open {
    node: usize,
    uncached_tokens: f64,
    prompt_tokens: f64,
    blocks: Arc<[u32]>,
    has_begun: bool,
}

/// Requests under way, by node.
pub(super) struct Accounts {
    open: HashMap<u32, Open>,
    nodes: Vec<Account>,
}

/// One node's account.
#[derive(Clone, Default)]
pub(super) struct Account {
    /// Requests sent and not ended.
    pub(super) requests: usize,
    /// Requests sent and without a first token.
    pub(super) unbegun: usize,
    /// Their prompts' tokens that were expected not to be cached.
    pub(super) uncached_tokens: f64,
    /// All prompt tokens of requests not ended.
    pub(super) prompt_tokens: f64,
    /// Blocks of requests not ended, and how many of those hold each.
    active: NumberMap<u32, u32>,
}

impl Account {
    /// Different blocks of requests under way.
    pub(super) fn active_blocks(&self) -> usize {
        self.active.len()
    }

    /// Blocks of this path that no request under way holds.
    pub(super) fn inactive_of(&self, path: &[u32]) -> usize {
        path.iter().filter(|b| !self.active.contains_key(b)).count()
    }
}

impl Accounts {
    pub(super) fn new(nodes: usize) -> Self {
        Self {
            open: HashMap::new(),
            nodes: vec![Account::default(); nodes],
        }
    }

    pub(super) fn node(&self, node: usize) -> &Account {
        &self.nodes[node]
    }

    /// Counts a request at its dispatch. Give an empty path where blocks do not matter.
    pub(super) fn sent(
        &mut self,
        id: u32,
        node: usize,
        prompt_tokens: u32,
        uncached: f64,
        blocks: &[u32],
    ) {
        let account = &mut self.nodes[node];
        account.requests += 1;
        account.unbegun += 1;
        account.uncached_tokens += uncached;
        account.prompt_tokens += f64::from(prompt_tokens);
        for &block in blocks {
            *account.active.entry(block).or_insert(0) += 1;
        }
        let open = Open {
            node,
            uncached_tokens: uncached,
            prompt_tokens: f64::from(prompt_tokens),
            blocks: Arc::from(blocks),
            has_begun: false,
        };
        self.open.insert(id, open);
    }

    pub(super) fn first_token(&mut self, id: u32) {
        if let Some(open) = self.open.get_mut(&id) {
            begin(&mut self.nodes[open.node], open);
        }
    }

    pub(super) fn finished(&mut self, id: u32) {
        let Some(mut open) = self.open.remove(&id) else {
            return;
        };
        let account = &mut self.nodes[open.node];
        begin(account, &mut open);
        account.requests -= 1;
        account.prompt_tokens -= open.prompt_tokens;
        for block in open.blocks.iter() {
            if let Some(count) = account.active.get_mut(block) {
                *count -= 1;
                if *count == 0 {
                    account.active.remove(block);
                }
            }
        }
    }
}

fn begin(account: &mut Account, open: &mut Open) {
    if !open.has_begun {
        open.has_begun = true;
        account.unbegun -= 1;
        account.uncached_tokens = (account.uncached_tokens - open.uncached_tokens).max(0.0);
    }
}
