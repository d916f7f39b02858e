//! What does each part of a grammar cost at least, and at most from a bad place?
//!
//! The grammar library's rules, flattened, with two numbers for each symbol. `cost` is the fewest
//! tokens that spell it. `depth` bounds what one more token can add: inside a symbol, having entered
//! whatever one token can enter, it is the most that the cheapest way out may still cost.
//!
//! Costs count the tokens of each lexeme on its own. Their sum is an upper bound of what the whole
//! text needs, since tokens may span lexemes; it is exact enough to compare ways, and where it
//! matters the text itself is tokenized.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};

use llguidance::earley::{CGrammar, CSymIdx};

/// Marks the end of a rule.
pub(crate) const END: u32 = u32::MAX;
/// More than any budget; sums of a few of them do not overflow.
pub(crate) const NEVER: u32 = u32::MAX / 8;
/// Passes over one group of mutually recursive symbols before `depth` is called unbounded.
const PASSES_MAX: usize = 64;

/// A grammar's rules. A position in `rhs` is a rule with its dot there.
pub(crate) struct Rules {
    pub(crate) start: u32,
    pub(crate) symbols: Vec<Symbol>,
    pub(crate) rhs: Vec<u32>,
    /// The left side of the rule that a position belongs to.
    pub(crate) owner: Vec<u32>,
    /// What the symbols from a position to its rule's end cost at least.
    pub(crate) tail: Vec<u32>,
}

/// A symbol of the grammar.
pub(crate) struct Symbol {
    /// The lexeme that a terminal stands for.
    pub(crate) lexeme: Option<u32>,
    pub(crate) nullable: bool,
    /// Where its rules begin in `rhs`.
    pub(crate) rules: Vec<u32>,
    /// Whose white space may be skipped before it.
    pub(crate) class: usize,
    pub(crate) cost: u32,
    /// The cheapest rule; none where the empty text is, or for a terminal.
    pub(crate) best: Option<u32>,
    pub(crate) depth: u32,
}

impl Rules {
    /// The rules that the start symbol reaches. Costs are not known yet.
    pub(crate) fn new(grammar: &CGrammar) -> Self {
        let mut found: HashMap<usize, u32> = HashMap::new();
        let mut order: Vec<CSymIdx> = Vec::new();
        let mut reach = |symbol: CSymIdx, order: &mut Vec<CSymIdx>| -> u32 {
            let next = u32::try_from(order.len()).unwrap_or(END - 1);
            *found.entry(symbol.as_index()).or_insert_with(|| {
                order.push(symbol);
                next
            })
        };
        let mut rules = Self {
            start: reach(grammar.start(), &mut order),
            symbols: Vec::new(),
            rhs: Vec::new(),
            owner: Vec::new(),
            tail: Vec::new(),
        };
        let mut at = 0;
        while at < order.len() {
            let data = grammar.sym_data(order[at]);
            let lhs = u32::try_from(at).unwrap_or(END - 1);
            let mut begins = Vec::new();
            for rule in grammar.rules_of(order[at]) {
                begins.push(u32::try_from(rules.rhs.len()).unwrap_or(END - 1));
                for symbol in grammar.rule_rhs(*rule).0 {
                    rules.rhs.push(reach(*symbol, &mut order));
                }
                rules.rhs.push(END);
                rules.owner.resize(rules.rhs.len(), lhs);
            }
            rules.symbols.push(Symbol {
                lexeme: data.lexeme.map(|lexeme| lexeme.0),
                nullable: data.is_nullable,
                rules: begins,
                class: data.props.grammar_id.as_usize(),
                cost: if data.is_nullable { 0 } else { NEVER },
                best: None,
                depth: NEVER,
            });
            at += 1;
        }
        rules
    }

    pub(crate) fn at(&self, position: u32) -> u32 {
        self.rhs[position as usize]
    }

    pub(crate) fn symbol(&self, symbol: u32) -> &Symbol {
        &self.symbols[symbol as usize]
    }

    pub(crate) fn tail(&self, position: u32) -> u32 {
        self.tail[position as usize]
    }

    /// Fills in costs and depths from those of the terminals: `lexeme` gives a lexeme's cost and
    /// depth. `entries` is how often one token can enter a recursive symbol anew.
    pub(crate) fn weigh(&mut self, mut lexeme: impl FnMut(u32) -> (u32, u32), entries: usize) {
        for symbol in &mut self.symbols {
            if let Some(index) = symbol.lexeme {
                (symbol.cost, symbol.depth) = lexeme(index);
            }
        }
        self.cheapest();
        self.tail = vec![0; self.rhs.len()];
        for position in (0..self.rhs.len()).rev() {
            if self.rhs[position] != END {
                let cost = self.symbols[self.rhs[position] as usize].cost;
                self.tail[position] = cost.saturating_add(self.tail[position + 1]).min(NEVER);
            }
        }
        self.deepest(entries);
    }

