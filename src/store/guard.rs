//! What stands between a limiter and a store that may fail: a deadline, a breaker, and what answers
//! in its place (S32, S33).

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::{Account, Adjust, Charge, Inner, MemoryStore, Remote, Reply, Scope, Store, StoreError};
use crate::decision::Decision;
use crate::key::Key;
use crate::observe::{self, UnderWay};
use crate::timer::Instant;

/// So many failures in a row, and the store is left alone ...
const FAILURES: u32 = 5;
/// ... for so long, after which a single call may try it.
const PAUSE: Duration = Duration::from_millis(250);
/// It is back when it has answered for so long, without a failure in between.
const SETTLED: Duration = Duration::from_secs(1);

/// Causes of one outage that are told.
const CAUSES: usize = 8;
const UNREADABLE: &str = "a key of the rate limiter holds what is none of its counts, and requests \
    for it are answered without the store: something else writes to keys that begin with tfw1:, or \
    with the store's prefix";

/// What a layer does with a request when its store can't say whether it may pass.
///
/// Never a 429: that would blame the client.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub enum OnStoreFailure {
    /// Enforce the same quotas in this process's memory until the store is back: at most one
    /// further limit passes on each node.
    #[default]
    Local,
    /// Let it pass, without rate-limit fields: the standing is unknown.
    Allow,
    /// Refuse with 503 and `retry-after`.
    Deny,
}

/// A store whose answers come in time or not at all, and that is not asked while it fails.
#[derive(Clone)]
pub(crate) struct Guard {
    store: Arc<dyn Store>,
    remote: Remote,
    breaker: Arc<Breaker>,
    outage: Arc<Outage>,
    /// What answers in its place.
    local: Option<MemoryStore>,
}

impl Guard {
    pub(crate) fn new(store: impl Store, remote: Remote) -> Self {
        let breaker = Arc::<Breaker>::default();
        let watched = store.watched(&Watch(Arc::clone(&breaker)));
        breaker.watched.store(watched.is_some(), Ordering::Relaxed);
        Self {
            store: watched.unwrap_or_else(|| Arc::new(store)),
            remote,
            breaker,
            outage: Arc::default(),
            local: None,
        }
    }

    /// The same, answering from this process's memory where the store fails.
    pub(crate) fn or_memory(&self) -> Self {
        Self { local: Some(self.remote.fallback.clone()), ..self.clone() }
    }

    /// Whether the store is left alone, but for a call that tries it now and then.
    #[cfg(feature = "tokio")]
    pub(super) fn leaves_alone(&self, account: &Account<'_>) -> bool {
        self.breaker.is_open(|| self.store.fault_domain(account.scope(), account.key()))
    }

    /// How long a call may take, whoever keeps the deadline.
    pub(super) fn longest(&self) -> Option<Duration> {
        self.remote.deadline.or(self.remote.kept_deadline)
    }

    /// Asks the store itself: nothing answers in its place.
    pub(super) fn ask<T: Send + 'static>(
        &self,
        scope: &Scope,
        key: &Key,
        ask: impl FnOnce(&dyn Store) -> Reply<T>,
    ) -> Reply<T> {
        let deadline = self.remote.deadline;
        let longest = || self.longest().unwrap_or(PAUSE);
        let domain = self.store.fault_domain(scope, key);
        let Some(call) = self.breaker.begin(domain, longest) else {
            return Reply::failed(StoreError::new("the store keeps failing and is left alone"));
        };
        let timing = scope.observe().store_is_called();
        match ask(&*self.store).into_now() {
            Ok(answer) => {
                call.end(&answer);
                self.outage.note(scope, &answer);
                Reply(Inner::Now(Some(answer)))
            }
            Err(later) => {
                let (outage, scope) = (Arc::clone(&self.outage), scope.clone());
                let under_way = UnderWay::new();
                Reply::later(async move {
                    let answer = within(deadline, later).await;
                    drop(under_way);
                    scope.observe().store_was_called(timing);
                    call.end(&answer);
                    outage.note(&scope, &answer);
                    answer
                })
            }
        }
    }

    /// Asks the store itself for a charge.
    pub(super) fn charge_only(&self, charge: Charge<'_>) -> Reply<Decision> {
        let Account { scope, key, .. } = charge.account();
        self.ask(scope, key, |store| store.charge(charge))
    }

    /// What is answered in its place, where it has failed.
    pub(super) fn stand_in(&self, charge: Charge<'_>, error: StoreError) -> Reply<Decision> {
        if !charge.is_peek() {
            charge.account().scope().observe().without_store();
            self.outage.answer_without();
        }
        match &self.local {
            Some(local) => local.charge(charge).map(Decision::into_local),
            None => Reply::failed(error),
        }
    }
}

