//! What does a repository hold at a revision? One request tells the commit, and each file's size and hash.

use std::io::Read;

use serde::Deserialize;

use super::client::{Asked, Client, header};
use super::digest::Hash;
use super::error::HubError;
use super::reference::{Reference, is_part};

/// Bytes of a listing: 250 for each of a hundred thousand files.
const LISTING_BYTES_MAX: u64 = 32 << 20;

/// The files of a commit.
#[derive(Debug)]
pub(super) struct Listing {
    pub(super) commit: String,
    files: Vec<Sibling>,
}

/// A file to fetch.
#[derive(Debug)]
pub(super) struct RemoteFile {
    pub(super) name: String,
    pub(super) url: String,
    pub(super) page: String,
    pub(super) hash: Hash,
    pub(super) bytes: u64,
}

#[derive(Deserialize)]
struct Answer {
    sha: String,
    #[serde(default)]
    siblings: Vec<Sibling>,
}

#[derive(Debug, Deserialize)]
struct Sibling {
    rfilename: String,
    size: Option<u64>,
    #[serde(rename = "blobId")]
    blob_id: Option<String>,
    lfs: Option<Lfs>,
}

#[derive(Debug, Deserialize)]
struct Lfs {
    // The API's older name of the same.
    #[serde(alias = "oid")]
    sha256: Option<String>,
    size: Option<u64>,
}

impl Listing {
    pub(super) fn fetch(client: &Client, reference: &Reference) -> Result<Self, HubError> {
        let (endpoint, repo) = (&client.endpoint, reference.repo());
        let revision = escaped(reference.revision(), "");
        let url = format!("{endpoint}/api/models/{repo}/revision/{revision}?blobs=true");
        let page = format!("{endpoint}/{repo}");
        let what = format!(
            "repository {repo} with the revision {}",
            reference.revision()
        );
        let asked = Asked {
            what: &what,
            page: &page,
        };
        let answer = client.get(&url, &[("accept", "application/json")], &asked)?;
        let mut bytes = Vec::new();
        let mut body = answer.into_body().into_reader().take(LISTING_BYTES_MAX + 1);
        body.read_to_end(&mut bytes)
            .map_err(|error| HubError::Network {
                url: url.clone(),
                why: error.to_string(),
            })?;
        if bytes.len() as u64 > LISTING_BYTES_MAX {
            let why = format!("a listing of more than {LISTING_BYTES_MAX} bytes");
            return Err(HubError::answer(&url, why));
        }
        let mut answer: Answer = serde_json::from_slice(&bytes)
            .map_err(|error| HubError::answer(&url, format!("no listing: {error}")))?;
        if answer.sha.len() != 40 || !answer.sha.bytes().all(|b| b.is_ascii_hexdigit()) {
            return Err(HubError::answer(&url, "a commit that is none"));
        }
        // What would lead out of the snapshot is no file of a model.
        answer.siblings.retain(|file| is_inside(&file.rfilename));
        Ok(Self {
            commit: answer.sha.to_ascii_lowercase(),
            files: answer.siblings,
        })
    }

    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        self.files.iter().map(|file| file.rfilename.as_str())
    }

    pub(super) fn size(&self, name: &str) -> Option<u64> {
        let file = self.files.iter().find(|file| file.rfilename == name)?;
        file.lfs.as_ref().and_then(|lfs| lfs.size).or(file.size)
    }

    /// Where a file is and what it must be. Mirrors that list names alone are asked for each file.
    pub(super) fn file(
        &self,
        client: &Client,
        reference: &Reference,
        name: &str,
    ) -> Result<RemoteFile, HubError> {
        let (endpoint, repo) = (&client.endpoint, reference.repo());
        let url = format!(
            "{endpoint}/{repo}/resolve/{}/{}",
            self.commit,
            escaped(name, "/")
        );
        let page = format!("{endpoint}/{repo}");
        let listed = self.files.iter().find(|file| file.rfilename == name);
        let hash = listed.and_then(|file| match &file.lfs {
            Some(lfs) => Hash::new(lfs.sha256.as_deref()?),
            None => Hash::new(file.blob_id.as_deref()?),
        });
        let (hash, bytes) = match hash.zip(self.size(name)) {
            Some(known) => known,
            None => asked_for(client, &url, (name, &page))?,
        };
        Ok(RemoteFile {
            name: name.to_owned(),
            url,
            page,
            hash,
            bytes,
        })
    }
}

/// Hash and size as the hub puts them into the headers of its first answer.
fn asked_for(
    client: &Client,
    url: &str,
    (name, page): (&str, &str),
) -> Result<(Hash, u64), HubError> {
    let asked = Asked { what: name, page };
    let headers = client.headers(url, &asked)?;
    let etag = header(&headers, "x-linked-etag").or_else(|| header(&headers, "etag"));
    let size = header(&headers, "x-linked-size").or_else(|| header(&headers, "content-length"));
    let hash = etag.and_then(Hash::of_etag);
    hash.zip(size.and_then(|size| size.trim().parse().ok()))
        .ok_or_else(|| HubError::answer(url, "a file without checksum or size"))
}

fn is_inside(name: &str) -> bool {
    name.split('/').all(is_part)
}

/// Every byte escaped but those that mean themselves in any URL, and `kept`.
fn escaped(text: &str, kept: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for byte in text.bytes() {
        let c = char::from(byte);
        if c.is_ascii_alphanumeric() || "-_.~".contains(c) || kept.contains(c) {
            out.push(c);
        } else {
            out.push_str(&format!("%{byte:02X}"));
        }
    }
    out
}

#[cfg(test)]
mod tests {
    //! Catches a name that becomes another request.
    use super::*;

    #[test]
    fn names_stay_inside() {
        assert!(is_inside("a/b.gguf"));
        for name in [
            "", "/a", "a//b", "../a", "a/../b", "a/..", ".", "a\\b", "a\nb",
        ] {
            assert!(!is_inside(name), "{name:?}");
        }
    }

    #[test]
    fn escaping() {
        assert_eq!(escaped("refs/pr/1", ""), "refs%2Fpr%2F1");
        assert_eq!(escaped("a b/ä?#%.gguf", "/"), "a%20b/%C3%A4%3F%23%25.gguf");
    }
}
