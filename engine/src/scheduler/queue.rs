//! How much do prompts that wait weigh beside answers that run?
//!
//! As much as they are more: where an agent sends sixteen requests at once, holding prompts back for
//! the first few answers would make all of them late. But prompts weigh only beside answers of their
//! own salt: nobody's queue slows another's answers.

use std::collections::BTreeMap;

use super::turns::Share;

/// Prompts that an answer makes room for, at most: its tokens come at least a fifth as often as alone.
const PROMPTS_PER_ANSWER: usize = 4;

/// How many answers run and prompts wait, by salt.
#[derive(Clone, Debug, Default)]
pub struct Queue {
    shares: BTreeMap<Share, (usize, usize)>,
}

impl Queue {
    /// Adds an answer that is being written.
    pub fn add_answer(&mut self, share: Share) {
        self.shares.entry(share).or_default().0 += 1;
    }

    /// Adds a prompt of which nothing was answered yet.
    pub fn add_prompt(&mut self, share: Share) {
        self.shares.entry(share).or_default().1 += 1;
    }

    /// What prefill weighs beside the answers: 1, or how many prompts wait for each answer of a salt,
    /// by the salt that has fewest.
    pub fn weight(&self) -> f64 {
        let mut least = PROMPTS_PER_ANSWER as f64;
        for (answers, prompts) in self.shares.values().filter(|(answers, _)| *answers > 0) {
            least = least.min(*prompts as f64 / *answers as f64);
        }
        least.max(1.0)
    }
}

#[cfg(test)]
mod tests {
    //! Catches a queue that slows another salt's answers, and one that counts for nothing.
    use super::*;

    #[test]
    fn prompts_weigh_beside_answers_of_their_own_salt() {
        // Answers and prompts of each salt.
        let rows: [(&[(usize, usize)], f64); 8] = [
            (&[(0, 5), (1, 0)], 1.0),
            (&[(8, 1)], 1.0),
            (&[(1, 3)], 3.0),
            (&[(1, 15)], 4.0),
            (&[(4, 12)], 3.0),
            (&[(1, 0), (0, 100)], 1.0),
            (&[(2, 0), (1, 100)], 1.0),
            (&[(1, 2), (9, 90)], 2.0),
        ];
        for (shares, expected) in rows {
            let mut queue = Queue::default();
            for (share, (answers, prompts)) in shares.iter().enumerate() {
                let share = Share(share as u64);
                (0..*answers).for_each(|_| queue.add_answer(share));
                (0..*prompts).for_each(|_| queue.add_prompt(share));
            }
            assert_eq!(queue.weight(), expected, "{shares:?}");
        }
    }
}
