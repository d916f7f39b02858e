//! How is an answer finished, and which tokens keep that possible?
//!
//! Follows an answer with a [`Chart`] and knows at every step how many tokens its shortest
//! completion needs. While the budget is far larger than anything a token could make necessary
//! (`Chart::bound`), nothing is computed. Nearer, every token that the grammar allows is tried, and
//! those are dropped that would leave more to write than the budget holds.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use toktrie::{TokTrie, TrieNode};

use crate::chart::{Chart, Place};
use crate::lexemes::Lexemes;
use crate::rules::{END, NEVER, Rules};
use crate::vocabulary::Vocabulary;

/// Tokens of the texts that are tokenized within one step to see whether they are shorter than they
/// look: some milliseconds. The tokens that lead to other texts are dropped.
const TEXT_TOKENS_PER_STEP: usize = 8_000;
/// Work of trying the tokens of one step, in the unit of [`Lexemes::spent`]: some 20 ms, twenty times
/// what the inside of a string takes. Tokens that were not reached are dropped.
const WALK_WORK_MAX: u64 = 200_000;
/// Symbols of one completion: past it, a grammar's shortest answer is too long to be one.
const SYMBOLS_MAX: usize = 100_000;

/// What all answers of a grammar share.
pub(crate) struct Plan {
    pub(crate) vocabulary: Vocabulary,
    pub(crate) rules: Arc<Rules>,
    pub(crate) lexemes: Mutex<Lexemes>,
    /// The most that one token can open anew.
    pub(crate) opened: u32,
    /// Control tokens that the grammar names.
    pub(crate) markers: Vec<u32>,
}

impl Plan {
    pub(crate) fn lexemes(&self) -> MutexGuard<'_, Lexemes> {
        self.lexemes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Tokens after which an answer is in the same state.
struct Class {
    least: u32,
    /// Tokens of the shortest completion's text, once it was tokenized.
    exact: Option<usize>,
    tokens: Vec<u32>,
}

/// Follows one answer.
pub(crate) struct Finisher {
    plan: Arc<Plan>,
    chart: Chart,
    /// The answer went where the chart could not follow; nothing is promised any more.
    lost: bool,
    /// A completion of the answer as it is now.
    known: Option<Vec<u32>>,
    /// What each token leads to, from one state.
    classes: Option<(Place, Vec<Class>)>,
}

impl Finisher {
    pub(crate) fn new(plan: Arc<Plan>) -> Self {
        let chart = Chart::new(Arc::clone(&plan.rules), &mut plan.lexemes());
        Self {
            plan,
            chart,
            lost: false,
            known: None,
            classes: None,
        }
    }

    /// Follows a token that was taken.
    pub(crate) fn commit(&mut self, token: u32) {
        if self.lost {
            return;
        }
        self.known = match self.known.take() {
            Some(mut known) if known.first() == Some(&token) => {
                known.remove(0);
                Some(known)
            }
            _ => None,
        };
        let plan = Arc::clone(&self.plan);
        let mut lexemes = plan.lexemes();
        let taken = push(&mut self.chart, token, &plan.vocabulary, &mut lexemes);
        self.chart.settle();
        self.lost = !taken || lexemes.is_exhausted();
    }

    /// Whether any token may follow without a look at what it leaves to be written.
    pub(crate) fn is_far(&self, left: usize) -> bool {
        self.lost || left > self.chart.bound(self.plan.opened) as usize
    }

    /// Tokens of the shortest completion; none where none is known.
    pub(crate) fn shortest(&mut self) -> Option<&[u32]> {
        if self.lost {
            return None;
        }
        let plan = Arc::clone(&self.plan);
        let found = completion(&self.chart, &plan, &mut plan.lexemes());
        self.known = match (self.known.take(), found) {
            (Some(known), Some(found)) if found.len() < known.len() => Some(found),
            (Some(known), _) => Some(known),
            (None, found) => found,
        };
        self.known.as_deref()
    }

    /// Whether the shortest completion certainly takes fewer than `left` tokens, cheaply found.
    pub(crate) fn is_surely_below(&self, left: usize) -> bool {
        self.lost || (self.chart.least(&mut self.plan.lexemes()) as usize) < left
    }

