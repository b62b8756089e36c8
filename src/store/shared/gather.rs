//! Questions that share calls: [`SharedCalls`].
//!
//! A single question is sent at once. While calls are in flight, a task lets other tasks run for a
//! moment, then sends all questions that wait by then: there is no timer. The distance to the
//! server limits the calls in flight.
//!
//! Two calls in flight have no counter in common, unless one of them stands still: one would only
//! meet the other's change. So questions about a counter wait while a call has it, and are in the
//! next one together.

use std::collections::{HashMap, HashSet, VecDeque};
use std::future::{Future, pending, poll_fn};
use std::hash::BuildHasher;
use std::mem;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering::Relaxed};
use std::sync::{Arc, Mutex, Weak};
use std::task::Poll;
use std::time::Duration;

use tokio::runtime::{Handle, Id};
use tokio::sync::oneshot;
use tokio::task::yield_now;
use tokio::time::Instant;

use super::step::Asked;
use super::{Counters, Recent, SharedTable};
use crate::decision::Decision;
use crate::store::remote::{LATE, with_deadline};
use crate::store::reply::StoreError;
use crate::sync::{self, AtEnd, Sleep};

/// Yields of a sender before it sends. tokio returns to it after some sixty tasks, and callers that
/// were just answered should have the chance to ask again.
const YIELDS: usize = 3;
/// Counters in one call. Larger calls save little and take the server longer.
const MAX_COUNTERS: usize = 128;
/// Questions in one call. Those about one counter cost the server nothing, but they are decided one
/// after the other.
const MAX_QUESTIONS: usize = 1_024;
/// Each such part of the time that a call takes lets one more call be in flight: about as long as a
/// database is busy with a full one. More calls of fewer questions would cost it more.
const INTERVAL: Duration = Duration::from_millis(1);
/// Before that time is known.
const UNMEASURED: usize = 1_024;
/// In flight beyond that: for full calls, which gain nothing by waiting, and while the last call
/// stands still, as other counters should not.
const MORE: usize = 4;
const STILL: Duration = Duration::from_millis(10);
/// How long the shortest call is remembered, at least: the distance may change.
const SPAN: Duration = Duration::from_secs(5);
/// How long a call has a place among those in flight, keeps its counters after each answer to a
/// write, and lasts after all of its callers have left. One that hangs up must not end a connection,
/// and a call that is not answered must keep neither others nor its counters, however patient its
/// callers are.
const PATIENCE: Duration = Duration::from_secs(1);

/// A question and its caller.
pub(super) struct WaitingQuestion {
    pub(super) asked: Asked,
    /// A number for each of its counters.
    pub(super) counters: Box<[u64]>,
    /// How many calls have read and not written its counters.
    pub(super) tries: usize,
    /// The question shares calls only with others of its counters, since a counter could not be read.
    pub(super) is_parted: bool,
    /// Its caller's deadline.
    until: Option<Instant>,
    fate: Arc<AtomicU8>,
    reply: oneshot::Sender<Answer>,
}

/// A question's fate, for its caller's deadline: it waits for a call, it is in one, or a call has
/// answered that it was not written: the server works, and the counter changes or is locked.
const WAITS: u8 = 0;
const SENT: u8 = 1;
const LOST: u8 = 2;

fn late(fate: u8, sent: &'static str) -> StoreError {
    match fate {
        WAITS => StoreError::new("the call to the store could not be sent in time").unsent(),
        SENT => StoreError::new(sent),
        _ => StoreError::new("the counters were locked, or changed at each try").of_key(),
    }
}

/// A correction has no decision.
pub(super) type Answer = Result<Option<Decision>, StoreError>;

impl WaitingQuestion {
    pub(super) fn is_wanted(&self, now: Instant) -> bool {
        self.until.is_none_or(|until| now < until) && !self.reply.is_closed()
    }

    /// The number of the one counter of a simple charge.
    pub(super) fn simple_number(&self) -> Option<u64> {
        self.counters.first().copied().filter(|_| self.asked.is_simple())
    }

