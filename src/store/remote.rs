//! A store elsewhere: [`Remote`].
//!
//! A `Remote` answers a charge from what this process knows of its counts; if that is not enough,
//! it asks the store; while the store fails, the policy decides:
//!
//! ```text
//! charge ──> 1 look ──> 2 ask ────> 3 note ──> 4 stand in
//!            known      breaker     known      fallback,
//!            refusals   deadline    outage     or an error
//!                       store
//! ```
//!
//! 1. *Look*: if known counts refuse the charge, it ends here.
//! 2. *Ask*: a call to the store, if the breaker lets one pass. It ends by the deadline.
//! 3. *Note*: the breaker and the log hear of the answer, and a refusal is remembered, unless the
//!    key has changed meanwhile.
//! 4. *Stand in*: while the store fails, the fallback counts, or the caller gets the error.
//!
//! Peeks begin at 2. Corrections and resets are calls, too: each forgets what is known of its key
//! when it begins, and again when it ends. The layer answers an error by 503, or lets the request
//! pass (`middleware/request`).
//!
//! The nouns, each here or in its file:
//!
//! - `Remote`: a handle. `Caller`: its settings, its calls, and how it stands in (2, 3, 4).
//!   `Node`: what all handles of a store have in common in this process.
//! - `Known`: a table of facts, and marks of keys that have changed (1, 3). `Fact`: a count as the
//!   store last showed it, and until when it refuses. `Sent`: when a question was sent, and the
//!   key's mark then. Its times are this process's.
//! - `Breaker`: stops calls to a store that keeps failing. `Outage`: the log of failures.

use std::fmt;
use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use super::Store;
use super::account::{Account, Scope};
use super::adjust::Adjust;
use super::charge::Charge;
use super::memory::MemoryStore;
use super::reply::{OnStoreFailure, Reply, StoreError};
use crate::decision::Decision;
use crate::key::Key;
use crate::observe::{self, Meanwhile};
use crate::sync::{AtEnd, Instant, Sleep};

mod breaker;
mod known;
mod outage;

pub(super) use breaker::Breaker;
use known::{Known, Sent};
use outage::Outage;

const DEADLINE: Duration = Duration::from_millis(250);

const UNREADABLE: &str = "a key of the rate limiter holds what is none of its counts, and requests \
    for it are answered without the store: something else writes to keys that begin with tfw1:, or \
    with the store's prefix";

/// A store that is called over a network, or that can fail, with what its limiters need for that: a
/// deadline and a breaker, memory that counts while the store fails, and what this process knows of
/// its counts ([rules](crate::guide::semantics#stores)).
///
/// Clones share what is known and the memory, so a reset through one layer takes effect in all.
/// Make one `Remote` for a store, and clones of it for layers, also for those with other settings.
///
/// `S` has the settings of one kind of store, such as `RedisStore`.
///
/// ```
/// use std::time::Duration;
/// use http::Request;
/// use tower_fixed_window::store::{Adjust, Charge, Remote, Reply, Scope, Store};
/// use tower_fixed_window::testing::ask;
/// use tower_fixed_window::{Decision, FixedWindowLayer, Key, OnStoreFailure, Quota, StoreError};
///
/// struct Database;
///
/// impl Store for Database {
///     // ... three queries. This one is down.
/// #     fn charge(&self, _: Charge<'_>) -> Reply<Decision> { Reply::from(Err(StoreError::new("down"))) }
/// #     fn adjust(&self, _: Adjust<'_>) -> Reply<()> { Reply::from(Err(StoreError::new("down"))) }
/// #     fn reset(&self, _: &Scope, _: &Key) -> Reply<()> { Reply::from(Err(StoreError::new("down"))) }
/// }
///
/// let store = Remote::around(Database).deadline(Duration::from_millis(50));
/// let api = Quota::per_minute(60).name("api").key(Key::global());
///
/// let local = FixedWindowLayer::new(api.clone().store(store.clone()));
/// assert_eq!(ask(&local, Request::get("/")).status(), 200);
/// assert_eq!(store.fallback().live_entries(), 1);
///
/// let strict = FixedWindowLayer::new(api.store(store.on_failure(OnStoreFailure::Deny)));
/// assert_eq!(ask(&strict, Request::get("/")).status(), 503);
/// ```
pub struct Remote<S = ()> {
    pub(crate) caller: Arc<Caller>,
    pub(super) settings: S,
}

