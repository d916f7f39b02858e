//! A row of places with weights, in which sums and the place where a sum is reached are found
//! quickly: a binary indexed tree.

/// Places made at first.
const PLACES_MIN: usize = 64;

/// A row that is filled from one end; a place that was left stays empty until ranks are closed.
#[derive(Clone, Debug)]
pub(super) struct Places<T> {
    row: Vec<Option<T>>,
    /// Entry `i` (from 1) sums the `i & -i` places up to and with place `i - 1`. Its length is a
    /// power of two and one more.
    tree: Vec<u64>,
    weights: Vec<u64>,
    /// No place before this one is taken.
    first: usize,
    taken: usize,
    sum: u64,
}

impl<T> Default for Places<T> {
    fn default() -> Self {
        Self {
            row: Vec::new(),
            tree: vec![0; PLACES_MIN + 1],
            weights: vec![0; PLACES_MIN],
            first: 0,
            taken: 0,
            sum: 0,
        }
    }
}

impl<T> Places<T> {
    /// Whether ranks have to be closed before the next one comes.
    pub(super) fn is_full(&self) -> bool {
        self.row.len() == self.weights.len()
    }

    /// Takes the next place, which must exist ([`Self::is_full`]).
    pub(super) fn push(&mut self, item: T, weight: u64) -> usize {
        let place = self.row.len();
        self.row.push(Some(item));
        self.taken += 1;
        self.weights[place] = weight;
        self.sum += weight;
        self.change(place, |sum| sum + weight);
        place
    }

    /// Leaves a place that is taken.
    pub(super) fn remove(&mut self, place: usize, weight: u64) {
        self.row[place] = None;
        self.taken -= 1;
        self.weights[place] = 0;
        self.sum -= weight;
        self.change(place, |sum| sum - weight);
        while self.row.get(self.first).is_some_and(Option::is_none) {
            self.first += 1;
        }
    }

    /// Moves everybody up to the first places, with room for as many more; `moved` hears of each.
    pub(super) fn close_ranks(&mut self, mut moved: impl FnMut(usize, &T)) {
        let room = (2 * self.taken + 1).next_power_of_two().max(PLACES_MIN);
        let row = std::mem::take(&mut self.row);
        let weights = std::mem::replace(&mut self.weights, vec![0; room]);
        self.tree = vec![0; room + 1];
        (self.first, self.taken, self.sum) = (0, 0, 0);
        for (item, weight) in row.into_iter().zip(weights) {
            if let Some(item) = item {
                moved(self.row.len(), &item);
                self.push(item, weight);
            }
        }
    }

    /// The first who has a place.
    pub(super) fn first(&self) -> Option<&T> {
        self.at(self.first)
    }

    /// Who has this place.
    pub(super) fn at(&self, place: usize) -> Option<&T> {
        self.row.get(place)?.as_ref()
    }

    /// All weights.
    pub(super) fn sum(&self) -> u64 {
        self.sum
    }

    /// The weights up to and with a place.
    pub(super) fn sum_to(&self, place: usize) -> u64 {
        let mut sum = 0;
        let mut at = place + 1;
        while at > 0 {
            sum += self.tree[at];
            at &= at - 1;
        }
        sum
    }

    /// The first place up to which the weights reach `wanted`, which is more than 0.
    pub(super) fn reach(&self, wanted: u64) -> Option<usize> {
        if self.sum < wanted {
            return None;
        }
        let (mut at, mut left) = (0, wanted);
        let mut step = self.weights.len();
        while step > 0 {
            if let Some(sum) = self.tree.get(at + step)
                && *sum < left
            {
                at += step;
                left -= sum;
            }
            step /= 2;
        }
        Some(at)
    }

    fn change(&mut self, place: usize, new: impl Fn(u64) -> u64) {
        let mut at = place + 1;
        while let Some(sum) = self.tree.get_mut(at) {
            *sum = new(*sum);
            at += at & at.wrapping_neg();
        }
    }
}
