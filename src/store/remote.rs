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
//! - `Known`: refusals, and marks of keys that have changed (1, 3). `Sent`: when a question was
//!   sent, and the key's mark then.
//! - `Breaker`: stops calls to a store that keeps failing. `Outage`: the log of failures.

use std::fmt;
use std::future::{Future, poll_fn};
use std::num::NonZero;
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use super::Store;
use super::account::{Account, Scope};
use super::adjust::Adjust;
use super::charge::Charge;
use super::memory::MemoryStore;
use super::reply::{Fault, OnStoreFailure, Reply, StoreError};
use crate::decision::Decision;
use crate::key::Key;
use crate::observe::{self, Event, Timed};
use crate::sync::{AtEnd, Instant, Sleep};

mod breaker;
mod known;
mod outage;

use breaker::Breaker;
use known::{Known, MOST, Sent};
use outage::Outage;

const DEADLINE: Duration = Duration::from_millis(250);
pub(super) const LATE: &str = "the store did not answer in time";

/// A store that is called over a network, or that can fail, with what its limiters need for that: a
/// deadline, a breaker, a memory that counts while the store fails, and the refusals that this
/// process remembers ([S34]).
///
/// [S34]:
///     https://docs.rs/tower-fixed-window-conformance/latest/tower_fixed_window_conformance/rules/#s34
///
/// Clones share the breaker, the memory and the refusals, so a reset through one layer takes effect
/// in all. Make one `Remote` for a store, and clones of it for all layers, even with other
/// settings.
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
pub struct Remote {
    pub(crate) caller: Arc<Caller>,
}

impl Remote {
    /// Wraps a store, with a deadline of 250 ms and a memory for a million entries.
    ///
    /// # Panics
    /// If the store is already a `Remote`, or contains one ([`Store::remote`]): a request would be
    /// counted in two memories while the store fails.
    #[track_caller]
    pub fn around(store: impl Store) -> Self {
        assert!(
            store.remote().is_none(),
            "this store has a deadline, a breaker and a policy already: use it without Remote::around"
        );
        let caller = Caller {
            in_time: store.in_time(DEADLINE),
            store: Arc::new(store),
            node: Arc::default(),
            deadline: Some(DEADLINE),
            remember: Duration::from_secs(1),
            on_failure: OnStoreFailure::Local,
            nodes: NonZero::<u32>::MIN,
            outage: Outage::default(),
        };
        Self { caller: Arc::new(caller) }
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
        Self { caller: Arc::new(caller) }
    }

    /// Sets how long a call may take before the store counts as failed. The default is 250 ms. For
    /// your own store, this needs the feature `tokio` and a tokio runtime. With [`Duration::MAX`]
    /// there is no deadline: the store itself must end its replies in time.
    #[must_use]
    #[doc(alias = "timeout")]
    pub fn deadline(self, deadline: Duration) -> Self {
        self.with(|caller| {
            caller.deadline = (deadline < Duration::MAX).then_some(deadline);
            caller.in_time = caller.store.in_time(deadline);
        })
    }

    /// Sets how long this process remembers a refusal, which it then answers without a call: for
    /// the same or a higher cost, under the same quotas, and no longer than until the charge could
    /// pass. The default is one second, so a refused key causes at most one call per second.
    ///
    /// Resets, refunds, true costs and limits of this process take effect at once, those of another
    /// process when the refusal is forgotten. [`Duration::ZERO`] remembers nothing. The maximum is
    /// a minute.
    #[must_use]
    pub fn remember_refusals(self, duration: Duration) -> Self {
        self.with(|caller| caller.remember = duration.min(MOST))
    }

    /// Sets what happens to requests while the store fails. The default is
    /// [`Local`](OnStoreFailure::Local). With the other policies, a [`Limiter`](crate::Limiter)
    /// returns the error.
    #[must_use]
    #[doc(alias("fail_open", "fail_closed"))]
    pub fn on_failure(self, policy: OnStoreFailure) -> Self {
        self.with(|caller| caller.on_failure = policy)
    }

    /// Divides quotas among this many nodes while the store fails and each node counts in its own
    /// memory. A node enforces its share of each quota, rounded up; requests that cost more than
    /// the share are refused. By default, each node enforces the whole quota, as
    /// [`OnStoreFailure::Local`] says.
    ///
    /// # Panics
    /// If `nodes` is 0.
    #[must_use]
    #[track_caller]
    #[doc(alias("nodes", "replicas"))]
    pub fn local_share(self, nodes: u32) -> Self {
        let nodes = NonZero::new(nodes).expect("a store has a node: write .local_share(4)");
        self.with(|caller| caller.nodes = nodes)
    }

