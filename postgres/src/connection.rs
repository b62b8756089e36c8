//! The store's own connection: opened when it is needed, replaced when it is lost or silent.
//!
//! All statements of a runtime are sent over one connection, without waiting for the answers of
//! earlier ones. A read changes nothing, so it is also the check of a connection that was idle: if
//! it fails, it is sent again over a new one. A write is sent once.

use std::collections::HashMap;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::runtime::{Handle, Id};
use tokio::task::AbortHandle;
use tokio::time::timeout;
use tokio_postgres::error::SqlState;
use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{Client, Config, Error, Row};
use tower_fixed_window::StoreError;

/// A connection that was idle for longer is checked by the next read: something on the way may have
/// forgotten it.
const IDLE: Duration = Duration::from_secs(1);
/// How long the check of an idle connection waits for its answer, beside a round trip.
const CHECK: Duration = Duration::from_millis(20);

pub(crate) type Param<'a> = (&'a (dyn ToSql + Sync), Type);

pub(crate) struct Link {
    config: Config,
    /// How long a statement may take, in milliseconds: as long as the most patient handle waits.
    patience: AtomicU64,
    /// One for each runtime, as another one may stand still.
    current: Mutex<HashMap<Id, Arc<Connection>>>,
    /// Held while a connection is opened, which all wait for.
    opening: tokio::sync::Mutex<()>,
}

struct Connection {
    client: Client,
    driver: AbortHandle,
    since: Instant,
    /// When it answered last, in milliseconds since the connection was opened.
    answered: AtomicU64,
    /// The shortest time that an answer has taken, in microseconds.
    round_trip: AtomicU64,
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.driver.abort();
    }
}

pub(crate) enum Failure {
    /// No answer in time.
    Late,
    Unconnected(Error),
    Failed(Error),
}

impl Link {
    pub(crate) fn new(config: Config) -> Self {
        let (patience, current, opening) = Default::default();
        Self { config, patience, current, opening }
    }

    pub(crate) fn be_patient(&self, for_this: Duration) {
        let ms = for_this.as_millis().try_into().unwrap_or(u64::MAX);
        self.patience.fetch_max(ms, Relaxed);
    }

    fn patience(&self) -> Duration {
        Duration::from_millis(self.patience.load(Relaxed))
    }

