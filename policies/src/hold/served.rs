//! Which sessions does each node's cache serve now, and is there room for one more?
//!
//! Past the point where the contexts of all live sessions exceed the pools, each turn pushes out
//! what the next one needs, and nobody is served from cache any more. So a session belongs to the
//! working set of a node or waits: a member's next turns find its context there, and a newcomer
//! enters where the contexts of all members and its own fit. A member makes room once it has been
//! silent for a while; where members have outgrown a pool, the one that was silent for longest
//! leaves.
//!
//! Contexts are counted in blocks of 512 tokens, those that several sessions share once a node.

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
    node: u64,
    /// What of its context counts.
    footprint: Footprint,
    running: u32,
    last_ms: f64,
}

/// What the members on one node have.
#[derive(Debug, Default)]
struct OnNode {
    members: usize,
    /// Members that use each named block.
    users: HashMap<u64, u32>,
    nameless: u64,
    /// Members without a running turn, by the bits of when it ended: times are not negative.
    silent: BTreeSet<(u64, SessionKey)>,
}

impl OnNode {
    fn blocks(&self) -> u64 {
        self.users.len() as u64 + self.nameless
    }

    /// Blocks that a newcomer would add.
    fn added(&self, footprint: &Footprint) -> u64 {
        let is_new = |block: &&u64| !self.users.contains_key(block);
        footprint.blocks.iter().filter(is_new).count() as u64 + footprint.nameless()
    }

    /// Blocks that would be free without this member.
    fn own(&self, footprint: &Footprint) -> u64 {
        let is_own = |block: &&u64| self.users.get(block) == Some(&1);
        footprint.blocks.iter().filter(is_own).count() as u64 + footprint.nameless()
    }

