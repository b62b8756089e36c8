//! A Redis server: the commands that the store needs, and its real scripts, over a simulated clock.
//!
//! Nothing in here is lenient: `tests/real.rs` holds it to a real server by random traces.

use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap};
use std::mem;
use std::sync::Arc;

use mlua::{Function, Lua, Table, Value};

/// A server's answer, as it goes over the wire.
#[derive(Clone, PartialEq, Debug)]
pub enum Reply {
    Status(String),
    Int(i64),
    Bulk(Vec<u8>),
    Nil,
    Array(Vec<Reply>),
    Error(String),
}

impl Reply {
    fn bulk(text: impl Into<Vec<u8>>) -> Self {
        Self::Bulk(text.into())
    }

    fn status(text: &str) -> Self {
        Self::Status(text.to_owned())
    }

    fn error(text: impl Into<String>) -> Self {
        Self::Error(text.into())
    }
}

/// A hash.
pub type Fields = BTreeMap<Vec<u8>, Vec<u8>>;

/// Copies share it until something is written.
#[derive(Clone, PartialEq, Debug)]
enum Held {
    Hash(Arc<Fields>),
    Text(Arc<[u8]>),
}

#[derive(Clone, PartialEq, Debug)]
pub struct Entry {
    held: Held,
    /// In milliseconds.
    expires: Option<i64>,
}

/// The data of a server: a failover loses a part. A replica shares them until something is written.
#[derive(Clone, Default, Debug)]
pub struct Data(Arc<BTreeMap<Arc<[u8]>, Entry>>);

impl Data {
    fn change(&mut self) -> &mut BTreeMap<Arc<[u8]>, Entry> {
        Arc::make_mut(&mut self.0)
    }

    pub fn has(&self, key: &[u8]) -> bool {
        self.0.contains_key(key)
    }

    /// The fields of a hash.
    pub fn fields(&self, key: &[u8]) -> Option<&Arc<Fields>> {
        match &self.0.get(key)?.held {
            Held::Hash(fields) => Some(fields),
            Held::Text(_) => None,
        }
    }
}

#[derive(Default, Debug)]
pub struct Server {
    db: Db,
    /// Sources by their hash.
    scripts: BTreeMap<String, Vec<u8>>,
}

/// A key that a command has written, before and after.
#[derive(Debug)]
pub struct Write {
    pub key: Vec<u8>,
    pub before: Arc<Fields>,
    /// What a script has written and changed again.
    pub between: Vec<Arc<Fields>>,
    pub after: Arc<Fields>,
}

#[derive(Default, Debug)]
struct Db {
    data: Data,
    micros: i64,
    replica: bool,
    /// Written by the command under way: how it was before each write.
    written: BTreeMap<Vec<u8>, Vec<Arc<Fields>>>,
}

const WRONG_TYPE: &str = "WRONGTYPE Operation against a key holding the wrong kind of value";
const NOT_INTEGER: &str = "ERR value is not an integer or out of range";

impl Server {
    /// Answers a command at a time in microseconds since the epoch, and says what it has written.
    pub fn call(&mut self, args: &[Vec<u8>], micros: i64) -> (Reply, Vec<Write>) {
        self.db.micros = micros;
        let reply = match &upper(args)[..] {
            b"EVAL" => self.eval(args),
            b"EVALSHA" => self.eval_sha(args),
            _ => self.db.command(args),
        };
        let written = mem::take(&mut self.db.written).into_iter();
        let after = |key: &[u8]| self.db.data.fields(key).cloned().unwrap_or_default();
        let write = |(key, mut states): (Vec<u8>, Vec<_>)| {
            let between = states.split_off(1);
            let before = states.remove(0);
            Write { after: after(&key), key, before, between }
        };
        (reply, written.map(write).collect())
    }

    pub fn data(&self) -> &Data {
        &self.db.data
    }

    pub fn replace_data(&mut self, data: Data) {
        self.db.data = data;
    }

    /// Takes keys out, to put them on another server.
    pub fn take(&mut self, mut which: impl FnMut(&[u8]) -> bool) -> Vec<(Arc<[u8]>, Entry)> {
        let keys: Vec<_> = self.db.data.0.keys().filter(|key| which(key)).cloned().collect();
        let take = |key| self.db.data.change().remove_entry(&key);
        keys.into_iter().filter_map(take).collect()
    }

