//! The arithmetic of a fixed window: pure, in integers, over one quota of one key. Stores keep a
//! [`State`] per (scope, quota, key) and ask here what it means and what to write.
//!
//! All of the rules' numbers are here and nowhere else; a store that works elsewhere (a script in
//! Redis) mirrors this file and is held to it by the conformance suite.

use crate::quota::{Anchor, Calendar, Quota, Span};

mod grid;
mod state;

pub(crate) use grid::stagger;
use grid::{end, grid};
pub(crate) use state::MAX;
pub use state::State;
use state::Until;

/// A quota of one key as it stands at one instant.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Window<'a> {
    quota: &'a Quota,
    start: i64,
    end: i64,
    used: i64,
    until: Until,
}

impl<'a> Window<'a> {
    /// What `state` means at `now`. `shift` is the grid's shift for a staggered quota
    /// ([`stagger`]), else ignored.
    #[inline(always)]
    pub(crate) fn at(now: i64, state: Option<State>, quota: &'a Quota, shift: u64) -> Self {
        if let Anchor::Calendar(calendar) = quota.anchor {
            return Self::on_calendar(now, state, quota, calendar);
        }
        let length = quota.window as i64;
        let floor = floor(quota);
        let Some(state) = state.filter(|state| now < state.until) else {
            return Self::on_grid(now, quota, shift);
        };
        // A clock that stepped back by less than a window: the stored window still runs (S4).
        if now.saturating_sub(state.start).abs() < length {
            return Self {
                quota,
                start: state.start,
                end: end(state.start, quota),
                used: state.used.max(floor),
                until: Until::At(state.until),
            };
        }
        if now < state.start {
            // By a window or more: the state moves along and keeps its count (S4).
            let start = grid(now, quota, shift);
            // Whole windows, also where the last instant has cut one short.
            let lasts = ((state.until - state.start) as u64).next_multiple_of(quota.window);
            return Self {
                quota,
                start,
                end: end(start, quota),
                used: state.used.max(floor),
                until: Until::Moved(start.saturating_add(lasts as i64).min(MAX)),
            };
        }
        let passed = (now - state.start) / length;
        let used = state.used.saturating_sub(limit(quota).saturating_mul(passed));
        if used <= floor {
            // It came down before `until`, because the limit was raised meanwhile (S5).
            return Self::on_grid(now, quota, shift);
        }
        let start = state.start + passed * length;
        let until = Until::At(state.until);
        let mut window = Self { quota, start, end: end(start, quota), used, until };
        window.used = window.counted();
        window
    }

    /// What `state` means in a window that still runs at `latest`, for a [plain](Quota::is_plain)
    /// quota whose count ends with it: nearly always. `None`: see [`at`](Self::at).
    #[inline(always)]
    pub(crate) fn running(now: i64, latest: i64, state: State, quota: &'a Quota) -> Option<Self> {
        let State { start, used, until: end } = state;
        let lasts_one = match quota.anchor {
            Anchor::Calendar(calendar) => calendar.around(now) == Span { start, end },
            _ => end - start == quota.window as i64,
        };
        let runs = lasts_one && used >= 0 && start <= now && latest < end;
        runs.then_some(Self { quota, start, end, used, until: Until::At(end) })
    }

    /// Whether it may be another window at `latest`, a little after the instant that it was found
    /// by.
    #[inline]
    pub(crate) fn is_over_at(&self, now: i64, latest: i64) -> bool {
        let begins = matches!(self.quota.anchor, Anchor::FirstRequest) && self.start >= now;
        begins || latest >= self.until.known().map_or(self.end, |until| until.min(self.end))
    }

    fn new(now: i64, quota: &'a Quota, shift: u64) -> Self {
        match quota.anchor {
            Anchor::Calendar(calendar) => {
                let Span { start, end } = calendar.around(now);
                Self { quota, start, end, used: floor(quota), until: Until::New }
            }
            _ => Self::on_grid(now, quota, shift),
        }
    }

    fn on_grid(now: i64, quota: &'a Quota, shift: u64) -> Self {
        let start = grid(now, quota, shift);
        Self { quota, start, end: end(start, quota), used: floor(quota), until: Until::New }
    }

