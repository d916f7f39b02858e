//! Catches a configuration that is taken although a key is unknown or a value is out of range, and
//! one that is refused without naming the key.
use super::*;

fn check(text: &str, expected: Result<(), &str>) {
    let full = format!("listen = \"127.0.0.1:0\"\ndata = \"data\"\n{text}");
    match (
        Config::parse(&full, Path::new("/etc/homing.toml")),
        expected,
    ) {
        (Ok(_), Ok(())) => {}
        (Err(error), Err(part)) => {
            let shown = error.to_string();
            assert!(
                shown.contains(part),
                "{text}: {shown} does not contain {part}"
            );
        }
        (other, expected) => panic!("{text}: {other:?}, expected {expected:?}"),
    }
}

#[test]
fn every_refusal_names_its_key() {
    for (text, expected) in [
        ("", Ok(())),
        ("admin = \"127.0.0.1:0\"", Ok(())),
        ("admin = \"here\"", Err("`admin` is here")),
        ("color = 1", Err("color")),
        ("[[models]]\nid = \"m\"\ngguf = \"m.gguf\"", Ok(())),
        ("[[models]]\nid = \"\"", Err("models.id")),
        (
            "[[models]]\nid = \"m\"\n[[models]]\nid = \"m\"",
            Err("each id once"),
        ),
        (
            "[[nodes]]\nid = \"a\"\nurl = \"http://127.0.0.1:1\"",
            Ok(()),
        ),
        (
            "[[nodes]]\nid = \"a b\"\nurl = \"http://127.0.0.1:1\"",
            Err("nodes[0].id"),
        ),
        (
            "[[nodes]]\nid = \"a\"\nurl = \"https://127.0.0.1:1\"",
            Err("nodes[0].url"),
        ),
        (
            "[[nodes]]\nid = \"a\"\nurl = \"http://127.0.0.1\"",
            Err("nodes[0].url"),
        ),
        (
            "[[nodes]]\nid = \"a\"\nurl = \"http://127.0.0.1:1\"\nevents = \"127.0.0.1:2\"",
            Err("nodes[0].events"),
        ),
        (
            "[[nodes]]\nid = \"a\"\nurl = \"http://127.0.0.1:1\"\n\
             kv_fetch_ms_per_block = { host = 0.1, shared = 2.0 }",
            Ok(()),
        ),
        (
            "[[nodes]]\nid = \"a\"\nurl = \"http://127.0.0.1:1\"\n\
             kv_fetch_ms_per_block = { disk = -1.0 }",
            Err("`nodes[0].kv_fetch_ms_per_block.disk` is -1"),
        ),
        (
            "[[nodes]]\nid = \"a\"\nurl = \"http://127.0.0.1:1\"\n\
             kv_fetch_ms_per_block = { moon = 1.0 }",
            Err("moon"),
        ),
        ("[limits]\nbody_bytes_max = 5", Err("limits.body_bytes_max")),
        ("[limits]\nqueue_wait_s = -1.0", Err("limits.queue_wait_s")),
        ("[limits]\nqueue_wait_s = nan", Err("limits.queue_wait_s")),
        ("[limits]\nbodies = 5", Err("bodies")),
        ("[policy]\nb = 0.0", Err("policy.b")),
        (
            "[disaggregation]\nstall = -1.0",
            Err("`disaggregation.stall` is -1; allowed: 0 to 1000"),
        ),
        (
            "[prices.m]\ninput_nano_usd_per_million = -1\ncached_input_nano_usd_per_million = 0\noutput_nano_usd_per_million = 0",
            Err("prices.m"),
        ),
    ] {
        check(text, expected);
    }
}

#[test]
fn relative_paths_follow_the_file() {
    let text = "listen = \"127.0.0.1:0\"\ndata = \"d\"\n[[models]]\nid = \"m\"\ngguf = \"m.gguf\"";
    let config = Config::parse(text, Path::new("/etc/homing.toml")).expect("valid");
    assert_eq!(config.data, Path::new("/etc/d"));
    assert_eq!(
        config.models[0].gguf.as_deref(),
        Some(Path::new("/etc/m.gguf"))
    );
}

