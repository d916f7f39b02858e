//! What must hold of the repository that no compiler or linter checks?
//!
//! Each rule reads the files that git tracks (or would track), and lists every breach with its
//! place, so that one run shows all of them. Left out: anything that rustfmt or clippy can say.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Past this a file holds a second subject, or says why not.
const LINES_MAX: usize = 500;
/// The reason for a longer file stands on a line of its own that begins with this.
const LONG_REASON: &str = "// tidy: long because ";

/// Everything that may stand at the top of the repository.
const TOP_LEVEL: &[&str] = &[
    ".ci",
    ".clippy.toml",
    ".deny.toml",
    ".gitignore",
    ".rustfmt.toml",
    "Cargo.lock",
    "Cargo.toml",
    "LICENSE",
    "Makefile",
    "README.md",
    "cache-index",
    "docs",
    "engine",
    "gateway",
    "load-tests",
    "policies",
];

/// The crate edges of docs/ARCHITECTURE.md: a crate and what it may depend on.
const EDGES: &[(&str, &[&str])] = &[
    ("cache-index", &[]),
    ("cache-index/prompt", &[]),
    ("policies", &["cache-index"]),
    (
        "gateway",
        &["cache-index", "prompt", "policies", "dialects"],
    ),
    // Its tests make prompts of what it reads.
    ("gateway/dialects", &["prompt"]),
    ("engine", &["cache-index", "prompt", "answer", "constrain"]),
    ("engine/answer", &[]),
    ("engine/constrain", &["answer"]),
    (
        "load-tests",
        &["cache-index", "prompt", "policies", "simulate"],
    ),
    // Pure: no IO, no clock of its own.
    ("load-tests/simulate", &["cache-index", "policies"]),
    // A workspace of its own (its peers' dependencies are not the product's), yet the same rule.
    // The engine's disk tier is measured beside its peer there.
    ("load-tests/peers", &["cache-index", "engine"]),
];

/// The workspace's own crates as a `Cargo.toml` names them.
const OWN_CRATES: &[&str] = &[
    "cache-index",
    "prompt",
    "policies",
    "dialects",
    "simulate",
    "homing-gateway",
    "gateway",
    "homing-engine",
    "engine",
    "answer",
    "constrain",
    "homing-load-tests",
    "load-tests",
];

/// One TLS stack (rustls) and no system library for it.
const BANNED_CRATES: &[&str] = &["openssl", "openssl-sys", "native-tls"];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("..")
        .canonicalize()
        .expect("the workspace root")
}

/// Paths that git tracks or would track, relative to the root.
fn files() -> Vec<String> {
    let list = Command::new("git")
        .args([
            "ls-files",
            "--cached",
            "--others",
            "--exclude-standard",
            "-z",
        ])
        .current_dir(root())
        .output()
        .expect("git runs");
    assert!(
        list.status.success(),
        "git ls-files: {}",
        String::from_utf8_lossy(&list.stderr)
    );
    let text = String::from_utf8(list.stdout).expect("file names are UTF-8");
    let mut files: Vec<String> = text
        .split('\0')
        .filter(|f| !f.is_empty())
        .map(str::to_owned)
        .collect();
    files.retain(|f| root().join(f).is_file());
    files.sort();
    files.dedup();
    assert!(files.len() > 20, "git lists only {} files", files.len());
    files
}

fn read(file: &str) -> Option<String> {
    String::from_utf8(fs::read(root().join(file)).expect("a listed file is readable")).ok()
}

/// Fails with every breach of one rule.
fn none(rule: &str, breaches: &[String]) {
    assert!(breaches.is_empty(), "{rule}:\n  {}", breaches.join("\n  "));
}

#[test]
fn every_source_file_says_which_question_it_answers() {
    let breaches: Vec<String> = files()
        .into_iter()
        .filter(|f| f.ends_with(".rs"))
        .filter(|f| !read(f).is_some_and(|text| text.starts_with("//!")))
        .collect();
    none("a .rs file must open with `//!`", &breaches);
}

#[test]
fn long_files_give_a_reason() {
    let mut breaches = Vec::new();
    for file in files().into_iter().filter(|f| f.ends_with(".rs")) {
        let text = read(&file).unwrap_or_default();
        let lines = text.lines().count();
        let reason = text
            .lines()
            .any(|l| l.trim_start().starts_with(LONG_REASON));
        if lines > LINES_MAX && !reason {
            breaches.push(format!("{file}: {lines} lines"));
        }
    }
    none(
        &format!("over {LINES_MAX} lines needs a `{LONG_REASON}…` line"),
        &breaches,
    );
}

#[test]
fn the_top_level_holds_only_what_it_should() {
    let mut breaches: Vec<String> = files()
        .iter()
        .filter_map(|f| f.split('/').next().map(str::to_owned))
        .filter(|name| !TOP_LEVEL.contains(&name.as_str()))
        .collect();
    breaches.dedup();
    none("not among the allowed top-level names", &breaches);
}