    /// What `state` means in the windows of a calendar (S35).
    #[inline(never)]
    fn on_calendar(now: i64, state: Option<State>, quota: &'a Quota, calendar: Calendar) -> Self {
        let new = Self::new(now, quota, 0);
        let Some(state) = state.filter(|state| now < state.until) else { return new };
        let until = Until::At(state.until);
        let running = Self { used: state.used.max(new.used), until, ..new };
        if state.start == new.start {
            return running;
        }
        match calendar.windows(state.start, now) {
            0 => running,
            // A clock that stepped back by less than a window: the stored window still runs (S4).
            -1 if now > new.start => {
                Self { start: state.start, end: calendar.after(state.start, 1), ..running }
            }
            // By a window or more: the state moves along, keeps its count and lasts as long (S4).
            ..0 => {
                let lasts = Self { start: state.start, ..running }.left().unwrap_or(1);
                Self { until: Until::Moved(new.after(lasts)), ..running }
            }
            passed => {
                let used = state.used.saturating_sub(limit(quota).saturating_mul(passed));
                if used <= new.used {
                    return new;
                }
                let used = Self { used, ..running }.counted();
                Self { used, ..running }
            }
        }
    }

    /// What another place has worked out by the same rules. On a calendar `until` is in how many
    /// windows the state ends.
    pub(crate) fn known(quota: &'a Quota, span: Span, used: i64, until: Option<i64>) -> Self {
        let Span { start, end } = span;
        let known = Self { quota, start, end, used, until: Until::New };
        let until = until.map(|until| match quota.anchor {
            Anchor::Calendar(_) => known.after(until),
            _ => until,
        });
        Self { until: until.map_or(Until::New, Until::At), ..known }
    }

    /// The window around `now` with nothing left in it.
    pub(crate) fn spent(now: i64, quota: &'a Quota, shift: u64) -> Self {
        let window = Self::new(now, quota, shift);
        let used = (quota.limit + quota.max_reserved) as i64;
        let until = window.until(used, used - window.used);
        Self { used, until: Until::At(until), ..window }
    }

    /// The same count in the window of `now`, for as many windows.
    pub(crate) fn moved(&self, now: i64, shift: u64) -> Self {
        let Self { start, end, .. } = Self::new(now, self.quota, shift);
        let moved = Self { start, end, ..*self };
        let until = self.until.map(|until| match self.quota.anchor {
            Anchor::Calendar(_) => moved.after(self.left().unwrap_or(1)),
            _ => until.saturating_sub(self.start).saturating_add(start).min(MAX),
        });
        Self { until, ..moved }
    }

