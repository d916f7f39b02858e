//! Which requests come, and when? Users of a closed loop, or copies of an open one.
//!
//! Closed loop: each user plays one session after another, drawn at random from the slice. The
//! first one is entered at a random request (the residual life of a session met at a random time),
//! so that a run does not start with all users at their first turn. Open loop: the trace's own
//! times, a little later by session. Each copy and each user's session has private prefixes of its
//! own; system prompts are common to all.

#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::sync::Arc;

use crate::random::{Random, mix};
use crate::scenario::{Load, Scenario, Slice};
use crate::trace::Trace;

/// The first turns of all users come within this time.
const START_WITHIN_MS: f64 = 300_000.0;
/// After a session's end its user pauses at least so long, and up to so much longer.
const NEXT_SESSION_MS: (f64, f64) = (5_000.0, 25_000.0);
/// The share of a roaming session's requests that come from another region.
const ROAMS_SHARE: f64 = 0.3;

/// A request that will come.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) struct Coming {
    pub(crate) at_ms: f64,
    /// Its number in the trace.
    pub(crate) request: u32,
    /// Whose: a session as it is played.
    pub(crate) play: u32,
}

/// A session as one user plays it.
#[derive(Clone, Debug)]
struct Play {
    /// Private blocks are shifted by this.
    first_private: u32,
    trace_first_private: u32,
    session: u32,
    user: u32,
    region: usize,
    does_roam: bool,
    /// Requests that have come or will, and have not ended.
    open: u32,
}

/// What comes, one after another.
pub(crate) struct Arrivals<'a> {
    trace: &'a Trace,
    scenario: &'a Scenario,
    random: Random,
    users: Vec<User>,
    plays: Vec<Play>,
    next_private: u32,
}

struct User {
    random: Random,
    region: usize,
}

impl<'a> Arrivals<'a> {
    /// The load of a scenario and the requests known from the start.
    pub(crate) fn new(trace: &'a Trace, scenario: &'a Scenario) -> (Self, Vec<Coming>) {
        let mut arrivals = Self {
            trace,
            scenario,
            random: Random::new(scenario.seed),
            users: Vec::new(),
            plays: Vec::new(),
            next_private: trace.blocks(),
        };
        let coming = match scenario.load {
            Load::Users(users) => arrivals.start_users(users),
            Load::Copies { copies, speed } => arrivals.start_copies(copies, speed),
        };
        (arrivals, coming)
    }

    /// Blocks that have been named so far; all are below this.
    pub(crate) fn blocks_end(&self) -> u32 {
        self.next_private
    }

    /// The path of a request as this session plays it.
    pub(crate) fn path(&self, request: u32, play: u32) -> Arc<[u32]> {
        let play = &self.plays[play as usize];
        let own = |block: &u32| {
            if self.trace.is_shared(*block) {
                *block
            } else {
                play.first_private + (*block - play.trace_first_private)
            }
        };
        self.trace.path(request).iter().map(own).collect()
    }

    /// Where a request enters.
    pub(crate) fn region(&self, request: u32, play: u32) -> usize {
        let play = &self.plays[play as usize];
        let regions = self.scenario.fleet.regions;
        let seed = self.scenario.seed
            ^ (u64::from(play.user) << 40)
            ^ (u64::from(play.session) << 20)
            ^ u64::from(request);
        let mut random = Random::new(mix(seed));
        if play.does_roam && regions > 1 && random.unit() < ROAMS_SHARE {
            return (play.region + 1 + random.below(regions - 1)) % regions;
        }
        play.region
    }

    /// What follows from a request's end.
    pub(crate) fn ended(&mut self, request: u32, play: u32, at_ms: f64) -> Vec<Coming> {
        if matches!(self.scenario.load, Load::Copies { .. }) {
            return Vec::new();
        }
        let followers = &self.trace.requests[request as usize].followers;
        let open = &mut self.plays[play as usize].open;
        *open += followers.len() as u32;
        *open -= 1;
        if *open == 0 {
            return vec![self.next_session(play, at_ms)];
        }
        let think_ms = |follower: u32| {
            let think_ms = self.trace.requests[follower as usize].think_ms;
            think_ms.min(self.scenario.think_ms_max)
        };
        let coming = |&follower: &u32| Coming {
            at_ms: at_ms + think_ms(follower),
            request: follower,
            play,
        };
        followers.iter().map(coming).collect()
    }

    fn next_session(&mut self, play: u32, at_ms: f64) -> Coming {
        let user = self.plays[play as usize].user;
        let next = self.play_for(user);
        let pause_ms =
            NEXT_SESSION_MS.0 + self.users[user as usize].random.unit() * NEXT_SESSION_MS.1;
        let session = self.plays[next as usize].session;
        Coming {
            at_ms: at_ms + pause_ms,
            request: self.trace.sessions[session as usize].requests[0],
            play: next,
        }
    }

