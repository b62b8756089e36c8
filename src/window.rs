//! The arithmetic of a fixed window: pure, in integers, over one quota of one key. A store keeps a
//! [`State`] per (scope, quota, key). A [`Window`] interprets it at an instant and computes the
//! state to write.
//!
//! The rules' arithmetic is here, and the boundaries of calendars are in `quota/calendar`. A script
//! in Redis mirrors it, and the conformance suite runs the same traces on both. Why it is as it is:
//! docs/mechanisms.

use crate::quota::{Anchor, Calendar, FNV_1A, Quota, Span, fmix64, fnv_1a};

/// The last instant, and the largest count: everything saturates here (S11).
pub(crate) const MAX: i64 = Quota::MAX_TOKENS as i64;

/// A store's record for one quota of one key. Instants are milliseconds since the epoch. Later
/// versions may add fields, so begin with the default and set what was read:
///
/// ```
/// use tower_fixed_window::store::State;
///
/// let mut state = State::default();
/// (state.start, state.used, state.until) = (1_700_000_040_000, 3, 1_700_000_100_000);
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct State {
    /// The start of the window last written.
    pub start: i64,
    /// Tokens taken: negative while more than the limit is left (rollover), above the limit in
    /// debt.
    pub used: i64,
    /// From here on there is no state.
    pub until: i64,
    /// The end of the window last written. On a calendar it binds all readers, even those with
    /// another edition of the zone data. 0 is unknown: then it is worked out, as on a grid.
    pub end: i64,
}

#[derive(Clone, Copy, Debug)]
enum StateEnd {
    New,
    At(i64),
    /// Stored in a later window, since the clock stepped back (S4).
    Moved(i64),
    /// Nothing leaves the count before (S30).
    Overflow(i64),
}

impl StateEnd {
    #[inline]
    fn known(self) -> Option<i64> {
        match self {
            Self::New => None,
            Self::At(until) | Self::Moved(until) | Self::Overflow(until) => Some(until),
        }
    }
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Window<'a> {
    pub(crate) quota: &'a Quota,
    pub(crate) start: i64,
    pub(crate) end: i64,
    pub(crate) used: i64,
    until: StateEnd,
}

impl<'a> Window<'a> {
    /// The window that runs at `now`. `shift` moves the grid of a staggered quota ([`stagger`]);
    /// others ignore it.
    #[inline(always)]
    pub(crate) fn at(now: i64, state: Option<State>, quota: &'a Quota, shift: u64) -> Self {
        let mut new = Self::new(now, quota, shift);
        let Some(state) = state else { return new };
        let used = state.used.max(new.used);
        let stored = Self { used, until: StateEnd::At(state.until), ..new };
        // By the windows of the state, where the time is, how many have passed, and how many it lasts.
        let (stored, here, passed, lasts) = if let Anchor::Calendar(calendar) = quota.anchor {
            // Most counts are of the window that runs by this zone data, too.
            if state.start == new.start && [0, new.end].contains(&state.end) && now < state.until {
                return stored;
            }
            let found = stored.find_on(calendar, now, state, new);
            new = found.1;
            found
        } else {
            let stored = Self { start: state.start, end: end(state.start, quota), ..stored };
            let passed = now.saturating_sub(state.start).div_euclid(quota.window as i64);
            let start = state.start + passed * quota.window as i64;
            // For whole windows, even if the last instant has cut one short.
            let lasts = ((state.until - state.start) as u64).div_ceil(quota.window) as i64;
            (stored, Self { start, end: end(start, quota), ..new }, passed, lasts)
        };
        if now < stored.end.min(state.until) {
            // If the clock stepped back by less than a window, the stored window still runs (S4).
            if passed >= 0 || passed == -1 && now > here.start {
                return stored;
            }
            // If by more, the state moves along and keeps its count, for as many windows (S4).
            return Self { used, until: StateEnd::Moved(new.after(lasts)), ..new };
        }
        let used = state.used.saturating_sub(limit(quota).saturating_mul(passed.max(1)));
        // The count may be spent before `until`, because the limit was raised meanwhile (S5).
        if now >= state.until || passed >= lasts || used <= new.used {
            return new;
        }
        let window = Self { used, until: stored.until, ..here };
        Self { used: window.counted(), ..window }
    }

