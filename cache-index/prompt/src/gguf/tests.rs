//! Catches: a hostile or damaged header that panics, allocates absurdly, or is believed.

use super::*;

/// A header under construction.
#[derive(Clone)]
struct Bytes(Vec<u8>);

impl Bytes {
    fn header(tensors: u64, keys: u64) -> Self {
        Self(b"GGUF".to_vec()).u32(3).u64(tensors).u64(keys)
    }
    fn raw(mut self, bytes: &[u8]) -> Self {
        self.0.extend_from_slice(bytes);
        self
    }
    fn u32(self, v: u32) -> Self {
        self.raw(&v.to_le_bytes())
    }
    fn u64(self, v: u64) -> Self {
        self.raw(&v.to_le_bytes())
    }
    fn string(self, s: &str) -> Self {
        self.u64(s.len() as u64).raw(s.as_bytes())
    }
    fn tensor(self, name: &str, dims: &[u64], dtype: u32, offset: u64) -> Self {
        let head = self.string(name).u32(dims.len() as u32);
        dims.iter()
            .fold(head, |bytes, dim| bytes.u64(*dim))
            .u32(dtype)
            .u64(offset)
    }
}

/// A small sound file: every value type, a nested array and two tensors.
fn sound() -> Vec<u8> {
    let mut bytes = Bytes::header(2, 8)
        .string("a.u8")
        .u32(0)
        .raw(&[7])
        .string("b.i32")
        .u32(5)
        .raw(&(-5i32).to_le_bytes())
        .string("c.f32")
        .u32(6)
        .raw(&1.5f32.to_le_bytes())
        .string("d.bool")
        .u32(7)
        .raw(&[1])
        .string("e.str")
        .u32(8)
        .string("héllo")
        .string("f.strs")
        .u32(9)
        .u32(8)
        .u64(2)
        .string("x")
        .string("")
        .string("g.nested")
        .u32(9)
        .u32(9)
        .u64(1)
        .u32(2)
        .u64(2)
        .raw(&[1, 0, 2, 0])
        .string("h.f64")
        .u32(12)
        .raw(&2.5f64.to_le_bytes())
        .tensor("t0", &[32, 2], 8, 0)
        .tensor("t1", &[4], 0, 96)
        .0;
    let data = bytes.len().next_multiple_of(32);
    bytes.resize(data + 96 + 16, 0);
    bytes
}

#[test]
fn reads_a_sound_header() {
    let header = Header::parse(&sound()).unwrap();
    assert_eq!(header.get("a.u8"), Some(&Value::U64(7)));
    assert_eq!(header.get("b.i32"), Some(&Value::I64(-5)));
    assert_eq!(header.get("c.f32").unwrap().as_f64(), Some(1.5));
    assert_eq!(header.get("d.bool").unwrap().as_bool(), Some(true));
    assert_eq!(header.get("e.str").unwrap().as_str(), Some("héllo"));
    assert_eq!(header.get("f.strs").unwrap().as_array().unwrap().len(), 2);
    let nested = Value::Array(vec![Value::Array(vec![Value::U64(1), Value::U64(2)])]);
    assert_eq!(header.get("g.nested"), Some(&nested));
    assert_eq!((header.alignment, header.data_offset % 32), (32, 0));
    assert_eq!(header.tensors[0].bytes, 68);
    assert_eq!(
        (header.tensors[1].dtype, header.tensors[1].bytes),
        (Dtype::F32, 16)
    );
}

fn check(bytes: Vec<u8>, expected: &str) {
    let error = Header::parse(&bytes).unwrap_err().to_string();
    assert!(
        error.contains(expected),
        "{error:?} does not say {expected:?}"
    );
}

