//! Merges the questions of a batch into one call of a script: [`MergedCall`].

use redis::{Arg, Cmd, RedisResult, Value};

use super::command::Act;
use super::{Answer, Command, MANY, ONE, unexpected_answer};

/// The answer to a question, for each of its keys.
pub(in super::super) type Answered = RedisResult<Vec<Answer>>;

/// How many of the last questions and kinds are searched for an equal one.
const RECENT: usize = 16;

/// Equal charges of a key are one to the script.
pub(in super::super) struct MergedCall<'a> {
    questions: Vec<EqualQuestions<'a>>,
    keys: usize,
    /// For each question as it was asked: which of these, and how many equal ones come before.
    places: Vec<(usize, u64)>,
}

struct EqualQuestions<'a> {
    /// Those of a key or a group.
    commands: &'a [Command],
    times: u64,
    /// The place of the first key.
    first: usize,
}

impl<'a> MergedCall<'a> {
    pub(in super::super) fn new(asked: impl Iterator<Item = &'a [Command]>) -> Self {
        let mut merged = Self { questions: Vec::new(), keys: 0, places: Vec::new() };
        for commands in asked {
            let place = merged.find_equal(commands).unwrap_or((merged.questions.len(), 0));
            if place.0 == merged.questions.len() {
                merged.questions.push(EqualQuestions { commands, times: 1, first: merged.keys });
                merged.keys += commands.len();
            }
            merged.places.push(place);
        }
        merged
    }

    /// Unless another question of the key came between, or the script can't count them at once.
    fn find_equal(&mut self, commands: &[Command]) -> Option<(usize, u64)> {
        let [command] = commands else { return None };
        let Act::Plain(plain) = command.act else { return None };
        let recent = self.questions.len().saturating_sub(RECENT);
        let is_of_key =
            |of: &EqualQuestions<'_>| of.commands.iter().any(|of| of.key == command.key);
        let i = recent + self.questions[recent..].iter().rposition(is_of_key)?;
        let EqualQuestions { commands, times, .. } = &mut self.questions[i];
        let is_alike = commands.len() == 1 && commands[0].act == command.act;
        (is_alike && *times < plain.most() / plain.tokens).then(|| {
            *times += 1;
            (i, *times - 1)
        })
    }

    fn is_reset(&self) -> bool {
        let Act::General(args) = &self.questions[0].commands[0].act else { return false };
        args.args_iter().len() == 0
    }

    pub(in super::super) fn is_one(&self) -> bool {
        self.keys == 1 && self.places.len() == 1
    }

    /// By the script's hash, or with the script, which the server keeps for later calls by the hash.
    /// Servers and proxies without `SCRIPT` take that, too.
    pub(in super::super) fn to_cmd(&self, brings_script: bool) -> Cmd {
        if self.is_reset() {
            return redis::cmd("DEL").arg(&self.questions[0].commands[0].key).take();
        }
        let mut cmd = Cmd::with_capacity(8 + 3 * self.keys, 128 * self.keys);
        let script = if self.is_one() { &ONE } else { &MANY };
        match brings_script {
            true => cmd.arg("EVAL").arg(&script.code),
            false => cmd.arg("EVALSHA").arg(&script.hash),
        };
        cmd.arg(self.keys);
        // Most commands differ in their keys only.
        let (mut kinds, mut of_which) = (Vec::<&Act>::new(), Vec::with_capacity(self.keys));
        for command in self.questions.iter().flat_map(|of| of.commands) {
            cmd.arg(&command.key);
            let recent = kinds.len().saturating_sub(RECENT);
            let same = kinds[recent..].iter().position(|kind| **kind == command.act);
            of_which.push(same.map_or(kinds.len(), |i| recent + i) as i64 + 1);
            if same.is_none() {
                kinds.push(&command.act);
            }
        }
        if !self.is_one() {
            cmd.arg(kinds.len());
        }
        for args in kinds.iter().map(|kind| kind.args()) {
            if !self.is_one() {
                cmd.arg(args.args_iter().len());
            }
            for arg in args.args_iter() {
                let Arg::Simple(arg) = arg else { continue };
                cmd.arg(arg);
            }
        }
        let mut all_alike = kinds.len() == 1;
        for &EqualQuestions { commands, times, first } in &self.questions {
            let last = first + commands.len() - 1;
            // Below 0: another key of the same group follows.
            of_which[first..last].iter_mut().for_each(|kind| *kind = -*kind);
            of_which[last] += (times as i64 - 1) * kinds.len() as i64;
            all_alike &= commands.len() == 1 && times == 1;
        }
        if !all_alike {
            cmd.arg(of_which);
        }
        cmd
    }

    pub(in super::super) fn parse(&self, value: Value) -> RedisResult<Vec<Answered>> {
        let values = match value {
            Value::ServerError(error) => return Err(error.into()),
            Value::Int(_) if self.is_reset() => return Ok(vec![Ok(Vec::new())]),
            one if self.is_one() => return Ok(vec![Answer::from_one(one).map(|one| vec![one])]),
            Value::Array(values) if values.len() == self.keys + 1 => values,
            _ => return Err(unexpected_answer()),
        };
        let Some((&Value::Int(micros), values)) = values.split_first() else {
            return Err(unexpected_answer());
        };
        let answer = |&(i, nth): &(usize, u64)| {
            let of = &self.questions[i];
            let values = &values[of.first..][..of.commands.len()];
            values.iter().map(|value| nth_answer(value, nth, of, micros)).collect()
        };
        Ok(self.places.iter().map(answer).collect())
    }
}

/// Equal charges are decided in this order.
fn nth_answer(
    value: &Value,
    nth: u64,
    of: &EqualQuestions<'_>,
    micros: i64,
) -> RedisResult<Answer> {
    let value = match (value, &of.commands[0].act) {
        (Value::Int(used), Act::Plain(plain)) if *used >= 0 => {
            Value::Int(used - ((of.times - 1 - nth) * plain.tokens) as i64)
        }
        (Value::Array(each), _) if of.times > 1 => {
            each.get(nth as usize).ok_or_else(unexpected_answer)?.clone()
        }
        (value, _) => value.clone(),
    };
    match value.extract_error()? {
        Value::Int(used) => Answer::plain(micros, used),
        array => Answer::general(array),
    }
}
