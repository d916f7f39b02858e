//! Reads `goldens/logits.bin.gz`; its layout is described in `goldens/make.py`.

use std::io::Read;

/// The whole golden file.
pub(crate) struct Golden {
    pub(crate) vocab: usize,
    /// Token ids whose logits every position has.
    pub(crate) sampled: Vec<u32>,
    pub(crate) texts: Vec<Text>,
}

/// One text and what each of its positions answers.
pub(crate) struct Text {
    pub(crate) tokens: Vec<u32>,
    pub(crate) positions: Vec<Position>,
}

/// What the golden knows of one position's logits.
pub(crate) struct Position {
    log_sum_exp: f32,
    mean: f32,
    deviation: f32,
    sampled: Vec<f32>,
    top_ids: Vec<u32>,
    top: Vec<f32>,
}

impl Golden {
    pub(crate) fn read() -> Golden {
        let packed: &[u8] = include_bytes!("../../goldens/logits.bin.gz");
        let mut bytes = Vec::new();
        flate2::read::GzDecoder::new(packed)
            .read_to_end(&mut bytes)
            .expect("the golden unpacks");
        let mut words = Words(bytes.strip_prefix(b"HGOLD001").expect("the golden's magic"));
        let [vocab, sampled, top, texts] = [0; 4].map(|_: usize| words.count());
        let golden = Golden {
            vocab,
            sampled: words.ids(sampled),
            texts: (0..texts).map(|_| words.text(sampled, top)).collect(),
        };
        assert!(words.0.is_empty(), "bytes after the golden's end");
        golden
    }

    pub(crate) fn positions(&self) -> usize {
        self.texts.iter().map(|text| text.positions.len()).sum()
    }
}

impl Position {
    /// The largest difference between these logits and `row`'s, in standard deviations. The
    /// summary figures are compared too: they see what no sampled id does.
    pub(crate) fn largest_delta(&self, row: &[f32], sampled: &[u32]) -> f64 {
        let count = row.len() as f64;
        let mean = row.iter().map(|logit| f64::from(*logit)).sum::<f64>() / count;
        let square = |logit: &f32| (f64::from(*logit) - mean).powi(2);
        let deviation = (row.iter().map(square).sum::<f64>() / count).sqrt();
        let ids = sampled
            .iter()
            .chain(&self.top_ids)
            .map(|id| f64::from(row[*id as usize]));
        let found = ids.chain([super::log_sum_exp(row), mean, deviation]);
        let summary = [self.log_sum_exp, self.mean, self.deviation];
        let expected = self.sampled.iter().chain(&self.top).chain(&summary);
        let deltas = expected.zip(found).map(|(expected, found)| {
            (f64::from(*expected) - found).abs() / f64::from(self.deviation)
        });
        deltas.fold(0.0, |worst: f64, delta| {
            if delta > worst || delta.is_nan() {
                delta
            } else {
                worst
            }
        })
    }
}

/// What is left of the file, read in words of four bytes.
struct Words<'a>(&'a [u8]);

impl Words<'_> {
    fn word(&mut self) -> [u8; 4] {
        let (word, rest) = self.0.split_first_chunk().expect("the golden is whole");
        self.0 = rest;
        *word
    }

    fn count(&mut self) -> usize {
        u32::from_le_bytes(self.word()) as usize
    }

    fn ids(&mut self, count: usize) -> Vec<u32> {
        (0..count)
            .map(|_| u32::from_le_bytes(self.word()))
            .collect()
    }

    fn float(&mut self) -> f32 {
        f32::from_le_bytes(self.word())
    }

    fn floats(&mut self, count: usize) -> Vec<f32> {
        (0..count).map(|_| self.float()).collect()
    }

    fn text(&mut self, sampled: usize, top: usize) -> Text {
        let count = self.count();
        let tokens = self.ids(count);
        let position = |_| Position {
            log_sum_exp: self.float(),
            mean: self.float(),
            deviation: self.float(),
            sampled: self.floats(sampled),
            top_ids: self.ids(top),
            top: self.floats(top),
        };
        Text {
            tokens,
            positions: (0..count).map(position).collect(),
        }
    }
}
