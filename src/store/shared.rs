//! A database that reads and writes counters and decides nothing, as a store: [`Shared`].

use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering::Relaxed};

use super::Store;
use super::account::Scope;
use super::adjust::Adjust;
use super::charge::Charge;
use super::reply::{Reply, StoreError};
use crate::clock::{Clock, SystemClock};
use crate::decision::Decision;
use crate::key::Key;
use crate::quota::Quota;
use crate::window::State;

mod step;

use step::{Asked, DecidedStep, Step};

/// How often a charge is decided. Of those that meet at a counter one is written each time, so more
/// tries than nodes are needed only where a store never finds what it has read.
const TRIES: usize = 100;

/// A table of counters, for [`Shared`], which decides and makes a [`Store`] of it: two statements
/// for any number of charges.
///
/// A row is a [`CounterId`] and its [`State`]. The contract is short:
///
/// 1. [`read`](Self::read) returns each row as it is, also one that has ended.
/// 2. [`write`](Self::write) writes a group only if all of its counters are as they were read. That
///    is atomic over the nodes. No lock and no transaction is open between the two.
/// 3. The time is the server's, not the node's.
/// 4. A row may be deleted a while after [`State::until`], not before: a minute, or as long as a
///    node may stand still between its read and its write.
///
/// Each call ends by itself, with an answer or an error. For a database over a network, put
/// [`Remote`](super::Remote) around the [`Shared`].
///
/// ```
/// use std::collections::HashMap;
/// use std::sync::{Arc, Mutex};
/// use tower_fixed_window::store::{CounterId, Counters, Remote, Shared, State, Write};
/// use tower_fixed_window::{Key, Limit, Quota, StoreError};
///
/// #[derive(Clone, Default)]
/// struct Table(Arc<Mutex<HashMap<CounterId, State>>>);
///
/// fn now() -> u64 { 1_700_000_040_000 }
///
/// impl Counters for Table {
///     async fn read(&self, counters: &[CounterId])
///         -> Result<(u64, Vec<Option<State>>), StoreError>
///     {
///         let rows = self.0.lock().unwrap();
///         Ok((now(), counters.iter().map(|counter| rows.get(counter).copied()).collect()))
///     }
///
///     async fn write(&self, groups: &[Vec<Write>]) -> Result<Vec<bool>, StoreError> {
///         let mut rows = self.0.lock().unwrap();
///         let mut swap = |group: &Vec<Write>| {
///             let is_unchanged = |w: &Write| rows.get(&w.counter).copied() == w.had;
///             let unchanged = group.iter().all(is_unchanged);
///             if unchanged {
///                 rows.extend(group.iter().map(|w| (w.counter.clone(), w.state)));
///             }
///             unchanged
///         };
///         Ok(groups.iter().map(|group| swap(group)).collect())
///     }
///
///     async fn reset(&self, scope: &str, key: &Key) -> Result<(), StoreError> {
///         let is_other = |of: &CounterId| *of.scope != *scope || of.key != *key;
///         self.0.lock().unwrap().retain(|counter, _| is_other(counter));
///         Ok(())
///     }
/// }
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), StoreError> {
/// // Two nodes.
/// let table = Table::default();
/// let [one, other] = [table.clone(), table].map(|table| {
///     Limit::new(Quota::per_minute(1)).name("login").store(Remote::around(Shared::around(table)))
/// });
/// assert!(one.check("alice").await?.allowed());
/// assert!(!other.check("alice").await?.allowed());
/// # Ok(()) }
/// ```
pub trait Counters: Send + Sync + 'static {
    /// Returns the server's time, in milliseconds since the epoch, and the state of each counter in
    /// the order of the counters. `None`: there is no row. The counters are distinct, and sorted by
    /// scope, key and window.
    ///
    /// No state is newer than the time: take it in the same statement.
    fn read(
        &self,
        counters: &[CounterId],
    ) -> impl Future<Output = Result<(u64, Vec<Option<State>>), StoreError>> + Send;

    /// Writes each group if all of its counters are as they were [read](Write::had), or else
    /// nothing of the group. Returns for each group, in order, whether it was written.
    ///
    /// Most groups have one counter, and no counter is in two. Groups and their counters are
    /// sorted, so rows that are locked in this order are no deadlock. A table may refuse more
    /// groups than it must: these are decided anew. After an error, what was written is unknown.
    fn write(
        &self,
        groups: &[Vec<Write>],
    ) -> impl Future<Output = Result<Vec<bool>, StoreError>> + Send;

    /// Deletes all counters of a key of a scope, whatever their quotas.
    fn reset(&self, scope: &str, key: &Key) -> impl Future<Output = Result<(), StoreError>> + Send;
}