    /// A counter that was not read may have changed long ago.
    pub(super) fn note_lost(&mut self, was_read: bool) {
        self.tries += usize::from(was_read);
        self.fate.store(if was_read { LOST } else { WAITS }, Relaxed);
    }

    pub(super) fn part(&mut self) {
        self.is_parted = true;
        self.fate.store(WAITS, Relaxed);
    }

    fn is_parted_from(&self, other: &Self) -> bool {
        (self.is_parted || other.is_parted) && self.counters != other.counters
    }

    pub(super) fn answer_late(self) {
        let late = late(self.fate.load(Relaxed), LATE);
        self.answer(Err(late));
    }

    pub(super) fn answer(self, answer: Answer) {
        let _ = self.reply.send(answer);
    }

    /// `None`: all callers have left, and the call took too long.
    pub(super) async fn wait_for<T>(
        batch: &mut [Self],
        call: impl Future<Output = T>,
    ) -> Option<T> {
        let all_left = async {
            for waiting in batch {
                waiting.reply.closed().await;
            }
            match Sleep::until(Instant::now() + PATIENCE) {
                Some(mut sleep) => poll_fn(|cx| sleep.poll(cx)).await,
                // Without timers, nothing else has a deadline either.
                None => pending().await,
            }
        };
        let (mut call, mut all_left) = (pin!(call), pin!(all_left));
        poll_fn(|cx| match call.as_mut().poll(cx) {
            Poll::Ready(answer) => Poll::Ready(Some(answer)),
            Poll::Pending => all_left.as_mut().poll(cx).map(|()| None),
        })
        .await
    }
}

/// Each runtime has calls of its own, so that its end does not affect the others.
pub(super) struct SharedCalls<C> {
    pub(super) table: Arc<SharedTable<C>>,
    runtimes: Mutex<HashMap<Id, OfRuntime<C>>>,
}

/// The task that keeps it ends with the runtime, or when the sender is dropped.
type OfRuntime<C> = (Weak<Gathering<C>>, oneshot::Sender<()>);

impl<C: Counters> SharedCalls<C> {
    pub(super) fn new(table: SharedTable<C>) -> Self {
        Self { table: Arc::new(table), runtimes: Mutex::default() }
    }

    /// Asks in a call that others share. A question that expires before it is sent is no failure
    /// of the server.
    pub(super) async fn ask(&self, asked: Asked, deadline: Duration) -> Answer {
        let mut counters = Vec::new();
        asked.each_counter(|account, quota| {
            let counter = (account.scope.id(), account.key, quota.identity());
            counters.push(self.table.hasher.hash_one(counter));
        });
        let gathering = self.of_this_runtime()?;
        let (reply, answer) = oneshot::channel();
        let until = Instant::now().checked_add(deadline);
        let fate = Arc::new(AtomicU8::new(WAITS));
        let (counters, tries, is_parted, of) = (counters.into(), 0, false, Arc::clone(&fate));
        let question =
            WaitingQuestion { asked, counters, tries, is_parted, until, fate: of, reply };
        if let Some(alone) = gathering.change_queue(|queue| queue.push(question)) {
            gathering.runtime.spawn(gathering.make_call(alone));
        }
        drop(gathering);
        let failed = |sent| late(fate.load(Relaxed), sent);
        let ended = "the call to the store has ended without an answer";
        let answer = async { answer.await.unwrap_or_else(|_| Err(failed(ended))) };
        with_deadline(until, answer, || failed(LATE)).await
    }

