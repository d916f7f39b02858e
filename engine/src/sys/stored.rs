//! Values that a kernel reads: computed by this process, or lying in a mapped file.
#![expect(
    unsafe_code,
    reason = "bytes of a mapped file are seen as the plain values they are"
)]

use std::marker::PhantomData;
use std::ops::{Deref, Range};
use std::sync::Arc;

use super::mmap::Mapping;

/// Values that any bytes are valid for, without padding.
///
/// # Safety
/// Every bit pattern of the size must be a value, and no byte of it padding.
pub unsafe trait Plain: Copy + Send + Sync + 'static {}

// SAFETY: numbers and arrays of them.
unsafe impl Plain for [u8; 16] {}
// SAFETY: as above.
unsafe impl Plain for [f32; 16] {}

/// A slice that owns its values or borrows them from a file.
#[derive(Debug)]
pub struct Stored<T>(Source<T>);

#[derive(Debug)]
enum Source<T> {
    Owned(Vec<T>),
    /// The file, and where in it the values begin.
    Mapped {
        file: Arc<Mapping>,
        start: usize,
        len: usize,
        of: PhantomData<T>,
    },
}

impl<T: Plain> Stored<T> {
    /// The values in these bytes of a file; `None` if the range is not in it, is no whole number of
    /// values or begins where no such value may.
    pub fn mapped(file: &Arc<Mapping>, bytes: Range<usize>) -> Option<Stored<T>> {
        let found = file.bytes().get(bytes.clone())?;
        let fits = found.len().is_multiple_of(size_of::<T>())
            && found.as_ptr().addr().is_multiple_of(align_of::<T>());
        fits.then(|| {
            Stored(Source::Mapped {
                file: Arc::clone(file),
                start: bytes.start,
                len: found.len() / size_of::<T>(),
                of: PhantomData,
            })
        })
    }

    /// The values as they lie in memory.
    pub fn bytes(&self) -> &[u8] {
        let values: &[T] = self;
        // SAFETY: plain values have no padding, so that each of their bytes may be read.
        unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), size_of_val(values)) }
    }

    /// The values, to be filled; `None` for those of a file.
    pub fn owned_mut(&mut self) -> Option<&mut [T]> {
        match &mut self.0 {
            Source::Owned(values) => Some(values),
            Source::Mapped { .. } => None,
        }
    }
}

impl<T> From<Vec<T>> for Stored<T> {
    fn from(values: Vec<T>) -> Stored<T> {
        Stored(Source::Owned(values))
    }
}

impl<T: Plain> Deref for Stored<T> {
    type Target = [T];

    #[inline(always)]
    fn deref(&self) -> &[T] {
        match &self.0 {
            Source::Owned(values) => values,
            Source::Mapped {
                file, start, len, ..
            } => {
                let first = file.bytes()[*start..].as_ptr();
                // SAFETY: `mapped` checked that so many values lie there, aligned; any bytes are
                // values; the mapping lives as long as this.
                unsafe { std::slice::from_raw_parts(first.cast(), *len) }
            }
        }
    }
}
