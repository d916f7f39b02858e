//! Embeddings. Catches hidden states of another request, of a chunk counted twice, and a mean over
//! the uncached part alone.

use super::stepper::{Ended, Stepper};
use super::*;
use crate::engine::{Pooling, Work};

fn expected(prompt: &[u32], pooling: Pooling) -> Vec<f32> {
    let rows = prompt.iter().enumerate();
    let rows: Vec<_> = rows.map(|(i, token)| hidden_state(*token, i)).collect();
    let vector = match pooling {
        Pooling::Last => *rows.last().expect("a prompt has tokens"),
        Pooling::Mean => {
            let mean = |i| rows.iter().map(|row| row[i]).sum::<f32>() / rows.len() as f32;
            [mean(0), mean(1), mean(2)]
        }
    };
    let length = vector.iter().map(|v| v * v).sum::<f32>().sqrt();
    vector.iter().map(|v| v / length).collect()
}

#[test]
fn vectors_are_right_whatever_runs_beside_and_whatever_is_cached() {
    for seed in 0..20 {
        let mut random = Random(seed);
        let mut stepper = Stepper::of(16 + random.below(40) as u32);
        let shared = random.tokens(100);
        let mut asked = Vec::new();
        let mut others = Vec::new();
        for _ in 0..20 {
            let mut prompt = shared[..random.below(100)].to_vec();
            let count = 1 + random.below(100);
            prompt.extend(random.tokens(count));
            let pooling = [Pooling::Mean, Pooling::Last][random.below(2)];
            let mut job = job(&prompt, 30, None);
            if random.below(2) == 0 {
                job.work = Work::Embed(pooling);
                asked.push((stepper.submit(job), prompt, pooling));
            } else {
                others.push((stepper.submit(job), prompt));
            }
            if random.below(2) == 0 {
                stepper.step();
            }
        }
        for (mut told, prompt, pooling) in asked {
            stepper.finish(&mut told);
            let Some(Ended::Vector(vector, usage)) = &told.ended else {
                unreachable!("a vector, not {:?}", told.ended);
            };
            let expected = expected(&prompt, pooling);
            for (found, expected) in vector.iter().zip(&expected) {
                assert!((found - expected).abs() < 1e-4, "{vector:?} {expected:?}");
            }
            assert_eq!(vector.len(), expected.len());
            assert_eq!(
                (usage.prompt_tokens, usage.output_tokens),
                (prompt.len(), 0)
            );
        }
        for (mut told, prompt) in others {
            stepper.finish(&mut told);
            assert_eq!(told.tokens(), answer(&prompt, 30), "seed {seed}");
        }
        stepper.end();
    }
}
