//! Would a peer's policy not see what it was told, or keep what has ended?

use super::*;

const HELLO: &str = r#"{"type":"hello","nodes":3,"regions":1,"block_tokens":512,"capacity_blocks":100,"rtt_ms":[],"prefill_tokens_per_s":20000,"seed":7}"#;

fn try_session(name: &str, given: &[(&str, &str)]) -> Result<Session, String> {
    let (_, build) = POLICIES
        .iter()
        .find(|(known, _)| *known == name)
        .expect("known");
    let given = given
        .iter()
        .map(|(k, v)| ((*k).to_owned(), (*v).to_owned()));
    Session::new(*build, given.collect())
}

fn session(name: &str, given: &[(&str, &str)]) -> Session {
    let mut session = try_session(name, given).expect("parameters");
    assert_eq!(session.take(HELLO), Ok(None));
    session
}

fn request(id: u32, blocks: &[u32]) -> String {
    let tokens = blocks.len() * 512 + 100;
    format!(
        r#"{{"type":"request","id":{id},"t_ms":{id}.5,"session":"s","region":0,"input_tokens":{tokens},"blocks":{blocks:?},"nodes":[{{"id":0}},{{"id":1}},{{"id":2}}]}}"#
    )
}

fn ask(session: &mut Session, id: u32, blocks: &[u32]) -> usize {
    let node = session.take(&request(id, blocks)).expect("a request");
    node.expect("an answer")
}

fn tell(session: &mut Session, line: &str) {
    assert_eq!(session.take(line), Ok(None), "{line}");
}

fn end(session: &mut Session, id: u32) {
    tell(
        session,
        &format!(r#"{{"type":"first_token","id":{id},"t_ms":1,"node":0}}"#),
    );
    tell(
        session,
        &format!(r#"{{"type":"finish","id":{id},"t_ms":1,"node":0}}"#),
    );
}

/// Who is told that a node holds a path sends it there; who is told that it is gone does not; and a
/// block is known by its whole path, which comes in pieces.
#[test]
fn events_reach_the_peers_indexes() {
    let path: Vec<u32> = (10..30).collect();
    for (name, given) in [
        ("dynamo", vec![("prefill_load_scale", "4")]),
        ("smg-events", vec![]),
        ("smg-events", vec![("rule", "spread")]),
    ] {
        let mut session = session(name, &given);
        ask(&mut session, 0, &path);
        end(&mut session, 0);
        tell(
            &mut session,
            r#"{"type":"kv","t_ms":1,"node":2,"stored":[10,11,12],"removed":[]}"#,
        );
        let more = format!(
            r#"{{"type":"kv","t_ms":1,"node":2,"stored":{:?}}}"#,
            &path[3..]
        );
        tell(&mut session, &more);
        for id in 1..9 {
            assert_eq!(ask(&mut session, id, &path), 2, "{name} {given:?}");
            end(&mut session, id);
        }
        let gone: Vec<u32> = path.iter().rev().copied().collect();
        tell(
            &mut session,
            &format!(r#"{{"type":"kv","t_ms":1,"node":2,"removed":{gone:?}}}"#),
        );
        let nodes: Vec<usize> = (10..40)
            .map(|id| {
                let node = ask(&mut session, id, &path);
                end(&mut session, id);
                node
            })
            .collect();
        assert!(
            (0..3).all(|node| nodes.contains(&node)),
            "{name}: {nodes:?}"
        );
    }
}

/// A tree learns from what it sends; a worker with too much under way is passed over.
#[test]
fn the_tree_follows_dispatches_until_the_gate_stops_it() {
    let path: Vec<u32> = (10..30).collect();
    for (rule, abs, rel) in [("gate", "64", "1.5"), ("spread", "4", "1.1")] {
        let mut session = session("smg-tree", &[("rule", rule), ("abs", abs), ("rel", rel)]);
        let first = ask(&mut session, 0, &path);
        let same: Vec<usize> = (1..5).map(|id| ask(&mut session, id, &path)).collect();
        assert_eq!(same, [first; 4], "{rule}");
        let next: Vec<usize> = (5..30).map(|id| ask(&mut session, id, &path)).collect();
        assert!(next.iter().any(|node| *node != first), "{rule}: {next:?}");
        (0..30).for_each(|id| end(&mut session, id));
    }
}

/// Dynamo's accounts: what is under way weighs until its first token, then by its blocks.
#[test]
fn dynamos_accounts_hold_what_is_under_way() {
    let mut session = session("dynamo", &[]);
    let nodes: Vec<usize> = (0..3)
        .map(|id| ask(&mut session, id, &[100 * id, 100 * id + 1]))
        .collect();
    assert!((0..3).all(|node| nodes.contains(&node)), "{nodes:?}");
    end(&mut session, 1);
    assert_eq!(ask(&mut session, 3, &[900, 901, 902]), nodes[1]);
}

/// The same seed draws the same ties.
#[test]
fn the_seed_decides_ties() {
    for (name, _) in POLICIES {
        let choices = |_| -> Vec<usize> {
            let mut session = session(name, &[]);
            let ask = |id| ask(&mut session, id, &[1000 + 10 * id, 1001 + 10 * id]);
            (0..30).map(ask).collect()
        };
        assert_eq!(choices(0), choices(1), "{name}");
    }
}

/// What makes no sense is refused by name, before any line where that can be.
#[test]
fn mistakes_are_named() {
    let check = |name: &str, given: &[(&str, &str)], expected: &str| {
        let error = try_session(name, given).err().expect("refused");
        assert!(error.contains(expected), "{name}: {error}");
    };
    check(
        "dynamo",
        &[("use_kv_events", "false")],
        "no parameter \"use_kv_events\"",
    );
    check(
        "dynamo",
        &[("prefill_load_scale", "-1")],
        "prefill_load_scale",
    );
    check(
        "dynamo",
        &[("overlap_score_credit", "x")],
        "dynamo-kv-router",
    );
    check("smg-tree", &[("rule", "best")], "gate or spread");
    check("smg-tree", &[("abs", "NaN")], "abs=NaN");
    check("smg-events", &[("events", "1")], "no parameter \"events\"");
    let mut session = session("dynamo", &[]);
    for (line, expected) in [
        ("{", "not a message"),
        (r#"{"type":"kv","node":3}"#, "no node 3"),
        (
            r#"{"type":"kv","node":0,"stored":[5]}"#,
            "block 5 was in no request",
        ),
        (
            &request(1, &[1]).replace("\"id\":2", "\"id\":9"),
            "no such nodes",
        ),
    ] {
        let error = session.take(line).expect_err(line);
        assert!(error.contains(expected), "{line}: {error}");
    }
}
