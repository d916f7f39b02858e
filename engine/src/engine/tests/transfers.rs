//! Blocks that come from another node, without any network. Catches blocks that are
//! held for ever or twice, that come in an order that nobody thought of, or that somebody else needs more.

use std::sync::mpsc::{Receiver, sync_channel};
use std::time::Duration;

use super::stepper::{Stepper, Told};
use super::*;
use crate::engine::{Inbound, OnFailure, Remote, TakeOver};
use crate::kv::transfer::auth::prompt_digest;
use crate::kv::transfer::client::Order;
use crate::kv::transfer::part::Part;
use crate::kv::transfer::{End, First, Payload, Reason, TransferError, TransferId};

const ID: TransferId = TransferId([7; 16]);

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
