//! The commands that a server must have, and its user may call (S31).

use std::sync::LazyLock;

use redis::{Cmd, ErrorKind, RedisError, RedisResult, Value, cmd};

use super::super::link::Handle;
use super::{Lua, with_parts};
use crate::observe;

pub(super) static RIGHTS: LazyLock<Lua> = LazyLock::new(|| Lua::new(&with_parts("--[[ rights ]]")));

const UNCHECKED: &str = "this server of a RedisStore has no redis.acl_check_cmd (Redis 7 has it): \
    which commands it permits is not checked. If it does not permit all that docs/many-nodes.md \
    lists, a count may be written without its expiry";

/// No limit has this key. Proxies choose the server by a script's key, and refuse scripts without
/// one.
const KEY: &str = "tfw1:{}";

pub(crate) async fn check(connection: &mut dyn Handle) -> RedisResult<()> {
    match ask(connection, &[KEY]).await {
        // The user may be confined to the keys of a prefix.
        Err(error) if error.code() == Some("NOPERM") && missing_command(&error).is_none() => {
            ask(connection, &[]).await
        }
        answer => answer,
    }
}

/// One after the other: if the first answer is none of Redis, only its own error says so.
async fn ask(connection: &mut dyn Handle, keys: &[&str]) -> RedisResult<()> {
    for call in calls_with(keys) {
        let answer = connection.req_packed_command(&call).await;
        check_permitted(answer.and_then(Value::extract_error))?;
    }
    Ok(())
}

/// `EVALSHA` of a script that need not be there, and `EVAL`, which asks for all others.
pub(crate) fn calls_with(keys: &[&str]) -> [Cmd; 2] {
    let mut by_hash = cmd("EVALSHA");
    by_hash.arg(&RIGHTS.hash).arg(keys.len()).arg(keys);
    let eval = RIGHTS.eval(&by_hash);
    [by_hash, eval]
}

/// Fails if there is no answer, or if it says that a command is missing. Decisions show other
/// errors.
pub(crate) fn check_permitted(answer: RedisResult<Value>) -> RedisResult<()> {
    let error = match answer {
        Ok(Value::Int(0)) => {
            observe::doubt(UNCHECKED);
            return Ok(());
        }
        Ok(_) => return Ok(()),
        Err(error) => error,
    };
    let decides = matches!(error.code(), Some("NOAUTH" | "NOPERM"));
    let is_answer = matches!(error.kind(), ErrorKind::Server(_) | ErrorKind::Extension);
    if is_answer && !decides && missing_command(&error).is_none() { Ok(()) } else { Err(error) }
}

/// Within a script, too; with the command, if that is known.
pub(crate) fn missing_command(error: &RedisError) -> Option<(&'static str, Option<&str>)> {
    let said = error.detail()?;
    let named = |after| {
        let (name, _) = said.split_once(after)?.1.split_once('\'')?;
        // Other names may contain a secret.
        let plain = |byte: u8| byte.is_ascii_alphabetic() || b"|, _".contains(&byte);
        (name.len() <= 100 && name.bytes().all(plain)).then_some(name)
    };
    let has = |words: &[&str]| words.iter().any(|words| said.contains(words));
    let forbidden = ["permissions to run the '", "can't run this command"];
    let absent = ["nknown command '", "command called from", "Invalid command passed"];
    // Versions 5.1 and 5.4 of Lua word it in these ways.
    let of_lua = ["global variable '", "global '", "field '", "upvalue '"];
    if has(&forbidden) {
        Some(("Redis does not permit a command that is needed", named(forbidden[0])))
    } else if has(&absent) {
        Some(("Redis lacks a command that is needed", named(absent[0])))
    } else if has(&["rong number of args calling"]) {
        Some(("Redis lacks options that are needed, as of Redis 7.0", Some("pexpireat")))
    } else if has(&["nonexistent global variable", "attempt to call", "attempt to index global"]) {
        Some(("Redis lacks a function of Lua that is needed", of_lua.into_iter().find_map(named)))
    } else {
        None
    }
}
