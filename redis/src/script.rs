//! The scripts: how they are called, and what their answers mean.

use std::ops::RangeInclusive;
use std::sync::LazyLock;

use redis::{ErrorKind, FromRedisValue, RedisError, RedisResult, Script, Value};

use tower_fixed_window::store::{Account, Charge, State, Windows};
use tower_fixed_window::{Decision, Quota};

mod command;
mod merged;

use command::length;
pub(super) use command::{Command, Commands, instant};
pub(super) use merged::{Answered, MergedCall};

/// `window.rs`, in Lua, for one decision. Some proxies run only scripts whose commands and keys are
/// literals, `redis.call('HGET', KEYS[1], ..)`: tests/lints looks at each.
static ONE: LazyLock<Lua> =
    LazyLock::new(|| Lua::new(&with_parts("--[[ one ]]").replace("[place]", "[1]")));

static MANY: LazyLock<Lua> =
    LazyLock::new(|| Lua::new(&with_parts(include_str!("script/many.lua"))));

/// A part of `window.lua` may name those that follow it.
fn with_parts(script: &str) -> String {
    let parts = include_str!("script/window.lua").split("\n----- ").skip(1);
    parts.fold(script.to_owned(), |script, part| {
        let (name, code) = part.split_once('\n').unwrap_or_default();
        script.replace(&format!("--[[ {name} ]]"), code.trim_end())
    })
}

struct Lua {
    hash: String,
    code: String,
}

impl Lua {
    /// Strips the comments and indents of the code, which travels with calls.
    fn new(code: &str) -> Self {
        let lines = code.lines().map(str::trim).filter(|line| !line.starts_with("--"));
        let code = lines.collect::<Vec<_>>().join("\n");
        Self { hash: Script::new(&code).get_hash().to_owned(), code }
    }
}

/// In place of the tokens taken: the time is outside of the calendars' boundaries.
const OUTSIDE: i64 = -2;

/// The numbers that scripts know exactly. No other one is an answer.
const IN_SCRIPTS: RangeInclusive<i64> = -(1 << 53)..=1 << 53;

/// The script's answer for a key.
pub(super) enum Answer {
    /// The time, and the tokens used now; if the charge was refused, -(tokens used + 1).
    Plain(i64, i64),
    /// The time, the tokens taken, and the states as they were.
    General(Vec<Option<i64>>),
}

impl Answer {
    /// The server's. A reset's answer has none.
    pub(super) fn time(&self) -> Option<i64> {
        match self {
            Self::Plain(time, _) => Some(*time),
            Self::General(numbers) => numbers.get(1).and_then(|_| numbers[0]),
        }
    }

    fn from_one(value: Value) -> RedisResult<Self> {
        let Value::BulkString(bytes) = value else { return Self::general(value) };
        let (&[used, micros], []) = bytes.as_chunks::<8>() else { return Err(unexpected_answer()) };
        Self::plain(i64::from_be_bytes(micros), i64::from_be_bytes(used))
    }

    fn plain(micros: i64, used: i64) -> RedisResult<Self> {
        let is_exact = IN_SCRIPTS.contains(&micros) && IN_SCRIPTS.contains(&used);
        is_exact.then_some(Self::Plain(micros / 1_000, used)).ok_or_else(unexpected_answer)
    }

    fn general(array: Value) -> RedisResult<Self> {
        // The library would take a nil for an empty array.
        let Value::Array(_) = array else { return Err(unexpected_answer()) };
        let numbers = Vec::<Option<i64>>::from_redis_value(array);
        let are_exact = |numbers: &Vec<_>| {
            numbers.iter().flatten().all(|number| IN_SCRIPTS.contains(number))
                && matches!(numbers[..], [Some(_), Some(_), ..])
        };
        numbers.ok().filter(are_exact).map(Self::General).ok_or_else(unexpected_answer)
    }

