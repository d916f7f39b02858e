//! Catches wrong cached counts, a wrong or lost answer, a request that takes others down with it.

use std::sync::atomic::Ordering;

use cache_index::block::BLOCK_TOKENS;

use super::*;

#[test]
fn cached_tokens_are_exact_over_turns() {
    let bench = Bench::new(4096, 64, 8);
    let mut random = Random(3);
    let mut computed: Vec<Vec<u32>> = Vec::new();
    let mut conversation = random.tokens(100);
    for _turn in 0..40 {
        if random.below(8) == 0 && !computed.is_empty() {
            // A new conversation that branches off an old one somewhere.
            let old = computed[random.below(computed.len())].clone();
            conversation = old[..random.below(old.len())].to_vec();
        }
        let count = 1 + random.below(50);
        conversation.extend(random.tokens(count));
        let output = 1 + random.below(40);
        let shared = |held: &Vec<u32>| {
            held.iter()
                .zip(&conversation)
                .take_while(|(a, b)| a == b)
                .count()
                / BLOCK_TOKENS
        };
        let longest = computed.iter().map(shared).max().unwrap_or(0);
        let expected = 16 * longest.min((conversation.len() - 1) / 16);
        let (tokens, ending, usage) = bench.wait(bench.submit(&conversation, output)).expect("ok");
        assert_eq!(tokens, answer(&conversation, output));
        assert_eq!(ending, Ending::Length);
        let prompt_tokens = conversation.len();
        let expected = Usage {
            prompt_tokens,
            cached_tokens: expected,
            output_tokens: output,
        };
        assert_eq!(usage, expected);
        conversation.extend(&tokens);
        // The last token was sampled but never computed.
        computed.push(conversation[..conversation.len() - 1].to_vec());
    }
    bench.end();
}

#[test]
fn a_pool_for_few_serves_many_and_cancels_cost_nothing() {
    for seed in 0..6 {
        let mut random = Random(seed);
        // The longest request has 150 + 60 tokens: 14 blocks must hold it alone.
        let bench = Bench::new(14 + random.below(30) as u32, 16 + random.below(64), 1000);
        let shared = random.tokens(64);
        let mut tickets = Vec::new();
        for _ in 0..120 {
            let mut prompt = shared[..random.below(2) * random.below(64)].to_vec();
            let count = 1 + random.below(150 - prompt.len());
            prompt.extend(random.tokens(count));
            let output = 1 + random.below(60);
            tickets.push((bench.submit(&prompt, output), prompt, output));
            if random.below(3) == 0 {
                drop(tickets.swap_remove(random.below(tickets.len())));
            }
        }
        for (ticket, prompt, output) in tickets {
            let (tokens, ..) = bench.wait(ticket).expect("it finishes");
            assert_eq!(tokens, answer(&prompt, output), "seed {seed}");
        }
        bench.end();
    }
}

#[test]
fn a_preempted_answer_is_the_same_and_its_bill_too() {
    // Two are promised 18 blocks each, for their prompts and the first 256 tokens of the answers,
    // and need 20 each in the end.
    let bench = Bench::new(37, 64, 100);
    let mut random = Random(11);
    bench.gate.set_closed(true);
    let prompts: Vec<_> = (0..6).map(|_| random.tokens(20)).collect();
    let tickets: Vec<_> = prompts
        .iter()
        .map(|prompt| bench.submit(prompt, 290))
        .collect();
    bench.gate.set_closed(false);
    for (ticket, prompt) in tickets.into_iter().zip(&prompts) {
        let (tokens, _, usage) = bench.wait(ticket).expect("it finishes");
        assert_eq!(tokens, answer(prompt, 290));
        let expected = Usage {
            prompt_tokens: 20,
            cached_tokens: 0,
            output_tokens: 290,
        };
        assert_eq!(usage, expected, "cached tokens are those of the first join");
    }
    assert!(bench.metrics.preemptions.get() > 0, "the test preempts");
    bench.end();
}

#[test]
fn of_many_that_begin_alike_only_the_first_computes_the_beginning() {
    let bench = Bench::new(256, 32, 16);
    let mut random = Random(8);
    let beginning = random.tokens(160);
    bench.gate.set_closed(true);
    let tickets: Vec<_> = (0..8)
        .map(|_| bench.submit(&[&beginning[..], &random.tokens(10)[..]].concat(), 4))
        .collect();
    bench.gate.set_closed(false);
    let usages = tickets
        .into_iter()
        .map(|ticket| bench.wait(ticket).expect("ok").2);
    let cached: Vec<_> = usages.map(|usage| usage.cached_tokens).collect();
    assert_eq!(cached, [0, 160, 160, 160, 160, 160, 160, 160]);
    bench.end();
}

