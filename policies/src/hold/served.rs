//! Which sessions does the fleet's cache serve now, and is there room for one more?
//!
//! Past the point where the contexts of all live sessions exceed the pools, each turn pushes out
//! what the next one needs, and nobody is served from cache any more. So a session belongs to the
//! working set or waits: a member's next turns find its context, and a newcomer enters when the
//! contexts of all members and its own fit. A member leaves when it has been silent for longer than
//! nearly all pauses between turns ([`Pauses`]), or, where members have outgrown the pools, when it
//! has been silent for longest.
//!
//! Contexts are counted in blocks of 512 tokens, those that several sessions share once.

use std::collections::{BTreeSet, HashMap};

use crate::view::SessionKey;

/// Tokens in a block of the working set.
pub const BLOCK_TOKENS: u64 = 512;
/// Members at most; beyond it the one that was silent for longest leaves.
const MEMBERS_MAX: usize = 100_000;

/// What a turn's prompt takes.
#[derive(Clone, Debug, Default)]
pub struct Footprint {
    /// A name for each full 512 tokens, of everything up to there; empty where they are not known.
    pub blocks: Vec<u64>,
    /// All tokens of the prompt.
    pub tokens: u64,
}

impl Footprint {
    /// Blocks that nobody else can share, because they have no names.
    fn nameless(&self) -> u64 {
        if self.blocks.is_empty() {
            self.tokens.div_ceil(BLOCK_TOKENS)
        } else {
            0
        }
    }
}

#[derive(Debug)]
struct Member {
    /// What of its context counts.
    footprint: Footprint,
    running: u32,
    last_ms: f64,
    tenant: u64,
}

/// Sessions whose contexts are meant to stay in the pools.
#[derive(Debug, Default)]
pub struct Served {
    members: HashMap<SessionKey, Member>,
    /// Members that use each named block.
    users: HashMap<u64, u32>,
    nameless: u64,
    /// Members without a running turn, by the bits of when it ended: times are not negative.
    silent: BTreeSet<(u64, SessionKey)>,
    by_tenant: HashMap<u64, u64>,
    pauses: Pauses,
}

impl Served {
    /// Blocks of all members.
    pub fn blocks(&self) -> u64 {
        self.users.len() as u64 + self.nameless
    }

    /// Members.
    pub fn len(&self) -> usize {
        self.members.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.members.is_empty()
    }

    /// Members of a tenant.
    pub fn members_of(&self, tenant: u64) -> u64 {
        self.by_tenant.get(&tenant).copied().unwrap_or(0)
    }

    /// Whether a session is a member.
    pub fn holds(&self, session: SessionKey) -> bool {
        self.members.contains_key(&session)
    }

    /// Blocks that a newcomer would add.
    pub fn added(&self, footprint: &Footprint) -> u64 {
        let is_new = |block: &&u64| !self.users.contains_key(block);
        footprint.blocks.iter().filter(is_new).count() as u64 + footprint.nameless()
    }

    /// A session's turn begins: it is a member from now on, with this context.
    pub fn begin(
        &mut self,
        now_ms: f64,
        (session, tenant): (SessionKey, u64),
        footprint: Footprint,
    ) {
        if let Some(member) = self.members.get(&session) {
            if member.running == 0 {
                let pause_ms = now_ms - member.last_ms;
                self.pauses.note(pause_ms);
                self.silent.remove(&(member.last_ms.to_bits(), session));
            }
        } else {
            while self.members.len() >= MEMBERS_MAX && self.expel_one() {}
        }
        let before = self.members.remove(&session);
        let running = before.as_ref().map_or(0, |before| before.running);
        if before.is_none() {
            *self.by_tenant.entry(tenant).or_default() += 1;
        }
        // A turn shares nearly all of its context with the one before.
        let before = before.map(|before| before.footprint).unwrap_or_default();
        let shared = before.blocks.iter().zip(&footprint.blocks);
        let shared = shared.take_while(|(old, new)| old == new).count();
        for block in &footprint.blocks[shared..] {
            *self.users.entry(*block).or_default() += 1;
        }
        self.nameless += footprint.nameless();
        self.uncount(&before.blocks[shared..], before.nameless());
        let member = Member {
            footprint,
            running: running + 1,
            last_ms: now_ms,
            tenant,
        };
        self.members.insert(session, member);
    }

