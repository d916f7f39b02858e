//! How long does the client want its prefix kept?
//!
//! `cache_control` marks the end of a part of the prompt that is worth keeping. Every prefix is
//! cached here without being asked, so that a mark moves nothing; it is checked as the API does and
//! kept out of the prompt, and the longest time asked for is a hint to the KV tiers.

use serde_json::Value;

use super::path::{Object, Path};
use crate::caching::Retention;
use crate::error::ApiError;

/// Marks in one request, as the API has it.
const MARKS_MAX: usize = 4;

/// The marks of a request, in the prompt's order: tools, system, messages.
#[derive(Debug, Default)]
pub(super) struct Marks {
    found: usize,
    latest: Option<Retention>,
    longest: Option<Retention>,
    /// All that were taken, in their order.
    taken: Vec<Retention>,
}

impl Marks {
    /// Takes an object's mark; true if it has one.
    pub(super) fn take(&mut self, object: &mut Object<'_>) -> Result<bool, ApiError> {
        let Some(mark) = object.object("cache_control")? else {
            return Ok(false);
        };
        let retention = read(mark)?;
        if !self.add(retention) {
            return Err(object.path.name("cache_control").refuse(
                "a ttl='1h' cache_control block must not come after a ttl='5m' cache_control \
                 block. Note that blocks are processed in the following order: `tools`, `system`, \
                 `messages`.",
            ));
        }
        Ok(true)
    }

    /// Adds a mark; false if it must not follow those before it.
    fn add(&mut self, retention: Retention) -> bool {
        self.found += 1;
        if retention == Retention::Hour1 && self.latest == Some(Retention::Minutes5) {
            return false;
        }
        self.latest = Some(retention);
        self.longest = self.longest.max(Some(retention));
        self.taken.push(retention);
        true
    }

    /// All that were taken, in their order.
    pub(super) fn into_taken(self) -> Vec<Retention> {
        self.taken
    }

    /// Takes marks again that were taken before, elsewhere; none where they must not stand here.
    pub(super) fn take_again(&mut self, taken: &[Retention]) -> Option<()> {
        taken
            .iter()
            .all(|retention| self.add(*retention))
            .then_some(())
    }

    /// Takes the request's own mark, which stands for the last block that can have one.
    pub(super) fn take_top(&mut self, mark: Value) -> Result<(), ApiError> {
        let mark = Object::new(mark, Path::root("cache_control"))?;
        let retention = read(mark)?;
        self.found += 1;
        self.longest = self.longest.max(Some(retention));
        Ok(())
    }

    /// The longest time asked for.
    pub(super) fn checked(&self) -> Result<Option<Retention>, ApiError> {
        if self.found > MARKS_MAX {
            let found = self.found;
            return Err(ApiError::invalid(
                "cache_control",
                format!(
                    "A maximum of {MARKS_MAX} blocks with cache_control may be provided. Found {found}."
                ),
            ));
        }
        Ok(self.longest)
    }
}

fn read(mut mark: Object<'_>) -> Result<Retention, ApiError> {
    let tag = mark.required_text("type")?;
    if tag != "ephemeral" {
        return Err(mark.path.unknown_tag(&tag, &["ephemeral"]));
    }
    match mark.text("ttl")?.as_deref() {
        None | Some("5m") => Ok(Retention::Minutes5),
        Some("1h") => Ok(Retention::Hour1),
        Some(_) => {
            let path = mark.path.name("ephemeral");
            Err(path.name("ttl").should_be("'5m' or '1h'"))
        }
    }
}
