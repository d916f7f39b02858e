//! In which namespace does a chain live?
//!
//! The first block of a chain says so by its adapter and its extra keys; the blocks after it
//! inherit it. Engines publish extra keys untagged, so a text is taken for a cache salt only if
//! the gateway has issued it; with any other extra key (an image, somebody else's salt) the chain
//! cannot be named, and goes without credit.

use std::collections::{HashMap, HashSet};
use std::sync::{PoisonError, RwLock};

use crate::block::Namespace;
use crate::event::ExtraKey;

/// The salts that the gateway has issued. Behind its own lock, so that issuing one, which every
/// request does, never waits for events.
pub(super) struct Salts {
    issued: RwLock<HashSet<Box<str>>>,
    max: usize,
}

impl Salts {
    pub(super) fn new(max: usize) -> Self {
        Self {
            issued: RwLock::default(),
            max,
        }
    }

    /// Whether the salt counts as issued from now on.
    pub(super) fn issue(&self, salt: &str) -> bool {
        if self.is_issued(salt) {
            return true;
        }
        let mut issued = self.issued.write().unwrap_or_else(PoisonError::into_inner);
        if issued.len() >= self.max {
            return issued.contains(salt);
        }
        issued.insert(salt.into());
        true
    }

    pub(super) fn is_issued(&self, salt: &str) -> bool {
        self.issued
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .contains(salt)
    }
}

/// A namespace by its number in [`Spaces`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct SpaceId(pub(super) u32);

/// What a namespace is made of, beside the model.
#[derive(Clone, PartialEq, Eq, Hash)]
struct Name {
    adapter: Option<Box<str>>,
    salt: Option<Box<str>>,
}

/// A namespace in use.
struct Space {
    namespace: Namespace,
    adapter: Option<Box<str>>,
}

/// All namespaces in use; kept by the writer.
pub(super) struct Spaces {
    model: Box<str>,
    numbers: HashMap<Name, SpaceId>,
    spaces: Vec<Space>,
    max: usize,
}

impl Spaces {
    pub(super) fn new(model: &str, max: usize) -> Self {
        Self {
            model: model.into(),
            numbers: HashMap::new(),
            spaces: Vec::new(),
            max,
        }
    }

    /// The namespace of a chain that begins with these keys, if it can be named and there is room
    /// for it.
    pub(super) fn of_chain(
        &mut self,
        adapter: Option<&str>,
        keys: &[ExtraKey],
        salts: &Salts,
    ) -> Option<SpaceId> {
        let salt = match beside_adapter(keys, adapter).as_slice() {
            [] => None,
            [ExtraKey::Text(text)] if salts.is_issued(text) => Some(text.clone()),
            _ => return None,
        };
        let name = Name {
            adapter: adapter.map(Into::into),
            salt,
        };
        if let Some(known) = self.numbers.get(&name) {
            return Some(*known);
        }
        if self.spaces.len() >= self.max {
            return None;
        }
        let id = SpaceId(u32::try_from(self.spaces.len()).ok()?);
        let namespace = Namespace::new(&self.model, adapter, name.salt.as_deref());
        self.spaces.push(Space {
            namespace,
            adapter: name.adapter.clone(),
        });
        self.numbers.insert(name, id);
        Some(id)
    }

    /// Whether a block after the first of its chain fits its namespace: its adapter is the
    /// chain's, and nothing else entered its hash.
    pub(super) fn continues(&self, id: SpaceId, adapter: Option<&str>, keys: &[ExtraKey]) -> bool {
        let own = self.get(id).adapter.as_deref();
        own == adapter && (keys.is_empty() || beside_adapter(keys, adapter).is_empty())
    }

    pub(super) fn namespace(&self, id: SpaceId) -> &Namespace {
        &self.get(id).namespace
    }

    fn get(&self, id: SpaceId) -> &Space {
        let at = id.0 as usize;
        self.spaces
            .get(at)
            .expect("a namespace's number is given out once it is stored")
    }
}

/// The keys without the adapter's name, which vLLM lists among them.
fn beside_adapter<'a>(keys: &'a [ExtraKey], adapter: Option<&str>) -> Vec<&'a ExtraKey> {
    let mut adapter = adapter;
    let is_other = |key: &&ExtraKey| match (key, adapter) {
        (ExtraKey::Text(text), Some(name)) if **text == *name => {
            adapter = None;
            false
        }
        _ => true,
    };
    keys.iter().filter(is_other).collect()
}
