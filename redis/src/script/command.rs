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

/// A question about a key.
pub(crate) struct Command {
    pub(crate) key: String,
    pub(super) act: Act,
}

pub(super) enum Act {
    Plain(Plain),
    /// The arguments of the script; none for a reset, which is a call of its own.
    General(Cmd),
}

/// A charge of one quota whose count is a number to the script. Its arguments are written once for
/// all equal ones of a call.
#[derive(Clone, Copy, PartialEq)]
pub(super) struct Plain {
    pub(super) tokens: u64,
    quota: Quota,
    grid: u64,
    now: Option<i64>,
}

impl Plain {
    /// How many tokens the script can count at once: the limit, or how many fit between the starts
    /// of two windows in microseconds.
    pub(super) fn most(&self) -> u64 {
        self.quota.limit().min(length(&self.quota) * 1_000 - 1)
    }
}

impl Act {
    pub(super) fn args(&self) -> Cmd {
        let Plain { tokens, quota, grid, now } = match self {
            Self::Plain(plain) => plain,
            Self::General(args) => return args.clone(),
        };
        let mut args = Cmd::new();
        args.arg(tokens).arg(quota.counter()).arg(length(quota)).arg(quota.limit());
        if *grid > 0 || now.is_some() {
            args.arg(grid).arg(now);
        }
        args
    }
}

/// Alike ones have the same arguments.
impl PartialEq for Act {
    fn eq(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Plain(one), Self::Plain(other)) => one == other,
            (Self::General(one), Self::General(other)) => one.args_iter().eq(other.args_iter()),
            _ => false,
        }
    }
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
        Command { key: self.key(scope, key), act: Act::General(Cmd::new()) }
    }

    pub(crate) fn key(&self, scope: &Scope, key: &Key) -> String {
        let (scope, key) = (scope.name(), key.readable());
        let mut name = String::with_capacity(self.prefix.len() + scope.len() + key.len() + 8);
        name.extend([&self.prefix, "tfw1:{", scope, ":", &key, "}"]);
        name
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
        if act == "charge"
            && let &[quota] = account.quotas.as_ref()
            && let Windows::Grid { start: grid } = account.windows_of(&quota)
        {
            let plain = Plain { tokens, quota, grid, now };
            let reserves = reserve && quota.max_reserved() > 0;
            let is_plain = quota.capacity() == quota.limit() && !reserves;
            if is_plain && (1..=plain.most()).contains(&tokens) {
                return Command { key, act: Act::Plain(plain) };
            }
        }
        let mut args = Cmd::with_capacity(3 + 8 * account.quotas.as_ref().len(), 128);
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
        Command { key, act: Act::General(args) }
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

pub(super) fn length(quota: &Quota) -> u64 {
    quota.window().as_millis() as u64
}
