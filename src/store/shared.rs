//! A database that reads and writes counters and decides nothing, as a store: [`Shared`].

use std::collections::HashMap;
use std::fmt;
use std::future::{Future, poll_fn};
use std::hash::RandomState;
use std::pin::pin;
use std::sync::atomic::{AtomicI64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::task::Poll;
use std::time::Duration;

use super::Store;
use super::account::Scope;
use super::adjust::Adjust;
use super::charge::Charge;
use super::remote::{LATE, with_deadline};
use super::reply::{Fault, Reply, StoreError};
use crate::clock::{Clock, SystemClock};
use crate::decision::Decision;
use crate::key::Key;
use crate::quota::Quota;
use crate::sync::{self, Instant};
use crate::window::State;

mod gather;
mod step;

use gather::{SharedCalls, WaitingQuestion};
use step::{Asked, DecidedStep, Step};

/// How often a charge is decided: more than nodes may meet at a counter.
const TRIES: usize = 100;
/// States that are remembered, at most.
const KNOWN: usize = 16_384;
/// Calls without a read until one reads. Meanwhile a node whose writes have no room can win.
const UNREAD: u32 = 8;
/// How old the last answer may be: over a connection that has been idle, no charge is sent.
const FRESH: Duration = Duration::from_millis(10);

/// A table of counters in a database. [`Shared`] makes a [`Store`] of it and makes the decisions:
/// it needs at most two statements for any number of charges.
///
/// A row is a [`CounterId`] and its [`State`]. The contract is short:
///
/// 1. [`read`](Self::read) returns each row as it is, even one that has ended.
/// 2. [`write`](Self::write) writes a group only if all of its counters are as they were known. That
///    is atomic over the nodes. No lock and no transaction is open between the two. A table may also
///    add to what others have charged meanwhile, if there is [room](Write::room).
/// 3. Both return the time, which is the server's, not the node's.
/// 4. A row may be deleted a while after [`State::until`], not before: a minute, or as long as a
///    node may stand still between its read and its write.
///
/// For a database over a network, put [`Remote`](super::Remote) around the [`Shared`], for the
/// deadline of calls.
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
///     async fn write(&self, groups: &[Vec<Write>])
///         -> Result<(u64, Vec<Option<u64>>), StoreError>
///     {
///         let mut rows = self.0.lock().unwrap();
///         let mut swap = |group: &Vec<Write>| {
///             let is_unchanged = |w: &Write| rows.get(&w.counter).copied() == w.had;
///             let unchanged = group.iter().all(is_unchanged);
///             if unchanged {
///                 rows.extend(group.iter().map(|w| (w.counter.clone(), w.state)));
///             }
///             unchanged.then_some(0)
///         };
///         Ok((now(), groups.iter().map(|group| swap(group)).collect()))
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
/// assert!(one.check("alice").await?.is_allowed());
/// assert!(!other.check("alice").await?.is_allowed());
/// # Ok(()) }
/// ```
pub trait Counters: Send + Sync + 'static {
    /// Returns the server's time, in milliseconds since the epoch, and the state of each counter,
    /// in the order of the counters; `None` if there is no row. The counters are distinct, and
    /// sorted by scope, key and window.
    ///
    /// No state may be newer than the time: take the time in the statement that reads, or after it.
    fn read(
        &self,
        counters: &[CounterId],
    ) -> impl Future<Output = Result<(u64, Vec<Option<State>>), StoreError>> + Send;

    /// Writes each group if all of its counters are as they [were known](Write::had), otherwise
    /// nothing of the group. Returns the server's time, taken after the call arrived, and for each
    /// group, in order, `None` if it was not written, or how many more tokens than were known had
    /// been taken: 0, unless the table uses [`Write::room`].
    ///
    /// Most groups have one counter, and no counter is in two groups. If a table waits for locks,
    /// let it lock all rows in their order, so that no two nodes wait for each other. It may refuse
    /// more groups than necessary: charges of a refused group are decided again. After an error,
    /// it is unknown what was written.
    fn write(
        &self,
        groups: &[Vec<Write>],
    ) -> impl Future<Output = Result<(u64, Vec<Option<u64>>), StoreError>> + Send;

    /// Deletes all counters of a key of a scope, whatever their quotas.
    fn reset(&self, scope: &str, key: &Key) -> impl Future<Output = Result<(), StoreError>> + Send;
}

