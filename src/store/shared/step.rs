//! Decisions between one read and one write of counters: [`Step`].
//!
//! Charges and corrections are decided in order, each by what those before it leave. Those that
//! have a counter in common are written as one group or not at all, since one has seen the tokens
//! of the other taken.

use std::collections::HashMap;
use std::sync::Arc;

use super::{CounterId, Write};
use crate::decision::Decision;
use crate::quota::Quota;
use crate::store::account::Account;
use crate::store::adjust::OwnedAdjust;
use crate::store::charge::OwnedCharge;
use crate::window::State;

pub(super) enum Asked {
    Charge(OwnedCharge),
    Adjust(Box<OwnedAdjust>),
}

impl Asked {
    /// Calls `found` for each quota of each line, in order.
    pub(super) fn each_counter<'a>(&'a self, mut found: impl FnMut(Account<'a>, &'a Quota)) {
        let mut each = |account: Account<'a>| {
            account.quotas.as_slice().iter().for_each(|quota| found(account, quota));
        };
        match self {
            Self::Charge(charge) => charge.as_charge().lines().for_each(|(of, _)| each(of)),
            Self::Adjust(adjust) => each(adjust.as_adjust().account),
        }
    }

    /// A charge of one counter that can pass whatever others take of it, if there is room.
    pub(super) fn is_simple(&self) -> bool {
        let Self::Charge(charge) = self else { return false };
        let charge = charge.as_charge();
        let mut lines = charge.lines().filter(|(_, cost)| *cost > 0);
        let quotas = lines.next().map(|(account, _)| account.quotas.as_slice());
        charge.len() == 1 && charge.is_plain() && matches!(quotas, Some([of]) if of.is_plain())
    }

    /// Changes `states`, of which it has those at `places`. A correction has no decision.
    fn decide(&self, now: u64, places: &[usize], states: &mut [Option<State>]) -> Option<Decision> {
        let mut next = places.iter();
        let mut load = || states[*next.next()?];
        let mut writes = Vec::new();
        let decision = match self {
            Self::Charge(charge) => {
                let write = |_, _: &_, state| writes.push(state);
                Some(charge.as_charge().decide_in_order(now, |_, _| load(), write))
            }
            Self::Adjust(adjust) => {
                writes = adjust.as_adjust().apply_in_order(now, |_| load());
                None
            }
        };
        for (place, state) in places.iter().zip(writes) {
            states[*place] = state.or(states[*place]);
        }
        decision
    }
}

impl Write {
    fn keeps_window(&self) -> bool {
        let times = |of: State| (of.start, of.end, of.until);
        self.had.is_some_and(|had| had.used >= 0 && times(had) == times(self.state))
    }

    /// The row, after others had taken some more tokens before the write.
    pub(super) fn state_after(&self, more: u64) -> State {
        State { used: self.state.used + more.min(self.room) as i64, ..self.state }
    }
}

/// The counters of several charges and corrections, and the places of each.
pub(super) struct Step {
    /// Sorted.
    pub(super) counters: Vec<CounterId>,
    quotas: Vec<Quota>,
    places: Vec<Vec<usize>>,
}

/// The rows to write, and the answers to give once they are written.
pub(super) struct DecidedStep {
    pub(super) groups: Vec<Vec<Write>>,
    /// In the order of what was asked: its group, if it has one, and its decision.
    pub(super) answers: Vec<(Option<usize>, Option<Decision>)>,
}