    /// Knuth's generalisation of Dijkstra's algorithm: a symbol is settled once its cheapest rule
    /// has only settled symbols.
    fn cheapest(&mut self) {
        let mut uses: Vec<Vec<u32>> = vec![Vec::new(); self.symbols.len()];
        let mut open: HashMap<u32, (u32, u32)> = HashMap::new();
        let mut heap = BinaryHeap::new();
        for (index, symbol) in self.symbols.iter().enumerate() {
            if symbol.lexeme.is_some() || symbol.nullable {
                heap.push(Reverse((symbol.cost, index)));
            }
            for rule in &symbol.rules {
                let mut length = 0;
                while self.rhs[(*rule + length) as usize] != END {
                    uses[self.rhs[(*rule + length) as usize] as usize].push(*rule);
                    length += 1;
                }
                open.insert(*rule, (length, 0));
            }
        }
        let mut settled = vec![false; self.symbols.len()];
        while let Some(Reverse((cost, index))) = heap.pop() {
            if std::mem::replace(&mut settled[index], true) {
                continue;
            }
            for rule in &uses[index] {
                let Some((left, sum)) = open.get_mut(rule) else {
                    continue;
                };
                *left -= 1;
                *sum = sum.saturating_add(cost).min(NEVER);
                let owner = self.owner[*rule as usize] as usize;
                if *left == 0 && *sum < self.symbols[owner].cost {
                    self.symbols[owner].cost = *sum;
                    self.symbols[owner].best = Some(*rule);
                    heap.push(Reverse((*sum, owner)));
                }
            }
        }
    }

    /// `depth` of every symbol, groups of mutually recursive ones from the leaves up.
    fn deepest(&mut self, entries: usize) {
        let groups = self.groups();
        let mut group_of = vec![0; self.symbols.len()];
        for (number, group) in groups.iter().enumerate() {
            for symbol in group {
                group_of[*symbol as usize] = number;
            }
        }
        for (number, group) in groups.iter().enumerate() {
            // `below` is what a symbol of the group costs when it is entered once more.
            let mut below: HashMap<u32, u32> =
                group.iter().map(|s| (*s, self.symbol(*s).cost)).collect();
            for _ in 0..=entries {
                let depths = self.group_depths(group, number, &group_of, &below);
                let same = depths == below;
                below = depths;
                if same {
                    break;
                }
            }
            for (symbol, depth) in below {
                if self.symbol(symbol).lexeme.is_none() {
                    self.symbols[symbol as usize].depth = depth.min(NEVER);
                }
            }
        }
    }

    /// The depths of a group's symbols when entering one of them again costs `below`.
    fn group_depths(
        &self,
        group: &[u32],
        number: usize,
        group_of: &[usize],
        below: &HashMap<u32, u32>,
    ) -> HashMap<u32, u32> {
        let mut depths: HashMap<u32, u32> =
            group.iter().map(|s| (*s, self.symbol(*s).cost)).collect();
        for pass in 0.. {
            let mut changed = false;
            for lhs in group {
                let mut most = depths[lhs];
                for rule in &self.symbol(*lhs).rules {
                    let mut position = *rule;
                    // Whether something was certainly written since the rule began.
                    let mut written = false;
                    while self.at(position) != END {
                        let symbol = self.at(position);
                        let inner = if group_of[symbol as usize] != number {
                            self.symbol(symbol).depth
                        } else if written {
                            below[&symbol]
                        } else {
                            // A symbol that begins with itself: the inner one can as well be the
                            // outer one.
                            let first = if symbol == *lhs { 0 } else { depths[&symbol] };
                            let later = if position > *rule { below[&symbol] } else { 0 };
                            first.max(later)
                        };
                        most = most.max(inner.saturating_add(self.tail(position + 1)).min(NEVER));
                        written |= !self.symbol(symbol).nullable;
                        position += 1;
                    }
                }
                if most > depths[lhs] {
                    depths.insert(*lhs, most);
                    changed = true;
                }
            }
            if !changed {
                return depths;
            }
            // A simple chain of beginnings is no longer than the group.
            if pass > group.len() {
                return depths;
            }
            if pass > PASSES_MAX {
                return group.iter().map(|symbol| (*symbol, NEVER)).collect();
            }
        }
        depths
    }

    /// Strongly connected groups of symbols, each after all that it refers to (Tarjan, without
    /// recursion: a grammar may be as deep as it is long).
    fn groups(&self) -> Vec<Vec<u32>> {
        let count = self.symbols.len();
        let (mut index, mut low) = (vec![usize::MAX; count], vec![0; count]);
        let (mut on_stack, mut stack) = (vec![false; count], Vec::new());
        let (mut next, mut groups) = (0, Vec::new());
        let targets: Vec<Vec<u32>> = (0..count).map(|s| self.targets(s)).collect();
        for root in 0..count {
            if index[root] != usize::MAX {
                continue;
            }
            let mut walk = vec![(root, 0)];
            while let Some((symbol, edge)) = walk.pop() {
                if edge == 0 {
                    index[symbol] = next;
                    low[symbol] = next;
                    next += 1;
                    stack.push(symbol);
                    on_stack[symbol] = true;
                } else {
                    let done = targets[symbol][edge - 1] as usize;
                    if on_stack[done] {
                        low[symbol] = low[symbol].min(low[done]);
                    }
                }
                if let Some(target) = targets[symbol].get(edge) {
                    walk.push((symbol, edge + 1));
                    let target = *target as usize;
                    if index[target] == usize::MAX {
                        walk.push((target, 0));
                    }
                } else if low[symbol] == index[symbol] {
                    let mut group = Vec::new();
                    while let Some(member) = stack.pop() {
                        on_stack[member] = false;
                        group.push(u32::try_from(member).unwrap_or(END));
                        if member == symbol {
                            break;
                        }
                    }
                    groups.push(group);
                }
            }
        }
        groups
    }

    fn targets(&self, symbol: usize) -> Vec<u32> {
        let mut targets = Vec::new();
        for rule in &self.symbols[symbol].rules {
            let mut position = *rule;
            while self.at(position) != END {
                targets.push(self.at(position));
                position += 1;
            }
        }
        targets.sort_unstable();
        targets.dedup();
        targets
    }
}
