//! Who goes first. Catches a tenant that delays another by queueing much, a short prompt stuck behind
//! a long one, a request that starves, one that outlives its deadline, and work done twice.

use std::time::{Duration, Instant};

use super::stepper::Stepper;
use super::*;
use crate::scheduler::turns::TURN_TOKENS;

#[test]
fn a_thousand_requests_of_one_tenant_do_not_delay_the_single_one_of_another() {
    let mut stepper = Stepper::of(2000);
    let mut random = Random(5);
    let many: Vec<_> = (0..1000)
        .map(|_| stepper.submit(job(&random.tokens(300), 200, Some("many"))))
        .collect();
    // Some run and hundreds wait when the single one comes.
    while stepper.engine.running.len() < 8 {
        stepper.step();
    }
    let before = stepper.computed();
    let prompt = random.tokens(300);
    let mut single = stepper.submit(job(&prompt, 5, Some("one")));
    stepper.finish(&mut single);
    assert_eq!(single.tokens(), answer(&prompt, 5));
    let computed = stepper.computed() - before;
    // Its own 305, as much of the other's, and the other's decodes of these few steps.
    assert!(computed < 2500, "{computed} tokens until it was done");
    drop(many);
    stepper.end();
}

#[test]
fn a_full_batch_of_one_tenant_makes_room_for_another() {
    // 40 blocks hold two of these at most.
    let mut stepper = Stepper::of(40);
    let mut random = Random(6);
    let prompts: Vec<_> = (0..6).map(|_| random.tokens(100)).collect();
    let mut many: Vec<_> = prompts
        .iter()
        .map(|prompt| stepper.submit(job(prompt, 300, Some("many"))))
        .collect();
    while many[0].hear().outputs < 20 {
        stepper.step();
    }
    let steps = stepper.steps;
    let prompt = random.tokens(100);
    let mut single = stepper.submit(job(&prompt, 3, Some("one")));
    stepper.finish(&mut single);
    assert!(
        stepper.steps - steps < 30,
        "it did not wait for an answer to end"
    );
    assert_eq!(single.tokens(), answer(&prompt, 3));
    for (told, prompt) in many.iter_mut().zip(&prompts) {
        stepper.finish(told);
        assert_eq!(told.tokens(), answer(prompt, 300), "the victims come back");
    }
    stepper.end();
}

#[test]
fn a_short_prompt_passes_a_long_one() {
    let mut stepper = Stepper::of(1000);
    let mut random = Random(7);
    let mut long = stepper.submit(job(&random.tokens(8000), 1, None));
    stepper.step();
    let before = stepper.computed();
    let mut short = stepper.submit(job(&random.tokens(50), 1, None));
    stepper.finish(&mut short);
    let computed = stepper.computed() - before;
    assert!(
        computed <= (TURN_TOKENS + 64) as u64,
        "{computed} tokens before it"
    );
    assert!(long.hear().ended.is_none());
    stepper.finish(&mut long);
    stepper.end();
}

/// Catches a classic step that is cut after all, and a paced one that is not.
#[test]
fn only_without_a_pace_a_whole_prompt_is_computed_while_another_answers() {
    for (beside_decode, whole) in [(Beside::Unpaced, true), (Beside::Paced, false)] {
        let mut stepper = Stepper::new(Parts {
            step_tokens: 4096,
            beside_decode,
            ..parts(1000, Arc::default())
        });
        let mut random = Random(9);
        let prompt = random.tokens(20);
        let mut answering = stepper.submit(job(&prompt, 40, None));
        while answering.hear().outputs < 5 {
            stepper.step();
        }
        let long = random.tokens(3000);
        let mut told = stepper.submit(job(&long, 1, None));
        let before = stepper.computed();
        stepper.step();
        let computed = stepper.computed() - before;
        assert_eq!(computed == 3001, whole, "{computed} tokens in a step");
        stepper.finish(&mut told);
        stepper.finish(&mut answering);
        assert_eq!(told.tokens(), answer(&long, 1));
        assert_eq!(answering.tokens(), answer(&prompt, 40));
        stepper.end();
    }
}

