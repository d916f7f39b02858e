//! How does one file come in whole? Into `HASH.incomplete`, from where the last try ended; hashed on the
//! way; renamed to `HASH` if the hash is right. Two processes take turns by a lock.
//!
//! A part is continued only if the server still has the same file (`If-Range`, by the ETag that the part
//! began with, kept beside it). A part that turns out wrong is thrown away once; twice is an error.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use ureq::Body;
use ureq::http::Response;

use super::cache::Repo;
use super::client::{Asked, Client, header};
use super::digest::Hashing;
use super::error::HubError;
use super::listing::RemoteFile;
use super::progress::Progress;

/// Bytes taken from the network at once.
const CHUNK_BYTES: usize = 1 << 20;

/// The path of a file's blob, fetched unless it is there.
pub(super) fn blob(
    client: &Client,
    repo: &Repo,
    file: &RemoteFile,
    progress: &mut Progress,
) -> Result<PathBuf, HubError> {
    let blob = repo.blob(&file.hash);
    let is_whole = || fs::metadata(&blob).is_ok_and(|blob| blob.len() == file.bytes);
    if is_whole() {
        progress.add(file.bytes);
        return Ok(blob);
    }
    if let Some(folder) = blob.parent() {
        fs::create_dir_all(folder).map_err(HubError::io(folder))?;
    }
    let _lock = repo.lock(&file.hash)?;
    // Whoever had the lock before may have fetched it.
    if is_whole() {
        progress.add(file.bytes);
        return Ok(blob);
    }
    let part = Part::open(&blob)?;
    let found = match part.fetch(client, file, progress)? {
        Ok(()) => return part.finish(&blob),
        Err(found) => found,
    };
    tracing::warn!(
        file = file.name,
        found,
        "a part that was there has another checksum; fetching it anew"
    );
    part.forget()?;
    progress.take_back(file.bytes);
    match part.fetch(client, file, progress)? {
        Ok(()) => part.finish(&blob),
        Err(found) => {
            part.forget()?;
            // Nobody else should go on from it.
            let _ = fs::remove_file(&part.path);
            Err(HubError::Checksum {
                file: file.name.clone(),
                expected: file.hash.as_str().to_owned(),
                found,
            })
        }
    }
}

/// What has come so far.
struct Part {
    path: PathBuf,
    /// The server's ETag when it began.
    etag: PathBuf,
}

impl Part {
    fn open(blob: &Path) -> Result<Self, HubError> {
        let with = |ending: &str| {
            let mut name = blob.as_os_str().to_owned();
            name.push(ending);
            PathBuf::from(name)
        };
        Ok(Self {
            path: with(".incomplete"),
            etag: with(".incomplete.etag"),
        })
    }

    fn forget(&self) -> Result<(), HubError> {
        let _ = fs::remove_file(&self.etag);
        let file = OpenOptions::new().write(true).open(&self.path);
        let emptied = file.and_then(|file| file.set_len(0));
        emptied.map_err(HubError::io(&self.path))
    }

    fn finish(&self, blob: &Path) -> Result<PathBuf, HubError> {
        let file = File::open(&self.path).and_then(|file| file.sync_all());
        file.map_err(HubError::io(&self.path))?;
        fs::rename(&self.path, blob).map_err(HubError::io(blob))?;
        let _ = fs::remove_file(&self.etag);
        Ok(blob.to_owned())
    }

    /// Fetches what is missing, over as many connections as it takes. The inner error is the hash of a file
    /// that is not the one that was meant.
    fn fetch(
        &self,
        client: &Client,
        file: &RemoteFile,
        progress: &mut Progress,
    ) -> Result<Result<(), String>, HubError> {
        let mut incoming = Incoming::open(self, file, progress)?;
        let mut tried = 1;
        while incoming.have < file.bytes {
            let before = incoming.have;
            match incoming.more(client, progress) {
                Ok(()) => {}
                Err(error @ HubError::Network { .. }) => {
                    // What brings something may go on for as long as it does.
                    tried = if incoming.have > before { 1 } else { tried + 1 };
                    let wait = client.retry.wait(tried).ok_or_else(|| retold(&error))?;
                    tracing::warn!(%error, file = file.name, have = incoming.have, "the connection broke; going on");
                    std::thread::sleep(wait);
                }
                Err(error) => return Err(error),
            }
        }
        let found = incoming.hashing.finish();
        if found == file.hash {
            return Ok(Ok(()));
        }
        Ok(Err(found.as_str().to_owned()))
    }
}

/// The same error once more: its parts are strings.
fn retold(error: &HubError) -> HubError {
    match error {
        HubError::Network { url, why } => HubError::Network {
            url: url.clone(),
            why: why.clone(),
        },
        other => HubError::answer("the hub", other.to_string()),
    }
}

