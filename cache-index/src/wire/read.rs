//! How is one MessagePack value read from bytes that nobody vouches for?
//!
//! A cursor over the payload. Every read checks the bytes that are left, and every array or map
//! length is checked against them too (an element takes a byte at least), so nothing is allocated
//! that the payload's own size does not bound.

use rmp::Marker;

use super::{DEPTH_MAX, WireError};

/// A cursor over one payload.
pub(super) struct Reader<'a> {
    rest: &'a [u8],
}

/// A MessagePack integer: the two halves of its range.
#[derive(Clone, Copy)]
pub(super) enum Int {
    Unsigned(u64),
    Negative(i64),
}

/// One value's head; what follows it is still unread.
pub(super) enum Head<'a> {
    Nil,
    Bool,
    Int(Int),
    Float(f64),
    Str(&'a [u8]),
    Bin(&'a [u8]),
    Array(usize),
    Map(usize),
    Ext,
}

impl Head<'_> {
    /// Its name in MessagePack, for messages.
    pub(super) fn name(&self) -> &'static str {
        match self {
            Self::Nil => "nil",
            Self::Bool => "bool",
            Self::Int(_) => "int",
            Self::Float(_) => "float",
            Self::Str(_) => "str",
            Self::Bin(_) => "bin",
            Self::Array(_) => "array",
            Self::Map(_) => "map",
            Self::Ext => "ext",
        }
    }
}

impl<'a> Reader<'a> {
    pub(super) fn new(payload: &'a [u8]) -> Self {
        Self { rest: payload }
    }

    pub(super) fn left(&self) -> usize {
        self.rest.len()
    }

