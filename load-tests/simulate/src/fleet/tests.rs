//! Would a request be lost, routed twice, or its time be counted wrongly?

use std::collections::VecDeque;

use super::*;
use crate::engine::Params;
use crate::scenario::{Fleet, Load, Slice};

/// Two regions of one node each, 100 ms apart; the trace's own times.
fn scenario(regions: usize) -> Scenario {
    Scenario {
        fleet: Fleet {
            regions,
            round_trips_ms: vec![100.0],
            ..Fleet::alike(Params::default(), 2, 100)
        },
        load: Load::Copies {
            copies: 1,
            speed: 1.0,
        },
        slice: Slice::All,
        seed: 1,
        horizon_ms: 100_000.0,
        warm_ms: 0.0,
        region_weights: vec![1.0, 0.0],
        roam: 0.0,
        ttft_bound_ms: 5000.0,
        tpot_bound_ms: 50.0,
        think_ms_max: 900_000.0,
        jitter_ms: 0.0,
    }
}

/// So many prompts of 600 tokens, a second apart, each its own.
fn trace(requests: usize) -> Trace {
    let mut text = "{\"name\":\"t\",\"block\":512,\"mode\":\"open\"}\n".to_owned();
    for i in 0..requests {
        text += &format!("[{},{i},600,20,-1,0,-1,0,1]\n", i * 1000);
    }
    Trace::read("t", text.as_bytes()).expect("a valid trace")
}

/// Does what it is told, and writes down what it hears.
#[derive(Default)]
struct Scripted {
    /// What to answer, by request; the first node when it runs out.
    answers: Vec<(u32, VecDeque<Answer>)>,
    /// When to release whom, and how.
    releases: Vec<(f64, u32, Answer)>,
    routed: Vec<(f64, u32)>,
    first_tokens: Vec<(f64, u32)>,
    computed: Vec<(f64, u32, usize)>,
    ended: Vec<(f64, u32)>,
}

impl Router for Scripted {
    fn route(&mut self, now_ms: f64, ask: &Ask<'_>, _nodes: &[Node]) -> Answer {
        self.routed.push((now_ms, ask.id));
        let answers = self.answers.iter_mut().find(|(id, _)| *id == ask.id);
        let answer = answers.and_then(|(_, answers)| answers.pop_front());
        answer.unwrap_or(Answer::Send(0))
    }

    fn computed(&mut self, now_ms: f64, id: u32, node: usize) {
        self.computed.push((now_ms, id, node));
    }

    fn first_token(&mut self, now_ms: f64, id: u32, _node: usize, _cached_tokens: u32) {
        self.first_tokens.push((now_ms, id));
    }

    fn finished(&mut self, now_ms: f64, id: u32, _node: usize, _output_tokens: u32) {
        self.ended.push((now_ms, id));
    }

    fn release(&mut self, now_ms: f64, _nodes: &[Node]) -> Vec<(u32, Answer)> {
        let (now, later) = self
            .releases
            .iter()
            .partition(|(at_ms, ..)| *at_ms <= now_ms);
        self.releases = later;
        let now: Vec<(f64, u32, Answer)> = now;
        now.into_iter()
            .map(|(_, id, answer)| (id, answer))
            .collect()
    }

    fn wake_ms(&self) -> Option<f64> {
        self.releases
            .iter()
            .map(|(at_ms, ..)| *at_ms)
            .reduce(f64::min)
    }
}

fn ttft_ms(outcome: &Outcome) -> f64 {
    outcome.first_token_ms.expect("it began") - outcome.came_ms
}

/// Would the time in the gateway not count, or a held request be woken late?
#[test]
fn a_held_request_goes_when_it_is_released_and_its_wait_counts() {
    let mut router = Scripted {
        answers: vec![(0, [Answer::Hold].into())],
        releases: vec![(7_000.0, 0, Answer::Send(1))],
        ..Scripted::default()
    };
    let run = run(&trace(3), &scenario(1), &mut router);
    let [held, sent, _] = &run.outcomes[..] else {
        panic!("{} outcomes", run.outcomes.len());
    };
    assert_eq!(held.node, Some(1));
    let alone_ms = ttft_ms(sent);
    assert!((ttft_ms(held) - 7_000.0 - alone_ms).abs() < 1e-6);
    assert_eq!(
        router.routed.len(),
        3,
        "released requests are not routed again"
    );
}

