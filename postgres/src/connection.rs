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
use tokio_postgres::config::Host;
use tokio_postgres::error::SqlState;
use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{Client, Config, Error, Row, SimpleQueryMessage};
use tower_fixed_window::StoreError;

/// A connection that was idle for longer is checked by the next read: something on the way may have
/// forgotten it.
const IDLE: Duration = Duration::from_secs(1);
/// How long the check of an idle connection waits for its answer, beside a round trip.
const CHECK: Duration = Duration::from_millis(20);

pub(crate) type Param<'a> = (&'a (dyn ToSql + Sync), Type);

pub(crate) struct Link {
    pub(crate) config: Config,
    /// Its hosts, for the log.
    pub(crate) server: Arc<str>,
    /// How long a statement may take, in milliseconds: as long as the most patient handle waits.
    patience: AtomicU64,
    /// One for each runtime, as another one may stand still.
    current: Mutex<HashMap<Id, Arc<Connection>>>,
    /// Of each runtime. Held while a connection is opened, which all wait for.
    opening: Mutex<HashMap<Id, Arc<tokio::sync::Mutex<()>>>>,
}

struct Connection {
    client: Client,
    driver: AbortHandle,
    /// When it answered last, and the shortest time that an answer has taken.
    answered: Mutex<(Instant, Duration)>,
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
        let ports = config.get_ports();
        let ports = if ports.is_empty() { &[5432] } else { ports };
        let hosts = config.get_hosts().iter().zip(ports.iter().cycle());
        let hosts = hosts.map(|(host, port)| match host {
            Host::Tcp(name) => format!("{name}:{port}"),
            Host::Unix(path) => format!("{}:{port}", path.display()),
        });
        let server = hosts.collect::<Vec<_>>().join(",").into();
        let (patience, current, opening) = Default::default();
        Self { config, server, patience, current, opening }
    }

    pub(crate) fn be_patient(&self, for_this: Duration) {
        let ms = for_this.as_millis().try_into().unwrap_or(u64::MAX);
        self.patience.fetch_max(ms, Relaxed);
    }

    fn patience(&self) -> Duration {
        Duration::from_millis(self.patience.load(Relaxed))
    }

    fn current(&self) -> MutexGuard<'_, HashMap<Id, Arc<Connection>>> {
        let mut current = lock(&self.current);
        current.retain(|_, connection| !connection.client.is_closed());
        current
    }

    fn usable(&self) -> Option<Arc<Connection>> {
        self.current().get(&Handle::current().id()).cloned()
    }

    fn opening(&self) -> Arc<tokio::sync::Mutex<()>> {
        let mut all = lock(&self.opening);
        all.retain(|_, of| Arc::strong_count(of) > 1);
        Arc::clone(all.entry(Handle::current().id()).or_default())
    }

    fn discard(&self, connection: &Arc<Connection>) {
        self.current().retain(|_, current| !Arc::ptr_eq(current, connection));
    }

    async fn connection(&self) -> Result<Arc<Connection>, Failure> {
        if let Some(connection) = self.usable() {
            return Ok(connection);
        }
        let (opening, asked) = (self.opening(), Instant::now());
        let opened = timeout(self.patience(), async {
            let _opening = opening.lock().await;
            if let Some(connection) = self.usable() {
                return Ok(connection);
            }
            // Those that have waited for one that was not opened do not each try it once more.
            if asked.elapsed() > self.patience() / 2 {
                return Err(Failure::Late);
            }
            let (client, driver) = connect(&self.config).await.map_err(Failure::Unconnected)?;
            let answered = Mutex::new((Instant::now(), self.patience()));
            let connection = Arc::new(Connection { client, driver, answered });
            self.current().insert(Handle::current().id(), Arc::clone(&connection));
            Ok(connection)
        });
        opened.await.unwrap_or(Err(Failure::Late))
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

    /// Statements that are one transaction.
    pub(crate) async fn run(&self, sql: &str) -> Result<Vec<SimpleQueryMessage>, Failure> {
        let connection = self.connection().await?;
        let ran = timeout(self.patience(), connection.client.simple_query(sql)).await;
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
        let (answered, round_trip) = *lock(&self.answered);
        match answered.elapsed() < IDLE {
            true => (patience, false),
            false => (patience.min(CHECK + 2 * round_trip), true),
        }
    }

    fn note_answer(&self, sent: Instant) {
        let mut answered = lock(&self.answered);
        *answered = (Instant::now(), answered.1.min(sent.elapsed()));
    }
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
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
            let why = match io {
                Some(io) => io.kind().to_string(),
                None if error.is_closed() => "the connection was closed".to_owned(),
                // Of the library, without a value: a TLS handshake, a missing host.
                None => error.to_string(),
            };
            return Self::with_source(format!("{what}: {why}"), error);
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
