//! What does the node hold, by its own events, counted in the simplest way?
//!
//! Every batch is kept with the moment it was heard, and the account of any moment is made anew from
//! the beginning: a block is held while it was stored more often than it was removed. Names are
//! vLLM's; a prompt's blocks are found by their parents and tokens. Nothing is shared with the
//! gateway's index but the reader of the wire format.

use std::collections::{HashMap, HashSet};
use std::fmt::Write as _;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use cache_index::block::BLOCK_TOKENS;
use cache_index::event::{EngineHash, EventBatch, ExtraKey, KvEvent};
use cache_index::wire::decode_batch;
use zeromq::{Socket, SocketRecv, SubSocket, ZmqMessage};

use crate::error::LoadError;

/// The events endpoint is bound before the API answers.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// A batch and when it was heard.
#[derive(Clone)]
pub(super) struct Heard {
    at: Instant,
    payload: Bytes,
    batch: EventBatch,
}

/// What one life of a node has said.
#[derive(Clone, Default)]
pub(super) struct History {
    heard: Vec<Heard>,
    /// Why it cannot be believed, if so.
    pub(super) broken: Option<String>,
}

/// Listens to one life of a node until it is dropped.
pub(super) struct Listener {
    history: Arc<Mutex<History>>,
    task: tokio::task::JoinHandle<()>,
}

impl Listener {
    pub(super) async fn connect(endpoint: &str) -> Result<Self, LoadError> {
        let trouble = |why: String| LoadError::program("the node's events", why);
        let mut socket = SubSocket::new();
        let connect = async {
            socket.subscribe("").await?;
            socket.connect(endpoint).await
        };
        tokio::time::timeout(CONNECT_TIMEOUT, connect)
            .await
            .map_err(|_| trouble("no connection".into()))?
            .map_err(|e| trouble(e.to_string()))?;
        let history = Arc::new(Mutex::new(History::default()));
        let writer = Arc::clone(&history);
        let task = tokio::spawn(async move {
            while let Ok(message) = socket.recv().await {
                let mut history = writer.lock().unwrap_or_else(PoisonError::into_inner);
                history.hear(&message);
            }
        });
        Ok(Self { history, task })
    }

