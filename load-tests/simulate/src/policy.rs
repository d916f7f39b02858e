//! Which policies are there, by name, and over which of their parameters is each swept?
//!
//! A policy is named `name` or `name:key=value:key=value`.

use std::fmt;

use crate::baselines::load_only::{LeastOutstanding, RoundRobin};
use crate::baselines::sticky::{Key, Sticky};
use crate::router::Router;
use crate::scenario::Fleet;

/// Why a policy could not be had.
#[derive(Clone, PartialEq, Debug, thiserror::Error)]
pub enum PolicyError {
    /// No such name.
    #[error("no policy {0:?}; there are: {names}", names = NAMES.join(", "))]
    Name(String),
    /// A parameter that is not `key=number`.
    #[error("{policy}: {parameter:?} is not key=number")]
    Number {
        /// Whose.
        policy: String,
        /// As given.
        parameter: String,
    },
    /// A parameter that this policy does not have.
    #[error("{policy} has no parameter {key:?}")]
    Key {
        /// Whose.
        policy: String,
        /// As given.
        key: String,
    },
}

/// All names, the product's own first.
pub const NAMES: &[&str] = &[
    "homing",
    "round-robin",
    "least-outstanding",
    "session",
    "prefix",
];

/// A policy and its parameters.
#[derive(Clone, PartialEq, Debug)]
pub struct Spec {
    name: &'static str,
    values: Vec<(String, f64)>,
}

impl fmt::Display for Spec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)?;
        self.values
            .iter()
            .try_for_each(|(key, value)| write!(f, ":{key}={value}"))
    }
}

impl Spec {
    /// Reads `name:key=value:key=value`.
    pub fn parse(text: &str) -> Result<Self, PolicyError> {
        let mut parts = text.split(':');
        let given = parts.next().unwrap_or_default();
        let name = NAMES
            .iter()
            .find(|name| **name == given)
            .ok_or_else(|| PolicyError::Name(given.to_owned()))?;
        let value = |part: &str| {
            let (key, value) = part.split_once('=')?;
            let value: f64 = value.parse().ok()?;
            value.is_finite().then(|| (key.to_owned(), value))
        };
        let values = parts.map(|part| {
            value(part).ok_or_else(|| PolicyError::Number {
                policy: given.to_owned(),
                parameter: part.to_owned(),
            })
        });
        Ok(Self {
            name,
            values: values.collect::<Result<_, _>>()?,
        })
    }

    /// Its name without parameters.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// A router for this fleet.
    pub fn build(&self, fleet: &Fleet) -> Result<Box<dyn Router>, PolicyError> {
        let mut values = Values {
            spec: self,
            known: Vec::new(),
        };
        let router: Box<dyn Router> = match self.name {
            "round-robin" => Box::new(RoundRobin::new()),
            "least-outstanding" => Box::new(LeastOutstanding::new(fleet)),
            "session" => Box::new(Sticky::new(fleet, Key::Session, values.given("bound"))),
            "prefix" => {
                let blocks = values.get("blocks", 2.0) as usize;
                let key = Key::Prefix { blocks };
                Box::new(Sticky::new(fleet, key, values.given("bound")))
            }
            name => return Err(PolicyError::Name(name.to_owned())),
        };
        values.check()?;
        Ok(router)
    }
}

/// Reads parameters and remembers which there are.
struct Values<'a> {
    spec: &'a Spec,
    known: Vec<&'static str>,
}

impl Values<'_> {
    fn given(&mut self, key: &'static str) -> Option<f64> {
        self.known.push(key);
        let values = &self.spec.values;
        values
            .iter()
            .find(|(k, _)| k == key)
            .map(|(_, value)| *value)
    }

    fn get(&mut self, key: &'static str, default: f64) -> f64 {
        self.given(key).unwrap_or(default)
    }

    fn check(&self) -> Result<(), PolicyError> {
        let unknown = |(key, _): &&(String, f64)| !self.known.contains(&key.as_str());
        match self.spec.values.iter().find(unknown) {
            None => Ok(()),
            Some((key, _)) => Err(PolicyError::Key {
                policy: self.spec.name.to_owned(),
                key: key.clone(),
            }),
        }
    }
}
