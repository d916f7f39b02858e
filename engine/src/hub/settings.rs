//! Where is the hub, who are we there, and where do its files go? The environment variables of
//! `huggingface_hub`, so that a machine on which that works needs nothing more.

use std::path::{Path, PathBuf};

use super::client::Retry;

/// The hub where nothing else is said.
const ENDPOINT_DEFAULT: &str = "https://huggingface.co";

/// How to reach the hub.
#[derive(Clone)]
pub struct Settings {
    /// URL without a slash at its end.
    pub endpoint: String,
    /// Presented to the endpoint, and to no other host.
    pub token: Option<String>,
    /// The folder with a folder for each repository.
    pub cache: PathBuf,
    /// Whether only what is there may be used.
    pub offline: bool,
    /// When to try again.
    pub retry: Retry,
}

impl Settings {
    /// Of this process's environment.
    pub fn from_env() -> Self {
        Self::of(|name| std::env::var(name).ok())
    }

    fn of(get: impl Fn(&str) -> Option<String>) -> Self {
        let get = |name: &str| get(name).filter(|value| !value.trim().is_empty());
        let user = get("HOME").unwrap_or_else(|| ".".to_owned());
        let folder = |value: String| match value.strip_prefix("~/") {
            Some(rest) => Path::new(&user).join(rest),
            None => PathBuf::from(value),
        };
        let home = match get("HF_HOME") {
            Some(home) => folder(home),
            None => match get("XDG_CACHE_HOME") {
                Some(caches) => folder(caches).join("huggingface"),
                None => Path::new(&user).join(".cache/huggingface"),
            },
        };
        let cache = get("HF_HUB_CACHE").or_else(|| get("HUGGINGFACE_HUB_CACHE"));
        let token = get("HF_TOKEN").or_else(|| {
            let path = get("HF_TOKEN_PATH").map_or_else(|| home.join("token"), folder);
            std::fs::read_to_string(path).ok()
        });
        let token = token.map(|token| token.trim().to_owned());
        let endpoint = get("HF_ENDPOINT").unwrap_or_else(|| ENDPOINT_DEFAULT.to_owned());
        let offline = get("HF_HUB_OFFLINE")
            .unwrap_or_default()
            .to_ascii_lowercase();
        Self {
            endpoint: endpoint.trim_end_matches('/').to_owned(),
            token: token.filter(|token| !token.is_empty()),
            cache: cache.map_or_else(|| home.join("hub"), folder),
            offline: ["1", "on", "yes", "true"].contains(&offline.as_str()),
            retry: Retry::default(),
        }
    }
}

impl std::fmt::Debug for Settings {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Settings")
            .field("endpoint", &self.endpoint)
            .field("token", &self.token.as_ref().map(|_| "…"))
            .field("cache", &self.cache)
            .field("offline", &self.offline)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    //! Catches a cache that other tools do not share, and a token in a log.
    use super::*;

    #[test]
    fn variables() {
        let of = |set: &[(&str, &str)]| {
            Settings::of(|name| {
                let found = set.iter().find(|(n, _)| *n == name);
                found.map(|(_, value)| (*value).to_owned())
            })
        };
        let cache = |set: &[(&str, &str)]| of(set).cache.display().to_string();
        assert_eq!(cache(&[("HOME", "/u")]), "/u/.cache/huggingface/hub");
        assert_eq!(
            cache(&[("HOME", "/u"), ("XDG_CACHE_HOME", "/x")]),
            "/x/huggingface/hub"
        );
        assert_eq!(cache(&[("HOME", "/u"), ("HF_HOME", "~/h")]), "/u/h/hub");
        assert_eq!(cache(&[("HF_HOME", "/h"), ("HF_HUB_CACHE", "/c")]), "/c");
        assert_eq!(of(&[("HOME", "/u")]).endpoint, ENDPOINT_DEFAULT);
        assert_eq!(of(&[("HF_ENDPOINT", "http://m:1/")]).endpoint, "http://m:1");
        for (value, offline) in [("1", true), ("TRUE", true), ("0", false), ("", false)] {
            assert_eq!(of(&[("HF_HUB_OFFLINE", value)]).offline, offline, "{value}");
        }
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("token"), "hf_file\n").unwrap();
        let home = folder.path().display().to_string();
        assert_eq!(of(&[("HF_HOME", &home)]).token.as_deref(), Some("hf_file"));
        let both = of(&[("HF_HOME", &home), ("HF_TOKEN", " hf_env ")]);
        assert_eq!(both.token.as_deref(), Some("hf_env"));
        assert!(!format!("{both:?}").contains("hf_env"));
    }
}