#[test]
fn refuses_each_kind_of_damage_by_name() {
    let key = |t: u32| Bytes::header(0, 1).string("k").u32(t);
    check(vec![], "nothing");
    check(b"PK\x03\x04zip".to_vec(), "`PK\\x03\\x04`");
    check(b"ggjt\x01\0\0\0".to_vec(), "not a GGUF file");
    check(b"FUGG\0\0\0\x03".to_vec(), "big-endian");
    check(b"GGUF\0\0\0\x03".to_vec(), "big-endian");
    check(b"GGUF\x01\0\0\0".to_vec(), "version 1");
    check(b"GGUF\x09\0\0\0".to_vec(), "version 9");
    check(b"GGUF\x03\0".to_vec(), "truncated");
    check(Bytes::header(0, u64::MAX).0, "metadata keys");
    check(Bytes::header(u64::MAX, 0).0, "tensors");
    check(key(8).u64(u64::MAX).raw(&[0; 64]).0, "truncated");
    check(
        key(9).u32(0).u64(u64::MAX).raw(&[0; 64]).0,
        "array elements",
    );
    check(key(9).u32(8).u64(9).raw(&[0; 64]).0, "array elements");
    check(
        key(9).u32(77).u64(1).raw(&[0; 64]).0,
        "unknown element type 77",
    );
    check(key(99).raw(&[0; 64]).0, "unknown value type 99");
    check(key(7).raw(&[2; 64]).0, "a bool of 2");
    check(key(8).u64(1).raw(&[0xff; 64]).0, "not UTF-8");
    let deep = (0..9)
        .fold(key(9), |bytes, _| bytes.u32(9).u64(1))
        .raw(&[0; 64]);
    check(deep.0, "nested deeper");
    check(
        key(0)
            .raw(&[1])
            .string("k")
            .u32(0)
            .raw(&[1; 64])
            .0
            .tap(|b| b[16] = 2),
        "appears twice",
    );
    let align = Bytes::header(0, 1).string("general.alignment").u32(4);
    check(align.clone().u32(0).raw(&[0; 9]).0, "power of two");
    check(align.u32(48).raw(&[0; 9]).0, "power of two");
}

#[test]
fn refuses_tensors_that_cannot_be_by_name() {
    let one = |dims: &[u64], dtype, offset| {
        Bytes::header(1, 0)
            .tensor("t", dims, dtype, offset)
            .raw(&[0; 256])
            .0
    };
    check(one(&[], 0, 0), "0 dimensions");
    check(one(&[1; 5], 0, 0), "5 dimensions");
    check(one(&[0, 1], 0, 0), "do not divide");
    check(one(&[31], 8, 0), "blocks of 32");
    check(one(&[u64::MAX / 2, 4], 0, 0), "overflow");
    check(one(&[4], 12345, 0), "Other(12345)");
    check(one(&[4], 0, 7), "not aligned");
    check(one(&[4], 0, 1 << 40), "ends past");
    check(one(&[4], 0, u64::MAX - 31), "ends past");
    check(one(&[1 << 20], 0, 0), "ends past");
    let twins = Bytes::header(2, 0)
        .tensor("t", &[4], 0, 0)
        .tensor("t", &[4], 0, 0)
        .raw(&[0; 256]);
    check(twins.0, "`t` appears twice");
    let over = Bytes::header(2, 0)
        .tensor("t", &[16], 0, 32)
        .tensor("u", &[9], 0, 0)
        .raw(&[0; 256]);
    check(over.0, "`t` and `u` lie over each other");
}

trait Tap: Sized {
    fn tap(mut self, change: impl FnOnce(&mut Self)) -> Self {
        change(&mut self);
        self
    }
}
impl Tap for Vec<u8> {}

#[test]
fn every_truncation_is_an_error() {
    let whole = sound();
    for length in 0..whole.len() {
        assert!(
            Header::parse(&whole[..length]).is_err(),
            "believed {length} of {}",
            whole.len()
        );
    }
}

#[test]
fn no_bit_flip_panics() {
    let whole = sound();
    for byte in 0..whole.len() {
        for bit in 0..8 {
            let mut damaged = whole.clone();
            damaged[byte] ^= 1 << bit;
            let _ = Header::parse(&damaged);
        }
        for wild in [0x00, 0x7f, 0x80, 0xff] {
            let mut damaged = whole.clone();
            damaged[byte..].iter_mut().take(8).for_each(|b| *b = wild);
            let _ = Header::parse(&damaged);
        }
    }
}
