//! Counters in Redis or Valkey, shared by all nodes.

use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

use redis::aio::ConnectionLike;
use redis::{Client, IntoConnectionInfo, RedisResult};

#[cfg(feature = "testing")]
use tower_fixed_window::Clock;
use tower_fixed_window::store::{Account, Adjust, Charge, Remote, Reply, Scope};
use tower_fixed_window::{
    Decision, Key, MemoryStore, OnStoreFailure, Quota, Quotas, Store, StoreError,
};

use crate::calls::{Calls, address_error};
#[cfg(feature = "sentinel")]
use crate::connect::first_success;
use crate::connect::{at_address, install_tls_provider, open, ping, server_name, with_keepalive};
#[cfg(feature = "sentinel")]
use crate::link::Name;
use crate::link::{Origin, Servers};
use crate::script::Commands;

#[cfg(feature = "sentinel")]
const NO_SENTINEL: (redis::ErrorKind, &str) =
    (redis::ErrorKind::EmptySentinelList, "there is no Sentinel");

/// Counters in Redis (from 7.0) or Valkey, shared by all nodes that use the same server.
///
/// Each decision is one round trip: a script reads the server's clock and charges all quotas of a
/// key atomically. So counts are exact for any number of nodes, whatever their clocks show.
/// Concurrent decisions share a call, for up to 128 keys, and are made in order of arrival. The
/// farther the server is, the more calls may be in flight.
///
/// ```no_run
/// use std::time::Duration;
/// use tower_fixed_window::{FixedWindowLayer, Quota};
/// use tower_fixed_window_redis::RedisStore;
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), tower_fixed_window::StoreError> {
/// let store = RedisStore::new("redis://127.0.0.1/")?
///     .prefix("shop")
///     .deadline(Duration::from_millis(100));
/// store.ping().await?;
/// let login = FixedWindowLayer::new(Quota::per_minute(5).name("login").store(store.clone()));
/// assert_eq!(store.fallback().live_entries(), 0);
/// # let _ = login; Ok(()) }
/// ```
///
/// The store needs a tokio runtime with timers and I/O. It connects when it is created in one, else
/// with the first call; Redis does not have to be up. Calls end by the [`deadline`](Self::deadline), 250 ms by default, and while
/// Redis is down, the policy decides ([`on_failure`](Self::on_failure)). A call whose outcome is
/// unknown is not sent again. [The guide](https://docs.rs/tower-fixed-window/latest/tower_fixed_window/guide/many_nodes/#when-the-store-is-down) has the
/// rest.
///
/// # What is in Redis
///
/// There is one hash for each scope and key, such as `tfw1:{login:talice}`: the version of the
/// layout and, in braces (for one slot of a cluster), the limit's name and
/// [`Key::readable`](tower_fixed_window::Key::readable). It has a field for each quota, named by
/// its windows ([`Quota::counter`](tower_fixed_window::Quota::counter)). The value is the window's
/// start in microseconds plus the tokens used in it: [an example](crate#inspecting-counters).
///
/// Some counts don't fit this number. They are text, `used@start`, with the start in milliseconds:
///
/// - counts of [`from_first_request`](tower_fixed_window::Quota::from_first_request);
/// - counts below 0, of rollover;
/// - counts that take n windows to return to 0, of debt or rollover: `*n` follows;
/// - counts of 1,000 tokens or more for each millisecond of the window.
///
/// On a calendar, the text is `used@start-end#number`, with the end and the number of the window:
///
/// ```text
/// > HGETALL tfw1:{plan:talice}
/// 1) "month+15@America/New_York"
/// 2) "3812@1773547200000-1776225600000#674"
/// ```
///
/// When the last of its counts is back at 0, the key stays for another window, but at most for a
/// minute (on a calendar, for a minute), because `MIGRATE` may move it to a node of a cluster whose
/// clock is behind. To reset a key, delete it. Nothing else should write to these keys: calls fail
/// on other values.
#[derive(Clone)]
pub struct RedisStore {
    remote: Remote,
    calls: Calls,
    remember: Duration,
    on_failure: OnStoreFailure,
    nodes: u32,
}

impl RedisStore {
    /// Creates a store for the server at an address such as `redis://user:password@host:6379/0`,
    /// `rediss://` for TLS (feature `tls`), or `unix:///run/redis.sock`. It connects in the
    /// background, so there is nothing to await; [`ping`](Self::ping) checks the server.
    ///
    /// # Errors
    /// If the address is not valid. A server that does not answer is not an error here.
    pub fn new(address: impl IntoConnectionInfo) -> Result<Self, StoreError> {
        let wrong = |error| address_error("not a URL of Redis: write redis://host:6379/", error);
        Client::open(address).map(Self::from_client).map_err(wrong)
    }

    /// Creates a store for the server of a [`Client`], such as one with your own certificates
    /// (`Client::build_with_tls`).
    pub fn from_client(client: Client) -> Self {
        let number = client.get_connection_info().redis_settings().db();
        let database = server_name(&client).map(|name| format!("{name}/{number}").into());
        let mut calls = Calls::new(Servers::one(origin_of(Ok(client))));
        calls.database = database;
        Self::from_calls(calls)
    }

    /// Creates a store that connects with a closure, for example with a password that expires. The
    /// closure is called again when a connection is lost, is silent, or leads to a replica, even
    /// while an earlier call is in flight. It may take 1.5 s, or up to 5 s after calls that took
    /// longer. It must not choose between servers: each would grant the full limit.
    ///
    /// ```no_run
    /// # use tower_fixed_window_redis::RedisStore;
    /// # async fn address() -> String { String::new() }
    /// let store = RedisStore::connecting(|| async {
    ///     let client = redis::Client::open(address().await)?; // from your service discovery
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
        let origin = Origin::connecting(move |_| {
            install_tls_provider();
            connect()
        });
        Self::from_calls(Calls::new(Servers::one(origin)))
    }

    /// Creates a store for a cluster, from addresses of some of its nodes. It finds the other
    /// nodes, and connects to them as to the first one: with its user, its password and its
    /// certificates. For your own certificates, pass the `get_connection_info` of clients.
    ///
    /// ```
    /// # use tower_fixed_window_redis::RedisStore;
    /// let nodes = ["redis://10.0.0.1/", "redis://10.0.0.2/"];
    /// let store = RedisStore::cluster(nodes)?;
    /// # let _ = store; Ok::<(), tower_fixed_window::StoreError>(())
    /// ```
    ///
    /// # Errors
    /// If an address is not valid, or there is none. Servers that do not answer are not an error
    /// here.
    pub fn cluster(
        nodes: impl IntoIterator<Item = impl IntoConnectionInfo>,
    ) -> Result<Self, StoreError> {
        const WRONG: &str = "no address of a cluster: write redis://host:6379/";
        let nodes = nodes.into_iter().map(Client::open).collect::<RedisResult<Vec<_>>>();
        let nodes = nodes.map_err(|error| address_error(WRONG, error))?;
        let seeds: Vec<_> = nodes.iter().filter_map(server_name).collect();
        let first = nodes.into_iter().next().ok_or_else(|| StoreError::new(WRONG))?;
        let connect = move |address: &str| origin_of(at_address(&first, address));
        Ok(Self::from_calls(Calls::new(Servers::cluster(seeds, connect))).one_by_one())
    }

    /// Creates a store for the master that Sentinels name. It asks all Sentinels concurrently, each
    /// with a client of its own that `client` creates, so a silent one causes no delay. It asks
    /// again after a failover.
    ///
    /// ```
    /// use redis::sentinel::{SentinelClient, SentinelServerType};
    /// use tower_fixed_window_redis::RedisStore;
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
    #[cfg(feature = "sentinel")]
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
                address_error("not a URL of a Sentinel: write redis://host:26379/", error)
            })?;
        }
        let origin = Origin::connecting(move |name: Name| {
            install_tls_provider();
            let masters = sentinels.iter().map(|sentinel| {
                let (client, name) = (client(sentinel.clone()), name.clone());
                async move {
                    let master = with_keepalive(&client?.async_get_client().await?)?;
                    name.set(server_name(&master));
                    open(&master, 0).await
                }
            });
            first_success(masters.collect::<Vec<_>>(), NO_SENTINEL.into())
        });
        Ok(Self::from_calls(Calls::new(Servers::one(origin))))
    }

    fn from_calls(calls: Calls) -> Self {
        let (remember, on_failure) = (Duration::from_secs(1), OnStoreFailure::default());
        let remote = Remote::around(calls.clone());
        Self { remote, calls, remember, on_failure, nodes: 1 }
    }

    /// With what is known and counted here anew.
    fn with_calls(self, change: impl FnOnce(&mut Calls)) -> Self {
        let Self { mut calls, remember, on_failure, nodes, .. } = self;
        change(&mut calls);
        let remote = Remote::around(calls.clone()).deadline(calls.deadline);
        let remote = remote.remember_refusals(remember).on_failure(on_failure).local_share(nodes);
        Self { remote, calls, remember, on_failure, nodes }
    }

    /// Sets how long a call may take before Redis counts as failed, by default 250 ms:
    /// [`Remote::deadline`].
    #[must_use]
    #[doc(alias = "timeout")]
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.calls.deadline = deadline;
        Self { remote: self.remote.deadline(deadline), ..self }
    }

    /// Sets how long this process remembers a refusal: [`Remote::remember_refusals`].
    #[must_use]
    pub fn remember_refusals(self, duration: Duration) -> Self {
        let remote = self.remote.remember_refusals(duration);
        Self { remote, remember: duration, ..self }
    }

    /// Sets what happens to requests while Redis fails: [`Remote::on_failure`].
    #[must_use]
    #[doc(alias("fail_open", "fail_closed"))]
    pub fn on_failure(self, policy: OnStoreFailure) -> Self {
        Self { remote: self.remote.on_failure(policy), on_failure: policy, ..self }
    }

    /// Divides quotas among this many nodes while Redis fails: [`Remote::local_share`].
    ///
    /// # Panics
    /// If `nodes` is 0.
    #[must_use]
    #[track_caller]
    pub fn local_share(self, nodes: u32) -> Self {
        Self { remote: self.remote.local_share(nodes), nodes, ..self }
    }

    /// Returns the memory that counts while Redis fails.
    pub fn fallback(&self) -> &MemoryStore {
        self.remote.fallback()
    }

    /// Puts `prefix:` before every key, for servers that other apps use as well.
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
        self.with_calls(|calls| calls.commands = Commands::new(&format!("{prefix}:")))
    }

    /// Sends each decision in a call of its own. Use this behind a proxy that distributes keys over
    /// several servers and looks only at the first key of a call, such as Twemproxy and Envoy:
    /// otherwise other keys would be counted on the wrong server. A [cluster](Self::cluster)
    /// refuses such calls without executing them, and the store then stops sharing calls by itself.
    ///
    /// Set this before you clone the store: afterwards, it counts in a memory of its own while Redis
    /// is down, and remembers its own refusals.
    #[must_use]
    pub fn one_by_one(self) -> Self {
        self.with_calls(|calls| calls.one_by_one = true)
    }

    /// Checks the server with a decision and a reset, for a key that nothing else uses. Call it if
    /// your app must fail at startup if Redis can't be reached, refuses the password, denies
    /// permissions, or takes no writes. Without it, the app starts and connects later. On a
    /// cluster, the calls go to one shard.
    ///
    /// # Errors
    /// If Redis does not answer within the deadline, or returns an error.
    pub async fn ping(&self) -> Result<(), StoreError> {
        let (scope, key) = (Scope::named("ping"), Key::from("RedisStore::ping"));
        let quotas = Quotas::from(Quota::per_second(1));
        let account = Account::new(&scope, &quotas, &key);
        let _ = self.calls.charge(Charge::new(account, 1)).await?;
        self.calls.reset(&scope, &key).await
    }

    /// Reads the time from a [`Clock`] instead of the server, for tests. Keys expire an hour late,
    /// so a slow test loses no counter. While the server fails, callers get the error.
    #[cfg(feature = "testing")]
    #[must_use]
    pub fn clock(self, clock: impl Clock) -> Self {
        let this = self.with_calls(|calls| calls.clock = Some(Arc::new(clock)));
        // Remembered refusals would follow the server's clock.
        this.remember_refusals(Duration::ZERO).on_failure(OnStoreFailure::Deny)
    }
}