#[test]
fn crates_depend_only_along_the_designed_edges() {
    let mut breaches = Vec::new();
    let manifests: Vec<String> = files()
        .into_iter()
        .filter(|f| f.ends_with("/Cargo.toml"))
        .map(|f| f.trim_end_matches("/Cargo.toml").to_owned())
        .collect();
    for folder in &manifests {
        let Some((_, allowed)) = EDGES.iter().find(|(name, _)| name == folder) else {
            breaches.push(format!("{folder}: a crate that the design does not know"));
            continue;
        };
        for own in own_dependencies(&read(&format!("{folder}/Cargo.toml")).expect("UTF-8")) {
            if !allowed.contains(&own.as_str()) {
                breaches.push(format!("{folder} → {own}"));
            }
        }
    }
    none(
        "a crate edge outside the design (a new one is a decision)",
        &breaches,
    );
    assert_eq!(manifests.len(), EDGES.len(), "crates found: {manifests:?}");
}

/// Names of workspace crates in any `[…dependencies…]` table, dev and build ones included.
fn own_dependencies(manifest: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut inside = false;
    for line in manifest.lines().map(str::trim) {
        if let Some(table) = line.strip_prefix('[') {
            inside = table.contains("dependencies");
            // `[dependencies.name]` names a crate in the table's own heading.
            if let Some((_, name)) = table.trim_end_matches(']').split_once("dependencies.") {
                found.push(name.to_owned());
            }
        } else if inside {
            let name: String = line
                .chars()
                .take_while(|c| c.is_alphanumeric() || "-_".contains(*c))
                .collect();
            found.push(name);
        }
    }
    found.retain(|name| OWN_CRATES.contains(&name.as_str()));
    found
}

#[test]
fn links_in_the_documents_lead_somewhere() {
    let mut breaches = Vec::new();
    let documents = files()
        .into_iter()
        .filter(|f| f.ends_with(".md") && !f.contains("/tests/"));
    for file in documents {
        let text = read(&file).unwrap_or_default();
        let folder = root()
            .join(&file)
            .parent()
            .expect("a file has a folder")
            .to_owned();
        for target in relative_links(&text) {
            if !folder.join(&target).exists() {
                breaches.push(format!("{file}: {target}"));
            }
        }
    }
    none("a dead relative link", &breaches);
}

/// Targets of `[text](target)` outside code blocks that are no URL, without their `#anchor`.
fn relative_links(text: &str) -> Vec<String> {
    let mut links = Vec::new();
    let mut code = false;
    for line in text.lines() {
        if line.trim_start().starts_with("```") {
            code = !code;
        }
        if code {
            continue;
        }
        for rest in line.split("](").skip(1) {
            let Some((target, _)) = rest.split_once(')') else {
                continue;
            };
            let path = target.split('#').next().unwrap_or_default();
            if !path.is_empty() && !target.contains("://") && !target.starts_with("mailto:") {
                links.push(path.to_owned());
            }
        }
    }
    links
}

#[test]
fn no_file_names_a_registry_host_or_a_path_of_one_machine() {
    // Put together here, so that this file does not name them either.
    let hosts = [
        ["crates", ".io"],
        ["pypi", ".org"],
        ["pythonhosted", ".org"],
        ["registry.npmjs", ".org"],
        ["deb.debian", ".org"],
        ["proxy.golang", ".org"],
    ];
    let paths = [
        ["/", "root/"],
        ["/ho", "me/"],
        ["/", "work/"],
        ["/tm", "p/w"],
        ["/Use", "rs/"],
    ];
    let words: Vec<String> = hosts
        .iter()
        .chain(&paths)
        .map(|parts| parts.concat())
        .collect();
    let mut breaches = Vec::new();
    for file in files().into_iter().filter(|f| !f.ends_with("Cargo.lock")) {
        let Some(text) = read(&file) else { continue };
        for (number, line) in text.lines().enumerate() {
            for word in words.iter().filter(|word| line.contains(word.as_str())) {
                breaches.push(format!("{file}:{}: {word}", number + 1));
            }
        }
    }
    none("a registry host or a path of one machine", &breaches);
}

#[test]
fn the_lock_file_holds_one_tls_stack() {
    let lock = read("Cargo.lock").expect("Cargo.lock is text");
    let names: BTreeMap<&str, ()> = lock
        .lines()
        .filter_map(|l| l.strip_prefix("name = \""))
        .map(|l| (l.trim_end_matches('"'), ()))
        .collect();
    let breaches: Vec<String> = BANNED_CRATES
        .iter()
        .filter(|name| names.contains_key(*name))
        .map(|name| (*name).to_owned())
        .collect();
    none("a banned crate is in Cargo.lock", &breaches);
}
