//! Counters in Redis or Valkey, shared by all nodes.

use std::fmt;
use std::future::Future;
#[cfg(any(feature = "redis-sentinel", feature = "testing"))]
use std::sync::Arc;
use std::time::Duration;

use redis::aio::ConnectionLike;
use redis::{Client, Cmd, IntoConnectionInfo, RedisResult};
use tokio::time::Instant;

use super::Store;
use super::account::Account;
use super::adjust::Adjust;
use super::breaker::Breaker;
use super::charge::Charge;
use super::error::StoreError;
use super::memory::MemoryStore;
use super::remote::Remote;
use super::reply::Reply;
use super::scope::Scope;
#[cfg(feature = "testing")]
use crate::clock::Clock;
use crate::decision::Decision;
use crate::key::Key;
use crate::quota::{Quota, Quotas};

mod calendars;
mod call;
mod check;
#[cfg(feature = "redis-cluster")]
mod cluster;
mod command;
mod failure;
mod gather;
mod handle;
mod link;
mod queue;
mod renewal;
mod script;
#[cfg(feature = "redis-sentinel")]
mod sentinel;
mod settings;
mod shards;
#[cfg(feature = "redis-tls")]
mod tls;
mod upkeep;
mod waiting;

use call::Call;
use command::Commands;
use failure::{ended, runtime};
use gather::Gather;
use link::Link;
use script::Answer;
use settings::{NEVER, config, lasting};
use waiting::{Outcome, Waiting};

/// How long a call waits for its answer, unless set.
const DEADLINE: Duration = Duration::from_millis(250);

