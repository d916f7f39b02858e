//! How does a row of the chart follow from the one before?
//!
//! The three rules of Earley's algorithm, on lexemes: scan what waits for a lexeme that is over,
//! predict what may begin, complete what is finished. Then the costs of the row: what each symbol
//! that it waits for leaves to be written.

use std::hash::{DefaultHasher, Hash, Hasher};

use llguidance::HashSet;
use llguidance::earley::regexvec::StateID;

use super::{Chart, Item, Row, Top, Up};
use crate::lexemes::Lexemes;
use crate::rules::{END, NEVER};

/// A row with more items than this is given up. The grammar library gives up at half of it, so that
/// it is the one that says so.
const ROW_ITEMS_MAX: usize = 4000;

impl Chart {
    /// The row behind lexemes that are over; none if the grammar does not go on with them.
    pub(super) fn advance(
        &mut self,
        row: u32,
        over: &[u32],
        by: Option<(StateID, bool)>,
        lexemes: &mut Lexemes,
    ) -> Option<Top> {
        self.drop_rows_behind(row);
        let skipped = over.iter().any(|lexeme| lexemes.is_skip(*lexeme));
        let begin = self.items.len();
        for at in self.rows[row as usize].items.clone() {
            let item = self.items[at];
            if skipped {
                self.items.push(item);
            } else if self
                .waits_for_lexeme(item)
                .is_some_and(|lexeme| over.contains(&lexeme))
            {
                self.items.push(Item {
                    dot: item.dot + 1,
                    from: item.from,
                });
            }
        }
        if self.items.len() == begin {
            return None;
        }
        if skipped {
            let here = row + 1;
            self.finish_row(begin, here, by, lexemes);
        } else if !self.close(begin, by, lexemes) {
            return None;
        }
        Some(Top {
            row: row + 1,
            state: self.rows[row as usize + 1].begin,
            pending: false,
        })
    }

    fn drop_rows_behind(&mut self, row: u32) {
        if let Some(next) = self.rows.get(row as usize + 1) {
            self.items.truncate(next.items.start);
            self.ups.truncate(next.ups.start);
            self.rows.truncate(row as usize + 1);
        }
    }

    /// Makes a row of the items from `begin` on and all that follows from them.
    pub(super) fn close(
        &mut self,
        begin: usize,
        by: Option<(StateID, bool)>,
        lexemes: &mut Lexemes,
    ) -> bool {
        let here = u32::try_from(self.rows.len()).unwrap_or(END);
        let mut seen: HashSet<Item> = self.items[begin..].iter().copied().collect();
        let mut predicted: HashSet<u32> = HashSet::default();
        if here == 0 {
            predicted.insert(self.rules.start);
        }
        let mut at = begin;
        while at < self.items.len() {
            let item = self.items[at];
            at += 1;
            let symbol = self.rules.at(item.dot);
            let advanced = Item {
                dot: item.dot + 1,
                from: item.from,
            };
            if symbol == END {
                self.complete(item, here, &mut seen);
                continue;
            }
            let known = self.rules.symbol(symbol);
            if known.lexeme.is_none() && predicted.insert(symbol) {
                for dot in &known.rules {
                    let item = Item {
                        dot: *dot,
                        from: here,
                    };
                    if seen.insert(item) {
                        self.items.push(item);
                    }
                }
            }
            if known.nullable && seen.insert(advanced) {
                self.items.push(advanced);
            }
            if self.items.len() - begin > ROW_ITEMS_MAX {
                self.items.truncate(begin);
                return false;
            }
        }
        self.finish_row(begin, here, by, lexemes);
        true
    }

    /// Moves on what waited for a symbol that is complete. One that is empty was moved on when it
    /// was predicted.
    fn complete(&mut self, item: Item, here: u32, seen: &mut HashSet<Item>) {
        if item.from >= here {
            return;
        }
        let owner = self.rules.owner[item.dot as usize];
        for at in self.rows[item.from as usize].items.clone() {
            let waiting = self.items[at];
            if self.rules.at(waiting.dot) == owner {
                let advanced = Item {
                    dot: waiting.dot + 1,
                    from: waiting.from,
                };
                if seen.insert(advanced) {
                    self.items.push(advanced);
                }
            }
        }
    }