/// Would a refused client not come back, or its TTFT count from its last try?
#[test]
fn a_refused_client_comes_again_and_its_time_counts_from_the_first_try() {
    let refuse = Answer::Refuse {
        retry_after_ms: 2_500.0,
    };
    let mut router = Scripted {
        answers: vec![(1, [refuse, refuse].into())],
        ..Scripted::default()
    };
    let run = run(&trace(2), &scenario(1), &mut router);
    let tries: Vec<f64> = router
        .routed
        .iter()
        .filter(|(_, id)| *id == 1)
        .map(|r| r.0)
        .collect();
    assert_eq!(tries, [1_000.0, 3_500.0, 6_000.0]);
    assert_eq!(run.outcomes[1].refusals, 2);
    let alone_ms = ttft_ms(&run.outcomes[0]);
    assert!((ttft_ms(&run.outcomes[1]) - 5_000.0 - alone_ms).abs() < 1e-6);
}

/// Would a request that is held or refused for ever end the run, or be forgotten in its figures?
#[test]
fn what_is_never_sent_stays_without_a_first_token() {
    let refuse = Answer::Refuse {
        retry_after_ms: 0.0,
    };
    let mut router = Scripted {
        answers: vec![
            (0, [Answer::Hold].into()),
            (1, vec![refuse; 200_000].into()),
        ],
        ..Scripted::default()
    };
    let scenario = scenario(1);
    let run = run(&trace(3), &scenario, &mut router);
    let figures = crate::figures::Figures::of(&scenario, &run);
    assert_eq!(figures.requests, 3.0);
    assert_eq!(figures.unanswered, 2.0);
    let wait_ms = (100_000.0 + 99_000.0 + ttft_ms(&run.outcomes[2])) / 3.0;
    assert!((figures.ttft_mean_ms - wait_ms).abs() < 1e-6);
}

/// Would the way to another region cost nothing, or twice?
#[test]
fn another_region_costs_its_round_trip_once() {
    let far = vec![(0, [Answer::Send(1)].into())];
    let mut router = Scripted {
        answers: far,
        ..Scripted::default()
    };
    let run = run(&trace(2), &scenario(2), &mut router);
    let (far, near) = (&run.outcomes[0], &run.outcomes[1]);
    assert!(far.is_far && !near.is_far);
    assert!((ttft_ms(far) - ttft_ms(near) - 100.0).abs() < 1e-6);
    let seen = router
        .first_tokens
        .iter()
        .find(|(_, id)| *id == 0)
        .expect("told");
    assert!((seen.0 - far.first_token_ms.expect("began")).abs() < 1e-6);
    let ended = router.ended.iter().find(|(_, id)| *id == 0).expect("told");
    assert!((ended.0 - far.done_ms.expect("ended")).abs() < 1e-6);
}

/// Would a user's next turn come before the answer to the last, or not at all?
#[test]
fn a_users_next_turn_comes_a_pause_after_the_answer() {
    let text = "{\"name\":\"t\",\"block\":512,\"mode\":\"closed\"}\n\
                [0,0,600,20,-1,0,-1,0,1]\n[9,0,1200,20,0,4000,0,1,1]\n";
    let trace = Trace::read("t", text.as_bytes()).expect("a valid trace");
    let scenario = Scenario {
        load: Load::Users(1),
        horizon_ms: 3_600_000.0,
        ..scenario(1)
    };
    let run = run(&trace, &scenario, &mut Scripted::default());
    assert!(
        run.outcomes.len() > 100,
        "only {} turns",
        run.outcomes.len()
    );
    let mut pairs = 0;
    for pair in run.outcomes.windows(2) {
        let pause_ms = pair[1].came_ms - pair[0].done_ms.expect("one turn at a time");
        if pair[0].session == pair[1].session {
            assert!((pause_ms - 4000.0).abs() < 1e-6);
            assert_eq!(pair[1].cached_tokens, 512, "the session's own block");
            assert_eq!(pair[1].ideal_tokens, 512);
            pairs += 1;
        } else {
            assert!((5_000.0..=30_000.0).contains(&pause_ms));
            assert_eq!(
                pair[1].cached_tokens, 0,
                "another session's block is not this one's"
            );
        }
    }
    assert!(pairs > 40);
}

