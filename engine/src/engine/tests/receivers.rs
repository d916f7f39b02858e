//! Other nodes that ask for what is cached here. Catches one that is kept waiting for a long step, is refused
//! where it could wait, or is given what is not its own.

use std::sync::mpsc::{Receiver, sync_channel};
use std::time::{Duration, Instant};

use super::sending::{Granted, Memory};
use super::stepper::Stepper;
use super::*;
use crate::engine::{Accepted, Asked, AttachRequest};
use crate::kv::transfer::sender::Sender;
use crate::kv::transfer::{Reason, TransferError, Window};

/// Has a node ask for these tokens, of which it lacks everything; what it is told, and where blocks go.
fn fetch(handle: &Handle, prompt: &[u32], wait: Duration) -> (Receiver<Granted>, Arc<Memory>) {
    let scope = job(prompt, 1, None).scope;
    let window = Arc::new(Memory::default());
    window.free.lock().unwrap().extend(0..64);
    let request = AttachRequest {
        asked: Asked::Cached {
            chain: hash_chain(&scope.namespace, prompt),
            tokens: prompt.to_vec(),
            scope,
        },
        missing: vec![(0, (prompt.len() / BLOCK_TOKENS) as u32)],
        receiver: "other".to_owned(),
        until: Instant::now() + wait,
        sender: Arc::new(Sender::new(
            Arc::clone(&window) as Arc<dyn Window>,
            Box::new(|| ()),
        )),
    };
    let (answer, granted) = sync_channel(1);
    assert!(handle.kv_attach(request, answer));
    (granted, window)
}

const PATIENT: Duration = Duration::from_secs(60);

fn accepted(granted: &Receiver<Granted>) -> Option<Accepted> {
    let told = granted.try_recv().ok()?;
    Some(told.expect("it is granted"))
}

/// The blocks of a cached prompt.
fn cached(stepper: &mut Stepper, seed: u64, blocks: usize) -> Vec<u32> {
    let prompt = Random(seed).tokens(blocks * BLOCK_TOKENS);
    let mut told = stepper.submit(job(&prompt, 1, None));
    stepper.finish(&mut told);
    prompt
}

#[test]
fn who_comes_while_a_pass_computes_is_served_by_its_end() {
    let gate = Arc::<Gate>::default();
    let mut stepper = Stepper::new(parts(64, Arc::clone(&gate)));
    let prompt = cached(&mut stepper, 21, 6);
    let mut other = stepper.submit(job(&Random(22).tokens(60), 1, None));
    let (handle, wanted) = (stepper.handle.clone(), prompt.clone());
    let (report, reported) = sync_channel(1);
    let comes = move || {
        let _ = report.send(fetch(&handle, &wanted, PATIENT));
    };
    gate.after_layers([Box::new(comes) as Hook]);
    let passes = gate.passes.load(Ordering::SeqCst);
    stepper.step();
    assert_eq!(gate.passes.load(Ordering::SeqCst), passes + 1, "one pass");
    let (granted, window) = reported.try_recv().expect("it came within the pass");
    let granted = accepted(&granted).expect("it was served within the pass");
    assert_eq!(granted.blocks, 6);
    let sent = window.put.lock().unwrap().concat();
    let sent: Vec<_> = sent
        .as_chunks()
        .0
        .iter()
        .map(|b| u32::from_le_bytes(*b))
        .collect();
    assert_eq!(sent, prompt);
    let streamed = stepper.engine.parts.metrics.transfers.bytes_streamed.get();
    assert_eq!(
        streamed as usize,
        4 * prompt.len(),
        "all of it within the pass"
    );
    stepper.handle.kv_received(granted.id);
    stepper.finish(&mut other);
    stepper.end();
}

#[test]
fn who_finds_no_room_waits_until_others_have_theirs() {
    let mut stepper = Stepper::of(64);
    let first = cached(&mut stepper, 23, 20);
    let second = cached(&mut stepper, 24, 20);
    let (one, _) = fetch(&stepper.handle, &first, PATIENT);
    let (two, window) = fetch(&stepper.handle, &second, PATIENT);
    let (late, _) = fetch(&stepper.handle, &second, Duration::ZERO);
    // It would fit, and would keep the one before it waiting.
    let (small, _) = fetch(&stepper.handle, &second[..8 * BLOCK_TOKENS], PATIENT);
    stepper.step();
    let one = accepted(&one).expect("half of the pool has room for it");
    assert!(two.try_recv().is_err(), "it waits");
    assert!(small.try_recv().is_err(), "behind the other");
    let refused = late.try_recv().expect("told").expect_err("its time is up");
    let is_busy = matches!(
        &refused,
        TransferError::Refused {
            reason: Reason::Busy,
            ..
        }
    );
    assert!(is_busy, "{refused}");
    stepper.handle.kv_received(one.id);
    stepper.step();
    let two = accepted(&two).expect("there is room now");
    assert_eq!(window.put.lock().unwrap().len(), 20);
    let small = accepted(&small).expect("and after it");
    stepper.handle.kv_received(two.id);
    stepper.handle.kv_received(small.id);
    stepper.end();
}

/// More than may ever be pinned: the beginning is given.
#[test]
fn a_prompt_of_most_of_the_pool_is_given_in_part() {
    let mut stepper = Stepper::of(64);
    let prompt = cached(&mut stepper, 25, 40);
    let (granted, window) = fetch(&stepper.handle, &prompt, PATIENT);
    stepper.step();
    let granted = accepted(&granted).expect("granted");
    assert_eq!(granted.blocks, 32);
    assert_eq!(window.put.lock().unwrap().len(), 32);
    stepper.handle.kv_received(granted.id);
    stepper.end();
}

/// Would catch blocks that stay pinned for a node that has left by the time it is told.
#[test]
fn nothing_stays_pinned_for_one_that_has_left() {
    let mut stepper = Stepper::of(64);
    let prompt = cached(&mut stepper, 26, 6);
    let (granted, _) = fetch(&stepper.handle, &prompt, PATIENT);
    drop(granted);
    stepper.step();
    stepper.end();
}
