//! A store like Mooncake's for tests: a Python that finds the twin of its package, over a folder of its
//! own. See `mooncake/store.py` for how it is told to misbehave.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A store, which lasts as long as this.
pub(crate) struct Twin(tempfile::TempDir);

impl Twin {
    /// None, and a word about it, where there is no Python.
    pub(crate) fn new() -> Option<Self> {
        if Command::new("python3").arg("--version").output().is_err() {
            eprintln!("skipped: python3 is missing, which the tests of the shared KV tier need");
            return None;
        }
        let twin = Self(tempfile::tempdir().expect("a folder"));
        let package = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/mooncake_twin");
        let folder = twin.0.path().display();
        let script = format!(
            "#!/bin/sh\nPYTHONDONTWRITEBYTECODE=1 PYTHONPATH='{package}' MOONCAKE_TWIN='{folder}' exec python3 \"$@\"\n"
        );
        fs::write(twin.python(), script).expect("a script");
        let mode = fs::Permissions::from_mode(0o700);
        fs::set_permissions(twin.python(), mode).expect("a script that can be run");
        Some(twin)
    }

    /// The Python.
    pub(crate) fn python(&self) -> PathBuf {
        self.0.path().join("python")
    }

    /// Its folder.
    pub(crate) fn path(&self) -> &Path {
        self.0.path()
    }
}