    #[inline]
    pub(crate) fn quota(&self) -> &'a Quota {
        self.quota
    }

    /// Where this window began.
    pub(crate) fn start(&self) -> i64 {
        self.start
    }

    /// Where the next one begins.
    #[inline]
    pub(crate) fn end(&self) -> i64 {
        self.end
    }

    #[inline]
    pub(crate) fn span(&self) -> Span {
        Span { start: self.start, end: self.end }
    }

    /// Tokens taken; see [`State::used`].
    #[inline]
    pub(crate) fn used(&self) -> i64 {
        self.used
    }

    /// What to write where nothing is taken: a state that has moved would otherwise move along for
    /// as long as the clock was ahead (S4).
    #[inline]
    pub(crate) fn settled(&self) -> Option<State> {
        matches!(self.until, Until::Moved(_)).then(|| self.take(0))
    }

    /// How many tokens could be taken now, with what may be reserved or without.
    #[inline]
    pub(crate) fn available(&self, reserve: bool) -> u64 {
        if self.quota.limit == 0 {
            return 0;
        }
        let debt = if reserve { self.quota.max_reserved as i64 } else { 0 };
        (limit(self.quota) + debt).saturating_sub(self.used).max(0) as u64
    }

    /// Whether a charge of `cost` passes (S6, S8).
    #[inline]
    pub(crate) fn fits(&self, cost: u64, reserve: bool) -> bool {
        cost <= self.available(reserve)
    }

    /// What to write when `cost` tokens are taken, whether they fit or not (S15 may overdraw).
    #[inline]
    pub(crate) fn take(&self, cost: u64) -> State {
        self.write(self.used_after(cost), cost.min(Quota::MAX_TOKENS) as i64)
    }

    /// The tokens taken after a charge of `cost`.
    #[inline]
    pub(crate) fn used_after(&self, cost: u64) -> i64 {
        self.used.saturating_add(cost.min(Quota::MAX_TOKENS) as i64).min(MAX)
    }

    /// Whether tokens of a later window are taken than of one that ends at this instant: a count
    /// can't say in which window they leave room, and no more come back of the earlier one (S14).
    pub(crate) fn is_reserved_past(&self, end: i64) -> bool {
        let Self { quota, .. } = self;
        quota.max_reserved > 0 && quota.limit > 0 && {
            let last = self.covered(0);
            // Where both saturate, that is the same one.
            last.start >= end && last.end > end
        }
    }

    /// What to write when `tokens` are returned; `None` where there is no state to return them
    /// to (S14).
    pub(crate) fn give_back(&self, tokens: u64) -> Option<State> {
        let tokens = tokens.min(Quota::MAX_TOKENS) as i64;
        self.until.known().map(|_| self.write((self.used - tokens).max(floor(self.quota)), -tokens))
    }

    #[inline]
    fn write(&self, used: i64, added: i64) -> State {
        State { start: self.start, used, until: self.until(used, added) }
    }

    /// When a count is back at the floor to which `added` has brought it (S5).
    #[inline]
    fn until(&self, used: i64, added: i64) -> i64 {
        // Most counts end with their window. This is never so under a limit of 0.
        let above = (used - floor(self.quota)) as u64;
        if above.wrapping_sub(1) < self.quota.limit { self.end() } else { self.lasts(added) }
    }

    /// It takes a copy, as do others that are called seldom: a window that is never pointed to
    /// stays in registers.
    #[inline(never)]
    fn lasts(self, added: i64) -> i64 {
        let quota = self.quota;
        match windows((self.counted() + added).min(MAX) - floor(quota), quota) {
            Some(windows) => self.after(windows.max(1)),
            // Nothing comes down, and what is there ends when it would have.
            None => self.after(self.left().unwrap_or(1)),
        }
    }

    /// What of the tokens taken counts in the windows to come: no more than is granted up to
    /// `until`. The rest was taken under a higher limit, and ends with this window (S5).
    #[inline]
    fn counted(&self) -> i64 {
        match self.left() {
            Some(windows) if windows < MAX && self.quota.limit > 0 => {
                let granted = limit(self.quota).saturating_mul(windows);
                self.used.min(granted.saturating_add(floor(self.quota)))
            }
            _ => self.used,
        }
    }

    /// How many windows the state lasts, with this one. What saturates lasts for ever.
    #[inline]
    fn left(&self) -> Option<i64> {
        self.until.known().map(|until| match (until, self.quota.anchor) {
            (MAX, _) => MAX,
            (_, Anchor::Calendar(calendar)) => calendar.windows_until(self.start, until),
            _ => ((until - self.start) as u64).div_ceil(self.quota.window) as i64,
        })
    }

    /// When a refused `cost` would fit if no other request took tokens before (S16); `None`: never.
    #[inline]
    pub(crate) fn retry_at(&self, cost: u64, reserve: bool) -> Option<i64> {
        let (quota, until) = (self.quota, self.until.known());
        // Most counts end with their window, and then the key is new.
        let ends = until == Some(self.end()) && quota.limit > 0 && cost <= quota.capacity;
        if ends { until } else { self.fits_at(cost, reserve) }
    }

    #[inline(never)]
    fn fits_at(self, cost: u64, reserve: bool) -> Option<i64> {
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

    /// The window in which `cost` tokens are covered that have just been taken here (S13): this
    /// one, unless they left a debt.
    pub(crate) fn covered(&self, cost: u64) -> Span {
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
        let windows = windows(self.counted() + cost - limit(self.quota), self.quota)?;
        Some(windows.max(1))
    }

    /// The start of the `n`th window after this one.
    #[inline]
    fn after(&self, n: i64) -> i64 {
        match (self.quota.anchor, n) {
            (Anchor::Calendar(_), 1) => self.end,
            (Anchor::Calendar(calendar), _) => calendar.after(self.start, n),
            _ => n.saturating_mul(self.quota.window as i64).saturating_add(self.start).min(MAX),
        }
    }
}

/// In how many windows `tokens` are granted, rounded up; `None`: never.
#[inline]
fn windows(tokens: i64, quota: &Quota) -> Option<i64> {
    if quota.limit == 0 {
        return None;
    }
    // Most charges are within one limit: no division for them.
    Some(match tokens.max(0) as u64 {
        0 => 0,
        tokens if tokens <= quota.limit => 1,
        tokens => tokens.div_ceil(quota.limit) as i64,
    })
}

/// What a new key has used: nothing, or less than that where it starts with rolled-over tokens.
#[inline]
fn floor(quota: &Quota) -> i64 {
    // A limit of 0 refuses everything, rolled-over tokens included (S8).
    if quota.limit == 0 { 0 } else { limit(quota) - quota.capacity as i64 }
}

#[inline]
fn limit(quota: &Quota) -> i64 {
    quota.limit as i64
}