    /// Returns the memory that counts while the store fails.
    pub fn fallback(&self) -> &MemoryStore {
        &self.caller.node.fallback
    }
}

impl Remote {
    /// The same for all clones, and no other store's.
    pub(crate) fn node_name(&self) -> String {
        format!("node of {}", self.fallback().identity().unwrap_or_default())
    }

    /// Forgets the key now, and again when the call ends or is dropped: answers in between may be
    /// outdated.
    fn change(
        &self,
        scope: &Scope,
        key: &Key,
        ask: impl FnOnce(&dyn Store) -> Reply<()> + Send + 'static,
    ) -> Reply<()> {
        let (caller, id) = (Arc::clone(&self.caller), (scope.clone(), key.clone()));
        let (node, (scope, key)) = (Arc::clone(&caller.node), id.clone());
        let forget = move || node.known.forget(&scope, &key);
        forget();
        let forget = AtEnd(forget);
        Reply::later(async move {
            let _forget = forget;
            caller.call_store(&id.0, &id.1, ask).await
        })
    }
}

impl Store for Remote {
    fn charge(&self, charge: Charge<'_>) -> Reply<Decision> {
        let sent = match self.caller.look_up(&charge) {
            Ok(refusal) => return Reply::now(refusal),
            Err(sent) => sent,
        };
        let (caller, charge) = (Arc::clone(&self.caller), charge.to_owned());
        Reply::later(async move {
            let charge = charge.as_charge();
            let Account { scope, key, .. } = charge.account();
            let decision = match caller.call_store(scope, key, |store| store.charge(charge)).await {
                // A single line can't lie apart.
                Err(error) if error.fault != Fault::Apart || charge.len() == 1 => {
                    return caller.stand_in(charge, error);
                }
                answer => answer?,
            };
            for (place, (line, sent)) in charge.each().zip(sent).enumerate() {
                caller.node.known.note(place, &line, &decision, sent);
            }
            Ok(decision)
        })
    }

    fn charges_together(&self) -> bool {
        self.caller.store.charges_together()
    }

    fn adjust(&self, adjust: Adjust<'_>) -> Reply<()> {
        if let Some(local) = adjust.of_local() {
            // To the memory that granted the tokens, never to the store: also by a handle of
            // another policy.
            return self.fallback().adjust(local.as_adjust());
        }
        let Account { scope, key, .. } = adjust.account;
        let adjust = adjust.to_owned();
        // A correction that fails is dropped: what was taken stays counted (S14).
        self.change(scope, key, move |store| store.adjust(adjust.as_adjust()))
    }

    fn reset(&self, scope: &Scope, key: &Key) -> Reply<()> {
        // Even if this handle does not count in memory, other handles of the scope may.
        let local = self.fallback().reset(scope, key).into_now().unwrap_or(Ok(()));
        let id = (scope.clone(), key.clone());
        let reset = self.change(scope, key, move |store| store.reset(&id.0, &id.1));
        Reply::later(async move { reset.await.and(local) })
    }

    fn is_shared(&self) -> bool {
        self.caller.store.is_shared()
    }

    fn remote(&self) -> Option<Remote> {
        Some(Remote { caller: Arc::clone(&self.caller) })
    }

    fn identity(&self) -> Option<String> {
        Some(self.caller.store.identity().unwrap_or_else(|| self.node_name()))
    }

    fn now_ms(&self) -> u64 {
        self.caller.store.now_ms()
    }
}

impl Clone for Remote {
    fn clone(&self) -> Self {
        Self { caller: Arc::clone(&self.caller) }.with(|_| {})
    }
}

impl fmt::Debug for Remote {
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
    store: Arc<dyn Store>,
    /// If the store keeps deadlines itself: the one that ends its calls by `deadline`.
    in_time: Option<Arc<dyn Store>>,
    node: Arc<Node>,
    pub(super) deadline: Option<Duration>,
    remember: Duration,
    on_failure: OnStoreFailure,
    /// The nodes that share the quotas while the store fails.
    nodes: NonZero<u32>,
    outage: Outage,
}

impl Caller {
    fn policy(&self) -> Event {
        match self.on_failure {
            OnStoreFailure::Local => Event::CountedLocally,
            OnStoreFailure::Allow => Event::Allowed,
            OnStoreFailure::Deny => Event::Denied,
        }
    }

