//! What the rules say of requests over HTTP, on top of the arithmetic's second implementation.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::iter;
use std::time::SystemTime;

use crate::instant;
use crate::reference::{
    Answer, Ask as Asks, Counter, Grid, Line as Asking, Model, Taken, Terms, Together, together,
};
use crate::setup::{Ask, LayerSetup, Setup};

/// True costs, by the names of limits.
pub(crate) type Told = Vec<(&'static str, u64)>;
/// A limit: the positions of its layer and in it.
pub(crate) type Limit = (usize, usize);
/// A limit's key, and the window and the anchor of a quota (S10).
type Identity = (Limit, u64, i128, i128);

/// The counts of a store.
#[derive(Clone, Default)]
pub(crate) struct Counts {
    all: BTreeMap<Identity, Counter>,
    /// Of a full store: which keys count together.
    pub(crate) shares: BTreeMap<u64, u64>,
}

/// A request's charge of one limit.
#[derive(Clone, Debug)]
pub(crate) struct Line {
    pub(crate) limit: Limit,
    pub(crate) name: &'static str,
    pub(crate) key: u64,
    pub(crate) terms: Vec<Terms>,
    /// The quotas are of a plan or of the key, not those of the limit.
    pub(crate) own: bool,
    pub(crate) cost: u64,
    pub(crate) shadow: bool,
}

/// A line that was decided.
pub(crate) struct Charged {
    pub(crate) line: Line,
    answer: Answer,
    /// `None`: it was refused, in shadow mode.
    pub(crate) taken: Option<Taken>,
    /// The cost that the layer counts by now.
    pub(crate) cost: u64,
    /// Since when the decision is known.
    pub(crate) known: u64,
}

/// The headers' numbers of one quota.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Standing {
    pub(crate) name: &'static str,
    pub(crate) limit: i128,
    pub(crate) used: i128,
    pub(crate) remaining: i128,
    pub(crate) reset: i128,
}

/// A limit's changes at run time.
#[derive(Clone)]
pub(crate) struct Live {
    pub(crate) quotas: Vec<Terms>,
    pub(crate) quotas_for_now: Option<(Vec<Terms>, u64)>,
    /// Nothing is limited, but for keys with quotas of their own, and while there are quotas for now.
    pub(crate) lifted: bool,
    pub(crate) shadow: bool,
    pub(crate) shadow_for_now: Option<(bool, u64)>,
    pub(crate) keys: BTreeMap<u64, (Vec<Terms>, u64)>,
}

fn identity(limit: Limit, key: u64, terms: &Terms) -> Identity {
    let anchor = match terms.grid {
        Grid::FirstRequest => -1,
        Grid::StartingAt(at) => at,
        _ => 0,
    };
    (limit, key, terms.window, anchor)
}

impl Counts {
    fn model(&self, limit: Limit, key: u64, terms: &[Terms]) -> Model {
        let mut model = Model::new(terms.len(), 0);
        model.is_shared = !self.shares.is_empty();
        for (counter, terms) in model.counters.iter_mut().zip(terms) {
            *counter = self.all.get(&identity(limit, self.share(key), terms)).copied();
        }
        model
    }

    fn share(&self, key: u64) -> u64 {
        self.shares.get(&key).copied().unwrap_or(key)
    }

    fn keep(&mut self, limit: Limit, key: u64, terms: &[Terms], model: Model) {
        for (counter, terms) in model.counters.into_iter().zip(terms) {
            if let Some(counter) = counter {
                self.all.insert(identity(limit, self.share(key), terms), counter);
            }
        }
    }

    /// Charges all lines or none (S37).
    pub(crate) fn charge(&mut self, lines: &[Line], at: u64, ask: Asks) -> Together {
        let of = |line: &Line| self.model(line.limit, line.key, &line.terms);
        let mut models: Vec<_> = lines.iter().map(of).collect();
        let asking = lines.iter().zip(&mut models);
        let mut asking: Vec<_> = asking
            .map(|(line, model)| Asking { model, terms: &line.terms, cost: line.cost.into() })
            .collect();
        let together = together(&mut asking, at.into(), ask);
        for (line, model) in lines.iter().zip(models) {
            self.keep(line.limit, line.key, &line.terms, model);
        }
        together
    }

    /// Returns whether the lines of the first request in a queue could pass. If not, it has been
    /// refused, which writes what a step back has moved (S4).
    pub(crate) fn could_pass(&mut self, lines: &[Line], at: u64) -> bool {
        let allowed = self.charge(lines, at, Asks::Peek).allowed;
        if !allowed {
            self.charge(lines, at, Asks::Charge);
        }
        allowed
    }

    /// Corrects a charge to another cost (S14, S15).
    pub(crate) fn settle(
        &mut self,
        line: &Line,
        terms: &[Terms],
        taken: Taken,
        at: u64,
        actual: u64,
    ) {
        let mut model = self.model(line.limit, line.key, terms);
        model.settle(terms, taken, at.into(), actual.into());
        self.keep(line.limit, line.key, terms, model);
    }

