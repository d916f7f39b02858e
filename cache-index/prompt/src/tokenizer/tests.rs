//! Catches: a fast merge that differs from the obvious one, also under merge lists that nobody
//! trained, and a safe cut that changes words.

use rand::rngs::StdRng;
use rand::seq::{IndexedRandom, SliceRandom};
use rand::{RngExt, SeedableRng};
use unicode_normalization::UnicodeNormalization;

use super::bpe::{Bpe, BpeParts, NONE, Rule, Scratch, Starts, WholeWords};
use super::split::{Marks, Split, Splitter, safe_cut};

/// The obvious twin: join the pair of lowest rank, leftmost, until none is left.
fn merge_slowly(merges: &[(u32, u32, u32)], mut tokens: Vec<u32>) -> Vec<u32> {
    loop {
        let lowest = merges.iter().find_map(|(left, right, joined)| {
            let at = tokens.windows(2).position(|pair| pair == [*left, *right])?;
            Some((at, *joined))
        });
        let Some((at, joined)) = lowest else {
            return tokens;
        };
        tokens.splice(at..at + 2, [joined]);
    }
}

#[test]
fn merging_equals_its_slow_twin() {
    let mut rng = StdRng::seed_from_u64(3);
    for round in 0..200 {
        let mut tokens: Vec<Vec<u8>> = (0..4).map(|letter| vec![b'a' + letter]).collect();
        let mut merges: Vec<(u32, u32, u32)> = Vec::new();
        for _ in 0..rng.random_range(1..40) {
            let left = rng.random_range(0..tokens.len());
            let right = rng.random_range(0..tokens.len());
            let joined = [tokens[left].as_slice(), &tokens[right]].concat();
            let known = tokens.iter().position(|token| *token == joined);
            let id = known.unwrap_or(tokens.len());
            if known.is_none() {
                tokens.push(joined);
            }
            let merge = (left as u32, right as u32, id as u32);
            if !merges
                .iter()
                .any(|(l, r, _)| (*l, *r) == (merge.0, merge.1))
            {
                merges.push(merge);
            }
        }
        // Half of the lists in an order that training never gives.
        if round % 2 == 0 {
            merges.shuffle(&mut rng);
        }
        let mut byte_tokens = [NONE; 256];
        (0..4).for_each(|letter| byte_tokens[usize::from(b'a' + letter)] = u32::from(letter));
        let entries: Vec<(Vec<u8>, u32)> = tokens
            .iter()
            .enumerate()
            .map(|(id, bytes)| (bytes.clone(), id as u32))
            .collect();
        let whole_words = WholeWords::WhenMerged;
        let rules: Vec<Rule> = (0..)
            .zip(&merges)
            .map(|(rank, &(left, right, token))| Rule {
                left,
                right,
                token,
                rank,
            })
            .collect();
        let bpe = Bpe::new(BpeParts {
            starts: Starts::Bytes(byte_tokens),
            merges: &rules,
            entries: &entries,
            whole_words,
        });
        let mut scratch = Scratch::default();
        for length in [0, 1, 2, 3, 7, 31, 32, 33, 34, 100, 300] {
            // An x has no token: it is dropped.
            let word: Vec<u8> = (0..length)
                .map(|_| *b"aaabbbcccdddx".choose(&mut rng).unwrap())
                .collect();
            let letters = word.iter().filter(|byte| **byte != b'x');
            let expected = merge_slowly(&merges, letters.map(|b| u32::from(b - b'a')).collect());
            let mut found = Vec::new();
            bpe.encode_word(&word, &mut scratch, &mut found);
            assert_eq!(
                found,
                expected,
                "{merges:?} on {:?}",
                String::from_utf8_lossy(&word)
            );
        }
    }
}

#[test]
fn a_safe_cut_changes_no_word() {
    let cl100k = |numbers_max, marks| Split::Cl100k { numbers_max, marks };
    let splits = [
        Split::Gpt2,
        Split::SmolLm,
        cl100k(3, Marks::AreOther),
        cl100k(1, Marks::AreOther),
        cl100k(1, Marks::AreLetters),
        Split::Tekken,
    ];
    let splitters = splits.map(Splitter::new);
    let words = |splitter: &Splitter, text: &str| {
        let mut words = Vec::new();
        let mut begin = 0;
        while begin < text.len() {
            let end = splitter.word_end(text, begin);
            words.push(text[begin..end].to_owned());
            begin = end;
        }
        words
    };
    let atoms = [
        " ", "  ", "\n", "\r\n", "\t", "\u{3000}", "a", "Zé", "1", "23", "'s", "'", "!", "...",
        "日本", "👋", "\u{301}", "e", "\u{1100}", "\u{1161}", "/", "ʰ", "ǅ",
    ];
    let mut rng = StdRng::seed_from_u64(4);
    let mut cuts = 0;
    for _ in 0..3000 {
        let count = rng.random_range(1..30);
        let text: String = (0..count)
            .map(|_| *atoms.choose(&mut rng).unwrap())
            .collect();
        let Some(cut) = safe_cut(&text, rng.random_range(0..=text.len())) else {
            continue;
        };
        cuts += 1;
        let (left, right) = text.split_at(cut);
        assert!(!left.is_empty() && right.starts_with(' '));
        for (split, splitter) in splits.iter().zip(&splitters) {
            let both = [words(splitter, left), words(splitter, right)].concat();
            assert_eq!(
                both,
                words(splitter, &text),
                "{split:?} on {text:?} at {cut}"
            );
        }
        let normal: String = left.nfc().chain(right.nfc()).collect();
        assert_eq!(normal, text.nfc().collect::<String>());
    }
    assert!(cuts > 1000, "{cuts}");
}
