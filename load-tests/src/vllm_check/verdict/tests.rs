//! Catches a difference that is explained away, an agreement that is called a fault, and a run that
//! did not come to its end and passes.

use super::super::steps::{CONTROL_TEXT, FIRST_CLEARED};
use super::*;

const ALONE: Alone = Alone::Yes;

/// A turn of 975 tokens: expected, held by the events when it was sent and at the least, cached.
fn turn(step: &'static str, alone: Alone, tokens: [usize; 4]) -> Compared {
    let [expected, at_start, least, cached] = tokens;
    Compared {
        step,
        request_id: "r".into(),
        alone,
        prompt_tokens: 975,
        gateway_tokens: 975,
        same_prompt: step != CONTROL_TEXT,
        expected: expected as u64,
        cached: cached as u64,
        span: Span {
            at_start,
            least,
            batches: 3,
        },
        block_tokens: 32,
        explain_agrees: true,
    }
}

fn beside(shared: u64) -> Alone {
    Alone::No { shared }
}

#[test]
fn differences_are_explained_or_faults() {
    let (agree, explained, fault) = ("agree", "explained", "fault");
    for (step, alone, tokens, wanted) in [
        ("growing", ALONE, [384, 384, 384, 384], agree),
        ("growing", ALONE, [96, 384, 384, 384], fault),
        ("growing", ALONE, [384, 384, 384, 96], fault),
        ("growing", ALONE, [384, 96, 96, 384], fault),
        // The last token is computed whatever is held.
        ("growing", ALONE, [960, 992, 992, 960], agree),
        (CONTROL_TEXT, ALONE, [160, 160, 160, 160], agree),
        (CONTROL_TEXT, ALONE, [128, 160, 160, 160], explained),
        (CONTROL_TEXT, ALONE, [192, 160, 160, 160], fault),
        (FIRST_CLEARED, ALONE, [512, 512, 512, 0], explained),
        (FIRST_CLEARED, ALONE, [512, 512, 512, 512], fault),
        (FIRST_CLEARED, ALONE, [512, 96, 96, 0], fault),
        ("at once", beside(0), [384, 384, 96, 96], explained),
        ("at once", beside(0), [384, 384, 384, 96], fault),
        ("at once", beside(384), [384, 96, 96, 96], explained),
        ("at once", beside(384), [96, 96, 96, 384], explained),
        ("at once", beside(352), [96, 96, 96, 384], fault),
    ] {
        let compared = turn(step, alone, tokens);
        let got = match compared.meaning() {
            Meaning::Agree => agree,
            Meaning::Explained(_) => explained,
            Meaning::Fault(_) => fault,
        };
        assert_eq!(got, wanted, "{}", compared.line());
    }
    for other in [
        Compared {
            same_prompt: false,
            ..turn("growing", ALONE, [384; 4])
        },
        Compared {
            explain_agrees: false,
            ..turn("growing", ALONE, [384; 4])
        },
    ] {
        assert!(matches!(other.meaning(), Meaning::Fault(_)));
    }
}

#[test]
fn a_run_is_good_when_it_came_to_its_end_without_a_fault() {
    let done = |tokens, stopped: Option<&str>| Done {
        compared: vec![turn("growing", ALONE, tokens)],
        stopped: stopped.map(str::to_owned),
        blocks_removed: usize::from(stopped.is_none()),
        hits_counted: tokens[3] as u64 * u64::from(stopped.is_none()),
        hits_reported: tokens[3] as u64,
        ..Done::default()
    };
    for (tokens, stopped, begin, is_good) in [
        ([384; 4], None, "AGREE: of 1 turns 1 agree exactly", true),
        (
            [96, 384, 384, 384],
            None,
            "DISAGREE: of 1 turns 0 agree exactly, 0 differ and are explained; 1 faults",
            false,
        ),
        (
            [384; 4],
            Some("vLLM ended"),
            "NOT RUN TO ITS END: of 1 turns 1 agree exactly, 0 differ and are explained; 0 faults",
            false,
        ),
    ] {
        let checked = of(done(tokens, stopped));
        let last = checked.table();
        let last = last.lines().last().unwrap_or_default();
        assert!(last.starts_with(begin), "{last}");
        assert_eq!(checked.is_good(), is_good, "{last}");
    }
}
