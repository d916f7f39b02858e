//! Where packed weights are kept.

use std::path::{Path, PathBuf};

/// `--packed-weights`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PackedWeights {
    /// Beside the model's file.
    Beside,
    /// Nowhere: packed at each start.
    Off,
    /// In a folder.
    Folder(PathBuf),
}

impl PackedWeights {
    /// Tells the file where its packed weights are kept.
    pub(crate) fn apply(&self, file: &mut crate::model::ModelFile) {
        match self {
            Self::Beside => file.keep_packed(None),
            Self::Off => {}
            Self::Folder(folder) => file.keep_packed(Some(folder)),
        }
    }
}

/// The flag's value.
pub(super) fn parse_packed(text: &str) -> Result<PackedWeights, String> {
    match text {
        "beside" => Ok(PackedWeights::Beside),
        "off" => Ok(PackedWeights::Off),
        folder if Path::new(folder).is_dir() => Ok(PackedWeights::Folder(folder.into())),
        other => Err(format!(
            "beside, off or a folder that exists, not {other:?}"
        )),
    }
}
