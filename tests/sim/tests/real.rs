//! The simulated server is no lenient fake: by the same random traces it answers as a real one does, and
//! keeps the same.
//!
//! `SEED=7 ROUNDS=1000 cargo test` goes on from elsewhere. `REDIS_SERVER` and `REQUIRE_REDIS` as in the
//! tests of the crate.

use std::sync::{Arc, Mutex};
use std::time::{SystemTime, UNIX_EPOCH};

use fastrand::Rng;
use redis::aio::{ConnectionLike, MultiplexedConnection};
use redis::{Cmd, Pipeline, RedisError, RedisFuture, RedisResult, Value, cmd};
use tower_fixed_window::store::{Account, Charge, Scope, Store};
use tower_fixed_window::{Decision, Key, ManualClock};
use tower_fixed_window_sim::server::{Reply, Server};
use tower_fixed_window_sim::wire;

#[path = "../../redis/agreement.rs"]
#[allow(dead_code, reason = "the store's own tests need more of it")]
mod agreement;
#[path = "../../redis/random.rs"]
#[allow(dead_code, reason = "the store's own tests need more of it")]
mod random;

use agreement::{Pair, Seen, Trace, at_once};
use random::{env, length, start, step_clock, tokens, with_limits};

async fn connect(real: &harness::Server) -> MultiplexedConnection {
    let client = redis::Client::open(real.url()).expect("an address");
    client.get_multiplexed_async_connection().await.expect("the server answers")
}

fn micros() -> i64 {
    SystemTime::now().duration_since(UNIX_EPOCH).expect("after it").as_micros() as i64
}

/// Sends each command to both servers, and compares what they answer.
#[derive(Clone)]
struct Both {
    real: MultiplexedConnection,
    simulated: Arc<Mutex<Server>>,
}

impl Both {
    async fn new(real: &harness::Server) -> Self {
        Self { real: connect(real).await, simulated: Arc::default() }
    }

    async fn ask(&mut self, cmd: &Cmd) -> RedisResult<Value> {
        let args = wire::command(&mut cmd.get_packed_command()).expect("a whole command");
        // In the order in which the real one gets them: both happen in one poll.
        let (simulated, _) = self.simulated.lock().expect("no panic").call(&args, micros());
        let real = self.real.req_packed_command(cmd).await;
        let shown = args.iter().map(|arg| String::from_utf8_lossy(arg)).collect::<Vec<_>>();
        let script = args[0].starts_with(b"EVAL");
        // A client that waits for no answer is told nothing of it.
        if cmd.is_no_response() {
            return real;
        }
        if let Err(difference) = same(&real, &simulated, script) {
            panic!("{difference}\nof {}\nreal {real:?}\nsimulated {simulated:?}", shown.join(" "));
        }
        real
    }

    /// What a key holds and when it expires is the same.
    async fn compare(&mut self, key: &str) {
        self.sorted(cmd("HGETALL").arg(key)).await;
        let expires = cmd("PEXPIRETIME").arg(key).clone();
        let args = wire::command(&mut expires.get_packed_command()).expect("a whole command");
        let (simulated, _) = self.simulated.lock().expect("no panic").call(&args, micros());
        let real: i64 = expires.query_async(&mut self.real).await.expect("it answers");
        let Reply::Int(simulated) = simulated else { panic!("{simulated:?}") };
        // They were written one after the other.
        assert!((real - simulated).abs() < 10_000, "{key} expires at {real}, or {simulated}");
        assert_eq!(real < 0, simulated < 0);
    }

    /// Hashes have no order.
    async fn sorted(&mut self, cmd: &Cmd) {
        let args = wire::command(&mut cmd.get_packed_command()).expect("a whole command");
        let (simulated, _) = self.simulated.lock().expect("no panic").call(&args, micros());
        let real: Result<Vec<Vec<u8>>, RedisError> = cmd.query_async(&mut self.real).await;
        match (real, simulated) {
            (Ok(real), Reply::Array(simulated)) => {
                let mut real: Vec<_> = real.chunks(2).map(<[_]>::to_vec).collect();
                real.sort();
                let text = |reply| if let Reply::Bulk(text) = reply { text } else { panic!() };
                let simulated: Vec<_> = simulated.into_iter().map(text).collect();
                let simulated: Vec<_> = simulated.chunks(2).map(<[_]>::to_vec).collect();
                assert_eq!(real, simulated, "{args:?}");
            }
            (Err(real), Reply::Error(simulated)) => {
                assert_eq!(real.code(), simulated.split(' ').next());
            }
            (real, simulated) => panic!("{real:?} and {simulated:?}"),
        }
    }
}

