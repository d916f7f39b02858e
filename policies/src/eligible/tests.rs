//! Catches a node that gets what it cannot take, and a reason that hides a more lasting one.

use super::{Ineligible, check};
use crate::test_views::{id, node, request};
use crate::view::{NodeState, NodeView, RequestView};

fn expect(request: &RequestView, node: &NodeView, expected: Result<(), Ineligible>) {
    assert_eq!(check(request, node), expected);
}

#[test]
fn each_reason() {
    let plain = request();
    let in_state = |state| NodeView { state, ..node("a") };
    let why = "connection refused".to_owned();
    expect(&plain, &node("a"), Ok(()));
    let down = in_state(NodeState::Down { why: why.clone() });
    expect(&plain, &down, Err(Ineligible::Down { why }));
    expect(
        &plain,
        &in_state(NodeState::Draining),
        Err(Ineligible::Draining),
    );
    expect(
        &plain,
        &in_state(NodeState::BreakerOpen),
        Err(Ineligible::BreakerOpen),
    );
    let excluded = RequestView {
        excluded: vec![id("b"), id("a")],
        ..request()
    };
    expect(&excluded, &node("a"), Err(Ineligible::Excluded));
    expect(&excluded, &node("c"), Ok(()));
}

#[test]
fn a_prompt_needs_room_for_itself_and_one_token_of_answer() {
    let with = |context_max| NodeView {
        context_max,
        ..node("a")
    };
    expect(&request(), &with(1601), Ok(()));
    let small = |max| Err(Ineligible::ContextTooSmall { needed: 1601, max });
    expect(&request(), &with(1600), small(1600));
    expect(&request(), &with(1), small(1));
    expect(&request(), &with(0), Ok(()));
    // The context is the reason that does not pass, so it is the one to tell.
    let excluded = RequestView {
        excluded: vec![id("a")],
        ..request()
    };
    expect(
        &excluded,
        &NodeView {
            state: NodeState::Draining,
            ..with(9)
        },
        small(9),
    );
}
