//! Where in the grammar is an answer, and what would finish it?
//!
//! An Earley parse over lexemes, beside the one that the grammar library does for its masks. A row
//! for each lexeme so far holds the rules that the answer may be in; `up` says what finishing a
//! symbol that began in a row still leaves to be written after it. So the cheapest completion is
//! read off the last row.
//!
//! Bytes can be taken back, which is how tokens are tried.

mod rows;

use std::sync::Arc;

use llguidance::earley::regexvec::StateID;

use crate::lexemes::{End, Kind, Lexemes, Step};
use crate::rules::{END, NEVER, Rules};

/// A rule with a dot, and the row where it began.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Item {
    pub(crate) dot: u32,
    pub(crate) from: u32,
}

/// What is left to write after a symbol that began in a row.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Up {
    pub(crate) symbol: u32,
    /// At least.
    pub(crate) least: u32,
    /// The item that waits for it at that cost; none where the answer ends with it.
    pub(crate) via: Option<Item>,
    /// The most of any of the rules that surround it.
    most: u32,
}

struct Row {
    items: std::ops::Range<usize>,
    ups: std::ops::Range<usize>,
    /// Where the lexer begins here.
    begin: StateID,
    /// The state whose lexemes led here, and whether they ended at once.
    by: Option<(StateID, bool)>,
    /// What this row and all before it hold.
    hash: u64,
    /// The least that finishes the answer from here.
    least: u32,
    /// The most of any rule that the answer may be in.
    most: u32,
}

/// Where the lexer is after a byte.
#[derive(Clone, Copy)]
struct Top {
    row: u32,
    state: StateID,
    /// Whether a lexeme has begun.
    pending: bool,
}

/// What tells one state of an answer from another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Place {
    rows: u64,
    state: StateID,
    pending: bool,
}

/// The parse of one answer so far.
pub(crate) struct Chart {
    rules: Arc<Rules>,
    rows: Vec<Row>,
    items: Vec<Item>,
    ups: Vec<Up>,
    tops: Vec<Top>,
}

impl Chart {
    /// The parse of an empty answer.
    pub(crate) fn new(rules: Arc<Rules>, lexemes: &mut Lexemes) -> Self {
        let mut chart = Self {
            rules,
            rows: Vec::new(),
            items: Vec::new(),
            ups: Vec::new(),
            tops: Vec::new(),
        };
        let start = chart.rules.start;
        let begins = chart.rules.symbol(start).rules.clone();
        for dot in begins {
            chart.items.push(Item { dot, from: 0 });
        }
        let nullable = chart.rules.symbol(start).nullable;
        chart.close(0, None, lexemes);
        if let Some(row) = chart.rows.first_mut().filter(|_| nullable) {
            row.least = 0;
        }
        let begin = chart.rows[0].begin;
        chart.tops.push(Top {
            row: 0,
            state: begin,
            pending: false,
        });
        chart
    }

    fn top(&self) -> Top {
        self.tops[self.tops.len() - 1]
    }

    pub(crate) fn place(&self) -> Place {
        let top = self.top();
        Place {
            rows: self.rows[top.row as usize].hash,
            state: top.state,
            pending: top.pending,
        }
    }

    /// The least that finishes the answer from here, in tokens.
    pub(crate) fn least(&self, lexemes: &mut Lexemes) -> u32 {
        let top = self.top();
        let row = &self.rows[top.row as usize];
        if !top.pending {
            return row.least;
        }
        self.cheapest_pending(top, lexemes)
            .map_or(NEVER, |(cost, _)| cost)
    }

    /// Of the items whose lexeme has begun, the one that finishes the answer at the least cost.
    fn cheapest_pending(&self, top: Top, lexemes: &mut Lexemes) -> Option<(u32, Item)> {
        let row = &self.rows[top.row as usize];
        let mut best: Option<(u32, Item)> = None;
        for item in &self.items[row.items.clone()] {
            let Some(lexeme) = self.waits_for_lexeme(*item) else {
                continue;
            };
            if !lexemes.may_be(top.state, lexeme) {
                continue;
            }
            let Some(end) = lexemes.end(top.state, lexeme, true) else {
                continue;
            };
            let cost = self.after(*item).saturating_add(end.cost());
            if best.is_none_or(|(least, _)| cost < least) {
                best = Some((cost, *item));
            }
        }
        best
    }

    fn waits_for_lexeme(&self, item: Item) -> Option<u32> {
        let symbol = self.rules.at(item.dot);
        if symbol == END {
            return None;
        }
        self.rules.symbol(symbol).lexeme
    }

