//! Which model is meant by `--model`? A GGUF file, a folder in Hugging Face's layout, or one on the hub.

use std::path::{Path, PathBuf};
use std::str::FromStr;

use crate::hub::{HubError, Reference, ReferenceError, SCHEME, Settings, fetch};

/// A model, as it is named on the command line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ModelSource {
    /// A file or a folder.
    Here(PathBuf),
    /// A model of the hub.
    Hub(Reference),
}

impl FromStr for ModelSource {
    type Err = ReferenceError;

    fn from_str(text: &str) -> Result<Self, ReferenceError> {
        if text.starts_with(SCHEME) {
            return text.parse().map(Self::Hub);
        }
        Ok(Self::Here(text.into()))
    }
}

impl ModelSource {
    /// Where the model lies on this machine, once it has been fetched.
    pub fn local(&self) -> Result<PathBuf, HubError> {
        match self {
            Self::Here(path) => Ok(path.clone()),
            Self::Hub(reference) => fetch(reference, &Settings::from_env()),
        }
    }

    /// Its id in the API if nobody gives it another; empty where its path has no name.
    pub fn model_id(&self) -> String {
        match self {
            Self::Here(path) => name(path),
            Self::Hub(reference) => reference.model_id(),
        }
    }
}

/// A file's name without its ending, a folder's whole: versions have dots.
fn name(path: &Path) -> String {
    let whole = path.is_dir().then(|| path.canonicalize().ok()).flatten();
    let name = match &whole {
        Some(folder) => folder.file_name(),
        None => path.file_stem(),
    };
    name.map_or_else(String::new, |name| name.to_string_lossy().into_owned())
}
