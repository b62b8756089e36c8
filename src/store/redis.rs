//! Counters in Redis or Valkey, shared by all nodes.

use std::fmt;
use std::fmt::Write as _;
use std::future::Future;
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use redis::aio::ConnectionLike;
use redis::{
    AsyncConnectionConfig, Client, Cmd, ErrorKind, FromRedisValue, IntoConnectionInfo,
    ParsingError, RedisError, RedisResult, Script, ServerErrorKind, Value,
};
use tokio::runtime::Handle;
use tokio::time::timeout;

use super::{Account, Adjust, Change, Charge, MemoryStore, Reply, Store, StoreError};
#[cfg(feature = "testing")]
use crate::clock::Clock;
use crate::decision::Decision;
use crate::quota::{Anchor, MAX_TOKENS, Quota, Quotas};
use crate::window::Window;

mod link;

use link::{Lease, Link};

/// How long a call waits for its answer, unless set.
const DEADLINE: Duration = Duration::from_millis(250);
/// Calls that a connection holds before the next one has to wait for its turn.
const PIPELINE: usize = 1_024;

/// Numbers that Lua prints with all of their digits by itself.
const PLAIN: u64 = 100_000_000_000_000;

/// `window.rs`, in Lua.
static WINDOW: LazyLock<Script> = LazyLock::new(|| Script::new(include_str!("redis/window.lua")));

/// Counters in Redis (from 7.0) or Valkey, shared by all nodes that use the same server.
///
/// Every decision is one round trip to one script, which reads the server's clock and charges all
/// quotas of a key in one step: exact whatever the number of nodes and wherever their clocks are.
///
/// ```no_run
/// use tower_fixed_window::store::RedisStore;
/// use tower_fixed_window::{FixedWindowLayer, Quota};
///
/// # fn main() -> Result<(), tower_fixed_window::StoreError> {
/// let store = RedisStore::new("redis://127.0.0.1/")?;
/// let login = FixedWindowLayer::new(Quota::per_minute(5)).name("login").store(store.clone());
/// let search = FixedWindowLayer::new(Quota::per_minute(30)).name("search").store(store);
/// # let _ = (login, search); Ok(()) }
/// ```
///
/// # When Redis is down
///
/// The store connects in the background, again and again, as long as there is one; nothing has to
/// be up when it is made. A call without an answer after 250 ms ([`deadline`](Self::deadline)) has
/// failed, and while there is no connection calls fail at once: what happens then is for the layer
/// to say ([`OnStoreFailure`](crate::OnStoreFailure)). A call whose fate is unknown is not sent
/// again, except by the client of a cluster, which may do so after a lost connection: that can count
/// a request twice and refuse early, never let more pass than the limit.
///
/// # What is in Redis
///
/// One hash for each scope and key, such as `tfw1:{login:talice}`: the version of the layout, and
/// in braces (one slot of a cluster) the name and [`Key::readable`](crate::Key::readable). A field
/// for each quota is named by its windows ([`Quota::counter`](crate::Quota::counter)) and holds
/// `used@start`, with `*n` behind it if the count takes n windows to come down. The key expires when
/// the last of its counts has come down. To forget a key, delete it.
///
/// ```text
/// > HGETALL tfw1:{login:talice}
/// 1) "60000+0"
/// 2) "3@1700000040000"
/// ```
///
/// Values other than these fail the call; nothing else should write to such keys.
#[derive(Clone)]
pub struct RedisStore {
    link: Link,
    prefix: Arc<str>,
    deadline: Duration,
    fallback: MemoryStore,
    #[cfg(feature = "testing")]
    clock: Option<Arc<dyn Clock>>,
}

