//! Makes the calls of the script for charges and corrections: [`Commands`].

use std::ops::Range;
use std::sync::{Arc, Mutex};

use redis::{Cmd, RedisWrite};
use tokio::time::Instant;

use crate::sync;
use tower_fixed_window::store::{Account, Adjust, Charge, Scope, Windows};
use tower_fixed_window::{Clock, Key, Quota, SystemClock};

const FROM_FIRST_REQUEST: i64 = -1;
const ON_A_CALENDAR: i64 = -2;
/// The key of a state that lasts for more windows may outlive the state.
const LASTING: u64 = 64;
/// Reservations are compared with the windows of other quotas, over ten years at most.
const COMPARED: u64 = 4_096;

/// What is asked of a key.
pub(crate) struct Command {
    pub(crate) key: String,
    /// Of the script; none for a reset, which is a call of its own.
    pub(super) args: Cmd,
    /// Of a plain charge: its tokens, and how many the script can count at once, which is the limit,
    /// or how many fit between the starts of two windows in microseconds.
    pub(super) plain: Option<(u64, u64)>,
}

#[derive(Clone)]
pub(crate) struct Commands {
    pub(crate) prefix: Arc<str>,
    /// The server's time, and when it was told last.
    told: Arc<Mutex<Option<(i64, Instant)>>>,
}

impl Commands {
    pub(crate) fn new(prefix: &str) -> Self {
        Self { prefix: prefix.into(), told: Arc::default() }
    }

    /// For each line. `now` is the time if it is not the server's.
    pub(crate) fn charge(&self, charge: &Charge<'_>, now: Option<i64>) -> Vec<Command> {
        let act = if charge.is_peek() { "peek" } else { "charge" };
        let reserve = charge.may_reserve();
        let command = |(account, cost)| self.command(&account, act, cost, reserve, &[], now);
        charge.lines().map(command).collect()
    }

    pub(crate) fn adjust(&self, adjust: &Adjust<'_>, now: Option<i64>) -> Command {
        let within: Vec<_> = adjust.refundable_within().map(|(_, within)| within).collect();
        let act = if adjust.is_refund() { "return" } else { "take" };
        self.command(&adjust.account, act, adjust.tokens, adjust.is_refund(), &within, now)
    }

    pub(crate) fn reset(&self, scope: &Scope, key: &Key) -> Command {
        Command { key: self.key(scope, key), args: Cmd::new(), plain: None }
    }

    pub(crate) fn key(&self, scope: &Scope, key: &Key) -> String {
        let (prefix, scope, key) = (&self.prefix, scope.name(), key.readable());
        format!("{prefix}tfw1:{{{scope}:{key}}}")
    }

    /// `within` has for each quota when it takes tokens back. For a calendar, the number of the window
    /// that begins at its end is sent.
    fn command(
        &self,
        account: &Account<'_>,
        act: &str,
        tokens: u64,
        reserve: bool,
        within: &[Range<i64>],
        now: Option<i64>,
    ) -> Command {
        let key = self.key(account.scope, account.key);
        let mut args = Cmd::with_capacity(3 + 8 * account.quotas.as_ref().len(), 128);
        if act == "charge"
            && let &[quota] = account.quotas.as_ref()
            && let Windows::Grid { start: grid } = account.windows_of(&quota)
        {
            let (limit, length) = (quota.limit(), length(&quota));
            let most = limit.min(length * 1_000 - 1);
            let reserves = reserve && quota.max_reserved() > 0;
            if quota.capacity() == limit && (1..=most).contains(&tokens) && !reserves {
                args.arg(tokens).write_arg_fmt(quota.counter());
                args.arg(length).arg(limit);
                if grid > 0 || now.is_some() {
                    args.arg(grid).arg(now);
                }
                return Command { key, args, plain: Some((tokens, most)) };
            }
        }
        // No quota has more than 2^53 - 1 to give.
        args.arg(act).arg(tokens.min(Quota::MAX_TOKENS + 1));
        args.arg(now.map(|now| now.to_string()).unwrap_or_default());
        for (i, quota) in account.quotas.into_iter().enumerate() {
            let (limit, capacity) = (quota.limit(), quota.capacity());
            let debt = if reserve { quota.max_reserved() } else { 0 };
            let Range { start: from, end: mut until } = within.get(i).cloned().unwrap_or_default();
            let mut boundaries = Vec::new();
            let (length, grid) = match account.windows_of(quota) {
                Windows::Grid { start } => (length(quota), start as i64),
                Windows::OnCalendar(calendar) => {
                    until = calendar.number(until - 1) + 1;
                    // The window before, this one, two that may begin until the script runs, and
                    // those until what is written now has ended.
                    let first =
                        calendar.number(now.unwrap_or_else(|| instant(self.server_time()))) - 1;
                    let tokens = capacity + quota.max_reserved();
                    let most = if debt > 0 { COMPARED } else { LASTING };
                    let count = tokens.div_ceil(limit.max(1)).min(most) + 4;
                    boundaries.extend([first, calendar.number(i64::MAX)]);
                    boundaries.extend((first..first + count as i64).map(|n| calendar.start_of(n)));
                    (count, ON_A_CALENDAR)
                }
                _ => (length(quota), FROM_FIRST_REQUEST),
            };
            args.write_arg_fmt(quota.counter());
            args.arg(length).arg(limit).arg(capacity);
            args.arg(limit + debt).arg(grid).arg(from).arg(until).arg(boundaries);
        }
        Command { key, args, plain: None }
    }

    /// As far as it is known from the last answer. The script chooses between boundaries around it.
    pub(crate) fn server_time(&self) -> u64 {
        match *sync::lock(&self.told) {
            Some((time, at)) => (time + at.elapsed().as_millis() as i64).max(0) as u64,
            None => SystemClock.now_ms(),
        }
    }

    pub(crate) fn note_time(&self, time: i64) {
        *sync::lock(&self.told) = Some((time, Instant::now()));
    }
}

/// The last instant stands for all that are later.
pub(crate) fn instant(now: u64) -> i64 {
    now.min(Quota::MAX_TOKENS - 1) as i64
}

fn length(quota: &Quota) -> u64 {
    quota.window().as_millis() as u64
}
