//! A limit with its changes at run time: [`Live`].

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use foldhash::quality::RandomState;
use http::request::Parts;

use super::limit::{Limit, PlanFn};
use super::refused::Tracker;
use crate::key::Key;
use crate::observe::Change;
use crate::quota::{Plan, Quotas};

/// Matches no generation, so that each charge looks its quotas up.
pub(super) const UNKNOWN: u64 = u64::MAX;
/// A mark of a generation: some change ends by itself, so that each request checks the time.
const ENDS: u64 = 1 << 61;

pub(crate) struct Live {
    pub(crate) limit: Limit,
    /// Differs for each change of the quotas; 0 before any.
    generation: AtomicU64,
    /// When the first change ends that ends by itself.
    next_end: AtomicI64,
    shadow: AtomicBool,
    changes: Mutex<Changes>,
    pub(super) tracker: Option<Arc<Tracker>>,
    #[cfg(feature = "tracing")]
    is_logged: AtomicBool,
    /// The limit, if these are the quotas of a plan beside its own.
    pub(super) base: Option<Arc<Self>>,
}

impl Live {
    pub(super) fn new(limit: Limit) -> Self {
        Self {
            generation: AtomicU64::new(0),
            next_end: AtomicI64::new(i64::MAX),
            shadow: AtomicBool::new(limit.shadow),
            changes: Mutex::new(Changes::none(&limit)),
            tracker: limit.tracked.map(|most| Arc::new(Tracker::new(most))),
            limit,
            #[cfg(feature = "tracing")]
            is_logged: AtomicBool::new(false),
            base: None,
        }
    }

