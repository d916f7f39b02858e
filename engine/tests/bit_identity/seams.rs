//! What speculation, embeddings and draft models will ask of the forward pass: hidden states of
//! chosen layers, logits of several tokens in one step, and tokens that are taken back.

use engine::model::{BlockId, ForwardError, Model, Pass, PassOutput, SeqInput, Variant};

use super::tiny::{self, Noise, Tiny};
use super::{alone, blocks, file_of, load, prompts};

/// The tiny model's layers.
const LAYERS: usize = 2;

/// Every captured row of one prompt, run in chunks of `sizes`, beside another sequence or not.
/// One entry per captured layer: the bits of all rows in order.
fn hidden(
    model: &mut Model,
    prompt: &[u32],
    capture: &[usize],
    company: &[u32],
    mut size: impl FnMut() -> usize,
) -> Vec<Vec<u32>> {
    let (own, other) = (blocks(0), blocks(1));
    let width = model.shape().width;
    let mut rows = vec![Vec::new(); capture.len()];
    let mut output = PassOutput::default();
    let mut done = 0;
    while done < prompt.len() {
        let count = size().clamp(1, prompt.len() - done);
        let mut batch = vec![SeqInput {
            tokens: &prompt[done..done + count],
            start: done,
            blocks: &own,
            logits_last: 0,
        }];
        if !company.is_empty() {
            let beside = SeqInput {
                tokens: company,
                start: 0,
                blocks: &other,
                logits_last: 1,
            };
            batch.insert(done % 2, beside);
        }
        let first = if batch[0].blocks == own {
            0
        } else {
            company.len()
        };
        let pass = Pass {
            batch: &batch,
            capture,
        };
        model.run(&pass, &mut output).expect("a correct pass");
        assert_eq!(output.hidden.len(), capture.len());
        for (rows, layer) in rows.iter_mut().zip(&output.hidden) {
            assert_eq!(layer.len(), (count + company.len()) * width);
            let layer = &layer[first * width..(first + count) * width];
            rows.extend(layer.iter().map(|value| value.to_bits()));
        }
        done += count;
    }
    rows
}

/// Would catch hidden states of the wrong rows or layer, and ones that depend on company, chunks or
/// on what else is captured.
#[test]
fn hidden_states_do_not_depend_on_company_or_chunks() {
    let file = file_of(&Tiny::new(7).to_bytes());
    let mut noise = Noise(31);
    let prompt = prompts(&mut noise, tiny::VOCAB, &[75]).remove(0);
    let company = prompts(&mut noise, tiny::VOCAB, &[5]).remove(0);
    let all: Vec<usize> = (0..=LAYERS + 1).collect();
    let mut portable = load(file.path(), Variant::Portable, 1);
    let expected = hidden(&mut portable, &prompt, &all, &[], || usize::MAX);
    for variant in Variant::ALL.into_iter().filter(|v| v.is_available()) {
        let mut model = load(file.path(), variant, 2);
        for _ in 0..4 {
            let mut size = || [1, 2, 3, 16, 40][noise.below(5)];
            let found = hidden(&mut model, &prompt, &all, &company, &mut size);
            assert!(found == expected, "{}", variant.as_str());
            // In any order, some layer twice.
            let found = hidden(&mut model, &prompt, &[3, 0, 2, 0], &company, &mut size);
            let picked = [3, 0, 2, 0].map(|layer: usize| expected[layer].clone());
            assert!(found == picked, "{}", variant.as_str());
        }
    }
}

