//! Counters in Redis or Valkey, shared by all nodes.

use std::fmt;
use std::future::Future;
use std::sync::Arc;
#[cfg(any(feature = "redis-cluster", feature = "testing"))]
use std::time::Duration;

use redis::aio::ConnectionLike;
#[cfg(feature = "redis-cluster")]
use redis::cluster_async::{ClusterConnection, Connect};
use redis::{Client, IntoConnectionInfo, RedisResult};

use super::account::{Account, Scope};
use super::charge::Charge;
use super::remote::Remote;
#[cfg(feature = "testing")]
use super::reply::OnStoreFailure;
use super::reply::StoreError;
#[cfg(feature = "testing")]
use crate::clock::Clock;
use crate::key::Key;
use crate::quota::{Quota, Quotas};

mod calls;
#[cfg(feature = "redis-cluster")]
mod cluster;
mod connect;
mod link;
mod script;

use calls::{Calls, address_error};
#[cfg(feature = "redis-sentinel")]
use connect::first_success;
use connect::{install_tls_provider, open, server_name, with_keepalive};
use link::Origin;
use script::Commands;

#[cfg(feature = "redis-sentinel")]
const NO_SENTINEL: (redis::ErrorKind, &str) =
    (redis::ErrorKind::EmptySentinelList, "there is no Sentinel");

/// Counters in Redis (from 7.0) or Valkey, shared by all nodes that use the same server.
///
/// Each decision is one round trip: a script reads the server's clock and charges all quotas of a
/// key atomically. So counts are exact for any number of nodes, whatever their clocks show.
/// Concurrent decisions share a call, up to 128 of them, and are decided there in order of arrival.
/// The number of calls in flight follows the distance to the server. Each decision keeps its own
/// deadline, and a decision that is dropped or late before it was sent is never sent.
///
/// ```no_run
/// use tower_fixed_window::store::RedisStore;
/// use tower_fixed_window::{FixedWindowLayer, Quota};
///
/// # fn main() -> Result<(), tower_fixed_window::StoreError> {
/// let store = RedisStore::new("redis://127.0.0.1/")?;
/// let login = FixedWindowLayer::new(Quota::per_minute(5).name("login").store(store.clone()));
/// let search = FixedWindowLayer::new(Quota::per_minute(30).name("search").store(store));
/// # let _ = (login, search); Ok(()) }
/// ```
///
/// # When Redis is down
///
/// If it is created in a tokio runtime, the store connects immediately, else with the first call.
/// It reconnects when there is a request without a connection. Redis does not have to be up when
/// the store is created. The store checks a connection that was idle for a second before it uses
/// it, so that requests are not decided elsewhere because the network dropped the connection. A
/// call fails if there is no answer within 250 ms ([`deadline`](Self::deadline)). If there was no
/// connection for that time, calls fail immediately until there is one. The layer's policy decides
/// what happens then ([`OnStoreFailure`](crate::OnStoreFailure)). A call whose outcome is unknown
/// is not sent again. The exception is the client of a cluster, which may resend after a lost
/// connection. A request that is sent twice counts twice: some are refused early, and none is let
/// through above the limit. A refund that is sent twice comes back twice, and as many more tokens
/// pass.
///
/// # What is in Redis
///
/// There is one hash for each scope and key, such as `tfw1:{login:talice}`: the version of the
/// layout, and in braces (one slot of a cluster) the name and
/// [`Key::readable`](crate::Key::readable). A field for each quota is named by its windows
/// ([`Quota::counter`](crate::Quota::counter)) and holds one number: the start of the window in
/// microseconds, plus the tokens used in it. Here, three tokens are used in the minute that began
/// at 1700000040:
///
/// ```text
/// > HGETALL tfw1:{login:talice}
/// 1) "60000+0"
/// 2) "1700000040000003"
/// ```
///
/// Counts that don't fit this number are text, `used@start`, with the start in milliseconds: 1,000
/// tokens or more for each millisecond of the window, counts that take n windows to return
/// (followed by `*n`: debt, rollover), counts below 0 (rollover), and those of
/// [`from_first_request`](crate::Quota::from_first_request). Counts in windows of a calendar are
/// always text, with the end of the window and its number, since the script does not know the
/// lengths of these windows:
///
/// ```text
/// > HGETALL tfw1:{plan:talice}
/// 1) "month+15@America/New_York"
/// 2) "3812@1773547200000-1776225600000#674"
/// ```
///
/// The key expires when the last of its counts has returned. To reset a key, delete it.
///
/// Other values fail the call. Nothing else should write to these keys.
///
/// ```no_run
/// use std::time::Duration;
/// use tower_fixed_window::{FixedWindowLayer, Quota, RedisStore};
///
/// # fn main() -> Result<(), tower_fixed_window::StoreError> {
/// let store = RedisStore::new("redis://127.0.0.1/")?
///     .prefix("shop")
///     .deadline(Duration::from_millis(100));
/// let login = FixedWindowLayer::new(Quota::per_minute(5).name("login").store(store.clone()));
/// assert_eq!(store.fallback().live_entries(), 0);
/// # let _ = login; Ok(()) }
/// ```
pub type RedisStore = Remote<Redis>;

