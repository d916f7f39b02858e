//! An answer, token by token, as the engine's step loop takes it.

use std::sync::Arc;

use constrain::{Compiled, Constraint};
use rand::rngs::StdRng;
use rand::seq::IndexedRandom as _;

use crate::vocabulary::{EOS, opens, size};

/// How a walk picks among allowed tokens.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Pick {
    /// Any.
    Uniform,
    /// One that opens something, where there is one.
    Opening,
    /// Any but the end, where there is one.
    Endless,
}

/// How a walk ended.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum End {
    /// The answer was complete.
    Complete,
    /// The budget ran out before.
    Cut,
}

/// Walks as the engine's step loop does: completion, forced tokens, mask, pick, commit.
pub(crate) fn walk(
    compiled: &Arc<Compiled>,
    budget: usize,
    pick: Pick,
    forcing: bool,
    random: &mut StdRng,
) -> (Vec<u32>, End) {
    let mut constraint = compiled.start();
    let mut out = Vec::new();
    loop {
        if constraint.is_over() {
            return (out, End::Complete);
        }
        if let Some(rest) = constraint
            .completion(budget - out.len())
            .expect("it goes on")
        {
            out.extend(rest);
            return (out, End::Complete);
        }
        if forcing {
            out.extend(constraint.forced(budget - out.len()).expect("it goes on"));
            if constraint.is_over() {
                return (out, End::Complete);
            }
        }
        if out.len() == budget {
            let end = if constraint.is_complete() {
                End::Complete
            } else {
                End::Cut
            };
            return (out, end);
        }
        let token = choose(&mut constraint, pick, random);
        constraint.commit(token).expect("it goes on");
        if token == EOS {
            return (out, End::Complete);
        }
        out.push(token);
    }
}

fn choose(constraint: &mut Constraint, pick: Pick, random: &mut StdRng) -> u32 {
    let mask = constraint.mask().expect("it goes on");
    let allowed: Vec<u32> = (0..size()).filter(|token| mask.allows(*token)).collect();
    let preferred: Vec<u32> = match pick {
        Pick::Uniform => Vec::new(),
        Pick::Opening => allowed.iter().copied().filter(|t| opens(*t)).collect(),
        Pick::Endless => allowed.iter().copied().filter(|t| *t != EOS).collect(),
    };
    let from = if preferred.is_empty() {
        &allowed
    } else {
        &preferred
    };
    *from.choose(random).expect("the mask allows something")
}