/// Each attempt takes the next address of a name.
fn origin_of(client: RedisResult<Client>) -> Origin {
    let name = client.as_ref().ok().and_then(server_name);
    let client = client.and_then(|client| with_keepalive(&client));
    let attempts = Arc::new(AtomicUsize::new(0));
    let origin = Origin::connecting(move |_| {
        let (client, attempts) = (client.clone(), Arc::clone(&attempts));
        async move {
            let connection = open(&client?, attempts.fetch_add(1, Relaxed)).await?;
            attempts.store(0, Relaxed);
            Ok(connection)
        }
    });
    origin.name.set(name);
    origin
}

impl Store for RedisStore {
    fn charge(&self, charge: Charge<'_>) -> Reply<Decision> {
        self.remote.charge(charge)
    }

    fn adjust(&self, adjust: Adjust<'_>) -> Reply<()> {
        self.remote.adjust(adjust)
    }

    fn reset(&self, scope: &Scope, key: &Key) -> Reply<()> {
        self.remote.reset(scope, key)
    }

    fn remote(&self) -> Option<Remote> {
        self.remote.remote()
    }
}

impl fmt::Debug for RedisStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("RedisStore").field(&self.remote).finish()
    }
}

impl<C> From<C> for RedisStore
where
    C: ConnectionLike + Clone + Send + Sync + 'static,
{
    /// Creates a store for an open connection: a `MultiplexedConnection`, a `ConnectionManager`, a
    /// `ClusterConnection`. The connection has to reconnect on its own, unlike those of
    /// [`RedisStore::new`]: while it fails, the store sends a `PING` until one is answered. A
    /// `ClusterConnection` repeats calls that it has lost, so a refund can come back twice;
    /// [`RedisStore::cluster`] does not.
    fn from(connection: C) -> Self {
        Self::connecting(move || {
            let mut connection = connection.clone();
            async move { ping(&mut connection).await.map(|()| connection) }
        })
    }
}

#[cfg(tfw_sim)]
#[path = "../../tests/sim/src/stores.rs"]
mod sim;