    /// The window of a state on a calendar, the one that runs, how many have passed, and how many the
    /// state lasts. Takes copies, as do all functions that are called seldom: a window that is never
    /// pointed to stays in registers.
    #[inline(never)]
    fn find_on(
        self,
        calendar: Calendar,
        now: i64,
        state: State,
        mut new: Self,
    ) -> (Self, Self, i64, i64) {
        let (number, start, end) = if state.end > state.start {
            (calendar.number_from(state.start), state.start, state.end)
        } else {
            // An entry that keys share begins with a charge.
            let number = calendar.number(state.start);
            (number, calendar.start_of(number), calendar.start_of(number + 1))
        };
        let stored = Self { start, end, ..self };
        let passed = calendar.number(now) - number;
        if passed == 0 && now >= end.min(state.until) {
            // By this zone data the window that has ended would still run.
            (new.start, new.end) = (end, calendar.start_of(number + 2));
        }
        (stored, new, passed, stored.lasts().unwrap_or(1))
    }

    /// [`at`](Self::at) in the usual case, in less time: a [plain](Quota::is_plain) quota whose
    /// count ends with its window, which still runs at `latest`. `None` in other cases.
    #[inline(always)]
    pub(crate) fn running(now: i64, latest: i64, state: State, quota: &'a Quota) -> Option<Self> {
        let State { start, used, until: end, .. } = state;
        if start > now || latest >= end || used < 0 {
            return None;
        }
        let lasts_one = match quota.anchor {
            Anchor::Calendar(calendar) => calendar.around(now) == Span { start, end },
            _ => end - start == quota.window as i64,
        };
        lasts_one.then_some(Self { quota, start, end, used, until: StateEnd::At(end) })
    }

    /// Returns whether another window may run at `latest`, a little after the `now` that found this
    /// one.
    #[inline]
    pub(crate) fn is_over_at(&self, now: i64, latest: i64) -> bool {
        let begins = matches!(self.quota.anchor, Anchor::FirstRequest) && self.start >= now;
        begins || latest >= self.until.known().map_or(self.end, |until| until.min(self.end))
    }

    #[inline]
    fn new(now: i64, quota: &'a Quota, shift: u64) -> Self {
        let Span { start, end } = match quota.anchor {
            Anchor::Calendar(calendar) => calendar.around(now),
            _ => {
                let start = grid(now, quota, shift);
                Span { start, end: end(start, quota) }
            }
        };
        Self { quota, start, end, used: least_used(quota), until: StateEnd::New }
    }

    pub(crate) fn of_usage(quota: &'a Quota, Span { start, end }: Span, used: i64) -> Self {
        Self { quota, start, end, used, until: StateEnd::New }
    }

    pub(crate) fn spent(now: i64, quota: &'a Quota, shift: u64) -> Self {
        let window = Self::new(now, quota, shift);
        let used = (quota.limit + quota.max_reserved) as i64;
        let until = window.state_end(used, used - window.used);
        Self { used, until: StateEnd::At(until), ..window }
    }

    /// The window of a key whose count others share, which was last charged at the state's start.
    /// All that is taken stays in it until it ends: what a window grants under one key's limit must
    /// not pay for the tokens of a key that has a lower one.
    pub(crate) fn in_overflow(now: i64, state: State, quota: &'a Quota, shift: u64) -> Self {
        let window = Self::new(now, quota, shift);
        let until = if state.start.saturating_sub(now) < window.end - window.start {
            StateEnd::Overflow(state.until)
        } else {
            StateEnd::Moved((state.until - state.start).saturating_add(window.start).min(MAX))
        };
        Self { used: state.used.max(window.used), until, ..window }
    }

    /// When a count that keys share ends at the earliest, if one of them is charged now: then the
    /// windows of all of them have ended.
    pub(crate) fn overflow_until(&self, now: i64) -> i64 {
        let lasts = match self.quota.anchor {
            Anchor::Calendar(_) => self.end,
            _ => end(now, self.quota),
        };
        lasts.max(self.until.known().unwrap_or(0))
    }

