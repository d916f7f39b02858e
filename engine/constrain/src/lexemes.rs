//! How does a lexeme go on, and what ends it soonest?
//!
//! The automaton over all lexemes of a grammar, built lazily: the same that the grammar library
//! walks, but a copy, since it does not show its own. Shared by all answers of a grammar.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use llguidance::earley::CGrammar;
use llguidance::earley::lexerspec::{LexemeIdx, LexerSpec};
use llguidance::earley::regexvec::{LexemeSet, NextByte, RegexVec, StateID};

use crate::limits;
use crate::vocabulary::Vocabulary;

/// States that a search for the end of a lexeme may see. The end of a string with `minLength` 4096
/// is about that far away.
const END_STATES_MAX: usize = 20_000;
/// States of a lexeme that are looked at for the worst of them.
const WORST_STATES_MAX: usize = 256;
/// Work that one search may cost, in the library's unit of about 100 ns.
const FUEL: u64 = 500_000;
/// A look-up of a transition that is known takes about 10 ns.
const LOOKUPS_PER_UNIT: u64 = 8;
/// Ends that are remembered.
const ENDS_MAX: usize = 20_000;

/// The shortest text that ends a lexeme.
#[derive(Debug)]
pub(crate) struct End {
    pub(crate) text: Vec<u8>,
    /// Its tokens, where it is tokenized alone.
    pub(crate) tokens: Vec<u32>,
}

impl End {
    pub(crate) fn cost(&self) -> u32 {
        u32::try_from(self.tokens.len()).unwrap_or(u32::MAX)
    }
}

/// What a lexeme stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Text,
    /// A control token.
    Marker(u32),
    /// White space between lexemes, or nothing that an answer may hold.
    Other,
}

/// Where a byte leads.
pub(crate) enum Step {
    /// Further into a lexeme.
    Inside(StateID),
    /// The lexemes that are accepted in this state are over, with this byte.
    OverWith(StateID),
    /// They were over before this byte, which begins the next.
    OverBefore(StateID),
    Dead,
}

/// The lexemes of a grammar.
pub(crate) struct Lexemes {
    dfa: RegexVec,
    kinds: Vec<Kind>,
    skips: Vec<Option<u32>>,
    lazy: LexemeSet,
    /// One byte of each class that the automaton tells apart, those of readable text first.
    bytes: Vec<u8>,
    ends: HashMap<(StateID, u32, bool), Option<Arc<End>>>,
    /// Transitions that were looked up.
    looked: u64,
    vocabulary: Vocabulary,
}

impl Lexemes {
    /// The lexemes of this grammar; in an error's case what keeps it from being followed.
    pub(crate) fn new(grammar: &CGrammar, vocabulary: &Vocabulary) -> Result<Self, String> {
        let spec = grammar.lexer_spec();
        if spec.has_stop || spec.has_max_tokens || spec.has_temperature {
            return Err(
                "stop=, max_tokens= and temperature= in rules are not taken; use suffix=, and \
                 the request's own fields"
                    .to_owned(),
            );
        }
        if grammar.parametric() {
            return Err("parameters of rules are not taken".to_owned());
        }
        let dfa = spec
            .to_regex_vec(&mut limits::parser())
            .map_err(|error| error.to_string())?;
        let kinds = kinds(spec, vocabulary);
        let skips = spec
            .skip_by_class
            .iter()
            .map(|lexeme| Some(lexeme.0))
            .collect();
        Ok(Self {
            bytes: classes(&dfa),
            dfa,
            kinds,
            skips,
            lazy: spec.lazy_lexemes(),
            ends: HashMap::new(),
            looked: 0,
            vocabulary: vocabulary.clone(),
        })
    }

    pub(crate) fn kind(&self, lexeme: u32) -> Kind {
        self.kinds[lexeme as usize]
    }

    /// The lexeme of the white space of a class.
    pub(crate) fn skip(&self, class: usize) -> Option<u32> {
        self.skips.get(class).copied().flatten()
    }

    pub(crate) fn is_skip(&self, lexeme: u32) -> bool {
        self.skips.contains(&Some(lexeme))
    }

    /// Whether the automaton has run out of room or work; then nothing it says counts.
    pub(crate) fn is_exhausted(&self) -> bool {
        self.dfa.has_error()
    }

    pub(crate) fn begin(&mut self, lexemes: &[u32]) -> StateID {
        let set = self.set(lexemes);
        self.dfa.initial_state(&set)
    }

