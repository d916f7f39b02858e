//! Models from a hub on loopback. Catches a file that appears before it is whole and checked, a token that
//! leaves the hub, a cache that other tools would not share, and a fault that is not told or not survived.

mod refusals;
mod server;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use engine::hub::{HubError, Reference, Retry, Settings, fetch};
use serde_json::json;
use server::{COMMIT, Fault, Hub, git_sha1, sha256};
use tempfile::TempDir;

const REPO: &str = "models--org--repo";

/// Bytes that no other file has.
fn bytes(seed: u8, count: usize) -> Vec<u8> {
    let mut state = u32::from(seed) + 1;
    let next = |_| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 24) as u8
    };
    (0..count).map(next).collect()
}

/// A hub and an empty cache.
struct Bench {
    hub: Hub,
    cache: TempDir,
    settings: Settings,
}

impl Bench {
    fn new(files: &[(&str, &[u8])]) -> Bench {
        let hub = Hub::start(files);
        let cache = tempfile::tempdir().expect("a folder");
        let settings = Settings {
            endpoint: hub.url.clone(),
            token: Some("hf_secret".to_owned()),
            cache: cache.path().join("hub"),
            offline: false,
            retry: Retry {
                tries: 3,
                first_wait: Duration::from_millis(1),
            },
        };
        Bench {
            hub,
            cache,
            settings,
        }
    }

    fn fetch(&self, name: &str) -> Result<PathBuf, HubError> {
        fetch(&reference(name), &self.settings)
    }

    fn refused(&self, name: &str, expected: &[&str]) {
        let error = self.fetch(name).expect_err(name).to_string();
        for part in expected {
            assert!(error.contains(part), "{part:?} in {error}");
        }
    }

    fn path(&self, within: &str) -> PathBuf {
        self.settings.cache.join(REPO).join(within)
    }

    /// What lies among the blobs.
    fn blobs(&self) -> Vec<String> {
        let Ok(entries) = std::fs::read_dir(self.path("blobs")) else {
            return Vec::new();
        };
        let mut names: Vec<String> = entries
            .map(|entry| {
                entry
                    .expect("an entry")
                    .file_name()
                    .into_string()
                    .expect("UTF-8")
            })
            .collect();
        names.sort();
        names
    }

    fn store_ranges(&self) -> Vec<Option<String>> {
        let state = self.hub.state();
        let requests = state.store.iter();
        requests.map(|r| r.headers.get("range").cloned()).collect()
    }
}

fn reference(name: &str) -> Reference {
    name.parse().expect("a reference")
}

#[test]
fn a_file_lies_where_other_tools_look_for_it() {
    let model = bytes(1, 300_000);
    let bench = Bench::new(&[("dir/m.gguf", &model), ("README.md", b"#")]);
    let path = bench.fetch("hf:org/repo/dir/m.gguf").expect("fetched");
    assert_eq!(path, bench.path(&format!("snapshots/{COMMIT}/dir/m.gguf")));
    assert_eq!(std::fs::read(&path).expect("readable"), model);
    let link = std::fs::read_link(&path).expect("a link");
    assert_eq!(link, Path::new("../../../blobs").join(sha256(&model)));
    assert_eq!(
        std::fs::read_to_string(bench.path("refs/main")).expect("a ref"),
        COMMIT
    );
    assert_eq!(bench.blobs(), [sha256(&model)], "no part is left");
    let lock = format!(".locks/{REPO}/{}.lock", sha256(&model));
    assert!(bench.settings.cache.join(lock).is_file());
    {
        let mut state = bench.hub.state();
        let token = |r: &server::Request| r.headers.get("authorization").cloned();
        assert!(
            state
                .hub
                .iter()
                .all(|r| token(r).as_deref() == Some("Bearer hf_secret"))
        );
        assert!(
            state.store.iter().all(|r| token(r).is_none()),
            "{:?}",
            state.store
        );
        assert_eq!(state.store.len(), 1);
        state.hub.clear();
    }
    // Again: the revision is asked for, nothing is fetched.
    assert_eq!(bench.fetch("hf:org/repo/dir/m.gguf").expect("there"), path);
    let asked = |bench: &Bench| bench.hub.state().hub.len();
    assert_eq!((asked(&bench), bench.store_ranges().len()), (1, 1));
    // By commit nothing is asked at all.
    let commit = format!("hf:org/repo/dir/m.gguf@{COMMIT}");
    assert_eq!(bench.fetch(&commit).expect("there"), path);
    assert_eq!(asked(&bench), 1);
    // The only GGUF file need not be named.
    assert_eq!(bench.fetch("hf:org/repo").expect("there"), path);
}

