//! Would a turn come at another time, or read from cache what no node has?

use super::*;
use crate::engine::Params;
use crate::policy::Spec;
use crate::router::Router;

fn fleet(nodes: usize, capacity: usize) -> Fleet {
    let params = Params {
        block_tokens: 16,
        ..Params::default()
    };
    Fleet::alike(params, nodes, capacity)
}

/// Turns of one conversation: 6 blocks of system prompt, then 4 blocks of message and 3 of answer a
/// turn; prompts end 5 tokens into a block.
fn conversation(number: u32, turns: u32, begins_ms: f64) -> Vec<Turn> {
    let own = |at: u32| 1000 + number * 1000 + at;
    let turn = |turn: u32| {
        let prompt = 6 + turn * 7 + 4;
        let path = (0..6).chain((6..prompt + 3).map(own));
        Turn {
            path: path.collect(),
            prompt_blocks: prompt as usize,
            prompt_tokens: prompt * 16 + 5,
            output_tokens: 48,
            pause_ms: if turn == 0 { begins_ms } else { 2000.0 },
        }
    };
    (0..turns).map(turn).collect()
}

/// One conversation on one node: every figure by hand.
#[test]
fn a_turn_comes_its_pause_after_the_answer_which_stays_cached() {
    let fleet = fleet(1, 1000);
    let spec = Spec::parse("homing").expect("known");
    let mut router = spec.build(&fleet).expect("builds");
    let played = play(&fleet, &[conversation(0, 3, 500.0)], router.as_mut());
    let cached: Vec<u32> = played.iter().map(|turn| turn.cached_tokens).collect();
    assert_eq!(cached, [0, 13 * 16, 20 * 16]);
    assert_eq!(played[0].due_ms, 500.0);
    let params = Params::default();
    let prefill_ms = params.prefill_ms(165.0, 0.0);
    let ttft_ms = played[0].first_token_ms - played[0].due_ms;
    assert!(
        (prefill_ms + 12.0..prefill_ms + 14.0).contains(&ttft_ms),
        "{ttft_ms} after {prefill_ms}"
    );
    for pair in played.windows(2) {
        assert!((pair[1].due_ms - pair[0].done_ms - 2000.0).abs() < 1e-6);
        let answer_ms = pair[0].done_ms - pair[0].first_token_ms;
        assert!(
            (47.0 * 12.0..50.0 * 12.5).contains(&answer_ms),
            "{answer_ms}"
        );
    }
}

/// Many conversations on few nodes: each is played whole, in its order, from what its node holds.
#[test]
fn every_turn_is_played_once_and_reads_what_its_node_holds() {
    for capacity in [4000, 300] {
        let fleet = fleet(3, capacity);
        let conversations: Vec<Vec<Turn>> = (0..40)
            .map(|number| conversation(number, 8, f64::from(number) * 150.0))
            .collect();
        let mut router = Spec::parse("homing")
            .expect("known")
            .build(&fleet)
            .expect("builds");
        let played = play(&fleet, &conversations, router.as_mut());
        let mut turns = vec![0; conversations.len()];
        for one in &played {
            assert_eq!(one.turn, turns[one.conversation]);
            turns[one.conversation] += 1;
            assert!(one.due_ms < one.first_token_ms && one.first_token_ms < one.done_ms);
            let held = &conversations[one.conversation][one.turn];
            assert!(one.cached_tokens < held.prompt_tokens);
        }
        assert!(turns.iter().all(|count| *count == 8), "{turns:?}");
        let cached: u32 = played.iter().map(|turn| turn.cached_tokens).sum();
        let all: u32 = conversations
            .iter()
            .flatten()
            .map(|turn| turn.prompt_tokens)
            .sum();
        let share = f64::from(cached) / f64::from(all);
        let expected = if capacity == 4000 {
            0.8..0.95
        } else {
            0.0..0.75
        };
        assert!(expected.contains(&share), "{share} of {capacity} blocks");
    }
}

/// Would the product's router not hear of answers' blocks, which are in no prompt when they are
/// stored? Then it would know no more of a conversation than its first prompt, and let it wander.
#[test]
fn the_products_index_follows_conversations_through_their_answers() {
    let fleet = fleet(4, 20_000);
    let conversations: Vec<Vec<Turn>> = (0..120)
        .map(|number| conversation(number, 12, f64::from(number) * 30.0))
        .collect();
    let spec = Spec::parse("homing").expect("known");
    let mut router = spec.build(&fleet).expect("builds");
    let played = play(&fleet, &conversations, router.as_mut());
    let mut homes = vec![None; conversations.len()];
    let mut moves = 0;
    for turn in &played {
        let home = &mut homes[turn.conversation];
        moves += usize::from(home.is_some_and(|home| home != turn.node));
        *home = Some(turn.node);
    }
    assert!(moves < 20, "{moves} moves of 120 conversations");
}

/// Would a turn that two nodes share skip its handover, read what its first node does not hold, or leave
/// blocks held? Conversations that do not meet: every figure by hand.
#[test]
fn two_nodes_share_a_turn_as_one_works_out() {
    let fleet = Fleet {
        prefill_nodes: 2,
        handover_gb_per_s: 0.1,
        ..fleet(4, 1000)
    };
    let params = Params {
        block_tokens: 16,
        ..Params::default()
    };
    struct Pairs;
    impl Router for Pairs {
        fn route(&mut self, _: f64, ask: &Ask<'_>, _: &[Node]) -> Answer {
            let at = ask.session as usize;
            Answer::Pair {
                prefill: at,
                decode: 2 + at,
            }
        }
    }
    let conversations = [conversation(0, 3, 500.0), conversation(1, 3, 0.0)];
    let played = play(&fleet, &conversations, &mut Pairs);
    assert_eq!(played.len(), 6);
    for one in &played {
        let at = one.conversation;
        assert_eq!((one.prefill_node, one.node), (Some(at), 2 + at));
        let turn = &conversations[at][one.turn];
        // The first node has the prompt before, and not its answer; the second has both.
        let before = |blocks: u32| if one.turn == 0 { 0 } else { blocks * 16 };
        let prompt_before = 6 + (one.turn as u32).saturating_sub(1) * 7 + 4;
        assert_eq!(one.cached_tokens, before(prompt_before), "{one:?}");
        let moved = turn.prompt_tokens - before(prompt_before + 3);
        let took_ms = {
            let tokens = f64::from(turn.prompt_tokens - one.cached_tokens);
            let cached = f64::from(one.cached_tokens);
            let prompt = f64::from(turn.prompt_tokens);
            tokens * (params.token_ms(f64::midpoint(prompt, cached)) + 12.0 / 2048.0)
        };
        let link_ms = f64::from(moved) * 1.6;
        // No prompt is longer than a chunk, so that nothing travels before its end.
        let step_ms = 12.0 + 0.08 + 1.5e-5 * (f64::from(turn.prompt_tokens) + 24.0);
        let ttft_ms = one.first_token_ms - one.due_ms;
        let expected_ms = took_ms + link_ms + step_ms;
        assert!(
            (ttft_ms - expected_ms).abs() < 1e-3,
            "{ttft_ms}, not {expected_ms}"
        );
    }
}
