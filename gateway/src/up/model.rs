//! Which model is served, and under which id? A GGUF file, a folder in Hugging Face's layout, or one of
//! the hub, which the engine brings before anything starts: it shows its progress, and both programs
//! then open the same files.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::cli::Failure;

/// What begins the name of a model on the hub.
const HUB: &str = "hf:";

/// A model on this machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Model {
    pub(super) path: PathBuf,
    /// As nodes serve it.
    pub(super) id: String,
}

impl Model {
    /// The model that `--model` names, fetched if need be by the program that `engine` finds.
    pub(super) fn named(
        name: &Path,
        engine: impl FnOnce() -> Result<PathBuf, Failure>,
    ) -> Result<Self, Failure> {
        match name.to_str().filter(|name| name.starts_with(HUB)) {
            None => Self::here(name),
            Some(name) => Ok(Self {
                path: fetched(name, &engine()?)?,
                id: hub_id(name),
            }),
        }
    }

    fn here(path: &Path) -> Result<Self, Failure> {
        let name = if path.is_dir() {
            // Versions have dots: nothing is cut from a folder's name.
            path.canonicalize()?.file_name().map(ToOwned::to_owned)
        } else if path.is_file() {
            path.file_stem().map(ToOwned::to_owned)
        } else {
            let help = "name a file or folder that exists, or hf:org/repo (make run MODEL=path.gguf, or --model); without one, `make run` fetches the default model";
            return Err(format!("no model at {}: {help}", path.display()).into());
        };
        let id = name.and_then(|name| name.into_string().ok());
        let id = id.ok_or_else(|| format!("{}: the name is not UTF-8", path.display()))?;
        Ok(Self {
            path: path.to_owned(),
            id,
        })
    }
}

fn fetched(name: &str, engine: &Path) -> Result<PathBuf, Failure> {
    let output = Command::new(engine)
        .args(["fetch", name])
        .stdin(Stdio::null())
        .stderr(Stdio::inherit())
        .output()
        .map_err(|error| format!("{}: {error}", engine.display()))?;
    if !output.status.success() {
        // Why stands above.
        return Err(format!("{name} could not be fetched").into());
    }
    let path = String::from_utf8(output.stdout)?;
    Ok(PathBuf::from(path.trim_end_matches('\n')))
}

/// A file's name without `.gguf`, else the repository's, as the engine calls it.
fn hub_id(name: &str) -> String {
    let name = name.strip_prefix(HUB).unwrap_or(name);
    let name = name.rsplit_once('@').map_or(name, |(name, _)| name);
    match name.match_indices('/').nth(1) {
        None => name.to_owned(),
        Some((at, _)) => {
            let file = name[at + 1..].rsplit('/').next().unwrap_or_default();
            file.strip_suffix(".gguf").unwrap_or(file).to_owned()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Would catch a model whose id loses a part, or is not the engine's.
    #[test]
    fn ids() {
        let dir = tempfile::tempdir().unwrap();
        let (file, folder) = (
            dir.path().join("a.Q4_1.gguf"),
            dir.path().join("Qwen2.5-0.5B"),
        );
        std::fs::write(&file, "").unwrap();
        std::fs::create_dir(&folder).unwrap();
        let id = |path: &Path| Model::named(path, || unreachable!()).unwrap().id;
        assert_eq!(id(&file), "a.Q4_1");
        assert_eq!(id(&folder), "Qwen2.5-0.5B");
        assert_eq!(id(&folder.join(".")), "Qwen2.5-0.5B");
        for (name, expected) in [
            ("hf:org/repo", "org/repo"),
            ("hf:org/repo@v1", "org/repo"),
            ("hf:org/repo/x/a.Q4_1.gguf@refs/pr/1", "a.Q4_1"),
        ] {
            assert_eq!(hub_id(name), expected);
        }
        let missing = Model::named(&dir.path().join("none.gguf"), || unreachable!());
        let error = missing.unwrap_err().to_string();
        assert!(
            error.contains("make run") && error.contains("--model"),
            "{error}"
        );
        let hub = Model::named(Path::new("hf:org/repo"), || Ok("no-engine".into()));
        assert!(hub.unwrap_err().to_string().contains("no-engine"));
    }
}