fn same(real: &RedisResult<Value>, simulated: &Reply, script: bool) -> Result<(), String> {
    let value = match (real, simulated) {
        (Err(error), Reply::Error(text)) => {
            let code = error.code().unwrap_or("ERR");
            let same = text.split(' ').next() == Some(code);
            return same.then_some(()).ok_or(format!("{error} and {text}"));
        }
        (Ok(Value::ServerError(error)), Reply::Error(text)) => {
            let same = text.split(' ').next() == Some(error.code());
            return same.then_some(()).ok_or(format!("{error} and {text}"));
        }
        (Ok(value), _) => value,
        (Err(error), _) => return Err(error.to_string()),
    };
    let values = |real: &[Value], simulated: &[Reply]| {
        if real.len() != simulated.len() {
            return Err(format!("{} and {} of them", real.len(), simulated.len()));
        }
        // The first answer of a script for several decisions is the time.
        let time = script
            && matches!(real.first(), Some(Value::Int(micros)) if *micros > 1_000_000_000_000_000);
        let mut all = real.iter().zip(simulated).skip(usize::from(time));
        all.try_for_each(|(real, simulated)| same(&Ok(real.clone()), simulated, script))
    };
    let equal = match (value, simulated) {
        (Value::Int(real), Reply::Int(simulated)) => real == simulated,
        (Value::Nil, Reply::Nil) => true,
        (Value::Okay, Reply::Status(text)) => text == "OK",
        (Value::SimpleString(real), Reply::Status(text)) => real == text,
        // The second number is the time.
        (Value::BulkString(real), Reply::Bulk(text)) if script && real.len() == 16 => {
            real[..8] == text[..8]
        }
        (Value::BulkString(real), Reply::Bulk(text)) => real == text,
        (Value::Array(real), Reply::Array(simulated)) => return values(real, simulated),
        _ => false,
    };
    equal.then_some(()).ok_or("they differ".to_owned())
}

impl ConnectionLike for Both {
    fn req_packed_command<'a>(&'a mut self, cmd: &'a Cmd) -> RedisFuture<'a, Value> {
        Box::pin(self.ask(cmd))
    }

    fn req_packed_commands<'a>(
        &'a mut self,
        pipeline: &'a Pipeline,
        _: usize,
        _: usize,
    ) -> RedisFuture<'a, Vec<Value>> {
        Box::pin(async move {
            let mut answers = Vec::new();
            for cmd in pipeline.cmd_iter() {
                let answer = self.ask(cmd).await;
                // The caller looks for errors in the answers.
                let answer = answer.or_else(|error| error.try_into().map(Value::ServerError));
                answers.push(answer?);
            }
            Ok(answers)
        })
    }

    fn get_db(&self) -> i64 {
        0
    }
}

/// The store's scripts: all kinds of decisions, alone and in company.
#[tokio::test]
async fn scripts_do_the_same_in_the_real_and_the_simulated_server() {
    let Some(real) = harness::Server::start() else { return };
    let both = Both::new(&real).await;
    let scope = Scope::named("crowd");
    let (first, rounds) = (env("SEED", 1), env("ROUNDS", 50));
    for seed in first..first + rounds {
        let mut rng = Rng::with_seed(seed);
        let clock = ManualClock::at_ms(start(&mut rng));
        let pair = Pair::new(&both, seed, &clock, |store| store);
        let limits = rng.usize(1..=3);
        let window = |rng: &mut Rng| {
            let length = length(rng);
            // Half of them on the plain grid.
            (length, *rng.choice(&[0, 0, 0, 1, 2, 3]).expect("some"), rng.u64(..length))
        };
        let windows = |rng: &mut Rng| {
            (0..rng.usize(1..=4 / limits)).map(|_| window(rng)).collect::<Vec<_>>()
        };
        let windows: Vec<_> = (0..limits).map(|_| windows(&mut rng)).collect();
        // Several at once travel together.
        let (quotas, keys) = (with_limits(&mut rng, &windows[0]), [0, 1, 2_u64].map(Key::from));
        let charge = |rng: &mut Rng| {
            let account = Account::new(&scope, &quotas, rng.choice(&keys).expect("some"));
            let charge = Charge::new(account, tokens(rng));
            match rng.u8(..12) {
                0 => charge.reserving(),
                2 => charge.peeking(),
                _ => charge,
            }
        };
        for _ in 0..3 {
            let crowd: Vec<_> = (0..rng.usize(2..40)).map(|_| charge(&mut rng)).collect();
            for answer in at_once(crowd.iter().map(|charge| pair.redis.charge(*charge))).await {
                assert!(answer.is_ok(), "SEED={seed}: {answer:?}");
            }
        }
        let quotas = |rng: &mut Rng| {
            windows.iter().map(|windows| with_limits(rng, windows)).collect::<Vec<_>>()
        };
        let next = |rng: &mut Rng, now, last: Option<&Decision>| match last {
            Some(_) => step_clock(rng, now, windows[0][0].0),
            None => start(rng),
        };
        Trace { quotas, tokens, next }.run(pair, &clock, &mut rng, 30, &mut Seen::default()).await;
        for key in real.ask::<Vec<String>>(&["KEYS", &format!("{seed}:*")]) {
            both.clone().compare(&key).await;
        }
    }
}

