//! Catches an answer that is given although its usage cannot be recorded, and a record that is lost
//! because the disk filled up behind it.

use crate::support::node::Node;
use crate::support::{Gateway, Stream, chat};

#[test]
fn a_full_disk_refuses_before_the_node_is_asked() {
    let node = Node::start();
    let gateway = Gateway::cramped(&[&node], 4096);
    let mut acknowledged = Vec::new();
    let refused = loop {
        let answer = gateway.chat(&chat(Stream::Yes, "hi"));
        if answer.status != 200 {
            break answer;
        }
        acknowledged.push(answer.header("x-request-id").unwrap().to_owned());
        assert!(acknowledged.len() < 20_000, "the disk never fills");
    };
    assert_eq!(refused.status, 503, "{refused:?}");
    assert_eq!(refused.json()["error"]["code"], "ledger_unavailable");
    assert_eq!(refused.json()["error"]["type"], "server_error");
    assert!(refused.header("retry-after").is_some());
    assert_eq!(
        node.received().len(),
        acknowledged.len(),
        "a refused request reached the node"
    );
    assert!(acknowledged.len() > 20, "{}", acknowledged.len());
    let rows = gateway.rows();
    assert_eq!(rows.len(), acknowledged.len());
    for id in acknowledged {
        let row = rows
            .iter()
            .find(|row| row["request_id"] == id.as_str())
            .unwrap();
        assert_eq!(
            (&row["status"], &row["output_tokens"]),
            (&"complete".into(), &20.into())
        );
    }
    gateway.assert_idle();
}