/// What identifies a row of [`Counters`]. Limits are no part of it: they may change while a counter
/// runs.
///
/// ```
/// use tower_fixed_window::Quota;
/// use tower_fixed_window::store::CounterId;
///
/// let window = Quota::per_minute(5).counter().to_string().into();
/// let id = CounterId { scope: "login".into(), key: "alice".into(), window };
/// assert_eq!((&*id.scope, &*id.window), ("login", "60000+0"));
/// assert_eq!(id.key.as_bytes(), b"t\x05alice");
/// assert_eq!(id.key.readable().to_string(), "talice");
/// ```
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct CounterId {
    /// The name of the limiter.
    pub scope: Arc<str>,
    /// The key that is counted, which a table keeps as [bytes](Key::as_bytes).
    pub key: Key,
    /// The length and the anchor of windows, as [`Quota::counter`] writes them.
    pub window: Arc<str>,
}

/// A row to write, if it is still as it was read: of [`Counters::write`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Write {
    /// The row.
    pub counter: CounterId,
    /// The quota of the last charge, for columns that people read, such as the limit.
    pub quota: Quota,
    /// What was read: the row must be equal in all columns, or absent if this is `None`.
    pub had: Option<State>,
    /// What to write.
    pub state: State,
}

/// The [`Store`] over [`Counters`]. It reads what a charge counts in, decides, and writes; where a
/// counter has changed meanwhile, it decides anew. Charges of several limits are one step.
///
/// It needs a tokio runtime. Clones share the counters.
pub struct Shared<C> {
    inner: Arc<Inner<C>>,
}

struct Inner<C> {
    counters: C,
    /// The server's time less the system's, as it was last read.
    ahead: AtomicI64,
}

impl<C: Counters> Shared<C> {
    /// Makes a store of a table of counters: [`Counters`] has an example.
    pub fn around(counters: C) -> Self {
        Self { inner: Arc::new(Inner { counters, ahead: AtomicI64::new(0) }) }
    }

    async fn ask(self, asked: Asked) -> Result<Option<Decision>, StoreError> {
        let Inner { counters, ahead } = &*self.inner;
        let asked = [asked];
        let step = Step::of(asked.iter());
        for _ in 0..TRIES {
            let (now, had) = counters.read(&step.counters).await?;
            if had.len() != step.counters.len() {
                return Err(StoreError::new("the table has not read as many counters as asked"));
            }
            ahead.store((now as i64).saturating_sub(SystemClock.now_ms() as i64), Relaxed);
            let DecidedStep { groups, mut answers } = step.decide(asked.iter(), now, &had);
            let written = match &groups[..] {
                [] => Vec::new(),
                groups => counters.write(groups).await?,
            };
            if written.len() != groups.len() {
                return Err(StoreError::new("the table has not answered for each group"));
            }
            if written.iter().all(|written| *written) {
                return Ok(answers.pop().and_then(|(_, decision)| decision));
            }
        }
        Err(StoreError::new("the counters have changed at each try").unsent())
    }
}

fn undecided() -> StoreError {
    StoreError::new("a charge was not decided")
}

impl<C: Counters> Store for Shared<C> {
    fn charge(&self, charge: Charge<'_>) -> Reply<Decision> {
        let (this, asked) = (self.clone(), Asked::Charge(charge.to_owned()));
        Reply::later(async move { this.ask(asked).await?.ok_or_else(undecided) })
    }

    fn charges_together(&self) -> bool {
        true
    }

    fn adjust(&self, adjust: Adjust<'_>) -> Reply<()> {
        if adjust.tokens() == 0 {
            return Reply::now(());
        }
        let (this, asked) = (self.clone(), Asked::Adjust(Box::new(adjust.to_owned())));
        Reply::later(async move { this.ask(asked).await.map(|_| ()) })
    }

    fn reset(&self, scope: &Scope, key: &Key) -> Reply<()> {
        let (this, scope, key) = (self.clone(), scope.clone(), key.clone());
        Reply::later(async move { this.inner.counters.reset(scope.name(), &key).await })
    }

    /// The server's, as far as it is known from its last answer.
    fn now_ms(&self) -> u64 {
        SystemClock.now_ms().saturating_add_signed(self.inner.ahead.load(Relaxed))
    }
}

impl<C> Clone for Shared<C> {
    fn clone(&self) -> Self {
        Self { inner: Arc::clone(&self.inner) }
    }
}

impl<C> fmt::Debug for Shared<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Shared")
    }
}
