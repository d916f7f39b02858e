//! The real client process over a scripted store. Catches a block that is not what was put, one that
//! somebody else put, a claim that outlives the block or the store, a question that is asked again and
//! again, and a client that dies, hangs or never comes and takes the tier with it.

use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::AtomicU32;

use super::mooncake::{Mooncake, MooncakeConfig};
use super::*;
use crate::kv::layout::{BlockLayout, HeadRange, KeyOrder, KvDtype};
use crate::kv::pool::Stored;
use crate::kv::prefix::{Content, LastUse};
use crate::kv::store::form::Form;

#[path = "../../../../tests/mooncake_twin/mod.rs"]
mod twin;
use twin::Twin;

impl Twin {
    /// Where an object lies.
    fn object(&self, key: &str) -> PathBuf {
        self.path().join("objects").join(key)
    }

    /// All objects.
    fn objects(&self) -> Vec<PathBuf> {
        let folder = fs::read_dir(self.path().join("objects"));
        let entries = folder.into_iter().flatten().flatten();
        entries.map(|entry| entry.path()).collect()
    }

    /// Has a call misbehave from now on.
    fn fault(&self, call: &str, fault: &str) {
        fs::write(self.path().join(format!("fault-{call}")), fault).expect("a file");
    }

    /// Ends that.
    fn mend(&self, call: &str) {
        fs::remove_file(self.path().join(format!("fault-{call}"))).expect("a fault");
    }

    /// How often a call was made.
    fn calls(&self, call: &str) -> usize {
        let calls = fs::read_to_string(self.path().join("calls")).unwrap_or_default();
        let wanted = |line: &&str| line.split(' ').nth(1) == Some(call);
        calls.lines().filter(wanted).count()
    }

    /// What the last client said of itself.
    fn set_up(&self) -> String {
        fs::read_to_string(self.path().join("setup")).unwrap_or_default()
    }
}

const TOKEN: u8 = 1;

fn hash(number: u32) -> BlockHash {
    let mut hash = [7; 16];
    hash[..4].copy_from_slice(&number.to_le_bytes());
    BlockHash(hash)
}

/// Block `number` of a chain that begins with block 1.
fn kept(number: u32) -> Kept {
    Kept {
        stored: Stored {
            content: Content {
                hash: hash(number),
                parent: None,
                tokens: [number; 16],
                salt: None,
            },
            parent_hash: (number > 1).then(|| hash(number - 1)),
        },
        depth: number,
        last_use: LastUse {
            wanted_ms: 1,
            tick: number.into(),
        },
    }
}

fn seal(token: u8) -> Seal {
    let layout = BlockLayout {
        dtype: KvDtype::F16,
        key_order: KeyOrder::Pairs,
        block_tokens: 16,
        layers: 2,
        kv_heads: 1,
        heads: HeadRange { first: 0, count: 1 },
        head_dim: 64,
    };
    Seal::new(
        [token; 32],
        &layout,
        (Form::Exact, layout.body_bytes()),
        [3; 32],
    )
}

fn body(number: u32) -> Vec<u8> {
    // Below 0x7c, so that every value is finite.
    let byte = |at: usize| (at as u32 * number % 0x7c) as u8;
    (0..seal(TOKEN).body_bytes()).map(byte).collect()
}

struct Node {
    tier: SharedTier,
    pid: Arc<AtomicU32>,
}

impl Node {
    /// A node whose client has not been waited for.
    fn starting(twin: &Twin, token: u8) -> Self {
        let config = MooncakeConfig {
            master: "127.0.0.1:50051".to_owned(),
            host: None,
            python: twin.python(),
            segment_bytes: 5 << 20,
            device: None,
        };
        let mut pid = Arc::default();
        let tier = SharedTier::start(seal(token), |bytes, ends| {
            let store = Mooncake::new(config, bytes, ends)?;
            pid = store.pid();
            Ok(Box::new(store))
        });
        Self {
            tier: tier.expect("a thread"),
            pid,
        }
    }

    fn new(twin: &Twin) -> Self {
        let mut node = Self::starting(twin, TOKEN);
        node.until("the store is reached", SharedTier::is_up);
        node
    }

