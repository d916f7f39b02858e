//! How does a model come from the hub?
//!
//! `hf:org/repo[/file][@revision]` names a GGUF file or a whole checkpoint. States: *asked* (one request
//! lists the revision's files with their hashes) → *chosen* (`choose`: which of them make the model) →
//! each file *there* already, or *fetched* (`download`: resumed, checked, then put under its name) →
//! *named* (the revision points to the commit). A process that is killed in any of them leaves only
//! parts under `.incomplete`, which the next one goes on from.
//!
//! Files lie where `huggingface_hub` keeps them (`cache`), so that other programs share them. Where the
//! hub cannot be reached, or must not be (`HF_HUB_OFFLINE`), a model that is there whole is used as it is.
//!
//! Left out on purpose: uploads, datasets, and Xet's own protocol: the hub gives every file over HTTP too.

mod cache;
mod choose;
mod client;
mod digest;
mod download;
mod error;
mod listing;
mod progress;
mod reference;
mod settings;

use std::path::PathBuf;

pub use client::Retry;
pub use error::HubError;
pub use reference::{Reference, ReferenceError, SCHEME};
pub use settings::Settings;

use cache::Repo;
use choose::{Chosen, choose};
use client::Client;
use listing::Listing;
use progress::Progress;
use prompt::checkpoint::{CheckpointError, INDEX_FILE, Index};

/// Brings a model into the cache, if it is not there yet, and says where: a GGUF file or a folder.
pub fn fetch(reference: &Reference, settings: &Settings) -> Result<PathBuf, HubError> {
    let repo = Repo::new(&settings.cache, reference);
    // What a commit holds never changes.
    if (reference.is_commit() || settings.offline)
        && let Some(path) = cached(reference, &repo)?
    {
        return Ok(path);
    }
    if settings.offline {
        return Err(HubError::Offline {
            reference: reference.to_string(),
            cache: settings.cache.clone(),
        });
    }
    match Fetch::start(reference, settings, &repo) {
        Ok(fetch) => fetch.run(),
        Err(error @ HubError::Network { .. }) => match cached(reference, &repo) {
            Ok(Some(path)) => {
                tracing::warn!(%error, "the hub is out of reach; the model is used as it was fetched before");
                Ok(path)
            }
            _ => Err(error),
        },
        Err(error) => Err(error),
    }
}

/// The model as the cache has it, if it has all of it.
fn cached(reference: &Reference, repo: &Repo) -> Result<Option<PathBuf>, HubError> {
    let Some(snapshot) = repo.snapshot_of(reference)? else {
        return Ok(None);
    };
    let names = snapshot.names()?;
    let index = || {
        let path = snapshot.path(INDEX_FILE);
        let text = std::fs::read_to_string(&path).map_err(HubError::io(&path))?;
        parse_index(&text, reference)
    };
    // What is not whole cannot be chosen from: it has to be fetched.
    let Ok(chosen) = choose(&names, reference, index) else {
        return Ok(None);
    };
    let is_whole = chosen.files().iter().all(|name| names.contains(name));
    Ok(is_whole.then(|| snapshot.model(&chosen)))
}

fn parse_index(text: &str, reference: &Reference) -> Result<Index, HubError> {
    Index::parse(text).map_err(|source| wrong(reference, source))
}

fn wrong(reference: &Reference, source: CheckpointError) -> HubError {
    HubError::Checkpoint {
        reference: reference.to_string(),
        source,
    }
}

/// A model on its way.
struct Fetch<'a> {
    reference: &'a Reference,
    client: Client,
    repo: &'a Repo,
    listing: Listing,
}

impl<'a> Fetch<'a> {
    fn start(
        reference: &'a Reference,
        settings: &Settings,
        repo: &'a Repo,
    ) -> Result<Self, HubError> {
        let client = Client::new(settings);
        let listing = Listing::fetch(&client, reference)?;
        Ok(Self {
            reference,
            client,
            repo,
            listing,
        })
    }

    fn run(self) -> Result<PathBuf, HubError> {
        let names: Vec<String> = self.listing.names().map(str::to_owned).collect();
        let quiet = &mut Progress::quiet();
        let index = || {
            let path = self.file(INDEX_FILE, quiet)?;
            let text = std::fs::read_to_string(&path).map_err(HubError::io(&path))?;
            parse_index(&text, self.reference)
        };
        let chosen = choose(&names, self.reference, index)?;
        let missing: Vec<&String> = chosen
            .files()
            .iter()
            .filter(|name| !self.is_there(name))
            .collect();
        let bytes = missing
            .iter()
            .filter_map(|name| self.listing.size(name))
            .sum();
        if !missing.is_empty() {
            self.repo.check_space(bytes)?;
            let mut progress = Progress::new(self.reference, missing.len(), bytes);
            for name in missing {
                self.file(name, &mut progress)?;
            }
            progress.finish();
        }
        self.repo.point(self.reference, &self.listing.commit)?;
        Ok(self.repo.snapshot(&self.listing.commit).model(&chosen))
    }

    fn is_there(&self, name: &str) -> bool {
        self.repo
            .snapshot(&self.listing.commit)
            .path(name)
            .is_file()
    }

    /// One file of the snapshot, fetched unless it is there.
    fn file(&self, name: &str, progress: &mut Progress) -> Result<PathBuf, HubError> {
        let snapshot = self.repo.snapshot(&self.listing.commit);
        if self.is_there(name) {
            return Ok(snapshot.path(name));
        }
        let file = self.listing.file(&self.client, self.reference, name)?;
        let blob = download::blob(&self.client, self.repo, &file, progress)?;
        snapshot.link(name, &blob)
    }
}

impl Chosen {
    /// What has to be there.
    fn files(&self) -> &[String] {
        match self {
            Chosen::File(file) => std::slice::from_ref(file),
            Chosen::Folder(files) => files,
        }
    }
}
