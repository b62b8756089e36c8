//! The commands that a server must have, and its user may call (S31).

use std::sync::LazyLock;

use redis::aio::ConnectionLike;
use redis::{
    Cmd, ErrorKind, FromRedisValue, RedisError, RedisResult, ServerErrorKind, Value, cmd, pipe,
};

use super::lua::Lua;

/// The needed commands, beside `SCRIPT LOAD` and `EVALSHA`, which have to be called first.
const COMMANDS: [&str; 9] =
    ["time", "hincrby", "hget", "hmget", "hset", "hlen", "hgetall", "pexpireat", "del"];

static RIGHTS: LazyLock<Lua> = LazyLock::new(|| Lua::new(include_str!("rights.lua")));

/// Loads scripts on a server, in one round trip. Fails if a needed command is missing there.
pub(crate) async fn load_scripts(
    scripts: &[&Lua],
    connection: &mut (impl ConnectionLike + ?Sized + Send),
) -> RedisResult<()> {
    let mut calls = pipe();
    for script in scripts {
        calls.add_command(script.load_call().clone());
    }
    calls.add_command(load_call().clone()).add_command(ask_call());
    let answers = connection.req_packed_commands(&calls, 0, scripts.len() + 2).await?;
    answers.into_iter().try_for_each(|answer| check_permitted(answer.extract_error()))
}

/// Returns the call that loads the script of [`ask_call`].
pub(crate) fn load_call() -> &'static Cmd {
    RIGHTS.load_call()
}

/// Returns the call that asks which of the commands the server permits.
pub(crate) fn ask_call() -> Cmd {
    let mut ask = cmd("EVALSHA");
    ask.arg(RIGHTS.hash()).arg(0).arg(&COMMANDS);
    ask
}

/// Fails if an answer to these calls says that a command is missing. Decisions show other errors.
pub(crate) fn check_permitted(answer: RedisResult<Value>) -> RedisResult<()> {
    let answers: Vec<i64> = match answer {
        Ok(answer @ Value::Array(_)) => FromRedisValue::from_redis_value(answer)?,
        Err(error) if missing_command(&error).is_some() || error.code() == Some("NOAUTH") => {
            return Err(error);
        }
        _ => return Ok(()),
    };
    let listed = |kind| {
        let commands = COMMANDS.iter().zip(&answers).filter(|(_, answer)| **answer == kind);
        commands.map(|(command, _)| *command).collect::<Vec<_>>().join(", ")
    };
    let (forbidden, absent) = (listed(0), listed(-1));
    // Worded as a server's error.
    Err(if !absent.is_empty() {
        let kind = ErrorKind::Server(ServerErrorKind::ResponseError);
        RedisError::from((kind, "missing", format!("unknown command '{absent}'")))
    } else if !forbidden.is_empty() {
        let kind = ErrorKind::Server(ServerErrorKind::NoPerm);
        RedisError::from((kind, "missing", format!("no permissions to run the '{forbidden}'")))
    } else {
        return Ok(());
    })
}

/// Returns what a server lacks by its error, of a call or within a script, and the name of the
/// command if that is known.
pub(crate) fn missing_command(error: &RedisError) -> Option<(&'static str, Option<&str>)> {
    let said = error.detail()?;
    let named = |after| {
        let (name, _) = said.split_once(after)?.1.split_once('\'')?;
        // Other names may contain a secret.
        let plain = |byte: u8| byte.is_ascii_alphabetic() || b"|, ".contains(&byte);
        (name.len() <= 100 && name.bytes().all(plain)).then_some(name)
    };
    let has = |words: &[&str]| words.iter().any(|words| said.contains(words));
    let forbidden = ["permissions to run the '", "can't run this command"];
    let absent = ["nknown command '", "command called from script", "Invalid command passed"];
    if has(&forbidden) {
        return Some(("Redis does not permit a command that is needed", named(forbidden[0])));
    }
    has(&absent).then(|| ("Redis lacks a command that is needed", named(absent[0])))
}