    fn current(&self) -> MutexGuard<'_, HashMap<Id, Arc<Connection>>> {
        let mut current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
        current.retain(|_, connection| !connection.client.is_closed());
        current
    }

    fn usable(&self) -> Option<Arc<Connection>> {
        self.current().get(&Handle::current().id()).cloned()
    }

    fn discard(&self, connection: &Arc<Connection>) {
        self.current().retain(|_, current| !Arc::ptr_eq(current, connection));
    }

    async fn connection(&self) -> Result<Arc<Connection>, Failure> {
        if let Some(connection) = self.usable() {
            return Ok(connection);
        }
        let opened = timeout(self.patience(), async {
            // Whoever holds it may be in a runtime that stands still.
            let _opening = timeout(self.patience() / 2, self.opening.lock()).await;
            if let Some(connection) = self.usable() {
                return Ok(connection);
            }
            let (client, driver) = connect(&self.config).await?;
            let (since, answered, round_trip) =
                (Instant::now(), AtomicU64::new(0), AtomicU64::new(u64::MAX));
            let connection = Arc::new(Connection { client, driver, since, answered, round_trip });
            self.current().insert(Handle::current().id(), Arc::clone(&connection));
            Ok(connection)
        });
        opened.await.map_err(|_| Failure::Late)?.map_err(Failure::Unconnected)
    }

    /// For what may be done twice: asks again over a new connection if this one is lost, leads to
    /// a replica, or is silent after it was idle.
    pub(crate) async fn ask_again(
        &self,
        sql: &str,
        params: &[Param<'_>],
    ) -> Result<Vec<Row>, Failure> {
        let connection = self.connection().await?;
        let (patience, is_idle) = connection.check(self.patience());
        match self.ask_over(&connection, patience, sql, params).await {
            Err(Failure::Late) if is_idle => {}
            Err(Failure::Failed(error)) if ends_connection(&error) => {}
            answer => return answer,
        }
        self.ask(sql, params).await
    }

    pub(crate) async fn ask(&self, sql: &str, params: &[Param<'_>]) -> Result<Vec<Row>, Failure> {
        let connection = self.connection().await?;
        self.ask_over(&connection, self.patience(), sql, params).await
    }

    pub(crate) async fn run(&self, sql: &str) -> Result<(), Failure> {
        let connection = self.connection().await?;
        let ran = timeout(self.patience(), connection.client.batch_execute(sql)).await;
        if !matches!(ran, Ok(Ok(()))) {
            // Its transaction may be open, and would take no other statement.
            self.discard(&connection);
        }
        ran.map_err(|_| Failure::Late)?.map_err(Failure::Failed)
    }

    async fn ask_over(
        &self,
        connection: &Arc<Connection>,
        patience: Duration,
        sql: &str,
        params: &[Param<'_>],
    ) -> Result<Vec<Row>, Failure> {
        let sent = Instant::now();
        let answer = timeout(patience, connection.client.query_typed(sql, params)).await;
        match &answer {
            Ok(Ok(_)) => connection.note_answer(sent),
            Ok(Err(error)) if !ends_connection(error) => {}
            _ => self.discard(connection),
        }
        answer.map_err(|_| Failure::Late)?.map_err(Failure::Failed)
    }
}

impl Connection {
    /// How long to wait for an answer, and whether the connection was idle.
    fn check(&self, patience: Duration) -> (Duration, bool) {
        let answered = Duration::from_millis(self.answered.load(Relaxed));
        let idle = self.since.elapsed().saturating_sub(answered);
        if idle < IDLE {
            return (patience, false);
        }
        let round_trip = Duration::from_micros(self.round_trip.load(Relaxed)).min(patience);
        (patience.min(CHECK + 2 * round_trip), true)
    }

    fn note_answer(&self, sent: Instant) {
        let micros = sent.elapsed().as_micros().try_into().unwrap_or(u64::MAX);
        self.round_trip.fetch_min(micros, Relaxed);
        let since = self.since.elapsed().as_millis().try_into().unwrap_or(u64::MAX);
        self.answered.fetch_max(since, Relaxed);
    }
}

/// The server's last words over a connection have a code, too. One that only reads is a replica, or
/// was the primary.
fn ends_connection(error: &Error) -> bool {
    let last = [
        SqlState::ADMIN_SHUTDOWN,
        SqlState::CRASH_SHUTDOWN,
        SqlState::CANNOT_CONNECT_NOW,
        SqlState::IDLE_SESSION_TIMEOUT,
        SqlState::READ_ONLY_SQL_TRANSACTION,
    ];
    error.code().is_none_or(|code| last.contains(code))
}

/// The connection is driven by the runtime at hand, and ends with it.
async fn connect(config: &Config) -> Result<(Client, AbortHandle), Error> {
    #[cfg(feature = "tls")]
    let tls = tls::connector();
    #[cfg(not(feature = "tls"))]
    let tls = tokio_postgres::NoTls;
    let (client, connection) = config.connect(tls).await?;
    // How it ends is told to each statement.
    let driver = tokio::spawn(async { drop(connection.await) });
    Ok((client, driver.abort_handle()))
}

#[cfg(feature = "tls")]
mod tls {
    use std::sync::{Arc, LazyLock};

    use rustls::crypto::ring;
    use rustls::{ClientConfig, RootCertStore};
    use tokio_postgres_rustls::MakeRustlsConnect;

    /// With the certificates of the system, which are read once.
    pub(super) fn connector() -> MakeRustlsConnect {
        static CONFIG: LazyLock<ClientConfig> = LazyLock::new(|| {
            let mut roots = RootCertStore::empty();
            roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
            ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
                .with_safe_default_protocol_versions()
                .expect("ring has the default versions")
                .with_root_certificates(roots)
                .with_no_client_auth()
        });
        MakeRustlsConnect::new(CONFIG.clone())
    }
}

impl Failure {
    /// Nothing was done, and what was read no longer counts.
    pub(crate) fn is_conflict(&self) -> bool {
        let codes = [
            SqlState::T_R_SERIALIZATION_FAILURE,
            SqlState::T_R_DEADLOCK_DETECTED,
            SqlState::READ_ONLY_SQL_TRANSACTION,
        ];
        self.code().is_some_and(|code| codes.contains(code))
    }

    pub(crate) fn is_locked(&self) -> bool {
        self.code() == Some(&SqlState::LOCK_NOT_AVAILABLE)
    }

    pub(crate) fn code(&self) -> Option<&SqlState> {
        match self {
            Self::Late => None,
            Self::Unconnected(error) | Self::Failed(error) => error.code(),
        }
    }
}

/// The messages are this crate's: the server's may contain a key.
impl From<Failure> for StoreError {
    fn from(failure: Failure) -> Self {
        let (what, error) = match failure {
            Failure::Late => return Self::new("Postgres did not answer in time"),
            Failure::Unconnected(error) => ("no connection to Postgres", error),
            Failure::Failed(error) => ("Postgres has not answered", error),
        };
        let Some(code) = error.code() else {
            let io =
                std::error::Error::source(&error).and_then(|io| io.downcast_ref::<io::Error>());
            let text = match io {
                Some(io) => format!("{what}: {}", io.kind()),
                None if error.is_closed() => format!("{what}: the connection was closed"),
                // Of the library, without a value: a TLS handshake, a missing host.
                None => format!("{what}: {error}"),
            };
            return Self::with_source(text, error);
        };
        let cause = match code {
            &SqlState::UNDEFINED_TABLE
            | &SqlState::UNDEFINED_FUNCTION
            | &SqlState::INVALID_SCHEMA_NAME => {
                "there is no table tfw_counters: call `create_schema()` at start, or put `SCHEMA` into a migration"
            }
            &SqlState::UNDEFINED_COLUMN => "the table tfw_counters is another version's",
            &SqlState::INVALID_PASSWORD | &SqlState::INVALID_AUTHORIZATION_SPECIFICATION => {
                "it refuses the user or the password"
            }
            &SqlState::INSUFFICIENT_PRIVILEGE => {
                "the user may not read and write the table tfw_counters"
            }
            &SqlState::INVALID_CATALOG_NAME => "there is no such database",
            &SqlState::CANNOT_CONNECT_NOW => "it starts up, or shuts down",
            &SqlState::TOO_MANY_CONNECTIONS => "it takes no more connections",
            &SqlState::DISK_FULL => "its disk is full",
            &SqlState::READ_ONLY_SQL_TRANSACTION => "it is a replica, which takes no writes",
            &SqlState::ADMIN_SHUTDOWN | &SqlState::CRASH_SHUTDOWN => "it was shut down",
            _ => return Self::new(format!("Postgres refused the statement ({})", code.code())),
        };
        Self::new(format!("Postgres: {cause} ({})", code.code()))
    }
}