    fn finish_row(
        &mut self,
        begin: usize,
        here: u32,
        by: Option<(StateID, bool)>,
        lexemes: &mut Lexemes,
    ) {
        let ups = self.ups.len();
        self.rows.push(Row {
            items: begin..self.items.len(),
            ups: ups..ups,
            begin: StateID::DEAD,
            by,
            hash: self.hash(begin),
            least: NEVER,
            most: 0,
        });
        self.find_ups(begin, here);
        let (least, most) = self.costs(begin);
        let wanted = self.lexemes_of_row(begin, here, lexemes);
        let state = lexemes.begin(&wanted);
        let row = &mut self.rows[here as usize];
        row.begin = state;
        row.least = least;
        row.most = most;
    }

    fn hash(&self, begin: usize) -> u64 {
        let mut hasher = DefaultHasher::new();
        self.rows.last().map(|row| row.hash).hash(&mut hasher);
        self.items[begin..].hash(&mut hasher);
        hasher.finish()
    }

    /// For each symbol that the last row waits for: what is left after it. A symbol may be waited
    /// for by a rule of the same row, so this goes on until nothing changes.
    fn find_ups(&mut self, begin: usize, here: u32) {
        let mut waiting: Vec<(u32, Item)> = Vec::new();
        let mut symbols: Vec<u32> = Vec::new();
        for item in &self.items[begin..] {
            let symbol = self.rules.at(item.dot);
            if symbol != END && self.rules.symbol(symbol).lexeme.is_none() {
                waiting.push((symbol, *item));
                symbols.push(symbol);
            }
        }
        if here == 0 {
            symbols.push(self.rules.start);
        }
        symbols.sort_unstable();
        symbols.dedup();
        let from = self.ups.len();
        for symbol in symbols {
            let ends = here == 0 && symbol == self.rules.start;
            self.ups.push(Up {
                symbol,
                least: if ends { 0 } else { NEVER },
                via: None,
                most: 0,
            });
        }
        self.rows[here as usize].ups = from..self.ups.len();
        let mut changed = true;
        while changed {
            changed = false;
            for (symbol, item) in &waiting {
                let least = self.after(*item);
                let owner = self.rules.owner[item.dot as usize];
                let above = self.up(item.from, owner).map_or(0, |up| up.most);
                let most = if least >= NEVER {
                    above
                } else {
                    above.max(least)
                };
                let ups = &mut self.ups[from..];
                let Ok(at) = ups.binary_search_by_key(symbol, |up| up.symbol) else {
                    continue;
                };
                if least < ups[at].least {
                    ups[at].least = least;
                    ups[at].via = Some(*item);
                    changed = true;
                }
                if most > ups[at].most {
                    ups[at].most = most;
                    changed = true;
                }
            }
        }
    }

    /// The least and the most of what finishes the answer from the last row.
    fn costs(&self, begin: usize) -> (u32, u32) {
        let (mut least, mut most) = (NEVER, 0);
        for item in &self.items[begin..] {
            let owner = self.rules.owner[item.dot as usize];
            let Some(up) = self.up(item.from, owner) else {
                continue;
            };
            let rest = self.rules.tail(item.dot).saturating_add(up.least);
            if rest < NEVER {
                least = least.min(rest);
                most = most.max(rest);
            }
            most = most.max(up.most);
        }
        (least, most)
    }

    fn lexemes_of_row(&self, begin: usize, here: u32, lexemes: &Lexemes) -> Vec<u32> {
        let mut wanted: Vec<u32> = Vec::new();
        for item in &self.items[begin..] {
            let symbol = self.rules.at(item.dot);
            if symbol == END {
                continue;
            }
            let symbol = self.rules.symbol(symbol);
            if let Some(lexeme) = symbol.lexeme {
                wanted.push(lexeme);
                // White space may come before any lexeme but an answer's first.
                if here > 0 {
                    wanted.extend(lexemes.skip(symbol.class));
                }
            }
        }
        wanted.sort_unstable();
        wanted.dedup();
        wanted
    }
}