#[test]
fn a_checkpoint_comes_whole_and_without_the_rest() {
    let (one, two) = (bytes(1, 70_000), bytes(2, 50_000));
    let index = json!({"weight_map": {"a": "m-1.safetensors", "b": "m-2.safetensors"}}).to_string();
    let bench = Bench::new(&[
        ("config.json", b"{}"),
        ("tokenizer.json", b"{ }"),
        ("model.safetensors.index.json", index.as_bytes()),
        ("m-1.safetensors", &one),
        ("m-2.safetensors", &two),
        ("other.safetensors", b"no"),
        ("pytorch_model.bin", b"no"),
        ("README.md", b"no"),
        ("m.gguf", b"no"),
    ]);
    let folder = bench.fetch("hf:org/repo@v1").expect("fetched");
    let mut names: Vec<String> = std::fs::read_dir(&folder)
        .expect("a folder")
        .map(|entry| {
            entry
                .expect("an entry")
                .file_name()
                .into_string()
                .expect("UTF-8")
        })
        .collect();
    names.sort();
    let expected = [
        "config.json",
        "m-1.safetensors",
        "m-2.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
    ];
    assert_eq!(names, expected);
    let config = std::fs::read_link(folder.join("config.json")).expect("a link");
    assert_eq!(config, Path::new("../../blobs").join(git_sha1(b"{}")));
    assert_eq!(
        std::fs::read_to_string(bench.path("refs/v1")).expect("a ref"),
        COMMIT
    );
    // A shard that is lost is fetched again, without the others.
    std::fs::remove_file(bench.path(&format!("blobs/{}", sha256(&two)))).expect("removed");
    bench.hub.state().store.clear();
    assert_eq!(bench.fetch("hf:org/repo@v1").expect("fetched"), folder);
    assert_eq!(bench.hub.state().store.len(), 1);
    assert_eq!(
        std::fs::read(folder.join("m-2.safetensors")).expect("readable"),
        two
    );
}

#[test]
fn without_network_what_is_there_is_used() {
    let model = bytes(3, 1000);
    let mut bench = Bench::new(&[("m.gguf", &model)]);
    bench.settings.offline = true;
    bench.refused(
        "hf:org/repo",
        &["hf:org/repo is not whole", "HF_HUB_OFFLINE"],
    );
    bench.settings.offline = false;
    let path = bench.fetch("hf:org/repo").expect("fetched");
    bench.hub.state().hub.clear();
    bench.settings.offline = true;
    assert_eq!(bench.fetch("hf:org/repo").expect("there"), path);
    assert!(bench.hub.state().hub.is_empty());
    bench.refused("hf:org/repo/other.gguf", &["not whole"]);
    bench.refused("hf:org/repo@v2", &["not whole"]);
    // A hub that is out of reach, with nobody having said so.
    bench.settings.offline = false;
    bench.settings.endpoint = "http://127.0.0.1:9".to_owned();
    assert_eq!(bench.fetch("hf:org/repo").expect("there"), path);
    bench.refused(
        "hf:org/other",
        &["cannot reach http://127.0.0.1:9", "HF_ENDPOINT"],
    );
    std::fs::remove_file(std::fs::canonicalize(&path).expect("a blob")).expect("removed");
    bench.settings.offline = true;
    bench.refused("hf:org/repo", &["not whole"]);
}

