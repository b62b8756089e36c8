//! The scripts: how they are called, and what their answers mean.

use std::sync::LazyLock;

use redis::{
    Arg, Cmd, ErrorKind, FromRedisValue, ParsingError, RedisError, RedisResult, ServerErrorKind,
    Value,
};

use crate::decision::Decision;
use crate::quota::{Anchor, Quotas, Span};
use crate::store::charge::Charge;
use crate::window::{State, Window};

mod calendars;
mod command;
mod lua;
pub(super) mod rights;

pub(super) use command::Commands;
pub(super) use lua::Lua;

/// Kinds of decisions among which one of the same kind is looked for.
const RECENT: usize = 16;

/// How often a script is loaded for one call: scripts may be flushed again before the call is back.
pub(super) const LOADS: usize = 3;

/// `window.rs`, in Lua, for one decision.
pub(super) static ONE: LazyLock<Lua> =
    LazyLock::new(|| Lua::new(&with_window(include_str!("script/one.lua"))));

/// The same for several, one after the other.
pub(super) static MANY: LazyLock<Lua> =
    LazyLock::new(|| Lua::new(&with_window(include_str!("script/many.lua"))));

/// Whether a call was refused, and nothing done, because its script has to be loaded.
pub(super) fn is_missing(error: &RedisError) -> bool {
    error.kind() == ErrorKind::Server(ServerErrorKind::NoScript)
}

fn with_window(script: &str) -> String {
    let parts = [
        ("--[[ needs.lua ]]", include_str!("script/needs.lua")),
        ("--[[ plain.lua ]]", include_str!("script/plain.lua")),
        ("--[[ window.lua ]]", include_str!("script/window.lua")),
        ("--[[ expiry.lua ]]", include_str!("script/expiry.lua")),
    ];
    parts.iter().fold(script.to_owned(), |script, (name, part)| script.replace(name, part))
}

/// The beginning of a call of [`ONE`]; what follows are its arguments.
pub(super) fn one(key: &str, args: usize) -> Cmd {
    let mut cmd = Cmd::with_capacity(4 + args, 256);
    cmd.arg("EVALSHA").arg(ONE.hash()).arg(1).arg(key);
    cmd
}

/// The key of a call: of a script, or of a plain command.
pub(super) fn key(call: &Cmd) -> &[u8] {
    let script = args(call, 0).next() == Some(b"EVALSHA");
    args(call, if script { 3 } else { 1 }).next().unwrap_or_default()
}

/// The call of [`MANY`] for what several calls of [`ONE`] ask.
pub(super) fn many<'a>(calls: impl ExactSizeIterator<Item = &'a Cmd> + Clone) -> Cmd {
    let mut cmd = Cmd::with_capacity(8 + 3 * calls.len(), 128 * calls.len());
    cmd.arg("EVALSHA").arg(MANY.hash()).arg(calls.len());
    // Most differ in their keys only.
    let (mut kinds, mut of_which) = (Vec::<&Cmd>::new(), Vec::with_capacity(calls.len()));
    for call in calls {
        cmd.arg(args(call, 3).next());
        let recent = kinds.len().saturating_sub(RECENT);
        let same = kinds[recent..].iter().position(|kind| args(kind, 4).eq(args(call, 4)));
        of_which.push(same.map_or(kinds.len(), |i| recent + i));
        if same.is_none() {
            kinds.push(call);
        }
    }
    cmd.arg(kinds.len());
    for kind in &kinds {
        cmd.arg(args(kind, 4).len());
        args(kind, 4).for_each(|arg| {
            cmd.arg(arg);
        });
    }
    if kinds.len() > 1 {
        of_which.iter().for_each(|kind| {
            cmd.arg(kind + 1);
        });
    }
    cmd
}

fn args(call: &Cmd, from: usize) -> impl ExactSizeIterator<Item = &[u8]> {
    let all = call.args_iter().skip(from);
    all.map(|arg| if let Arg::Simple(arg) = arg { arg } else { b"" })
}

/// In place of the tokens taken.
const OUTSIDE: i64 = -2;

/// What a script says to one decision.
pub(super) enum Answer {
    /// The time, and the tokens used now; if it was refused those used, below 0.
    Plain(i64, i64),
    /// The time, the tokens taken, and the states as they were.
    General(Vec<Option<i64>>),
}

