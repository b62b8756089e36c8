// If a link is defined twice, the first definition wins: these are for rustdoc, those of the page for
// the repository.
#![doc = "[guide]: https://docs.rs/tower-fixed-window/latest/tower_fixed_window/guide/"]
#![doc = "[many_nodes]: https://docs.rs/tower-fixed-window/latest/tower_fixed_window/guide/many_nodes/"]
#![doc = "[redis]: https://docs.rs/tower-fixed-window-redis"]
#![doc = ""]
#![doc = include_str!("../README.md")]
#![cfg_attr(docsrs, feature(doc_cfg))]

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tokio_postgres::Config;
use tower_fixed_window::store::{Account, Adjust, Charge, Remote, Reply, Scope, Shared};
use tower_fixed_window::{
    Clock, Decision, Key, MemoryStore, OnStoreFailure, Quota, Quotas, Store, StoreError,
};

mod connection;
mod table;

use table::Table;

/// The SQL that creates the table of counters, a view of it and its functions, for a migration of
/// your own. [`PostgresStore::create_tables`] runs the same SQL. It may run again.
///
/// ```
/// assert!(tower_fixed_window_postgres::SCHEMA.contains("CREATE TABLE IF NOT EXISTS tfw_counters"));
/// ```
pub const SCHEMA: &str = include_str!("schema.sql");

/// Counters in Postgres, shared by all nodes.
///
/// The store has a connection of its own, separate from your app's pool, and opens it with the
/// first request: Postgres does not have to be up. Charges that wait at the same time share two
/// statements, a read and then a write. If another node changes the row in between, the charge is
/// decided again, unless that node only took tokens, and enough are left for both. While Postgres
/// fails, the policy decides ([`on_failure`](Self::on_failure)). Clones share the connection.
///
/// ```no_run
/// use tower_fixed_window::{FixedWindowLayer, Quota};
/// use tower_fixed_window_postgres::PostgresStore;
///
/// # async fn start() -> Result<(), tower_fixed_window::StoreError> {
/// let store = PostgresStore::new("postgres://app:secret@10.0.0.7/app")?;
/// // Or put `SCHEMA` into your migrations.
/// store.create_tables().await?;
/// let login = FixedWindowLayer::new(Quota::per_minute(5).name("login").store(store));
/// # let _ = login; Ok(()) }
/// ```
///
/// The store needs a tokio runtime with timers and I/O.
#[derive(Clone)]
pub struct PostgresStore {
    server: Server,
    settings: Settings,
    remote: Remote,
}

#[derive(Clone, Copy)]
struct Settings {
    deadline: Duration,
    remembered: Duration,
    on_failure: OnStoreFailure,
}

impl PostgresStore {
    /// Creates a store for the server at an address such as
    /// `postgres://user:password@host/database`. It takes no pool, because it opens a connection of
    /// its own, with the first request. `?sslmode=require` needs the feature `tls`. If there are
    /// several hosts, `?target_session_attrs=read-write` finds the one that takes writes.
    ///
    /// # Errors
    /// If the address is not valid. A server that does not answer is not an error here.
    pub fn new(address: &str) -> Result<Self, StoreError> {
        let wrong = "no address of Postgres: write postgres://user:password@host/database";
        // The parser's error may quote a part of a password.
        let mut config = address.parse::<Config>().map_err(|_| StoreError::new(wrong))?;
        if config.get_hosts().is_empty() && config.get_hostaddrs().is_empty() {
            return Err(StoreError::new(wrong));
        }
        if config.get_application_name().is_none() {
            config.application_name("tower-fixed-window");
        }
        config.keepalives_idle(Duration::from_secs(30));
        let settings = Settings {
            deadline: Duration::from_millis(250),
            remembered: Duration::from_secs(1),
            on_failure: OnStoreFailure::default(),
        };
        Ok(Self::over(Table::new(config), settings))
    }

    fn over(table: Table, settings: Settings) -> Self {
        table.link.be_patient(settings.deadline);
        let server = Server { shared: Arc::new(Shared::around(table.clone())), table };
        let remote = Remote::around(server.clone())
            .deadline(settings.deadline)
            .remember_refusals(settings.remembered)
            .on_failure(settings.on_failure);
        Self { server, settings, remote }
    }

    /// Keeps the counters in a schema, such as `limits`, instead of where the search path finds the
    /// table. Set this before you clone the store.
    ///
    /// # Panics
    /// If the name has other characters than `[a-z0-9_]`.
    #[must_use]
    #[track_caller]
    pub fn schema(self, name: &str) -> Self {
        let is_plain = |b| matches!(b, b'a'..=b'z' | b'0'..=b'9' | b'_');
        assert!(
            !name.is_empty() && name.bytes().all(is_plain),
            "{name:?} can't name a schema here: write a-z, 0-9 and _, as in .schema(\"limits\")"
        );
        let (of, deletion) = (format!("\"{name}\"."), Default::default());
        Self::over(Table { of, deletion, ..self.server.table }, self.settings)
    }

