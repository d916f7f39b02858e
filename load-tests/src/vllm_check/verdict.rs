//! Did they agree, and where not, what explains it?

use std::fmt::Write as _;

use serde::Serialize;

use super::Checked;
use super::account::Span;
use super::converse::Turn;

/// Whether anything else was under way with a turn.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Alone {
    Yes,
    /// No; the most leading tokens that it shares with another turn under way.
    No {
        shared: u64,
    },
}

/// One turn, as vLLM, the gateway and the account saw it.
pub(super) struct Compared {
    pub(super) step: &'static str,
    pub(super) request_id: String,
    pub(super) alone: Alone,
    pub(super) prompt_tokens: u64,
    pub(super) gateway_tokens: u64,
    /// Whether it was the same tokens for both.
    pub(super) same_prompt: bool,
    pub(super) expected: u64,
    pub(super) cached: u64,
    /// What the events say.
    pub(super) span: Span,
    pub(super) block_tokens: u64,
    /// Whether the decision that `homing explain` shows has the same figures.
    pub(super) explain_agrees: bool,
}

/// What a comparison means.
enum Meaning {
    Agree,
    Explained(&'static str),
    Fault(String),
}

impl Compared {
    pub(super) fn alone(self, alone: Alone) -> Self {
        Self { alone, ..self }
    }

    /// Among others that were under way at the same time.
    pub(super) fn beside(self, turn: &Turn, all: &[Turn]) -> Self {
        let others = all.iter().filter(|other| {
            other.request_id != turn.request_id
                && other.tenant == turn.tenant
                && other.sent < turn.answered
                && turn.sent < other.answered
        });
        let in_common = |other: &Turn| {
            let pairs = other.prompt.iter().chain(&other.output).zip(&turn.prompt);
            pairs.take_while(|(theirs, own)| theirs == own).count() as u64
        };
        let shared = others.map(in_common).max().unwrap_or(0);
        self.alone(Alone::No { shared })
    }

    /// What the events say must be cached: whole blocks, and never the last token.
    fn told(&self) -> u64 {
        let size = self.block_tokens.max(1);
        let most = self.prompt_tokens.saturating_sub(1) / size * size;
        (self.span.at_start as u64).min(most)
    }

    fn meaning(&self) -> Meaning {
        if !self.same_prompt && self.step != super::steps::CONTROL_TEXT {
            return Meaning::Fault(format!(
                "the gateway's prompt of {} tokens is not vLLM's of {}",
                self.gateway_tokens, self.prompt_tokens
            ));
        }
        if !self.explain_agrees {
            return Meaning::Fault("the recorded decision has other figures".into());
        }
        let (expected, cached, told) = (self.expected, self.cached, self.told());
        match self.alone {
            Alone::Yes if self.step == super::steps::FIRST_CLEARED && expected == told => {
                match cached {
                    0 => Meaning::Explained("vLLM tells of a cleared cache with its next step"),
                    _ => Meaning::Fault(format!("{cached} cached of what was cleared")),
                }
            }
            Alone::Yes if cached != told => {
                Meaning::Fault(format!("the events say {told}, vLLM {cached}"))
            }
            _ if expected == cached => Meaning::Agree,
            Alone::Yes if !self.same_prompt && expected < cached => {
                Meaning::Explained("vLLM reads control tokens in the text of messages")
            }
            Alone::Yes => Meaning::Fault(format!("{expected} expected, {cached} cached")),
            Alone::No { .. }
                if expected > cached && (self.span.least as u64) < expected.min(told) =>
            {
                Meaning::Explained("evicted before it began")
            }
            Alone::No { shared } if expected > cached && shared > cached => {
                Meaning::Explained("another turn had not computed it yet")
            }
            Alone::No { shared } if cached > expected && shared >= cached => {
                Meaning::Explained("another turn computed it meanwhile")
            }
            Alone::No { shared } => Meaning::Fault(format!(
                "{expected} expected, {cached} cached; the events say {told}, {shared} shared"
            )),
        }
    }

    /// One line for the record.
    pub(super) fn line(&self) -> String {
        let meaning = match self.meaning() {
            Meaning::Agree => "agree".to_owned(),
            Meaning::Explained(why) => why.to_owned(),
            Meaning::Fault(what) => format!("FAULT {what}"),
        };
        format!(
            "{:<12} {} prompt {} expected {} cached {} told {} after {} batches {:?}: {meaning}\n",
            self.step,
            self.request_id,
            self.prompt_tokens,
            self.expected,
            self.cached,
            self.told(),
            self.span.batches,
            self.alone
        )
    }
}

/// What the check has gathered.
#[derive(Default)]
pub(super) struct Done {
    pub(super) vllm: String,
    pub(super) block_tokens: u64,
    pub(super) pool_blocks: u64,
    pub(super) compared: Vec<Compared>,
    pub(super) event_batches: usize,
    pub(super) blocks_stored: usize,
    pub(super) blocks_removed: usize,
    pub(super) index_compared: usize,
    pub(super) index_equal: usize,
    pub(super) hits_counted: u64,
    pub(super) hits_reported: u64,
    pub(super) faults: Vec<String>,
    pub(super) stopped: Option<String>,
}

/// One step of the check.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Row {
    /// Its name.
    pub step: String,
    /// Turns.
    pub requests: usize,
    /// Those whose prompt was the same tokens for vLLM and the gateway.
    pub same_prompt: usize,
    /// Those of whose cached tokens the gateway expected exactly as many as vLLM reported.
    pub agree: usize,
    /// Those where more was expected.
    pub over: usize,
    /// Those where less was expected.
    pub under: usize,
    /// Tokens of their prompts.
    pub prompt_tokens: u64,
    /// Expected to be cached.
    pub expected_tokens: u64,
    /// Reported as cached.
    pub cached_tokens: u64,
}

