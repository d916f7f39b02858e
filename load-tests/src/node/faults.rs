//! What may go wrong with a simulated node, and how is it written?
//!
//! One word, with a number or a word after a colon where it takes one; the same on the command line
//! and at the control address.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// Something that goes wrong from now on, or ends going wrong.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Fault {
    /// The next so many requests lose their connection before anything was answered.
    DieBeforeFirstToken(u32),
    /// The next so many requests lose their connection in the middle of the answer.
    DieMidStream(u32),
    /// The node takes so many times as long for everything.
    Slow(f64),
    /// The next so many batches of KV events are numbered and not sent.
    DropEvents(u64),
    /// Every connection breaks, the cache is gone, and after so long another process stands at the
    /// same addresses.
    Restart(Duration),
    /// The cache is emptied, and the node says so.
    Wipe,
    /// The cache is emptied, and the node says nothing.
    WipeSilently,
    /// The KV pool is full and stays so: what comes waits.
    Full,
    /// The KV pool is as its requests make it, and what waited is computed.
    Free,
    /// `/health` answers 503.
    Draining,
    /// `/health` answers 200 again.
    Ready,
}

/// Why a fault was not understood.
#[derive(Debug, PartialEq, Eq)]
pub struct UnknownFault(String);

impl fmt::Display for UnknownFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{:?} is none of die-before-first-token[:COUNT], die-mid-stream[:COUNT], slow:FACTOR, \
             drop-events[:BATCHES], restart[:MS], wipe, wipe:silent, full, free, draining, ready",
            self.0
        )
    }
}

impl std::error::Error for UnknownFault {}

impl FromStr for Fault {
    type Err = UnknownFault;

    fn from_str(text: &str) -> Result<Self, UnknownFault> {
        let unknown = || UnknownFault(text.to_owned());
        let (name, value) = match text.split_once(':') {
            Some((name, value)) => (name, Some(value)),
            None => (text, None),
        };
        let count = || value.map_or(Some(1), |value| value.parse().ok());
        let fault = match (name, value) {
            ("die-before-first-token", _) => count().map(Self::DieBeforeFirstToken),
            ("die-mid-stream", _) => count().map(Self::DieMidStream),
            ("slow", Some(factor)) => {
                let factor = factor.parse().ok();
                // A node that never gets on would be another fault.
                factor.filter(|f| (0.01..=1e6).contains(f)).map(Self::Slow)
            }
            ("drop-events", _) => count().map(|count| Self::DropEvents(u64::from(count))),
            ("restart", None) => Some(Self::Restart(Duration::ZERO)),
            ("restart", Some(ms)) => {
                let ms = ms.parse().ok().map(Duration::from_millis);
                ms.map(Self::Restart)
            }
            ("wipe", None) => Some(Self::Wipe),
            ("wipe", Some("silent")) => Some(Self::WipeSilently),
            ("full", None) => Some(Self::Full),
            ("free", None) => Some(Self::Free),
            ("draining", None) => Some(Self::Draining),
            ("ready", None) => Some(Self::Ready),
            _ => None,
        };
        fault.ok_or_else(unknown)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Catches a fault that is read as another, and nonsense that is taken.
    #[test]
    fn faults_are_read() {
        let check = |text: &str, expected: Option<Fault>| {
            assert_eq!(text.parse::<Fault>().ok(), expected, "{text}");
        };
        check("die-mid-stream", Some(Fault::DieMidStream(1)));
        check(
            "die-before-first-token:3",
            Some(Fault::DieBeforeFirstToken(3)),
        );
        check("slow:2.5", Some(Fault::Slow(2.5)));
        check("drop-events:9", Some(Fault::DropEvents(9)));
        check("restart", Some(Fault::Restart(Duration::ZERO)));
        check(
            "restart:250",
            Some(Fault::Restart(Duration::from_millis(250))),
        );
        check("wipe", Some(Fault::Wipe));
        check("wipe:silent", Some(Fault::WipeSilently));
        check("full", Some(Fault::Full));
        for nonsense in [
            "",
            "slow",
            "slow:0",
            "slow:NaN",
            "wipe:loud",
            "full:1",
            "drop-events:-1",
        ] {
            check(nonsense, None);
        }
    }
}
