//! Which model of the hub is meant? `hf:org/repo[/file][@revision]`.

use std::fmt;
use std::str::FromStr;

/// What begins the name of a model on the hub.
pub const SCHEME: &str = "hf:";
/// The revision where none is named.
const REVISION_DEFAULT: &str = "main";
/// Bytes of a part: what file systems allow.
const PART_BYTES_MAX: usize = 255;

/// A model of the hub.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reference {
    org: String,
    repo: String,
    /// A file in the repository.
    file: Option<String>,
    revision: String,
}

/// Text that names no model of the hub.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{found:?} {why}; write hf:org/repo, hf:org/repo/file.gguf, and @revision behind if it is not main"
)]
pub struct ReferenceError {
    found: String,
    why: &'static str,
}

impl FromStr for Reference {
    type Err = ReferenceError;

    fn from_str(text: &str) -> Result<Self, ReferenceError> {
        let error = |why| ReferenceError {
            found: text.chars().take(300).collect(),
            why,
        };
        let name = text
            .strip_prefix(SCHEME)
            .ok_or_else(|| error("does not begin with hf:"))?;
        let (name, revision) = match name.rsplit_once('@') {
            Some((name, revision)) => (name, revision),
            None => (name, REVISION_DEFAULT),
        };
        let mut parts = name.splitn(3, '/');
        let (Some(org), Some(repo), file) = (parts.next(), parts.next(), parts.next()) else {
            return Err(error("names no repository"));
        };
        if ![org, repo].into_iter().all(is_name) {
            return Err(error(
                "has a name of other characters than letters, digits, `-`, `_`, `.`",
            ));
        }
        if !revision.split('/').all(is_name) {
            return Err(error("has a revision that cannot be"));
        }
        if !file.is_none_or(|file| file.split('/').all(is_part)) {
            return Err(error("has a file name that cannot be"));
        }
        Ok(Self {
            org: org.to_owned(),
            repo: repo.to_owned(),
            file: file.map(str::to_owned),
            revision: revision.to_owned(),
        })
    }
}

/// Of the hub's characters, and nothing that means something in a path: `..`, or the `--` that stands
/// for a slash in the cache.
fn is_name(part: &str) -> bool {
    let allowed = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    is_part(part) && part.chars().all(allowed) && !part.contains("--") && !part.contains("..")
}

/// One step of a path that stays where it is.
pub(super) fn is_part(part: &str) -> bool {
    let visible = part.chars().all(|c| !c.is_control() && c != '\\');
    !part.is_empty() && part.len() <= PART_BYTES_MAX && visible && part != "." && part != ".."
}

impl Reference {
    /// `org/repo`.
    pub fn repo(&self) -> String {
        format!("{}/{}", self.org, self.repo)
    }

    /// The file that is named.
    pub fn file(&self) -> Option<&str> {
        self.file.as_deref()
    }

    /// Branch, tag or commit.
    pub fn revision(&self) -> &str {
        &self.revision
    }

    /// Whether the revision is a commit, which never changes.
    pub(super) fn is_commit(&self) -> bool {
        self.revision.len() == 40 && self.revision.bytes().all(|b| b.is_ascii_hexdigit())
    }

    /// The repository's folder in a cache.
    pub(super) fn folder(&self) -> String {
        format!("models--{}--{}", self.org, self.repo)
    }

    /// The id that a model has in the API if nobody gives it another: a file's name without `.gguf`, the
    /// repository's with its organisation.
    pub fn model_id(&self) -> String {
        match &self.file {
            None => self.repo(),
            Some(file) => {
                let name = file.rsplit('/').next().unwrap_or(file);
                name.strip_suffix(".gguf").unwrap_or(name).to_owned()
            }
        }
    }
}

impl fmt::Display for Reference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{SCHEME}{}/{}", self.org, self.repo)?;
        if let Some(file) = &self.file {
            write!(f, "/{file}")?;
        }
        if self.revision != REVISION_DEFAULT {
            write!(f, "@{}", self.revision)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    //! Catches a name that leads out of the cache, and one that is read as another model.
    use super::*;

    #[test]
    fn names() {
        let check = |text: &str, repo: &str, file: Option<&str>, revision: &str, id: &str| {
            let reference: Reference = text.parse().unwrap();
            assert_eq!(reference.repo(), repo);
            assert_eq!((reference.file(), reference.revision()), (file, revision));
            assert_eq!(
                (
                    reference.model_id().as_str(),
                    reference.to_string().as_str()
                ),
                (id, text)
            );
        };
        check("hf:a/b", "a/b", None, "main", "a/b");
        check("hf:a/b.c-1@v1.0", "a/b.c-1", None, "v1.0", "a/b.c-1");
        check(
            "hf:a/b/c.Q4_1.gguf",
            "a/b",
            Some("c.Q4_1.gguf"),
            "main",
            "c.Q4_1",
        );
        check(
            "hf:a/b/d/c.gguf@refs/pr/1",
            "a/b",
            Some("d/c.gguf"),
            "refs/pr/1",
            "c",
        );
        let long = format!("hf:{}/b", "a".repeat(256));
        for wrong in [
            "a/b",
            "hf:",
            "hf:a",
            "hf:/b",
            "hf:a/",
            "hf:a/b/",
            "hf:a/b@",
            "hf:../b",
            "hf:a/..",
            "hf:a/b/../../c",
            "hf:a/b/./c",
            "hf:a/b//c",
            "hf:a/b@..",
            "hf:a/b@x/../y",
            "hf:a--b/c",
            "hf:a b/c",
            "hf:a/b/c\u{0}",
            "hf:a/b/c\\d",
            "hf:ä/b",
            &long,
        ] {
            let error = wrong.parse::<Reference>().expect_err(wrong).to_string();
            assert!(error.contains("hf:org/repo"), "{error}");
        }
        let commit: Reference = format!("hf:a/b@{}", "0f".repeat(20)).parse().unwrap();
        assert!(commit.is_commit() && !"hf:a/b".parse::<Reference>().unwrap().is_commit());
    }
}
