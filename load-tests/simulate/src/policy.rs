//! Which policies are there, by name, and over which of their parameters is each swept?
//!
//! A policy is named `name` or `name:key=value:key=value`.

use std::fmt;

use crate::baselines::load_only::{LeastOutstanding, RoundRobin};
use crate::baselines::oracle::{Cost, Oracle};
use crate::baselines::sticky::{Key, Sticky};
use crate::homing::{Homing, Knowledge, Place, Settings};
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
    "oracle",
    "cost",
];

/// What the product is compared with: rules that others use.
pub const BASELINES: &[&str] = &["round-robin", "least-outstanding", "session", "prefix"];

/// The reference of a scenario is, for each figure, the best of these.
pub const REFERENCES: &[&str] = &["oracle:b=4", "oracle:b=8", "cost:b=4", "cost:b=8"];

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

    /// What a command line means: `all`, a name (over that policy's own parameters), or a name with
    /// parameters.
    pub fn parse_swept(text: &str) -> Result<Vec<Self>, PolicyError> {
        let specs = |texts: &[&str]| texts.iter().map(|text| Self::parse(text)).collect();
        if text == "all" {
            return specs(NAMES);
        }
        specs(&[text])
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
            "homing" => Box::new(homing(fleet)),
            "round-robin" => Box::new(RoundRobin::new()),
            "least-outstanding" => Box::new(LeastOutstanding::new(fleet)),
            "session" => Box::new(Sticky::new(fleet, Key::Session, values.given("bound"))),
            "prefix" => {
                let blocks = values.get("blocks", 2.0) as usize;
                let key = Key::Prefix { blocks };
                Box::new(Sticky::new(fleet, key, values.given("bound")))
            }
            "oracle" => Box::new(Oracle::new(fleet, values.get("b", 4.0))),
            "cost" => Box::new(Cost::new(fleet, values.get("b", 8.0))),
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

fn homing(fleet: &Fleet) -> Homing {
    let place = |node: usize| Place {
        region: fleet.region_of(node),
        capacity_blocks: fleet.capacity as u64,
    };
    let nodes = crate::homing::Fleet {
        nodes: (0..fleet.nodes).map(place).collect(),
        block_tokens: u64::from(fleet.params.block_tokens),
        round_trip_ms: fleet.round_trips_ms.clone(),
    };
    let settings = Settings {
        knowledge: Knowledge::Events,
        ..Settings::default()
    };
    Homing::new(nodes, settings)
}
