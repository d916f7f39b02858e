//! Which files hold a model's weights?

use std::collections::{BTreeMap, HashSet};

use serde::Deserialize;

use super::{CheckpointError, Shard};

/// Says which tensor is in which file, where there are several.
pub const INDEX_FILE: &str = "model.safetensors.index.json";
/// Where all weights are in one file.
const SINGLE_FILE: &str = "model.safetensors";
/// Most files; the largest published model has 163.
const SHARDS_MAX: usize = 4096;

/// What `model.safetensors.index.json` says.
#[derive(Debug, Deserialize)]
pub struct Index {
    weight_map: BTreeMap<String, String>,
}

impl Index {
    /// Reads the index.
    pub fn parse(text: &str) -> Result<Self, CheckpointError> {
        let index: Self = serde_json::from_str(text).map_err(|error| {
            CheckpointError::damaged(
                INDEX_FILE,
                format!("is not a map of tensors to files: {error}"),
            )
        })?;
        if index.weight_map.is_empty() {
            return Err(CheckpointError::damaged(INDEX_FILE, "names no tensor"));
        }
        for (tensor, file) in &index.weight_map {
            // A path would lead out of the folder.
            let is_plain = !file.contains(['/', '\\', '\0']) && !file.starts_with('.');
            if !is_plain || !file.ends_with(".safetensors") {
                let why = format!("is said to be in {file:?}, which is no file name of weights");
                return Err(CheckpointError::tensor(INDEX_FILE, tensor, why));
            }
        }
        if index.files().len() > SHARDS_MAX {
            let why = format!("names more than {SHARDS_MAX} files");
            return Err(CheckpointError::damaged(INDEX_FILE, why));
        }
        Ok(index)
    }

    /// The files, in order.
    pub fn files(&self) -> Vec<String> {
        let mut files: Vec<String> = self.weight_map.values().cloned().collect();
        files.sort_unstable();
        files.dedup();
        files
    }

    /// Every tensor is where the index says, and nothing else is there.
    pub fn check(&self, shards: &[Shard<'_>]) -> Result<(), CheckpointError> {
        let mut found = 0;
        for shard in shards {
            for tensor in &shard.tensors.tensors {
                let file = self.weight_map.get(&tensor.name).map(String::as_str);
                if file != Some(shard.name) {
                    let why = match file {
                        Some(file) => format!("belongs into {file} by {INDEX_FILE}"),
                        None => format!("is not in {INDEX_FILE}"),
                    };
                    return Err(CheckpointError::tensor(shard.name, &tensor.name, why));
                }
                found += 1;
            }
        }
        if found == self.weight_map.len() {
            return Ok(());
        }
        let all = shards.iter().flat_map(|shard| &shard.tensors.tensors);
        let there: HashSet<&str> = all.map(|tensor| tensor.name.as_str()).collect();
        let mut promised = self.weight_map.iter();
        let lost = promised.find(|(name, _)| !there.contains(name.as_str()));
        let (name, file) = lost.map_or(("?", "?"), |(name, file)| (name.as_str(), file.as_str()));
        let why = format!("is not in it, though {INDEX_FILE} says so; download it again");
        Err(CheckpointError::tensor(file, name, why))
    }
}

/// The files of weights among the names in a folder: one, or all that the index names, which `index` reads.
/// Where both are there the one file is taken, as the reference does. `wrong` puts the folder's name before
/// what is wrong.
pub fn shard_names<E>(
    names: &[String],
    wrong: impl Fn(CheckpointError) -> E,
    index: impl FnOnce() -> Result<Index, E>,
) -> Result<(Vec<String>, Option<Index>), E> {
    let has = |name: &str| names.iter().any(|n| n == name);
    if has(SINGLE_FILE) {
        return Ok((vec![SINGLE_FILE.to_owned()], None));
    }
    if has(INDEX_FILE) {
        let index = index()?;
        let files = index.files();
        if let Some(missing) = files.iter().find(|file| !has(file)) {
            let why = format!("names {missing}, which is not there; download it again");
            return Err(wrong(CheckpointError::damaged(INDEX_FILE, why)));
        }
        return Ok((files, Some(index)));
    }
    let others = names.iter().filter(|name| name.ends_with(".safetensors"));
    match others.cloned().collect::<Vec<_>>().as_slice() {
        [one] => Ok((vec![one.clone()], None)),
        [] => Err(wrong(CheckpointError::Missing { name: SINGLE_FILE })),
        several => {
            let why = format!("has {} and no {INDEX_FILE}", several.join(", "));
            Err(wrong(CheckpointError::damaged("the folder", why)))
        }
    }
}