#[test]
fn a_cut_is_continued() {
    let model = bytes(4, 500_000);
    let bench = Bench::new(&[("m.gguf", &model)]);
    // More cuts than tries: each of them brings something.
    let cuts = [100_000, 90_000, 1, 200_000].map(Fault::Cut);
    bench.hub.state().store_faults = cuts.into();
    let path = bench.fetch("hf:org/repo").expect("fetched");
    assert_eq!(std::fs::read(&path).expect("readable"), model);
    let from = |at: usize| Some(format!("bytes={at}-"));
    let ranges = [
        None,
        from(100_000),
        from(190_000),
        from(190_001),
        from(390_001),
    ];
    assert_eq!(bench.store_ranges(), ranges);
    let state = bench.hub.state();
    let conditions = state
        .store
        .iter()
        .map(|r| r.headers.get("if-range").cloned());
    let one = Some("\"one\"".to_owned());
    let expected = [None, one.clone(), one.clone(), one.clone(), one];
    assert_eq!(conditions.collect::<Vec<_>>(), expected);
}

#[test]
fn a_connection_that_brings_nothing_is_given_up_and_its_part_kept() {
    let model = bytes(5, 500_000);
    let bench = Bench::new(&[("m.gguf", &model)]);
    let cuts = [100_000, 0, 0].map(Fault::Cut);
    bench.hub.state().store_faults = cuts.into();
    bench.refused("hf:org/repo", &["cannot reach", "check the network"]);
    let part = format!("{}.incomplete", sha256(&model));
    assert_eq!(bench.blobs(), [part.clone(), format!("{part}.etag")]);
    // The next process goes on, though the server's file is another one by now: it sends all.
    bench.hub.state().store.clear();
    bench.hub.state().etag = "\"two\"".to_owned();
    let path = bench.fetch("hf:org/repo").expect("fetched");
    assert_eq!(std::fs::read(&path).expect("readable"), model);
    assert_eq!(bench.store_ranges(), [Some("bytes=100000-".to_owned())]);
    assert_eq!(bench.blobs(), [sha256(&model)]);
}

#[test]
fn parts_of_other_tools_are_continued_or_thrown_away() {
    let model = bytes(6, 400_000);
    let check = |there: &[u8], ranges: &[Option<&str>], fault: Option<Fault>| {
        let bench = Bench::new(&[("m.gguf", &model)]);
        std::fs::create_dir_all(bench.path("blobs")).expect("a folder");
        let part = bench.path(&format!("blobs/{}.incomplete", sha256(&model)));
        std::fs::write(part, there).expect("written");
        bench.hub.state().store_faults = fault.into_iter().collect();
        let path = bench.fetch("hf:org/repo").expect("fetched");
        assert_eq!(std::fs::read(path).expect("readable"), model);
        let found = bench.store_ranges();
        assert_eq!(
            found.iter().map(Option::as_deref).collect::<Vec<_>>(),
            ranges
        );
        assert_eq!(bench.blobs(), [sha256(&model)]);
    };
    check(&model[..300_000], &[Some("bytes=300000-")], None);
    check(&model, &[], None);
    check(
        &model[..300_000],
        &[Some("bytes=300000-")],
        Some(Fault::Whole),
    );
    check(&bytes(7, 300_000), &[Some("bytes=300000-"), None], None);
    check(&bytes(7, 400_000), &[None], None);
    check(&bytes(7, 400_001), &[None], None);
    let gone = Fault::Status(416, "x: y");
    check(
        &model[..300_000],
        &[Some("bytes=300000-"), None],
        Some(gone),
    );
}

