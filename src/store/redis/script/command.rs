//! Makes the calls of the script for charges and corrections: [`Commands`].

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use redis::{Cmd, RedisWrite};

use super::ONE;
use crate::clock::{Clock, SystemClock};
use crate::key::Key;
use crate::quota::{Anchor, Boundaries, Calendar, Quota};
use crate::store::account::{Account, Scope, instant};
use crate::store::adjust::Adjust;
use crate::store::charge::Charge;
use crate::sync::{self, Instant};

const FROM_FIRST_REQUEST: i64 = -1;
const ON_A_CALENDAR: i64 = -2;
/// Of one window each. With more, the cache is cleared.
const MAX_CACHED: usize = 4_096;
/// The key of a state that lasts for more windows may outlive the state.
const LASTING: u64 = 64;
/// Reservations are compared with the windows of other quotas, over ten years at most.
const COMPARED: u64 = 4_096;

#[derive(Clone)]
pub(crate) struct Commands {
    pub(crate) prefix: Arc<str>,
    pub(crate) calendars: Arc<Calendars>,
}

impl Commands {
    pub(crate) fn new(prefix: &str) -> Self {
        Self { prefix: prefix.into(), calendars: Arc::default() }
    }

    /// For each line. `now` is the time if it is not the server's.
    pub(crate) fn charge(&self, charge: &Charge<'_>, now: Option<i64>) -> Vec<Cmd> {
        let act = if charge.is_peek() { "peek" } else { "charge" };
        let call = |line: Charge<'_>| {
            let (account, cost, reserve) = (line.account(), line.cost(), line.may_reserve());
            let general = || self.general_call(&account, act, cost, reserve, &[], now);
            self.plain_call(&line, now).unwrap_or_else(general)
        };
        charge.each().map(call).collect()
    }

    pub(crate) fn adjust(&self, adjust: &Adjust<'_>, now: Option<i64>) -> Cmd {
        let (account, tokens) = (&adjust.account(), adjust.tokens());
        match adjust.until() {
            Some(until) => self.general_call(account, "return", tokens, true, until, now),
            None => self.general_call(account, "take", tokens, false, &[], now),
        }
    }

    pub(crate) fn key(&self, scope: &Scope, key: &Key) -> String {
        let (prefix, scope, key) = (&self.prefix, scope.name(), key.readable());
        format!("{prefix}tfw1:{{{scope}:{key}}}")
    }

    fn begin_call(&self, account: &Account<'_>) -> Cmd {
        let mut cmd = Cmd::with_capacity(7 + 7 * account.quotas().len(), 256);
        cmd.arg("EVALSHA").arg(&ONE.hash).arg(1).arg(self.key(account.scope(), account.key()));
        cmd
    }

    fn plain_call(&self, charge: &Charge<'_>, now: Option<i64>) -> Option<Cmd> {
        let (account, cost) = (charge.account(), charge.cost());
        let &[quota] = account.quotas().as_slice() else { return None };
        // The tokens fit between the starts of two windows, in microseconds.
        let plain = quota.capacity == quota.limit
            && (1..=quota.limit.min(quota.window * 1_000 - 1)).contains(&cost)
            && !(charge.is_peek() || charge.may_reserve() && quota.max_reserved > 0);
        let grid = account.grid(&quota).filter(|_| plain)?;
        let mut cmd = self.begin_call(&account);
        cmd.arg(cost).write_arg_fmt(quota.counter());
        cmd.arg(quota.window).arg(quota.limit);
        if grid > 0 || now.is_some() {
            cmd.arg(grid).arg(now);
        }
        Some(cmd)
    }

    /// `until` has for each quota the instant until which it takes tokens back. For a calendar, the
    /// number of the window that begins then is sent.
    fn general_call(
        &self,
        account: &Account<'_>,
        act: &str,
        tokens: u64,
        reserve: bool,
        until: &[i64],
        now: Option<i64>,
    ) -> Cmd {
        let mut cmd = self.begin_call(account);
        // No quota has more than 2^53 - 1 to give.
        cmd.arg(act).arg(tokens.min(Quota::MAX_TOKENS + 1));
        match now {
            Some(now) => cmd.arg(now),
            None => cmd.arg(""),
        };
        for (i, quota) in account.quotas().iter().enumerate() {
            let debt = if reserve { quota.max_reserved } else { 0 };
            let mut until = until.get(i).copied().unwrap_or(0);
            let boundaries = match quota.anchor {
                Anchor::Calendar(calendar) => {
                    until = calendar.number(until - 1) + 1;
                    let now = now.unwrap_or_else(|| self.calendars.server_time());
                    let most = if debt > 0 { COMPARED } else { LASTING };
                    Some(self.calendars.boundaries_around(calendar, now, quota, most))
                }
                _ => None,
            };
            let (length, grid) = match (&boundaries, account.grid(quota)) {
                (Some((_, count)), _) => (*count as u64, ON_A_CALENDAR),
                (None, Some(grid)) => (quota.window, grid as i64),
                (None, None) => (quota.window, FROM_FIRST_REQUEST),
            };
            cmd.write_arg_fmt(quota.counter());
            cmd.arg(length).arg(quota.limit).arg(quota.capacity);
            cmd.arg(quota.limit + debt).arg(grid).arg(until);
            if let Some((boundaries, count)) = boundaries {
                let Boundaries { first, last, starts } = &*boundaries;
                cmd.arg(first).arg(last).arg(&starts[..count]);
            }
        }
        cmd
    }
}

/// The script chooses between boundaries around the server's time.
#[derive(Default)]
pub(crate) struct Calendars {
    /// The server's time, and when it came, once ours was far off.
    corrected: Mutex<Option<(i64, Instant)>>,
    cached: Mutex<HashMap<Calendar, Arc<Boundaries>>>,
}

impl Calendars {
    fn server_time(&self) -> i64 {
        let now = match *sync::lock(&self.corrected) {
            Some((time, at)) => (time + at.elapsed().as_millis() as i64).max(0) as u64,
            None => SystemClock.now_ms(),
        };
        instant(now)
    }

    pub(crate) fn correct_time(&self, time: i64) {
        *sync::lock(&self.corrected) = Some((time, Instant::now()));
    }

    /// Returns the boundaries from the window before `at` on, and how many of them it takes until
    /// what is written at `at` under a quota has ended, after `most` windows at most.
    fn boundaries_around(
        &self,
        calendar: Calendar,
        at: i64,
        quota: &Quota,
        most: u64,
    ) -> (Arc<Boundaries>, usize) {
        let tokens = quota.capacity + quota.max_reserved;
        let windows = tokens.div_ceil(quota.limit.max(1)).min(most);
        // The window before, this one, and two that may begin until the script runs.
        let count = windows as usize + 4;
        let mut cached = sync::lock(&self.cached);
        if let Some(boundaries) = cached.get(&calendar)
            && boundaries.starts.len() >= count
            && (boundaries.starts[1]..boundaries.starts[2]).contains(&at)
        {
            return (Arc::clone(boundaries), count);
        }
        let boundaries = Arc::new(calendar.boundaries(at, count as i64));
        if cached.len() >= MAX_CACHED {
            cached.clear();
        }
        cached.insert(calendar, Arc::clone(&boundaries));
        (boundaries, count)
    }
}