    #[inline]
    pub(crate) fn span(&self) -> Span {
        Span { start: self.start, end: self.end }
    }

    /// The state to write if nothing is taken: one that has moved, which would otherwise move along
    /// for as long as the clock was ahead (S4).
    #[inline]
    pub(crate) fn moved(&self) -> Option<State> {
        matches!(self.until, StateEnd::Moved(_)).then(|| self.take(0))
    }

    #[inline]
    pub(crate) fn fits(&self, cost: u64, reserve: bool) -> bool {
        let debt = if reserve { self.quota.max_reserved as i64 } else { 0 };
        let left = (limit(self.quota) + debt).saturating_sub(self.used).max(0) as u64;
        cost <= left && (cost == 0 || self.quota.limit > 0)
    }

    /// Takes tokens even if they don't fit (S15 may overdraw).
    #[inline]
    pub(crate) fn take(&self, cost: u64) -> State {
        let tokens = cost.min(Quota::MAX_TOKENS) as i64;
        self.state_with(self.used.saturating_add(tokens).min(MAX), tokens)
    }

    /// Returns whether tokens of a window after `end` are taken. Then the window that ends at `end`
    /// takes no more refunds, since a count can't say which window has room again (S14).
    pub(crate) fn is_reserved_past(&self, end: i64) -> bool {
        // Under a limit of 0 nothing is covered: the end of the count says what it was taken of.
        let windows = || match self.quota.limit {
            0 => self.lasts().map(|windows| windows - 1),
            _ => self.in_debt(0),
        };
        // If both ends saturate, the windows are the same.
        let is_past = |n| n > 0 && self.after(n) >= end && self.after(n + 1) > end;
        self.quota.max_reserved > 0 && windows().is_some_and(is_past)
    }

    /// `None`: there is no state to return them to (S14).
    pub(crate) fn give_back(&self, tokens: u64) -> Option<State> {
        let tokens = tokens.min(Quota::MAX_TOKENS) as i64;
        self.until
            .known()
            .map(|_| self.state_with((self.used - tokens).max(least_used(self.quota)), -tokens))
    }

    #[inline]
    fn state_with(&self, used: i64, added: i64) -> State {
        let Self { start, end, .. } = *self;
        State { start, used, until: self.state_end(used, added), end }
    }

    /// The end of the state after `added` tokens have changed its count to `used`: when the count
    /// is back at the least (S5).
    #[inline]
    fn state_end(&self, used: i64, added: i64) -> i64 {
        // Most counts end with their window. Under a limit of 0 this is never true.
        let above = (used - least_used(self.quota)) as u64;
        if above.wrapping_sub(1) < self.quota.limit {
            self.end
        } else {
            self.end_after_windows(added)
        }
    }

    /// All other counts.
    #[inline(never)]
    fn end_after_windows(self, added: i64) -> i64 {
        let quota = self.quota;
        match windows_for((self.counted() + added).min(MAX) - least_used(quota), quota) {
            Some(windows) => self.after(windows.max(1)),
            // Under a limit of 0 the count stays, and ends when it would have ended before.
            None => self.after(self.lasts().unwrap_or(1)),
        }
    }

    /// How many of the tokens taken count in later windows: at most what is granted up to `until`.
    /// The rest was taken under a higher limit, and ends with this window (S5).
    #[inline]
    fn counted(&self) -> i64 {
        match self.lasts() {
            Some(windows) if windows < MAX && self.quota.limit > 0 => {
                let granted = limit(self.quota).saturating_mul(windows);
                self.used.min(granted.saturating_add(least_used(self.quota)))
            }
            _ => self.used,
        }
    }

    /// How many windows the state lasts, with this one. One that saturates lasts for ever.
    #[inline]
    fn lasts(&self) -> Option<i64> {
        self.until.known().map(|until| match (until, self.quota.anchor) {
            (MAX, _) => MAX,
            (_, Anchor::Calendar(calendar)) => calendar.windows_until(self.start, until).max(1),
            _ => ((until - self.start) as u64).div_ceil(self.quota.window) as i64,
        })
    }