#[test]
fn what_has_another_checksum_never_appears() {
    let model = bytes(8, 100_000);
    let bench = Bench::new(&[("m.gguf", &model), ("x.md", b"")]);
    bench.hub.state().store_faults = [Fault::Corrupt, Fault::Corrupt].into();
    bench.refused(
        "hf:org/repo",
        &[
            "m.gguf has the checksum",
            &sha256(&model),
            "nothing was kept",
        ],
    );
    assert!(bench.blobs().is_empty(), "{:?}", bench.blobs());
    assert!(!bench.path("refs/main").exists() && !bench.path("snapshots").exists());
    // Once is survived.
    bench.hub.state().store_faults = [Fault::Corrupt].into();
    let path = bench.fetch("hf:org/repo").expect("fetched");
    assert_eq!(std::fs::read(path).expect("readable"), model);
    // Small files are checked too.
    let small = Bench::new(&[
        ("config.json", b"{\"a\": 1}"),
        ("model.safetensors", b"abc"),
    ]);
    small.hub.state().hub_faults = [Fault::Cut(usize::MAX), Fault::Corrupt, Fault::Corrupt].into();
    small.refused(
        "hf:org/repo",
        &["config.json has the checksum", &git_sha1(b"{\"a\": 1}")],
    );
}

#[test]
fn a_mirror_that_lists_names_alone_will_do() {
    let model = bytes(9, 10_000);
    let bench = Bench::new(&[("config.json", b"{}"), ("model.safetensors", &model)]);
    bench.hub.state().bare = true;
    let folder = bench.fetch("hf:org/repo").expect("fetched");
    assert_eq!(
        std::fs::read(folder.join("model.safetensors")).expect("readable"),
        model
    );
    assert_eq!(bench.blobs().len(), 2);
    let heads = bench
        .hub
        .state()
        .hub
        .iter()
        .filter(|r| r.method == "HEAD")
        .count();
    assert_eq!(heads, 2);
}

#[test]
fn the_program_prints_the_path_and_two_share_the_work() {
    let model = bytes(11, 2_000_000);
    let bench = Bench::new(&[("m.gguf", &model)]);
    let program = |args: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_homing-engine"));
        command.args(args).env("HOMING_LOG", "warn");
        for name in [
            "HF_TOKEN",
            "HF_HOME",
            "HF_HUB_OFFLINE",
            "HTTP_PROXY",
            "http_proxy",
            "ALL_PROXY",
            "all_proxy",
        ] {
            command.env_remove(name);
        }
        command.env("HF_ENDPOINT", &bench.hub.url);
        command.env("HF_HUB_CACHE", &bench.settings.cache);
        command
    };
    let spawn = || {
        let mut command = program(&["fetch", "hf:org/repo"]);
        let piped = std::process::Stdio::piped;
        command
            .stdout(piped())
            .stderr(piped())
            .spawn()
            .expect("it starts")
    };
    let both = [spawn(), spawn()].map(|child| child.wait_with_output().expect("it ends"));
    let expected = bench.path(&format!("snapshots/{COMMIT}/m.gguf"));
    for output in &both {
        let (stdout, stderr) = (&output.stdout, String::from_utf8_lossy(&output.stderr));
        assert!(output.status.success(), "{stderr}");
        assert_eq!(
            String::from_utf8_lossy(stdout),
            format!("{}\n", expected.display())
        );
    }
    assert_eq!(bench.hub.state().store.len(), 1, "fetched once");
    let lines = both
        .map(|output| String::from_utf8_lossy(&output.stderr).into_owned())
        .concat();
    assert!(
        lines.contains("fetching hf:org/repo: 100%, 2.0 of 2.0 MB"),
        "{lines}"
    );
    let failed = program(&["fetch", "hf:org/none"])
        .output()
        .expect("it ends");
    assert_eq!(failed.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&failed.stderr).contains("homing-engine: "));
    // Not a model, but fetched and opened: what is wrong is said of the file.
    let served = program(&["serve", "--model", "hf:org/repo"])
        .output()
        .expect("it ends");
    let said = String::from_utf8_lossy(&served.stderr).into_owned();
    assert!(
        said.contains("m.gguf") && said.contains("not a GGUF file"),
        "{said}"
    );
}
