//! Blocks that come from another node, and those that go to one, without any network. Catches blocks that are
//! held for ever or twice, that come in an order that nobody thought of, or that somebody else needs more.

use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::{Duration, Instant};

use super::stepper::{Stepper, Told};
use super::*;
use crate::engine::{
    Accepted, Asked, AttachRequest, HandOver, Inbound, OnFailure, Remote, TakeOver,
};
use crate::kv::transfer::auth::prompt_digest;
use crate::kv::transfer::client::Order;
use crate::kv::transfer::part::Part;
use crate::kv::transfer::sender::Sender;
use crate::kv::transfer::wire::Writer;
use crate::kv::transfer::{End, First, Medium, Payload, Reason, TransferError, TransferId, Window};

const ID: TransferId = TransferId([7; 16]);

pub(super) type Granted = Result<Accepted, TransferError>;

fn stepper(kv_blocks: u32) -> (Stepper, Receiver<Order>) {
    let (orders, to_fetch) = sync_channel(4);
    let parts = Parts {
        orders: Some(orders),
        ..parts(kv_blocks, Arc::default())
    };
    (Stepper::new(parts), to_fetch)
}

fn take_over(prompt: &[u32], output_max: usize) -> Job {
    let mut job = job(prompt, output_max, None);
    let chain = hash_chain(&job.scope.namespace, prompt);
    job.remote = Remote::TakeOver(Box::new(TakeOver {
        id: Some(ID),
        sender: "prefill".into(),
        endpoints: Vec::new(),
        prompt: prompt_digest(&chain, prompt),
        chain,
        timeout: Duration::from_secs(30),
        total: None,
        on_failure: OnFailure::Recompute,
    }));
    job
}

#[derive(Debug)]
struct Bytes(Vec<u8>);

impl Payload for Bytes {
    fn bytes(&self) -> &[u8] {
        &self.0
    }
}

impl Stepper {
    fn comes(&self, order: &Order, prompt: &[u32], block: u32) {
        let tokens = &prompt[block as usize * BLOCK_TOKENS..][..BLOCK_TOKENS];
        self.part_comes(order, Part::block(block, LAYERS), tokens);
    }

    fn part_comes(&self, order: &Order, part: Part, tokens: &[u32]) {
        let bytes = tokens.iter().flat_map(|token| token.to_le_bytes());
        let payload = Box::new(Bytes(bytes.collect()));
        let inbound = Inbound::part(order.number, part, payload);
        assert!(self.handle.kv_inbound(inbound));
    }

    fn ends(&self, order: &Order, ended: Result<End, TransferError>) {
        assert!(self.handle.kv_inbound(Inbound::ended(order.number, ended)));
    }

    fn check(mut self, mut told: Told, prompt: &[u32], count: usize) -> u64 {
        self.finish(&mut told);
        assert_eq!(told.tokens(), answer(prompt, count));
        let computed = self.computed();
        self.end();
        computed
    }
}

fn first(prompt: &[u32], cached_tokens: usize) -> End {
    let token = answer(prompt, 1)[0];
    End {
        first: Some(First {
            token,
            logprobs: None,
        }),
        cached_tokens,
    }
}

#[test]
fn blocks_may_come_in_any_order_and_the_answer_begins_with_what_was_handed_over() {
    let prompt = Random(5).tokens(70);
    let (mut stepper, orders) = stepper(32);
    let told = stepper.submit(take_over(&prompt, 9));
    stepper.step();
    let order = orders.try_recv().expect("an order");
    assert_eq!((order.blocks, order.held), (4, 0));
    for block in [2, 0, 3, 1] {
        stepper.comes(&order, &prompt, block);
        stepper.step();
        assert!(
            stepper.engine.running.is_empty(),
            "it waits for all of them"
        );
    }
    stepper.ends(&order, Ok(first(&prompt, 48)));
    stepper.step();
    // 6 tokens of the prompt, and the first one of the answer with them.
    assert_eq!(stepper.computed(), 7);
    let mut told = told;
    assert_eq!(told.hear().joined, Some(48), "what was cached there");
    assert_eq!(stepper.check(told, &prompt, 9), 7 + 7);
}

/// Would catch a block that is taken for whole before its last layer is here, or never.
#[test]
fn layers_may_come_in_any_order_and_once_more_after_a_break() {
    let prompt = Random(11).tokens(70);
    let (mut stepper, orders) = stepper(32);
    let told = stepper.submit(take_over(&prompt, 9));
    stepper.step();
    let order = orders.try_recv().expect("an order");
    let layer = |stepper: &Stepper, first: u32, blocks: u16, layer: u16| {
        let part = Part {
            first,
            blocks,
            layer,
            layers: 1,
        };
        let tokens = part.numbers().flat_map(|block| {
            let block = &prompt[block * BLOCK_TOKENS..][..BLOCK_TOKENS];
            block[tokens_of(part.layer_range())].to_vec()
        });
        stepper.part_comes(&order, part, &tokens.collect::<Vec<_>>());
    };
    let findable = |stepper: &mut Stepper, count: usize, what: &str| {
        stepper.step();
        assert_eq!(stepper.engine.pool.published(), count, "{what}");
    };
    layer(&stepper, 0, 2, 1);
    findable(&mut stepper, 0, "the last layer alone");
    layer(&stepper, 1, 1, 0);
    findable(
        &mut stepper,
        0,
        "the second block is not found without the first",
    );
    // As after a break: the first block begins anew.
    layer(&stepper, 0, 1, 1);
    findable(&mut stepper, 0, "the same once more");
    layer(&stepper, 0, 1, 0);
    findable(&mut stepper, 2, "both");
    layer(&stepper, 2, 2, 0);
    // With others that are whole by now, and of which it makes nothing.
    stepper.part_comes(&order, Part::block(1, LAYERS), &[7; BLOCK_TOKENS]);
    layer(&stepper, 1, 3, 1);
    findable(&mut stepper, 4, "all");
    stepper.ends(&order, Ok(first(&prompt, 48)));
    assert_eq!(stepper.check(told, &prompt, 9), 7 + 7);
}