    pub fn put(&mut self, keys: Vec<(Arc<[u8]>, Entry)>) {
        self.db.data.change().extend(keys);
    }

    pub fn forget_scripts(&mut self) {
        self.scripts.clear();
    }

    pub fn is_replica(&self) -> bool {
        self.db.replica
    }

    pub fn set_replica(&mut self, replica: bool) {
        self.db.replica = replica;
    }

    /// Keeps the script for later calls by its hash.
    fn eval(&mut self, args: &[Vec<u8>]) -> Reply {
        let Some(source) = args.get(1) else { return Reply::error("ERR wrong number of arguments") };
        let hash = sha1_smol::Sha1::from(source).hexdigest();
        self.scripts.insert(hash.clone(), source.clone());
        let mut args = args.to_vec();
        args[1] = hash.into_bytes();
        self.eval_sha(&args)
    }

    fn eval_sha(&mut self, args: &[Vec<u8>]) -> Reply {
        let Some(keys) = args.get(2).and_then(|keys| integer(keys)) else {
            return Reply::error(NOT_INTEGER);
        };
        let Some(keys) = usize::try_from(keys).ok().filter(|keys| 3 + keys <= args.len()) else {
            return Reply::error("ERR Number of keys can't be greater than number of args");
        };
        let hash = String::from_utf8_lossy(&args[1]).to_ascii_lowercase();
        let Some(source) = self.scripts.get(&hash) else {
            return Reply::error("NOSCRIPT No matching script. Please use EVAL.");
        };
        let (keys, argv) = args[3..].split_at(keys);
        run(&mut self.db, &hash, source, keys, argv)
    }
}

impl Db {
    fn millis(&self) -> i64 {
        self.micros.div_euclid(1_000)
    }

