//! Which policies are there, by name, and over which of their parameters is each swept?
//!
//! A policy is named `name` or `name:key=value:key=value`; `ext:COMMAND` is one outside of this
//! program, which the caller starts ([`Spec::command`]).

#[cfg(test)]
mod tests;

use std::fmt;

use crate::baselines::cache_aware::{CacheAware, Knowledge as CacheKnowledge, Thresholds};
use crate::baselines::dynamo::{self, Dynamo};
use crate::baselines::llm_d::{self, LlmD};
use crate::baselines::load_only::{LeastOutstanding, RoundRobin};
use crate::baselines::oracle::{Cost, Oracle};
use crate::baselines::sticky::{Key, Sticky};
use crate::homing::gate::Gated;
use crate::homing::{Homing, Knowledge, Settings};
use crate::router::Router;
use crate::scenario::Fleet;

/// Why a policy could not be had.
#[derive(Clone, PartialEq, Debug, thiserror::Error)]
pub enum PolicyError {
    /// No such name.
    #[error("no policy {0:?}; there are: all, {names}, ext:COMMAND", names = NAMES.join(", "))]
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
    /// A value that makes no sense.
    #[error("{policy}: {key} must be {allowed}")]
    Value {
        /// Whose.
        policy: String,
        /// Which parameter.
        key: String,
        /// What it may be.
        allowed: &'static str,
    },
    /// A policy outside of this program, which cannot be built in it.
    #[error("{EXT}:{0}: its process is started by whoever plays it")]
    Outside(String),
}

/// The name of policies outside of this program.
const EXT: &str = "ext";

/// All names, the product's own first.
pub const NAMES: &[&str] = &[
    "homing",
    "homing-gate",
    "round-robin",
    "least-outstanding",
    "session",
    "prefix",
    "cache-aware",
    "dynamo",
    "llm-d",
    "oracle",
    "cost",
];

/// What the product is compared with: rules that others use.
pub const BASELINES: &[&str] = &[
    "round-robin",
    "least-outstanding",
    "session",
    "prefix",
    "cache-aware",
    "dynamo",
    "llm-d",
];

/// The reference of a scenario is, for each figure, the best of these.
pub const REFERENCES: &[&str] = &["oracle:b=4", "oracle:b=8", "cost:b=4", "cost:b=8"];

/// A policy and its parameters.
#[derive(Clone, PartialEq, Debug)]
pub struct Spec {
    name: &'static str,
    values: Vec<(String, f64)>,
    /// Of an outside policy alone.
    command: Option<String>,
}

impl fmt::Display for Spec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)?;
        if let Some(command) = &self.command {
            write!(f, ":{command}")?;
        }
        self.values
            .iter()
            .try_for_each(|(key, value)| write!(f, ":{key}={value}"))
    }
}

impl Spec {
    /// Reads `name:key=value:key=value` or `ext:COMMAND`.
    pub fn parse(text: &str) -> Result<Self, PolicyError> {
        if let Some((EXT, command)) = text.split_once(':') {
            return Ok(Self {
                name: EXT,
                values: Vec::new(),
                command: Some(command.to_owned()),
            });
        }
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
            command: None,
        })
    }

    /// What a command line means: several, separated by commas, of `all`, a name (over that policy's
    /// own parameters), and a name with parameters. An `ext:` command goes on to the end of the
    /// text, its commas included.
    pub fn parse_list(text: &str) -> Result<Vec<Self>, PolicyError> {
        let is_outside = matches!(text.split_once(':'), Some((EXT, _)));
        match text.split_once(',') {
            Some((first, rest)) if !is_outside => {
                let mut specs = Self::parse_swept(first)?;
                specs.extend(Self::parse_list(rest)?);
                Ok(specs)
            }
            _ => Self::parse_swept(text),
        }
    }

    /// One of such a list.
    pub fn parse_swept(text: &str) -> Result<Vec<Self>, PolicyError> {
        if text == "all" {
            return Ok(NAMES.iter().flat_map(|name| sweep(name)).collect());
        }
        let spec = Self::parse(text)?;
        Ok(if text == spec.name {
            sweep(spec.name)
        } else {
            vec![spec]
        })
    }

    /// Its name without parameters.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// The command of a policy outside of this program.
    pub fn command(&self) -> Option<&str> {
        self.command.as_deref()
    }

    /// A router for this fleet.
    pub fn build(&self, fleet: &Fleet) -> Result<Box<dyn Router>, PolicyError> {
        if let Some(command) = &self.command {
            return Err(PolicyError::Outside(command.clone()));
        }
        let mut values = Values {
            spec: self,
            known: Vec::new(),
        };
        let router = build(self.name, fleet, &mut values)?;
        values.check()?;
        Ok(router)
    }
}