impl Answer {
    /// From the answer of [`ONE`].
    pub(super) fn one(value: Value) -> RedisResult<Self> {
        match value.extract_error()? {
            Value::BulkString(bytes) => {
                let (numbers, []) = bytes.as_chunks::<8>() else { return Err(senseless().into()) };
                let &[used, micros] = numbers else { return Err(senseless().into()) };
                Ok(Self::Plain(time(i64::from_be_bytes(micros)), i64::from_be_bytes(used)))
            }
            // Of a command that decides nothing.
            Value::Int(number) => Ok(Self::General(vec![Some(number)])),
            array => Ok(Self::General(FromRedisValue::from_redis_value(array)?)),
        }
    }

    /// From the answer of [`MANY`] to `n` decisions.
    pub(super) fn many(value: Value, n: usize) -> RedisResult<Vec<RedisResult<Self>>> {
        let values = match value {
            Value::Array(values) if values.len() == n + 1 => values,
            Value::ServerError(error) => return Err(error.into()),
            _ => return Err(senseless().into()),
        };
        let mut values = values.into_iter();
        let Some(Value::Int(micros)) = values.next() else { return Err(senseless().into()) };
        let answer = |value: Value| match value.extract_error()? {
            Value::Int(used) => Ok(Self::Plain(time(micros), used)),
            array => Ok(Self::General(FromRedisValue::from_redis_value(array)?)),
        };
        Ok(values.map(answer).collect())
    }

    /// The server's time, if nothing was done because the boundaries of calendars were not around
    /// it.
    pub(super) fn outside(&self) -> Option<i64> {
        match self {
            Self::General(numbers) => match numbers[..] {
                [Some(now), Some(OUTSIDE)] => Some(now),
                _ => None,
            },
            Self::Plain(..) => None,
        }
    }

    /// What follows from it, worked out here once more, in integers. `None` if the two don't agree.
    /// `now` is the time if it is not the server's.
    pub(super) fn decide(&self, charge: &Charge<'_>, now: Option<i64>) -> Option<Decision> {
        match self {
            Self::Plain(time, used) => plain(charge, now.unwrap_or(*time), *used),
            Self::General(numbers) => general(charge, numbers),
        }
    }
}

/// In milliseconds.
fn time(micros: i64) -> i64 {
    micros / 1_000
}

fn senseless() -> ParsingError {
    "an unexpected answer".into()
}

fn general(charge: &Charge<'_>, answer: &[Option<i64>]) -> Option<Decision> {
    let &[Some(now), Some(taken), ref numbers @ ..] = answer else { return None };
    let (account, mut numbers) = (charge.account, numbers.iter().copied());
    let (mut states, mut seen) = ([None; Quotas::MAX], [None; Quotas::MAX]);
    let mut are_raw = true;
    for (i, quota) in account.quotas().iter().enumerate() {
        let (start, used, until) = (numbers.next()?, numbers.next()?, numbers.next()?);
        if let Anchor::Calendar(calendar) = quota.anchor {
            let (start, used) = (start?, used?);
            let (end, is_stored) = (numbers.next()??, numbers.next()?.is_some());
            let span = Span { start, end };
            seen[i] = Some(Window::known(quota, span, used, until));
            states[i] = until.map(|n| State { start, used, until: calendar.after(start, n) });
            // An end by other zone data binds all nodes (S35), but is not worked out here.
            are_raw &=
                calendar.around(start) == span && (until.is_none() || is_stored || taken > 0);
        } else if let Some(until) = until {
            states[i] = Some(State { start: start?, used: used?, until });
        }
    }
    if numbers.next().is_some() {
        return None;
    }
    let windows = account
        .windows(|i, quota| seen[i].unwrap_or_else(|| account.window(now, quota, |_| states[i])));
    let (mut decision, writes) = charge.decide_over(now, &windows);
    if are_raw {
        decision.note_states(states, writes);
    }
    let agreed = decision.allowed() == (taken >= 0) && decision.granted() as i64 == taken.max(0);
    agreed.then_some(decision)
}

fn plain(charge: &Charge<'_>, now: i64, answer: i64) -> Option<Decision> {
    let refused = answer < 0;
    let used = if refused { -answer } else { answer - charge.ask.cost as i64 };
    let Span { start, end } = charge
        .account
        .windows::<1>(|_, quota| Window::at(now, None, quota, charge.account.shift(quota)))[0]
        .span();
    // Where it was refused there was a state. Where it passed, nothing depends on that.
    let state = State { start, used, until: end };
    let (decision, _) = charge.decide_from(now, [Some(state), None, None, None]);
    (decision.allowed() != refused).then_some(decision)
}