    fn command(&mut self, args: &[Vec<u8>]) -> Reply {
        let name = upper(args);
        let writes: &[&[u8]] =
            &[b"HSET", b"HDEL", b"HINCRBY", b"DEL", b"UNLINK", b"PEXPIREAT", b"SET", b"FLUSHALL"];
        if self.replica && writes.contains(&&name[..]) {
            return Reply::error("READONLY You can't write against a read only replica.");
        }
        let [_, args @ ..] = args else { return Reply::error("ERR unknown command") };
        match (&name[..], args) {
            (b"PING", _) => Reply::status("PONG"),
            (b"CLIENT" | b"SELECT" | b"AUTH", _) => Reply::status("OK"),
            (b"ROLE", []) => {
                let role = if self.replica { "slave" } else { "master" };
                Reply::Array(vec![Reply::bulk(role), Reply::Int(0), Reply::Array(vec![])])
            }
            (b"FLUSHALL", _) => {
                let keys: Vec<_> = self.data.0.keys().cloned().collect();
                keys.iter().for_each(|key| _ = self.remove(key));
                Reply::status("OK")
            }
            (b"TIME", []) => {
                let (seconds, micros) =
                    (self.micros.div_euclid(1_000_000), self.micros.rem_euclid(1_000_000));
                let parts = [seconds, micros].map(|part| Reply::bulk(part.to_string()));
                Reply::Array(parts.into())
            }
            (b"SET", [key, value]) => {
                self.note(key);
                let entry = Entry { held: Held::Text(value[..].into()), expires: None };
                self.data.change().insert(key[..].into(), entry);
                Reply::status("OK")
            }
            (b"GET", [key]) => match self.entry(key).map(|entry| entry.held.clone()) {
                None => Reply::Nil,
                Some(Held::Text(text)) => Reply::bulk(&text[..]),
                Some(Held::Hash(_)) => Reply::error(WRONG_TYPE),
            },
            (b"DEL" | b"UNLINK", [_, ..]) => {
                Reply::Int(args.iter().filter(|key| self.remove(key)).count() as i64)
            }
            (b"EXISTS", [_, ..]) => {
                Reply::Int(args.iter().filter(|key| self.entry(key).is_some()).count() as i64)
            }
            (b"HGET", [key, field]) => self.read(key, |hash| bulk(hash.get(field))),
            (b"HLEN", [key]) => self.read(key, |hash| Reply::Int(hash.len() as i64)),
            (b"HMGET", [key, fields @ ..]) if !fields.is_empty() => self.read(key, |hash| {
                Reply::Array(fields.iter().map(|field| bulk(hash.get(field))).collect())
            }),
            (b"HGETALL", [key]) => self.read(key, |hash| {
                let pairs = hash.iter().flat_map(|(field, value)| [field, value]);
                Reply::Array(pairs.map(|part| Reply::Bulk(part.clone())).collect())
            }),
            (b"HSET", [key, pairs @ ..]) if !pairs.is_empty() && pairs.len() % 2 == 0 => self
                .write(key, |hash| {
                    let new = |pair: &[Vec<u8>]| hash.insert(pair[0].clone(), pair[1].clone());
                    let new = pairs.chunks(2).map(new).filter(Option::is_none).count();
                    Reply::Int(new as i64)
                }),
            (b"HDEL", [key, fields @ ..]) if !fields.is_empty() => {
                if self.entry(key).is_none() {
                    return Reply::Int(0);
                }
                let reply = self.write(key, |hash| {
                    let gone = fields.iter().filter(|field| hash.remove(*field).is_some());
                    Reply::Int(gone.count() as i64)
                });
                if self
                    .entry(key)
                    .is_some_and(|entry| matches!(&entry.held, Held::Hash(hash) if hash.is_empty()))
                {
                    self.data.change().remove(&key[..]);
                }
                reply
            }
            (b"HINCRBY", [key, field, by]) => {
                let Some(by) = integer(by) else { return Reply::error(NOT_INTEGER) };
                let found = match self.entry(key).map(|entry| &entry.held) {
                    None => None,
                    Some(Held::Hash(hash)) => hash.get(field),
                    Some(Held::Text(_)) => return Reply::error(WRONG_TYPE),
                };
                let Some(count) = found.map_or(Some(0), |count| integer(count)) else {
                    return Reply::error("ERR hash value is not an integer");
                };
                let Some(count) = count.checked_add(by) else {
                    return Reply::error("ERR increment or decrement would overflow");
                };
                self.write(key, |hash| {
                    hash.insert(field.clone(), count.to_string().into());
                    Reply::Int(count)
                })
            }
            (b"PEXPIREAT", [key, at, options @ ..]) if options.len() < 2 => {
                let option = options.first().map(|option| &option[..]);
                if !matches!(option, None | Some(b"NX" | b"GT")) {
                    return Reply::error("ERR Unsupported option");
                }
                let Some(at) = integer(at) else { return Reply::error(NOT_INTEGER) };
                let now = self.millis();
                let Some(entry) = self.entry(key) else { return Reply::Int(0) };
                let sets = match option {
                    Some(b"NX") => entry.expires.is_none(),
                    Some(_) => entry.expires.is_some_and(|then| then < at),
                    None => true,
                };
                if !sets {
                    return Reply::Int(0);
                }
                if at <= now {
                    self.remove(key);
                } else if let Some(entry) = self.data.change().get_mut(&key[..]) {
                    entry.expires = Some(at);
                }
                Reply::Int(1)
            }
            (b"PEXPIRETIME", [key]) => {
                Reply::Int(self.entry(key).map_or(-2, |entry| entry.expires.unwrap_or(-1)))
            }
            (name, _) => {
                let name = String::from_utf8_lossy(name).to_ascii_lowercase();
                Reply::error(format!("ERR unknown command or number of arguments: '{name}'"))
            }
        }
    }

    /// Returns the value of a key, unless the key has expired.
    fn entry(&mut self, key: &[u8]) -> Option<&Entry> {
        let now = self.millis();
        if self.data.0.get(key)?.expires.is_some_and(|at| now > at) && !self.replica {
            self.data.change().remove(key);
        }
        // A replica waits for its master to expire it, and hides it meanwhile.
        self.data.0.get(key).filter(|entry| entry.expires.is_none_or(|at| now <= at))
    }

    /// Remembers how a key was before it is written.
    fn note(&mut self, key: &[u8]) {
        let _ = self.entry(key);
        let fields = self.data.fields(key).cloned().unwrap_or_default();
        self.written.entry(key.to_vec()).or_default().push(fields);
    }

    fn remove(&mut self, key: &[u8]) -> bool {
        self.note(key);
        self.data.change().remove(key).is_some()
    }