    pub(super) fn history(&self) -> History {
        let history = self.history.lock();
        history.unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl History {
    fn hear(&mut self, message: &ZmqMessage) {
        let frames: Vec<_> = message.iter().collect();
        let [_topic, seq, payload] = frames.as_slice() else {
            self.broken = Some(format!("a message of {} frames", frames.len()));
            return;
        };
        let seq = <[u8; 8]>::try_from(&seq[..]).map(u64::from_be_bytes).ok();
        if seq != Some(self.heard.len() as u64) {
            let wanted = self.heard.len();
            self.broken = Some(format!("batch {seq:?} came where {wanted} was due"));
        }
        match decode_batch(payload) {
            Ok(batch) => self.heard.push(Heard {
                at: Instant::now(),
                payload: Bytes::clone(payload),
                batch,
            }),
            Err(error) => self.broken = Some(error.to_string()),
        }
    }

    pub(super) fn batches(&self) -> usize {
        self.heard.len()
    }

    /// Every batch as it came, one a line in hexadecimal digits.
    pub(super) fn payloads(&self) -> String {
        let mut lines = String::new();
        for heard in &self.heard {
            // Writing to a String cannot fail.
            let _ = writeln!(lines, "{:x}", heard.payload);
        }
        lines
    }

    /// Blocks that were told of as stored, and as removed.
    pub(super) fn told(&self) -> (usize, usize) {
        let events = self.heard.iter().flat_map(|heard| &heard.batch.events);
        events.fold((0, 0), |(stored, removed), event| match event {
            KvEvent::Stored { block_hashes, .. } => (stored + block_hashes.len(), removed),
            KvEvent::Removed { block_hashes, .. } => (stored, removed + block_hashes.len()),
            KvEvent::Cleared => (stored, removed),
        })
    }

    /// The account of now.
    pub(super) fn account(&self) -> Account {
        self.until(None)
    }

    /// The account of a moment.
    fn until(&self, moment: Option<Instant>) -> Account {
        let mut account = Account::default();
        let heard = self.heard.iter();
        for heard in heard.take_while(|heard| moment.is_none_or(|moment| heard.at <= moment)) {
            account.apply(&heard.batch);
        }
        account
    }

    /// How much of a prompt was held between two moments.
    pub(super) fn span(&self, salt: &str, prompt: &[u32], from: Instant, to: Instant) -> Span {
        let mut account = self.until(Some(from));
        let at_start = account.leading(Some(salt), prompt);
        let heard_at_start = self.heard.iter().filter(|heard| heard.at <= from).count();
        let mut least = at_start;
        let later = self.heard.iter().filter(|heard| heard.at > from);
        for heard in later.take_while(|heard| heard.at <= to) {
            account.apply(&heard.batch);
            least = least.min(account.leading(Some(salt), prompt));
        }
        Span {
            at_start,
            least,
            batches: heard_at_start,
        }
    }
}

/// Tokens of a prompt that were held.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Span {
    /// When it was sent.
    pub(super) at_start: usize,
    /// The least until its answer came.
    pub(super) least: usize,
    /// Batches that had been heard when it was sent.
    pub(super) batches: usize,
}

/// What makes a block: the one before it, the salt of a first one, its tokens.
type Content = (Option<EngineHash>, Option<Box<str>>, Vec<u32>);

/// What is held.
#[derive(Default)]
pub(super) struct Account {
    names: HashMap<Content, EngineHash>,
    /// Salt and tokens of each block's chain from its beginning.
    chains: HashMap<EngineHash, (Option<Box<str>>, Vec<u32>)>,
    copies: HashMap<EngineHash, usize>,
    block_tokens: usize,
}

impl Account {
    fn apply(&mut self, batch: &EventBatch) {
        for event in &batch.events {
            match event {
                KvEvent::Cleared => self.copies.clear(),
                KvEvent::Removed { block_hashes, .. } => {
                    for name in block_hashes {
                        if let Some(copies) = self.copies.get_mut(name) {
                            *copies = copies.saturating_sub(1);
                        }
                    }
                }
                KvEvent::Stored { .. } => self.store(event),
            }
        }
    }

    fn store(&mut self, event: &KvEvent) {
        let KvEvent::Stored {
            block_hashes,
            parent,
            token_ids,
            block_size,
            extra_keys,
            ..
        } = event
        else {
            return;
        };
        self.block_tokens = *block_size;
        let mut before = parent.clone();
        let mut tokens = token_ids.chunks(*block_size);
        for (at, name) in block_hashes.iter().enumerate() {
            let own = extra_keys.of(at).iter().find_map(|key| match key {
                ExtraKey::Text(text) => Some(text.clone()),
                ExtraKey::Other => None,
            });
            let tokens = tokens.next().unwrap_or_default();
            let chain = before.as_ref().and_then(|before| self.chains.get(before));
            let mut chain = chain.cloned().unwrap_or_else(|| (own.clone(), Vec::new()));
            chain.1.extend(tokens);
            self.names
                .insert((before, own, tokens.to_vec()), name.clone());
            self.chains.insert(name.clone(), chain);
            *self.copies.entry(name.clone()).or_default() += 1;
            before = Some(name.clone());
        }
    }

    /// Tokens in a block; at least 1.
    pub(super) fn block_tokens(&self) -> usize {
        self.block_tokens.max(1)
    }

    fn holds(&self, name: &EngineHash) -> bool {
        self.copies.get(name).is_some_and(|copies| *copies > 0)
    }

    /// Names of a prompt's full blocks, as far as they were ever told.
    fn chain(&self, salt: Option<&str>, prompt: &[u32]) -> Vec<EngineHash> {
        let mut chain: Vec<EngineHash> = Vec::new();
        for tokens in prompt.chunks_exact(self.block_tokens.max(1)) {
            let salt = salt.filter(|_| chain.is_empty()).map(Box::from);
            let content = (chain.last().cloned(), salt, tokens.to_vec());
            match self.names.get(&content) {
                Some(name) => chain.push(name.clone()),
                None => break,
            }
        }
        chain
    }