    /// The usage of each of these quotas, and when it ends.
    pub(crate) fn standing(
        &self,
        limit: Limit,
        key: u64,
        terms: &[Terms],
        at: u64,
    ) -> Vec<(i128, SystemTime)> {
        let mut model = self.model(limit, key, terms);
        let (answer, _) = model.ask(terms, at.into(), 0, Asks::Peek);
        let resets = answer.reset.iter().map(|at| instant(*at as u64));
        answer.used.iter().copied().zip(resets).collect()
    }

    /// Returns whether it is possible: a count that others share stays.
    pub(crate) fn reset(&mut self, limit: Limit, key: u64, now: u64) -> bool {
        let key = self.share(key);
        let is_of_key = |(of, its, ..): &Identity| (*of, *its) == (limit, key);
        if self.shares.is_empty() {
            self.all.retain(|of, _| !is_of_key(of));
        }
        !self.all.iter().any(|(of, counter)| is_of_key(of) && i128::from(now) < counter.until)
    }

    /// Nothing is said of a count that a step forward has ended, if the clock steps back (S4).
    pub(crate) fn may_step_back(&self, to: u64, latest: u64) -> bool {
        let ended =
            |counter: &Counter| i128::from(to) < counter.until && counter.until <= latest.into();
        !self.all.values().any(ended)
    }

    /// When a request passes that waits behind others, if nobody else asks. Those that a lowered
    /// limit can't grant any more are refused.
    pub(crate) fn due(&self, queue: &[Vec<Line>], now: u64) -> u64 {
        let (mut counts, mut at) = (self.clone(), now);
        for lines in queue {
            loop {
                let together = counts.charge(lines, at, Asks::Charge);
                let Some(retry_at) = together.retry_at else { break };
                at = retry_at as u64;
            }
        }
        at
    }
}

impl Live {
    pub(crate) fn quotas(&self) -> &[Terms] {
        self.quotas_for_now.as_ref().map_or(&self.quotas, |(quotas, _)| quotas)
    }

    pub(crate) fn is_lifted(&self) -> bool {
        self.lifted && self.quotas_for_now.is_none()
    }

    pub(crate) fn is_shadow(&self) -> bool {
        self.shadow_for_now.map_or(self.shadow, |(shadow, _)| shadow)
    }

    /// Ends what has ended by now (S40).
    pub(crate) fn end(&mut self, now: u64) {
        self.quotas_for_now.take_if(|(_, until)| *until <= now);
        self.shadow_for_now.take_if(|(_, until)| *until <= now);
        self.keys.retain(|_, (_, until)| *until > now);
    }
}

/// The limits by position, with their changes.
pub(crate) struct Limits(pub(crate) BTreeMap<Limit, Live>);

impl Limits {
    pub(crate) fn new(setup: &Setup) -> Self {
        let limits = setup.layers.iter().enumerate().flat_map(|(layer, of)| {
            of.limits.iter().enumerate().map(move |(i, of)| {
                let live = Live {
                    quotas: of.plans[0].clone().expect("the first one is no unlimited plan"),
                    quotas_for_now: None,
                    lifted: false,
                    shadow: of.shadow,
                    shadow_for_now: None,
                    keys: BTreeMap::new(),
                };
                ((layer, i), live)
            })
        });
        Self(limits.collect())
    }

    pub(crate) fn end_changes(&mut self, layer: usize, now: u64) {
        self.0.iter_mut().filter(|(of, _)| of.0 == layer).for_each(|(_, live)| live.end(now));
    }

    /// The lines of a request in one layer. `None`: its key is missing.
    pub(crate) fn lines(
        &mut self,
        layer: usize,
        setup: &LayerSetup,
        ask: &Ask,
        now: u64,
    ) -> Option<Vec<Line>> {
        self.end_changes(layer, now);
        let mut lines = Vec::new();
        for (i, of) in setup.limits.iter().enumerate() {
            let live = &self.0[&(layer, i)];
            let shadow = live.is_shadow();
            let Some(key) = of.key(ask) else {
                if shadow {
                    continue;
                }
                return None;
            };
            let (terms, own) = match (live.keys.get(&key), &of.plans[..]) {
                (Some((terms, _)), _) => (terms.clone(), true),
                (None, [_]) if live.is_lifted() => continue,
                (None, [_]) => (live.quotas().to_vec(), false),
                (None, plans) => match &plans[ask.plan] {
                    Some(terms) => (terms.clone(), true),
                    None => continue,
                },
            };
            let cost = if of.has_costs { ask.cost } else { 1 };
            lines.push(Line { limit: (layer, i), name: of.name, key, terms, own, cost, shadow });
        }
        Some(lines)
    }

