//! What is known of nodes beyond their events, and what hostile events do to the rest.

use super::*;

fn prompt(first: u32, blocks: u32) -> Vec<u32> {
    (first..first + blocks * 16).collect()
}

fn chain(tokens: &[u32], salt: &str) -> Vec<cache_index::block::BlockHash> {
    hash_chain(&Namespace::new(MODEL, None, Some(salt)), tokens)
}

fn held(fleet: &Fleet, tokens: &[u32], salt: &str) -> usize {
    let known = fleet.known(MODEL, &chain(tokens, salt));
    known.first().map_or(0, |(_, tiers)| tiers.device)
}

/// A fleet of one node whose events, if any, are never heard.
fn one_node(events: Option<&str>) -> (Arc<Fleet>, Arc<Node>) {
    let addr = ([127, 0, 0, 1], 9).into();
    let fleet = Fleet::new(&[config(addr, events.map(str::to_owned), None)]);
    let node = Arc::clone(&fleet.nodes()[0]);
    (fleet, node)
}

/// Would catch siblings that spread because nobody knows what is on its way, and an expectation
/// that outlives its request or the node's process.
#[test]
fn siblings_are_expected_where_the_first_one_went() {
    let (fleet, node) = one_node(Some("tcp://127.0.0.1:9"));
    let tokens = prompt(0, 8);
    let first = fleet.dispatch(&node, &sent(128, 10, &chain(&tokens, SALT)));
    let second = fleet.dispatch(&node, &sent(128, 10, &chain(&tokens[..64], SALT)));
    assert_eq!(held(&fleet, &prompt(0, 20), SALT), 8);
    assert_eq!(held(&fleet, &tokens, "another scope"), 0);
    drop(first);
    assert_eq!(held(&fleet, &tokens, SALT), 4);
    fleet.forget(&node);
    assert_eq!(held(&fleet, &tokens, SALT), 0);
    drop(second);
    assert_eq!(fleet.expected_requests(), 0);
}

/// Would catch a node without events that gets no credit, credit for a request that never ran, or a
/// report that corrects nothing.
#[test]
fn a_node_without_events_is_judged_by_what_was_sent_there() {
    let (fleet, node) = one_node(None);
    let (old, new) = (prompt(0, 20), prompt(10_000, 20));
    drop(fleet.dispatch(&node, &sent(320, 10, &chain(&old, SALT))));
    assert_eq!(
        held(&fleet, &old, SALT),
        0,
        "it broke before its first token"
    );
    let serve = |tokens: &[u32], cached: u64| {
        let mut request = fleet.dispatch(&node, &sent(320, 10, &chain(tokens, SALT)));
        request.first_token();
        request.reported(cached);
    };
    serve(&old, 0);
    serve(&new, 0);
    assert_eq!(
        (held(&fleet, &old, SALT), held(&fleet, &new, SALT)),
        (20, 20)
    );
    assert_eq!(
        (fleet.held_blocks(&node), held(&fleet, &old, "other")),
        (40, 0)
    );
    // Zeros are not believed of a node that has never told of a cached token.
    serve(&new, 0);
    assert_eq!(held(&fleet, &old, SALT), 20);
    serve(&new, 319);
    serve(&new, 16);
    assert_eq!(
        (held(&fleet, &old, SALT), held(&fleet, &new, SALT)),
        (0, 20)
    );
    fleet.forget(&node);
    assert_eq!(held(&fleet, &new, SALT), 0);
}

/// Would catch a node whose events carry no salts (SGLang) and that gets no credit at all, or that is
/// judged by guesses though its events tell.
#[test]
fn a_node_is_judged_by_its_events_once_they_carry_salts() {
    let (_fleet, node) = one_node(Some("tcp://127.0.0.1:9"));
    assert!(!node.is_judged(), "nothing is known of its events");
    node.saw_chain(false);
    assert!(node.is_judged());
    node.saw_chain(true);
    node.saw_chain(false);
    assert!(!node.is_judged());
    node.forget_salts();
    node.saw_chain(false);
    assert!(node.is_judged());
}

/// Would catch a turn that is expected to find less than its node's events tell although nothing is
/// in flight there that could push it out: a prefix whose first session came long ago and which
/// others have used since.
#[test]
fn what_events_tell_is_believed_until_something_comes() {
    const HELD: usize = 24;
    for (events, idle, busy) in [
        (Some("tcp://127.0.0.1:9"), HELD, 20..HELD),
        (None, 10, 9..10),
    ] {
        let (fleet, node) = one_node(events);
        node.set_facts(|facts| facts.pool_blocks = 100);
        let of = |session: u128, prompt_tokens, cached_tokens| Dispatch {
            session: policies::view::SessionKey(session),
            cached_tokens,
            ..sent(prompt_tokens, 16, &[])
        };
        let overlap = || {
            let session = policies::view::SessionKey(1);
            let view = node.view_for(Tiers::on_device(HELD), session, 60);
            view.overlap_blocks
        };
        drop(fleet.dispatch(&node, &of(1, 60 * 16, 0)));
        // Three others find its first 24 blocks and bring 30 each.
        for session in 2..5 {
            drop(fleet.dispatch(&node, &of(session, 54 * 16, HELD as u64 * 16)));
        }
        assert_eq!(overlap(), idle, "{events:?}");
        let small = fleet.dispatch(&node, &of(5, 16, 0));
        assert!(busy.contains(&overlap()), "{}", overlap());
        let large = fleet.dispatch(&node, &of(6, 100 * 16, 0));
        assert_eq!(overlap(), 0);
        drop((small, large));
    }
}

