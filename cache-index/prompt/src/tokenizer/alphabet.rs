//! How do byte-level vocabularies spell bytes? GPT-2 gave each byte a printable character, so that
//! a vocabulary file has no blanks or control characters in it: printable Latin-1 stands for
//! itself, the other 68 bytes follow from U+0100 on. Vocabulary and merges are in this spelling;
//! we undo it once, at load, and work on bytes.

/// Byte to character and back.
#[derive(Debug)]
pub(super) struct Alphabet {
    /// Character (below U+0144) to byte.
    bytes: [Option<u8>; 0x144],
}

impl Alphabet {
    pub(super) fn new() -> Self {
        let mut bytes = [None; 0x144];
        let mut next = 0x100;
        for byte in 0..=255u8 {
            let stands_for_itself = matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
            let character = if stands_for_itself {
                usize::from(byte)
            } else {
                next += 1;
                next - 1
            };
            bytes[character] = Some(byte);
        }
        Self { bytes }
    }

    /// The bytes that a vocabulary entry spells; `None` if it has a character outside the alphabet.
    pub(super) fn decode(&self, spelled: &str) -> Option<Vec<u8>> {
        spelled
            .chars()
            .map(|c| self.bytes.get(c as usize).copied().flatten())
            .collect()
    }
}