#[test]
fn salts_share_nothing() {
    let bench = Bench::new(64, 64, 8);
    let prompt = Random(1).tokens(100);
    for (salt, cached_tokens) in [(None, 0), (Some("a"), 0), (Some("b"), 0), (Some("a"), 96)] {
        let ticket = bench.handle.submit(job(&prompt, 1, salt)).expect("room");
        let (_, _, usage) = bench.wait(ticket).expect("ok");
        assert_eq!(usage.cached_tokens, cached_tokens, "{salt:?}");
    }
    bench.end();
}

#[test]
fn a_broken_pass_fails_its_own_requests_only() {
    let bench = Bench::new(64, 64, 8);
    for broken in [PANICS, NOT_A_NUMBER, REFUSED] {
        let mut prompt = Random(u64::from(broken)).tokens(40);
        prompt.push(broken);
        assert_eq!(
            bench.wait(bench.submit(&prompt, 5)),
            Err(Kind::Internal),
            "token {broken}"
        );
        let fine = Random(9).tokens(40);
        let (tokens, ..) = bench
            .wait(bench.submit(&fine, 5))
            .expect("the loop goes on");
        assert_eq!(tokens, answer(&fine, 5));
    }
    bench.end();
}

#[test]
fn a_full_queue_and_a_drain_refuse_with_a_reason() {
    let bench = Bench::new(64, 64, 2);
    bench.gate.set_closed(true);
    let running = bench.submit(&[1], 3);
    while bench.gate.passes.load(Ordering::SeqCst) == 0 {
        std::thread::yield_now();
    }
    let queued = [bench.submit(&[2], 3), bench.submit(&[3], 3)];
    let refused = bench
        .handle
        .submit(job(&[4], 3, None))
        .expect_err("the queue is full");
    assert_eq!(
        (refused.kind, refused.code),
        (Kind::Overloaded, "queue_full")
    );
    assert!(refused.retry_after_s().is_some());
    let [cancelled, kept] = queued;
    drop(cancelled);
    bench.handle.drain();
    let refused = bench
        .handle
        .submit(job(&[4], 3, None))
        .expect_err("it drains");
    assert_eq!(refused.code, "node_draining");
    bench.gate.set_closed(false);
    for ticket in [running, kept] {
        assert_eq!(
            bench.wait(ticket).expect("a drain lets it finish").0.len(),
            3
        );
    }
    bench.end();
}

#[test]
fn cancelled_work_is_cached_work() {
    let bench = Bench::new(64, 16, 8);
    let prompt = Random(5).tokens(100);
    bench.gate.set_closed(true);
    let ticket = bench.submit(&prompt, 50);
    while bench.gate.passes.load(Ordering::SeqCst) == 0 {
        std::thread::yield_now();
    }
    // The first chunk is being computed; the request goes away meanwhile.
    drop(ticket);
    bench.gate.set_closed(false);
    let (_, _, usage) = bench.wait(bench.submit(&prompt, 1)).expect("ok");
    assert_eq!(usage.cached_tokens, 16, "what was computed stays");
    bench.end();
}

#[test]
fn stop_tokens_and_stop_strings_end_an_answer() {
    let bench = Bench::new(64, 64, 8);
    let prompt = Random(2).tokens(30);
    let full = answer(&prompt, 20);
    let third = full[2];
    let first_third = full
        .iter()
        .position(|token| *token == third)
        .expect("it is there");
    let mut by_token = job(&prompt, 20, None);
    by_token.stop_tokens = vec![third];
    let (tokens, ending, usage) = bench
        .wait(bench.handle.submit(by_token).expect("room"))
        .expect("ok");
    assert_eq!((&tokens[..], ending), (&full[..first_third], Ending::Stop));
    assert_eq!(
        usage.output_tokens,
        first_third + 1,
        "the stop token was produced too"
    );
    let mut by_text = job(&prompt, 20, None);
    by_text.stops = vec![format!("{} {}", full[4], full[5])];
    let (tokens, ending, usage) = bench
        .wait(bench.handle.submit(by_text).expect("room"))
        .expect("ok");
    assert_eq!((&tokens[..], ending), (&full[..4], Ending::Stop));
    assert_eq!(usage.output_tokens, 6);
    bench.end();
}