fn build(
    name: &str,
    fleet: &Fleet,
    values: &mut Values<'_>,
) -> Result<Box<dyn Router>, PolicyError> {
    Ok(match name {
        "homing" => Box::new(homing(fleet, values)),
        "homing-gate" => {
            let params = hold(values);
            Box::new(Gated::new(homing(fleet, values), params))
        }
        "round-robin" => Box::new(RoundRobin::new()),
        "least-outstanding" => Box::new(LeastOutstanding::new(fleet)),
        "session" => Box::new(Sticky::new(fleet, Key::Session, values.bound()?)),
        "prefix" => {
            let blocks = values.get("blocks", 2.0) as usize;
            Box::new(Sticky::new(fleet, Key::Prefix { blocks }, values.bound()?))
        }
        "cache-aware" => {
            let thresholds = Thresholds {
                threshold: values.get("threshold", 0.3),
                abs: values.get("abs", 64.0),
                rel: values.get("rel", 1.5),
            };
            // About what SMG's default of 64 M characters is in blocks.
            let blocks = values.get("tree", 32_768.0) as usize;
            let knowledge = if values.get("events", 0.0) > 0.0 {
                CacheKnowledge::Events
            } else {
                CacheKnowledge::Dispatches { blocks }
            };
            Box::new(CacheAware::new(fleet, thresholds, knowledge))
        }
        "dynamo" => {
            let weights = dynamo::Weights {
                scale: values.get("scale", 1.0),
                credit: values.get("credit", 1.0),
                decay: values.get("decay", 0.0),
                requests: values.get("requests", 0.0),
            };
            Box::new(Dynamo::new(fleet, weights))
        }
        "llm-d" => {
            let weights = llm_d::Weights {
                prefix: values.get("prefix", 3.0),
                queue: values.get("queue", 2.0),
                cache: values.get("cache", 2.0),
            };
            Box::new(LlmD::new(fleet, weights))
        }
        "oracle" => Box::new(Oracle::new(fleet, values.get("b", 4.0))),
        "cost" => Box::new(Cost::new(fleet, values.get("b", 8.0))),
        name => return Err(PolicyError::Name(name.to_owned())),
    })
}