#[test]
fn every_refused_alias_is_told_why() {
    let alias = |more: &str| format!("[[aliases]]\nname = \"a\"\nmodel = \"m\"\n{more}\n");
    let named =
        |name: &str, model: &str| format!("[[aliases]]\nname = \"{name}\"\nmodel = \"{model}\"\n");
    let price = "[prices.a]\ninput_nano_usd_per_million = 1\ncached_input_nano_usd_per_million = 0\noutput_nano_usd_per_million = 0";
    for (aliases, expected) in [
        (
            alias("tenants = [\"t\"]") + &alias("tenants = [\"u\"]") + &named("a-*", "m"),
            Ok(()),
        ),
        (
            named("a", "x"),
            Err("`aliases[0].model` is x; allowed: the id of a model in [[models]]: m, n"),
        ),
        (named("m", "m"), Err("`aliases[0].name` is m")),
        (
            named("", "m"),
            Err("`aliases[0].name` is ; allowed: 1 to 256 bytes"),
        ),
        (
            alias("") + &alias(""),
            Err("`aliases[1].name` is a; allowed: each name once"),
        ),
        (
            alias("tenants = [\"t\", \"u\"]") + &alias("tenants = [\"u\"]"),
            Err("`aliases[1].name`"),
        ),
        (alias("tenants = []"), Err("`aliases[0].tenants`")),
        (
            alias("tenants = [\"a b\"]"),
            Err("`aliases[0].tenants` is a b"),
        ),
        (alias(price), Err("`prices` is a")),
        (
            named("x", "m").repeat(257),
            Err("`aliases` is 257; allowed: at most 256"),
        ),
    ] {
        let models = "[[models]]\nid = \"m\"\n[[models]]\nid = \"n\"\n";
        check(&format!("{models}{aliases}"), expected);
    }
    let none = "[[aliases]]\nname = \"a\"\nmodel = \"x\"";
    check(none, Err("[[models]] has none"));
}

#[test]
fn what_is_kept_of_responses_has_bounds() {
    for (text, expected) in [
        ("[responses]\nttl_s = 60\nrows_per_tenant = 5", Ok(())),
        ("[responses]\nttl_s = 0", Err("responses.ttl_s")),
        (
            "[responses]\nrows_per_tenant = 0",
            Err("responses.rows_per_tenant"),
        ),
        (
            "[responses]\nbytes_per_tenant = 1",
            Err("responses.bytes_per_tenant"),
        ),
        ("[responses]\nttl = 1", Err("unknown field `ttl`")),
    ] {
        check(text, expected);
    }
}

#[test]
fn roles_that_do_not_fit_together_are_told_apart() {
    let node = |id: &str, more: &str| {
        format!("[[nodes]]\nid = \"{id}\"\nurl = \"http://127.0.0.1:1\"\n{more}\n")
    };
    let prefill = |more: &str| node("p", &format!("role = \"prefill\"\n{more}"));
    let decode = |more: &str| node("d", &format!("role = \"decode\"\n{more}"));
    let boot = "bootstrap = \"127.0.0.1:8998\"\n";
    let mooncake = "connector = \"mooncake\"\n";
    for (text, expected) in [
        (prefill("") + &decode(""), Ok(())),
        (
            prefill("") + &decode("") + &node("m", "role = \"mixed\""),
            Ok(()),
        ),
        (
            prefill(&format!("{mooncake}{boot}")) + &decode(mooncake),
            Ok(()),
        ),
        (
            prefill("") + &node("m", ""),
            Err(
                "`nodes[0].role` is prefill; allowed: prefill only beside a node with the role decode and the connector homing",
            ),
        ),
        (
            node("m", "") + &decode(""),
            Err(
                "`nodes[1].role` is decode; allowed: decode only beside a node with the role prefill",
            ),
        ),
        (
            prefill("connector = \"nixl\"") + &decode(""),
            Err("the role decode and the connector nixl"),
        ),
        (
            prefill(mooncake) + &decode(mooncake),
            Err("`nodes[0].bootstrap` is missing; allowed: host:port of its bootstrap server"),
        ),
        (
            prefill(&format!("{mooncake}bootstrap = \"127.0.0.1\"")) + &decode(mooncake),
            Err("`nodes[0].bootstrap` is 127.0.0.1; allowed: host:port"),
        ),
        (
            prefill(boot) + &decode(""),
            Err("`nodes[0].bootstrap` is 127.0.0.1:8998; allowed: only with role"),
        ),
        (
            prefill(&format!("{mooncake}{boot}")) + &decode(&format!("{mooncake}{boot}")),
            Err("`nodes[1].bootstrap`"),
        ),
        (
            node("m", "connector = \"nixl\""),
            Err("`nodes[0].connector` is nixl; allowed: only with role"),
        ),
        (
            prefill("connector = \"rdma\""),
            Err("unknown variant `rdma`"),
        ),
        (node("m", "role = \"both\""), Err("unknown variant `both`")),
        (
            "[disaggregation]\nprefill_timeout_s = 0".to_owned(),
            Err("disaggregation.prefill_timeout_s"),
        ),
        (
            "[disaggregation]\nkv_bytes_per_token = 0".to_owned(),
            Err("disaggregation.kv_bytes_per_token"),
        ),
    ] {
        check(&text, expected);
    }
}
