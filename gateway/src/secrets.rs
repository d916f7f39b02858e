//! Which secrets does this gateway own, and where do they live?
//!
//! Two files under `data/secrets` (directory 0700, files 0600): `fleet` keys the cache salts and
//! `node` is the bearer token towards the nodes. Each is 32 random bytes in hex, made on first
//! start. A file appears by `link` of a finished temporary, so that two processes starting
//! together agree on one value and nobody ever reads half a secret.
//!
//! Left out on purpose: rotation. A new fleet secret only means a cold cache; delete the file.

use std::fmt;
use std::fs::{self, DirBuilder, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use hmac::{Hmac, Mac};
use sha2::Sha256;

/// The secrets of one data directory.
pub struct Secrets {
    fleet: String,
    node: String,
}

/// A secret could not be read or made.
#[derive(Debug, thiserror::Error)]
#[error("secret {path}: {kind}")]
pub struct SecretError {
    path: PathBuf,
    #[source]
    kind: SecretErrorKind,
}

/// What was wrong with a secret's file.
#[derive(Debug, thiserror::Error)]
pub enum SecretErrorKind {
    /// Reading or writing failed.
    #[error("{0}")]
    Io(#[from] io::Error),
    /// The file is too short to be a secret.
    #[error("holds fewer than 16 characters; delete it and a new one is made")]
    TooShort,
    /// Others may read the file.
    #[error("is readable by others (mode {0:o}); `chmod 600` it")]
    Open(u32),
}

/// Shorter is guessable; made ones have 64 characters.
const SECRET_CHARS_MIN: usize = 16;

impl Secrets {
    /// Reads the secrets under `data`, and makes the ones that are missing.
    pub fn open(data: &Path) -> Result<Self, SecretError> {
        let dir = data.join("secrets");
        private_dir(&dir).map_err(|error| at(&dir, error.into()))?;
        Ok(Self {
            fleet: read_or_make(&dir.join("fleet"))?,
            node: read_or_make(&dir.join("node"))?,
        })
    }

    /// Takes the node token from an operator's file, for nodes that somebody else started.
    pub fn with_node_token(mut self, file: &Path) -> Result<Self, SecretError> {
        self.node = read(file)?;
        Ok(self)
    }

    /// The bearer token towards the nodes.
    pub fn node_token(&self) -> &str {
        &self.node
    }

    /// The `cache_salt` of a cache scope: 64 lower-case hex characters.
    pub fn cache_salt(&self, cache_scope: &str) -> String {
        #[expect(clippy::expect_used, reason = "HMAC accepts keys of any length")]
        let mut mac =
            Hmac::<Sha256>::new_from_slice(self.fleet.as_bytes()).expect("any key length is valid");
        mac.update(cache_scope.as_bytes());
        hex(&mac.finalize().into_bytes())
    }
}

impl fmt::Debug for Secrets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secrets(…)")
    }
}

/// Reads one secret from a file that an operator manages (`node_token_file`).
pub fn read(path: &Path) -> Result<String, SecretError> {
    let text = fs::read_to_string(path).map_err(|error| at(path, error.into()))?;
    let mode = fs::metadata(path)
        .map_err(|error| at(path, error.into()))?
        .permissions()
        .mode();
    if mode & 0o077 != 0 {
        return Err(at(path, SecretErrorKind::Open(mode & 0o777)));
    }
    let secret = text.trim();
    if secret.len() < SECRET_CHARS_MIN {
        return Err(at(path, SecretErrorKind::TooShort));
    }
    Ok(secret.to_owned())
}

/// Makes a directory (and its parents) that only its owner may enter. One that is there already
/// stays as it is: it may be somebody's home.
pub fn private_dir(dir: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(dir)
}

fn read_or_make(path: &Path) -> Result<String, SecretError> {
    match read(path) {
        Err(SecretError {
            kind: SecretErrorKind::Io(error),
            ..
        }) if error.kind() == io::ErrorKind::NotFound => {}
        other => return other,
    }
    make(path).map_err(|error| at(path, error.into()))?;
    read(path)
}

fn make(path: &Path) -> io::Result<()> {
    let temporary = path.with_extension(format!("new-{}", std::process::id()));
    let mut file = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(&temporary)?;
    file.write_all(hex(&rand::random::<[u8; 32]>()).as_bytes())?;
    file.sync_all()?;
    // `link` refuses to replace: the first of two racing processes wins, both read the same file.
    let linked = fs::hard_link(&temporary, path);
    fs::remove_file(&temporary)?;
    match linked {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(error),
        _ => Ok(()),
    }
}

fn at(path: &Path, kind: SecretErrorKind) -> SecretError {
    SecretError {
        path: path.to_owned(),
        kind,
    }
}

fn hex(bytes: &[u8]) -> String {
    use fmt::Write;
    bytes
        .iter()
        .fold(String::with_capacity(bytes.len() * 2), |mut text, byte| {
            // Writing to a String cannot fail.
            let _ = write!(text, "{byte:02x}");
            text
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Would catch a secret that changes between starts, or a file that others may read.
    #[test]
    fn made_once_and_private() {
        let dir = tempfile::tempdir().unwrap();
        let first = Secrets::open(dir.path()).unwrap();
        let second = Secrets::open(dir.path()).unwrap();
        assert_eq!(first.node_token(), second.node_token());
        assert_eq!(first.cache_salt("a"), second.cache_salt("a"));
        assert_ne!(first.cache_salt("a"), first.cache_salt("b"));
        assert_eq!(first.cache_salt("a").len(), 64);
        for (path, mode) in [
            ("secrets", 0o700),
            ("secrets/fleet", 0o600),
            ("secrets/node", 0o600),
        ] {
            let found = fs::metadata(dir.path().join(path))
                .unwrap()
                .permissions()
                .mode()
                & 0o777;
            assert_eq!(found, mode, "{path}");
        }
        assert_eq!(fs::read_dir(dir.path().join("secrets")).unwrap().count(), 2);
    }

    /// Would catch a secret that anyone on the machine can read being used in silence.
    #[test]
    fn refuses_open_and_short_files() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("token");
        fs::write(&path, "0123456789abcdef").unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
        assert!(matches!(
            read(&path),
            Err(SecretError {
                kind: SecretErrorKind::Open(0o644),
                ..
            })
        ));
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
        assert_eq!(read(&path).unwrap(), "0123456789abcdef");
        fs::write(&path, "short").unwrap();
        assert!(matches!(
            read(&path),
            Err(SecretError {
                kind: SecretErrorKind::TooShort,
                ..
            })
        ));
    }
}