    pub(super) fn with_quotas(self: &Arc<Self>, quotas: Quotas) -> Self {
        let limit = Limit { quotas, plan: None, tracked: None, ..self.limit.clone() };
        let base = Some(self.base.clone().unwrap_or_else(|| Arc::clone(self)));
        Self { tracker: self.tracker.clone(), base, ..Self::new(limit) }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Changes> {
        self.changes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// `None` if each request has its own.
    pub(crate) fn quotas(&self) -> Option<Plan> {
        self.limit.plan.is_none().then(|| self.lock().quotas.get())
    }

    /// Without changes that end by themselves.
    pub(super) fn usual(&self) -> (Plan, bool) {
        let changes = self.lock();
        (changes.quotas.for_good, changes.shadow.for_good)
    }

    /// Returns the quotas of a key, and whether they are its own.
    pub(super) fn quotas_for(&self, key: &Key) -> (Plan, bool) {
        let changes = self.lock();
        let own = changes.keys.get(key);
        (own.unwrap_or(changes.quotas.get()), own.is_some())
    }

    /// Returns the quotas in force with their generation, and the plan for requests whose quotas
    /// differ.
    pub(crate) fn in_force(self: &Arc<Self>) -> (u64, Quotas, Option<PlanFn>) {
        let (changes, plan) = (self.lock(), self.limit.plan.clone());
        let all = changes.quotas.get();
        let plan = if !changes.keys.own.is_empty() || all == Plan::UNLIMITED {
            let this = Arc::clone(self);
            Some(Arc::new(move |parts: &Parts, key: &Key| match (this.quotas_for(key), &plan) {
                ((_, false), Some(plan)) => plan(parts, key),
                // Others have those in force, which may change until they are charged, or these if
                // there were none.
                ((now, own), _) => (own || [all, now].contains(&Plan::UNLIMITED)).then_some(now),
            }) as PlanFn)
        } else {
            plan
        };
        (self.generation(), all.quotas().copied().unwrap_or(self.limit.quotas), plan)
    }

    pub(crate) fn plan(self: &Arc<Self>, parts: &Parts, key: &Key) -> Plan {
        let (_, quotas, plan) = self.in_force();
        plan.and_then(|plan| plan(parts, key)).unwrap_or(quotas.into())
    }

    pub(super) fn change(&self, of: Change, change: impl FnOnce(&mut Changes)) {
        self.update(|changes| {
            change(changes);
            vec![of]
        });
    }

    pub(super) fn end(&self, now: impl FnOnce() -> i64) {
        if self.generation.load(Ordering::Acquire) & ENDS == 0 {
            return;
        }
        let now = now();
        if self.next_end.load(Ordering::Relaxed) <= now {
            let ended = self.update(|changes| changes.end(now));
            ended.into_iter().for_each(|of| self.limit.scope.observe().change_ended(of));
        }
    }

    /// `update` returns what it has changed.
    fn update(&self, update: impl FnOnce(&mut Changes) -> Vec<Change>) -> Vec<Change> {
        let mut changes = self.lock();
        let quotas = |of: &Changes| (of.quotas.get(), of.keys.own.is_empty());
        let before = quotas(&changes);
        let updated = update(&mut changes);
        changes.count += u64::from(quotas(&changes) != before);
        self.shadow.store(changes.shadow.get(), Ordering::Relaxed);
        let is_usual =
            changes.keys.own.is_empty() && changes.quotas.get() == self.limit.quotas.into();
        let generation = if is_usual { 0 } else { changes.count };
        let next_end = changes.next_end();
        self.next_end.store(next_end.unwrap_or(i64::MAX), Ordering::Relaxed);
        let ends = if next_end.is_some() { ENDS } else { 0 };
        // Stored last, under the lock: a reader of this generation finds the changes.
        self.generation.store(generation | ends, Ordering::Release);
        for of in &updated {
            self.limit.scope.observe().changed(*of, changes.last_end(*of));
        }
        updated
    }

    #[inline]
    pub(crate) fn is_of(&self, generation: u64) -> bool {
        self.generation.load(Ordering::Acquire) == generation
    }

    pub(crate) fn generation(&self) -> u64 {
        self.generation.load(Ordering::Acquire) & !ENDS
    }

    /// `true` once, for the line of the log about the first request.
    #[cfg(feature = "tracing")]
    pub(crate) fn is_new(&self) -> bool {
        !self.is_logged.load(Ordering::Relaxed) && !self.is_logged.swap(true, Ordering::Relaxed)
    }

    #[inline]
    pub(crate) fn is_shadow(&self) -> bool {
        self.shadow.load(Ordering::Relaxed)
    }
}

/// Instants are in milliseconds.
pub(super) struct Changes {
    count: u64,
    pub(super) quotas: Changed<Plan>,
    pub(super) shadow: Changed<bool>,
    pub(super) keys: KeyQuotas,
}

/// The quotas of keys of their own. To set, to look up and to end one takes about as long for any
/// number of them.
#[derive(Default)]
pub(super) struct KeyQuotas {
    own: HashMap<Key, (Plan, End), RandomState>,
    ends: BTreeMap<End, Key>,
    set: u64,
}

/// The instant, and how many were set before.
type End = (i64, u64);

impl KeyQuotas {
    fn get(&self, key: &Key) -> Option<Plan> {
        self.own.get(key).map(|(quotas, _)| *quotas)
    }

    /// The first to end first.
    pub(super) fn all(&self) -> Vec<(Key, Plan, i64)> {
        let own = |(end, key): (&End, &Key)| Some((key.clone(), self.get(key)?, end.0));
        self.ends.iter().filter_map(own).collect()
    }

    pub(super) fn set(&mut self, key: Key, quotas: Plan, until: i64) {
        self.set += 1;
        let end = (until, self.set);
        if let Some((_, before)) = self.own.insert(key.clone(), (quotas, end)) {
            self.ends.remove(&before);
        }
        self.ends.insert(end, key);
    }

    pub(super) fn clear(&mut self, key: &Key) {
        if let Some((_, end)) = self.own.remove(key) {
            self.ends.remove(&end);
        }
    }

    /// Returns how many have ended.
    fn end(&mut self, now: i64) -> usize {
        let before = self.ends.len();
        while let Some(first) = self.ends.first_entry().filter(|first| first.key().0 <= now) {
            self.own.remove(&first.remove());
        }
        before - self.ends.len()
    }
}

pub(super) struct Changed<T> {
    for_good: T,
    for_now: Option<(T, i64)>,
}

impl<T: Copy> Changed<T> {
    fn get(&self) -> T {
        self.for_now.map_or(self.for_good, |(value, _)| value)
    }

    /// Replaces all earlier changes.
    pub(super) fn set(&mut self, value: T) {
        *self = Self { for_good: value, for_now: None };
    }

    pub(super) fn set_until(&mut self, value: T, until: i64) {
        self.for_now = Some((value, until));
    }

    fn until(&self) -> Option<i64> {
        self.for_now.map(|(_, until)| until)
    }

    fn end(&mut self, now: i64) -> bool {
        self.for_now.take_if(|(_, until)| *until <= now).is_some()
    }
}

impl Changes {
    fn none(limit: &Limit) -> Self {
        Self {
            count: 0,
            quotas: Changed { for_good: limit.quotas.into(), for_now: None },
            shadow: Changed { for_good: limit.shadow, for_now: None },
            keys: KeyQuotas::default(),
        }
    }

    fn end(&mut self, now: i64) -> Vec<Change> {
        let mut ended = Vec::new();
        if self.quotas.end(now) {
            ended.push(Change::Quotas);
        }
        if self.shadow.end(now) {
            ended.push(Change::Shadow);
        }
        ended.extend((0..self.keys.end(now)).map(|_| Change::Key));
        ended
    }

    fn next_end(&self) -> Option<i64> {
        let key = self.keys.ends.keys().next().map(|(until, _)| *until);
        [key, self.quotas.until(), self.shadow.until()].into_iter().flatten().min()
    }

    fn last_end(&self, of: Change) -> Option<i64> {
        match of {
            Change::Quotas => self.quotas.until(),
            Change::Shadow => self.shadow.until(),
            Change::Key => self.keys.ends.keys().next_back().map(|(until, _)| *until),
        }
    }
}
