//! Bytes that are damaged, cut off or made up on the way.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::thread;

use serde_json::json;

use super::{CHAT, HELD, Pair, RECEIVED, Way, asked, fresh_id, info, prompt};
use crate::common::{Node, TOKEN};

const BYTES: &str = "homing:kv_transfer_received_bytes_total";

/// What a proxy does to the bytes of one connection that come from the node behind it.
#[derive(Clone, Copy, Debug)]
pub(super) enum Harm {
    None,
    /// One bit of the byte at this offset is turned.
    Damage(usize),
    /// The connection ends there.
    Cut(usize),
}

/// Stands before an endpoint; the `n`th connection is harmed as `harm(n)` says.
pub(super) fn proxy(endpoint: &str, harm: impl Fn(usize) -> Harm + Send + 'static) -> String {
    let target = endpoint
        .strip_prefix("tcp://")
        .expect("a TCP endpoint")
        .to_owned();
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("an address");
    thread::spawn(move || {
        for (number, near) in listener.incoming().enumerate() {
            let near = near.expect("a connection");
            let far = TcpStream::connect(&target).expect("the node listens");
            let (near_too, far_too) = (near.try_clone(), far.try_clone());
            let (near_too, far_too) = (near_too.expect("a copy"), far_too.expect("a copy"));
            thread::spawn(move || carry(near_too, far_too, Harm::None));
            let harm = harm(number);
            thread::spawn(move || carry(far, near, harm));
        }
    });
    format!("tcp://{address}")
}

fn carry(mut from: TcpStream, mut to: TcpStream, harm: Harm) {
    let mut bytes = vec![0; 64 << 10];
    let mut done = 0;
    while let Ok(count @ 1..) = from.read(&mut bytes) {
        let mut passed = &mut bytes[..count];
        match harm {
            Harm::Damage(at) if (done..done + count).contains(&at) => passed[at - done] ^= 4,
            Harm::Cut(at) if at < done + count => passed = &mut passed[..at.saturating_sub(done)],
            Harm::None | Harm::Damage(_) | Harm::Cut(_) => {}
        }
        let whole = passed.len() == count;
        if to.write_all(passed).is_err() || !whole {
            break;
        }
        done += count;
    }
    let _ = to.shutdown(Shutdown::Both);
    let _ = from.shutdown(Shutdown::Both);
}

type Harms = fn(usize) -> Harm;

/// What the connections of a transfer meet, and whether it comes at last.
const HARMS: [(&str, Harms, bool); 5] = [
    ("nothing", |_| Harm::None, true),
    (
        "damaged once",
        |n| first(1, n, Harm::Damage(3_000_000)),
        true,
    ),
    (
        "damaged in a head",
        |n| first(1, n, Harm::Damage(1_200)),
        true,
    ),
    ("cut twice", |n| first(4, n, Harm::Cut(2_000_000)), true),
    ("damaged always", |_| Harm::Damage(700_000), false),
];

/// Harm for the first `count` connections.
fn first(count: usize, number: usize, harm: Harm) -> Harm {
    if number < count { harm } else { Harm::None }
}

/// Would catch a damaged block that is taken for a whole one, and a transfer that begins again where it
/// could go on.
#[test]
fn damage_is_found_and_a_connection_that_breaks_is_taken_up_again() {
    let pair = Pair::start(&[], &[]);
    let mixed = Node::start_with(&[], Some(TOKEN));
    for (name, harm, comes) in HARMS {
        let received = pair.decode.metric(RECEIVED);
        let sent = pair.prefill.metric(&Way::Tcp.sent());
        let bytes = pair.decode.metric(BYTES);
        let body = asked(prompt(name, 600), json!({"cache_salt": name}));
        let through = proxy(&pair.endpoint(Way::Tcp), harm);
        let (first, second) = pair.both(&body, &json!({"remote_endpoints": [through]}));
        assert_eq!(
            (first.status, second.status),
            (200, 200),
            "{name}: {}",
            second.text()
        );
        let expected = mixed.post(CHAT, &body).json();
        assert_eq!(second.json()["choices"], expected["choices"], "{name}");
        let came = pair.decode.metric(RECEIVED) - received;
        assert_eq!(came, f64::from(u8::from(comes)), "{name}");
        let tokens = expected["usage"]["prompt_tokens"]
            .as_u64()
            .expect("a count");
        let whole = (tokens / 16 * 368_640) as f64;
        if comes {
            let bytes = pair.decode.metric(BYTES) - bytes;
            // Blocks whose layers were on their way when a connection broke come again.
            let most = if name == "nothing" { 1.0 } else { 2.0 };
            assert!(
                (1.0..=most).contains(&(bytes / whole)),
                "{name}: {} of what there was was taken",
                bytes / whole
            );
        }
        // A window of blocks is on its way when a connection breaks, at most three times.
        let sent = pair.prefill.metric(&Way::Tcp.sent()) - sent;
        assert!(
            sent < 3.5 * whole,
            "{name}: {} of what there was",
            sent / whole
        );
    }
    pair.decode.wait_for_metric(HELD, |held| held == 0.0);
}

/// Whoever does not hold the token gets nothing, says what it likes, and costs nothing that lasts.
#[test]
fn hostile_bytes_do_no_harm() {
    let pair = Pair::start(&[], &[]);
    let stranger = Node::start_with(&["--kv-listen", "tcp://127.0.0.1:0"], Some("another token"));
    let address = pair.endpoint(Way::Tcp);
    let address = address.strip_prefix("tcp://").expect("a TCP endpoint");
    let mut noise = 12345_u64;
    for round in 0..60 {
        let mut stream = TcpStream::connect(address).expect("it listens");
        let mut bytes: Vec<u8> = (0..round * 37)
            .map(|_| {
                noise = noise
                    .wrapping_mul(6_364_136_223_846_793_005)
                    .wrapping_add(1);
                (noise >> 56) as u8
            })
            .collect();
        if round % 3 == 0 {
            // A message of four gigabytes.
            bytes.splice(..0, [1, 255, 255, 255, 255]);
        } else if round % 3 == 1 {
            bytes.splice(
                ..0,
                *b"\x01\x20\x00\x00\x00{\"type\":\"hello\",\"protocol\":\"x\"}",
            );
        }
        // It may close before it has read everything.
        let _ = stream.write_all(&bytes);
        let _ = stream.shutdown(Shutdown::Write);
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        assert!(answer.len() < 4096, "{} bytes for nothing", answer.len());
    }
    let body = asked(prompt("hostile", 100), json!({}));
    let id = fresh_id();
    let mut first = pair.first_leg(&id, &body);
    first["kv_transfer_params"]["remote_engine_id"] = info(&stranger)["engine_id"].clone();
    assert_eq!(pair.prefill.post(CHAT, &first).status, 200);
    let fails = json!({"on_failure": "error"});
    let refused = stranger
        .post(CHAT, &pair.second_leg(&id, &body, &fails))
        .error();
    assert_eq!(
        (refused.0, &*refused.1),
        (503, "kv_transfer_failed"),
        "another token"
    );
    let (_, second) = pair.both(&body, &fails);
    assert_eq!(second.status, 200, "{}", second.text());
}