    fn read(&mut self, key: &[u8], f: impl Fn(&Fields) -> Reply) -> Reply {
        match self.entry(key).map(|entry| &entry.held) {
            None => f(&BTreeMap::new()),
            Some(Held::Hash(hash)) => f(hash),
            Some(Held::Text(_)) => Reply::error(WRONG_TYPE),
        }
    }

    fn write(&mut self, key: &[u8], f: impl FnOnce(&mut Fields) -> Reply) -> Reply {
        self.note(key);
        let new = || Entry { held: Held::Hash(Arc::default()), expires: None };
        match &mut self.data.change().entry(key.into()).or_insert_with(new).held {
            Held::Hash(hash) => f(Arc::make_mut(hash)),
            Held::Text(_) => Reply::error(WRONG_TYPE),
        }
    }
}

fn bulk(value: Option<&Vec<u8>>) -> Reply {
    value.map_or(Reply::Nil, |value| Reply::Bulk(value.clone()))
}

fn upper(args: &[Vec<u8>]) -> Vec<u8> {
    args.first().map(|name| name.to_ascii_uppercase()).unwrap_or_default()
}

/// As Redis reads integers: no sign but `-`, no zeros in front.
fn integer(text: &[u8]) -> Option<i64> {
    let number: i64 = str::from_utf8(text).ok()?.parse().ok()?;
    (number.to_string().as_bytes() == text).then_some(number)
}

/// Lua, as a server embeds it. Compiled scripts are kept for all servers of a thread.
struct Engine {
    lua: Lua,
    guarded: Function,
    compiled: HashMap<String, Function>,
}

thread_local! {
    static ENGINE: RefCell<Engine> = RefCell::new(Engine::new().expect("Lua starts"));
    /// The server whose script is run.
    static RUNNING: RefCell<Db> = RefCell::default();
}

/// `redis.call` raises what `redis.pcall` returns. Who catches that himself gets its text.
const PRELUDE: &str = r"
function redis.call(...)
  local reply = redis.pcall(...)
  if type(reply) == 'table' and reply.err then
    error(reply, 0)
  end
  return reply
end
local catch = pcall
function pcall(...)
  local all = { catch(...) }
  if not all[1] and type(all[2]) == 'table' and all[2].err then
    return false, all[2].err
  end
  return unpack(all)
end
return function(script)
  local well, answer = catch(script)
  if well or type(answer) == 'table' then
    return answer
  end
  return { err = 'ERR ' .. tostring(answer) }
end
";

impl Engine {
    fn new() -> mlua::Result<Self> {
        let lua = Lua::new();
        let call = |lua: &Lua, args: mlua::Variadic<Value>| {
            let args: Option<Vec<_>> = args.iter().map(argument).collect();
            let reply = match args {
                Some(args) => RUNNING.with_borrow_mut(|db| db.command(&args)),
                None => {
                    Reply::error("ERR Lua redis lib command arguments must be strings or integers")
                }
            };
            to_lua(lua, reply)
        };
        let pack = |lua: &Lua, (format, a, b): (mlua::LuaString, f64, f64)| {
            assert_eq!(format.as_bytes(), b">i8i8", "no other format is known here");
            lua.create_string([a, b].map(|n| (n as i64).to_be_bytes()).concat())
        };
        let globals = lua.globals();
        let (redis, structs) = (lua.create_table()?, lua.create_table()?);
        redis.set("pcall", lua.create_function(call)?)?;
        // Every user may do everything.
        redis.set("acl_check_cmd", lua.create_function(|_, _: mlua::LuaString| Ok(true))?)?;
        structs.set("pack", lua.create_function(pack)?)?;
        globals.set("redis", redis)?;
        globals.set("struct", structs)?;
        let guarded = lua.load(PRELUDE).eval()?;
        Ok(Self { lua, guarded, compiled: HashMap::new() })
    }