impl RedisStore {
    /// Counters in the server at an address such as `redis://user:password@host:6379/0` (or
    /// `rediss://` for TLS, feature `redis-tls`). It connects with the first call, or at once where
    /// this is called in a tokio runtime.
    ///
    /// # Errors
    /// If that is no address. That nobody answers there is no error.
    pub fn new(address: impl IntoConnectionInfo) -> Result<Self, StoreError> {
        let client = Client::open(address).map_err(|error| {
            StoreError::with_source("no address of Redis: write redis://host:6379/", error)
        })?;
        Ok(Self::client(client))
    }

    /// Counters in the server that a client of the library connects to, with its certificates.
    ///
    /// ```no_run
    /// use redis::{Client, TlsCertificates};
    /// use tower_fixed_window::store::RedisStore;
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # #[cfg(feature = "redis-tls")] {
    /// let root_cert = Some(std::fs::read("ca.pem")?);
    /// let certificates = TlsCertificates { client_tls: None, root_cert };
    /// let store = RedisStore::client(Client::build_with_tls("rediss://redis.internal/", certificates)?);
    /// # let _ = store; } Ok(()) }
    /// ```
    pub fn client(client: Client) -> Self {
        Self::connecting(move || {
            let client = client.clone();
            async move {
                #[cfg(feature = "redis-tls")]
                provide_tls(&client);
                client.get_multiplexed_async_connection_with_config(&config()).await
            }
        })
    }

    /// Counters in what a closure connects to, for whatever has no constructor here. It is called
    /// again when a connection is lost, is silent, or has come to lead to a replica.
    ///
    /// ```no_run
    /// use tower_fixed_window::store::RedisStore;
    ///
    /// async fn address() -> String {
    ///     // ... ask whoever knows
    ///     # String::new()
    /// }
    ///
    /// let store = RedisStore::connecting(|| async {
    ///     let client = redis::Client::open(address().await)?;
    ///     client.get_multiplexed_async_connection().await
    /// });
    /// # let _ = store;
    /// ```
    pub fn connecting<F, R, C>(connect: F) -> Self
    where
        F: Fn() -> R + Send + Sync + 'static,
        R: Future<Output = RedisResult<C>> + Send + 'static,
        C: ConnectionLike + Clone + Send + Sync + 'static,
    {
        Self::over(Link::connecting(connect))
    }

    /// Counters in a cluster.
    ///
    /// ```no_run
    /// use redis::cluster::ClusterClient;
    /// use tower_fixed_window::store::RedisStore;
    ///
    /// # fn main() -> Result<(), redis::RedisError> {
    /// let store = RedisStore::cluster(ClusterClient::new(["redis://10.0.0.1/", "redis://10.0.0.2/"])?);
    /// # let _ = store; Ok(()) }
    /// ```
    #[cfg(feature = "redis-cluster")]
    pub fn cluster(client: redis::cluster::ClusterClient) -> Self {
        Self::connecting(move || {
            let client = client.clone();
            async move { client.get_async_connection().await }
        })
    }

    /// Counters in the master that Sentinel knows. It is asked again after a failover.
    ///
    /// ```no_run
    /// use redis::sentinel::{SentinelClient, SentinelServerType};
    /// use tower_fixed_window::store::RedisStore;
    ///
    /// # fn main() -> Result<(), redis::RedisError> {
    /// let sentinels = vec!["redis://10.0.0.1:26379/", "redis://10.0.0.2:26379/"];
    /// let store = RedisStore::sentinel(SentinelClient::build(
    ///     sentinels,
    ///     "mymaster".to_owned(),
    ///     None,
    ///     SentinelServerType::Master,
    /// )?);
    /// # let _ = store; Ok(()) }
    /// ```
    #[cfg(feature = "redis-sentinel")]
    pub fn sentinel(client: redis::sentinel::SentinelClient) -> Self {
        let client = Arc::new(tokio::sync::Mutex::new(client));
        Self::connecting(move || {
            let client = Arc::clone(&client);
            async move { client.lock().await.get_async_connection_with_config(&config()).await }
        })
    }