/// Counters in Redis (from 7.0) or Valkey, shared by all nodes that use the same server.
///
/// Every decision is one round trip to one script, which reads the server's clock and charges all
/// quotas of a key in one step: exact whatever the number of nodes and wherever their clocks are.
/// Decisions that are asked at the same time travel together, up to 128 in a call, and are decided there
/// in their order. As many calls are under way as the distance to the server asks for. Each decision
/// keeps its own deadline, and what is dropped or late before it was sent is never sent.
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
/// The store connects when it is made in a tokio runtime, and again whenever somebody asks and there is
/// no connection; nothing has to be up when it is made. One that was idle for a second is tried before it
/// is used, so that nothing is counted elsewhere because a network has forgotten it. A call without an
/// answer after 250 ms ([`deadline`](Self::deadline)) has failed, and once there was no connection for so
/// long, calls fail at once until there is one: what happens then is for the layer to say
/// ([`OnStoreFailure`](crate::OnStoreFailure)). A call whose fate is unknown is not sent
/// again, except by the client of a cluster, which may do so after a lost connection: that can count
/// a request twice and refuse early, never let more pass than the limit.
///
/// # What is in Redis
///
/// One hash for each scope and key, such as `tfw1:{login:talice}`: the version of the layout, and
/// in braces (one slot of a cluster) the name and [`Key::readable`](crate::Key::readable). A field
/// for each quota is named by its windows ([`Quota::counter`](crate::Quota::counter)) and holds one
/// number: the start of the window in microseconds, and the tokens used in it added to that. Here three
/// were used in the minute that began at 1700000040:
///
/// ```text
/// > HGETALL tfw1:{login:talice}
/// 1) "60000+0"
/// 2) "1700000040000003"
/// ```
///
/// A count that this can't say is text, `used@start` with the start in milliseconds: one of 1,000 tokens
/// or more for each millisecond of the window, one that takes n windows to come down (`*n` behind it:
/// debt, rollover), one below 0 (rollover), and those of
/// [`from_first_request`](crate::Quota::from_first_request). Of a calendar it is always text, with the end
/// of the window and its number, by which the script counts windows without knowing their lengths:
///
/// ```text
/// > HGETALL tfw1:{plan:talice}
/// 1) "month+15@America/New_York"
/// 2) "3812@1773547200000-1776225600000#674"
/// ```
///
/// The key expires when the last of its
/// counts has come down. To forget a key, delete it.
///
/// Values other than these fail the call; nothing else should write to such keys.
#[derive(Clone)]
pub struct RedisStore {
    link: Link,
    /// `None`: each decision travels alone.
    gather: Option<Gather>,
    commands: Commands,
    deadline: Duration,
    breaker: Breaker,
    remote: Remote,
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
        let client = lasting(&client);
        Self::over(Link::connecting(move || {
            let client = client.clone();
            async move {
                let client = client?;
                #[cfg(feature = "redis-tls")]
                if tls::is_spoken_by(&client) {
                    tls::provide();
                }
                client.get_multiplexed_async_connection_with_config(&config()).await
            }
        }))
    }

    /// Counters in what a closure connects to, for whatever has no constructor here. It is called
    /// again when a connection is lost, is silent, or has come to lead to a replica, and also while
    /// another call of it is under way. It may take 5 s.
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
        Self::over(Link::connecting(move || {
            #[cfg(feature = "redis-tls")]
            tls::provide();
            connect()
        }))
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
        let connect = move || {
            #[cfg(feature = "redis-tls")]
            tls::provide();
            cluster::connect(client.clone())
        };
        Self::over(Link::sharded(connect)).one_by_one()
    }

    /// Counters in the master that Sentinels know. They are asked at the same time, each by a client of
    /// its own that `client` makes, so that one that is silent delays nobody, and again after a failover.
    ///
    /// ```
    /// use redis::sentinel::{SentinelClient, SentinelServerType};
    /// use tower_fixed_window::store::RedisStore;
    ///
    /// # fn main() -> Result<(), tower_fixed_window::StoreError> {
    /// let sentinels = ["redis://10.0.0.1:26379/", "redis://10.0.0.2:26379/"];
    /// let store = RedisStore::sentinel(sentinels, |sentinel| {
    ///     SentinelClient::build(vec![sentinel], "mymaster".to_owned(), None, SentinelServerType::Master)
    /// })?;
    /// # let _ = store; Ok(()) }
    /// ```
    ///
    /// # Errors
    /// If `client` makes none of an address.
    #[cfg(feature = "redis-sentinel")]
    pub fn sentinel<A, F>(
        sentinels: impl IntoIterator<Item = A>,
        client: F,
    ) -> Result<Self, StoreError>
    where
        A: Clone + Send + Sync + 'static,
        F: Fn(A) -> RedisResult<redis::sentinel::SentinelClient> + Send + Sync + 'static,
    {
        let sentinels: Arc<[A]> = sentinels.into_iter().collect();
        for sentinel in sentinels.iter() {
            client(sentinel.clone()).map_err(|error| {
                StoreError::with_source(
                    "no address of a Sentinel: write redis://host:26379/",
                    error,
                )
            })?;
        }
        let client = Arc::new(client);
        Ok(Self::over(Link::connecting(move || {
            #[cfg(feature = "redis-tls")]
            tls::provide();
            let clients = sentinels.iter().map(|sentinel| client(sentinel.clone())).collect();
            sentinel::connect(clients)
        })))
    }

    fn over(link: Link) -> Self {
        link.set_patience(DEADLINE);
        let breaker = Breaker::default();
        Self {
            gather: Some(Gather::new(link.clone(), breaker.clone())),
            link,
            commands: Commands::new(""),
            deadline: DEADLINE,
            remote: Remote::new().keeping_deadline(DEADLINE).reporting_to(breaker.clone()),
            breaker,
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
        self.commands = Commands::new(&format!("{prefix}:"));
        // These are other counters.
        self.remote = self.remote.afresh();
        self
    }

    /// How long a call waits for its answer before it has failed: 250 ms unless set.
    #[must_use]
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.deadline = deadline;
        self.remote = self.remote.keeping_deadline(deadline);
        self.link.set_patience(deadline);
        self
    }

    /// Sends each decision in a call of its own, not together with others that are asked at the same
    /// time.
    ///
    /// Needed behind a proxy that shares keys out over several servers and looks at the first key of
    /// a call only (Dynomite does): the others would be counted on whatever server that is for. A
    /// cluster needs nothing: it refuses such calls unharmed, and is asked one by one from then on.
    ///
    /// ```
    /// use tower_fixed_window::store::RedisStore;
    ///
    /// # fn main() -> Result<(), tower_fixed_window::StoreError> {
    /// let store = RedisStore::new("redis://proxy:6379/")?.one_by_one();
    /// # let _ = store; Ok(()) }
    /// ```
    #[must_use]
    pub fn one_by_one(mut self) -> Self {
        self.gather = None;
        self
    }

    /// Asks Redis what every decision asks, and changes nothing: for an app that is to fail at its start
    /// where Redis can't be reached, refuses the password, or lacks rights. (One that does not ask starts
    /// without Redis, and joins when it is there.) On a cluster one shard is asked.
    ///
    /// ```no_run
    /// use tower_fixed_window::store::RedisStore;
    ///
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), tower_fixed_window::StoreError> {
    /// let store = RedisStore::new("redis://127.0.0.1/")?;
    /// store.ping().await?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// If there is no answer within the deadline, or another one than there should be.
    pub async fn ping(&self) -> Result<(), StoreError> {
        let (scope, quotas, key) =
            (Scope::named("ping"), Quotas::from(Quota::per_second(1)), Key::global());
        let account = Account::new(&scope, &quotas, &key);
        self.charge(Charge::new(account, 1).peeking()).await.map(|_| ())
    }

    /// Reads the time from a clock in place of the server's, and lets keys expire an hour too
    /// late, so that nothing vanishes in a test that runs slower than its clock.
    #[cfg(feature = "testing")]
    #[must_use]
    pub fn clock(mut self, clock: impl Clock) -> Self {
        self.clock = Some(Arc::new(clock));
        // What was said would hold for a while by the server's.
        self.remote = self.remote.without_front();
        self
    }

    /// The memory that counts while Redis fails: for its metrics.
    pub fn fallback(&self) -> &MemoryStore {
        self.remote.fallback()
    }

    #[cfg(feature = "testing")]
    fn now(&self) -> Option<i64> {
        self.clock.as_ref().map(|clock| super::account::instant(clock.now_ms()))
    }

    #[cfg(not(feature = "testing"))]
    fn now(&self) -> Option<i64> {
        None
    }

    /// Asks the script, together with others that ask at the same time.
    async fn ask(&self, mut cmd: Cmd, until: Instant) -> Result<Answer, StoreError> {
        if let Some(gather) = self.gather.as_ref().filter(|gather| !gather.is_apart()) {
            match gather.join(cmd, until).await {
                Outcome::Answered(answer) => return answer,
                Outcome::Returned(same) => cmd = same,
            }
        }
        self.call(cmd, until).await
    }

    /// Sends a command by itself.
    async fn call(&self, cmd: Cmd, until: Instant) -> Result<Answer, StoreError> {
        let runtime = runtime()?;
        let link = self.link.of(script::key(&cmd));
        let (waiting, outcome) = Waiting::new(cmd, until, runtime.clone());
        runtime.spawn(Call::new(link, self.breaker.clone(), vec![waiting], until).run());
        match outcome.await {
            Ok(Outcome::Answered(answer)) => answer,
            Ok(Outcome::Returned(_)) | Err(_) => Err(ended()),
        }
    }

    /// The same for a command that only has to be done.
    fn send(&self, cmd: Cmd) -> Reply<()> {
        let store = self.clone();
        Reply::later(async move { store.call(cmd, store.until()).await.map(|_| ()) })
    }

    /// When a call that is asked now has failed.
    fn until(&self) -> Instant {
        let now = Instant::now();
        now.checked_add(self.deadline).unwrap_or_else(|| now + NEVER)
    }
}

