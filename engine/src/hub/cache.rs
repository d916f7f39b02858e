//! Where do the hub's files lie? As `huggingface_hub` has them:
//!
//! ```text
//! models--org--repo/blobs/HASH             contents, under their hashes
//! models--org--repo/snapshots/COMMIT/NAME  links to these
//! models--org--repo/refs/REVISION          which commit a name means
//! .locks/models--org--repo/HASH.lock       whoever fetches it
//! ```
//!
//! A blob appears under its name when it is whole and checked, a link when its blob is there, a revision
//! when all of the model is.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io;
use std::path::{Path, PathBuf};

use super::choose::Chosen;
use super::digest::Hash;
use super::error::HubError;
use super::reference::Reference;

/// Room that is left beside what is fetched.
const SPARE_BYTES: u64 = 64 << 20;
/// Names of a snapshot that are looked at.
const NAMES_MAX: usize = 100_000;

/// One repository in the cache.
#[derive(Debug)]
pub(super) struct Repo {
    cache: PathBuf,
    name: String,
}

/// The files of one commit.
#[derive(Debug)]
pub(super) struct Snapshot {
    repo: PathBuf,
    folder: PathBuf,
}

/// Held while a blob is fetched.
#[derive(Debug)]
pub(super) struct Lock {
    _file: File,
}

impl Repo {
    pub(super) fn new(cache: &Path, reference: &Reference) -> Self {
        Self {
            cache: cache.to_owned(),
            name: reference.folder(),
        }
    }

    fn folder(&self) -> PathBuf {
        self.cache.join(&self.name)
    }

    pub(super) fn snapshot(&self, commit: &str) -> Snapshot {
        let repo = self.folder();
        let folder = repo.join("snapshots").join(commit);
        Snapshot { repo, folder }
    }

    /// The snapshot that a revision means by what was fetched before.
    pub(super) fn snapshot_of(&self, reference: &Reference) -> Result<Option<Snapshot>, HubError> {
        let commit = if reference.is_commit() {
            reference.revision().to_ascii_lowercase()
        } else {
            let path = self.folder().join("refs").join(reference.revision());
            match fs::read_to_string(&path) {
                Ok(commit) => commit.trim().to_owned(),
                Err(error) if is_absent(&error) => return Ok(None),
                Err(error) => return Err(HubError::io(&path)(error)),
            }
        };
        // A name, not a path: the file may be anybody's.
        let is_commit = commit.len() == 40 && commit.bytes().all(|b| b.is_ascii_hexdigit());
        let snapshot = is_commit.then(|| self.snapshot(&commit));
        Ok(snapshot.filter(|snapshot| snapshot.folder.is_dir()))
    }

    /// Where a blob lies, or will.
    pub(super) fn blob(&self, hash: &Hash) -> PathBuf {
        self.folder().join("blobs").join(hash.as_str())
    }

    /// Waits for whoever else fetches this blob.
    pub(super) fn lock(&self, hash: &Hash) -> Result<Lock, HubError> {
        let folder = self.cache.join(".locks").join(&self.name);
        create(&folder)?;
        let path = folder.join(format!("{}.lock", hash.as_str()));
        let open = OpenOptions::new()
            .create(true)
            .truncate(false)
            .write(true)
            .open(&path);
        let file = open.map_err(HubError::io(&path))?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                tracing::info!(lock = %path.display(), "another process fetches this file; waiting");
                file.lock().map_err(HubError::io(&path))?;
            }
            Err(TryLockError::Error(error)) => return Err(HubError::io(&path)(error)),
        }
        Ok(Lock { _file: file })
    }

    /// Makes the folder of blobs, and refuses where so many bytes have no room.
    pub(super) fn check_space(&self, needed: u64) -> Result<(), HubError> {
        let blobs = self.folder().join("blobs");
        create(&blobs)?;
        let Ok(space) = rustix::fs::statvfs(&blobs) else {
            return Ok(());
        };
        let available = space.f_bavail.saturating_mul(space.f_frsize);
        // What a file system does not count is not refused.
        if space.f_blocks > 0 && available < needed.saturating_add(SPARE_BYTES) {
            return Err(HubError::Space {
                folder: self.cache.clone(),
                needed,
                available,
            });
        }
        Ok(())
    }

    /// Remembers which commit a revision means.
    pub(super) fn point(&self, reference: &Reference, commit: &str) -> Result<(), HubError> {
        if reference.is_commit() {
            return Ok(());
        }
        let path = self.folder().join("refs").join(reference.revision());
        if fs::read_to_string(&path).is_ok_and(|known| known == commit) {
            return Ok(());
        }
        if let Some(folder) = path.parent() {
            create(folder)?;
        }
        let new = path.with_extension(format!("{}.new", std::process::id()));
        fs::write(&new, commit).map_err(HubError::io(&new))?;
        fs::rename(&new, &path).map_err(HubError::io(&path))
    }
}

impl Snapshot {
    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    /// What the engine opens.
    pub(super) fn model(&self, chosen: &Chosen) -> PathBuf {
        match chosen {
            Chosen::File(file) => self.path(file),
            Chosen::Folder(_) => self.folder.clone(),
        }
    }

    /// The files that are there, with the folders they lie in.
    pub(super) fn names(&self) -> Result<Vec<String>, HubError> {
        let mut names = Vec::new();
        let mut folders = vec![String::new()];
        while let Some(within) = folders.pop() {
            let folder = self.folder.join(&within);
            for entry in fs::read_dir(&folder).map_err(HubError::io(&folder))? {
                let entry = entry.map_err(HubError::io(&folder))?;
                let Ok(name) = entry.file_name().into_string() else {
                    continue;
                };
                let path = entry.path();
                // Links count by what they lead to: a blob that is gone is no file.
                if path.is_file() {
                    names.push(format!("{within}{name}"));
                } else if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                    folders.push(format!("{within}{name}/"));
                }
                if names.len() + folders.len() > NAMES_MAX {
                    return Ok(names);
                }
            }
        }
        Ok(names)
    }

    /// Puts a blob under a file's name.
    pub(super) fn link(&self, name: &str, blob: &Path) -> Result<PathBuf, HubError> {
        let path = self.path(name);
        if let Some(folder) = path.parent() {
            create(folder)?;
        }
        // Relative, so that the cache can be moved.
        let up = "../".repeat(2 + name.matches('/').count());
        let within = blob.strip_prefix(&self.repo).unwrap_or(blob);
        let target = Path::new(&up).join(within);
        match std::os::unix::fs::symlink(&target, &path) {
            Ok(()) => Ok(path),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists && path.is_file() => {
                Ok(path)
            }
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                // Of a blob that is gone.
                fs::remove_file(&path).map_err(HubError::io(&path))?;
                std::os::unix::fs::symlink(&target, &path).map_err(HubError::io(&path))?;
                Ok(path)
            }
            Err(error) => Err(HubError::io(&path)(error)),
        }
    }
}

fn create(folder: &Path) -> Result<(), HubError> {
    fs::create_dir_all(folder).map_err(HubError::io(folder))
}

fn is_absent(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::NotFound | io::ErrorKind::NotADirectory
    )
}