/// The identity of a row of [`Counters`]. The limit is not part of it, because it may change while
/// a counter runs.
///
/// ```
/// use tower_fixed_window::Quota;
/// use tower_fixed_window::store::CounterId;
///
/// let window = Quota::per_minute(5).counter().into();
/// let id = CounterId { scope: "login".into(), key: "alice".into(), window };
/// assert_eq!((&*id.scope, &*id.window), ("login", "60000+0"));
/// assert_eq!(id.key.as_bytes(), b"t\x05alice");
/// assert_eq!(id.key.readable(), "talice");
/// ```
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct CounterId {
    /// The name of the limit.
    pub scope: Arc<str>,
    /// The key that is counted, which a table keeps as [bytes](Key::as_bytes).
    pub key: Key,
    /// The length of the windows and where they start, as [`Quota::counter`] writes them.
    pub window: Arc<str>,
}

/// A row for [`Counters::write`] to write, if it is still as it was known.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Write {
    /// The row.
    pub counter: CounterId,
    /// The quota of the last charge, for columns that people read, such as the limit.
    pub quota: Quota,
    /// The row as this node last read or wrote it. The row must still be equal in all columns, or
    /// absent if this is `None`.
    pub had: Option<State>,
    /// The new state.
    pub state: State,
    /// How many tokens others may have taken before the write, so that the charges still pass. A
    /// table may ignore this. Or, if the row differs only in a [`State::used`] that is greater, and
    /// by at most this, it may add what the write adds to `had`: then nodes rarely decide again
    /// about a counter that all of them charge. Above 0 only if the counter is alone in its group.
    pub room: u64,
}

/// The [`Store`] over [`Counters`]: it reads the counters of charges, decides, and writes. If a
/// counter has changed meanwhile, and has no [room](Write::room), it decides again. On a busy node,
/// charges that fit what it wrote last are written without a read.
///
/// Charges and corrections that wait at the same time share calls, up to 128 counters in each, and
/// those of one counter share one write. The farther the database is, the more calls may be in
/// flight. A charge of several limits is one step. If a charge is dropped before it is written, it
/// is not made.
///
/// Clones share the counters and the calls. It needs a tokio runtime.
pub struct Shared<C> {
    calls: Arc<SharedCalls<C>>,
    deadline: Duration,
}

struct SharedTable<C> {
    counters: C,
    /// The server's time less the system's, as it was last read.
    ahead: AtomicI64,
    hasher: RandomState,
}

/// Counters as the calls of a runtime have left them, by their numbers.
#[derive(Default)]
struct Recent {
    states: HashMap<u64, State>,
    /// The last answer in this runtime: another one has connections of its own.
    answered: Option<Instant>,
    /// Calls without a read since the last one.
    unread: u32,
}

impl<C: Counters> Shared<C> {
    /// Makes a store from a table of counters: [`Counters`] has an example.
    pub fn around(counters: C) -> Self {
        let (ahead, hasher) = Default::default();
        let calls = Arc::new(SharedCalls::new(SharedTable { counters, ahead, hasher }));
        Self { calls, deadline: Duration::MAX }
    }
}

/// The server's time, and of each group what [`Counters::write`] says.
type Written = (u64, Vec<Option<u64>>);

impl<C: Counters> SharedTable<C> {
    async fn read(&self, counters: &[CounterId]) -> Result<(u64, Vec<Option<State>>), StoreError> {
        let (now, had) = self.counters.read(counters).await?;
        if had.len() != counters.len() {
            return Err(StoreError::new("the table has not read the counters that it should"));
        }
        self.note_time(now);
        Ok((now, had))
    }

    async fn write(&self, groups: &[Vec<Write>]) -> Result<Written, StoreError> {
        if groups.is_empty() {
            return Ok((self.now_ms(), Vec::new()));
        }
        let (now, written) = self.counters.write(groups).await?;
        if written.len() != groups.len() {
            return Err(StoreError::new("the table has not said for each group if it was written"));
        }
        if written.iter().any(Option::is_some) {
            self.note_time(now);
        }
        Ok((now, written))
    }

    fn note_time(&self, now: u64) {
        self.ahead.store((now as i64).saturating_sub(SystemClock.now_ms() as i64), Relaxed);
    }

    fn now_ms(&self) -> u64 {
        SystemClock.now_ms().saturating_add_signed(self.ahead.load(Relaxed))
    }
}

impl Recent {
    /// Returns the last states of the counters of simple charges, if all are known; they are forgotten
    /// until their call is answered. Old states do no harm: a write says what it was decided by.
    fn recall(&mut self, batch: &[WaitingQuestion], step: &Step) -> Option<Vec<Option<State>>> {
        self.answered.filter(|answered| answered.elapsed() < FRESH)?;
        if self.unread >= UNREAD {
            self.unread = 0;
            return None;
        }
        let numbers = batch.iter().map(|of| of.simple_number().filter(|_| of.tries == 0));
        let numbers = numbers.collect::<Option<Vec<_>>>()?;
        let states = numbers.iter().map(|number| self.states.get(number).copied());
        let states = states.collect::<Option<Vec<_>>>()?;
        numbers.iter().for_each(|number| _ = self.states.remove(number));
        self.unread += 1;
        Some(step.by_counter(states))
    }

