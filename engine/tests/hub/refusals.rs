//! What cannot be fetched, and how it is told. Catches an answer that is believed though no hub gives it, and
//! an error that does not say what to do.

use std::path::Path;

use serde_json::json;

use crate::server::{COMMIT, Fault, sha256};
use crate::{Bench, bytes};

#[test]
fn statuses_say_what_to_do() {
    let check = |fault: Fault, times: usize, expected: &[&str], asked: usize| {
        let bench = Bench::new(&[("m.gguf", b"abc")]);
        bench.hub.state().hub_faults = vec![fault; times].into();
        bench.refused("hf:org/repo", expected);
        assert_eq!(bench.hub.state().hub.len(), asked, "{expected:?}");
    };
    let status = |status| Fault::Status(status, "x-error-message: because");
    check(
        status(401),
        9,
        &[
            "repository org/repo",
            "401",
            "because",
            "HF_TOKEN",
            "/org/repo",
        ],
        1,
    );
    check(status(403), 9, &["refuses", "403", "accept its terms"], 1);
    check(
        status(404),
        9,
        &[
            "the hub has no repository org/repo with the revision main",
            "because",
        ],
        1,
    );
    check(status(400), 9, &["status 400", "because", "HF_ENDPOINT"], 1);
    check(status(429), 9, &["429", "because", "HF_TOKEN"], 3);
    check(status(500), 9, &["answers 500", "try again later"], 3);
    check(status(503), 9, &["answers 503"], 3);
    check(Fault::To("/again".to_owned()), 99, &["redirects"], 6);
    check(
        Fault::To("ftp://elsewhere/".to_owned()),
        1,
        &["a redirect to", "ftp://elsewhere"],
        1,
    );
    // Fewer than the tries, and a wait that the server asks for.
    let bench = Bench::new(&[("m.gguf", b"abc")]);
    bench.hub.state().hub_faults = [Fault::Status(429, "retry-after: 0"), status(502)].into();
    bench.hub.state().store_faults = [status(503)].into();
    bench.fetch("hf:org/repo").expect("fetched in the end");
    // Of a file: an expired link of the store, for instance.
    let gone = Bench::new(&[("m.gguf", b"abc")]);
    gone.hub.state().store_faults = [status(403)].into();
    gone.refused("hf:org/repo", &["refuses m.gguf", "403"]);
}

#[test]
fn a_hub_that_lies_is_not_believed() {
    let check = |listing: serde_json::Value, expected: &[&str]| {
        let bench = Bench::new(&[]);
        bench.hub.state().listing = Some(listing);
        bench.refused("hf:org/repo", expected);
        let here = std::fs::read_dir(bench.cache.path())
            .expect("a folder")
            .count();
        assert!(here <= 1, "something lies beside the cache");
    };
    check(json!([]), &["no listing"]);
    check(json!("text"), &["no listing"]);
    check(
        json!({"sha": "../../../../../../tmp", "siblings": []}),
        &["a commit that is none"],
    );
    check(json!({"sha": COMMIT}), &["neither a .gguf"]);
    for name in ["../../../evil.gguf", "/evil.gguf", "a/../../evil.gguf"] {
        check(
            json!({"sha": COMMIT, "siblings": [{"rfilename": name}]}),
            &["neither a .gguf"],
        );
    }
    let file = |lfs: serde_json::Value| json!({"sha": COMMIT, "siblings": [{"rfilename": "m.gguf", "size": 3, "lfs": lfs}]});
    // Without a hash that is one, the file itself is asked for: this hub has none.
    check(
        file(json!({"sha256": "../../evil", "size": 3})),
        &["the hub has no m.gguf"],
    );
    let huge = file(json!({"sha256": "0".repeat(64), "size": 1u64 << 62}));
    check(huge, &["has room for", "HF_HUB_CACHE"]);
}

#[test]
fn a_full_disk_and_a_folder_that_cannot_be_written_are_told() {
    let model = bytes(10, 3_000_000);
    let mut bench = Bench::new(&[("m.gguf", &model)]);
    std::fs::create_dir_all(bench.path("blobs")).expect("a folder");
    let part = bench.path(&format!("blobs/{}.incomplete", sha256(&model)));
    std::os::unix::fs::symlink("/dev/full", &part).expect("a link");
    bench.refused("hf:org/repo", &["No space left", "what has come is kept"]);
    std::fs::remove_file(&part).expect("removed");
    bench.fetch("hf:org/repo").expect("fetched");
    let file = bench.cache.path().join("file");
    std::fs::write(&file, "").expect("written");
    for folder in [Path::new("/proc/homing"), &file] {
        bench.settings.cache = folder.to_owned();
        bench.refused(
            "hf:org/repo",
            &[&folder.display().to_string(), "HF_HUB_CACHE"],
        );
    }
}
