//! What does it mean for requests, tiers and events that the model has done something?

use cache_index::block::BLOCK_TOKENS;
use simulate::engine::Happened;
use simulate::engine::tiers::Tier;

use super::super::changes::Changes;
use super::{Progress, Request, State};

impl State {
    /// Lets the model come so far, and carries out what it says.
    pub(super) fn move_to(&mut self, at_ms: f64, changes: &mut Changes, ended: &mut Vec<Request>) {
        loop {
            let happened = self.model.advance(at_ms);
            if happened.is_empty() {
                break;
            }
            for happened in happened {
                self.carry_out(at_ms, happened, changes, ended);
            }
        }
    }

    fn carry_out(
        &mut self,
        now_ms: f64,
        happened: Happened,
        changes: &mut Changes,
        ended: &mut Vec<Request>,
    ) {
        match happened {
            Happened::Stored {
                path,
                from,
                to,
                tier,
                ..
            } => {
                for number in &path[from..to] {
                    if let (Tier::Shared, Some(shelf)) = (tier, &self.shelf) {
                        shelf.stored(*number, &self.post);
                    }
                    changes.stored(tier, self.blocks.stored(*number, tier));
                }
            }
            Happened::Removed { blocks, tier, .. } => {
                for number in blocks {
                    match (tier, &self.shelf) {
                        // Whoever told of it takes it back: this node too, by its own post.
                        (Tier::Shared, Some(shelf)) => shelf.removed(number),
                        _ => changes.removed(tier, self.blocks.removed(number, tier)),
                    }
                }
            }
            Happened::FirstToken {
                id,
                cached_tokens,
                fetched_tokens,
                ..
            } => self.first_token(id, cached_tokens, fetched_tokens),
            Happened::Computed {
                at_ms,
                id,
                cached_tokens,
                fetched_tokens,
                took_ms,
            } => {
                self.computed_here(id, cached_tokens, fetched_tokens);
                ended.extend(self.hand_over(at_ms, id, took_ms));
            }
            Happened::Finished { id, .. } => ended.extend(self.finished(now_ms, id)),
        }
    }

    fn first_token(&mut self, id: u32, cached_tokens: u32, fetched_tokens: u32) {
        self.counts.requests += 1;
        let handed = self.requests.get(&id).and_then(|r| r.handed_cached);
        match handed {
            None => self.computed_here(id, cached_tokens, fetched_tokens),
            Some(cached_tokens) => self.begins(id, cached_tokens),
        }
    }

    /// This node has computed a prompt, for itself or for another one.
    fn computed_here(&mut self, id: u32, cached_tokens: u32, fetched_tokens: u32) {
        let block = u32::try_from(BLOCK_TOKENS).unwrap_or(1);
        // Whole blocks alone are read from a cache.
        let cached_tokens = cached_tokens / block * block;
        let Some(request) = self.requests.get(&id) else {
            return;
        };
        self.counts.prompt_tokens += u64::from(request.prompt_tokens);
        self.counts.cached_tokens += u64::from(cached_tokens);
        self.counts.fetched_tokens += u64::from(fetched_tokens);
        self.counts.one_cache_tokens += request.one_cache_tokens;
        self.begins(id, cached_tokens);
    }

    /// A first token is there.
    fn begins(&self, id: u32, cached_tokens: u32) {
        if let Some(request) = self.requests.get(&id) {
            request.progress.send_replace(Progress {
                cached_tokens,
                tokens: 1,
            });
        }
    }

    /// An answer is complete: its blocks stay as the prompt's do, since the next turn repeats them.
    fn finished(&mut self, now_ms: f64, id: u32) -> Option<Request> {
        let request = self.requests.remove(&id)?;
        self.counts.answer_tokens += u64::from(request.answer_tokens);
        if request.path.len() > request.prompt_blocks {
            self.model.keep(now_ms, &request.path);
        }
        if let Some(cache) = &self.one_cache {
            cache.see(&self.blocks.hashes(&request.path));
        }
        request
            .progress
            .send_modify(|progress| progress.tokens = request.answer_tokens);
        Some(request)
    }

    /// Tells the requests under way how many tokens their answers have.
    pub(super) fn tell_tokens(&self) {
        for (id, request) in &self.requests {
            let Some(tokens) = self.model.answered_tokens(*id) else {
                continue;
            };
            request.progress.send_if_modified(|progress| {
                // The first one is told by itself.
                let more = progress.tokens > 0 && tokens > progress.tokens;
                if more {
                    progress.tokens = tokens;
                }
                more
            });
        }
    }
}
