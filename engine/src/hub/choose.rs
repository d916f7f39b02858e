//! Which files of a repository make the model? The one that is named; else a checkpoint, if there is one;
//! else the only GGUF file. Who has several is asked, not guessed for: they differ in quality and size.

use prompt::checkpoint::{CONFIG, INDEX_FILE, Index, TEXTS, shard_names};

use super::error::HubError;
use super::reference::Reference;
use super::wrong;

/// What to bring.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Chosen {
    /// A GGUF file.
    File(String),
    /// All files of a checkpoint.
    Folder(Vec<String>),
}

/// Most names in an error.
const SHOWN_MAX: usize = 30;

/// Chooses among the names of a repository; `index` reads the index of shards.
pub(super) fn choose(
    names: &[String],
    reference: &Reference,
    index: impl FnOnce() -> Result<Index, HubError>,
) -> Result<Chosen, HubError> {
    let refused = |why: String| HubError::Choice {
        reference: reference.to_string(),
        why,
    };
    let is_gguf = |name: &str| name.to_ascii_lowercase().ends_with(".gguf");
    let files: Vec<&str> = names
        .iter()
        .map(String::as_str)
        .filter(|n| is_gguf(n))
        .collect();
    if let Some(file) = reference.file() {
        if !is_gguf(file) {
            let why =
                "only .gguf files are named alone; leave the file out to take the whole checkpoint";
            return Err(refused(why.to_owned()));
        }
        if !files.contains(&file) {
            let why = format!("there is no such file; {}", listed(&files));
            return Err(refused(why));
        }
        if is_one_of_several(file) {
            let why = "the file is one of several parts, which are not put together here; name a model in one file";
            return Err(refused(why.to_owned()));
        }
        return Ok(Chosen::File(file.to_owned()));
    }
    // Checkpoints lie at the top.
    let top: Vec<String> = names
        .iter()
        .filter(|name| !name.contains('/'))
        .cloned()
        .collect();
    let has_weights = top.iter().any(|name| name.ends_with(".safetensors"));
    if top.iter().any(|name| name == CONFIG) && has_weights {
        let (shards, found) = shard_names(&top, |source| wrong(reference, source), index)?;
        let texts = TEXTS.iter().map(|(name, _)| *name);
        let index = found.map(|_| INDEX_FILE);
        let small = texts
            .chain(index)
            .filter(|name| top.iter().any(|n| n == name));
        return Ok(Chosen::Folder(
            small.map(str::to_owned).chain(shards).collect(),
        ));
    }
    match files.as_slice() {
        [one] if !is_one_of_several(one) => Ok(Chosen::File((*one).to_owned())),
        [] => Err(refused(
            "there is neither a .gguf file nor config.json with *.safetensors".to_owned(),
        )),
        several => Err(refused(format!(
            "name one file, as hf:{}/FILE; {}",
            reference.repo(),
            listed(several)
        ))),
    }
}

fn listed(files: &[&str]) -> String {
    if files.is_empty() {
        return "there are no .gguf files".to_owned();
    }
    let shown = files
        .iter()
        .take(SHOWN_MAX)
        .map(|file| format!("\n  {file}"));
    let more = match files.len().saturating_sub(SHOWN_MAX) {
        0 => String::new(),
        more => format!("\n  and {more} more"),
    };
    format!("there are:{}{more}", shown.collect::<String>())
}

/// `…-00001-of-00003.gguf`.
fn is_one_of_several(name: &str) -> bool {
    let stem = name.rsplit_once('.').map_or(name, |(stem, _)| stem);
    let mut parts = stem.rsplit('-');
    let is_number = |part: Option<&str>| {
        part.is_some_and(|part| part.len() == 5 && part.bytes().all(|b| b.is_ascii_digit()))
    };
    is_number(parts.next()) && parts.next() == Some("of") && is_number(parts.next())
}

#[cfg(test)]
mod tests {
    //! Catches a model that is guessed, and files of one that are left out.
    use super::*;

    fn check(reference: &str, names: &[&str]) -> Result<Chosen, String> {
        let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
        let index = || Ok(Index::parse(r#"{"weight_map":{"a":"2.safetensors"}}"#).unwrap());
        let chosen = choose(&names, &reference.parse().unwrap(), index);
        chosen.map_err(|error| error.to_string())
    }

    #[test]
    fn what_is_taken() {
        let file = |name: &str| Ok(Chosen::File(name.to_owned()));
        let folder = |names: &[&str]| {
            Ok(Chosen::Folder(
                names.iter().map(|n| (*n).to_owned()).collect(),
            ))
        };
        assert_eq!(check("hf:a/b", &["README.md", "m.gguf"]), file("m.gguf"));
        assert_eq!(
            check("hf:a/b/x/n.GGUF", &["m.gguf", "x/n.GGUF"]),
            file("x/n.GGUF")
        );
        let checkpoint = [
            "config.json",
            "tokenizer.json",
            "model.safetensors",
            "m.gguf",
            "x.bin",
        ];
        assert_eq!(check("hf:a/b", &checkpoint), folder(&checkpoint[..3]));
        let sharded = [
            "2.safetensors",
            "config.json",
            INDEX_FILE,
            "old/2.safetensors",
        ];
        assert_eq!(
            check("hf:a/b", &sharded),
            folder(&["config.json", INDEX_FILE, "2.safetensors"])
        );
    }

    #[test]
    fn what_is_asked_or_refused() {
        let refused = |reference: &str, names: &[&str], expected: &[&str]| {
            let error = check(reference, names).expect_err(reference);
            for part in expected {
                assert!(error.contains(part), "{part:?} in {error}");
            }
        };
        refused(
            "hf:a/b",
            &["m.Q4.gguf", "m.Q8.gguf"],
            &["hf:a/b/FILE", "m.Q4.gguf", "m.Q8.gguf"],
        );
        refused(
            "hf:a/b",
            &["pytorch_model.bin", "config.json"],
            &["neither", "safetensors"],
        );
        refused("hf:a/b/no.gguf", &["m.gguf"], &["no such file", "m.gguf"]);
        refused(
            "hf:a/b/model.safetensors",
            &["model.safetensors"],
            &["only .gguf", "whole checkpoint"],
        );
        let part = "m-00001-of-00002.gguf";
        refused("hf:a/b/m-00001-of-00002.gguf", &[part], &["several parts"]);
        refused("hf:a/b", &[part], &["name one file"]);
        refused(
            "hf:a/b",
            &["config.json", INDEX_FILE, "1.safetensors"],
            &["2.safetensors", "not there"],
        );
        let many: Vec<String> = (0..40).map(|n| format!("{n}.gguf")).collect();
        let many: Vec<&str> = many.iter().map(String::as_str).collect();
        refused("hf:a/b", &many, &["and 10 more"]);
    }
}