/// Has the first request's prompt computed by node 0 and answered by node 1.
fn shared() -> Scripted {
    let pair = Answer::Pair {
        prefill: 0,
        decode: 1,
    };
    Scripted {
        answers: vec![(0, [pair].into())],
        ..Scripted::default()
    }
}

/// Would a shared request take another time than its parts, or its prompt be computed twice?
#[test]
fn two_nodes_share_a_request() {
    let mut router = shared();
    let run = run(&trace(1), &scenario(1), &mut router);
    let outcome = &run.outcomes[0];
    assert_eq!((outcome.prefill_node, outcome.node), (Some(0), Some(1)));
    // 600 tokens in their share of a step, their KV at 10 GB a second, and a step with one answer.
    let prefill_ms = 600.0 * (0.05 * (1.0 + 300.0 / 100_000.0) + 12.0 / 2048.0);
    let handover_ms = 600.0 * 160_000.0 / 10e9 * 1000.0;
    let step_ms = 12.0 + 0.08 + 1.5e-5 * (600.0 + 10.0);
    let expected_ms = prefill_ms + handover_ms + step_ms;
    assert!((ttft_ms(outcome) - expected_ms).abs() < 1e-6, "{outcome:?}");
    assert_eq!(router.computed.len(), 1);
    let (at_ms, id, node) = router.computed[0];
    assert_eq!((id, node), (0, 0));
    assert!((at_ms - outcome.came_ms - prefill_ms).abs() < 1e-6);
    assert!((run.busy_ms[0] - prefill_ms).abs() < 1e-6);
    assert!(run.busy_ms[1].abs() < 1e-9);
    assert_eq!(router.ended.len(), 1);
}

/// Would KV that travels while the prompt is computed still cost its whole time, or nothing at all?
#[test]
fn a_handover_hides_behind_the_prefill() {
    let text = "{\"name\":\"t\",\"block\":512,\"mode\":\"open\"}\n[0,0,6000,20,-1,0,-1,0,11]\n";
    let trace = Trace::read("t", text.as_bytes()).expect("a valid trace");
    let after_ms = |gb_per_s: f64| {
        let mut router = shared();
        let mut scenario = scenario(1);
        scenario.fleet.handover_gb_per_s = gb_per_s;
        let run = run(&trace, &scenario, &mut router);
        let began_ms = run.outcomes[0].first_token_ms.expect("it began");
        let (computed_ms, ..) = router.computed[0];
        (began_ms - computed_ms, run.busy_ms[0])
    };
    let step_ms = 12.0 + 0.08 + 1.5e-5 * (6000.0 + 10.0);
    let ms = |tokens: f64, gb_per_s: f64| tokens * 160_000.0 / (gb_per_s * 1e6);
    // A quick link is idle most of the time: the last chunk is all that is still to come.
    let (quick_ms, _) = after_ms(10.0);
    assert!(
        (quick_ms - step_ms - ms(2048.0, 10.0)).abs() < 1e-6,
        "{quick_ms}"
    );
    // A slow one is busy from the start.
    let (slow_ms, prefill_ms) = after_ms(1.0);
    assert!(
        (slow_ms - step_ms - (ms(6000.0, 1.0) - prefill_ms)).abs() < 1e-6,
        "{slow_ms}"
    );
}