    fn over(link: Link) -> Self {
        Self {
            link,
            prefix: "".into(),
            deadline: DEADLINE,
            fallback: MemoryStore::new(),
            #[cfg(feature = "testing")]
            clock: None,
        }
    }

    /// Puts `prefix:` before every key, for a server that is shared with others.
    ///
    /// # Panics
    /// If it has a brace in it, which would change the slot of a cluster.
    #[must_use]
    pub fn prefix(mut self, prefix: &str) -> Self {
        assert!(
            !prefix.contains(['{', '}']),
            "a prefix of keys has no braces: write .prefix(\"shop\") for keys like shop:tfw1:{{login:talice}}"
        );
        self.prefix = format!("{prefix}:").into();
        self
    }

    /// How long a call waits for its answer before it has failed: 250 ms unless set.
    #[must_use]
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.deadline = deadline;
        self
    }

    /// Reads the time from a clock in place of the server's, and lets keys expire an hour too
    /// late, so that nothing vanishes in a test that runs slower than its clock.
    #[cfg(feature = "testing")]
    #[must_use]
    pub fn clock(mut self, clock: impl Clock) -> Self {
        self.clock = Some(Arc::new(clock));
        self
    }

    fn key(&self, account: &Account<'_>) -> String {
        let mut key = String::with_capacity(64);
        let (prefix, scope, name) =
            (&self.prefix, account.scope().name(), account.key().readable());
        write!(key, "{prefix}tfw1:{{{scope}:{name}}}").expect("writing to a string");
        key
    }

    fn script(&self, account: &Account<'_>) -> Cmd {
        let mut cmd = Cmd::with_capacity(6 + 7 * account.quotas().len(), 256);
        cmd.arg("EVALSHA").arg(WINDOW.get_hash()).arg(1).arg(self.key(account));
        cmd
    }

    /// The call of the script's short way, where that is enough.
    fn plain(&self, charge: &Charge<'_>, now: Option<i64>) -> Option<Cmd> {
        let Charge { account, ask } = charge;
        let &[quota] = account.quotas().as_slice() else { return None };
        let plain = quota.capacity == quota.limit
            && quota.limit < PLAIN
            && now.is_none_or(|now| now < PLAIN as i64)
            && (1..=quota.limit).contains(&ask.cost)
            && !(ask.peek || ask.up_to || ask.reserve && quota.max_reserved > 0);
        let grid = grid(account, &quota).filter(|_| plain)?;
        let mut cmd = self.script(account);
        cmd.arg(ask.cost).arg(quota.counter().to_string()).arg(quota.window).arg(quota.limit);
        cmd.arg(grid).arg(now);
        Some(cmd)
    }

    /// The call of the script. `until` has for each quota the instant up to which it takes returns.
    fn general(
        &self,
        account: &Account<'_>,
        act: &str,
        tokens: u64,
        reserve: bool,
        until: &[i64],
        now: Option<i64>,
    ) -> Cmd {
        let mut cmd = self.script(account);
        // No quota has more than 2^53 - 1 to give.
        cmd.arg(act).arg(tokens.min(MAX_TOKENS + 1));
        match now {
            Some(now) => cmd.arg(now),
            None => cmd.arg(""),
        };
        for (i, quota) in account.quotas().iter().enumerate() {
            let debt = if reserve { quota.max_reserved } else { 0 };
            cmd.arg(quota.counter().to_string()).arg(quota.window).arg(quota.limit);
            cmd.arg(quota.capacity).arg(quota.limit + debt);
            match grid(account, quota) {
                Some(grid) => cmd.arg(grid),
                None => cmd.arg(-1),
            };
            cmd.arg(until.get(i).copied().unwrap_or(0));
        }
        cmd
    }

    #[cfg(feature = "testing")]
    fn now(&self) -> Option<i64> {
        self.clock.as_ref().map(|clock| super::instant(clock.now_ms()))
    }

    #[cfg(not(feature = "testing"))]
    fn now(&self) -> Option<i64> {
        None
    }

    /// Sends a command, once, and once more only if it was refused because its script is missing.
    async fn call<T: FromRedisValue>(&self, cmd: Cmd) -> Result<T, StoreError> {
        if Handle::try_current().is_err() {
            return Err(StoreError::new("Redis is asked outside of a tokio runtime"));
        }
        let mut used = None;
        let call = async {
            let Lease { connection, .. } = used.insert(self.link.get().await?);
            match cmd.query_async(connection).await {
                Err(error) if error.kind() == ErrorKind::Server(ServerErrorKind::NoScript) => {
                    WINDOW.load_async(connection).await?;
                    cmd.query_async(connection).await
                }
                answer => answer,
            }
        };
        let answer = timeout(self.deadline, call).await.ok();
        if let Some(lease) = used {
            self.link.report(&lease, answer.as_ref().map(Result::as_ref));
        }
        match answer {
            Some(answer) => answer.map_err(failed),
            None => Err(StoreError::new("Redis did not answer in time")),
        }
    }
}

