//! A slice that several threads write, each to its own ranges.
#![expect(
    unsafe_code,
    reason = "that the ranges do not overlap is known to the kernels only"
)]

use std::marker::PhantomData;

/// A borrowed slice that hands out mutable ranges to whoever promises that they do not overlap.
#[derive(Debug)]
pub struct Disjoint<'a, T> {
    start: *mut T,
    len: usize,
    slice: PhantomData<&'a mut [T]>,
}

// SAFETY: it is a `&mut [T]` whose parts are handed out by `range`, whose callers keep them
// apart; sending such parts to other threads needs `T: Send` and no more.
unsafe impl<T: Send> Sync for Disjoint<'_, T> {}

impl<'a, T> Disjoint<'a, T> {
    /// Takes the slice for as long as the parts are in use.
    pub fn new(slice: &'a mut [T]) -> Self {
        Disjoint {
            start: slice.as_mut_ptr(),
            len: slice.len(),
            slice: PhantomData,
        }
    }

    /// Values in the slice.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The `len` values from `start` on. Panics if they lie past the end.
    ///
    /// # Safety
    /// No two ranges in use at the same time may overlap.
    #[expect(
        clippy::mut_from_ref,
        reason = "this is the point of the type; the caller promises"
    )]
    pub unsafe fn range(&self, start: usize, len: usize) -> &mut [T] {
        assert!(
            start <= self.len && len <= self.len - start,
            "{start}+{len} of {}",
            self.len
        );
        // SAFETY: inside the slice by the assert; not aliased by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(start), len) }
    }
}