/// The parameters that a policy is played with when none are given: its defaults first, then what
/// an operator would try around them.
fn sweep(name: &'static str) -> Vec<Spec> {
    let one = |values: &[(&str, f64)]| Spec {
        name,
        values: values.iter().map(|(k, v)| ((*k).to_owned(), *v)).collect(),
        command: None,
    };
    match name {
        "session" => {
            let bounded = [1.1, 1.25, 1.5, 2.0].map(|bound| one(&[("bound", bound)]));
            std::iter::once(one(&[])).chain(bounded).collect()
        }
        "prefix" => [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0]
            .into_iter()
            .flat_map(|blocks| {
                let free = one(&[("blocks", blocks)]);
                let bounded = one(&[("blocks", blocks), ("bound", 1.25)]);
                [free, bounded]
            })
            .collect(),
        "cache-aware" => {
            let mut specs = Vec::new();
            for events in [0.0, 1.0] {
                for (abs, rel) in [(64.0, 1.5), (32.0, 1.1), (16.0, 1.25), (4.0, 1.1)] {
                    for threshold in [0.1, 0.3, 0.5] {
                        specs.push(one(&[
                            ("threshold", threshold),
                            ("abs", abs),
                            ("rel", rel),
                            ("events", events),
                        ]));
                    }
                }
            }
            specs
        }
        "dynamo" => {
            let scales = [1.0, 4.0, 16.0, 32.0, 64.0, 128.0, 256.0];
            let plain = scales.map(|scale| one(&[("scale", scale)]));
            let decayed = [16.0, 64.0].map(|scale| one(&[("scale", scale), ("decay", 0.1)]));
            plain.into_iter().chain(decayed).collect()
        }
        "llm-d" => [
            (3.0, 2.0, 2.0),
            (1.0, 1.0, 1.0),
            (2.0, 1.0, 1.0),
            (3.0, 2.0, 0.0),
            (4.0, 1.0, 1.0),
            (8.0, 1.0, 1.0),
            (16.0, 2.0, 0.0),
            (16.0, 1.0, 1.0),
            (32.0, 1.0, 1.0),
        ]
        .into_iter()
        .map(|(prefix, queue, cache)| {
            one(&[("prefix", prefix), ("queue", queue), ("cache", cache)])
        })
        .collect(),
        "oracle" => [1.0, 2.0, 4.0, 8.0, 16.0]
            .map(|b| one(&[("b", b)]))
            .to_vec(),
        "cost" => [4.0, 8.0].map(|b| one(&[("b", b)])).to_vec(),
        _ => vec![one(&[])],
    }
}

/// Reads parameters and remembers which there are.
struct Values<'a> {
    spec: &'a Spec,
    known: Vec<String>,
}

impl Values<'_> {
    fn given(&mut self, key: &'static str) -> Option<f64> {
        self.known.push(key.to_owned());
        let values = &self.spec.values;
        values
            .iter()
            .find(|(k, _)| k == key)
            .map(|(_, value)| *value)
    }

    fn get(&mut self, key: &'static str, default: f64) -> f64 {
        self.given(key).unwrap_or(default)
    }

    /// Offers all parameters to what knows which it has.
    fn take(&mut self, mut set: impl FnMut(&str, f64) -> bool) {
        for (key, value) in &self.spec.values {
            if set(key, *value) {
                self.known.push(key.clone());
            }
        }
    }

    /// A load bound: below 1, no node could ever take a request.
    fn bound(&mut self) -> Result<Option<f64>, PolicyError> {
        let bound = self.given("bound");
        if bound.is_some_and(|bound| bound < 1.0) {
            return Err(PolicyError::Value {
                policy: self.spec.name.to_owned(),
                key: "bound".to_owned(),
                allowed: "1 or more",
            });
        }
        Ok(bound)
    }

    fn check(&self) -> Result<(), PolicyError> {
        let unknown = |(key, _): &&(String, f64)| !self.known.contains(key);
        match self.spec.values.iter().find(unknown) {
            None => Ok(()),
            Some((key, _)) => Err(PolicyError::Key {
                policy: self.spec.name.to_owned(),
                key: key.clone(),
            }),
        }
    }
}

/// Its keys are the settings' own ([`Settings::set`]).
fn hold(values: &mut Values<'_>) -> policies::hold::Params {
    let default = policies::hold::Params::default();
    policies::hold::Params {
        node_queue_ms: values.get("queue", default.node_queue_ms),
        ageing: values.get("ageing", default.ageing),
        distress_ms: values.get("distress", default.distress_ms),
        calm_ms: values.get("calm", default.calm_ms),
        set_share: values.get("share", default.set_share),
        patience_ms: values.get("patience", default.patience_ms),
        entry_queue_ms: values.get("entry", default.entry_queue_ms),
        wait_ms_max: values.get("wait", default.wait_ms_max),
        ..default
    }
}

fn homing(fleet: &Fleet, values: &mut Values<'_>) -> Homing {
    let mut settings = Settings {
        knowledge: Knowledge::Events,
        ..Settings::default()
    };
    values.take(|key, value| settings.set(key, value));
    Homing::new(fleet.into(), settings)
}
