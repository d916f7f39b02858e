//! Catches a block that comes back as another, one that is told to be there and is not, what a crash
//! or a bad drive could leave behind, a full or slow drive that holds anybody up, and a wipe that
//! leaves bytes.

use std::fs::{self, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::Path;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};

use cache_index::block::BlockHash;

use super::files::Drive;
use super::format::{ENTRY_BYTES, PAGE};
use super::*;
use crate::kv::layout::{BlockLayout, HeadRange, KeyOrder, KvDtype};
use crate::kv::pool::Stored;
use crate::kv::prefix::Content;

const BODY: usize = 5_000;
const SLOT: usize = 2 * PAGE;

fn hash(number: u32) -> BlockHash {
    let mut hash = [7; 16];
    hash[..4].copy_from_slice(&number.to_le_bytes());
    BlockHash(hash)
}

/// Block `number` of a chain that begins with block 1.
fn kept(number: u32, salt: Option<&str>) -> Kept {
    Kept {
        stored: Stored {
            content: Content {
                hash: hash(number),
                parent: None,
                tokens: [number; 16],
                salt: salt.map(Arc::from),
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

fn body(number: u32) -> Vec<u8> {
    (0..BODY).map(|i| (i as u32 * number) as u8).collect()
}

fn identity(model: u8) -> Identity {
    let layout = BlockLayout {
        dtype: KvDtype::F16,
        key_order: KeyOrder::Pairs,
        block_tokens: 16,
        layers: 2,
        kv_heads: 1,
        heads: HeadRange { first: 0, count: 1 },
        head_dim: 2,
    };
    Identity::new(&layout, [model; 32])
}

fn size(slots: usize) -> u64 {
    (PAGE + slots * (SLOT + ENTRY_BYTES)) as u64
}

fn open(dir: &Path, slots: usize) -> Disk {
    Disk::open(dir, size(slots), identity(1), BODY).expect("a folder of ours")
}

fn write(disk: &mut Disk, number: u32, salt: Option<&str>) -> bool {
    disk.write(&kept(number, salt), |to| to.copy_from_slice(&body(number)))
}

/// Waits until nothing is on its way.
fn settle(disk: &mut Disk) -> Vec<(BlockHash, Vec<u8>)> {
    let mut all = Vec::new();
    while disk.is_busy() {
        for arrived in disk.poll() {
            let bytes = arrived.body(BODY).to_vec();
            all.push((arrived.kept.stored.content.hash, bytes));
            disk.give_back(arrived);
        }
        std::thread::yield_now();
    }
    all
}

fn chain(numbers: std::ops::RangeInclusive<u32>) -> Vec<BlockHash> {
    numbers.map(hash).collect()
}

fn stored(disk: &mut Disk) -> Vec<BlockHash> {
    let changes = disk.take_changes().into_iter();
    let stored = changes.filter_map(|change| match change.change {
        Change::Stored(stored) => Some(stored.content.hash),
        Change::Removed(_) => None,
    });
    stored.collect()
}

#[test]
fn blocks_survive_the_node() {
    let dir = tempfile::tempdir().expect("a folder");
    let mut disk = open(dir.path(), 20);
    assert!((1..=10).all(|number| write(&mut disk, number, Some("s"))));
    settle(&mut disk);
    assert_eq!(stored(&mut disk), chain(1..=10));
    drop(disk);
    let mut disk = open(dir.path(), 20);
    assert_eq!(stored(&mut disk), chain(1..=10), "announced, parents first");
    assert!(disk.read(&chain(1..=10)));
    let read = settle(&mut disk);
    let expected: Vec<_> = (1..=10)
        .map(|number| (hash(number), body(number)))
        .collect();
    assert_eq!(read, expected);
    let kept = disk.index().get(hash(3)).expect("it is there");
    assert_eq!(kept.stored.content.salt.as_deref(), Some("s"));
    assert_eq!((kept.stored.content.tokens, kept.depth), ([3; 16], 3));
}

#[test]
fn what_is_written_to_a_full_tier_replaces_the_oldest_leaf() {
    let dir = tempfile::tempdir().expect("a folder");
    let mut disk = open(dir.path(), 4);
    for number in 1..=4 {
        write(&mut disk, number, None);
        settle(&mut disk);
    }
    // Another chain of one block; the only leaf is block 4.
    let mut other = kept(9, None);
    other.stored.parent_hash = None;
    assert!(disk.write(&other, |to| to.copy_from_slice(&body(9))));
    settle(&mut disk);
    assert!(!disk.knows(hash(4)) && disk.knows(hash(9)) && disk.knows(hash(3)));
    drop(disk);
    let disk = open(dir.path(), 4);
    assert!(!disk.knows(hash(4)) && disk.knows(hash(9)) && disk.knows(hash(3)));
    disk.index().check_integrity();
}

fn flip(path: &Path, at: u64) {
    let file = OpenOptions::new().read(true).write(true).open(path);
    let file = file.expect("the file is there");
    let mut byte = [0];
    file.read_exact_at(&mut byte, at)
        .expect("it is long enough");
    byte[0] ^= 0x10;
    file.write_all_at(&byte, at).expect("it can be written");
}

#[test]
fn damage_is_found_and_told() {
    let dir = tempfile::tempdir().expect("a folder");
    let mut disk = open(dir.path(), 8);
    assert!((1..=4).all(|number| write(&mut disk, number, None)));
    settle(&mut disk);
    disk.take_changes();
    let slot = disk.index().find(hash(3)).expect("it is there");
    flip(
        &dir.path().join("blocks"),
        slot.0 as u64 * SLOT as u64 + 4_321,
    );
    assert!(disk.read(&chain(1..=4)));
    let read = settle(&mut disk);
    assert_eq!(read.len(), 3, "the damaged one does not come");
    assert!(read.iter().all(|(found, _)| *found != hash(3)));
    assert_eq!(disk.take_moved().damaged, 1);
    let removed = disk.take_changes().into_iter().map(|change| change.change);
    assert_eq!(removed.collect::<Vec<_>>(), [Change::Removed(hash(3))]);
    assert!(!disk.knows(hash(3)));
    drop(disk);
    // Its entry is gone too, and nothing leads to the block after it.
    let mut disk = open(dir.path(), 8);
    assert_eq!(stored(&mut disk), chain(1..=2));
}

#[test]
fn an_entry_that_is_not_whole_is_an_empty_slot() {
    let dir = tempfile::tempdir().expect("a folder");
    let mut disk = open(dir.path(), 8);
    assert!((1..=3).all(|number| write(&mut disk, number, None)));
    settle(&mut disk);
    let slot = disk.index().find(hash(2)).expect("it is there");
    drop(disk);
    flip(
        &dir.path().join("index"),
        (PAGE + slot.0 as usize * ENTRY_BYTES + 60) as u64,
    );
    assert_eq!(stored(&mut open(dir.path(), 8)), chain(1..=1));
    // A head that is not whole makes the whole folder new.
    flip(&dir.path().join("index"), 30);
    assert_eq!(stored(&mut open(dir.path(), 8)), []);
}

/// As after a crash between body and entry: the old entry stands beside another block's body.
#[test]
fn a_body_without_its_entry_is_damage() {
    let dir = tempfile::tempdir().expect("a folder");
    let mut disk = open(dir.path(), 8);
    write(&mut disk, 1, None);
    settle(&mut disk);
    drop(disk);
    let blocks = OpenOptions::new()
        .write(true)
        .open(dir.path().join("blocks"));
    let mut other = body(2);
    other.resize(SLOT, 0);
    let mut disk = open(dir.path(), 8);
    let slot = disk.index().find(hash(1)).expect("it is there");
    blocks
        .and_then(|file| file.write_all_at(&other, slot.0 as u64 * SLOT as u64))
        .expect("it can be written");
    disk.read(&[hash(1)]);
    assert_eq!(settle(&mut disk), []);
    assert_eq!(disk.take_moved().damaged, 1);
}

#[test]
fn another_models_blocks_are_dropped_and_another_node_is_refused() {
    let dir = tempfile::tempdir().expect("a folder");
    let mut disk = open(dir.path(), 8);
    write(&mut disk, 1, None);
    settle(&mut disk);
    let second = Disk::open(dir.path(), size(8), identity(1), BODY);
    assert!(matches!(second, Err(DiskError::InUse { .. })));
    drop(disk);
    let other = Disk::open(dir.path(), size(8), identity(2), BODY);
    assert!(other.expect("it is taken over").index().is_empty());
    let blocks = fs::read(dir.path().join("blocks")).expect("ours");
    assert!(
        blocks.iter().all(|byte| *byte == 0),
        "its bytes are gone as well"
    );
    assert!(open(dir.path(), 8).index().is_empty());
    let small = Disk::open(dir.path(), 5_000, identity(1), BODY);
    assert!(matches!(small, Err(DiskError::TooSmall { .. })));
}

#[test]
fn a_smaller_folder_keeps_what_still_fits() {
    let dir = tempfile::tempdir().expect("a folder");
    let mut disk = open(dir.path(), 8);
    assert!((1..=6).all(|number| write(&mut disk, number, None)));
    settle(&mut disk);
    drop(disk);
    let mut disk = open(dir.path(), 3);
    assert!(disk.index().len() <= 3);
    disk.index().check_integrity();
    let here: Vec<_> = disk.index().all().map(|s| s.content.hash).collect();
    disk.read(&here);
    assert_eq!(settle(&mut disk).len(), here.len());
    let length = fs::metadata(dir.path().join("blocks"))
        .expect("it is there")
        .len();
    assert_eq!(length, 3 * SLOT as u64);
}

#[test]
fn only_its_user_can_read_it() {
    let parent = tempfile::tempdir().expect("a folder");
    let dir = parent.path().join("new");
    drop(open(&dir, 2));
    let mode = |path: &Path| {
        fs::metadata(path)
            .expect("it is there")
            .permissions()
            .mode()
            & 0o777
    };
    assert_eq!(mode(&dir), 0o700);
    let files = ["index", "blocks"].map(|name| dir.join(name));
    assert!(files.iter().all(|path| mode(path) == 0o600));
    // One that others could read is closed to them.
    fs::set_permissions(&files[1], fs::Permissions::from_mode(0o644)).expect("ours");
    drop(open(&dir, 2));
    assert_eq!(mode(&files[1]), 0o600);
}

#[test]
fn a_scope_is_wiped_to_the_last_byte() {
    let dir = tempfile::tempdir().expect("a folder");
    assert!(matches!(
        wipe(dir.path(), &Scope::Everything),
        Err(DiskError::Unknown { .. })
    ));
    let mut disk = open(dir.path(), 8);
    for (number, salt) in [(1, Some("a")), (2, Some("a")), (11, None), (21, Some("b"))] {
        let mut kept = kept(number, salt);
        kept.stored.parent_hash = kept.stored.parent_hash.filter(|_| number == 2);
        assert!(disk.write(&kept, |to| to.copy_from_slice(&body(number))));
    }
    settle(&mut disk);
    let in_use = wipe(dir.path(), &Scope::Everything);
    assert!(
        matches!(in_use, Err(DiskError::InUse { .. })),
        "while a node runs"
    );
    drop(disk);
    let holds = |number: u32| {
        let files = ["index", "blocks"].map(|name| fs::read(dir.path().join(name)).expect("ours"));
        let tokens: Vec<u8> = [number; 16].iter().flat_map(|n| n.to_le_bytes()).collect();
        let holds = |file: &[u8], part: &[u8]| file.windows(part.len()).any(|w| w == part);
        holds(&files[0], &tokens) || holds(&files[1], &body(number)[..64])
    };
    assert!([1, 2, 11, 21].map(holds).iter().all(|holds| *holds));
    assert_eq!(
        wipe(dir.path(), &Scope::Salt("a".to_owned())).expect("ours"),
        2
    );
    assert_eq!([1, 2, 11, 21].map(holds), [false, false, true, true]);
    let disk = open(dir.path(), 8);
    assert!(!disk.knows(hash(1)) && disk.knows(hash(11)) && disk.knows(hash(21)));
    drop(disk);
    assert_eq!(wipe(dir.path(), &Scope::Unsalted).expect("ours"), 1);
    assert_eq!(wipe(dir.path(), &Scope::Everything).expect("ours"), 1);
    assert!(![1, 2, 11, 21].map(holds).iter().any(|holds| *holds));
    // What has lost its entry may be anybody's.
    let mut disk = open(dir.path(), 8);
    write(&mut disk, 1, Some("a"));
    settle(&mut disk);
    let slot = disk.index().find(hash(1)).expect("it is there");
    drop(disk);
    flip(
        &dir.path().join("index"),
        (PAGE + slot.0 as usize * ENTRY_BYTES) as u64,
    );
    assert!(holds(1));
    assert_eq!(wipe(dir.path(), &Scope::Unsalted).expect("ours"), 0);
    assert!(!holds(1));
}

/// A drive that does what the test says, once for each call.
struct Scripted(Mutex<Receiver<io::Result<()>>>);

impl Scripted {
    fn new() -> (Sender<io::Result<()>>, Self) {
        let (say, said) = channel();
        (say, Self(Mutex::new(said)))
    }

    fn next(&self) -> io::Result<()> {
        let said = self.0.lock().expect("nobody panics").recv();
        said.unwrap_or(Ok(()))
    }
}

impl Drive for Scripted {
    fn read(&self, _slot: Slot, to: &mut [u8]) -> io::Result<()> {
        to[..BODY].copy_from_slice(&body(1));
        self.next()
    }

    fn write(&self, _slot: Slot, _from: &[u8]) -> io::Result<()> {
        self.next()
    }

    fn write_entry(&self, _slot: Slot, _entry: &[u8]) -> io::Result<()> {
        self.next()
    }
}

#[test]
fn a_full_disk_is_left_alone_for_a_while() {
    let (say, drive) = Scripted::new();
    let mut disk = Disk::start(drive, 8, Vec::new(), BODY).expect("a thread");
    say.send(Err(io::ErrorKind::StorageFull.into()))
        .expect("it listens");
    assert!(write(&mut disk, 1, None), "who could know");
    settle(&mut disk);
    assert!(!disk.knows(hash(1)));
    assert_eq!(disk.take_moved().failed, 1);
    assert!((0..FULL_FOR).all(|_| !write(&mut disk, 1, None)));
    assert_eq!(disk.take_moved().dropped, u64::from(FULL_FOR));
    say.send(Ok(()))
        .and_then(|()| say.send(Ok(())))
        .expect("it listens");
    assert!(write(&mut disk, 1, None), "tried again");
    settle(&mut disk);
    assert_eq!(stored(&mut disk), [hash(1)]);
    say.send(Err(io::ErrorKind::Other.into()))
        .expect("it listens");
    assert!(disk.read(&[hash(1)]));
    assert_eq!(settle(&mut disk), []);
    assert!(!disk.knows(hash(1)), "what cannot be read is not there");
    disk.index().check_integrity();
}

/// Would catch a drive smaller than its `--kv-disk-size` that keeps what it has for ever.
#[test]
fn a_full_disk_gives_its_own_places_away() {
    let (say, drive) = Scripted::new();
    let mut disk = Disk::start(drive, 8, Vec::new(), BODY).expect("a thread");
    let full = io::ErrorKind::StorageFull;
    for outcome in [Ok(()), Ok(()), Ok(()), Ok(()), Err(full.into())] {
        say.send(outcome).expect("it listens");
    }
    let write = |disk: &mut Disk, number: u32| {
        let mut root = kept(number, None);
        root.stored.parent_hash = None;
        disk.write(&root, |to| to.copy_from_slice(&body(number)))
    };
    assert!((1..=3).all(|number| write(&mut disk, number)));
    settle(&mut disk);
    assert_eq!(stored(&mut disk), [hash(1), hash(2)]);
    drop(say);
    for number in 4..20 {
        assert!(write(&mut disk, number), "block {number}");
        settle(&mut disk);
        assert!(disk.knows(hash(number)));
        assert_eq!(disk.index().len(), 2, "there is room for two");
        disk.index().check_integrity();
    }
    let moved = disk.take_moved();
    assert_eq!((moved.evicted, moved.dropped, moved.failed), (16, 0, 1));
}

#[test]
fn a_child_of_what_was_not_written_is_not_told() {
    let (say, drive) = Scripted::new();
    let mut disk = Disk::start(drive, 8, Vec::new(), BODY).expect("a thread");
    for outcome in [Err(io::ErrorKind::Other.into()), Ok(()), Ok(())] {
        say.send(outcome).expect("it listens");
    }
    assert!(write(&mut disk, 1, None) && write(&mut disk, 2, None));
    settle(&mut disk);
    assert_eq!(stored(&mut disk), []);
    assert!(!disk.knows(hash(1)) && !disk.knows(hash(2)));
    disk.index().check_integrity();
}

/// Nothing the drive does or does not do makes a caller wait.
#[test]
fn a_drive_that_stands_still_holds_nobody_up() {
    let (say, drive) = Scripted::new();
    let slots = 2 * *BUFFERS.end();
    let mut disk = Disk::start(drive, slots, Vec::new(), BODY).expect("a thread");
    let taken = (1..=slots as u32)
        .filter(|number| write(&mut disk, *number, None))
        .count();
    assert_eq!(
        taken,
        disk.buffers / 2,
        "half of the buffers are for reading"
    );
    assert_eq!(disk.take_moved().dropped as usize, slots - taken);
    assert!(disk.poll().is_empty());
    drop(say);
    settle(&mut disk);
    assert_eq!(stored(&mut disk).len(), taken);
}