    /// Leading tokens of a prompt that are held, in whole blocks.
    pub(super) fn leading(&self, salt: Option<&str>, prompt: &[u32]) -> usize {
        let chain = self.chain(salt, prompt);
        chain.iter().take_while(|name| self.holds(name)).count() * self.block_tokens
    }

    /// Copies of the block in which a prompt's first so many tokens end.
    pub(super) fn copies_at(&self, salt: &str, prompt: &[u32], tokens: usize) -> usize {
        let chain = self.chain(Some(salt), &prompt[..tokens]);
        let last = chain.get((tokens / self.block_tokens.max(1)).wrapping_sub(1));
        last.map_or(0, |name| self.copies.get(name).copied().unwrap_or(0))
    }

    /// Held blocks of 16 tokens, each counted once for a salt: two blocks of the node may begin with
    /// the same one. Those without a salt are counted too: no prompt behind the gateway is credited
    /// them, and the node holds them all the same.
    pub(super) fn blocks(&self) -> usize {
        let names = self.copies.keys().filter(|name| self.holds(name));
        let mut held = HashSet::new();
        for (salt, tokens) in names.filter_map(|name| self.chains.get(name)) {
            let begin = tokens.len().saturating_sub(self.block_tokens);
            let ends = (begin + BLOCK_TOKENS..=tokens.len()).step_by(BLOCK_TOKENS);
            held.extend(ends.map(|end| (salt, &tokens[..end])));
        }
        held.len()
    }

    /// The salt of the chain that begins with this prompt's first block; the first that is not
    /// among `others`.
    pub(super) fn salt_of(&self, prompt: &[u32], others: &[Box<str>]) -> Option<Box<str>> {
        let first = prompt.get(..self.block_tokens)?;
        let roots = self
            .names
            .keys()
            .filter(|(before, _, tokens)| before.is_none() && tokens == first);
        let mut salts = roots.filter_map(|(_, salt, _)| salt.clone());
        salts.find(|salt| !others.contains(salt))
    }
}

#[cfg(test)]
mod tests {
    use cache_index::event::{ExtraKeys, GroupKind};

    use super::*;

    fn stored(
        parent: Option<u64>,
        names: &[u64],
        tokens: &[u32],
        salt: Option<&str>,
    ) -> EventBatch {
        let event = KvEvent::Stored {
            block_hashes: names.iter().map(|name| EngineHash::Int(*name)).collect(),
            parent: parent.map(EngineHash::Int),
            token_ids: tokens.to_vec(),
            block_size: 32,
            medium: None,
            lora_name: None,
            extra_keys: salt.map_or_else(ExtraKeys::none, ExtraKeys::salt),
            group_idx: Some(0),
            group_kind: GroupKind::Full,
        };
        EventBatch {
            events: vec![event],
            ..EventBatch::default()
        }
    }

    /// Catches a count that differs from the index's where two blocks of the node begin with the same
    /// 16 tokens, and credit that outlives the last copy.
    #[test]
    fn blocks_are_counted_as_the_index_counts_them() {
        let mut account = Account::default();
        let first: Vec<u32> = (0..64).collect();
        account.apply(&stored(None, &[1, 2], &first, Some("s")));
        let mut other: Vec<u32> = (32..64).collect();
        other[20] = 7;
        account.apply(&stored(Some(1), &[3], &other, None));
        assert_eq!(account.blocks(), 5);
        account.apply(&stored(Some(1), &[2], &first[32..], None));
        for left in [64, 32] {
            account.apply(&EventBatch {
                events: vec![KvEvent::Removed {
                    block_hashes: vec![EngineHash::Int(2)],
                    medium: None,
                    group_idx: Some(0),
                }],
                ..EventBatch::default()
            });
            assert_eq!(account.leading(Some("s"), &first), left);
        }
        assert_eq!(account.leading(Some("t"), &first), 0);
        assert_eq!(account.blocks(), 4);
        // The same tokens again without a salt, as of a request that went past the gateway.
        account.apply(&stored(None, &[5, 6], &first, None));
        assert_eq!(account.leading(Some("s"), &first), 32);
        assert_eq!(account.blocks(), 8);
    }
}