impl Row {
    fn add(&mut self, compared: &Compared) {
        self.requests += 1;
        self.same_prompt += usize::from(compared.same_prompt);
        self.agree += usize::from(compared.expected == compared.cached);
        self.over += usize::from(compared.expected > compared.cached);
        self.under += usize::from(compared.expected < compared.cached);
        self.prompt_tokens += compared.prompt_tokens;
        self.expected_tokens += compared.expected;
        self.cached_tokens += compared.cached;
    }
}

/// Sums up.
pub(super) fn of(done: Done) -> Checked {
    let mut rows: Vec<Row> = Vec::new();
    let mut all = Row {
        step: "all".into(),
        ..Row::default()
    };
    let mut faults = done.faults;
    let mut explained = Vec::new();
    for compared in &done.compared {
        if rows.last().is_none_or(|row| row.step != compared.step) {
            rows.push(Row {
                step: compared.step.into(),
                ..Row::default()
            });
        }
        if let Some(row) = rows.last_mut() {
            row.add(compared);
        }
        all.add(compared);
        match compared.meaning() {
            Meaning::Agree => {}
            Meaning::Explained(why) => explained.push(format!(
                "{}: {} expected, {} cached: {why}",
                compared.step, compared.expected, compared.cached
            )),
            Meaning::Fault(what) => faults
                .push(compared.line().trim_end().replace("FAULT ", "") + &format!(" [{what}]")),
        }
    }
    rows.push(all);
    // Of a check that did not come to its end these figures are not whole.
    let has_ended = done.stopped.is_none();
    if has_ended && done.hits_counted != done.hits_reported {
        faults.push(format!(
            "vLLM counts {} cached tokens, its answers say {}",
            done.hits_counted, done.hits_reported
        ));
    }
    if has_ended && done.blocks_removed == 0 {
        faults.push("nothing was evicted: the check has not checked that".into());
    }
    Checked {
        vllm: done.vllm,
        block_tokens: done.block_tokens,
        pool_blocks: done.pool_blocks,
        rows,
        event_batches: done.event_batches,
        blocks_stored: done.blocks_stored,
        blocks_removed: done.blocks_removed,
        index_compared: done.index_compared,
        index_equal: done.index_equal,
        hits_counted: done.hits_counted,
        hits_reported: done.hits_reported,
        explained,
        faults,
        stopped: done.stopped,
    }
}

/// The verdict in one line, but for what has stopped the check.
pub(super) fn line(checked: &Checked) -> String {
    let all = checked.rows.last().cloned().unwrap_or_default();
    let (explained, faults) = (checked.explained.len(), checked.faults.len());
    let turns = format!(
        "of {} turns {} agree exactly, {explained} differ and are explained; {faults} faults",
        all.requests, all.agree
    );
    match &checked.stopped {
        Some(why) => format!("NOT RUN TO ITS END: {turns} until then; {why}"),
        None if faults > 0 => format!("DISAGREE: {turns}"),
        None => format!("AGREE: {turns}"),
    }
}

pub(super) fn table(checked: &Checked) -> String {
    let mut out = format!(
        "vLLM {}: {} blocks of {} tokens\n",
        checked.vllm, checked.pool_blocks, checked.block_tokens
    );
    // Writing to a String cannot fail.
    let _ = writeln!(
        out,
        "{:<20} {:>8} {:>11} {:>6} {:>5} {:>6} {:>9} {:>9} {:>9}",
        "step", "requests", "same prompt", "agree", "over", "under", "prompt", "expected", "cached"
    );
    for row in &checked.rows {
        let _ = writeln!(
            out,
            "{:<20} {:>8} {:>11} {:>6} {:>5} {:>6} {:>9} {:>9} {:>9}",
            row.step,
            row.requests,
            row.same_prompt,
            row.agree,
            row.over,
            row.under,
            row.prompt_tokens,
            row.expected_tokens,
            row.cached_tokens
        );
    }
    let _ = writeln!(
        out,
        "events: {} batches, {} blocks stored, {} removed; the index held the same as their account \
         {} times of {}",
        checked.event_batches,
        checked.blocks_stored,
        checked.blocks_removed,
        checked.index_equal,
        checked.index_compared
    );
    let _ = writeln!(
        out,
        "cached tokens: {} by vLLM's metrics, {} by its answers",
        checked.hits_counted, checked.hits_reported
    );
    for explained in &checked.explained {
        let _ = writeln!(out, "explained: {explained}");
    }
    for fault in &checked.faults {
        let _ = writeln!(out, "FAULT: {fault}");
    }
    let _ = writeln!(out, "{}", line(checked));
    out
}

#[cfg(test)]
mod tests;