    /// Whether a completion of at most `left` tokens is left after these tokens.
    pub(crate) fn survives(&mut self, tokens: &[u32], left: usize) -> bool {
        if self.lost {
            return true;
        }
        let plan = Arc::clone(&self.plan);
        let mut lexemes = plan.lexemes();
        let mut pushed = 0;
        let mut taken = true;
        for token in tokens {
            match push_counted(&mut self.chart, *token, &plan.vocabulary, &mut lexemes) {
                Some(count) => pushed += count,
                None => taken = false,
            }
        }
        let survives = taken
            && (self.chart.bound(plan.opened) as usize <= left
                || self.chart.least(&mut lexemes) as usize <= left
                || completion(&self.chart, &plan, &mut lexemes)
                    .is_some_and(|tokens| tokens.len() <= left));
        self.chart.pop(pushed);
        survives
    }

    /// The tokens, out of all, after which at most `left` tokens finish the answer.
    pub(crate) fn keep(&mut self, left: usize, mut allow: impl FnMut(u32)) {
        if let Some(first) = self.known.as_ref().and_then(|known| known.first()) {
            allow(*first);
        }
        let plan = Arc::clone(&self.plan);
        let mut lexemes = plan.lexemes();
        let place = self.chart.place();
        let mut classes = match self.classes.take() {
            Some((at, classes)) if at == place => classes,
            _ => Walk::all(&mut self.chart, &plan, &mut lexemes),
        };
        let mut tokenized = 0;
        for class in &mut classes {
            let mut need = class.least as usize;
            if class.least < NEVER && need > left && tokenized < TEXT_TOKENS_PER_STEP {
                need = match class.exact {
                    Some(exact) => exact,
                    None => {
                        tokenized += need + 64;
                        let exact = self.need_after(class.tokens[0], &plan, &mut lexemes);
                        class.exact = Some(exact);
                        exact
                    }
                };
            }
            if need <= left {
                class.tokens.iter().for_each(|token| allow(*token));
            }
        }
        self.classes = Some((place, classes));
    }

    fn need_after(&mut self, token: u32, plan: &Plan, lexemes: &mut Lexemes) -> usize {
        let Some(count) = push_counted(&mut self.chart, token, &plan.vocabulary, lexemes) else {
            return usize::MAX;
        };
        let found = completion(&self.chart, plan, lexemes);
        self.chart.pop(count);
        found.map_or(usize::MAX, |tokens| tokens.len())
    }
}

/// Tries every token from one state, along the vocabulary's trie.
struct Walk<'a> {
    chart: &'a mut Chart,
    lexemes: &'a mut Lexemes,
    trie: &'a TokTrie,
    /// Where [`Lexemes::spent`] ends the walk.
    until: u64,
    classes: Vec<Class>,
    found: HashMap<Place, usize>,
}

impl Walk<'_> {
    fn all(chart: &mut Chart, plan: &Plan, lexemes: &mut Lexemes) -> Vec<Class> {
        let trie = plan.vocabulary.trie();
        let mut walk = Walk {
            chart,
            until: lexemes.spent() + WALK_WORK_MAX,
            lexemes,
            trie,
            classes: Vec::new(),
            found: HashMap::new(),
        };
        walk.below(trie.root());
        for marker in &plan.markers {
            if walk.chart.push_marker(*marker, walk.lexemes) {
                walk.add(*marker);
                walk.chart.pop(1);
            }
        }
        walk.classes
    }

    /// The depth of the recursion is a token's length.
    fn below(&mut self, node: &TrieNode) {
        let trie = self.trie;
        for child in trie.node_children(node) {
            let byte = child.byte();
            if self.lexemes.spent() > self.until {
                return;
            }
            if byte == TokTrie::SPECIAL_TOKEN_MARKER || !self.chart.push(byte, self.lexemes) {
                continue;
            }
            if let Some(token) = child.token_id() {
                self.add(token);
            }
            self.below(child);
            self.chart.pop(1);
        }
    }

    fn add(&mut self, token: u32) {
        let place = self.chart.place();
        let at = *self.found.entry(place).or_insert(self.classes.len());
        if at == self.classes.len() {
            self.classes.push(Class {
                least: self.chart.least(self.lexemes),
                exact: None,
                tokens: Vec::new(),
            });
        }
        self.classes[at].tokens.push(token);
    }
}

