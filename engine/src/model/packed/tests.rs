//! What would be caught: a file taken for another model's, for whole when it is not, or read while
//! it is written.

use std::fs::{self, File};

use super::*;

const KEY: Key = Key {
    layout: 1,
    source: [7; 32],
};

fn matrices() -> Vec<[Vec<u8>; PartBytes::PARTS]> {
    let part = |seed: usize, len: usize| (0..len).map(|at| (at * 31 + seed) as u8).collect();
    (0..3)
        .map(|m| {
            std::array::from_fn(|p| part(m * 10 + p, if p == 3 { 0 } else { 64 * (m + p) + p }))
        })
        .collect()
}

fn write_all(path: &Path, key: &Key) -> bool {
    let matrices = matrices();
    let parts = matrices
        .iter()
        .map(|parts| parts.each_ref().map(|part| &part[..]));
    write(path, key, parts).expect("the folder can be written")
}

#[test]
fn what_is_written_is_read() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("model.packed");
    assert!(matches!(
        PackedFile::open(&path, &KEY, 2),
        Err(Unusable::Missing)
    ));
    assert!(write_all(&path, &KEY));
    let mut file = PackedFile::open(&path, &KEY, 2).expect("it was just written");
    for expected in matrices() {
        let found = file.next().expect("all matrices are there");
        let starts = found
            .ranges
            .iter()
            .map(|range| range.start % ALIGNMENT as usize);
        assert!(starts.sum::<usize>() == 0, "parts begin at cache lines");
        let found = found.ranges.map(|range| file.file.bytes()[range].to_vec());
        assert_eq!(found, expected);
    }
    assert!(file.is_used_up() && file.next().is_none());
    let names: Vec<_> = fs::read_dir(folder.path()).expect("readable").collect();
    assert_eq!(names.len(), 1, "nothing else is left");
}

#[test]
fn every_flipped_byte_and_every_cut_is_found() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("model.packed");
    write_all(&path, &KEY);
    let whole = fs::read(&path).expect("readable");
    let mut used = vec![false; whole.len()];
    used[..HEAD_BYTES + 18 * ENTRY_BYTES].fill(true);
    for range in table(&whole, &KEY).expect("whole").0 {
        used[range].fill(true);
    }
    for (at, used) in used.iter().enumerate() {
        let mut bytes = whole.clone();
        bytes[at] ^= 1 << (at % 8);
        fs::write(&path, &bytes).expect("writable");
        // What fills the gaps means nothing.
        assert_eq!(
            PackedFile::open(&path, &KEY, 1).is_err(),
            *used,
            "byte {at}"
        );
    }
    for len in 0..whole.len() {
        fs::write(&path, &whole[..len]).expect("writable");
        assert!(
            PackedFile::open(&path, &KEY, 1).is_err(),
            "{len} bytes of {}",
            whole.len()
        );
    }
}

#[test]
fn another_models_file_is_stale() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("model.packed");
    write_all(&path, &KEY);
    let other = [
        Key { layout: 2, ..KEY },
        Key {
            source: [8; 32],
            ..KEY
        },
    ];
    for key in other {
        assert!(matches!(
            PackedFile::open(&path, &key, 1),
            Err(Unusable::Stale)
        ));
        // It is replaced.
        assert!(write_all(&path, &key));
        assert!(PackedFile::open(&path, &key, 1).is_ok());
        write_all(&path, &KEY);
    }
}

#[test]
fn of_two_that_write_at_once_one_does() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("model.packed");
    let part = beside(&path);
    let other = File::create(&part).expect("writable");
    other.lock().expect("nobody else has it");
    assert!(!write_all(&path, &KEY), "another process is writing");
    // The other is done: what it wrote has its name, and this process's lock is of no use.
    fs::write(&path, b"what the other wrote").expect("writable");
    drop(other);
    // One that died left half a file without a lock.
    assert!(write_all(&path, &KEY));
    assert!(PackedFile::open(&path, &KEY, 1).is_ok());
    assert!(!part.exists());
}