    /// Returns the refusal by those lines that known facts refuse, else what to note the answer
    /// with.
    pub(super) fn look_up(&self, charge: &Charge<'_>) -> Result<Decision, Vec<Sent>> {
        if charge.is_peek() || self.remember.is_zero() {
            return Err(Vec::new());
        }
        let mut all_sent = Vec::with_capacity(charge.len());
        let look = |place| match self.node.known.look(&charge.line(place), self.remember) {
            Ok(refusal) => Some(refusal),
            Err(sent) => {
                all_sent.push(sent);
                None
            }
        };
        Decision::of_lines(charge.len(), look).ok_or(all_sent)
    }

    pub(super) fn stand_in(
        &self,
        charge: Charge<'_>,
        error: StoreError,
    ) -> Result<Decision, StoreError> {
        if !charge.is_peek() {
            let scopes = charge.lines().map(|(account, _)| account.scope);
            scopes.for_each(|scope| scope.observe().event(self.policy(), 1));
            self.outage.count_answers_without(1);
        }
        match self.on_failure {
            OnStoreFailure::Local => {
                let share = charge.to_owned().share(self.nodes.get().into());
                // A memory answers at once.
                let decided = self.node.fallback.charge(share.as_charge()).into_now();
                Ok(decided.unwrap_or(Err(error))?.into_local(self.nodes))
            }
            policy => Err(error.under(policy)),
        }
    }

    /// Takes a count of [`stand_in`](Self::stand_in) back.
    pub(super) fn uncount_answer(&self) {
        self.outage.count_answers_without(-1);
    }

    async fn call_store<T>(
        &self,
        scope: &Scope,
        key: &Key,
        ask: impl FnOnce(&dyn Store) -> Reply<T>,
    ) -> Result<T, StoreError> {
        let (store, breaker) = (self.in_time.as_ref().unwrap_or(&self.store), &self.node.breaker);
        let domain = store.fault_domain(scope, key);
        let cut_off = store.is_cut_off(scope, key);
        let Some(in_flight) = breaker.begin_call(domain, self.deadline, cut_off) else {
            let open = StoreError::new("the store keeps failing: the circuit breaker is open");
            if self.outage.begin(domain, &open) {
                self.log_failure(scope, key, &open);
            }
            return Err(open);
        };
        let since = Instant::now();
        let answer = {
            let _under_way = observe::call_under_way();
            let deadline = self.deadline.filter(|_| self.in_time.is_none());
            let ends = deadline.and_then(|deadline| since.checked_add(deadline));
            with_deadline(ends, ask(&**store), || StoreError::new(LATE)).await
        };
        let took = since.elapsed();
        let fault = answer.as_ref().err().map(|error| error.fault);
        if fault != Some(Fault::Unsent) {
            scope.observe().took(Timed::Store, took);
        }
        if let Some(Fault::Store | Fault::Key) = fault {
            scope.observe().event(Event::StoreFailure, 1);
        }
        match fault {
            Some(Fault::Unsent) => breaker.note_unsent(domain),
            Some(Fault::Store) => {
                // A missed deadline says nothing about those who wait longer.
                let missed = self.deadline.filter(|deadline| took >= *deadline);
                let began = self.in_time.as_ref().map(|_| since);
                breaker.note_failure(domain, missed.unwrap_or(Duration::MAX), began);
            }
            _ => breaker.note_answer(domain),
        }
        drop(in_flight);
        match &answer {
            Err(error) if error.fault == Fault::Key => observe::mistake(&format_args!(
                "{error}: requests for this key are answered without the store. Either something else \
                 writes to the store's keys, or its user may not touch some of them"
            )),
            Err(error) if error.fault != Fault::Apart => {
                if self.outage.note_failure(domain, error) {
                    self.log_failure(scope, key, error);
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

    fn log_failure(&self, scope: &Scope, key: &Key, error: &StoreError) {
        let server = self.store.server(scope, key);
        scope.observe().store_fails(self.policy(), server.as_deref(), error);
    }
}

pub(super) async fn with_deadline<T>(
    ends: Option<Instant>,
    reply: impl Future<Output = Result<T, StoreError>>,
    late: impl FnOnce() -> StoreError,
) -> Result<T, StoreError> {
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
    let answer = poll_fn(|cx| match reply.as_mut().poll(cx) {
        Poll::Pending => sleep.poll(cx).map(|()| None),
        answer => answer.map(Some),
    });
    answer.await.unwrap_or_else(|| Err(late()))
}