    fn set(&self, lexemes: &[u32]) -> LexemeSet {
        let mut set = LexemeSet::new(self.kinds.len());
        for lexeme in lexemes {
            set.add(LexemeIdx(*lexeme));
        }
        set
    }

    /// Where a byte leads from a state. `pending`: whether the lexeme has begun.
    pub(crate) fn step(&mut self, state: StateID, byte: u8, pending: bool) -> Step {
        self.dfa.set_fuel(FUEL);
        self.looked += 1;
        let next = self.dfa.transition(state, byte);
        if next.is_dead() {
            if pending && self.dfa.state_desc(state).greedy_accepting.is_some() {
                return Step::OverBefore(state);
            }
            return Step::Dead;
        }
        if next.has_lowest_match() {
            return Step::OverWith(next);
        }
        Step::Inside(next)
    }

    /// The state behind a byte that begins a lexeme, and whether that byte is all of it.
    pub(crate) fn first(&mut self, begin: StateID, byte: u8) -> Option<(StateID, bool)> {
        let next = self.dfa.transition(begin, byte);
        if next.is_dead() {
            return None;
        }
        Some((next, self.dfa.next_byte(next) == NextByte::ForcedEOI))
    }

    /// The lexemes that end in a state by being as long as they can.
    pub(crate) fn greedy(&self, state: StateID) -> Vec<u32> {
        let accepting = &self.dfa.state_desc(state).greedy_accepting;
        accepting.as_slice().iter().map(|lexeme| lexeme.0).collect()
    }

    /// The lexemes that end in a state at once.
    pub(crate) fn at_once(&self, state: StateID) -> Vec<u32> {
        let accepting = &self.dfa.state_desc(state).lazy_accepting;
        accepting.as_slice().iter().map(|lexeme| lexeme.0).collect()
    }

    pub(crate) fn may_be(&self, state: StateID, lexeme: u32) -> bool {
        self.dfa
            .state_desc(state)
            .possible
            .contains(LexemeIdx(lexeme))
    }

    /// What ends a lexeme soonest. One that has not begun needs a byte at least.
    pub(crate) fn end(&mut self, state: StateID, lexeme: u32, begun: bool) -> Option<Arc<End>> {
        let key = (state, lexeme, begun);
        if let Some(end) = self.ends.get(&key) {
            return end.clone();
        }
        let end = match self.kind(lexeme) {
            Kind::Marker(token) if !begun => Some(Arc::new(End {
                text: Vec::new(),
                tokens: vec![token],
            })),
            Kind::Text => self.search(state, lexeme, begun).map(|text| {
                let tokens = self.vocabulary.tokenize(&text);
                Arc::new(End { text, tokens })
            }),
            Kind::Marker(_) | Kind::Other => None,
        };
        if self.ends.len() >= ENDS_MAX {
            self.ends.clear();
        }
        self.ends.insert(key, end.clone());
        end
    }

    fn search(&mut self, state: StateID, lexeme: u32, begun: bool) -> Option<Vec<u8>> {
        self.dfa.set_fuel(FUEL);
        let alone = self.set(&[lexeme]);
        let from = self.dfa.limit_state_to(state, &alone);
        if begun && self.ends_in(from, lexeme) {
            return Some(Vec::new());
        }
        // How each state was reached: from which, by which byte.
        let mut reached: HashMap<StateID, (StateID, u8)> = HashMap::new();
        let mut queue = VecDeque::from([from]);
        while let Some(state) = queue.pop_front() {
            if reached.len() > END_STATES_MAX {
                return None;
            }
            self.looked += self.bytes.len() as u64;
            for at in 0..self.bytes.len() {
                let byte = self.bytes[at];
                let next = self.dfa.transition(state, byte);
                if next.is_dead() {
                    continue;
                }
                if self.ends_in(next, lexeme) {
                    return Some(path(&reached, from, state, byte));
                }
                if next != from && !next.has_lowest_match() && !reached.contains_key(&next) {
                    reached.insert(next, (state, byte));
                    queue.push_back(next);
                }
            }
        }
        None
    }

    fn ends_in(&self, state: StateID, lexeme: u32) -> bool {
        let lexeme = LexemeIdx(lexeme);
        let accepting = self.dfa.state_desc(state);
        if self.lazy.contains(lexeme) {
            accepting.lazy_accepting.contains(lexeme)
        } else {
            accepting.greedy_accepting.contains(lexeme)
        }
    }