pub(super) async fn within<T>(
    deadline: Option<Duration>,
    reply: Reply<T>,
) -> Result<T, StoreError> {
    #[cfg(feature = "tokio")]
    if let Some(deadline) = deadline
        // Other runtimes' stores have to keep their own.
        && tokio::runtime::Handle::try_current().is_ok()
    {
        let late = StoreError::new("the store did not answer in time");
        return tokio::time::timeout(deadline, reply).await.unwrap_or(Err(late));
    }
    let _ = deadline;
    reply.await
}

impl Store for Guard {
    fn charge(&self, charge: Charge<'_>) -> Reply<Decision> {
        match self.charge_only(charge).into_now() {
            Ok(Ok(decision)) => Reply::now(decision),
            Ok(Err(error)) => self.stand_in(charge, error),
            Err(later) => {
                let (guard, charge) = (self.clone(), charge.to_owned());
                Reply::later(async move {
                    match later.await {
                        Ok(decision) => Ok(decision),
                        Err(error) => guard.stand_in(charge.as_charge(), error).await,
                    }
                })
            }
        }
    }

    fn adjust(&self, adjust: Adjust<'_>) -> Reply<()> {
        match &self.local {
            // A correction that fails is dropped: what was taken stays counted (S14).
            _ if !adjust.is_local() => {
                let Account { scope, key, .. } = adjust.account();
                self.ask(scope, key, |store| store.adjust(adjust))
            }
            // Returned to where it was taken from, never to where it was not.
            Some(local) => local.adjust(adjust),
            None => Reply::now(()),
        }
    }

    fn reset(&self, scope: &Scope, key: &Key) -> Reply<()> {
        // Also where nothing answers in its place here: limiters of the same scope may differ in that.
        let local = self.remote.fallback.reset(scope, key).into_now();
        let store = self.ask(scope, key, |store| store.reset(scope, key));
        match local {
            // It is forgotten if it is in both places.
            Ok(Err(error)) => Reply::later(async { store.await.and(Err(error)) }),
            _ => store,
        }
    }

    fn is_shared(&self) -> bool {
        self.store.is_shared()
    }

    fn remote(&self) -> Option<&Remote> {
        Some(&self.remote)
    }
}

/// Counts failures in a row, of each part of the store that fails by itself.
#[derive(Default)]
struct Breaker {
    /// How many parts fail: mostly none, and then nothing is locked.
    failing: AtomicUsize,
    domains: Mutex<HashMap<u64, Failures>>,
    /// The store tells of its calls by itself.
    watched: AtomicBool,
    /// It is finding out when it answers again.
    #[cfg(feature = "redis")]
    listens: AtomicBool,
}

/// A breaker, in the hands of a store that tells it what became of its calls.
#[derive(Clone)]
pub struct Watch(#[cfg_attr(not(feature = "redis"), allow(dead_code))] Arc<Breaker>);

#[cfg(feature = "redis")]
impl Watch {
    /// Whether the store answered a call.
    pub(super) fn note(&self, domain: u64, well: bool) {
        self.0.note(domain, well);
    }

    /// Who finds out when the store answers again; one at a time.
    pub(super) fn listener(&self) -> Option<Listener> {
        let listens = self.0.listens.swap(true, Ordering::Relaxed);
        (!listens).then(|| Listener(Arc::clone(&self.0)))
    }
}

impl fmt::Debug for Watch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Watch(..)")
    }
}

#[cfg(feature = "redis")]
pub(super) struct Listener(Arc<Breaker>);

#[cfg(feature = "redis")]
impl Listener {
    /// The store has answered: that closes the breaker at once.
    pub(super) fn heard(&self, domain: u64) {
        self.0.note(domain, true);
    }
}

#[cfg(feature = "redis")]
impl Drop for Listener {
    fn drop(&mut self) {
        self.0.listens.store(false, Ordering::Relaxed);
    }
}

struct Failures {
    in_a_row: u32,
    /// When the next call may pass, once there are too many.
    next: Instant,
    /// The call that tries it, and when that one is given up.
    probe: Option<(u64, Instant)>,
    probes: u64,
}

impl Failures {
    fn are_too_many(&self) -> bool {
        self.in_a_row >= FAILURES
    }
}

impl Breaker {
    #[cfg(feature = "tokio")]
    fn is_open(&self, domain: impl FnOnce() -> u64) -> bool {
        self.failing.load(Ordering::Relaxed) > 0
            && self.domains().get(&domain()).is_some_and(Failures::are_too_many)
    }