/// Deadlines are the store's own and the link's.
fn config() -> AsyncConnectionConfig {
    AsyncConnectionConfig::new()
        .set_connection_timeout(None)
        .set_response_timeout(None)
        .set_pipeline_buffer_size(PIPELINE)
}

/// rustls wants the process to have chosen its cryptography, and would panic where the app's
/// dependencies bring several. What the app has chosen stays.
#[cfg(feature = "redis-tls")]
fn provide_tls(client: &Client) {
    let tls = matches!(client.get_connection_info().addr(), redis::ConnectionAddr::TcpTls { .. });
    if tls && rustls::crypto::CryptoProvider::get_default().is_none() {
        // Somebody else may have been faster.
        let _ = rustls::crypto::ring::default_provider().install_default();
    }
}

/// Names no address and no key.
fn failed(error: RedisError) -> StoreError {
    let what = match error.kind() {
        ErrorKind::Server(ServerErrorKind::ReadOnly) => "Redis is a replica here",
        ErrorKind::Server(_) | ErrorKind::Extension => "Redis refused the command",
        ErrorKind::AuthenticationFailed => "Redis refused the password",
        ErrorKind::Io => "Redis can't be reached",
        _ => "Redis failed",
    };
    StoreError::with_source(what, error)
}

impl<C> From<C> for RedisStore
where
    C: ConnectionLike + Clone + Send + Sync + 'static,
{
    /// Counters in what this connection leads to: a `MultiplexedConnection`, a
    /// `ConnectionManager`, a `ClusterConnection`. To connect again when it is lost is for it to do;
    /// a store of [`RedisStore::new`] does it by itself.
    fn from(connection: C) -> Self {
        Self::over(Link::fixed(connection))
    }
}

impl Store for RedisStore {
    fn charge(&self, charge: Charge<'_>) -> Reply<Decision> {
        let (ask, now) = (charge.ask, self.now());
        let act = match (ask.peek, ask.up_to) {
            (true, true) => "peek-up-to",
            (true, false) => "peek",
            (false, true) => "up-to",
            (false, false) => "charge",
        };
        let cmd = self
            .plain(&charge, now)
            .unwrap_or_else(|| self.general(&charge.account, act, ask.cost, ask.reserve, &[], now));
        let (store, charge) = (self.clone(), charge.to_owned());
        Reply::later(async move {
            let (charge, answer) = (charge.as_charge(), store.call(cmd).await?);
            let decision = match answer {
                Answer::Plain(text) => decide_plain(&charge, &text, now),
                Answer::General(numbers) => decide(&charge, &numbers),
            };
            decision.ok_or(StoreError::new("Redis gave an answer that makes no sense"))
        })
    }