    /// The most that ending a lexeme may cost, wherever in it an answer is: in bytes, which bound
    /// tokens. None where it has too many states to look at.
    pub(crate) fn worst(&mut self, lexeme: u32) -> Option<u32> {
        match self.kind(lexeme) {
            Kind::Marker(_) => return Some(1),
            Kind::Other => return Some(0),
            Kind::Text => {}
        }
        self.dfa.set_fuel(FUEL);
        let from = self.begin(&[lexeme]);
        let mut number: HashMap<StateID, usize> = HashMap::from([(from, 0)]);
        let mut states = vec![from];
        let mut sources: Vec<Vec<usize>> = vec![Vec::new()];
        let mut at = 0;
        while at < states.len() {
            self.looked += self.bytes.len() as u64;
            for i in 0..self.bytes.len() {
                let next = self.dfa.transition(states[at], self.bytes[i]);
                if next.is_dead() {
                    continue;
                }
                let count = states.len();
                let to = *number.entry(next).or_insert(count);
                if to == count {
                    states.push(next);
                    sources.push(Vec::new());
                }
                sources[to].push(at);
            }
            at += 1;
            if states.len() > WORST_STATES_MAX {
                return None;
            }
        }
        // Backwards from the states where it may end.
        let mut distance = vec![None; states.len()];
        let mut queue = VecDeque::new();
        for (at, state) in states.iter().enumerate() {
            if self.ends_in(*state, lexeme) {
                distance[at] = Some(0);
                queue.push_back(at);
            }
        }
        let mut worst = 0;
        while let Some(at) = queue.pop_front() {
            let here = distance[at].unwrap_or(0);
            worst = worst.max(here);
            for source in &sources[at] {
                if distance[*source].is_none() {
                    distance[*source] = Some(here + 1);
                    queue.push_back(*source);
                }
            }
        }
        Some(worst)
    }

    /// Work that was done so far, in the library's unit.
    pub(crate) fn spent(&self) -> u64 {
        self.dfa.total_fuel_spent() + self.looked / LOOKUPS_PER_UNIT
    }

    /// States that were built so far.
    pub(crate) fn states(&self) -> usize {
        self.dfa.stats().num_states
    }

    /// Bytes of memory, roughly.
    pub(crate) fn bytes(&self) -> usize {
        self.dfa.num_bytes() + self.ends.len() * 100
    }
}

fn kinds(spec: &LexerSpec, vocabulary: &Vocabulary) -> Vec<Kind> {
    let markers = spec.token_range_lexemes(&spec.all_lexemes());
    let mut kinds = vec![Kind::Text; spec.lexemes.len()];
    for (index, lexeme) in spec.lexemes.iter().enumerate() {
        let found = LexemeIdx::new(index);
        if spec.skip_by_class.contains(&found) {
            kinds[index] = Kind::Other;
        } else if let Some(marker) = markers.iter().find(|m| std::ptr::eq(**m, lexeme)) {
            let size = u32::try_from(vocabulary.size()).unwrap_or(u32::MAX);
            let token = (0..size).find(|token| marker.contains_token(*token));
            kinds[index] = token.map_or(Kind::Other, Kind::Marker);
        }
    }
    kinds
}

/// One byte for each class of bytes that the automaton does not tell apart. Plain letters come
/// first, so that filler reads as filler.
fn classes(dfa: &RegexVec) -> Vec<u8> {
    let letters = b'a'..=b'z';
    let digits = b'0'..=b'9';
    let preferred = letters.chain(digits).chain(b'A'..=b'Z').chain(0x20..=0x7e);
    let mut seen = vec![false; 256];
    let mut bytes = Vec::new();
    for byte in preferred.chain(0..=255) {
        let class = dfa.alpha().map(byte);
        if !std::mem::replace(&mut seen[class], true) {
            bytes.push(byte);
        }
    }
    bytes
}

fn path(
    reached: &HashMap<StateID, (StateID, u8)>,
    from: StateID,
    last: StateID,
    byte: u8,
) -> Vec<u8> {
    let mut text = vec![byte];
    let mut state = last;
    while state != from {
        let Some((before, byte)) = reached.get(&state) else {
            break;
        };
        text.push(*byte);
        state = *before;
    }
    text.reverse();
    text
}
