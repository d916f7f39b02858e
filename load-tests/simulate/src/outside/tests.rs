//! Would an outside policy be told something else than one in here, or its mistakes count?

use std::cell::RefCell;
use std::rc::Rc;

use super::*;
use crate::fleet::run;
use crate::homing::Settings;
use crate::homing::ext::Session;
use crate::policy::Spec;
use crate::scenario::{Load, Slice};
use crate::scenarios::Setup;
use crate::trace::Trace;

/// Eight groups of sessions of six turns, each group with a system prompt of its own.
fn trace() -> Trace {
    let mut text = "{\"name\":\"t\",\"block\":512,\"mode\":\"closed\"}\n".to_owned();
    for session in 0..48 {
        let (first, group) = (session * 6, session % 8);
        let head = if session < 8 {
            "-1,0,6".to_owned()
        } else {
            format!("{},4,2", group * 6)
        };
        text += &format!("[0,{session},3200,60,-1,0,{head}]\n");
        for turn in 1..6 {
            let before = first + turn - 1;
            let (keep, tokens) = (5 + turn, 3200 + 600 * turn);
            text += &format!("[0,{session},{tokens},60,{before},2000,{before},{keep},1]\n");
        }
    }
    Trace::read("t", text.as_bytes()).expect("a valid trace")
}

fn scenario(trace: &Trace, regions: usize) -> crate::scenario::Scenario {
    let setup = Setup {
        horizon_s: Some(600.0),
        warm_s: Some(60.0),
        regions,
        roam: 0.3,
        ..Setup::new(4, 90, Load::Users(40))
    };
    setup.scenario(trace, Slice::All, 3)
}

/// A policy in here that knows sessions by the numbers that the protocol's names give them.
struct Renamed(Box<dyn Router>);

impl Router for Renamed {
    fn route(&mut self, now_ms: f64, ask: &Ask<'_>, nodes: &[Node]) -> Answer {
        let session = crate::homing::ext::session_number(&format!("s{}", ask.session));
        self.0.route(now_ms, &Ask { session, ..*ask }, nodes)
    }

    fn changed(&mut self, now_ms: f64, node: usize, change: &Change<'_>) {
        self.0.changed(now_ms, node, change);
    }

    fn first_token(&mut self, now_ms: f64, id: u32, node: usize, cached_tokens: u32) {
        self.0.first_token(now_ms, id, node, cached_tokens);
    }

    fn finished(&mut self, now_ms: f64, id: u32, node: usize, output_tokens: u32) {
        self.0.finished(now_ms, id, node, output_tokens);
    }
}

/// The product's policy behind the protocol decides as it does in here, request by request. What the
/// protocol cannot say is a session's number (it has a name), and only ties are broken by it.
#[test]
fn the_product_behind_the_protocol_decides_as_in_here() {
    let trace = trace();
    for regions in [1, 2] {
        let scenario = scenario(&trace, regions);
        let mut session = Session::new(Settings::default());
        let exchange = Box::new(move |line: &str, wanted: Wanted| {
            let answer = session.take(line).map_err(|error| error.to_string())?;
            assert_eq!(answer.is_some(), wanted == Wanted::Answer, "{line}");
            Ok(answer)
        });
        let mut outside = Outside::new(&scenario.fleet, exchange);
        let behind = run(&trace, &scenario, &mut outside);
        assert_eq!(outside.trouble(), None);
        let spec = Spec::parse("homing").expect("known");
        let mut here = Renamed(spec.build(&scenario.fleet).expect("builds"));
        let here = run(&trace, &scenario, &mut here);
        assert!(here.outcomes.len() > 500, "{}", here.outcomes.len());
        assert_eq!(behind, here, "{regions} regions");
    }
}

/// What is said about one short run, line by line, in the protocol's own names.
#[test]
fn lines_are_those_of_the_protocol() {
    let text = "{\"name\":\"t\",\"block\":512,\"mode\":\"open\"}\n[0,7,1100,20,-1,0,-1,0,2]\n";
    let trace = Trace::read("t", text.as_bytes()).expect("a valid trace");
    let load = Load::Copies {
        copies: 1,
        speed: 1.0,
    };
    let mut scenario = Setup::new(2, 100, load).scenario(&trace, Slice::All, 5);
    scenario.jitter_ms = 0.0;
    scenario.horizon_ms = 10_000.0;
    let lines = Rc::new(RefCell::new(Vec::new()));
    let written = Rc::clone(&lines);
    let exchange = Box::new(move |line: &str, wanted: Wanted| {
        written.borrow_mut().push(line.to_owned());
        Ok((wanted == Wanted::Answer).then(|| " {\"node\": 1, \"why\": \"x\"} ".to_owned()))
    });
    let mut outside = Outside::new(&scenario.fleet, exchange);
    let run = run(&trace, &scenario, &mut outside);
    assert_eq!(run.outcomes[0].node, Some(1));
    drop(outside);
    let lines = lines.take();
    let starts = [
        r#"{"type":"hello","nodes":2,"regions":1,"block_tokens":512,"capacity_blocks":100,"rtt_ms":["#,
        r#"{"type":"kv","t_ms":0.0,"node":0,"stored":[],"removed":[]}"#,
        r#"{"type":"kv","t_ms":0.0,"node":1,"stored":[],"removed":[]}"#,
        r#"{"type":"request","id":0,"t_ms":0.0,"session":"s0","region":0,"input_tokens":1100,"output_tokens_hidden":null,"blocks":["#,
        r#"{"type":"kv","t_ms":"#,
        r#"{"type":"first_token","id":0,"t_ms":"#,
        r#"{"type":"finish","id":0,"t_ms":"#,
    ];
    assert_eq!(lines.len(), starts.len(), "{lines:#?}");
    for (line, start) in lines.iter().zip(starts) {
        assert!(line.starts_with(start), "{line}\nis not {start}");
    }
    let ends = [
        (
            3,
            r#""nodes":[{"id":0,"region":0,"waiting":0,"kv_used":0.0,"capacity_blocks":100},{"id":1,"region":0,"waiting":0,"kv_used":0.0,"capacity_blocks":100}]}"#,
        ),
        (6, r#","node":1,"output_tokens":20}"#),
    ];
    for (at, end) in ends {
        assert!(lines[at].ends_with(end), "{}\nends not in {end}", lines[at]);
    }
}

/// A policy in trouble is asked no more, and its run ends all the same.
#[test]
fn mistakes_are_named_and_end_nothing_else() {
    let trace = trace();
    let scenario = scenario(&trace, 1);
    let check = |answer: Result<Option<String>, String>, expected: &str| {
        let asked = Rc::new(RefCell::new(0));
        let count = Rc::clone(&asked);
        let exchange = Box::new(move |_: &str, wanted: Wanted| {
            if wanted == Wanted::Nothing {
                return Ok(None);
            }
            *count.borrow_mut() += 1;
            answer.clone()
        });
        let mut outside = Outside::new(&scenario.fleet, exchange);
        run(&trace, &scenario, &mut outside);
        let trouble = outside.trouble().expect("noticed");
        assert!(trouble.contains(expected), "{trouble}");
        assert_eq!(*asked.borrow(), 1, "{expected}");
    };
    let said = |text: &str| Ok(Some(text.to_owned()));
    check(said("{\"node\":4}"), "numbered from 0 to 3");
    check(said("{\"node\":-1}"), "answered \"{\\\"node\\\":-1}\"");
    check(said("node 1"), "not {\"node\":N}");
    check(said("{}"), "missing field `node`");
    check(said(&"x".repeat(100_000)), "answered \"xxx");
    check(Err("ended early".to_owned()), "ended early");
}