    /// Polls until something holds; bodies that came meanwhile.
    fn until(&mut self, what: &str, holds: impl Fn(&SharedTier) -> bool) -> Vec<(u32, Vec<u8>)> {
        let deadline = Instant::now() + Duration::from_secs(60);
        let mut bodies = Vec::new();
        loop {
            for arrived in self.tier.poll(&|_| false) {
                let number = arrived.kept.depth;
                bodies.push((number, arrived.body().to_vec()));
                self.tier.give_back(arrived);
            }
            self.tier.told.check_integrity();
            if holds(&self.tier) {
                return bodies;
            }
            assert!(Instant::now() < deadline, "waited in vain: {what}");
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    fn idle(&mut self) -> Vec<(u32, Vec<u8>)> {
        self.until("nothing is on its way", |tier| !tier.is_busy())
    }

    fn put(&mut self, numbers: std::ops::RangeInclusive<u32>) {
        for number in numbers {
            let sent = self
                .tier
                .put(&kept(number), |to| to.copy_from_slice(&body(number)));
            assert!(sent, "block {number}");
        }
        self.idle();
    }

    /// Which leading blocks of the chain up to this one the store says it has.
    fn ask(&mut self, last: u32) -> u32 {
        let chain: Vec<_> = (1..=last).map(hash).collect();
        let known = self.known(&chain);
        if self.tier.ask(&chain[known..], Instant::now()) {
            self.idle();
        }
        self.known(&chain) as u32
    }

    fn known(&self, chain: &[BlockHash]) -> usize {
        let now = Instant::now();
        let held = chain.iter().take_while(|hash| self.tier.holds(**hash, now));
        held.count()
    }

    fn get(&mut self, numbers: std::ops::RangeInclusive<u32>) -> Vec<(u32, Vec<u8>)> {
        for number in numbers {
            assert!(self.tier.get(kept(number)), "block {number}");
        }
        self.idle()
    }

    /// Blocks that were told to be there, and blocks that were taken back, since the last call.
    fn told(&mut self) -> (Vec<u32>, Vec<u32>) {
        let (mut stored, mut removed) = (Vec::new(), Vec::new());
        let number = |hash: BlockHash| u32::from_le_bytes(*hash.0.first_chunk().expect("16 bytes"));
        for TierChange { tier, change } in self.tier.take_changes() {
            assert_eq!(tier, Tier::Shared);
            match change {
                Change::Stored(block) => stored.push(number(block.content.hash)),
                Change::Removed(hash) => removed.push(number(hash)),
            }
        }
        removed.sort_unstable();
        (stored, removed)
    }

    fn moved(&mut self) -> SharedMoved {
        let moved = self.tier.take_moved();
        SharedMoved {
            put_ms: 0.0,
            get_ms: 0.0,
            ..moved
        }
    }

    fn pid(&self) -> u32 {
        self.pid.load(Ordering::Relaxed)
    }
}

fn is_running(pid: u32) -> bool {
    let status = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    !status.is_empty() && !status.contains(") Z ")
}

#[test]
fn what_one_node_put_another_has_to_the_last_bit() {
    let Some(twin) = Twin::new() else { return };
    let mut a = Node::new(&twin);
    a.put(1..=40);
    assert_eq!(a.told(), ((1..=40).collect(), vec![]), "parents first");
    assert_eq!(
        twin.set_up(),
        "127.0.0.1 P2PHANDSHAKE 5242880 tcp '' 127.0.0.1:50051"
    );
    let mut b = Node::new(&twin);
    assert_eq!(b.ask(50), 40);
    let expected: Vec<_> = (1..=40).map(|number| (number, body(number))).collect();
    assert!(b.get(1..=40) == expected);
    assert_eq!(b.told(), ((1..=40).collect(), vec![]));
    let expected = SharedMoved {
        read: 40,
        ..SharedMoved::default()
    };
    assert_eq!(b.moved(), expected);
    assert!(
        twin.calls("put") >= 3 && twin.calls("get") >= 3,
        "batches of 16"
    );
    // Nodes of another token put theirs elsewhere.
    let mut other = Node::starting(&twin, 9);
    other.until("the store is reached", SharedTier::is_up);
    assert_eq!(other.ask(40), 0);
}

#[test]
fn what_is_not_there_is_not_asked_for_again_at_once() {
    let Some(twin) = Twin::new() else { return };
    let mut node = Node::new(&twin);
    for _ in 0..5 {
        assert_eq!(node.ask(10), 0);
    }
    assert_eq!(twin.calls("exist"), 1);
    node.put(1..=3);
    assert_eq!(
        (node.ask(10), twin.calls("exist")),
        (3, 2),
        "what follows is asked for"
    );
    assert!(node.tier.need_not_put(hash(2), Instant::now()));
    assert!(!node.tier.need_not_put(hash(4), Instant::now()));
}

#[test]
fn what_is_gone_is_taken_back() {
    let Some(twin) = Twin::new() else { return };
    let mut node = Node::new(&twin);
    node.put(1..=3);
    fs::remove_file(twin.object(&seal(TOKEN).key_of(hash(2)))).expect("block 2 is evicted");
    assert_eq!(node.told().1, Vec::<u32>::new());
    let came = node.get(1..=2);
    assert!(came == [(1, body(1))]);
    assert_eq!(node.told(), (vec![], vec![2]));
    assert_eq!(node.moved().missed, 1);
    assert!(!node.tier.holds(hash(2), Instant::now()));
}

/// With the check of the MAC left out, each of these blocks arrives.
#[test]
fn what_is_not_the_block_is_refused_removed_and_can_be_put_again() {
    let Some(twin) = Twin::new() else { return };
    let keys: Vec<_> = (0..=6)
        .map(|number| seal(TOKEN).key_of(hash(number)))
        .collect();
    let mut node = Node::new(&twin);
    node.put(1..=6);
    let read = |number: usize| fs::read(twin.object(&keys[number])).expect("an object");
    let write = |number: usize, object: &[u8]| {
        fs::write(twin.object(&keys[number]), object).expect("an object");
    };
    let mut damaged = read(1);
    damaged[100] ^= 4;
    write(1, &damaged);
    let mut forged = read(2);
    let forger = seal(9);
    forger.body_mut(&mut forged).fill(1);
    forger.close(&keys[2], &mut forged);
    write(2, &forged);
    write(3, &read(4));
    let cut = read(5);
    write(5, &cut[..cut.len() - 1]);
    let long = [read(6), vec![0]].concat();
    write(6, &long);
    let came: Vec<_> = node
        .get(1..=6)
        .into_iter()
        .map(|(number, _)| number)
        .collect();
    assert_eq!(came, [4]);
    assert_eq!(node.moved().damaged, 5);
    assert_eq!(node.told().1, [1, 2, 3, 5, 6]);
    assert_eq!(
        twin.objects().len(),
        1,
        "what is no block is out of the way"
    );
    node.put(1..=3);
    let came = node.get(1..=3);
    assert!(
        came == (1..=3)
            .map(|number| (number, body(number)))
            .collect::<Vec<_>>()
    );
}

#[test]
fn a_store_without_room_and_blocks_in_use_are_normal() {
    let Some(twin) = Twin::new() else { return };
    let mut node = Node::new(&twin);
    node.put(1..=2);
    node.told();
    let (pid, clients) = (node.pid(), twin.calls("setup"));
    twin.fault("put", "-200");
    node.put(3..=5);
    assert_eq!((node.moved().no_room, node.told()), (3, (vec![], vec![])));
    twin.fault("get", "-706");
    assert!(node.get(1..=2).is_empty());
    let moved = node.moved();
    assert_eq!((moved.failed, moved.damaged), (2, 0));
    twin.fault("get", "-704");
    node.get(1..=2);
    assert_eq!(node.moved().missed, 2);
    twin.mend("put");
    twin.mend("get");
    node.put(3..=3);
    assert_eq!(node.get(1..=3).len(), 3);
    assert_eq!(
        (node.pid(), twin.calls("setup")),
        (pid, clients),
        "the same client"
    );
}

/// Loses the store in some way while a block is asked for, and has it back.
fn lost_and_reached_again(call: &str, fault: &str) {
    let Some(twin) = Twin::new() else { return };
    let mut node = Node::new(&twin);
    node.put(1..=3);
    assert_eq!(node.told().0, [1, 2, 3]);
    let pid = node.pid();
    twin.fault(call, fault);
    match call {
        "get" => assert!(node.get(1..=2).is_empty(), "{fault}"),
        "put" => node.put(4..=4),
        _ => assert!(node.ask(6) <= 3, "{fault}: no more than was known"),
    }
    node.until("what was told is taken back", |tier| tier.told.is_empty());
    assert_eq!(node.told().1, [1, 2, 3]);
    assert!(!is_running(pid), "the client is gone");
    twin.mend(call);
    node.until("the store is reached again", SharedTier::is_up);
    assert_ne!(node.pid(), pid);
    assert_eq!(node.ask(4), 3);
    assert_eq!(node.get(1..=3).len(), 3);
    assert_eq!(node.told().0, [1, 2, 3]);
}

#[test]
fn a_master_that_goes_away_is_found_again() {
    lost_and_reached_again("exist", "-900");
    lost_and_reached_again("put", "-900");
    lost_and_reached_again("get", "-900");
}

#[test]
fn a_client_that_dies_or_hangs_is_replaced() {
    lost_and_reached_again("put", "die");
    lost_and_reached_again("get", "die");
    lost_and_reached_again("get", "hang");
}

#[test]
fn a_client_that_is_killed_is_missed_without_being_asked() {
    let Some(twin) = Twin::new() else { return };
    let mut node = Node::new(&twin);
    node.put(1..=1);
    let killed = Command::new("kill")
        .args(["-9", &node.pid().to_string()])
        .status();
    assert!(killed.expect("kill runs").success());
    node.until("what was told is taken back", |tier| tier.told.is_empty());
    node.until("the store is reached again", SharedTier::is_up);
    assert_eq!(node.ask(2), 1);
}

/// While the store hangs nobody waits for it for long, and the node ends all the same.
#[test]
fn a_store_that_hangs_is_behind_and_holds_nobody_up() {
    let Some(twin) = Twin::new() else { return };
    let mut node = Node::new(&twin);
    twin.fault("exist", "hang");
    let [ours, others] = [1, 100].map(|first| [hash(first), hash(first + 1)]);
    let now = Instant::now();
    assert!(node.tier.ask(&ours, now));
    assert!(node.tier.ask(&others, now), "its own question");
    assert!(!node.tier.ask(&others, now + BEHIND), "behind by then");
    let pid = node.pid();
    drop(node);
    assert!(!is_running(pid));
}

#[test]
fn a_store_that_is_away_at_the_start_costs_nothing_and_is_reached_later() {
    let Some(twin) = Twin::new() else { return };
    twin.fault("setup", "-900");
    let mut node = Node::starting(&twin, TOKEN);
    node.until("it was tried", |_| twin.calls("setup") >= 2);
    assert!(!node.tier.is_up());
    assert!(!node.tier.ask(&[hash(1), hash(2)], Instant::now()));
    assert!(
        !node
            .tier
            .put(&kept(1), |_| unreachable!("it is not even copied"))
    );
    assert_eq!(node.moved().dropped, 1);
    assert_eq!(node.told(), (vec![], vec![]));
    twin.mend("setup");
    node.until("the store is reached", SharedTier::is_up);
    node.put(1..=1);
    assert_eq!(node.told().0, [1]);
}

#[test]
fn a_python_that_is_not_there_is_no_end_of_the_node() {
    let config = MooncakeConfig {
        master: "127.0.0.1:50051".to_owned(),
        host: Some("localhost".to_owned()),
        python: "/nowhere/python3".into(),
        segment_bytes: 0,
        device: None,
    };
    let mut store = Mooncake::new(config, 100, Arc::default()).expect("memory");
    assert!(store.tend().is_some(), "tried, and to be tried again");
    assert!(store.exist(&["k".to_owned()]).is_err());
}