    fn of_this_runtime(&self) -> Result<Arc<Gathering<C>>, StoreError> {
        let outside = |_| StoreError::new("the store is called outside of a runtime").unsent();
        let runtime = Handle::try_current().map_err(outside)?;
        let (mut runtimes, id) = (sync::lock(&self.runtimes), runtime.id());
        if let Some(gathering) = runtimes.get(&id).and_then(|(of, _)| of.upgrade()) {
            return Ok(gathering);
        }
        runtimes.retain(|_, (of, _)| of.strong_count() > 0);
        let (table, queue) = (Arc::clone(&self.table), Mutex::default());
        let (of, recent) = (runtime.clone(), Mutex::default());
        let gathering = Arc::new(Gathering { table, runtime: of, queue, recent });
        let (until, end) = oneshot::channel();
        runtimes.insert(id, (Arc::downgrade(&gathering), until));
        let kept = Arc::clone(&gathering);
        runtime.spawn(async move {
            let _ = end.await;
            drop(kept);
        });
        Ok(gathering)
    }
}

struct Gathering<C> {
    table: Arc<SharedTable<C>>,
    runtime: Handle,
    queue: Mutex<Backlog>,
    recent: Mutex<Recent>,
}

impl<C: Counters> Gathering<C> {
    fn change_queue<T>(self: &Arc<Self>, change: impl FnOnce(&mut Backlog) -> T) -> T {
        let mut queue = sync::lock(&self.queue);
        let changed = change(&mut queue);
        let starts = queue.claim_sender();
        drop(queue);
        if starts {
            self.runtime.spawn(Arc::clone(self).send_batch());
        }
        changed
    }

    async fn send_batch(self: Arc<Self>) {
        for _ in 0..YIELDS {
            yield_now().await;
        }
        // Other batches need not wait until this call ends.
        if let Some(batch) = self.change_queue(Backlog::take_batch) {
            self.make_call(batch).await;
        }
    }

    /// The call has its counters until they are split off, or the future is dropped.
    fn make_call(
        self: &Arc<Self>,
        (questions, counters): Batch,
    ) -> impl Future<Output = ()> + Send + use<C> {
        let (this, of, at) = (Arc::clone(self), Arc::clone(self), Arc::clone(self));
        let counters = Arc::new(Mutex::new(counters));
        let own = Arc::clone(&counters);
        let own = move || mem::take(&mut *sync::lock(&own));
        let mut busy = Some(AtEnd(move || of.change_queue(|queue| queue.end_call(&own(), vec![]))));
        let mut place = Some(AtEnd(move || at.change_queue(|queue| queue.in_flight -= 1)));
        async move {
            let is_answered = AtomicBool::new(false);
            // Other counters do not wait for those that are locked, or change each time.
            let split = |batch: &[WaitingQuestion], again| {
                is_answered.store(true, Relaxed);
                let is_free = |counter: &u64| !batch.iter().any(|of| of.counters.contains(counter));
                let free = sync::lock(&counters).extract_if(is_free).collect();
                this.change_queue(|queue| queue.end_call(&free, again));
            };
            let mut call = pin!(this.table.decide_and_write(&this.recent, questions, split));
            let mut late = Sleep::until(Instant::now() + PATIENCE);
            let called = poll_fn(|cx| {
                let called = call.as_mut().poll(cx);
                while late.as_mut().is_some_and(|late| late.poll(cx).is_ready()) {
                    place = None;
                    busy = busy.take().filter(|_| is_answered.swap(false, Relaxed));
                    late = Sleep::until(Instant::now() + PATIENCE).filter(|_| busy.is_some());
                }
                called
            });
            if let Some(took) = called.await {
                sync::lock(&this.queue).note_time(Instant::now(), took);
            }
            drop((busy, place));
        }
    }
}

/// The questions of a call, and the numbers of their counters.
type Batch = (Vec<WaitingQuestion>, HashSet<u64>);

#[derive(Default)]
struct Backlog {
    /// In order of arrival, those whose counters were free when they came.
    ready: VecDeque<WaitingQuestion>,
    /// In order of arrival, those that wait for a counter of a call, or of one before them.
    blocked: VecDeque<WaitingQuestion>,
    /// The counters of calls in flight, and of those that are blocked.
    busy: HashSet<u64>,
    awaited: HashSet<u64>,
    in_flight: usize,
    /// When the last call was sent.
    sent: Option<Instant>,
    has_sender: bool,
    last_was_shared: bool,
    /// The shortest call of this span and of the one before, and when this one began.
    least: [Option<Duration>; 2],
    span_start: Option<Instant>,
}