    /// What is left after the symbol behind an item's dot.
    fn after(&self, item: Item) -> u32 {
        let owner = self.rules.owner[item.dot as usize];
        let up = self.up(item.from, owner).map_or(NEVER, |up| up.least);
        self.rules.tail(item.dot + 1).saturating_add(up).min(NEVER)
    }

    /// What is left after `symbol`, which began in row `from`.
    pub(crate) fn up(&self, from: u32, symbol: u32) -> Option<Up> {
        let ups = &self.ups[self.rows[from as usize].ups.clone()];
        let at = ups.binary_search_by_key(&symbol, |up| up.symbol).ok()?;
        Some(ups[at])
    }

    /// More than any next token can leave to be written, given what one token can open anew.
    pub(crate) fn bound(&self, opened: u32) -> u32 {
        let most = self.rows[self.top().row as usize].most;
        most.saturating_add(opened).min(NEVER)
    }

    /// The way that costs [`Chart::least`]: the item whose lexeme comes next or has begun, with the
    /// end of a begun one. None where the answer is complete, or nothing completes it.
    pub(crate) fn cheapest(&self, lexemes: &mut Lexemes) -> Option<(Item, Option<Arc<End>>)> {
        let top = self.top();
        if top.pending {
            let (_, item) = self.cheapest_pending(top, lexemes)?;
            let lexeme = self.waits_for_lexeme(item)?;
            let end = lexemes.end(top.state, lexeme, true)?;
            return Some((item, Some(end)));
        }
        let row = &self.rows[top.row as usize];
        if row.least == 0 {
            return None;
        }
        let cost = |item: &Item| {
            let symbol = self.rules.at(item.dot);
            let cost = self.rules.symbol(symbol).cost;
            self.after(*item).saturating_add(cost)
        };
        self.items[row.items.clone()]
            .iter()
            .filter(|item| self.waits_for_lexeme(**item).is_some())
            .min_by_key(|item| cost(item))
            .map(|item| (*item, None))
    }

    /// Takes a byte; false if the grammar does not.
    pub(crate) fn push(&mut self, byte: u8, lexemes: &mut Lexemes) -> bool {
        let top = self.top();
        let next = match lexemes.step(top.state, byte, top.pending) {
            Step::Dead => None,
            Step::Inside(state) => Some(Top {
                state,
                pending: true,
                ..top
            }),
            Step::OverWith(state) => self.scan(top.row, state, true, lexemes),
            Step::OverBefore(state) => self
                .scan(top.row, state, false, lexemes)
                .and_then(|over| self.begin_with(over, byte, lexemes)),
        };
        if let Some(next) = next {
            self.tops.push(next);
        }
        next.is_some()
    }

    fn begin_with(&mut self, over: Top, byte: u8, lexemes: &mut Lexemes) -> Option<Top> {
        let (state, whole) = lexemes.first(over.state, byte)?;
        if whole {
            return self.scan(over.row, state, false, lexemes);
        }
        Some(Top {
            row: over.row,
            state,
            pending: true,
        })
    }

    /// Takes a control token; false if the grammar does not.
    pub(crate) fn push_marker(&mut self, token: u32, lexemes: &mut Lexemes) -> bool {
        let mut top = self.top();
        if top.pending {
            match self.scan(top.row, top.state, false, lexemes) {
                Some(over) => top = over,
                None => return false,
            }
        }
        let row = self.rows[top.row as usize].items.clone();
        let found = row
            .filter_map(|at| self.waits_for_lexeme(self.items[at]))
            .find(|lexeme| lexemes.kind(*lexeme) == Kind::Marker(token));
        let Some(lexeme) = found else { return false };
        match self.advance(top.row, &[lexeme], None, lexemes) {
            Some(next) => {
                self.tops.push(next);
                true
            }
            None => false,
        }
    }

    /// Takes back bytes or control tokens.
    pub(crate) fn pop(&mut self, count: usize) {
        self.tops.truncate((self.tops.len() - count).max(1));
    }

    /// Forgets how to take back what was taken so far.
    pub(crate) fn settle(&mut self) {
        let top = self.top();
        self.tops.clear();
        self.tops.push(top);
    }

    /// The row behind the lexemes that end in `state`.
    fn scan(
        &mut self,
        row: u32,
        state: StateID,
        at_once: bool,
        lexemes: &mut Lexemes,
    ) -> Option<Top> {
        let by = (state, at_once);
        let next = row as usize + 1;
        if let Some(found) = self.rows.get(next).filter(|found| found.by == Some(by)) {
            return Some(Top {
                row: row + 1,
                state: found.begin,
                pending: false,
            });
        }
        let over = if at_once {
            lexemes.at_once(state)
        } else {
            lexemes.greedy(state)
        };
        self.advance(row, &over, Some(by), lexemes)
    }
}