impl Remote {
    /// Wraps a store, with a deadline of 250 ms and a fallback of a million entries.
    pub fn around(store: impl Store) -> Self {
        Self::of_parts(Arc::new(store), Arc::default(), None, ())
    }
}

impl<S> Remote<S> {
    fn of_parts(
        store: Arc<dyn Store>,
        breaker: Arc<Breaker>,
        in_time: Option<InTime>,
        settings: S,
    ) -> Self {
        let caller = Caller {
            store,
            in_time,
            node: Arc::new(Node { breaker, ..Node::default() }),
            deadline: Some(DEADLINE),
            remember: 1_000,
            on_failure: OnStoreFailure::Local,
            outage: Outage::default(),
        };
        Self { caller: Arc::new(caller), settings }
    }

    /// Outages of the new handle are logged anew.
    fn with(self, change: impl FnOnce(&mut Caller)) -> Self {
        let mut caller = Caller {
            store: Arc::clone(&self.caller.store),
            in_time: self.caller.in_time.clone(),
            node: Arc::clone(&self.caller.node),
            outage: Outage::default(),
            ..*self.caller
        };
        change(&mut caller);
        Self { caller: Arc::new(caller), ..self }
    }

    /// Sets how long a call may take before the store is treated as failed: 250 ms by default. For
    /// a store of yours this needs the feature `tokio` and a tokio runtime, or [`Duration::MAX`],
    /// which is no deadline: the store itself ends its replies in time.
    #[must_use]
    pub fn deadline(self, deadline: Duration) -> Self {
        self.with(|caller| {
            caller.deadline = (deadline < Duration::MAX).then_some(deadline);
            if let Some(in_time) = &caller.in_time {
                caller.store = in_time(deadline);
            }
        })
    }

    /// Sets how long this process remembers a refusal, which it then answers without a call: for
    /// the same or a higher cost, under the same or a lower limit, and no longer than until the
    /// charge could pass. By default one second: a refused key causes at most one call in it.
    ///
    /// Resets, refunds, true costs and limits of this process take effect at once, those of another
    /// one when the refusal is forgotten. [`Duration::ZERO`] remembers nothing. [`Duration::MAX`]
    /// remembers until the charge could pass, also if another process resets the key: the fewest
    /// calls, for counts that are never reset, such as those of logins.
    #[must_use]
    pub fn remember_refusals(self, duration: Duration) -> Self {
        let remember = duration.as_millis().try_into().unwrap_or(i64::MAX);
        self.with(|caller| caller.remember = remember)
    }

    /// Sets what happens to requests while the store fails, as [`OnStoreFailure`] says: by default,
    /// [`Local`](OnStoreFailure::Local). With the others, a [`Limiter`](crate::Limiter) returns the
    /// error.
    #[must_use]
    pub fn on_failure(self, policy: OnStoreFailure) -> Self {
        self.with(|caller| caller.on_failure = policy)
    }

    /// Returns the memory that counts while the store fails.
    pub fn fallback(&self) -> &MemoryStore {
        &self.caller.node.fallback
    }

    /// Handles have it in common if, and only if, they have the same counts.
    pub(crate) fn address(&self) -> usize {
        Arc::as_ptr(&self.caller.node).addr()
    }
}

/// The store ends its calls by a deadline itself, and reports them to the breaker.
pub(super) type InTime = Arc<dyn Fn(Duration) -> Arc<dyn Store> + Send + Sync>;

#[cfg(feature = "redis")]
impl<S> Remote<S> {
    pub(super) fn in_time(in_time: InTime, breaker: Arc<Breaker>, settings: S) -> Self {
        let store = in_time(DEADLINE);
        Self::of_parts(store, breaker, Some(in_time), settings)
    }

    pub(super) fn with_store(self, in_time: InTime) -> Self {
        self.with(|caller| {
            caller.store = in_time(caller.deadline.unwrap_or(Duration::MAX));
            caller.in_time = Some(in_time);
        })
    }