impl Backlog {
    /// Returns the question if it is to be sent at once, in a call of its own.
    fn push(&mut self, waiting: WaitingQuestion) -> Option<Batch> {
        let is_idle = self.in_flight == 0 && self.ready.is_empty() && !self.has_sender;
        if is_idle && !self.last_was_shared {
            self.ready.push_back(waiting);
            return self.take_batch();
        }
        if let Some(ready) = self.unless_blocked(waiting) {
            self.ready.push_back(ready);
        }
        None
    }

    fn unless_blocked(&mut self, waiting: WaitingQuestion) -> Option<WaitingQuestion> {
        let is_taken = |counter| self.busy.contains(counter) || self.awaited.contains(counter);
        if !waiting.counters.iter().any(is_taken) {
            return Some(waiting);
        }
        self.awaited.extend(&waiting.counters);
        self.blocked.push_back(waiting);
        None
    }

    fn note_time(&mut self, now: Instant, took: Duration) {
        if self.span_start.is_none_or(|start| now - start >= SPAN) {
            self.span_start = Some(now);
            self.least = [None, self.least[0]];
        }
        self.least[0] = Some(self.least[0].map_or(took, |least| least.min(took)));
    }

    /// `None` if no more calls may be in flight.
    fn take_batch(&mut self) -> Option<Batch> {
        self.has_sender = false;
        if !self.has_room() {
            return None;
        }
        let (mut questions, mut counters) = (Vec::new(), HashSet::new());
        let now = Instant::now();
        while questions.len() < MAX_QUESTIONS
            && let Some(next) = self.ready.pop_front()
        {
            if !next.is_wanted(now) {
                continue;
            }
            let Some(next) = self.unless_blocked(next) else { continue };
            let new = next.counters.iter().filter(|counter| !counters.contains(*counter)).count();
            let is_apart = |first: &WaitingQuestion| next.is_parted_from(first);
            if counters.len() + new > MAX_COUNTERS && !questions.is_empty()
                || questions.first().is_some_and(is_apart)
            {
                self.ready.push_front(next);
                break;
            }
            counters.extend(&next.counters);
            next.fate.fetch_max(SENT, Relaxed);
            questions.push(next);
        }
        if questions.is_empty() {
            return None;
        }
        self.busy.extend(&counters);
        self.sent = Some(now);
        (self.last_was_shared, self.in_flight) = (questions.len() > 1, self.in_flight + 1);
        Some((questions, counters))
    }

    /// Questions that waited for the call come after those that it has to ask again.
    fn end_call(&mut self, counters: &HashSet<u64>, again: Vec<WaitingQuestion>) {
        counters.iter().for_each(|counter| _ = self.busy.remove(counter));
        if !again.is_empty() || !self.awaited.is_disjoint(counters) {
            self.awaited.clear();
            let waiting = again.into_iter().chain(mem::take(&mut self.blocked));
            let mut ready: VecDeque<_> = waiting.filter_map(|of| self.unless_blocked(of)).collect();
            // Those that are ready came later, but for what a full call has left.
            ready.append(&mut self.ready);
            self.ready = ready;
        }
    }

    /// Near a database that many ask, one full call costs it less than two others.
    fn has_room(&self) -> bool {
        let calls = match self.least.into_iter().flatten().min() {
            None => UNMEASURED,
            Some(least) => {
                2 - usize::from(self.last_was_shared)
                    + (least.as_nanos() / INTERVAL.as_nanos()) as usize
            }
        };
        let is_still = || self.sent.is_some_and(|sent| sent.elapsed() >= STILL);
        self.in_flight < calls
            || self.in_flight < calls + MORE && (self.ready.len() >= MAX_COUNTERS || is_still())
    }

    fn claim_sender(&mut self) -> bool {
        let claimed = !self.ready.is_empty() && !self.has_sender && self.has_room();
        self.has_sender |= claimed;
        claimed
    }
}
