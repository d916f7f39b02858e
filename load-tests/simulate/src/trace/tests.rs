//! Would a reader name blocks wrongly, or lose who continues whom?

use super::*;

fn read(text: &str) -> Trace {
    Trace::read("test", text.as_bytes()).expect("a valid trace")
}

fn paths(trace: &Trace) -> Vec<Vec<u32>> {
    let all = 0..trace.requests.len() as u32;
    all.map(|r| trace.path(r).to_vec()).collect()
}

/// Would a group count that is not whole, or one that forked inside a group count as shared?
#[test]
fn small_blocks_are_grouped_by_eight() {
    let trace = read(
        "{\"name\":\"t\",\"block\":64,\"mode\":\"closed\"}\n\
         [0,0,1300,5,-1,0,-1,0,20]\n\
         [9,0,1800,6,0,700,0,20,8]\n\
         [0,1,1400,7,-1,0,1,12,9]\n",
    );
    // 20 small blocks: two groups and a rest. 28: the rest is completed. Kept 12 of them and 9 new
    // ones: the first group, and another second one.
    assert_eq!(paths(&trace), [vec![0, 1], vec![0, 1, 2], vec![0, 3]]);
    assert_eq!(trace.mode, Mode::Closed);
    assert_eq!(trace.requests[0].followers, [1]);
    assert_eq!(trace.requests[1].after, Some(0));
    assert_eq!(trace.requests[1].think_ms, 700.0);
    assert_eq!(trace.sessions.len(), 2);
    assert_eq!(trace.sessions[1].private, 0..4);
}

/// Would a request that repeats another's prompt and adds to it start a session of its own?
#[test]
fn mooncake_requests_continue_whose_prompt_they_begin_with() {
    let line = |at: u32, tokens: u32, ids: &str| {
        format!(
            "{{\"timestamp\":{at},\"input_length\":{tokens},\"output_length\":3,\
             \"hash_ids\":[{ids}]}}\n"
        )
    };
    let text = line(0, 1100, "0,1,2")
        + &line(10, 600, "0,7")
        + &line(40, 1600, "0,1,3,4")
        + &line(90, 2000, "0,1,3,9");
    let trace = read(&text);
    let sessions: Vec<u32> = trace.requests.iter().map(|r| r.session).collect();
    assert_eq!(sessions, [0, 1, 0, 0]);
    assert_eq!(trace.requests[3].after, Some(2));
    assert_eq!(trace.requests[3].think_ms, 50.0);
    // The one full block of the second prompt is too little to continue it.
    assert_eq!(trace.requests[1].after, None);
    assert_eq!(paths(&trace)[2], [0, 1, 4, 5]);
}

/// Would turns that ended out of order be played out of order, or pauses include the answers?
#[test]
fn a_decision_log_gives_its_turns_in_the_order_of_their_arrival() {
    let line = |t: u64, tenant: &str, tokens: u32, duration: u32, blocks: &str| {
        format!(
            "{{\"v\":1,\"t_ms\":{t},\"tenant\":\"{tenant}\",\"session\":\"s\",\
             \"prompt_tokens\":{tokens},\"output_tokens\":7,\"duration_ms\":{duration},\
             \"blocks\":[{blocks}],\"attempts\":[]}}\n"
        )
    };
    let text = line(1_700_000_001_000, "b", 600, 10, "\"aa\"")
        + &line(1_700_000_000_000, "a", 1100, 3000, "\"aa\",\"bb\"")
        + &line(1_700_000_000_500, "a", 0, 1, "")
        + &line(1_700_000_009_000, "a", 1700, 10, "\"aa\",\"bb\",\"cc\"");
    let trace = read(&text);
    assert_eq!(paths(&trace), [vec![0, 1], vec![0], vec![0, 1, 2]]);
    let at: Vec<f64> = trace.requests.iter().map(|r| r.at_ms).collect();
    assert_eq!(at, [0.0, 1000.0, 9000.0]);
    let after: Vec<Option<u32>> = trace.requests.iter().map(|r| r.after).collect();
    assert_eq!(after, [None, None, Some(0)]);
    assert_eq!(trace.requests[2].think_ms, 6000.0);
}

/// Would what many sessions share be taken for one's own?
#[test]
fn what_four_sessions_begin_with_is_shared() {
    let mut text = "{\"name\":\"t\",\"block\":512,\"mode\":\"open\"}\n".to_owned();
    text += "[0,0,1100,1,-1,0,-1,0,2]\n";
    for session in 1..4 {
        text += &format!("[{session},{session},1100,1,-1,0,0,1,1]\n");
    }
    let trace = read(&text);
    assert!(trace.is_shared(0));
    assert!((1..5).all(|block| !trace.is_shared(block)));
}

/// Would a broken file be played in part, or bring the program down?
#[test]
fn broken_files_are_refused_with_the_line() {
    let check = |text: &str, expected: &str| {
        let error = Trace::read("test", text.as_bytes()).expect_err(text);
        assert!(error.to_string().contains(expected), "{text}: {error}");
    };
    let head = "{\"name\":\"t\",\"block\":64,\"mode\":\"open\"}\n";
    check("", "neither a .trie");
    check("not json", "neither a .trie");
    check("{\"a\":1}", "neither a .trie");
    check(head, "no request");
    check(&format!("{head}[0,0,1]"), "line 2");
    check(&format!("{head}[0,0,1,1,-1,0,3,2,0]"), "line 2: ref 3");
    check(&format!("{head}\n[0,0,1,1,4,0,-1,0,2]"), "line 3: dep 4");
    check(
        "{\"name\":\"t\",\"block\":100,\"mode\":\"open\"}\n",
        "blocks of 100",
    );
    check(
        "{\"name\":\"t\",\"block\":0,\"mode\":\"open\"}\n",
        "blocks of 0",
    );
    check(
        "{\"t_ms\":1,\"session\":\"s\",\"blocks\":[]}\n",
        "line 1: missing field `prompt_tokens`",
    );
}