    fn note(&mut self, batch: &[WaitingQuestion], decided: &DecidedStep, written: &[Option<u64>]) {
        if !written.is_empty() {
            self.answered = Some(Instant::now());
        }
        if self.states.len() >= KNOWN {
            self.states.clear();
        }
        for (waiting, (group, _)) in batch.iter().zip(&decided.answers) {
            let group = group.map(|of| (&decided.groups[of][..], written[of]));
            match (waiting.simple_number(), group) {
                (Some(number), Some(([write], Some(more)))) => {
                    self.states.insert(number, write.state_after(more));
                }
                // This one has written nothing.
                (None, None) => {}
                _ => waiting.counters.iter().for_each(|number| _ = self.states.remove(number)),
            }
        }
    }
}

impl<C: Counters> SharedTable<C> {
    /// Answers the questions, and returns how long the call took. After each write, `split` gets the
    /// questions that the call goes on with, and those to ask again.
    ///
    /// Questions that have lost before have their counters read again right behind the write: of two
    /// equally far nodes, the one that is a moment later would lose each time. Charges that pass by
    /// what their counters were are written without a read. If these have changed, or had ended by
    /// then, the questions are asked again, with a read.
    async fn decide_and_write(
        &self,
        recent: &Mutex<Recent>,
        mut batch: Vec<WaitingQuestion>,
        split: impl Fn(&[WaitingQuestion], Vec<WaitingQuestion>),
    ) -> Option<Duration> {
        let mut step = Step::from_asked(batch.iter().map(|waiting| &waiting.asked));
        let mut wanted = are_wanted(&batch);
        let started = Instant::now();
        let states = sync::lock(recent).recall(&batch, &step);
        let unread = states.and_then(|had| {
            let now = self.now_ms();
            let decided = step.decide(asked_of(&batch, &wanted), now, &had);
            step.passes(&decided).then_some((now, had, decided))
        });
        let is_read = unread.is_none();
        let (mut now, mut had, mut decided) = match unread {
            Some(unread) => unread,
            None => match WaitingQuestion::wait_for(&mut batch, self.read(&step.counters)).await {
                Some(Ok((now, had))) => {
                    wanted = are_wanted(&batch);
                    let decided = step.decide(asked_of(&batch, &wanted), now, &had);
                    (now, had, decided)
                }
                // Nothing was written, and the others are not of that key.
                Some(Err(error))
                    if error.fault == Fault::Key && batch.len() > 1 && !batch[0].is_parted =>
                {
                    batch.iter_mut().for_each(WaitingQuestion::part);
                    split(&[], batch);
                    return None;
                }
                failed => return fail(batch, failed),
            },
        };
        // A call is a read and a write.
        let took = is_read.then(|| started.elapsed() * 2);
        loop {
            let lost = batch.iter().map(|waiting| (1..TRIES).contains(&waiting.tries));
            let lost = step.counters_of(lost);
            let write = self.write_and_read(&decided.groups, &lost);
            let ((at, written), read) = match WaitingQuestion::wait_for(&mut batch, write).await {
                Some(Ok(answers)) => answers,
                failed => return fail(batch, failed),
            };
            sync::lock(recent).note(&batch, &decided, &written);
            let is_made = |(group, _): &(Option<usize>, _)| {
                let ends = |of: usize| decided.groups[of][0].state.until;
                let is_in_time = |of| is_read || (at as i64) < ends(of);
                group.is_none_or(|of| written[of].is_some() && is_in_time(of))
            };
            let made: Vec<_> = decided.answers.iter().map(is_made).collect();
            // Where others have charged meanwhile, answers say what is left beside them. Where
            // nothing was read, they are of the time of the write.
            let changed = decided.groups.iter().zip(&written).filter(|(_, more)| **more > Some(0));
            let is_unread = !is_read && made.contains(&true);
            if is_unread || changed.clone().next().is_some() {
                changed.for_each(|(group, more)| step.note_more(&group[0], *more, &mut had));
                now = if is_read { now } else { at };
                decided = step.decide(asked_of(&batch, &wanted), now, &had);
            }
            let (mut again, mut lost_again) = (Vec::new(), Vec::new());
            let answers = batch.into_iter().zip(wanted).zip(made).zip(decided.answers);
            for (((mut waiting, wanted), is_made), (_, decision)) in answers {
                if !wanted {
                    // Its caller may not have looked at the time yet.
                    waiting.answer_late();
                } else if is_made {
                    waiting.answer(Ok(decision));
                } else if waiting.tries < TRIES {
                    waiting.note_lost(is_read);
                    let is_there = waiting.tries > 1 && read.is_some();
                    if is_there { &mut lost_again } else { &mut again }.push(waiting);
                } else {
                    let error = StoreError::new("the counters have changed at each try");
                    waiting.answer(Err(error.unsent()));
                }
            }
            split(&lost_again, again);
            let Some((later, states)) = read.filter(|_| !lost_again.is_empty()) else {
                return took;
            };
            batch = lost_again;
            step = Step::from_asked(batch.iter().map(|waiting| &waiting.asked));
            let place = |of: &CounterId| lost.iter().position(|other| other == of);
            had = step.counters.iter().map(|of| states[place(of)?]).collect();
            now = later;
            wanted = are_wanted(&batch);
            decided = step.decide(asked_of(&batch, &wanted), now, &had);
        }
    }

