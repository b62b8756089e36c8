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
use tokio::sync::watch;
use tokio::task::AbortHandle;
use tokio::time::timeout;
use tokio_postgres::config::{Host, LoadBalanceHosts};
use tokio_postgres::error::SqlState;
use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{Client, Config, Error, Row, SimpleQueryMessage};
use tower_fixed_window::StoreError;

/// A connection that was idle for longer is checked by the next read: something on the way may have
/// forgotten it.
const IDLE: Duration = Duration::from_secs(1);
/// How long the check of an idle connection waits for its answer, beside a round trip.
const CHECK: Duration = Duration::from_millis(20);
/// How long the first attempt to connect takes if nobody answers, and the longest one: each takes
/// twice as long as the one before.
const ATTEMPT: Duration = Duration::from_secs(1);
const LONGEST_ATTEMPT: Duration = Duration::from_secs(4);

pub(crate) type Param<'a> = (&'a (dyn ToSql + Sync), Type);

pub(crate) struct Link {
    pub(crate) config: Config,
    /// Its hosts, for the log.
    pub(crate) server: Arc<str>,
    /// How long a statement may take, in milliseconds: as long as the most patient handle waits.
    patience: AtomicU64,
    /// Each runtime has a connection, as another one may stand still; and until when it should be
    /// open.
    current: Mutex<HashMap<Id, (watch::Receiver<Opened>, Instant)>>,
}

/// `None` while it is opened, which all wait for.
type Opened = Option<Result<Arc<Connection>, StoreError>>;

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
    Unconnected(StoreError),
    Failed(Error),
}

impl Link {
    pub(crate) fn new(config: Config) -> Self {
        let ports = Some(config.get_ports()).filter(|ports| !ports.is_empty()).unwrap_or(&[5432]);
        let hosts = config.get_hosts().iter().zip(ports.iter().cycle());
        let hosts = hosts.map(|(host, port)| match host {
            Host::Tcp(name) => format!("{name}:{port}"),
            Host::Unix(path) => format!("{}:{port}", path.display()),
        });
        let server = hosts.collect::<Vec<_>>().join(",").into();
        Self { config, server, patience: AtomicU64::default(), current: Mutex::default() }
    }

    pub(crate) fn be_patient(&self, for_this: Duration) {
        // A longer deadline is none.
        self.patience.fetch_max(for_this.as_millis().min(u32::MAX.into()) as u64, Relaxed);
    }

    pub(crate) fn patience(&self) -> Duration {
        Duration::from_millis(self.patience.load(Relaxed))
    }

    /// Returns whether no connection can be had: none was opened in time, or it was refused.
    pub(crate) fn is_cut_off(&self) -> bool {
        let Ok(runtime) = Handle::try_current() else { return false };
        let current = lock(&self.current);
        current.get(&runtime.id()).is_some_and(|(opened, due)| match &*opened.borrow() {
            Some(opened) => opened.is_err(),
            None => *due <= Instant::now(),
        })
    }

    /// Another one is opened if it has ended, or is the one that is `lost`.
    fn current(&self, lost: Option<&Arc<Connection>>, due: Instant) -> watch::Receiver<Opened> {
        let mut current = lock(&self.current);
        let works = |open: &Arc<Connection>| {
            !open.client.is_closed() && lost.is_none_or(|lost| !Arc::ptr_eq(lost, open))
        };
        current.retain(|_, (opened, _)| match &*opened.borrow() {
            Some(opened) => opened.as_ref().is_ok_and(works),
            // Unless its runtime has ended.
            None => opened.has_changed().is_ok(),
        });
        let open = || {
            let (opens, opened) = watch::channel(None);
            tokio::spawn(open(self.config.clone(), self.patience(), opens));
            (opened, due)
        };
        current.entry(Handle::current().id()).or_insert_with(open).0.clone()
    }

    async fn connection(&self) -> Result<Arc<Connection>, Failure> {
        let outside = |_| StoreError::new("Postgres is called outside of a tokio runtime").unsent();
        Handle::try_current().map_err(outside).map_err(Failure::Unconnected)?;
        let mut current = self.current(None, Instant::now() + self.patience());
        let opened = timeout(self.patience(), current.wait_for(Option::is_some)).await;
        let opened = opened.ok().and_then(|opened| opened.ok()?.clone());
        opened.ok_or(Failure::Late)?.map_err(Failure::Unconnected)
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
            // If callers have waited in vain, and another one can't be had either, nobody else waits.
            // With TLS and a password, to connect takes eight round trips at most.
            _ => {
                let to_connect = CHECK + 8 * lock(&connection.answered).1;
                drop(self.current(Some(connection), sent + self.patience() + to_connect));
            }
        }
        answer.map_err(|_| Failure::Late)?.map_err(Failure::Failed)
    }
}

