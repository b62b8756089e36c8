//! Makes the calls of the script for charges and corrections: [`Commands`].

use std::fmt::Write as _;
use std::sync::Arc;

use redis::Cmd;

use super::super::script;
use super::calendars::Calendars;
use crate::key::Key;
use crate::quota::{Anchor, Boundaries, Quota};
use crate::store::account::Account;
use crate::store::adjust::{Adjust, TokenChange};
use crate::store::charge::Charge;
use crate::store::scope::Scope;

/// Stand in place of the grid of quotas that have none.
const FROM_FIRST_REQUEST: i64 = -1;
const ON_A_CALENDAR: i64 = -2;

/// Makes commands for keys that begin with a prefix.
#[derive(Clone)]
pub(crate) struct Commands {
    prefix: Arc<str>,
    calendars: Arc<Calendars>,
}

impl Commands {
    pub(crate) fn new(prefix: &str) -> Self {
        Self { prefix: prefix.into(), calendars: Arc::default() }
    }

    pub(crate) fn prefix(&self) -> &str {
        &self.prefix
    }

    /// Notes the server's time, which is not what earlier commands assumed.
    pub(crate) fn correct_time(&self, time: i64) {
        self.calendars.correct_time(time);
    }

    /// Returns a call for each line of a charge. `now` is the time if it is not the server's.
    pub(crate) fn charge(&self, charge: &Charge<'_>, now: Option<i64>) -> Vec<Cmd> {
        let act = if charge.is_peek() { "peek" } else { "charge" };
        let (reserve, grouped) = (charge.may_reserve(), !charge.is_single());
        let call = |line: Charge<'_>| {
            let (account, cost) = (line.account(), line.cost());
            let general = || self.general_call(&account, act, cost, reserve, grouped, &[], now);
            self.plain_call(&line, now).unwrap_or_else(general)
        };
        charge.each().map(call).collect()
    }

    pub(crate) fn adjust(&self, adjust: &Adjust<'_>, now: Option<i64>) -> Cmd {
        let account = &adjust.account();
        match adjust.change() {
            TokenChange::Return { tokens, until } => {
                self.general_call(account, "return", *tokens, true, false, until, now)
            }
            TokenChange::Take { tokens } => {
                self.general_call(account, "take", *tokens, false, false, &[], now)
            }
        }
    }

    pub(crate) fn reset(key: &str) -> Cmd {
        let mut cmd = redis::cmd("DEL");
        cmd.arg(key);
        cmd
    }

    pub(crate) fn key(&self, scope: &Scope, key: &Key) -> String {
        let mut name = String::with_capacity(64);
        let (prefix, scope, key) = (&self.prefix, scope.name(), key.readable());
        write!(name, "{prefix}tfw1:{{{scope}:{key}}}").expect("writing to a string");
        name
    }

    fn begin_call(&self, account: &Account<'_>) -> Cmd {
        script::begin_call(
            &self.key(account.scope(), account.key()),
            3 + 7 * account.quotas().len(),
        )
    }

    /// Returns the call of the script's fast path, if that is enough.
    fn plain_call(&self, charge: &Charge<'_>, now: Option<i64>) -> Option<Cmd> {
        let (account, cost) = (charge.account(), charge.cost());
        let &[quota] = account.quotas().as_slice() else { return None };
        // The tokens fit between the starts of two windows, in microseconds.
        let plain = quota.capacity == quota.limit
            && (1..=quota.limit.min(quota.window * 1_000 - 1)).contains(&cost)
            && !(charge.is_peek() || charge.may_reserve() && quota.max_reserved > 0);
        let grid = account.grid(&quota).filter(|_| plain)?;
        let mut cmd = self.begin_call(&account);
        cmd.arg(cost).arg(quota.counter().to_string()).arg(quota.window).arg(quota.limit);
        if grid > 0 || now.is_some() {
            cmd.arg(grid).arg(now);
        }
        Some(cmd)
    }

    /// Returns a call of the script. `grouped`: other limits are decided with this one. `until` has
    /// for each quota the instant until which it takes tokens back. For a calendar, the number of
    /// the window that begins then is sent.
    #[allow(clippy::too_many_arguments)]
    fn general_call(
        &self,
        account: &Account<'_>,
        act: &str,
        tokens: u64,
        reserve: bool,
        grouped: bool,
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
                    let compared = debt > 0 && (grouped || account.quotas().len() > 1);
                    Some(self.calendars.boundaries_around(calendar, now, quota, compared))
                }
                _ => None,
            };
            let (length, grid) = match (&boundaries, account.grid(quota)) {
                (Some((_, count)), _) => (*count as u64, ON_A_CALENDAR),
                (None, Some(grid)) => (quota.window, grid as i64),
                (None, None) => (quota.window, FROM_FIRST_REQUEST),
            };
            cmd.arg(quota.counter().to_string()).arg(length).arg(quota.limit);
            cmd.arg(quota.capacity).arg(quota.limit + debt).arg(grid).arg(until);
            if let Some((boundaries, count)) = boundaries {
                let Boundaries { first, last, starts } = &*boundaries;
                cmd.arg(first).arg(last).arg(&starts[..count]);
            }
        }
        cmd
    }
}
