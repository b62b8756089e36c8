//! Makes the calls of the script for charges and corrections: [`Commands`].

use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, Mutex};

use redis::{Cmd, RedisWrite};
use tokio::time::Instant;

use super::ONE;
use crate::sync;
use tower_fixed_window::store::{Account, Adjust, Calendar, Charge, Scope, Windows};
use tower_fixed_window::{Clock, Key, Quota, SystemClock};

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
        let reserve = charge.may_reserve();
        let call = |(account, cost)| {
            let plain =
                if charge.is_peek() { None } else { self.plain_call(&account, cost, reserve, now) };
            plain.unwrap_or_else(|| self.general_call(&account, act, cost, reserve, &[], now))
        };
        charge.lines().map(call).collect()
    }

    pub(crate) fn adjust(&self, adjust: &Adjust<'_>, now: Option<i64>) -> Cmd {
        let (account, tokens) = (&adjust.account, adjust.tokens);
        let within: Vec<_> = adjust.refundable_within().map(|(_, within)| within).collect();
        let act = if adjust.is_refund() { "return" } else { "take" };
        self.general_call(account, act, tokens, adjust.is_refund(), &within, now)
    }

    pub(crate) fn key(&self, scope: &Scope, key: &Key) -> String {
        let (prefix, scope, key) = (&self.prefix, scope.name(), key.readable());
        format!("{prefix}tfw1:{{{scope}:{key}}}")
    }

    fn begin_call(&self, account: &Account<'_>) -> Cmd {
        let mut cmd = Cmd::with_capacity(7 + 8 * account.quotas.as_ref().len(), 256);
        cmd.arg("EVALSHA").arg(&ONE.hash).arg(1).arg(self.key(account.scope, account.key));
        cmd
    }

    fn plain_call(
        &self,
        account: &Account<'_>,
        cost: u64,
        reserve: bool,
        now: Option<i64>,
    ) -> Option<Cmd> {
        let &[quota] = account.quotas.as_ref() else { return None };
        let Windows::Grid { start: grid } = account.windows_of(&quota) else { return None };
        let (limit, length) = (quota.limit(), length(&quota));
        // The tokens fit between the starts of two windows, in microseconds.
        let plain = quota.capacity() == limit
            && (1..=limit.min(length * 1_000 - 1)).contains(&cost)
            && !(reserve && quota.max_reserved() > 0);
        if !plain {
            return None;
        }
        let mut cmd = self.begin_call(account);
        cmd.arg(cost).write_arg_fmt(quota.counter());
        cmd.arg(length).arg(limit);
        if grid > 0 || now.is_some() {
            cmd.arg(grid).arg(now);
        }
        Some(cmd)
    }

    /// `within` has for each quota when it takes tokens back. For a calendar, the number of the window
    /// that begins at its end is sent.
    fn general_call(
        &self,
        account: &Account<'_>,
        act: &str,
        tokens: u64,
        reserve: bool,
        within: &[Range<i64>],
        now: Option<i64>,
    ) -> Cmd {
        let mut cmd = self.begin_call(account);
        // No quota has more than 2^53 - 1 to give.
        cmd.arg(act).arg(tokens.min(Quota::MAX_TOKENS + 1));
        match now {
            Some(now) => cmd.arg(now),
            None => cmd.arg(""),
        };
        for (i, quota) in account.quotas.into_iter().enumerate() {
            let (limit, capacity) = (quota.limit(), quota.capacity());
            let debt = if reserve { quota.max_reserved() } else { 0 };
            let Range { start: from, end: mut until } = within.get(i).cloned().unwrap_or_default();
            let windows = account.windows_of(quota);
            let boundaries = match windows {
                Windows::OnCalendar(calendar) => {
                    until = calendar.number(until - 1) + 1;
                    let now = now.unwrap_or_else(|| self.calendars.server_time());
                    let most = if debt > 0 { COMPARED } else { LASTING };
                    Some(self.calendars.boundaries_around(calendar, now, quota, most))
                }
                _ => None,
            };
            let (length, grid) = match (&boundaries, windows) {
                (Some((_, count)), _) => (*count as u64, ON_A_CALENDAR),
                (None, Windows::Grid { start }) => (length(quota), start as i64),
                (None, _) => (length(quota), FROM_FIRST_REQUEST),
            };
            cmd.write_arg_fmt(quota.counter());
            cmd.arg(length).arg(limit).arg(capacity);
            cmd.arg(limit + debt).arg(grid).arg(from).arg(until);
            if let Some((boundaries, count)) = boundaries {
                let Boundaries { first, last, starts } = &*boundaries;
                cmd.arg(first).arg(last).arg(&starts[..count]);
            }
        }
        cmd
    }
}

/// The last instant stands for all that are later.
pub(crate) fn instant(now: u64) -> i64 {
    now.min(Quota::MAX_TOKENS - 1) as i64
}

fn length(quota: &Quota) -> u64 {
    quota.window().as_millis() as u64
}

/// The starts of a calendar's windows, from a number on.
struct Boundaries {
    first: i64,
    /// The number of the calendar's last window.
    last: i64,
    starts: Vec<i64>,
}

impl Boundaries {
    fn new(calendar: Calendar, first: i64, count: i64) -> Self {
        let starts = (first..first + count).map(|number| calendar.start_of(number)).collect();
        Self { first, last: calendar.number(i64::MAX), starts }
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
        let tokens = quota.capacity() + quota.max_reserved();
        let windows = tokens.div_ceil(quota.limit().max(1)).min(most);
        // The window before, this one, and two that may begin until the script runs.
        let count = windows as usize + 4;
        let mut cached = sync::lock(&self.cached);
        if let Some(boundaries) = cached.get(&calendar)
            && boundaries.starts.len() >= count
            && (boundaries.starts[1]..boundaries.starts[2]).contains(&at)
        {
            return (Arc::clone(boundaries), count);
        }
        let boundaries = Arc::new(Boundaries::new(calendar, calendar.number(at) - 1, count as i64));
        if cached.len() >= MAX_CACHED {
            cached.clear();
        }
        cached.insert(calendar, Arc::clone(&boundaries));
        (boundaries, count)
    }
}