#[test]
fn what_does_not_come_is_computed() {
    let prompt = Random(6).tokens(64);
    let wrong_size = |stepper: &Stepper, order: &Order| {
        stepper.part_comes(order, Part::block(1, LAYERS), &[0; 5]);
    };
    type Fault<'a> = &'a dyn Fn(&Stepper, &Order);
    let faults: [(&str, Fault); 4] = [
        ("the end comes early", &|s, order| {
            s.ends(order, Ok(first(&prompt, 0)))
        }),
        ("the connection fails", &|s, order| {
            s.ends(order, Err(TransferError::Damaged))
        }),
        ("a block of no size", &wrong_size),
        ("a refusal", &|s, order| {
            s.ends(order, Err(TransferError::refused(Reason::Scope, "no")))
        }),
    ];
    for (name, fault) in faults {
        check_fault(name, &prompt, fault);
    }
}

/// One block has come, and then this: the rest of the four is computed.
fn check_fault(name: &str, prompt: &[u32], fault: &dyn Fn(&Stepper, &Order)) {
    let (mut stepper, orders) = stepper(32);
    let told = stepper.submit(take_over(prompt, 3));
    stepper.step();
    let order = orders.try_recv().expect("an order");
    stepper.comes(&order, prompt, 0);
    fault(&stepper, &order);
    stepper.step();
    let failed = stepper.engine.parts.metrics.transfers.failed.get();
    assert_eq!(failed, 1, "{name}");
    // Late, and nobody's any more.
    stepper.comes(&order, prompt, 2);
    let computed = stepper.check(told, prompt, 3);
    assert_eq!(
        computed,
        64 - 16 + 2,
        "{name}: the block that had come was used"
    );
}

/// Would catch bytes that are written past a block, or taken for layers that they are not.
#[test]
fn parts_that_no_block_has_are_refused() {
    let prompt = Random(13).tokens(64);
    let part = |first, blocks, layer, layers| Part {
        first,
        blocks,
        layer,
        layers,
    };
    let all = LAYERS as u16;
    for (name, part, tokens) in [
        ("more layers than there are", part(1, 1, 0, all + 1), 24),
        ("a layer after the last", part(1, 1, all, 1), LAYER_TOKENS),
        ("no layer", part(1, 1, 0, 0), 0),
        ("no block", part(1, 0, 0, all), 0),
        ("a block after the last", part(3, 2, 0, 1), BLOCK_TOKENS),
        ("too few bytes", part(1, 2, 0, 1), LAYER_TOKENS),
    ] {
        let zeros = vec![0; tokens];
        check_fault(name, &prompt, &|s, order| s.part_comes(order, part, &zeros));
    }
}

#[test]
fn a_client_that_leaves_while_blocks_come_gives_them_back() {
    let prompt = Random(7).tokens(64);
    let (mut stepper, orders) = stepper(32);
    let told = stepper.submit(take_over(&prompt, 3));
    stepper.step();
    let order = orders.try_recv().expect("an order");
    stepper.comes(&order, &prompt, 0);
    stepper.step();
    assert_eq!(stepper.engine.pool.held(), 1);
    drop(told);
    stepper.end();
}

/// A request that runs comes first: blocks that have not joined are let go for it.
#[test]
fn a_dry_pool_lets_go_of_what_has_not_joined() {
    let (long, prompt) = (Random(8).tokens(30), Random(9).tokens(64));
    let (mut stepper, orders) = stepper(24);
    let mut running = stepper.submit(job(&long, 340, None));
    (0..3).for_each(|_| stepper.step());
    let mut told = stepper.submit(take_over(&prompt, 3));
    stepper.step();
    let order = orders.try_recv().expect("it was promised its blocks");
    (0..4).for_each(|block| stepper.comes(&order, &prompt, block));
    stepper.finish(&mut running);
    assert_eq!(running.tokens(), answer(&long, 340));
    stepper.ends(&order, Ok(first(&prompt, 0)));
    stepper.finish(&mut told);
    assert_eq!(told.tokens(), answer(&prompt, 3));
    assert_eq!(stepper.engine.parts.metrics.preemptions.get(), 0);
    assert_eq!(stepper.engine.parts.metrics.transfers.failed.get(), 1);
    stepper.end();
}

/// Would catch a request that is held for as long as something trickles in.
#[test]
fn what_takes_too_long_as_a_whole_is_given_up() {
    let prompt = Random(12).tokens(64);
    let (mut stepper, orders) = stepper(32);
    let mut wanted = take_over(&prompt, 3);
    if let Remote::TakeOver(take_over) = &mut wanted.remote {
        take_over.total = Some(Duration::ZERO);
    }
    let told = stepper.submit(wanted);
    stepper.step();
    let order = orders.try_recv().expect("an order");
    stepper.comes(&order, &prompt, 0);
    assert!(stepper.handle.kv_inbound(Inbound::alive(order.number)));
    stepper.step();
    assert_eq!(stepper.engine.parts.metrics.transfers.failed.get(), 1);
    // The block that came was used.
    assert_eq!(stepper.check(told, &prompt, 3), 64 - 16 + 2);
}

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