/// A file that is being written.
struct Incoming<'a> {
    part: &'a Part,
    remote: &'a RemoteFile,
    file: File,
    hashing: Hashing,
    have: u64,
}

impl<'a> Incoming<'a> {
    /// Goes on from what is there.
    fn open(
        part: &'a Part,
        remote: &'a RemoteFile,
        progress: &mut Progress,
    ) -> Result<Self, HubError> {
        let open = OpenOptions::new()
            .create(true)
            .truncate(false)
            .read(true)
            .write(true)
            .open(&part.path);
        let file = open.map_err(HubError::io(&part.path))?;
        let mut incoming = Self {
            part,
            remote,
            file,
            hashing: remote.hash.hashing(remote.bytes),
            have: 0,
        };
        incoming.hash_what_is_there(progress)?;
        Ok(incoming)
    }

    fn hash_what_is_there(&mut self, progress: &mut Progress) -> Result<(), HubError> {
        let io = || HubError::io(&self.part.path);
        let length = self.file.metadata().map_err(io())?.len();
        if length > self.remote.bytes {
            return self.restart(progress);
        }
        let mut chunk = vec![0; CHUNK_BYTES];
        while self.have < length {
            let most = (length - self.have).min(CHUNK_BYTES as u64) as usize;
            let read = self.file.read(&mut chunk[..most]).map_err(io())?;
            if read == 0 {
                break;
            }
            self.hashing.update(&chunk[..read]);
            self.have += read as u64;
            progress.add(read as u64);
        }
        Ok(())
    }

    /// From the beginning, since what is there is no part of the file.
    fn restart(&mut self, progress: &mut Progress) -> Result<(), HubError> {
        let io = || HubError::io(&self.part.path);
        self.file.set_len(0).map_err(io())?;
        self.file.seek(SeekFrom::Start(0)).map_err(io())?;
        self.hashing = self.remote.hash.hashing(self.remote.bytes);
        progress.take_back(self.have);
        self.have = 0;
        Ok(())
    }

    /// One request for what is missing.
    fn more(&mut self, client: &Client, progress: &mut Progress) -> Result<(), HubError> {
        let range = format!("bytes={}-", self.have);
        let etag = fs::read_to_string(&self.part.etag).ok();
        let mut headers = vec![("accept-encoding", "identity")];
        if self.have > 0 {
            headers.push(("range", &range));
            if let Some(etag) = &etag {
                headers.push(("if-range", etag));
            }
        }
        let asked = Asked {
            what: &self.remote.name,
            page: &self.remote.page,
        };
        let answer = client.get(&self.remote.url, &headers, &asked)?;
        let url = &self.remote.url;
        match answer.status().as_u16() {
            206 if self.have > 0 => self.check_range(&answer)?,
            // The server has no such range, or none of this file any more.
            416 => return self.restart(progress),
            200 => {
                if self.have > 0 {
                    self.restart(progress)?;
                }
                self.remember_etag(&answer);
            }
            other => return Err(HubError::answer(url, format!("status {other}"))),
        }
        self.take(answer, progress)
    }

    fn check_range(&self, answer: &Response<Body>) -> Result<(), HubError> {
        let expected = format!("bytes {}-", self.have);
        let range = header(answer.headers(), "content-range").unwrap_or_default();
        if range.starts_with(&expected) {
            return Ok(());
        }
        let why = format!("the range {range:?} where {expected:?} was asked for");
        Err(HubError::answer(&self.remote.url, why))
    }

    /// Only a strong one tells whether the file is still the same.
    fn remember_etag(&self, answer: &Response<Body>) {
        let etag = header(answer.headers(), "etag").filter(|etag| etag.starts_with('"'));
        // Without it a part is continued by its name, which is its hash.
        let _ = match etag {
            Some(etag) => fs::write(&self.part.etag, etag),
            None => fs::remove_file(&self.part.etag),
        };
    }

    fn take(&mut self, answer: Response<Body>, progress: &mut Progress) -> Result<(), HubError> {
        let url = self.remote.url.clone();
        let network = |why: String| HubError::Network {
            url: url.clone(),
            why,
        };
        let mut body = answer.into_body().into_reader();
        let mut chunk = vec![0; CHUNK_BYTES];
        while self.have < self.remote.bytes {
            let most = (self.remote.bytes - self.have).min(CHUNK_BYTES as u64) as usize;
            let read = match body.read(&mut chunk[..most]) {
                Ok(0) => {
                    let why = format!(
                        "it ended after {} of {} bytes",
                        self.have, self.remote.bytes
                    );
                    return Err(network(why));
                }
                Ok(read) => read,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(network(error.to_string())),
            };
            let written = self.file.write_all(&chunk[..read]);
            written.map_err(HubError::io(&self.part.path))?;
            self.hashing.update(&chunk[..read]);
            self.have += read as u64;
            progress.add(read as u64);
        }
        Ok(())
    }
}
