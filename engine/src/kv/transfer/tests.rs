//! Catches names that are read as something else than they say.
use super::*;

#[test]
fn names() {
    let id = "00112233445566778899aabbccddeeff";
    assert_eq!(
        id.parse::<TransferId>().map(|id| id.to_string()),
        Ok(id.to_owned())
    );
    for wrong in [
        "",
        "0011",
        &id[1..],
        "zz112233445566778899aabbccddeeff",
        &format!("{id}0"),
    ] {
        assert_eq!(wrong.parse::<TransferId>(), Err(NoTransferId), "{wrong}");
    }
    let long = format!("unix:/{}", "x".repeat(120));
    let rows = [
        ("unix:/run/kv.sock", true),
        ("tcp://127.0.0.1:80", true),
        ("tcp://[::1]:80", true),
        ("unix:relative", false),
        (&long, false),
        ("tcp://name:80", false),
        ("tcp://127.0.0.1", false),
        ("http://127.0.0.1:80", false),
        ("", false),
    ];
    for (text, expected) in rows {
        let endpoint = text.parse::<Endpoint>();
        assert_eq!(
            endpoint.as_ref().map(Endpoint::to_string).ok(),
            expected.then(|| text.to_owned())
        );
    }
}