    /// A session's turn has ended.
    pub fn end(&mut self, now_ms: f64, session: SessionKey) {
        let Some(member) = self.members.get_mut(&session) else {
            return;
        };
        member.running = member.running.saturating_sub(1);
        member.last_ms = now_ms.max(0.0);
        if member.running == 0 {
            self.silent.insert((member.last_ms.to_bits(), session));
        }
    }

    /// How long a member may be silent before it has to make room, in milliseconds.
    pub fn patience_ms(&self, quantile: f64) -> f64 {
        self.pauses.quantile_ms(quantile)
    }

    /// The member that has been silent for longest leaves, if it has been for so long.
    pub fn expel_silent(&mut self, now_ms: f64, patience_ms: f64) -> bool {
        match self.longest_silent() {
            Some(since_ms) if now_ms - since_ms >= patience_ms => self.expel_one(),
            _ => false,
        }
    }

    /// Since when the member that has been silent for longest has been.
    pub fn longest_silent(&self) -> Option<f64> {
        self.silent.first().map(|(bits, _)| f64::from_bits(*bits))
    }

    /// The member that has been silent for longest leaves; false where all have running turns.
    pub fn expel_one(&mut self) -> bool {
        let Some((_, session)) = self.silent.pop_first() else {
            return false;
        };
        if let Some(member) = self.members.remove(&session) {
            let Footprint { blocks, .. } = &member.footprint;
            self.uncount(blocks, member.footprint.nameless());
            if let Some(count) = self.by_tenant.get_mut(&member.tenant) {
                *count -= 1;
                if *count == 0 {
                    self.by_tenant.remove(&member.tenant);
                }
            }
        }
        true
    }

    fn uncount(&mut self, blocks: &[u64], nameless: u64) {
        for block in blocks {
            if let Some(count) = self.users.get_mut(block) {
                *count -= 1;
                if *count == 0 {
                    self.users.remove(block);
                }
            }
        }
        self.nameless -= nameless;
    }
}

/// The pauses between the turns of sessions, as a histogram that forgets.
#[derive(Debug)]
pub struct Pauses {
    /// How many pauses were below 2^(i/2) times the shortest.
    counts: [f64; Pauses::CLASSES],
    sum: f64,
}

impl Default for Pauses {
    fn default() -> Self {
        Self {
            counts: [0.0; Self::CLASSES],
            sum: 0.0,
        }
    }
}

impl Pauses {
    const CLASSES: usize = 40;
    /// The end of the first class: 0.1 s. The last one begins at about 20 hours.
    const SHORTEST_MS: f64 = 100.0;
    /// What is left of earlier pauses after a new one.
    const KEEP: f64 = 0.999;
    /// Below so many pauses the default holds.
    const ENOUGH: f64 = 30.0;
    /// A person reads an answer and writes the next question in about two minutes.
    const DEFAULT_MS: f64 = 120_000.0;

    /// Takes one pause in.
    pub fn note(&mut self, pause_ms: f64) {
        let steps = (pause_ms.max(0.0) / Self::SHORTEST_MS).max(1.0).log2() * 2.0;
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a small number that is not negative"
        )]
        let class = (steps.ceil() as usize).min(Self::CLASSES - 1);
        for count in &mut self.counts {
            *count *= Self::KEEP;
        }
        self.counts[class] += 1.0;
        self.sum = self.sum * Self::KEEP + 1.0;
    }

    /// The pause that this share of all does not exceed, to a factor of the square root of two.
    pub fn quantile_ms(&self, quantile: f64) -> f64 {
        if self.sum < Self::ENOUGH {
            return Self::DEFAULT_MS;
        }
        let mut below = 0.0;
        let mut ms = Self::SHORTEST_MS;
        for count in &self.counts {
            below += count;
            if below >= quantile * self.sum {
                break;
            }
            ms *= std::f64::consts::SQRT_2;
        }
        ms
    }
}