fn senseless() -> StoreError {
    StoreError::new("Redis gave an answer that makes no sense").of_key()
}

impl<C> From<C> for RedisStore
where
    C: ConnectionLike + Clone + Send + Sync + 'static,
{
    /// Counters in what this connection leads to: a `MultiplexedConnection`, a
    /// `ConnectionManager`, a `ClusterConnection`. To connect again when it is lost is for it to do
    /// (it is tried with a `PING` after a second without calls, and once more if that fails);
    /// a store of [`RedisStore::new`] does it by itself.
    fn from(connection: C) -> Self {
        Self::over(Link::fixed(connection))
    }
}

impl Store for RedisStore {
    fn charge(&self, charge: Charge<'_>) -> Reply<Decision> {
        let now = self.now();
        let cmd = self.commands.charge(&charge, now);
        let (store, charge) = (self.clone(), charge.to_owned());
        Reply::later(async move {
            let (until, charge) = (store.until(), charge.as_charge());
            let mut answer = store.ask(cmd, until).await?;
            if let Some(time) = answer.outside() {
                store.commands.correct_time(time);
                answer = store.ask(store.commands.charge(&charge, now), until).await?;
            }
            let decision = answer.decide(&charge, now);
            decision.ok_or_else(senseless)
        })
    }

    fn adjust(&self, adjust: Adjust<'_>) -> Reply<()> {
        let now = self.now();
        let Some(cmd) = self.commands.adjust(&adjust, now) else { return Reply::now(()) };
        let (store, adjust) = (self.clone(), adjust.to_owned());
        Reply::later(async move {
            let until = store.until();
            let answer = store.call(cmd, until).await?;
            if let Some(time) = answer.outside() {
                store.commands.correct_time(time);
                let cmd = store.commands.adjust(&adjust.as_adjust(), now);
                let again = store.call(cmd.expect("it was made before"), until).await?;
                return again.outside().map_or(Ok(()), |_| Err(senseless()));
            }
            Ok(())
        })
    }

    fn reset(&self, scope: &Scope, key: &Key) -> Reply<()> {
        self.send(self.commands.reset(scope, key))
    }

    fn remote(&self) -> Option<&Remote> {
        Some(&self.remote)
    }

    fn fault_domain(&self, scope: &Scope, key: &Key) -> u64 {
        self.link.domain(|| self.commands.key(scope, key))
    }
}

impl fmt::Debug for RedisStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisStore").field("deadline", &self.deadline).finish_non_exhaustive()
    }
}
