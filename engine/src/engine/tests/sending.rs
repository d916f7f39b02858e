//! Blocks that go to another node, without any network. Catches blocks that are sent before they are computed,
//! twice, never, or to one that has gone.

use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::{Duration, Instant};

use super::stepper::Stepper;
use super::*;
use crate::engine::{Accepted, Asked, AttachRequest, HandOver, Remote};
use crate::kv::transfer::auth::prompt_digest;
use crate::kv::transfer::part::Part;
use crate::kv::transfer::sender::Sender;
use crate::kv::transfer::wire::Writer;
use crate::kv::transfer::{Medium, Reason, TransferError, TransferId, Window};

const ID: TransferId = TransferId([7; 16]);

pub(super) type Granted = Result<Accepted, TransferError>;

/// A window that remembers what was put into it.
#[derive(Debug, Default)]
pub(super) struct Memory {
    pub(super) free: Mutex<Vec<u32>>,
    pub(super) put: Mutex<Vec<Vec<u8>>>,
}

impl Window for Memory {
    fn medium(&self) -> Medium {
        Medium::Tcp
    }

    fn take(&self) -> Option<u32> {
        self.free.lock().unwrap().pop()
    }

    fn fill(&self, _place: u32, bytes: usize, fill: &mut dyn FnMut(&mut [u8])) {
        let mut bytes = vec![0; bytes];
        fill(&mut bytes);
        self.put.lock().unwrap().push(bytes);
    }

    fn send(&self, _place: u32, _part: Part, _to: &mut Writer) -> std::io::Result<()> {
        Ok(())
    }

    fn has_room(&self) -> bool {
        !self.free.lock().unwrap().is_empty()
    }

    fn give_back(&self, place: u32) -> bool {
        self.free.lock().unwrap().push(place);
        true
    }
}

impl Memory {
    /// Everything but the first of twelve blocks is there, in order: two blocks have as many layers as a
    /// place has room for, the one layer of both, then the other.
    fn check(&self, prompt: &[u32]) {
        let put = std::mem::take(&mut *self.put.lock().unwrap()).concat();
        let (words, _) = put.as_chunks();
        let sent: Vec<u32> = words.iter().map(|b| u32::from_le_bytes(*b)).collect();
        let pairs = [1..3, 3..4, 4..6, 6..8, 8..10, 10..12].into_iter();
        let layered = pairs.flat_map(|blocks| layer_by_layer(prompt, blocks));
        assert_eq!(sent, layered.collect::<Vec<_>>());
    }
}

/// A receiver that lacks all of twelve blocks but the first, and what it is told.
fn attach(
    window: &Arc<Memory>,
    prompt: [u8; 16],
) -> (AttachRequest, SyncSender<Granted>, Receiver<Granted>) {
    let window = Arc::clone(window) as Arc<dyn Window>;
    let request = AttachRequest {
        asked: Asked::HandOver {
            id: ID,
            key: None,
            prompt,
            blocks: 12,
            salt: None,
        },
        missing: vec![(1, 12)],
        receiver: "decode".to_owned(),
        until: Instant::now() + Duration::from_secs(30),
        sender: Arc::new(Sender::new(window, Box::new(|| ()))),
    };
    let (answer, granted) = sync_channel(1);
    (request, answer, granted)
}

/// A prompt that is handed over, and its digest.
fn hand_over(prompt: &[u32]) -> (Job, [u8; 16]) {
    let mut first = job(prompt, 1, None);
    let chain = hash_chain(&first.scope.namespace, prompt);
    let digest = prompt_digest(&chain, prompt);
    first.remote = Remote::HandOver(HandOver {
        id: ID,
        receiver: "decode".into(),
        prompt: digest,
        hold: Duration::from_secs(30),
    });
    (first, digest)
}

/// The first layer of these blocks, then the next.
fn layer_by_layer(prompt: &[u32], blocks: std::ops::Range<usize>) -> Vec<u32> {
    let mut tokens = Vec::new();
    for layer in 0..LAYERS {
        for block in blocks.clone() {
            let block = &prompt[block * BLOCK_TOKENS..][..BLOCK_TOKENS];
            tokens.extend(&block[tokens_of(layer..layer + 1)]);
        }
    }
    tokens
}