/// What the scripts use, and what they don't, on keys of all types.
#[tokio::test]
async fn commands_do_the_same_in_the_real_and_the_simulated_server() {
    let Some(real) = harness::Server::start() else { return };
    let mut both = Both::new(&real).await;
    let (first, rounds) = (env("SEED", 1), env("ROUNDS", 50));
    for seed in first..first + rounds {
        let mut rng = Rng::with_seed(seed);
        let keys = ["a", "b", "c"].map(|key| format!("{seed}-{key}"));
        for _ in 0..60 {
            let key = keys[rng.usize(..keys.len())].clone();
            let field = ["f", "g", "h"][rng.usize(..3)];
            let numbers = ["0", "7", "-3", "9007199254740993", "9223372036854775807"];
            let texts = ["", "x", "01", "+1", " 1", "1.5", "-0", "12@34*5"];
            let number = numbers[rng.usize(..numbers.len())];
            let any = if rng.bool() { number } else { texts[rng.usize(..texts.len())] };
            let command = |name: &str, args: &[&str]| cmd(name).arg(&key).arg(args).clone();
            let at = (micros() / 1_000 + [-10_000, 3_600_000][rng.usize(..2)]).to_string();
            let command = match rng.u8(..16) {
                0..3 => command("HINCRBY", &[field, any]),
                3 => command("HINCRBY", &[field, number]),
                4 => command("HSET", &[field, any, "i", "1"]),
                5 => command("HSET", &[field, any]),
                6 => command("HMGET", &[field, "i"]),
                7 => command("HGET", &[field]),
                8 => command("HDEL", &[field, "i"]),
                9 => command("HLEN", &[]),
                10 => command("SET", &[any]),
                11 => command("GET", &[]),
                12 => command("DEL", &[&keys[0]]),
                13 => command("EXISTS", &[]),
                14 => match rng.u8(..4) {
                    0 => command("PEXPIREAT", &[&at, "NX"]),
                    1 => command("PEXPIREAT", &[&at, "GT"]),
                    2 => command("PEXPIREAT", &[&at, "EQ"]),
                    _ => command("PEXPIREAT", &[&at]),
                },
                _ => command("PEXPIRETIME", &[]),
            };
            let _ = both.ask(&command).await;
        }
        for key in &keys {
            both.compare(key).await;
        }
    }
}

#[tokio::test]
async fn lua_does_the_same_in_the_real_and_the_simulated_server() {
    let Some(real) = harness::Server::start() else { return };
    let mut both = Both::new(&real).await;
    let scripts = [
        "return ARGV[1] + 0",
        "return tostring(ARGV[1] + 0)",
        "return { 1, ARGV[1] / 3, false, 'text', {}, { true } , nil, 4 }",
        "return redis.call('HSET', KEYS[1], 'f', ARGV[1] + 0)",
        "redis.call('HSET', KEYS[1], 'f', ARGV[1] / 7) return redis.call('HMGET', KEYS[1], 'f', 'g')",
        "redis.call('SET', KEYS[1], ARGV[1]) return redis.call('HINCRBY', KEYS[1], 'f', 1)",
        "redis.call('SET', KEYS[1], ARGV[1]) return redis.pcall('HINCRBY', KEYS[1], 'f', 1)",
        "local r = redis.pcall('HINCRBY', KEYS[1], 'f', 'x') return { type(r), type(r.err), r.ok or 0 }",
        "local well, why = pcall(redis.call, 'HINCRBY', KEYS[1], 'f', 'x') return { type(why), why:sub(1, 3) }",
        "return redis.call('PEXPIRETIME', KEYS[1])",
        "return redis.acl_check_cmd('PEXPIREAT')",
        "return redis.call('PING')",
        "return redis.call('GET', KEYS[1])",
        "return { ok = 'OK' }",
        "return { err = 'MINE and mine only' }",
        "error('raised')",
        "return nil + 1",
        "return struct.pack('>i8i8', ARGV[1] + 0, -5) ",
        "return #redis.call('TIME')",
        "return string.format('%.0f', ARGV[1] + 0)",
        "return redis.call('HSET', KEYS[1], 'f', nil)",
    ];
    let numbers = [
        "0",
        "1",
        "-1",
        "0.5",
        "9007199254740993",
        "9007199254740992",
        "1e16",
        "123456789012345678",
        "1e18",
        "-3.75",
    ];
    for script in scripts {
        let hash = redis::Script::new(script).get_hash().to_owned();
        for (i, number) in numbers.iter().enumerate() {
            let key = format!("lua-{}", i % 3);
            // The first call brings the script.
            let mut call = if i == 0 { cmd("EVAL") } else { cmd("EVALSHA") };
            call.arg(if i == 0 { script } else { &hash }).arg(1).arg(&key).arg(number);
            let _ = both.ask(&call).await;
        }
    }
    let missing = cmd("EVALSHA").arg("0".repeat(40)).arg(0).clone();
    let _ = both.ask(&missing).await;
}