fn stored_after(name: u64, parent: u64, tokens: usize) -> EventBatch {
    EventBatch {
        timestamp: 2.0,
        events: vec![KvEvent::Stored {
            block_hashes: vec![EngineHash::Int(name)],
            parent: Some(EngineHash::Int(parent)),
            token_ids: vec![7; tokens],
            block_size: 16,
            medium: None,
            lora_name: None,
            extra_keys: ExtraKeys::none(),
            group_idx: None,
            group_kind: GroupKind::default(),
        }],
        dp_rank: None,
        boot_id: None,
    }
}

/// Would catch a stream that brings the consumer down, or hostile events that cost honest ones their
/// credit or go uncounted: wrong lengths, parents in a circle, a flood.
#[tokio::test(flavor = "multi_thread")]
async fn hostile_events_are_counted_and_leave_the_rest_alone() {
    let tasks = Tasks::new(tokio::runtime::Handle::current());
    let side = Side::start(&tasks, ([127, 0, 0, 1], 0).into()).await;
    side.health.store(200, Ordering::Relaxed);
    let any = "tcp://127.0.0.1:0";
    let (mut events, live, replay) = Events::start(&tasks, any, any, vec![]).await;
    // Two entries of one fleet that name the same node: each is followed by itself.
    let twice = [("n", side.addr), ("same", side.addr)].map(|(id, addr)| NodeConfig {
        id: NodeId::new(id),
        ..config(addr, Some(live.clone()), Some(replay.clone()))
    });
    let fleet = Fleet::new(&twice);
    fleet.issue_salt(SALT);
    let nodes = fleet.nodes();
    fleet.start("token", &tasks);
    let is_exact = |node: &Arc<Node>| node.trust() == Trust::Exact;
    eventually("both are followed", || nodes.iter().all(is_exact)).await;
    let honest = prompt(0, 4);
    events.publish(0, &stored(&honest, "life 1")).await;
    let hostile = [
        stored_after(1, 2, 16),
        stored_after(2, 1, 16),
        stored_after(3, 3, 16),
        stored_after(4, 1, 15),
    ];
    for seq in 1..=1000 {
        events.publish(seq, &hostile[seq as usize % 4]).await;
    }
    let more = prompt(9000, 4);
    events.publish(1001, &stored(&more, "life 1")).await;
    let both = |tokens: &[u32]| fleet.known(MODEL, &chain(tokens, SALT)).len() == 2;
    eventually("what came after the flood counts", || both(&more)).await;
    assert!(both(&honest));
    for node in nodes.iter() {
        let counted = |counter: &std::sync::atomic::AtomicU64| counter.load(Ordering::Relaxed);
        assert_eq!(fleet.held_blocks(node), 8, "{}", node.id);
        assert_eq!(counted(&node.refused.orphans), 750);
        assert_eq!(counted(&node.refused.malformed), 250);
        assert!(!node.is_judged());
    }
    // What cannot be decoded leaves nothing that is believed to be whole.
    let garbage = frames(&[b"kv@m", &1002_u64.to_be_bytes(), b"\xc1"]);
    events.publisher.send(garbage).await.unwrap();
    let is_partial = |node: &Arc<Node>| node.trust() == Trust::Partial;
    eventually("garbage is forgotten", || nodes.iter().all(is_partial)).await;
    assert!(!both(&honest));
    events.publish(1003, &stored(&more, "life 1")).await;
    eventually("service goes on", || both(&more)).await;
    events.stop().await;
    tasks.advance(Phase::Stopping);
}

/// Would catch a fleet that falls over two nodes of one name; the configuration refuses them first.
#[test]
fn two_nodes_of_one_name_are_the_first_of_them() {
    let addr = ([127, 0, 0, 1], 9).into();
    let fleet = Fleet::new(&[config(addr, None, None), config(addr, None, None)]);
    let nodes = fleet.nodes();
    let tokens = prompt(0, 4);
    let _request = fleet.dispatch(&nodes[1], &sent(64, 1, &chain(&tokens, SALT)));
    assert_eq!(fleet.known(MODEL, &chain(&tokens, SALT)).len(), 1);
}