    /// Makes a charge wait until it is on the server's disk (`synchronous_commit`). By default it
    /// does not wait: if the server's machine crashes, the counts of about the last 200 ms are
    /// lost, and those requests may pass again. Set this before you clone the store.
    #[must_use]
    pub fn wait_for_disk(self) -> Self {
        Self::over(Table { commit: "on", ..self.server.table }, self.settings)
    }

    /// Sets how long a call may take before Postgres counts as failed. The default is 250 ms.
    #[must_use]
    #[doc(alias = "timeout")]
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.settings.deadline = deadline;
        self.server.table.link.be_patient(deadline);
        self.remote = self.remote.deadline(deadline);
        self
    }

    /// Sets how long this process remembers a refusal: [`Remote::remember_refusals`].
    #[must_use]
    pub fn remember_refusals(mut self, duration: Duration) -> Self {
        self.settings.remembered = duration;
        self.remote = self.remote.remember_refusals(duration);
        self
    }

    /// Sets what happens to requests while Postgres fails: [`Remote::on_failure`].
    #[must_use]
    #[doc(alias("fail_open", "fail_closed"))]
    pub fn on_failure(mut self, policy: OnStoreFailure) -> Self {
        self.settings.on_failure = policy;
        self.remote = self.remote.on_failure(policy);
        self
    }

    /// Returns the memory that counts while Postgres fails.
    pub fn fallback(&self) -> &MemoryStore {
        self.remote.fallback()
    }

    /// Creates the table of counters, its view and its functions. All nodes may call this at the
    /// same time. It needs the right to create them. If the user has fewer rights, run [`SCHEMA`]
    /// in a migration instead; the user then needs only `SELECT, INSERT, UPDATE, DELETE` on the
    /// table.
    ///
    /// # Errors
    /// If Postgres does not answer within the deadline, or refuses.
    pub async fn create_tables(&self) -> Result<(), StoreError> {
        let schema = self.server.table.of.strip_suffix('.').map(|name| {
            format!("CREATE SCHEMA IF NOT EXISTS {name}; SET LOCAL search_path TO {name};")
        });
        // The number is this crate's: who holds the lock creates, and the others find it done.
        let sql = format!(
            "SELECT pg_advisory_xact_lock(7231846011); {} {SCHEMA}",
            schema.unwrap_or_default()
        );
        self.server.table.link.run(&sql).await?;
        Ok(())
    }

    /// Checks the server: charges a counter that nothing else uses, and resets it. Call it if your
    /// app must fail at startup if Postgres can't be reached, or lacks the table or the right to
    /// write to it. Without it, the app starts and connects later.
    ///
    /// # Errors
    /// If Postgres does not answer within the deadline, or refuses.
    pub async fn ping(&self) -> Result<(), StoreError> {
        let (scope, key) = (Scope::named("ping"), Key::from("PostgresStore::ping"));
        let quotas = Quotas::from(Quota::per_second(1));
        let charge = Charge::new(Account::new(&scope, &quotas, &key), 1);
        let _ = self.server.shared.charge(charge).await?;
        self.server.shared.reset(&scope, &key).await
    }

    /// Reads the time from a [`Clock`] instead of the server, for tests. While Postgres fails,
    /// callers get the error. Set this before you clone the store.
    #[must_use]
    pub fn clock(self, clock: impl Clock) -> Self {
        let settings = Settings {
            remembered: Duration::ZERO,
            on_failure: OnStoreFailure::Deny,
            ..self.settings
        };
        Self::over(Table { clock: Some(Arc::new(clock)), ..self.server.table }, settings)
    }
}

/// The table as a store, with its names.
#[derive(Clone)]
struct Server {
    shared: Arc<dyn Store>,
    table: Table,
}

impl Store for Server {
    fn charge(&self, charge: Charge<'_>) -> Reply<Decision> {
        self.shared.charge(charge)
    }

    fn charges_together(&self) -> bool {
        self.shared.charges_together()
    }

    fn adjust(&self, adjust: Adjust<'_>) -> Reply<()> {
        self.shared.adjust(adjust)
    }

    fn reset(&self, scope: &Scope, key: &Key) -> Reply<()> {
        self.shared.reset(scope, key)
    }

    fn server(&self, _: &Scope, _: &Key) -> Option<Arc<str>> {
        Some(Arc::clone(&self.table.link.server))
    }

    fn is_cut_off(&self, _: &Scope, _: &Key) -> bool {
        self.table.link.is_cut_off()
    }

    fn in_time(&self, deadline: Duration) -> Option<Arc<dyn Store>> {
        Some(Arc::new(Self { shared: self.shared.in_time(deadline)?, ..self.clone() }))
    }

    fn identity(&self) -> Option<String> {
        Some(self.table.identity())
    }

    fn now_ms(&self) -> u64 {
        self.shared.now_ms()
    }
}

impl Store for PostgresStore {
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

impl fmt::Debug for PostgresStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("PostgresStore")
    }
}