/// Catches prompts that count for nothing, answers taken for prompts, and a queue that slows the
/// answers of another salt.
#[test]
fn prompts_weigh_as_they_are_more_than_the_answers_of_their_salt() {
    for (other_answers, expected) in [(false, 3.0), (true, 1.0)] {
        let mut stepper = Stepper::of(2000);
        let mut random = Random(10);
        let mut answering = vec![stepper.submit(job(&random.tokens(20), 40, Some("many")))];
        if other_answers {
            answering.push(stepper.submit(job(&random.tokens(20), 40, Some("one"))));
        }
        while answering.iter_mut().any(|told| told.hear().outputs < 5) {
            stepper.step();
        }
        assert_eq!(stepper.engine.schedule().weight, 1.0, "nobody waits");
        let prompts: Vec<_> = (0..3).map(|_| random.tokens(3000)).collect();
        let submit = |prompt: &Vec<u32>| stepper.submit(job(prompt, 1, Some("many")));
        let mut waiting: Vec<_> = prompts.iter().map(submit).collect();
        stepper.step();
        assert_eq!(stepper.engine.schedule().weight, expected);
        for told in waiting.iter_mut().chain(&mut answering) {
            stepper.finish(told);
        }
        stepper.end();
    }
}

#[test]
fn nobody_starves_under_adversarial_priorities() {
    let mut stepper = Stepper::of(60);
    let mut random = Random(8);
    let mut low = job(&random.tokens(200), 20, None);
    low.priority = i32::MAX;
    let mut low = stepper.submit(low);
    let mut others = Vec::new();
    for _ in 0..3000 {
        while others.len() < 8 {
            let mut other = job(&random.tokens(100), 10, None);
            other.priority = i32::MIN + random.below(1000) as i32;
            others.push(stepper.submit(other));
        }
        stepper.step();
        others.retain_mut(|told| told.hear().ended.is_none());
        if low.hear().ended.is_some() {
            break;
        }
    }
    assert_eq!(low.done().0, Ending::Length);
    // Among equals the more important goes first.
    drop(others);
    stepper.step();
    let mut jobs = Vec::new();
    for priority in [3, -2, 0] {
        let mut job = job(&random.tokens(64), 1, None);
        job.priority = priority;
        jobs.push((priority, stepper.submit(job)));
    }
    let mut order = Vec::new();
    while !jobs.is_empty() {
        stepper.step();
        order.extend(
            jobs.extract_if(.., |(_, told)| told.hear().ended.is_some())
                .map(|(priority, _)| priority),
        );
    }
    assert_eq!(order, [-2, 0, 3]);
    stepper.end();
}

#[test]
fn a_beginning_that_is_being_computed_is_not_computed_twice() {
    let mut stepper = Stepper::of(400);
    let mut random = Random(9);
    let beginning = random.tokens(1000);
    // Each is more important than those before it, and would go first.
    let mut told = Vec::new();
    for number in 0..6 {
        let prompt = [&beginning[..], &random.tokens(20)[..]].concat();
        let mut job = job(&prompt, 1, None);
        job.priority = -number;
        told.push(stepper.submit(job));
        stepper.step();
    }
    // A stranger is not held up by them.
    let mut stranger = stepper.submit(job(&random.tokens(30), 1, Some("other")));
    stepper.finish(&mut stranger);
    assert!(stepper.computed() < 900);
    for told in &mut told {
        stepper.finish(told);
    }
    let most = 1000 + 6 * (20 + 16) + 30;
    assert!(stepper.computed() <= most, "{} tokens", stepper.computed());
    stepper.end();
}

#[test]
fn a_deadline_ends_a_request_that_waits_and_one_that_runs() {
    let mut stepper = Stepper::of(100);
    let mut late = job(&[1, 2, 3], 1500, None);
    late.deadline = Some(Instant::now() + Duration::from_millis(3));
    let mut runs = stepper.submit(late);
    let mut late = job(&[1, 2, 3], 5, None);
    late.deadline = Some(Instant::now());
    let mut waits = stepper.submit(late);
    for told in [&mut waits, &mut runs] {
        stepper.finish(told);
        let error = told.failed();
        assert_eq!(
            (error.kind, error.code),
            (Kind::TimedOut, "request_timeout")
        );
    }
    assert_eq!(waits.joined, None);
    stepper.end();
}