/// Would catch blocks that are sent before they are computed, twice, or never because a window was full.
#[test]
fn blocks_go_out_step_by_step_as_far_as_there_is_room() {
    let prompt = Random(10).tokens(200);
    let mut stepper = Stepper::of(64);
    let (first, digest) = hand_over(&prompt);
    let window = Arc::new(Memory::default());
    window.free.lock().unwrap().extend([0, 1, 2, 3, 4]);
    let (request, answer, granted) = attach(&window, digest);
    stepper.handle.kv_attach(request, answer);
    stepper.step();
    assert!(granted.try_recv().is_err(), "nobody prefills yet");
    let mut told = stepper.submit(first);
    // 64 tokens a step.
    stepper.step();
    assert_eq!(
        granted
            .try_recv()
            .expect("granted")
            .expect("accepted")
            .blocks,
        12
    );
    assert_eq!(
        window.put.lock().unwrap().len(),
        3,
        "the blocks of the first step, but for the first: a layer of two, the other layer, and one whole"
    );
    let transfers = &stepper.engine.parts.metrics.transfers;
    assert_eq!(
        transfers.bytes_streamed.get(),
        3 * 4 * BLOCK_TOKENS as u64,
        "within the step"
    );
    stepper.finish(&mut told);
    assert_eq!(
        window.put.lock().unwrap().len(),
        5,
        "there was room for no more"
    );
    let (other, refused, why) = attach(&window, digest);
    stepper.handle.kv_attach(other, refused);
    stepper.step();
    let why = why.try_recv().expect("an answer").expect_err("taken");
    assert!(
        matches!(
            why,
            TransferError::Refused {
                reason: Reason::Used,
                ..
            }
        ),
        "{why}"
    );
    assert!((0..6).all(|place| window.give_back(place)));
    stepper.step();
    window.check(&prompt);
    assert_eq!(
        stepper.engine.pool.held(),
        12,
        "pinned until it is received"
    );
    stepper.handle.kv_received(ID);
    stepper.end();
}

/// Would catch layers that are sent of blocks that are not there any more, or not yet again.
#[test]
fn a_prompt_that_begins_anew_sends_what_is_left_once_it_is_there_again() {
    let prompt = Random(14).tokens(200);
    let mut stepper = Stepper::of(64);
    let (first, digest) = hand_over(&prompt);
    let window = Arc::new(Memory::default());
    window.free.lock().unwrap().extend(0..3);
    let (request, answer, _granted) = attach(&window, digest);
    stepper.handle.kv_attach(request, answer);
    let mut told = stepper.submit(first);
    // 64 tokens a step, and room for the parts of the first.
    stepper.step();
    stepper.step();
    stepper.engine.preempt(0, &mut Vec::new());
    // Others need the whole pool.
    let pool = &mut stepper.engine.pool;
    let all: Vec<_> = (0..64).map_while(|_| pool.allocate()).collect();
    assert_eq!(all.len(), 64, "nothing was in use");
    pool.release(&all, 0);
    stepper.step();
    assert_eq!(window.put.lock().unwrap().len(), 3, "no room for more");
    window.free.lock().unwrap().extend(0..64);
    stepper.finish(&mut told);
    stepper.step();
    assert_eq!(told.done().0, Ending::Length, "it was prefilled again");
    window.check(&prompt);
    stepper.handle.kv_received(ID);
    stepper.end();
}

/// Would catch a receiver whose connection broke while it waited, and that finds the transfer taken by it.
#[test]
fn who_comes_again_while_nobody_prefills_is_the_one_that_is_served() {
    let prompt = Random(15).tokens(200);
    let mut stepper = Stepper::of(64);
    let (first, digest) = hand_over(&prompt);
    let window = Arc::new(Memory::default());
    window.free.lock().unwrap().extend(0..64);
    let (request, answer, broken) = attach(&window, digest);
    stepper.handle.kv_attach(request, answer);
    stepper.step();
    let (request, answer, granted) = attach(&window, digest);
    stepper.handle.kv_attach(request, answer);
    stepper.step();
    let told = broken.try_recv().expect("told").expect_err("it is gone");
    let is_given_up = matches!(
        &told,
        TransferError::Refused {
            reason: Reason::GivenUp,
            ..
        }
    );
    assert!(is_given_up, "{told}");
    let mut told = stepper.submit(first);
    stepper.finish(&mut told);
    let granted = granted.try_recv().expect("told").expect("it is served");
    assert_eq!(granted.blocks, 12);
    window.check(&prompt);
    stepper.handle.kv_received(ID);
    stepper.end();
}