fn push(chart: &mut Chart, token: u32, vocabulary: &Vocabulary, lexemes: &mut Lexemes) -> bool {
    push_counted(chart, token, vocabulary, lexemes).is_some()
}

/// How often to pop to take the token back; none, and nothing is taken, if the grammar does not
/// take it.
fn push_counted(
    chart: &mut Chart,
    token: u32,
    vocabulary: &Vocabulary,
    lexemes: &mut Lexemes,
) -> Option<usize> {
    let trie = vocabulary.trie();
    if trie.is_special_token(token) {
        return chart.push_marker(token, lexemes).then_some(1);
    }
    let bytes = trie.token(token);
    for (count, byte) in bytes.iter().enumerate() {
        if !chart.push(*byte, lexemes) {
            chart.pop(count);
            return None;
        }
    }
    Some(bytes.len())
}

/// A part of a completion.
enum Part {
    Text { bytes: Vec<u8>, tokens: Vec<u32> },
    Marker(u32),
}

/// The tokens of the shortest completion from where the chart is.
fn completion(chart: &Chart, plan: &Plan, lexemes: &mut Lexemes) -> Option<Vec<u32>> {
    let least = chart.least(lexemes);
    if least == 0 {
        return Some(Vec::new());
    }
    if least >= NEVER {
        return None;
    }
    let mut parts = Vec::new();
    let (mut item, begun) = chart.cheapest(lexemes)?;
    let mut from = item.dot;
    if let Some(end) = begun {
        add(&mut parts, &end.text, &end.tokens);
        from += 1;
    }
    let mut symbols = 0;
    loop {
        symbols += spell(from, plan, lexemes, &mut parts)?;
        if symbols > SYMBOLS_MAX {
            return None;
        }
        let owner = plan.rules.owner[item.dot as usize];
        match chart.up(item.from, owner)?.via {
            Some(next) => item = next,
            None => break,
        }
        from = item.dot + 1;
    }
    Some(tokens(&parts, &plan.vocabulary))
}

/// Spells what follows a position in its rule, the cheapest way. Says how many symbols that took.
fn spell(from: u32, plan: &Plan, lexemes: &mut Lexemes, parts: &mut Vec<Part>) -> Option<usize> {
    let rules = &plan.rules;
    let mut symbols = 0;
    let mut stack = vec![from];
    while let Some(position) = stack.pop() {
        let symbol = rules.at(position);
        if symbol == END {
            continue;
        }
        stack.push(position + 1);
        symbols += 1;
        if symbols > SYMBOLS_MAX {
            return None;
        }
        let symbol = rules.symbol(symbol);
        if let Some(lexeme) = symbol.lexeme {
            let begin = lexemes.begin(&[lexeme]);
            let end = lexemes.end(begin, lexeme, false)?;
            match (end.text.is_empty(), end.tokens.as_slice()) {
                (true, [marker]) => parts.push(Part::Marker(*marker)),
                _ => add(parts, &end.text, &end.tokens),
            }
        } else if let Some(rule) = symbol.best {
            stack.push(rule);
        }
    }
    Some(symbols)
}

fn add(parts: &mut Vec<Part>, text: &[u8], alone: &[u32]) {
    if let Some(Part::Text { bytes, tokens }) = parts.last_mut() {
        bytes.extend_from_slice(text);
        tokens.extend_from_slice(alone);
        return;
    }
    parts.push(Part::Text {
        bytes: text.to_vec(),
        tokens: alone.to_vec(),
    });
}

/// The fewest tokens for a completion: the tokenizer's own, the longest that fit, or each lexeme's.
fn tokens(parts: &[Part], vocabulary: &Vocabulary) -> Vec<u32> {
    let mut all = Vec::new();
    for part in parts {
        match part {
            Part::Marker(token) => all.push(*token),
            Part::Text { bytes, tokens } => {
                let own = vocabulary.tokenize(bytes);
                let longest = vocabulary.trie().greedy_tokenize(bytes);
                let fewest = [&own, &longest, tokens];
                let fewest = fewest.into_iter().min_by_key(|tokens| tokens.len());
                all.extend_from_slice(fewest.unwrap_or(&own));
            }
        }
    }
    all
}