    /// The next value's head; strings and binaries come whole.
    pub(super) fn head(&mut self, reading: &'static str) -> Result<Head<'a>, WireError> {
        let [byte] = self.take_array::<1>(reading)?;
        Ok(match Marker::from_u8(byte) {
            Marker::Null => Head::Nil,
            Marker::True | Marker::False => Head::Bool,
            Marker::FixPos(value) => Head::Int(Int::Unsigned(value.into())),
            Marker::FixNeg(value) => Head::Int(Int::Negative(value.into())),
            Marker::U8 => Head::Int(Int::Unsigned(self.be::<1>(reading)?)),
            Marker::U16 => Head::Int(Int::Unsigned(self.be::<2>(reading)?)),
            Marker::U32 => Head::Int(Int::Unsigned(self.be::<4>(reading)?)),
            Marker::U64 => Head::Int(Int::Unsigned(self.be::<8>(reading)?)),
            Marker::I8 => signed(i8::from_be_bytes(self.take_array(reading)?).into()),
            Marker::I16 => signed(i16::from_be_bytes(self.take_array(reading)?).into()),
            Marker::I32 => signed(i32::from_be_bytes(self.take_array(reading)?).into()),
            Marker::I64 => signed(i64::from_be_bytes(self.take_array(reading)?)),
            Marker::F32 => Head::Float(f32::from_be_bytes(self.take_array(reading)?).into()),
            Marker::F64 => Head::Float(f64::from_be_bytes(self.take_array(reading)?)),
            Marker::FixStr(length) => Head::Str(self.take(length.into(), reading)?),
            Marker::Str8 => Head::Str(self.sized::<1>(reading)?),
            Marker::Str16 => Head::Str(self.sized::<2>(reading)?),
            Marker::Str32 => Head::Str(self.sized::<4>(reading)?),
            Marker::Bin8 => Head::Bin(self.sized::<1>(reading)?),
            Marker::Bin16 => Head::Bin(self.sized::<2>(reading)?),
            Marker::Bin32 => Head::Bin(self.sized::<4>(reading)?),
            Marker::FixArray(count) => Head::Array(self.count(count.into(), 1, reading)?),
            Marker::Array16 => {
                let count = self.be::<2>(reading)?;
                Head::Array(self.count(count, 1, reading)?)
            }
            Marker::Array32 => {
                let count = self.be::<4>(reading)?;
                Head::Array(self.count(count, 1, reading)?)
            }
            Marker::FixMap(count) => Head::Map(self.count(count.into(), 2, reading)?),
            Marker::Map16 => {
                let count = self.be::<2>(reading)?;
                Head::Map(self.count(count, 2, reading)?)
            }
            Marker::Map32 => {
                let count = self.be::<4>(reading)?;
                Head::Map(self.count(count, 2, reading)?)
            }
            Marker::FixExt1 => self.ext(1, reading)?,
            Marker::FixExt2 => self.ext(2, reading)?,
            Marker::FixExt4 => self.ext(4, reading)?,
            Marker::FixExt8 => self.ext(8, reading)?,
            Marker::FixExt16 => self.ext(16, reading)?,
            Marker::Ext8 => {
                let length = self.be::<1>(reading)?;
                self.ext(length, reading)?
            }
            Marker::Ext16 => {
                let length = self.be::<2>(reading)?;
                self.ext(length, reading)?
            }
            Marker::Ext32 => {
                let length = self.be::<4>(reading)?;
                self.ext(length, reading)?
            }
            Marker::Reserved => {
                return Err(WireError::Type {
                    reading,
                    found: "reserved",
                });
            }
        })
    }

    /// Reads over one whole value.
    pub(super) fn skip(&mut self, reading: &'static str) -> Result<(), WireError> {
        let head = self.head(reading)?;
        self.skip_inside(&head, DEPTH_MAX, reading)
    }

    /// Reads over what follows a head that has been read.
    pub(super) fn skip_rest(
        &mut self,
        head: &Head<'a>,
        reading: &'static str,
    ) -> Result<(), WireError> {
        self.skip_inside(head, DEPTH_MAX, reading)
    }

    fn skip_inside(
        &mut self,
        head: &Head<'a>,
        depth: u8,
        reading: &'static str,
    ) -> Result<(), WireError> {
        let values = match head {
            Head::Array(count) => *count,
            Head::Map(count) => count.saturating_mul(2),
            _ => return Ok(()),
        };
        let depth = depth.checked_sub(1).ok_or(WireError::Depth)?;
        for _ in 0..values {
            let inner = self.head(reading)?;
            self.skip_inside(&inner, depth, reading)?;
        }
        Ok(())
    }

    /// The next `length` bytes.
    fn take(&mut self, length: usize, reading: &'static str) -> Result<&'a [u8], WireError> {
        let (taken, rest) = self
            .rest
            .split_at_checked(length)
            .ok_or(WireError::Truncated { reading })?;
        self.rest = rest;
        Ok(taken)
    }

    fn take_array<const N: usize>(&mut self, reading: &'static str) -> Result<[u8; N], WireError> {
        let (taken, rest) = self
            .rest
            .split_first_chunk::<N>()
            .ok_or(WireError::Truncated { reading })?;
        self.rest = rest;
        Ok(*taken)
    }

    /// A big-endian unsigned number of `N` bytes.
    fn be<const N: usize>(&mut self, reading: &'static str) -> Result<u64, WireError> {
        let bytes = self.take_array::<N>(reading)?;
        Ok(bytes
            .iter()
            .fold(0, |value, byte| value << 8 | u64::from(*byte)))
    }

    /// Bytes after their length of `N` bytes.
    fn sized<const N: usize>(&mut self, reading: &'static str) -> Result<&'a [u8], WireError> {
        let length = self.be::<N>(reading)?;
        let length = usize::try_from(length).map_err(|_| WireError::Truncated { reading })?;
        self.take(length, reading)
    }

    /// Checks a count of elements of `bytes_each` bytes at least.
    fn count(
        &self,
        count: u64,
        bytes_each: u64,
        reading: &'static str,
    ) -> Result<usize, WireError> {
        let left = self.rest.len();
        let fits = count.saturating_mul(bytes_each) <= u64::try_from(left).unwrap_or(u64::MAX);
        match usize::try_from(count) {
            Ok(checked) if fits => Ok(checked),
            _ => Err(WireError::Count {
                reading,
                count,
                left,
            }),
        }
    }

    /// Reads over an extension value: its type byte and its bytes.
    fn ext(&mut self, length: u64, reading: &'static str) -> Result<Head<'a>, WireError> {
        let length = usize::try_from(length).map_err(|_| WireError::Truncated { reading })?;
        self.take(length.saturating_add(1), reading)?;
        Ok(Head::Ext)
    }
}

/// A signed encoding may still hold a number that is not negative.
fn signed(value: i64) -> Head<'static> {
    Head::Int(u64::try_from(value).map_or(Int::Negative(value), Int::Unsigned))
}