    /// When a refused `cost` would fit if no other request took tokens before (S16); `None`: never.
    #[inline]
    pub(crate) fn retry_at(&self, cost: u64, reserve: bool) -> Option<i64> {
        let (quota, until) = (self.quota, self.until.known());
        // Most counts end with their window, and then the key is new.
        let ends = until == Some(self.end) || matches!(self.until, StateEnd::Overflow(_));
        let fits = quota.limit > 0 && cost <= quota.capacity;
        if ends && fits { until } else { self.first_fit(cost, reserve) }
    }

    #[inline(never)]
    fn first_fit(self, cost: u64, reserve: bool) -> Option<i64> {
        let quota = self.quota;
        let most = quota.capacity + if reserve { quota.max_reserved } else { 0 };
        if cost > most {
            return None;
        }
        let at = self.after(self.in_debt(cost as i64)?);
        // From `until` on the key is new, with all of its capacity.
        Some(match self.until.known() {
            Some(until) if cost <= quota.capacity => at.min(until),
            _ => at,
        })
    }

    /// The window that covers `cost` tokens if they are taken here (S13): this one, unless they
    /// leave a debt.
    pub(crate) fn covering_window(&self, cost: u64) -> Span {
        match self.in_debt(cost as i64) {
            Some(0) => self.span(),
            Some(windows) => Span { start: self.after(windows), end: self.after(windows + 1) },
            None => Span { start: MAX, end: MAX },
        }
    }

    /// In how many windows `cost` more tokens are no debt; `None`: never.
    fn in_debt(&self, cost: i64) -> Option<i64> {
        if self.used + cost <= limit(self.quota) {
            return Some(0);
        }
        let windows = windows_for(self.counted() + cost - limit(self.quota), self.quota)?;
        // A count above a limit that was lowered is no debt, but leaves no room for more (S5).
        Some(windows.max(i64::from(cost > 0)))
    }

    #[inline]
    fn after(&self, n: i64) -> i64 {
        match (self.quota.anchor, n) {
            (Anchor::Calendar(_), 1) => self.end,
            (Anchor::Calendar(calendar), _) => calendar.after(self.start, n),
            _ => n.saturating_mul(self.quota.window as i64).saturating_add(self.start).min(MAX),
        }
    }
}

/// How many windows grant `tokens`, rounded up; `None`: a limit of 0 never does.
#[inline]
fn windows_for(tokens: i64, quota: &Quota) -> Option<i64> {
    if quota.limit == 0 {
        return None;
    }
    Some(match tokens.max(0) as u64 {
        0 => 0,
        tokens if tokens <= quota.limit => 1,
        tokens => tokens.div_ceil(quota.limit) as i64,
    })
}

/// The count of a new key: 0, or less if it starts with rolled-over tokens.
#[inline]
fn least_used(quota: &Quota) -> i64 {
    // A limit of 0 refuses everything, rolled-over tokens included (S8).
    if quota.limit == 0 { 0 } else { limit(quota) - quota.capacity as i64 }
}

#[inline]
fn limit(quota: &Quota) -> i64 {
    quota.limit as i64
}

#[inline]
fn grid(now: i64, quota: &Quota, shift: u64) -> i64 {
    let offset = match quota.anchor {
        Anchor::Grid { offset, .. } => offset,
        Anchor::Staggered => shift % quota.window,
        Anchor::FirstRequest | Anchor::Calendar(_) => return now,
    };
    now - (now - offset as i64).rem_euclid(quota.window as i64)
}

#[inline]
fn end(start: i64, quota: &Quota) -> i64 {
    start.saturating_add(quota.window as i64).min(MAX)
}

/// The shift of a staggered grid: FNV-1a, finished by MurmurHash3's fmix64 (S2); the same on every
/// node, for ever.
pub(crate) fn stagger(scope: &str, key: &[u8]) -> u64 {
    fmix64(fnv_1a(FNV_1A, scope.bytes().chain(key.iter().copied())))
}