impl Connection {
    /// How long to wait for an answer, and whether the connection was idle.
    fn check(&self, patience: Duration) -> (Duration, bool) {
        let (answered, round_trip) = *lock(&self.answered);
        let is_idle = answered.elapsed() >= IDLE;
        // At most half of it, so that the other half is left for another connection.
        (if is_idle { (patience / 2).min(CHECK + 2 * round_trip) } else { patience }, is_idle)
    }

    fn note_answer(&self, sent: Instant) {
        let mut answered = lock(&self.answered);
        *answered = (Instant::now(), answered.1.min(sent.elapsed()));
    }
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The server's last words over a connection have a code, too: that it was shut down, has crashed,
/// starts up, was idle for too long, or only reads, as it is a replica, or was the primary.
fn ends_connection(error: &Error) -> bool {
    let last = ["57P01", "57P02", "57P03", "57P05", "25006"];
    error.code().is_none_or(|code| last.contains(&code.code()))
}

/// Opens a connection, as long as a store wants it, however long its callers wait. It is driven by
/// the runtime at hand, and ends with it.
async fn open(mut config: Config, patience: Duration, opens: watch::Sender<Opened>) {
    let mut attempt = ATTEMPT;
    while !opens.is_closed() {
        #[cfg(feature = "tls")]
        let tls = tls::connector();
        #[cfg(not(feature = "tls"))]
        let tls = tokio_postgres::NoTls;
        if let Ok(opened) = timeout(attempt, config.connect(tls)).await {
            let opened = opened.map_err(|error| told("no connection to Postgres", error));
            return drop(opens.send(Some(opened.map(|(client, connection)| {
                // How it ends is told to each statement.
                let driver = tokio::spawn(async { drop(connection.await) }).abort_handle();
                let answered = Mutex::new((Instant::now(), patience));
                Arc::new(Connection { client, driver, answered })
            }))));
        }
        // The first one of several hosts, or of a name's addresses, may be silent.
        config.load_balance_hosts(LoadBalanceHosts::Random);
        attempt = LONGEST_ATTEMPT.min(attempt * 2);
    }
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
        // It was not serializable, a deadlock, or met a replica.
        self.has_code(&["40001", "40P01", "25006"])
    }

    pub(crate) fn is_locked(&self) -> bool {
        self.has_code(&["55P03"])
    }

    fn has_code(&self, codes: &[&str]) -> bool {
        matches!(self, Self::Failed(of) if of.code().is_some_and(|of| codes.contains(&of.code())))
    }
}

impl From<Failure> for StoreError {
    fn from(failure: Failure) -> Self {
        match failure {
            Failure::Late => Self::new("Postgres did not answer in time"),
            Failure::Unconnected(error) => error,
            Failure::Failed(error) => told("Postgres has not answered", error),
        }
    }
}

/// The messages are this crate's: the server's may contain a key.
fn told(what: &str, error: Error) -> StoreError {
    let Some(code) = error.code() else {
        let io = std::error::Error::source(&error).and_then(|io| io.downcast_ref::<io::Error>());
        let why = match io {
            Some(io) => io.kind().to_string(),
            None if error.is_closed() => "the connection was closed".to_owned(),
            // The library's errors, without a value: a TLS handshake, a missing host.
            None => error.to_string(),
        };
        return StoreError::with_source(format!("{what}: {why}"), error);
    };
    let cause = match code {
        &SqlState::UNDEFINED_TABLE
        | &SqlState::UNDEFINED_FUNCTION
        | &SqlState::INVALID_SCHEMA_NAME => {
            "there is no table tfw_counters: call `create_tables()` at start, or put `SCHEMA` into a migration"
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
        &SqlState::LOCK_NOT_AVAILABLE => "another transaction has locked the table or the counter",
        &SqlState::READ_ONLY_SQL_TRANSACTION => "it is a replica, which takes no writes",
        &SqlState::ADMIN_SHUTDOWN | &SqlState::CRASH_SHUTDOWN => "it was shut down",
        _ => return StoreError::new(format!("Postgres refused the statement ({})", code.code())),
    };
    StoreError::new(format!("Postgres: {cause} ({})", code.code()))
}
