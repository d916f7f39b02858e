//! What is a metadata value? Thirteen wire types, folded into the six that readers act on.

use super::GgufError;
use super::cursor::Cursor;

/// Deepest nesting of arrays; published files nest one deep.
const NESTING_MAX: u32 = 4;

/// A metadata value.
#[derive(Debug, Clone, PartialEq)]
pub enum Value {
    /// Any unsigned integer.
    U64(u64),
    /// Any signed integer.
    I64(i64),
    /// Any float.
    F64(f64),
    /// A bool.
    Bool(bool),
    /// A string.
    Str(String),
    /// An array.
    Array(Vec<Value>),
}

impl Value {
    /// The value as an unsigned integer, if it is a non-negative integer.
    pub fn as_u64(&self) -> Option<u64> {
        match self {
            Self::U64(v) => Some(*v),
            Self::I64(v) => u64::try_from(*v).ok(),
            _ => None,
        }
    }

    /// The value as a float; integers convert.
    pub fn as_f64(&self) -> Option<f64> {
        match self {
            Self::F64(v) => Some(*v),
            Self::U64(v) => Some(*v as f64),
            Self::I64(v) => Some(*v as f64),
            _ => None,
        }
    }

    /// The value as a bool.
    pub fn as_bool(&self) -> Option<bool> {
        match self {
            Self::Bool(v) => Some(*v),
            _ => None,
        }
    }

    /// The value as a string.
    pub fn as_str(&self) -> Option<&str> {
        match self {
            Self::Str(v) => Some(v),
            _ => None,
        }
    }

    /// The value as an array.
    pub fn as_array(&self) -> Option<&[Value]> {
        match self {
            Self::Array(v) => Some(v),
            _ => None,
        }
    }

    /// Reads a type number and the value behind it; `key` is for the error.
    pub(super) fn read(cursor: &mut Cursor<'_>, key: &str) -> Result<Self, GgufError> {
        let wire_type = cursor.u32()?;
        Self::read_typed(cursor, key, wire_type, 0)
    }

    fn read_typed(
        cursor: &mut Cursor<'_>,
        key: &str,
        wire_type: u32,
        depth: u32,
    ) -> Result<Self, GgufError> {
        Ok(match wire_type {
            0 => Self::U64(u8::from_le_bytes(cursor.take()?).into()),
            1 => Self::I64(i8::from_le_bytes(cursor.take()?).into()),
            2 => Self::U64(u16::from_le_bytes(cursor.take()?).into()),
            3 => Self::I64(i16::from_le_bytes(cursor.take()?).into()),
            4 => Self::U64(cursor.u32()?.into()),
            5 => Self::I64(i32::from_le_bytes(cursor.take()?).into()),
            6 => Self::F64(f32::from_le_bytes(cursor.take()?).into()),
            7 => match cursor.take::<1>()? {
                [0] => Self::Bool(false),
                [1] => Self::Bool(true),
                [other] => return Err(invalid(key, format!("a bool of {other}"))),
            },
            8 => Self::Str(cursor.string()?),
            9 => Self::read_array(cursor, key, depth)?,
            10 => Self::U64(cursor.u64()?),
            11 => Self::I64(i64::from_le_bytes(cursor.take()?)),
            12 => Self::F64(f64::from_le_bytes(cursor.take()?)),
            other => return Err(invalid(key, format!("unknown value type {other}"))),
        })
    }

    fn read_array(cursor: &mut Cursor<'_>, key: &str, depth: u32) -> Result<Self, GgufError> {
        if depth == NESTING_MAX {
            return Err(invalid(
                key,
                format!("arrays nested deeper than {NESTING_MAX}"),
            ));
        }
        let element_type = cursor.u32()?;
        let count = cursor.u64()?;
        let Some(bytes_min) = wire_bytes_min(element_type) else {
            return Err(invalid(key, format!("unknown element type {element_type}")));
        };
        cursor.take_elements(count, bytes_min)?;
        let mut elements = Vec::with_capacity(count as usize);
        for _ in 0..count {
            elements.push(Self::read_typed(cursor, key, element_type, depth + 1)?);
        }
        Ok(Self::Array(elements))
    }
}

/// The fewest bytes a value of this wire type takes in the file.
fn wire_bytes_min(wire_type: u32) -> Option<u64> {
    match wire_type {
        0 | 1 | 7 => Some(1),
        2 | 3 => Some(2),
        4..=6 => Some(4),
        8 | 10..=12 => Some(8),
        9 => Some(12),
        _ => None,
    }
}

fn invalid(key: &str, why: String) -> GgufError {
    GgufError::Value {
        key: key.to_owned(),
        why,
    }
}