impl Step {
    pub(super) fn from_asked<'a>(asked: impl Iterator<Item = &'a Asked>) -> Self {
        // Few quotas are in use, and their text is made once for each step.
        let mut texts: Vec<(Quota, Arc<str>)> = Vec::new();
        let mut text = |quota: &Quota| {
            let known = texts.iter().find(|(of, _)| of.same_counter(quota));
            known.map(|(_, text)| Arc::clone(text)).unwrap_or_else(|| {
                let text = Arc::from(quota.counter());
                texts.push((*quota, Arc::clone(&text)));
                text
            })
        };
        let (mut found, mut quotas) = (HashMap::new(), Vec::new());
        let mut places: Vec<Vec<usize>> = Vec::new();
        for asked in asked {
            let mut own = Vec::new();
            asked.each_counter(|account, quota| {
                let (scope, key) = (account.scope.shared_name(), account.key.clone());
                let place = *found
                    .entry(CounterId { scope, key, window: text(quota) })
                    .or_insert(quotas.len());
                if place == quotas.len() {
                    quotas.push(*quota);
                }
                own.push(place);
            });
            places.push(own);
        }
        let mut counters: Vec<_> = found.into_iter().collect();
        counters.sort_unstable_by(|(one, _), (other, _)| {
            let keys = || one.key.as_bytes().cmp(other.key.as_bytes());
            one.scope.cmp(&other.scope).then_with(keys).then_with(|| one.window.cmp(&other.window))
        });
        let mut sorted = vec![0; counters.len()];
        counters.iter().enumerate().for_each(|(to, (_, from))| sorted[*from] = to);
        places.iter_mut().flatten().for_each(|place| *place = sorted[*place]);
        let quotas = counters.iter().map(|(_, from)| quotas[*from]).collect();
        Self { counters: counters.into_iter().map(|(id, _)| id).collect(), quotas, places }
    }

    /// In the order of the counters, what is known of that of each question, which has one.
    pub(super) fn by_counter(&self, states: Vec<State>) -> Vec<Option<State>> {
        let mut of = vec![None; self.counters.len()];
        let places = self.places.iter().flatten();
        places.zip(states).for_each(|(place, state)| of[*place] = Some(state));
        of
    }

    /// Returns whether all are charges that pass in the windows that their counters have.
    pub(super) fn passes(&self, decided: &DecidedStep) -> bool {
        let answers = self.places.iter().zip(&decided.answers);
        answers.filter(|(places, _)| !places.is_empty()).all(|(_, (group, decision))| {
            let write = group.map(|group| &decided.groups[group][0]);
            decision.as_ref().is_some_and(Decision::is_allowed)
                && write.is_some_and(|of| of.keeps_window() && of.state.until == of.state.end)
        })
    }

    /// The counters of some of what was asked.
    pub(super) fn counters_of(&self, is_one: impl Iterator<Item = bool>) -> Vec<CounterId> {
        let mut found = vec![false; self.counters.len()];
        for (places, _) in self.places.iter().zip(is_one).filter(|(_, is_one)| *is_one) {
            places.iter().for_each(|place| found[*place] = true);
        }
        let found = self.counters.iter().zip(found).filter(|(_, found)| *found);
        found.map(|(counter, _)| counter.clone()).collect()
    }

    /// Leaves out questions that are no longer wanted.
    pub(super) fn decide<'a>(
        &mut self,
        asked: impl Iterator<Item = Option<&'a Asked>>,
        now: u64,
        had: &[Option<State>],
    ) -> DecidedStep {
        let mut states = had.to_vec();
        let mut most = vec![i64::MAX; had.len()];
        let decide = |(asked, places): (Option<&Asked>, &mut Vec<usize>)| match asked {
            Some(asked) => {
                let decision = asked.decide(now, places, &mut states);
                let is_alone = places.len() == 1 && decision.is_some();
                let mut of = places.iter();
                asked.each_counter(|_, quota| {
                    let limit = if is_alone && quota.is_plain() { quota.limit() as i64 } else { 0 };
                    of.next().into_iter().for_each(|of| most[*of] = most[*of].min(limit));
                });
                decision
            }
            None => {
                places.clear();
                None
            }
        };
        let decisions: Vec<_> = asked.zip(&mut self.places).map(decide).collect();
        let joined = self.join();
        let mut groups: Vec<Vec<Write>> = Vec::new();
        let mut group_of = vec![None; self.counters.len()];
        for (place, counter) in self.counters.iter().enumerate() {
            if let Some(state) = states[place]
                && had[place] != Some(state)
            {
                let group = *group_of[joined[place]].get_or_insert(groups.len());
                if group == groups.len() {
                    groups.push(Vec::new());
                }
                let (counter, quota) = (counter.clone(), self.quotas[place]);
                // Within one window, what has passed passes as long as all of it is in the limit, and
                // what was refused is refused.
                let mut write = Write { counter, quota, had: had[place], state, room: 0 };
                if write.keeps_window() {
                    write.room = (most[place] - state.used).max(0) as u64;
                }
                groups[group].push(write);
            }
        }
        let group = |places: &Vec<usize>| places.first().and_then(|place| group_of[joined[*place]]);
        let answers = self.places.iter().map(group).zip(decisions).collect();
        DecidedStep { groups, answers }
    }

    /// Others have taken more of a counter before it was written.
    pub(super) fn note_more(&self, write: &Write, more: Option<u64>, had: &mut [Option<State>]) {
        let place = self.counters.iter().position(|of| *of == write.counter);
        if let Some(had) = place.and_then(|place| had[place].as_mut()) {
            had.used += more.unwrap_or(0).min(write.room) as i64;
        }
    }

    /// For each counter the first of those that it has to be written with.
    fn join(&self) -> Vec<usize> {
        let mut of: Vec<_> = (0..self.counters.len()).collect();
        let find = |of: &[usize], mut place: usize| {
            while of[place] != place {
                place = of[place];
            }
            place
        };
        for places in &self.places {
            for pair in places.windows(2) {
                let (one, other) = (find(&of, pair[0]), find(&of, pair[1]));
                of[one.max(other)] = one.min(other);
            }
        }
        // Each points to an earlier one, which already points to the first.
        for place in 0..of.len() {
            of[place] = of[of[place]];
        }
        of
    }
}