/// What can be set of a [`RedisStore`] only.
#[derive(Clone)]
pub struct Redis {
    calls: Calls,
    /// The server and the number of its database, if the app has given its address.
    database: Option<Arc<str>>,
}

impl RedisStore {
    /// Creates a store for the server at an address such as `redis://user:password@host:6379/0`,
    /// `rediss://` for TLS (feature `redis-tls`), or `unix:///run/redis.sock`. It connects
    /// immediately in a tokio runtime, else with the first call.
    ///
    /// # Errors
    /// If the address is not valid. A server that does not answer is not an error.
    pub fn new(address: impl IntoConnectionInfo) -> Result<Self, StoreError> {
        let wrong = |error| address_error("no address of Redis: write redis://host:6379/", error);
        Client::open(address).map(Self::client).map_err(wrong)
    }

    /// Creates a store for the server of a [`Client`], with its certificates.
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
        let name = server_name(&client);
        let number = client.get_connection_info().redis_settings().db();
        let database = name.as_ref().map(|name| format!("{name}/{number}").into());
        let client = with_keepalive(&client);
        let origin = Origin::connecting(move |_| {
            let client = client.clone();
            async move { open(&client?).await }
        });
        origin.servers.set_only(name);
        let mut this = Self::from_origin(origin);
        this.settings.database = database;
        this
    }

    /// Creates a store that connects with a closure, for set-ups without a constructor here. The
    /// store calls the closure again when a connection is lost, is silent, or leads to a replica,
    /// also while an earlier call is in flight. The closure has 5 s.
    ///
    /// ```no_run
    /// use tower_fixed_window::store::RedisStore;
    ///
    /// async fn address() -> String {
    ///     // ... from your service discovery
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
        Self::from_origin(Origin::connecting(move |_| {
            install_tls_provider();
            connect()
        }))
    }

    /// Creates a store for a cluster.
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
        Self::from_cluster(move |connecting, answering| {
            install_tls_provider();
            cluster::open(client.clone(), connecting, answering)
        })
    }

    /// Creates a store for the master that Sentinels name. The store asks all Sentinels
    /// concurrently, each with a client of its own that `client` creates, so that a silent one
    /// causes no delay. It asks again after a failover.
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
    /// If `client` fails for an address.
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
                address_error("no address of a Sentinel: write redis://host:26379/", error)
            })?;
        }
        Ok(Self::from_origin(Origin::connecting(move |servers| {
            install_tls_provider();
            let masters = sentinels.iter().map(|sentinel| {
                let (client, servers) = (client(sentinel.clone()), Arc::clone(&servers));
                async move {
                    let master = with_keepalive(&client?.async_get_client().await?)?;
                    servers.set_only(server_name(&master));
                    open(&master).await
                }
            });
            first_success(masters.collect::<Vec<_>>(), NO_SENTINEL.into())
        })))
    }

    /// Creates a store for a simulated cluster. `open` has how long to wait for a connection, if
    /// not as long as the app has set, and for each answer.
    #[cfg(tfw_sim)]
    pub fn cluster_opened_by<F, R, C>(open: F) -> Self
    where
        F: Fn(Option<Duration>, Duration) -> R + Send + Sync + 'static,
        R: Future<Output = RedisResult<ClusterConnection<C>>> + Send + 'static,
        C: ConnectionLike + Connect + Clone + Send + Sync + Unpin + 'static,
    {
        Self::from_cluster(open)
    }

    /// Creates a store for the master that simulated Sentinels name. `open` asks the Sentinel of a
    /// number, and connects to its master.
    #[cfg(tfw_sim)]
    pub fn sentinels_asked_by<F, R, C>(sentinels: usize, open: F) -> Self
    where
        F: Fn(usize) -> R + Send + Sync + 'static,
        R: Future<Output = RedisResult<C>> + Send + 'static,
        C: ConnectionLike + Clone + Send + Sync + 'static,
    {
        Self::connecting(move || {
            first_success((0..sentinels).map(&open).collect::<Vec<_>>(), NO_SENTINEL.into())
        })
    }

    /// Creates a store for a cluster, by a closure that opens the library's connection.
    #[cfg(feature = "redis-cluster")]
    fn from_cluster<F, R, C>(open: F) -> Self
    where
        F: Fn(Option<Duration>, Duration) -> R + Send + Sync + 'static,
        R: Future<Output = RedisResult<ClusterConnection<C>>> + Send + 'static,
        C: ConnectionLike + Connect + Clone + Send + Sync + Unpin + 'static,
    {
        let open = Arc::new(open);
        let connect = move |asks, servers| cluster::connect(Arc::clone(&open), asks, servers);
        Self::from_origin(Origin::sharded(connect)).one_by_one()
    }

    fn from_origin(origin: Origin) -> Self {
        let breaker = Arc::clone(&origin.breaker);
        let calls = Calls::new(origin);
        Self::in_time(calls.in_time(), breaker, Redis { calls, database: None })
    }

    /// Changes how the same counts are called.
    fn with_calls(mut self, change: impl FnOnce(&mut Calls)) -> Self {
        change(&mut self.settings.calls);
        let in_time = self.settings.calls.in_time();
        self.with_store(in_time)
    }

    /// Puts `prefix:` before every key, for servers that other apps use, too.
    ///
    /// # Panics
    /// If the prefix contains a brace, which would change the slot in a cluster.
    #[must_use]
    #[track_caller]
    pub fn prefix(self, prefix: &str) -> Self {
        assert!(
            !prefix.contains(['{', '}']),
            "a prefix of keys has no braces: write .prefix(\"shop\") for keys like shop:tfw1:{{login:talice}}"
        );
        let this = self.with_calls(|calls| calls.commands = Commands::new(&format!("{prefix}:")));
        // Another prefix has other counters.
        this.with_other_counts()
    }

    /// Sends each decision in a call of its own, instead of sharing calls.
    ///
    /// This is needed behind a proxy that distributes keys over several servers and looks only at
    /// the first key of a call, such as Twemproxy and Envoy: other keys would be counted on the
    /// wrong server. A cluster does not need this: it refuses such calls without executing them,
    /// and the store then stops sharing calls.
    ///
    /// ```
    /// use tower_fixed_window::store::RedisStore;
    ///
    /// # fn main() -> Result<(), tower_fixed_window::StoreError> {
    /// let store = RedisStore::new("redis://proxy:6379/")?.one_by_one();
    /// # let _ = store; Ok(()) }
    /// ```
    #[must_use]
    pub fn one_by_one(self) -> Self {
        self.with_calls(|calls| calls.one_by_one = true)
    }

    /// Sends a decision and a reset, for a key of its own. Use it in apps that must fail at startup
    /// if Redis can't be reached, refuses the password, denies permissions, or takes no writes.
    /// (Without it, an app starts without Redis and connects later.) On a cluster, the calls go to
    /// one shard.
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
    /// If Redis does not answer within the deadline, or returns an error.
    pub async fn ping(&self) -> Result<(), StoreError> {
        let (scope, key) = (Scope::named("ping"), Key::from("RedisStore::ping"));
        let quotas = Quotas::from(Quota::per_second(1));
        let account = Account::new(&scope, &quotas, &key);
        let _ = self.caller.store.charge(Charge::new(account, 1)).await?;
        self.caller.store.reset(&scope, &key).await
    }

    /// Reads the time from a [`Clock`] instead of the server, and lets keys expire an hour late, so
    /// that a slow test loses no counter. While the server fails, callers get the error.
    #[cfg(feature = "testing")]
    #[must_use]
    pub fn clock(self, clock: impl Clock) -> Self {
        let this = self.with_calls(|calls| calls.clock = Some(Arc::new(clock)));
        // Remembered refusals would follow the server's clock.
        this.remember_refusals(Duration::ZERO).on_failure(OnStoreFailure::Deny)
    }

    /// Returns a text that stores share if these have the same counts, as far as that is known
    /// before they connect.
    pub(crate) fn identity(&self) -> String {
        match &self.settings.database {
            Some(database) => format!("{database} {}", self.settings.calls.commands.prefix),
            None => self.address().to_string(),
        }
    }
}

impl fmt::Debug for Redis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Redis")
    }
}

impl<C> From<C> for RedisStore
where
    C: ConnectionLike + Clone + Send + Sync + 'static,
{
    /// Creates a store for an open connection: a `MultiplexedConnection`, a `ConnectionManager`, a
    /// `ClusterConnection`. The connection has to reconnect itself when it is lost: the store sends
    /// a `PING` after a second without calls, and another one if that fails. A store of
    /// [`RedisStore::new`] reconnects by itself.
    fn from(connection: C) -> Self {
        Self::from_origin(Origin::given(connection))
    }
}

#[cfg(all(test, not(feature = "redis-tls")))]
mod tests {
    use super::*;

    #[test]
    fn an_address_with_tls_names_the_feature_that_it_needs() {
        let error = RedisStore::new("rediss://localhost/").expect_err("the feature is off");
        assert_eq!(error.to_string(), "rediss:// needs the feature redis-tls");
    }
}