    /// A call, if one may be made. While it is open that is one in each pause, and one at a time, however
    /// long that takes.
    fn begin(self: &Arc<Self>, domain: u64, longest: impl FnOnce() -> Duration) -> Option<Call> {
        let mut probe = None;
        if self.failing.load(Ordering::Relaxed) > 0
            && let Some(failures) = self.domains().get_mut(&domain)
            && failures.are_too_many()
        {
            let now = Instant::now();
            let is_tried = failures.probe.is_some_and(|(_, until)| now < until);
            if is_tried || now < failures.next {
                return None;
            }
            failures.probes += 1;
            failures.next = now + PAUSE;
            // What is too far away to be an instant is given up anew at each look.
            failures.probe = now.checked_add(longest()).map(|until| (failures.probes, until));
            probe = Some(failures.probes);
        }
        Some(Call { breaker: Arc::clone(self), domain, probe })
    }

    fn note(&self, domain: u64, well: bool) {
        if well && self.failing.load(Ordering::Relaxed) == 0 {
            return;
        }
        let mut domains = self.domains();
        if well {
            domains.remove(&domain);
        } else {
            let now = Instant::now();
            let failures = domains.entry(domain).or_insert(Failures {
                in_a_row: 0,
                next: now,
                probe: None,
                probes: 0,
            });
            failures.in_a_row = failures.in_a_row.saturating_add(1);
            failures.next = now + PAUSE;
        }
        self.failing.store(domains.len(), Ordering::Relaxed);
    }

    fn domains(&self) -> MutexGuard<'_, HashMap<u64, Failures>> {
        self.domains.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A call to the store. Where it tries one that failed, its place is free again with its end.
struct Call {
    breaker: Arc<Breaker>,
    domain: u64,
    probe: Option<u64>,
}

impl Call {
    fn end<T>(self, answer: &Result<T, StoreError>) {
        if self.breaker.watched.load(Ordering::Relaxed) {
            return;
        }
        match answer {
            Ok(_) => self.breaker.note(self.domain, true),
            // The store has said so.
            Err(error) if error.is_of_key() => self.breaker.note(self.domain, true),
            Err(error) if error.is_unsent() => {}
            Err(_) => self.breaker.note(self.domain, false),
        }
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        if let Some(probe) = self.probe
            && let Some(failures) = self.breaker.domains().get_mut(&self.domain)
            && failures.probe.is_some_and(|(of, _)| of == probe)
        {
            failures.probe = None;
        }
    }
}

/// A time in which the store fails: told when it begins and when it has ended, not for each request.
#[derive(Default)]
struct Outage {
    is_on: AtomicBool,
    state: Mutex<Option<Failing>>,
}

struct Failing {
    since: Instant,
    /// What was told of it.
    causes: Vec<String>,
    /// Since when it has answered without a failure.
    well_since: Option<Instant>,
    /// Requests that were answered without it.
    without: u64,
}

impl Outage {
    #[inline]
    fn note<T>(&self, scope: &Scope, answer: &Result<T, StoreError>) {
        match answer {
            Err(error) if error.is_of_key() => {
                scope.observe().store_failed();
                observe::mistake(&UNREADABLE);
            }
            Err(error) => self.failed(scope, error),
            Ok(_) if self.is_on.load(Ordering::Relaxed) => self.answered(scope),
            Ok(_) => {}
        }
    }

    #[cold]
    fn failed(&self, scope: &Scope, error: &StoreError) {
        scope.observe().store_failed();
        let cause = error.to_string();
        let mut state = self.lock();
        match &mut *state {
            Some(failing) => {
                failing.well_since = None;
                // One that comes and goes is told once.
                if failing.causes.len() == CAUSES || failing.causes.contains(&cause) {
                    return;
                }
                failing.causes.push(cause);
            }
            None => {
                let (since, causes) = (Instant::now(), vec![cause]);
                *state = Some(Failing { since, causes, well_since: None, without: 0 });
                self.is_on.store(true, Ordering::Relaxed);
            }
        }
        drop(state);
        scope.observe().store_fails(error);
    }

    #[cold]
    fn answered(&self, scope: &Scope) {
        let mut state = self.lock();
        let Some(failing) = &mut *state else { return };
        let now = Instant::now();
        let well_since = *failing.well_since.get_or_insert(now);
        if now - well_since < SETTLED {
            return;
        }
        let (lasted, without) = (well_since - failing.since, failing.without);
        *state = None;
        self.is_on.store(false, Ordering::Relaxed);
        drop(state);
        scope.observe().store_is_back(without, lasted);
    }

    fn answer_without(&self) {
        if let Some(failing) = &mut *self.lock() {
            failing.without += 1;
        }
    }

    fn lock(&self) -> MutexGuard<'_, Option<Failing>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