/// The meaning of the layers, by hand: equal tokens have equal embeddings, the last capture is the
/// norm of the one before, and logits are not moved by any of it.
#[test]
fn captured_layers_mean_what_they_say() {
    let file = file_of(&Tiny::new(7).to_bytes());
    let mut model = load(file.path(), Variant::best(), 1);
    let width = model.shape().width;
    let prompt = [5, 9, 5, 60, 9];
    let table = blocks(0);
    let batch = [SeqInput {
        tokens: &prompt,
        start: 0,
        blocks: &table,
        logits_last: 2,
    }];
    let (mut plain, mut output) = (PassOutput::default(), PassOutput::default());
    for (capture, output) in [(&[][..], &mut plain), (&[0, 1, 2, 3][..], &mut output)] {
        let pass = Pass {
            batch: &batch,
            capture,
        };
        model.run(&pass, output).expect("a correct pass");
    }
    assert!(plain.hidden.is_empty());
    assert_eq!(plain.logits, output.logits);
    let row = |layer: usize, row: usize| &output.hidden[layer][row * width..][..width];
    assert_eq!(row(0, 0), row(0, 2));
    assert_eq!(row(0, 1), row(0, 4));
    assert_ne!(row(1, 0), row(1, 2), "attention sees positions");
    // The norm's weights are the same for every row, so they cancel between two rows.
    let scale = |row: &[f32]| {
        let square: f64 = row.iter().map(|x| f64::from(*x).powi(2)).sum();
        1.0 / (square / width as f64 + 1e-5).sqrt()
    };
    for column in 0..width {
        let weight = |at: usize| {
            f64::from(row(3, at)[column]) / (f64::from(row(2, at)[column]) * scale(row(2, at)))
        };
        let difference = (weight(0) - weight(3)).abs();
        assert!(difference < 1e-4, "column {column}: {difference:e}");
    }
    let pass = Pass {
        batch: &batch,
        capture: &[0, 4],
    };
    assert_eq!(
        model.run(&pass, &mut output),
        Err(ForwardError::Capture { layer: 4, last: 3 })
    );
}

/// Sequences under way that guess: each step submits the next `k` tokens, of which some tail is
/// wrong, takes the wrong ones back and goes on from the first of them. Would catch KV of a wrong
/// token that a later pass still sees, in the same block or behind it, and logits of several
/// tokens in one step that differ from those of one at a time.
#[test]
fn wrong_tokens_taken_back_leave_no_trace() {
    let file = file_of(&Tiny::new(7).to_bytes());
    let mut noise = Noise(32);
    let prompts = prompts(&mut noise, tiny::VOCAB, &[90, 40, 61]);
    let expected = alone(&mut load(file.path(), Variant::Portable, 1), &prompts);
    for variant in Variant::ALL.into_iter().filter(|v| v.is_available()) {
        let mut model = load(file.path(), variant, 2);
        let mut done = [0; 3];
        let mut output = PassOutput::default();
        while (0..3).any(|slot| done[slot] < prompts[slot].len()) {
            let guesses: Vec<(usize, usize, Vec<u32>)> = (0..3)
                .filter(|slot| done[*slot] < prompts[*slot].len())
                .map(|slot| guess(&mut noise, &prompts[slot][done[slot]..], slot))
                .collect();
            let tables: Vec<Vec<BlockId>> = (0..3).map(blocks).collect();
            let batch: Vec<SeqInput<'_>> = guesses
                .iter()
                .map(|(slot, _, tokens)| SeqInput {
                    tokens,
                    start: done[*slot],
                    blocks: &tables[*slot],
                    logits_last: tokens.len(),
                })
                .collect();
            let pass = Pass {
                batch: &batch,
                capture: &[],
            };
            model.run(&pass, &mut output).expect("a correct pass");
            let mut rows = output.logits.chunks_exact(tiny::VOCAB);
            for (slot, right, tokens) in &guesses {
                let rows: Vec<_> = rows.by_ref().take(tokens.len()).collect();
                for (index, row) in rows.iter().take(*right).enumerate() {
                    let bits: Vec<u32> = row.iter().map(|logit| logit.to_bits()).collect();
                    let position = done[*slot] + index;
                    let name = variant.as_str();
                    assert!(
                        bits == expected[*slot][position],
                        "{name}: {slot} at {position}"
                    );
                }
                done[*slot] += right;
            }
        }
    }
}

/// Up to 20 tokens of which the first are those of the prompt, and how many that is; at least one,
/// as the step's own token is never a guess.
fn guess(noise: &mut Noise, left: &[u32], slot: usize) -> (usize, usize, Vec<u32>) {
    let right = (1 + noise.below(8)).min(left.len());
    let wrong = noise.below(13);
    let mut tokens = left[..right].to_vec();
    // Any token but the right one, so that the tail is wrong from its first token on.
    let off = |noise: &mut Noise, index: usize| {
        let next = left.get(index).copied().unwrap_or(0) as usize;
        ((next + 1 + noise.below(tiny::VOCAB - 1)) % tiny::VOCAB) as u32
    };
    (0..wrong).for_each(|index| tokens.push(off(noise, right + index)));
    (slot, right, tokens)
}