    fn count(&mut self, blocks: &[u64], nameless: u64) {
        for block in blocks {
            *self.users.entry(*block).or_default() += 1;
        }
        self.nameless += nameless;
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

/// Sessions whose contexts are meant to stay in the pools, each on its node.
#[derive(Debug, Default)]
pub struct Served {
    members: HashMap<SessionKey, Member>,
    nodes: HashMap<u64, OnNode>,
}

impl Served {
    /// Blocks of all members.
    pub fn blocks(&self) -> u64 {
        self.nodes.values().map(OnNode::blocks).sum()
    }

    /// Blocks of a node's members.
    pub fn blocks_on(&self, node: u64) -> u64 {
        self.nodes.get(&node).map_or(0, OnNode::blocks)
    }

    /// Members.
    pub fn len(&self) -> usize {
        self.members.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.members.is_empty()
    }

    /// The node that serves a session; none where it is no member.
    pub fn node_of(&self, session: SessionKey) -> Option<u64> {
        Some(self.members.get(&session)?.node)
    }

    /// A session's turn begins: it is a member on this node from now on, with this context.
    pub fn begin(&mut self, now_ms: f64, session: SessionKey, node: u64, footprint: Footprint) {
        if !self.members.contains_key(&session) {
            while self.members.len() >= MEMBERS_MAX && self.expel_one() {}
        }
        let running = match self.members.get(&session).map(|before| before.node) {
            Some(old) if old == node => self.grow(session, &footprint),
            Some(_) => {
                let before = self.remove(session);
                self.enter(node, &footprint);
                before.map_or(0, |before| before.running)
            }
            None => {
                self.enter(node, &footprint);
                0
            }
        };
        let member = Member {
            node,
            footprint,
            running: running + 1,
            last_ms: now_ms,
        };
        self.members.insert(session, member);
    }

    /// A turn that has begun goes to this node after all, and its session with it.
    pub fn move_to(&mut self, session: SessionKey, node: u64) {
        if self.node_of(session).is_some_and(|old| old != node)
            && let Some(mut member) = self.remove(session)
        {
            self.enter(node, &member.footprint);
            member.node = node;
            self.members.insert(session, member);
        }
    }

    /// A session's turn has ended.
    pub fn end(&mut self, now_ms: f64, session: SessionKey) {
        let Some(member) = self.members.get_mut(&session) else {
            return;
        };
        member.running = member.running.saturating_sub(1);
        member.last_ms = now_ms.max(0.0);
        if member.running == 0 {
            let on = self.nodes.entry(member.node).or_default();
            on.silent.insert((member.last_ms.to_bits(), session));
        }
    }

    /// Whether a newcomer's context fits on a node whose members may take so many blocks, once those
    /// have left that were silent for so long. One that fits nowhere is served alone: nobody could
    /// ever make room for it.
    pub fn fits(
        &self,
        now_ms: f64,
        (node, blocks_max): (u64, u64),
        footprint: &Footprint,
        patience_ms: f64,
    ) -> bool {
        let Some(on) = self.nodes.get(&node) else {
            return true;
        };
        let mut taken = on.blocks() + on.added(footprint);
        let mut left = on.members;
        for (since_bits, session) in &on.silent {
            if taken <= blocks_max || now_ms - f64::from_bits(*since_bits) < patience_ms {
                break;
            }
            if let Some(member) = self.members.get(session) {
                taken = taken.saturating_sub(on.own(&member.footprint));
            }
            left -= 1;
        }
        taken <= blocks_max || left == 0
    }

    /// Members of a node leave, the longest silent first, until the others' blocks are no more than
    /// these or all of them have running turns.
    pub fn shrink(&mut self, node: u64, blocks_max: u64) {
        while self.blocks_on(node) > blocks_max {
            let oldest = self.nodes.get(&node).and_then(|on| on.silent.first());
            let Some((_, session)) = oldest.copied() else {
                return;
            };
            self.remove(session);
        }
    }

    /// All members leave that have been silent for so long.
    pub fn expel_silent(&mut self, now_ms: f64, patience_ms: f64) {
        while self
            .longest_silent()
            .is_some_and(|(since_ms, _)| now_ms - since_ms >= patience_ms)
            && self.expel_one()
        {}
    }

    /// The member that has been silent for longest leaves; false where all have running turns.
    pub fn expel_one(&mut self) -> bool {
        let longest = self.longest_silent();
        longest.is_some_and(|(_, session)| self.remove(session).is_some())
    }

    /// Who has been silent for longest, and since when.
    pub fn longest_silent(&self) -> Option<(f64, SessionKey)> {
        let first = self.nodes.values().filter_map(|on| on.silent.first());
        let (bits, session) = first.min()?;
        Some((f64::from_bits(*bits), *session))
    }

    /// A turn shares nearly all of its context with the one before: only the ends are counted anew.
    /// Answers how many turns of the session run.
    fn grow(&mut self, session: SessionKey, footprint: &Footprint) -> u32 {
        let Some(before) = self.members.get(&session) else {
            return 0;
        };
        let on = self.nodes.entry(before.node).or_default();
        if before.running == 0 {
            on.silent.remove(&(before.last_ms.to_bits(), session));
        }
        let (old, new) = (&before.footprint.blocks, &footprint.blocks);
        let shared = old.iter().zip(new).take_while(|(a, b)| a == b).count();
        on.count(&new[shared..], footprint.nameless());
        on.uncount(&old[shared..], before.footprint.nameless());
        before.running
    }

    fn enter(&mut self, node: u64, footprint: &Footprint) {
        let on = self.nodes.entry(node).or_default();
        on.members += 1;
        on.count(&footprint.blocks, footprint.nameless());
    }

    fn remove(&mut self, session: SessionKey) -> Option<Member> {
        let member = self.members.remove(&session)?;
        if let Some(on) = self.nodes.get_mut(&member.node) {
            on.silent.remove(&(member.last_ms.to_bits(), session));
            on.uncount(&member.footprint.blocks, member.footprint.nameless());
            on.members -= 1;
            if on.members == 0 {
                self.nodes.remove(&member.node);
            }
        }
        Some(member)
    }
}