    /// The lines of a request that waits, as of now: a plan stays, and so do the quotas of a key
    /// (S40). What was in shadow mode when the request came stays beside the others. None, if all
    /// limits were lifted.
    pub(crate) fn renewed(&self, lines: &[Line]) -> Vec<Line> {
        let mut lines = lines.to_vec();
        lines.retain(|line| line.own || !self.0[&line.limit].is_lifted());
        for line in &mut lines {
            let live = &self.0[&line.limit];
            line.shadow |= live.is_shadow();
            if !line.own {
                line.terms = live.quotas().to_vec();
            }
        }
        lines
    }

    /// The quotas by which a charge is corrected (S14).
    pub(crate) fn corrected_by(&mut self, line: &Line, now: u64) -> Vec<Terms> {
        let live = self.0.get_mut(&line.limit).expect("it is there");
        live.end(now);
        let mut terms = line.terms.clone();
        for terms in terms.iter_mut().filter(|_| !line.own && !live.is_lifted()) {
            let same = |of: &&Terms| (of.window, of.grid) == (terms.window, terms.grid);
            if let Some(current) = live.quotas().iter().find(same) {
                *terms = *current;
            }
        }
        terms
    }
}

/// Returns whether a request may wait: it takes something that can be granted (S13).
pub(crate) fn may_wait(lines: &[Line]) -> bool {
    let mut enforced = lines.iter().filter(|line| !line.shadow);
    let can_grant = |line: &Line| line.terms.iter().all(|of| i128::from(line.cost) <= of.limit);
    enforced.clone().any(|line| line.cost > 0) && enforced.all(can_grant)
}

pub(crate) fn charged(lines: Vec<Line>, together: Together, known: u64) -> Vec<Charged> {
    let taken = together.taken.into_iter().flatten().map(Some).chain(iter::repeat(None));
    let each = lines.into_iter().zip(together.answers).zip(taken);
    let charged = |((line, answer), taken): ((Line, _), _)| Charged {
        cost: line.cost,
        line,
        answer,
        taken,
        known,
    };
    each.map(charged).collect()
}

pub(crate) fn seconds(ms: i128) -> i128 {
    (ms + 999) / 1_000
}

impl Setup {
    /// The true cost of a limit, if it is settled and one of these says it, the later ones first. It
    /// holds also for a response that does not count (S15).
    pub(crate) fn true_cost(&self, told: &Told, of: &Charged, counts: bool) -> u64 {
        let (layer, limit) = of.line.limit;
        let told = told.iter().rev().find(|(name, _)| *name == of.line.name);
        let told = told.filter(|_| self.layers[layer].limits[limit].settled);
        told.map_or(if counts { of.cost } else { 0 }, |(_, cost)| *cost)
    }
}

impl Standing {
    /// Returns whether an outer layer's numbers replace an inner one's, if its window still runs (S19).
    pub(crate) fn is_tighter(&self, inner: &Self) -> bool {
        let (own, others) = (self.remaining, inner.remaining);
        own < others || own == others && seconds(self.reset) > seconds(inner.reset)
    }
}

impl Charged {
    /// The quota that governs, after a correction (S19).
    pub(crate) fn standing(&self) -> Standing {
        let more = i128::from(self.cost) - self.line.cost as i128;
        let each = (0..self.answer.limit.len()).map(|i| {
            let (limit, used) = (self.answer.limit[i], (self.answer.used[i] + more).max(0));
            let remaining = (limit - used).max(0);
            let reset = self.answer.reset[i];
            Standing { name: self.line.name, limit, used, remaining, reset }
        });
        each.min_by_key(|of| (of.remaining, Reverse(of.reset))).expect("a quota")
    }
}

/// The limit that governs a response that passes: the one with the smallest part left (S37).
pub(crate) fn tightest(charged: &[Charged]) -> Standing {
    let mut all = charged.iter().map(Charged::standing);
    let first = all.next().expect("a line");
    all.fold(first, |best, one| {
        let parts = (one.remaining * best.limit.max(1), best.remaining * one.limit.max(1));
        let is_tighter = parts.0 < parts.1 || parts.0 == parts.1 && one.reset > best.reset;
        if is_tighter { one } else { best }
    })
}

/// The fields of a refusal, and the instant to retry at: the latest of all limits (S18, S37).
pub(crate) fn refusal(lines: &[Line], together: &Together) -> (Standing, Option<i128>) {
    let refusing = lines.iter().zip(&together.answers).filter(|(_, answer)| !answer.allowed);
    let rank = |answer: &Answer| (answer.for_good, answer.retry_at, answer.reset[answer.governing]);
    // The first of equals.
    let (line, answer) =
        refusing.rev().max_by_key(|(_, answer)| rank(answer)).expect("one that refuses");
    let i = answer.governing;
    let reset = answer.reset[i].max(together.retry_at.unwrap_or(0));
    let standing = Standing {
        name: line.name,
        limit: answer.limit[i],
        used: answer.used[i],
        remaining: 0,
        reset,
    };
    (standing, together.retry_at)
}
