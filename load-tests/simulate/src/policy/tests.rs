//! Would a policy be missing, misread, or answer with a node that is not there?

use super::*;
use crate::engine::Node;
use crate::engine::Params;
use crate::router::{Answer, Ask};

fn fleet(nodes: usize) -> Fleet {
    Fleet::alike(Params::default(), nodes, 100)
}

fn send(router: &mut dyn Router, id: u32, session: u64, blocks: &[u32], nodes: &[Node]) -> usize {
    let ask = Ask {
        id,
        session,
        region: 0,
        prompt_tokens: blocks.len() as u32 * 512 + 100,
        output_tokens: 10,
        blocks,
    };
    match router.route(0.0, &ask, nodes) {
        Answer::Send(node) => node,
        answer => panic!("{answer:?} on idle nodes"),
    }
}

/// Would a sweep hold parameters that its policy does not know, or the same ones twice?
#[test]
fn every_policy_of_every_sweep_routes() {
    let all = Spec::parse_swept("all").expect("all");
    assert!(all.len() > 60);
    let fleet = fleet(3);
    let nodes = fleet.build();
    for (i, spec) in all.iter().enumerate() {
        assert!(!all[..i].contains(spec), "{spec} twice");
        assert_eq!(Spec::parse(&spec.to_string()).as_ref(), Ok(spec));
        let mut router = spec.build(&fleet).expect("builds");
        for id in 0..9 {
            assert!(
                send(router.as_mut(), id, 7, &[1, 2, 3], &nodes) < 3,
                "{spec}"
            );
        }
        for id in 0..9 {
            router.first_token(1.0, id, 0, 0);
            router.finished(2.0, id, 0, 10);
        }
    }
    for name in NAMES {
        assert!(
            all.iter().any(|spec| spec.name() == *name),
            "{name} is not in all"
        );
    }
    for reference in REFERENCES {
        assert!(
            all.iter().any(|spec| spec.to_string() == *reference),
            "{reference}"
        );
    }
}

/// Would a slip on the command line be played as something else?
#[test]
fn what_makes_no_sense_is_refused() {
    let check = |text: &str, expected: &str| {
        let error = Spec::parse(text)
            .and_then(|spec| spec.build(&fleet(2)).map(|_| ()))
            .expect_err(text);
        assert!(error.to_string().contains(expected), "{text}: {error}");
    };
    check("rr", "no policy \"rr\"; there are: all, homing");
    check("", "no policy");
    check("oracle:b", "\"b\" is not key=number");
    check("oracle:b=x", "not key=number");
    check("oracle:b=NaN", "not key=number");
    check("oracle:c=4", "no parameter \"c\"");
    check("homing:nonsense=1", "no parameter \"nonsense\"");
    check("session:bound=0.5", "must be 1 or more");
}

/// Would a rule not do what its name says? One table: who gets each of some requests.
#[test]
fn rules_do_what_their_sources_say() {
    let fleet = fleet(3);
    let mut nodes = fleet.build();
    // The second node holds a long prefix; a request on it keeps nothing busy any more.
    let path: Vec<u32> = (0..20).collect();
    nodes[1].keep(0.0, &std::sync::Arc::from(path.as_slice()));
    let to = |policy: &str, asks: &[(u64, &[u32])]| -> Vec<usize> {
        let spec = Spec::parse(policy).expect("known");
        let mut router = spec.build(&fleet).expect("builds");
        let sent = asks.iter().enumerate();
        sent.map(|(id, (session, blocks))| {
            send(router.as_mut(), id as u32, *session, blocks, &nodes)
        })
        .collect()
    };
    let holder: Vec<(u64, &[u32])> = (0..3).map(|session| (session, &path[..])).collect();
    for policy in [
        "cache-aware:events=1",
        "dynamo:scale=64",
        "llm-d",
        "oracle",
        "cost",
    ] {
        assert_eq!(
            to(policy, &holder[..1]),
            [1],
            "{policy}: whoever holds the prefix"
        );
    }
    assert_eq!(to("round-robin", &holder), [1, 2, 0]);
    let mut spread = to("least-outstanding", &holder);
    spread.sort_unstable();
    assert_eq!(spread, [0, 1, 2]);
    // Uneven loads: the holder has one request more than the others may have less.
    assert_ne!(to("cache-aware:events=1:abs=0:rel=1", &holder)[1], 1);
    // Trees learn from dispatches: the second request follows the first, wherever that went.
    let followed = to("cache-aware:events=0:threshold=0.3", &holder[..2]);
    assert_eq!(followed[0], followed[1]);
    let session = to("session", &[(5, &path[..]), (5, &path[..3]), (5, &[])]);
    assert!(session.iter().all(|node| *node == session[0]));
    let bounded = to(
        "session:bound=1",
        &[(5, &path[..]), (5, &path[..]), (5, &path[..])],
    );
    assert_eq!(
        bounded
            .iter()
            .collect::<std::collections::HashSet<_>>()
            .len(),
        3
    );
    let prefix = to(
        "prefix:blocks=4",
        &[(1, &path[..]), (2, &path[..9]), (3, &path[..4])],
    );
    assert!(prefix.iter().all(|node| *node == prefix[0]));
}