    fn adjust(&self, adjust: Adjust<'_>) -> Reply<()> {
        let (account, now) = (&adjust.account, self.now());
        let cmd = match &adjust.change {
            Change::Return { tokens: 0, .. } | Change::Take { tokens: 0 } => return Reply::now(()),
            Change::Return { tokens, until } => {
                self.general(account, "return", *tokens, false, until, now)
            }
            Change::Take { tokens } => self.general(account, "take", *tokens, false, &[], now),
        };
        let store = self.clone();
        Reply::later(async move { store.call::<Value>(cmd).await.map(|_| ()) })
    }

    fn reset(&self, account: Account<'_>) -> Reply<()> {
        let mut cmd = redis::cmd("HDEL");
        cmd.arg(self.key(&account));
        for quota in account.quotas() {
            cmd.arg(quota.counter().to_string());
        }
        let store = self.clone();
        Reply::later(async move { store.call(cmd).await })
    }

    fn fallback(&self) -> MemoryStore {
        self.fallback.clone()
    }

    fn deadline(&self) -> Option<Duration> {
        None
    }
}

/// Where the grid of a quota passes through, less than a window after the epoch; `None`: it has
/// none, windows begin with the first charge.
fn grid(account: &Account<'_>, quota: &Quota) -> Option<u64> {
    match quota.anchor {
        Anchor::Grid { offset } => Some(offset),
        Anchor::Staggered => Some(account.shift(quota) % quota.window),
        Anchor::FirstRequest => None,
    }
}

enum Answer {
    Plain(String),
    General(Vec<Option<i64>>),
}

impl FromRedisValue for Answer {
    fn from_redis_value(value: Value) -> Result<Self, ParsingError> {
        Ok(match value {
            Value::Array(_) => Self::General(FromRedisValue::from_redis_value(value)?),
            text => Self::Plain(FromRedisValue::from_redis_value(text)?),
        })
    }
}

/// What the script's answer means: it returns each window as it was, and what follows from that is
/// worked out here once more, in integers. `None` if the two don't agree.
fn decide(charge: &Charge<'_>, answer: &[Option<i64>]) -> Option<Decision> {
    let &[Some(now), Some(taken), ref windows @ ..] = answer else { return None };
    let (windows, []) = windows.as_chunks::<3>() else { return None };
    if windows.len() != charge.account.quotas().len() {
        return None;
    }
    let mut known = [(0, 0, None); Quotas::MAX];
    for (known, window) in known.iter_mut().zip(windows) {
        let &[Some(start), Some(used), until] = window else { return None };
        *known = (start, used, until);
    }
    let (decision, _) = charge.decide_over(now, |_, i, quota| {
        let (start, used, until) = known[i];
        Window::known(quota, start, used, until)
    });
    let agreed = decision.allowed() == (taken >= 0) && decision.granted() as i64 == taken.max(0);
    agreed.then_some(decision)
}

/// The same for the short way's answer.
fn decide_plain(charge: &Charge<'_>, answer: &str, now: Option<i64>) -> Option<Decision> {
    let mut parts = answer.split(' ');
    let (s, us): (i64, i64) = (parts.next()?.parse().ok()?, parts.next()?.parse().ok()?);
    let now = now.unwrap_or(s * 1_000 + us / 1_000);
    let (refused, value) = match parts.next()? {
        value if value.starts_with('!') => (true, &value[1..]),
        value => (false, value),
    };
    let (used, start) = value.split_once('@')?;
    let (used, start): (i64, i64) = (used.parse().ok()?, start.parse().ok()?);
    let before = if refused { used } else { used - charge.ask.cost as i64 };
    let until = start + charge.account.quotas().as_slice()[0].window as i64;
    // Where it was refused there was a state. Where it passed, nothing depends on that.
    let (decision, _) =
        charge.decide_over(now, |_, _, quota| Window::known(quota, start, before, Some(until)));
    (decision.allowed() != refused).then_some(decision)
}

impl fmt::Debug for RedisStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisStore").field("deadline", &self.deadline).finish_non_exhaustive()
    }
}