    /// The write is sent first. Without a conflict nobody waits for the read.
    async fn write_and_read(
        &self,
        groups: &[Vec<Write>],
        counters: &[CounterId],
    ) -> Result<(Written, Option<(u64, Vec<Option<State>>)>), StoreError> {
        let (mut write, mut read) = (pin!(self.write(groups)), pin!(self.read(counters)));
        let mut states = counters.is_empty().then_some(None);
        let first = poll_fn(|cx| {
            let written = write.as_mut().poll(cx);
            if written.is_pending()
                && states.is_none()
                && let Poll::Ready(answer) = read.as_mut().poll(cx)
            {
                states = Some(answer.ok());
            }
            written
        });
        let written = first.await?;
        match states {
            None if written.1.contains(&None) => Ok((written, read.await.ok())),
            states => Ok((written, states.flatten())),
        }
    }
}

fn are_wanted(batch: &[WaitingQuestion]) -> Vec<bool> {
    let at = Instant::now();
    batch.iter().map(|waiting| waiting.is_wanted(at)).collect()
}

/// Returns what is asked by those that are wanted.
fn asked_of<'a>(
    batch: &'a [WaitingQuestion],
    wanted: &'a [bool],
) -> impl Iterator<Item = Option<&'a Asked>> {
    batch.iter().zip(wanted).map(|(waiting, wanted)| wanted.then_some(&waiting.asked))
}

/// No question of a call that failed is repeated: its write may have happened.
fn fail<T>(batch: Vec<WaitingQuestion>, failed: Option<Result<T, StoreError>>) -> Option<Duration> {
    let error = failed?.err()?;
    batch.into_iter().for_each(|waiting| waiting.answer(Err(error.clone())));
    None
}

impl<C: Counters> Store for Shared<C> {
    fn charge(&self, charge: Charge<'_>) -> Reply<Decision> {
        let (this, asked) = (self.clone(), Asked::Charge(charge.to_owned()));
        Reply::later(async move {
            this.calls
                .ask(asked, this.deadline)
                .await?
                .ok_or_else(|| StoreError::new("the charge was not decided"))
        })
    }

    fn charges_together(&self) -> bool {
        true
    }

    fn adjust(&self, adjust: Adjust<'_>) -> Reply<()> {
        if adjust.tokens == 0 {
            return Reply::now(());
        }
        let (this, asked) = (self.clone(), Asked::Adjust(Box::new(adjust.to_owned())));
        Reply::later(async move { this.calls.ask(asked, this.deadline).await.map(|_| ()) })
    }

    fn reset(&self, scope: &Scope, key: &Key) -> Reply<()> {
        let (this, scope, key) = (self.clone(), scope.clone(), key.clone());
        let until = Instant::now().checked_add(self.deadline);
        Reply::later(async move {
            let reset = this.calls.table.counters.reset(scope.name(), &key);
            with_deadline(until, reset, || StoreError::new(LATE)).await
        })
    }

    fn in_time(&self, deadline: Duration) -> Option<Arc<dyn Store>> {
        Some(Arc::new(Self { calls: Arc::clone(&self.calls), deadline }))
    }

    /// The server's, as far as it is known from its last answer.
    fn now_ms(&self) -> u64 {
        self.calls.table.now_ms()
    }
}

impl<C> Clone for Shared<C> {
    fn clone(&self) -> Self {
        Self { calls: Arc::clone(&self.calls), deadline: self.deadline }
    }
}

impl<C> fmt::Debug for Shared<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Shared")
    }
}
