//! How are two nodes of one thread each put to work?

use std::fmt;
use std::str::FromStr;

use serde::Serialize;

use super::figures::Figures;
use crate::error::LoadError;

/// Tokens of a step that no prompt is longer than: the default model's context.
const WHOLE_TOKENS: usize = 8192;

/// One way.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Arrangement {
    /// One computes prompts, the other answers.
    Apart,
    /// Both do both, and a prompt is computed in one piece while answers wait.
    Whole,
    /// Both do both, prompts in chunks that leave answers about half of the time, at most so many
    /// tokens a step: our default.
    Paced(usize),
    /// Both do both, prompts in chunks of so many tokens, decodes included.
    Unpaced(usize),
}

impl FromStr for Arrangement {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let tokens = |tokens: &str| {
            let tokens = tokens.parse::<usize>().ok().filter(|tokens| *tokens > 0);
            tokens.ok_or_else(|| format!("{text}: tokens of a step, above 0"))
        };
        match text.split_once(':') {
            None if text == "apart" => Ok(Self::Apart),
            None if text == "whole" => Ok(Self::Whole),
            Some(("paced", most)) => tokens(most).map(Self::Paced),
            Some(("unpaced", most)) => tokens(most).map(Self::Unpaced),
            _ => Err("apart, whole, paced:TOKENS or unpaced:TOKENS".into()),
        }
    }
}

impl fmt::Display for Arrangement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Apart => f.write_str("apart"),
            Self::Whole => f.write_str("whole"),
            Self::Paced(tokens) => write!(f, "paced:{tokens}"),
            Self::Unpaced(tokens) => write!(f, "unpaced:{tokens}"),
        }
    }
}

impl Serialize for Arrangement {
    fn serialize<S: serde::Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(self)
    }
}

impl Arrangement {
    /// Whether it is one of our mixed nodes' settings with chunked prefill.
    pub(super) fn is_chunked(&self) -> bool {
        matches!(self, Self::Paced(_) | Self::Unpaced(_))
    }

    /// Each node's role and further flags.
    pub(super) fn nodes(&self) -> [(&'static str, Vec<String>); 2] {
        let flags = |how: &str, tokens: usize| {
            let flags = ["--prefill-beside-decode", how, "--step-tokens"];
            let mut flags: Vec<String> = flags.map(str::to_owned).into();
            flags.push(tokens.to_string());
            flags
        };
        let mixed = |flags: Vec<String>| ["mixed"; 2].map(|role| (role, flags.clone()));
        match self {
            Self::Apart => [("prefill", Vec::new()), ("decode", Vec::new())],
            Self::Whole => mixed(flags("unpaced", WHOLE_TOKENS)),
            Self::Paced(tokens) => mixed(flags("paced", *tokens)),
            Self::Unpaced(tokens) => mixed(flags("unpaced", *tokens)),
        }
    }

    /// Refuses figures that are not of this arrangement: nothing is known of nodes that compute
    /// prompts for others where no prompt was handed over.
    pub(super) fn check(&self, figures: &Figures) -> Result<(), LoadError> {
        let shared = figures.get("shared turns");
        let received = figures.get("transfers received");
        let wrong = match self {
            Self::Apart if shared == 0.0 => "no turn was shared by two nodes",
            Self::Apart if received == 0.0 => "no prompt was received by the node that answers",
            Self::Whole | Self::Paced(_) | Self::Unpaced(_) if received > 0.0 => {
                "mixed nodes handed prompts over"
            }
            _ => return Ok(()),
        };
        Err(LoadError::program(self.to_string(), wrong))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Catches a name that starts another arrangement than it says.
    #[test]
    fn names_are_read_as_they_are_written() {
        let check = |text: &str, expected: Option<Arrangement>| {
            let found = text.parse::<Arrangement>().ok();
            assert_eq!(found, expected, "{text}");
            if let Some(found) = found {
                assert_eq!(found.to_string(), text);
            }
        };
        check("apart", Some(Arrangement::Apart));
        check("whole", Some(Arrangement::Whole));
        check("paced:256", Some(Arrangement::Paced(256)));
        check("unpaced:64", Some(Arrangement::Unpaced(64)));
        for wrong in ["", "paced", "unpaced:0", "whole:3", "paced:many", "mixed"] {
            check(wrong, None);
        }
    }

    /// Catches figures that pass for those of nodes which hand prompts over although none did.
    #[test]
    fn handovers_are_demanded_where_they_belong() {
        let figures = |shared: f64, received: f64| {
            Figures([("shared turns", shared), ("transfers received", received)].into())
        };
        for (arrangement, shared, received, is_good) in [
            (Arrangement::Apart, 9.0, 9.0, true),
            (Arrangement::Apart, 0.0, 9.0, false),
            (Arrangement::Apart, 9.0, 0.0, false),
            (Arrangement::Whole, 0.0, 0.0, true),
            (Arrangement::Paced(64), 0.0, 1.0, false),
        ] {
            let checked = arrangement.check(&figures(shared, received));
            assert_eq!(
                checked.is_ok(),
                is_good,
                "{arrangement} {shared} {received}"
            );
        }
    }
}
