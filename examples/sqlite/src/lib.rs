//! Counters in a SQLite file, which the processes of one machine share: a store of one's own, from
//! one read and one write.
//!
//! ```
//! use sqlite::SqliteCounters;
//! use tower_fixed_window::store::{Remote, Shared};
//! use tower_fixed_window::{Limit, Quota};
//!
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let folder = tempfile::tempdir()?;
//! # let path = folder.path().join("counts.db");
//! let store = Remote::around(Shared::around(SqliteCounters::open(path)?));
//! let logins = Limit::new(Quota::per_minute(5)).name("login").store(store);
//! assert!(logins.check("alice").await?.is_allowed());
//! # Ok(()) }
//! ```

use std::fmt;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rusqlite::{Connection, OptionalExtension, Transaction, TransactionBehavior, params};
use tokio::task::spawn_blocking;
use tower_fixed_window::store::{CounterId, Counters, State, Write};
use tower_fixed_window::{Clock, Key, StoreError, SystemClock};

/// How long a process waits while another one writes: a fraction of a millisecond, unless that one
/// stands still in the midst of it. Requests wait no longer than the deadline of `Remote`.
const PATIENCE: Duration = Duration::from_secs(5);
/// How long rows stay after their end: longer than a process may stand still between its read and
/// its write, which would otherwise find that there is still no row.
const KEEP_MS: i64 = 60_000;

// A counter in as few columns as identify it, and all of its state. The limit is for people.
const SCHEMA: &str = "
    CREATE TABLE IF NOT EXISTS counters (
        scope TEXT, key BLOB, window TEXT,
        start INTEGER, ends INTEGER, used INTEGER, until INTEGER, quota TEXT,
        PRIMARY KEY (scope, key, window)
    ) WITHOUT ROWID;
    CREATE INDEX IF NOT EXISTS counters_until ON counters (until);";
const READ: &str = "
    SELECT start, ends, used, until FROM counters WHERE scope = ?1 AND key = ?2 AND window = ?3";
const DELETE_ENDED: &str = "
    DELETE FROM counters WHERE (scope, key, window) IN
        (SELECT scope, key, window FROM counters WHERE until < ?1 LIMIT 100)";

/// One connection to the file. Clones share it.
#[derive(Clone)]
pub struct SqliteCounters {
    connection: Arc<Mutex<Connection>>,
    clock: Arc<dyn Clock>,
}

impl fmt::Debug for SqliteCounters {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SqliteCounters")
    }
}

impl SqliteCounters {
    /// Opens the file, and creates it with its table if there is none.
    ///
    /// # Errors
    /// If the file can't be opened or is no database.
    pub fn open(path: impl AsRef<Path>) -> rusqlite::Result<Self> {
        let connection = Connection::open(path)?;
        connection.busy_timeout(PATIENCE)?;
        connection.pragma_update(None, "journal_mode", "wal")?;
        // After a power failure, the last moments may be missing.
        connection.pragma_update(None, "synchronous", "normal")?;
        connection.execute_batch(SCHEMA)?;
        let clock = Arc::new(SystemClock);
        Ok(Self { connection: Arc::new(Mutex::new(connection)), clock })
    }

    /// Sets the clock, for tests. The processes of one machine have one clock, its own.
    #[must_use]
    pub fn clock(self, clock: impl Clock) -> Self {
        Self { clock: Arc::new(clock), ..self }
    }

    /// In one transaction, on a thread that may wait for the disk.
    async fn in_transaction<T: Send + 'static>(
        &self,
        kind: TransactionBehavior,
        step: impl FnOnce(&Transaction<'_>) -> rusqlite::Result<T> + Send + 'static,
    ) -> Result<T, StoreError> {
        let connection = Arc::clone(&self.connection);
        let step = move || {
            let mut connection = connection.lock().unwrap_or_else(PoisonError::into_inner);
            let transaction = connection.transaction_with_behavior(kind)?;
            let done = step(&transaction)?;
            transaction.commit().map(|()| done)
        };
        let failed = |error| StoreError::with_source("SQLite failed", error);
        spawn_blocking(step).await.map_err(|_| StoreError::new("SQLite panicked"))?.map_err(failed)
    }
}

impl Counters for SqliteCounters {
    async fn read(&self, counters: &[CounterId]) -> Result<(u64, Vec<Option<State>>), StoreError> {
        let (counters, clock) = (counters.to_vec(), Arc::clone(&self.clock));
        self.in_transaction(TransactionBehavior::Deferred, move |transaction| {
            let states = counters.iter().map(|counter| read(transaction, counter));
            let states = states.collect::<Result<_, _>>()?;
            Ok((clock.now_ms(), states))
        })
        .await
    }

    async fn write(&self, groups: &[Vec<Write>]) -> Result<(u64, Vec<Option<u64>>), StoreError> {
        let (groups, clock) = (groups.to_vec(), Arc::clone(&self.clock));
        // Immediate: no other process writes between the comparison and the write.
        self.in_transaction(TransactionBehavior::Immediate, move |transaction| {
            let now = clock.now_ms();
            transaction.prepare_cached(DELETE_ENDED)?.execute([now as i64 - KEEP_MS])?;
            let written = groups.iter().map(|group| write(transaction, group));
            Ok((now, written.collect::<Result<_, _>>()?))
        })
        .await
    }

    async fn reset(&self, scope: &str, key: &Key) -> Result<(), StoreError> {
        let (scope, key) = (scope.to_owned(), key.as_bytes().to_vec());
        self.in_transaction(TransactionBehavior::Immediate, move |transaction| {
            let delete = "DELETE FROM counters WHERE scope = ?1 AND key = ?2";
            transaction.execute(delete, params![scope, key]).map(|_| ())
        })
        .await
    }
}

/// The row as it is, also one that has ended.
fn read(transaction: &Transaction<'_>, id: &CounterId) -> rusqlite::Result<Option<State>> {
    let mut select = transaction.prepare_cached(READ)?;
    let row = select.query_row(params![id.scope, id.key.as_bytes(), id.window], |row| {
        let mut state = State::default();
        (state.start, state.end) = (row.get(0)?, row.get(1)?);
        (state.used, state.until) = (row.get(2)?, row.get(3)?);
        Ok(state)
    });
    row.optional()
}

/// The whole group if all of its rows are as they were read, or else nothing.
fn write(transaction: &Transaction<'_>, group: &[Write]) -> rusqlite::Result<Option<u64>> {
    for row in group {
        if read(transaction, &row.counter)? != row.had {
            return Ok(None);
        }
    }
    let mut replace = transaction
        .prepare_cached("REPLACE INTO counters VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8)")?;
    for Write { counter: CounterId { scope, key, window }, quota, state, .. } in group {
        let State { start, end, used, until, .. } = *state;
        let quota = quota.to_string();
        replace.execute(params![scope, key.as_bytes(), window, start, end, used, until, quota])?;
    }
    Ok(Some(0))
}
