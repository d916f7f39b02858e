//! Prompts that are only prefilled. Catches a block that stays pinned for ever, a ticket that works
//! twice, and tickets that starve the node.

use std::time::{Duration, Instant};

use super::stepper::{Stepper, Told};
use super::*;
use crate::engine::{HOLD_MAX, TicketId, Work};

fn prefill(prompt: &[u32], hold: Duration) -> Job {
    let mut job = job(prompt, 1, None);
    job.work = Work::PrefillOnly { hold };
    job
}

impl Stepper {
    fn release(&mut self, ticket: TicketId) -> bool {
        self.engine.pins.release(ticket, &mut self.engine.pool)
    }
}

#[test]
fn a_ticket_holds_the_full_blocks_and_works_once() {
    let mut stepper = Stepper::of(64);
    let prompt = Random(1).tokens(100);
    let mut told = stepper.submit(prefill(&prompt, Duration::from_secs(3600)));
    let before = Instant::now();
    stepper.finish(&mut told);
    let (ending, usage, held) = told.done();
    let held = held.expect("a ticket");
    assert_eq!((ending, held.blocks), (Ending::Length, 6));
    assert_eq!((usage.prompt_tokens, usage.output_tokens), (100, 0));
    assert!(held.deadline <= Instant::now() + HOLD_MAX && held.deadline > before);
    assert_eq!(
        stepper.engine.pool.held(),
        6,
        "the partial block is given back"
    );
    let info = stepper.engine.pins.info(held.ticket).expect("it is held");
    let namespace = Namespace::new("m", None, None);
    assert_eq!(info.chain, hash_chain(&namespace, &prompt));
    assert_eq!(info.blocks.len(), 6);
    assert_eq!(held.ticket.to_string().parse(), Ok(held.ticket));
    assert!(stepper.release(held.ticket));
    assert!(!stepper.release(held.ticket), "a ticket works once");
    assert!(stepper.engine.pins.info(held.ticket).is_none());
    let mut again = stepper.submit(job(&prompt, 3, None));
    stepper.finish(&mut again);
    assert_eq!(
        again.joined,
        Some(96),
        "what was prefilled is still findable"
    );
    assert_eq!(again.tokens(), answer(&prompt, 3));
    stepper.end();
}

#[test]
fn tickets_hold_at_most_half_and_break_before_the_node_does() {
    let mut stepper = Stepper::of(16);
    let hour = Duration::from_secs(3600);
    let mut pinned = Vec::new();
    for seed in 0..2 {
        let mut told = stepper.submit(prefill(&Random(seed).tokens(64), hour));
        stepper.finish(&mut told);
        pinned.push(told.done().2.expect("a ticket"));
    }
    let mut refused = stepper.submit(prefill(&Random(2).tokens(16), hour));
    stepper.finish(&mut refused);
    let error = refused.failed();
    assert_eq!(
        (error.kind, error.code),
        (Kind::Overloaded, "kv_tickets_full")
    );
    // 12 blocks beside the 8 that are pinned: one ticket goes, the one that ends first.
    let prompt = Random(3).tokens(160);
    let mut large = stepper.submit(job(&prompt, 30, None));
    stepper.finish(&mut large);
    assert_eq!(large.tokens(), answer(&prompt, 30));
    assert_eq!(stepper.engine.parts.metrics.tickets.broken.get(), 1);
    assert!(!stepper.release(pinned[0].ticket));
    assert!(stepper.release(pinned[1].ticket));
    stepper.end();
}

#[test]
fn pinned_blocks_always_come_back() {
    for seed in 0..30 {
        let mut random = Random(seed);
        let mut stepper = Stepper::of(14 + random.below(30) as u32);
        let shared = random.tokens(64);
        let mut live: Vec<(Told, Option<Vec<u32>>)> = Vec::new();
        let mut tickets = Vec::new();
        for _ in 0..200 {
            let mut prompt = shared[..random.below(64)].to_vec();
            let count = 1 + random.below(80);
            prompt.extend(random.tokens(count));
            match random.below(6) {
                0 => {
                    let hold = [0, 1, 60_000][random.below(3)];
                    let job = prefill(&prompt, Duration::from_millis(hold));
                    live.push((stepper.submit(job), None));
                }
                1 => live.push((stepper.submit(job(&prompt, 20, None)), Some(prompt))),
                2 if !live.is_empty() => drop(live.swap_remove(random.below(live.len()))),
                3 if !tickets.is_empty() => {
                    let ticket = tickets[random.below(tickets.len())];
                    stepper.release(ticket);
                    assert!(!stepper.release(ticket));
                }
                _ => stepper.step(),
            }
            for (told, prompt) in live.extract_if(.., |(told, _)| told.hear().ended.is_some()) {
                match prompt {
                    Some(prompt) => assert_eq!(told.tokens(), answer(&prompt, 20)),
                    None => tickets.extend(match &told.ended {
                        Some(super::stepper::Ended::Done(_, _, held)) => held.map(|h| h.ticket),
                        _ => None,
                    }),
                }
            }
        }
        for (mut told, _) in live {
            stepper.finish(&mut told);
        }
        let far = Instant::now() + 2 * HOLD_MAX;
        stepper.engine.expire_pins(far);
        stepper.end();
    }
}

#[test]
fn an_idle_engine_lets_tickets_expire() {
    let bench = Bench::new(64, 64, 8);
    let ticket = bench
        .handle
        .submit(prefill(&Random(1).tokens(100), Duration::from_millis(20)))
        .expect("room");
    bench.wait(ticket).expect("it is prefilled");
    // Nothing is sent to the engine meanwhile.
    let begun = Instant::now();
    while bench.metrics.tickets.expired.get() == 0 || bench.metrics.kv_blocks_held.get() > 0 {
        assert!(
            begun.elapsed() < Duration::from_secs(30),
            "it expires by itself"
        );
        std::thread::yield_now();
    }
    bench.end();
}