    /// Under the same breaker.
    pub(super) fn with_other_counts(self) -> Self {
        let breaker = Arc::clone(&self.caller.node.breaker);
        self.with(|caller| caller.node = Arc::new(Node { breaker, ..Node::default() }))
    }
}

impl<S: Send + Sync + 'static> Store for Remote<S> {
    fn charge(&self, charge: Charge<'_>) -> Reply<Decision> {
        let sent = match self.caller.look_up(&charge) {
            Ok(refusal) => return Reply::now(refusal),
            Err(sent) => sent,
        };
        let (caller, charge) = (Arc::clone(&self.caller), charge.to_owned());
        Reply::later(async move {
            let charge = charge.as_charge();
            let Account { scope, key, .. } = charge.account();
            let mut decision =
                match caller.call_store(scope, key, |store| store.charge(charge)).await {
                    Err(error) if !error.is_apart() => return caller.stand_in(charge, error).await,
                    answer => answer?,
                };
            for (place, (line, sent)) in charge.each().zip(sent).enumerate() {
                let remember = caller.remember;
                caller.node.known.note(place, &line, &mut decision, sent, remember);
            }
            Ok(decision)
        })
    }

    fn charges_together(&self) -> bool {
        self.caller.store.charges_together()
    }

    fn adjust(&self, adjust: Adjust<'_>) -> Reply<()> {
        if adjust.is_local() {
            // To the memory that granted the tokens, never to the store: also by a handle of
            // another policy.
            return self.fallback().adjust(adjust);
        }
        let (account, adjust) = (adjust.account().to_owned(), adjust.to_owned());
        let (caller, node) = (Arc::clone(&self.caller), Arc::clone(&self.caller.node));
        let forget = forget_around_call(move || node.known.correct(&account.as_account()));
        // A correction that fails is dropped: what was taken stays counted (S14).
        Reply::later(async move {
            let adjust = adjust.as_adjust();
            let Account { scope, key, .. } = adjust.account();
            let answer = caller.call_store(scope, key, |store| store.adjust(adjust)).await;
            drop(forget);
            answer
        })
    }

    fn reset(&self, scope: &Scope, key: &Key) -> Reply<()> {
        // Even if this handle does not count in memory, other handles of the scope may.
        let local = self.fallback().reset(scope, key).into_now().unwrap_or(Ok(()));
        let (caller, node) = (Arc::clone(&self.caller), Arc::clone(&self.caller.node));
        let (of, id) = ((scope.clone(), key.clone()), (scope.clone(), key.clone()));
        let forget = forget_around_call(move || node.known.reset(&of.0, &of.1));
        Reply::later(async move {
            let (scope, key) = &id;
            let answer = caller.call_store(scope, key, |store| store.reset(scope, key)).await;
            drop(forget);
            answer.and(local)
        })
    }

    fn is_shared(&self) -> bool {
        self.caller.store.is_shared()
    }

    fn remote(&self) -> Option<Remote> {
        Some(Remote { caller: Arc::clone(&self.caller), settings: () })
    }

    fn now_ms(&self) -> u64 {
        self.caller.store.now_ms()
    }
}

impl<S: Clone> Clone for Remote<S> {
    fn clone(&self) -> Self {
        let Self { caller, settings } = self;
        Self { caller: Arc::clone(caller), settings: settings.clone() }.with(|_| {})
    }
}

impl<S> fmt::Debug for Remote<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (deadline, fallback) = (self.caller.deadline, self.fallback());
        f.debug_struct("Remote")
            .field("deadline", &deadline)
            .field("fallback", fallback)
            .finish_non_exhaustive()
    }
}

#[derive(Default)]
struct Node {
    known: Known,
    breaker: Arc<Breaker>,
    fallback: MemoryStore,
}

pub(crate) struct Caller {
    pub(super) store: Arc<dyn Store>,
    /// If the store keeps deadlines itself.
    in_time: Option<InTime>,
    node: Arc<Node>,
    pub(super) deadline: Option<Duration>,
    /// In milliseconds.
    remember: i64,
    on_failure: OnStoreFailure,
    outage: Outage,
}