    fn seen(&self, line: (Account<'_>, u64), now: Option<i64>) -> Option<Seen> {
        match self {
            Self::Plain(time, used) => {
                let taken = if *used < 0 { 0 } else { line.1 as i64 };
                let used = if *used < 0 { -used - 1 } else { used - taken };
                plain_state(line.0, now.unwrap_or(*time), used, taken)
            }
            Self::General(numbers) => general_states(line.0, numbers),
        }
    }
}

/// Nothing was done, because the server's time is outside of the calendars' boundaries.
pub(super) fn is_outside(answers: &[Answer]) -> bool {
    let is = |numbers: &[_]| matches!(numbers, [Some(_), Some(OUTSIDE)]);
    answers.iter().any(|answer| matches!(answer, Answer::General(numbers) if is(numbers)))
}

/// Computes the decision once more, in integers. `None` if the script has decided otherwise. `now` is
/// the time if it is not the server's.
pub(super) fn decide(
    answers: &[Answer],
    charge: &Charge<'_>,
    now: Option<i64>,
) -> Option<Decision> {
    if answers.len() != charge.lines().len() {
        return None;
    }
    let seen = charge.lines().zip(answers).map(|(line, of)| of.seen(line, now));
    let seen = seen.collect::<Option<Vec<_>>>()?;
    let time = seen.iter().map(|seen| seen.now).max()?;
    let mut states = seen.iter().flat_map(|seen| &seen.states);
    let time = u64::try_from(time).ok()?;
    let (decision, _) = charge.decide(time, |_, _| states.next().copied().flatten());
    let mut taken = charge.lines().zip(seen.iter().map(|seen| seen.taken));
    let agreed = match decision.is_allowed() {
        true if charge.is_peek() => taken.all(|(_, taken)| taken == 0),
        true => taken.all(|((_, cost), taken)| taken == cost as i64),
        // Nothing is 0 for a line that would have passed beside others.
        false => taken.all(|(_, taken)| taken <= 0),
    };
    agreed.then_some(decision)
}

fn unexpected_answer() -> RedisError {
    (ErrorKind::UnexpectedReturnType, "an unexpected answer").into()
}

struct Seen {
    now: i64,
    /// At most 0 if the charge was refused.
    taken: i64,
    /// As they were stored before, for each quota.
    states: Vec<Option<State>>,
}

fn general_states(account: Account<'_>, answer: &[Option<i64>]) -> Option<Seen> {
    let &[Some(now), Some(taken), ref numbers @ ..] = answer else { return None };
    let mut numbers = numbers.iter().copied();
    let mut states = vec![None; account.quotas.as_ref().len()];
    for (state, quota) in states.iter_mut().zip(account.quotas) {
        let (start, used, n) = (numbers.next()?, numbers.next()?, numbers.next()?);
        let calendar = match account.windows_of(quota) {
            Windows::OnCalendar(calendar) => Some((calendar, numbers.next()?, numbers.next()?)),
            _ => None,
        };
        let Some(n) = n else { continue };
        let state = state.insert(State::default());
        (state.start, state.used) = (start?, used?);
        let mut end = n.saturating_mul(length(quota) as i64).saturating_add(state.start);
        if let Some((calendar, first, number)) = calendar {
            state.end = first.filter(|first| state.start < *first)?;
            end = if n == 1 { state.end } else { calendar.start_of(number?.saturating_add(n)) };
        }
        // No window is empty, and no count ends before it begins.
        state.until =
            Some(end.min(Quota::MAX_TOKENS as i64)).filter(|end| n > 0 && state.start <= *end)?;
    }
    numbers.next().is_none().then_some(Seen { now, taken, states })
}

fn plain_state(account: Account<'_>, now: i64, used: i64, taken: i64) -> Option<Seen> {
    let quota = account.quotas.as_ref().first()?;
    let Windows::Grid { start: grid } = account.windows_of(quota) else { return None };
    let length = length(quota) as i64;
    // A refused charge had a state. If the charge passed, nothing depends on that.
    let mut state = State::default();
    state.used = used;
    state.start = now - now.checked_sub(grid as i64)?.rem_euclid(length);
    state.until = state.start.saturating_add(length);
    Some(Seen { now, taken, states: vec![Some(state)] })
}

#[cfg(test)]
#[path = "../../tests/unit/script.rs"]
mod tests;
