//! Merges the questions of a batch into one call of the script: [`MergedCall`].

use redis::{Cmd, RedisResult, Value};

use super::{Answer, MANY, args_from, unexpected_answer};

/// How many of the last questions and kinds are searched for an equal one.
const RECENT: usize = 16;

/// The fewest arguments of the script's general path.
const GENERAL: usize = 11;

/// Equal charges of a key are one to the script.
pub(in super::super) struct MergedCall<'a> {
    questions: Vec<EqualQuestions<'a>>,
    keys: usize,
    /// Of each question as it was asked: which of these, and how many equal ones come before.
    places: Vec<(usize, u64)>,
}

struct EqualQuestions<'a> {
    /// Of `ONE`, for a key or a group.
    calls: &'a [Cmd],
    times: u64,
    /// The place of the first key.
    first: usize,
    /// Of several, by [`parse_plain`].
    tokens: Option<(u64, u64)>,
}

impl<'a> MergedCall<'a> {
    pub(in super::super) fn new(asked: impl Iterator<Item = &'a [Cmd]>) -> Self {
        let mut merged = Self { questions: Vec::new(), keys: 0, places: Vec::new() };
        for calls in asked {
            let place = merged.find_equal(calls).unwrap_or((merged.questions.len(), 0));
            if place.0 == merged.questions.len() {
                let first = merged.keys;
                merged.questions.push(EqualQuestions { calls, times: 1, first, tokens: None });
                merged.keys += calls.len();
            }
            merged.places.push(place);
        }
        merged
    }

    /// Unless another question of the key came between, or the script can't count them at once.
    fn find_equal(&mut self, calls: &[Cmd]) -> Option<(usize, u64)> {
        let [call] = calls else { return None };
        let is_of_key = |of: &Cmd| args_from(of, 3).next() == args_from(call, 3).next();
        let recent = self.questions.len().saturating_sub(RECENT);
        let mut last = self.questions[recent..].iter();
        let i = recent + last.rposition(|of| of.calls.iter().any(is_of_key))?;
        let EqualQuestions { calls: [equal], times, tokens, .. } = &mut self.questions[i] else {
            return None;
        };
        if !args_from(equal, 4).eq(args_from(call, 4)) {
            return None;
        }
        let (cost, most) = tokens.or_else(|| parse_plain(call))?;
        (*times < most / cost).then(|| {
            *tokens = Some((cost, most));
            *times += 1;
            (i, *times - 1)
        })
    }

    pub(in super::super) fn to_cmd(&self) -> Cmd {
        let mut cmd = Cmd::with_capacity(8 + 3 * self.keys, 128 * self.keys);
        cmd.arg("EVALSHA").arg(&MANY.hash).arg(self.keys);
        // Most calls differ in their keys only.
        let (mut kinds, mut of_which) = (Vec::<&Cmd>::new(), Vec::with_capacity(self.keys));
        for call in self.questions.iter().flat_map(|of| of.calls) {
            cmd.arg(args_from(call, 3).next());
            let recent = kinds.len().saturating_sub(RECENT);
            let same =
                kinds[recent..].iter().position(|kind| args_from(kind, 4).eq(args_from(call, 4)));
            of_which.push(same.map_or(kinds.len(), |i| recent + i) as i64 + 1);
            if same.is_none() {
                kinds.push(call);
            }
        }
        cmd.arg(kinds.len());
        for kind in &kinds {
            cmd.arg(args_from(kind, 4).len());
            args_from(kind, 4).for_each(|arg| {
                cmd.arg(arg);
            });
        }
        let mut all_alike = kinds.len() == 1;
        for &EqualQuestions { calls, times, first, .. } in &self.questions {
            let last = first + calls.len() - 1;
            // Below 0: another key of the same group follows.
            of_which[first..last].iter_mut().for_each(|kind| *kind = -*kind);
            of_which[last] += (times as i64 - 1) * kinds.len() as i64;
            all_alike &= calls.len() == 1 && times == 1;
        }
        if !all_alike {
            cmd.arg(of_which);
        }
        cmd
    }

    pub(in super::super) fn parse(&self, value: Value) -> RedisResult<Vec<RedisResult<Answer>>> {
        let values = match value {
            Value::Array(values) if values.len() == self.keys + 1 => values,
            Value::ServerError(error) => return Err(error.into()),
            _ => return Err(unexpected_answer()),
        };
        let Some((&Value::Int(micros), values)) = values.split_first() else {
            return Err(unexpected_answer());
        };
        let answer = |&(i, nth): &(usize, u64)| {
            let of = &self.questions[i];
            match (&values[of.first..][..of.calls.len()], of.tokens) {
                ([value], Some((cost, _))) => nth_answer(value, nth, of.times, cost, micros),
                ([value], None) => to_answer(value, micros),
                (group, _) => {
                    let answers = group.iter().map(|value| to_answer(value, micros));
                    answers.collect::<RedisResult<_>>().map(Answer::Group)
                }
            }
        };
        Ok(self.places.iter().map(answer).collect())
    }
}

/// The tokens of a plain charge, and how many the script can count at once: the limit, or how many
/// fit between the starts of two windows.
fn parse_plain(call: &Cmd) -> Option<(u64, u64)> {
    let mut args = args_from(call, 4);
    let is_plain = args.len() < GENERAL;
    let mut next = || str::from_utf8(args.next()?).ok();
    let (cost, _, length, limit) = (next()?, next()?, next()?, next()?);
    let number = |arg: &str| arg.parse::<u64>().ok();
    let most = number(length)?.saturating_mul(1_000).saturating_sub(1).min(number(limit)?);
    number(cost).filter(|cost| is_plain && *cost > 0).map(|cost| (cost, most))
}

/// Equal charges are decided in this order.
fn nth_answer(value: &Value, nth: u64, times: u64, cost: u64, micros: i64) -> RedisResult<Answer> {
    match value {
        Value::Int(used) if *used >= 0 => {
            Answer::plain(micros, used - ((times - 1 - nth) * cost) as i64)
        }
        Value::Array(each) => {
            to_answer(each.get(nth as usize).ok_or_else(unexpected_answer)?, micros)
        }
        all => to_answer(all, micros),
    }
}

fn to_answer(value: &Value, micros: i64) -> RedisResult<Answer> {
    match value.clone().extract_error()? {
        Value::Int(used) => Answer::plain(micros, used),
        array => Answer::general(array),
    }
}