impl Caller {
    fn meanwhile(&self) -> Meanwhile {
        match self.on_failure {
            OnStoreFailure::Local => Meanwhile::Local,
            OnStoreFailure::Allow => Meanwhile::Allow,
            OnStoreFailure::Deny => Meanwhile::Deny,
        }
    }

    pub(super) fn known_refusal(&self, charge: Charge<'_>) -> Option<Decision> {
        self.look_up(&charge).ok()
    }

    /// Returns the refusal by those lines that known facts refuse, else what to note the answer
    /// with.
    fn look_up(&self, charge: &Charge<'_>) -> Result<Decision, Vec<Sent>> {
        if charge.is_peek() || self.remember == 0 {
            return Err(Vec::new());
        }
        let mut all_sent = Vec::with_capacity(charge.len());
        let look = |(place, line)| match self.node.known.look(&line, self.remember) {
            Ok(refusal) => Some((place, refusal)),
            Err(sent) => {
                all_sent.push(sent);
                None
            }
        };
        let refusals = charge.each().enumerate().filter_map(look);
        Decision::of_lines(charge.len(), refusals).ok_or(all_sent)
    }

    pub(crate) fn stand_in(&self, charge: Charge<'_>, error: StoreError) -> Reply<Decision> {
        for (account, _) in charge.lines().filter(|_| !charge.is_peek()) {
            account.scope().observe().without_store(self.meanwhile());
            self.outage.count_answer_without();
        }
        match self.on_failure {
            OnStoreFailure::Local => self.node.fallback.charge(charge).map(Decision::into_local),
            policy => Reply::from(Err(error.under(policy))),
        }
    }

    async fn call_store<T>(
        &self,
        scope: &Scope,
        key: &Key,
        ask: impl FnOnce(&dyn Store) -> Reply<T>,
    ) -> Result<T, StoreError> {
        let (deadline, ends_itself) = (self.deadline, self.in_time.is_some());
        let domain = self.store.fault_domain(scope, key);
        let in_flight = self.node.breaker.begin_call(domain, deadline)?;
        let since = std::time::Instant::now();
        let answer = {
            let _under_way = observe::call_under_way();
            with_deadline(deadline.filter(|_| !ends_itself), ask(&*self.store)).await
        };
        if !answer.as_ref().is_err_and(StoreError::is_unsent) {
            scope.observe().store_was_called(since);
        }
        if answer.as_ref().is_err_and(StoreError::is_failed_call) {
            scope.observe().store_failed();
        }
        if !ends_itself {
            self.node.breaker.report_answer(domain, None, &answer);
        }
        drop(in_flight);
        match &answer {
            Err(error) if error.is_of_key() => observe::mistake(&UNREADABLE),
            Err(error) if !error.is_apart() => {
                if self.outage.note_failure(domain, error) {
                    let server = self.store.server(scope, key);
                    scope.observe().store_fails(self.meanwhile(), server.as_deref(), error);
                }
            }
            _ => {
                if let Some((without, lasted)) = self.outage.note_success() {
                    scope.observe().store_is_back(without, lasted);
                }
            }
        }
        answer
    }
}

async fn with_deadline<T>(
    deadline: Option<Duration>,
    reply: impl Future<Output = Result<T, StoreError>>,
) -> Result<T, StoreError> {
    let ends = deadline.and_then(|deadline| Instant::now().checked_add(deadline));
    let Some(ends) = ends else { return reply.await };
    let Some(mut sleep) = Sleep::until(ends) else {
        observe::mistake(
            &"calls of a store have no deadline here, where there are no timers. Enable the \
              feature `tokio`, call `enable_time` or `enable_all` on the builder of the runtime, \
              or set `deadline(Duration::MAX)` if the store ends its calls itself",
        );
        return reply.await;
    };
    let mut reply = pin!(reply);
    poll_fn(|cx| match reply.as_mut().poll(cx) {
        Poll::Pending => {
            sleep.poll(cx).map(|()| Err(StoreError::new("the store did not answer in time")))
        }
        answer => answer,
    })
    .await
}

/// Now, and again when the guard is dropped with the reply: answers in between may be outdated.
fn forget_around_call<F: Fn()>(forget: F) -> AtEnd<F> {
    forget();
    AtEnd(forget)
}
