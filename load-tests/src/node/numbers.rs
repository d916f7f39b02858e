//! Which number stands for which block, in all nodes of a process?
//!
//! The timing model names blocks by numbers, and nodes that share a store must mean the same ones. A
//! number is given back by everyone who took it before it stands for another block.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use cache_index::block::BlockHash;

/// All numbers in use.
#[derive(Debug, Default)]
pub(super) struct Numbers {
    book: Mutex<Book>,
}

#[derive(Debug, Default)]
struct Book {
    by_hash: HashMap<BlockHash, u32>,
    /// What each stands for, and how often it was taken.
    taken: Vec<(BlockHash, u32)>,
    free: Vec<u32>,
}

impl Numbers {
    /// A block's number, taken once more.
    pub(super) fn take(&self, hash: BlockHash) -> u32 {
        let Book {
            by_hash,
            taken,
            free,
        } = &mut *self.book();
        let number = *by_hash.entry(hash).or_insert_with(|| {
            free.pop().unwrap_or_else(|| {
                taken.push((hash, 0));
                u32::try_from(taken.len() - 1).expect("fewer than 2^32 blocks in use")
            })
        });
        let entry = &mut taken[number as usize];
        *entry = (hash, entry.1 + 1);
        number
    }

    /// A number that somebody has, taken once more.
    pub(super) fn take_again(&self, number: u32) {
        self.book().taken[number as usize].1 += 1;
    }

    /// Taken once less.
    pub(super) fn give_back(&self, number: u32) {
        let mut book = self.book();
        let (hash, left) = &mut book.taken[number as usize];
        *left -= 1;
        if *left == 0 {
            let hash = *hash;
            book.by_hash.remove(&hash);
            book.free.push(number);
        }
    }

    #[cfg(test)]
    pub(super) fn in_use(&self) -> usize {
        self.book().by_hash.len()
    }

    fn book(&self) -> MutexGuard<'_, Book> {
        self.book.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