    fn run(
        &mut self,
        hash: &str,
        source: &[u8],
        keys: &[Vec<u8>],
        argv: &[Vec<u8>],
    ) -> mlua::Result<Reply> {
        let script = match self.compiled.get(hash) {
            Some(script) => script.clone(),
            None => {
                let script = self.lua.load(source).set_name("@user_script").into_function()?;
                self.compiled.insert(hash.to_owned(), script.clone());
                script
            }
        };
        let strings = |list: &[Vec<u8>]| -> mlua::Result<Table> {
            let strings: mlua::Result<Vec<_>> =
                list.iter().map(|text| self.lua.create_string(text)).collect();
            self.lua.create_sequence_from(strings?)
        };
        let globals = self.lua.globals();
        globals.raw_set("KEYS", strings(keys)?)?;
        globals.raw_set("ARGV", strings(argv)?)?;
        from_lua(&self.guarded.call::<Value>(script)?)
    }
}

fn run(db: &mut Db, hash: &str, source: &[u8], keys: &[Vec<u8>], argv: &[Vec<u8>]) -> Reply {
    RUNNING.with_borrow_mut(|running| mem::swap(running, db));
    let reply = ENGINE.with_borrow_mut(|engine| engine.run(hash, source, keys, argv));
    RUNNING.with_borrow_mut(|running| mem::swap(running, db));
    reply.unwrap_or_else(|error| Reply::error(format!("ERR {error}")))
}

/// An argument of a command, as Redis takes it from Lua.
fn argument(value: &Value) -> Option<Vec<u8>> {
    match value {
        Value::String(text) => Some(text.as_bytes().to_vec()),
        Value::Integer(n) if n.unsigned_abs() < 100_000_000_000_000_000 => {
            Some(n.to_string().into())
        }
        Value::Integer(n) => Some(in_17_digits(*n as f64)),
        Value::Number(n) if n.fract() == 0.0 && n.abs() < 1e17 => {
            Some((*n as i64).to_string().into())
        }
        Value::Number(n) => Some(in_17_digits(*n)),
        _ => None,
    }
}

/// `%.17g`.
fn in_17_digits(n: f64) -> Vec<u8> {
    let text = format!("{n:.16e}");
    let (digits, exponent) = text.split_once('e').expect("there is an exponent");
    let exponent: i32 = exponent.parse().expect("it is a number");
    let trimmed = |text: &str| text.trim_end_matches('0').trim_end_matches('.').to_owned();
    let text = match exponent {
        16 => format!("{n:.0}"),
        -4..16 => trimmed(&format!("{n:.*}", (16 - exponent) as usize)),
        _ => {
            let sign = if exponent < 0 { '-' } else { '+' };
            format!("{}e{sign}{:02}", trimmed(digits), exponent.abs())
        }
    };
    text.into_bytes()
}

fn to_lua(lua: &Lua, reply: Reply) -> mlua::Result<Value> {
    let table = |name: &str, text: &str| {
        let table = lua.create_table()?;
        table.raw_set(name, text)?;
        Ok(Value::Table(table))
    };
    match reply {
        Reply::Status(text) => table("ok", &text),
        Reply::Error(text) => table("err", &text),
        Reply::Int(n) => Ok(Value::Number(n as f64)),
        Reply::Bulk(text) => lua.create_string(text).map(Value::String),
        Reply::Nil => Ok(Value::Boolean(false)),
        Reply::Array(all) => {
            let all: mlua::Result<Vec<_>> = all.into_iter().map(|one| to_lua(lua, one)).collect();
            lua.create_sequence_from(all?).map(Value::Table)
        }
    }
}

fn from_lua(value: &Value) -> mlua::Result<Reply> {
    Ok(match value {
        Value::Boolean(true) => Reply::Int(1),
        Value::Integer(n) => Reply::Int(*n),
        Value::Number(n) => Reply::Int(*n as i64),
        Value::String(text) => Reply::Bulk(text.as_bytes().to_vec()),
        Value::Table(table) => {
            if let Some(error) = table.raw_get::<Option<mlua::LuaString>>("err")? {
                return Ok(Reply::error(error.to_string_lossy()));
            }
            if let Some(status) = table.raw_get::<Option<mlua::LuaString>>("ok")? {
                return Ok(Reply::Status(status.to_string_lossy()));
            }
            let mut all = Vec::new();
            loop {
                match table.raw_get::<Value>(all.len() + 1)? {
                    Value::Nil => return Ok(Reply::Array(all)),
                    value => all.push(from_lua(&value)?),
                }
            }
        }
        _ => Reply::Nil,
    })
}