    fn start_users(&mut self, users: usize) -> Vec<Coming> {
        for user in 0..users as u64 {
            let seed = self.scenario.seed.wrapping_mul(1_000_003) + user;
            let region = self.pick_region();
            self.users.push(User {
                random: Random::new(mix(seed)),
                region,
            });
        }
        let first = |user: u32| {
            let play = self.play_for(user);
            let session = self.plays[play as usize].session as usize;
            let requests = &self.trace.sessions[session].requests;
            let random = &mut self.users[user as usize].random;
            let request = requests[random.below(requests.len())];
            let at_ms = random.unit() * START_WITHIN_MS;
            Coming {
                at_ms,
                request,
                play,
            }
        };
        (0..users as u32).map(first).collect()
    }

    fn start_copies(&mut self, copies: usize, speed: f64) -> Vec<Coming> {
        let requests = &self.trace.requests;
        let chosen: Vec<usize> = (0..requests.len())
            .filter(|&r| is_in_slice(self.trace, r, self.scenario))
            .collect();
        let first_ms = chosen
            .iter()
            .map(|&r| requests[r].at_ms)
            .fold(f64::INFINITY, f64::min);
        let mut coming = Vec::with_capacity(chosen.len() * copies);
        for copy in 0..copies as u32 {
            let first_private = self.next_private;
            self.next_private += self.trace.blocks();
            let mut by_session: HashMap<u32, u32> = HashMap::new();
            for &request in &chosen {
                let session = requests[request].session;
                let play = *by_session
                    .entry(session)
                    .or_insert_with(|| self.copy_play(copy, session, first_private));
                let seed = self.scenario.seed ^ (u64::from(copy) << 32) ^ u64::from(session);
                let late_ms = Random::new(mix(seed)).unit() * self.scenario.jitter_ms;
                coming.push(Coming {
                    at_ms: (requests[request].at_ms - first_ms) / speed + late_ms,
                    request: request as u32,
                    play,
                });
            }
        }
        coming
    }

    fn copy_play(&mut self, copy: u32, session: u32, first_private: u32) -> u32 {
        let region = self.pick_region();
        let does_roam = self.random.unit() < self.scenario.roam;
        self.plays.push(Play {
            first_private,
            trace_first_private: 0,
            session,
            user: copy,
            region,
            does_roam,
            open: 0,
        });
        self.plays.len() as u32 - 1
    }

    /// A session of the slice for this user.
    fn play_for(&mut self, user: u32) -> u32 {
        let User { random, region } = &mut self.users[user as usize];
        let session = loop {
            let session = random.below(self.trace.sessions.len());
            let requests = &self.trace.sessions[session].requests;
            if let Some(&first) = requests.first()
                && is_in_slice(self.trace, first as usize, self.scenario)
            {
                break session;
            }
        };
        let private = &self.trace.sessions[session].private;
        let first_private = self.next_private;
        self.next_private += private.end - private.start;
        self.plays.push(Play {
            first_private,
            trace_first_private: private.start,
            session: session as u32,
            user,
            region: *region,
            does_roam: random.unit() < self.scenario.roam,
            open: 1,
        });
        self.plays.len() as u32 - 1
    }

    fn pick_region(&mut self) -> usize {
        let weights = &self.scenario.region_weights;
        let mut left = self.random.unit() * weights.iter().sum::<f64>();
        for (region, weight) in weights.iter().enumerate() {
            left -= weight;
            if left < 0.0 {
                return region;
            }
        }
        0
    }
}

/// Whether a request (open loop) or its session (closed loop) belongs to the slice.
fn is_in_slice(trace: &Trace, request: usize, scenario: &Scenario) -> bool {
    let request = &trace.requests[request];
    let is_held = match scenario.load {
        Load::Users(_) => mix(u64::from(request.session) + 77).is_multiple_of(5),
        Load::Copies { .. } => request.at_ms >= trace.length_ms * 2.0 / 3.0,
    };
    match scenario.slice {
        Slice::All => true,
        Slice::Held => is_held,
        Slice::Dev => !is_held,
    }
}

/// Whether the scenario's slice of a trace has anything to play; an empty one would be drawn from
/// for ever.
pub fn has_requests(trace: &Trace, scenario: &Scenario) -> bool {
    let mut firsts = trace.sessions.iter().filter_map(|s| s.requests.first());
    match scenario.load {
        Load::Users(_) => firsts.any(|&r| is_in_slice(trace, r as usize, scenario)),
        Load::Copies { .. } => (0..trace.requests.len()).any(|r| is_in_slice(trace, r, scenario)),
    }
}
