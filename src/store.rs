//! Where counters live: the [`Store`] contract, and the stores that come with the crate.

use std::error::Error;
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use crate::decision::{Ask, Decision};
use crate::key::Key;
use crate::observe::{Meters, Observed};
use crate::quota::{Anchor, MAX_TOKENS, Quota, Quotas, fmix64};
use crate::window::{self, State, Window};

mod front;
mod guard;
mod memory;
#[cfg(feature = "redis")]
mod redis;

use front::Front;
pub(crate) use front::{Fronted, How};
pub(crate) use guard::Guard;
pub use guard::OnStoreFailure;
#[doc(hidden)]
pub use guard::Watch;
pub use memory::MemoryStore;
#[cfg(feature = "redis")]
#[cfg_attr(docsrs, doc(cfg(feature = "redis")))]
pub use redis::RedisStore;

/// An asynchronous backend of counters.
///
/// # The contract
///
/// A store keeps a [`State`] for each (scope, quota, key). It charges, adjusts and peeks at an
/// [`Account`], which names the three, and resets a key of a scope. The arithmetic is not the store's:
/// it loads the states, asks [`Charge::decide`] (or [`Adjust::apply`]) what they mean now, and writes
/// what these return. What is left to the store:
///
/// 1. **One step.** Load, decide and write are atomic over *all* quotas of the account: no other
///    call for the same key comes in between, on this node or another.
/// 2. **One clock.** The store's own time is read once per call; nodes that share counters share
///    that clock. It may step back.
/// 3. **Identity.** A counter is found by the scope's name, the key's bytes, and the quota's window
///    and anchor ([`Quota::counter`]), never by its limit: limits change while counters run.
/// 4. **Life.** A state may be forgotten from [`State::until`] on, not earlier.
/// 5. **Reset.** It forgets a key of a scope under every quota that the key was charged under, not only
///    those that somebody names: plans differ per request, and limits change. It ends in an error
///    where that is not possible.
/// 6. **No replay.** A charge whose fate is unknown is not sent again.
/// 7. **An answer.** Every [`Reply`] ends, in an answer or an error, within a time that the store
///    documents. Dropping a reply before it is done may or may not charge, but one that was never
///    polled must not have: whoever drops it takes it that nothing was sent.
///
/// The conformance suite (feature `testing`, `tower_fixed_window::testing`) checks a store against
/// all but the last two.
///
/// ```
/// use std::collections::HashMap;
/// use std::sync::Mutex;
/// use tower_fixed_window::store::{Account, Adjust, Charge, Remote, Reply, Scope, Store};
/// use tower_fixed_window::window::State;
/// use tower_fixed_window::{Decision, Key, Limiter, Quota};
///
/// /// The simplest store there is: it counts exactly, and never forgets.
/// #[derive(Default)]
/// struct Simple(Mutex<HashMap<(String, Key), HashMap<String, State>>>);
///
/// fn id(scope: &Scope, key: &Key) -> (String, Key) {
///     (scope.name().to_owned(), key.clone())
/// }
///
/// fn now() -> u64 { 1_700_000_040_000 }
///
/// impl Store for Simple {
///     fn charge(&self, charge: Charge<'_>) -> Reply<Decision> {
///         let mut map = self.0.lock().unwrap();
///         let account = charge.account();
///         let states = map.entry(id(account.scope(), account.key())).or_default();
///         let load = |quota: &Quota| states.get(&quota.counter().to_string()).copied();
///         let (decision, writes) = charge.decide(now(), load);
///         for (quota, state) in account.quotas().iter().zip(writes.into_iter().flatten()) {
///             states.insert(quota.counter().to_string(), state);
///         }
///         Reply::now(decision)
///     }
///
///     fn adjust(&self, adjust: Adjust<'_>) -> Reply<()> {
///         let mut map = self.0.lock().unwrap();
///         let account = adjust.account();
///         let states = map.entry(id(account.scope(), account.key())).or_default();
///         let writes = adjust.apply(now(), |quota| states.get(&quota.counter().to_string()).copied());
///         for (quota, state) in account.quotas().iter().zip(writes) {
///             state.map(|state| states.insert(quota.counter().to_string(), state));
///         }
///         Reply::now(())
///     }
///
///     fn reset(&self, scope: &Scope, key: &Key) -> Reply<()> {
///         self.0.lock().unwrap().remove(&id(scope, key));
///         Reply::now(())
///     }
///
///     fn is_shared(&self) -> bool { false }
///
///     fn remote(&self) -> Option<&Remote> { None }
/// }
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), tower_fixed_window::StoreError> {
/// let limiter = Limiter::new(Quota::per_minute(1)).store(Simple::default());
/// assert!(limiter.check("alice").await?.allowed());
/// assert!(!limiter.check("alice").await?.allowed());
/// # Ok(()) }
/// ```
pub trait Store: Send + Sync + 'static {
    /// Takes tokens from all quotas of an account, or from none. A charge that
    /// [is a peek](Charge::is_peek) only looks; [`Charge::decide`] sees to that.
    fn charge(&self, charge: Charge<'_>) -> Reply<Decision>;

    /// Returns tokens, or takes them without asking.
    fn adjust(&self, adjust: Adjust<'_>) -> Reply<()>;

    /// Forgets a key of a scope, whatever quotas it was charged under, and nothing of other keys or
    /// scopes. An error where some of its counts can't be found or are not its own.
    fn reset(&self, scope: &Scope, key: &Key) -> Reply<()>;

    /// Whether counters are found by their scope's name alone, from other processes or after a
    /// restart. Limiters on such a store must have a name.
    fn is_shared(&self) -> bool {
        true
    }

    /// What limiters need for a store that is asked over a network, or that may fail: a deadline, and
    /// what this process has in memory of it. Made once, with the store, and shared by its clones.
    ///
    /// `None`: the store is in this process, has its answers at once and doesn't fail.
    fn remote(&self) -> Option<&Remote>;

    /// The same store for one limiter, whose breaker it tells itself what became of its calls, also
    /// of those that nobody waits for any more. `None`: the limiter tells it what it sees.
    #[doc(hidden)]
    fn watched(&self, _: &Watch) -> Option<Arc<dyn Store>> {
        None
    }

    /// What fails together with this key's counters: a shard of a cluster, by any number. A store that
    /// fails as a whole has the same number for all.
    fn fault_domain(&self, scope: &Scope, key: &Key) -> u64 {
        let _ = (scope, key);
        0
    }
}

macro_rules! pointer {
    ($pointer:ident) => {
        impl<S: Store + ?Sized> Store for $pointer<S> {
            fn charge(&self, charge: Charge<'_>) -> Reply<Decision> {
                (**self).charge(charge)
            }

            fn adjust(&self, adjust: Adjust<'_>) -> Reply<()> {
                (**self).adjust(adjust)
            }

            fn reset(&self, scope: &Scope, key: &Key) -> Reply<()> {
                (**self).reset(scope, key)
            }

            fn is_shared(&self) -> bool {
                (**self).is_shared()
            }

            fn remote(&self) -> Option<&Remote> {
                (**self).remote()
            }

            fn watched(&self, watch: &Watch) -> Option<Arc<dyn Store>> {
                (**self).watched(watch)
            }

            fn fault_domain(&self, scope: &Scope, key: &Key) -> u64 {
                (**self).fault_domain(scope, key)
            }
        }
    };
}

pointer!(Arc);
pointer!(Box);

/// What is remote about a [`Store`]: its deadline, the memory that counts while it fails (S33), and
/// what this process remembers of its answers (S34).
///
/// A store makes one when it is made itself and keeps it in a field. Clones are the same one, so that
/// layers which share counters in the store share them here, too, and a reset through any of them is
/// seen by all.
///
/// ```
/// use std::time::Duration;
/// use tower_fixed_window::store::{Adjust, Charge, Remote, Reply, Scope, Store};
/// use tower_fixed_window::{Decision, Key, StoreError};
///
/// #[derive(Clone)]
/// struct Database { remote: Remote }
///
/// impl Database {
///     fn new() -> Self {
///         Self { remote: Remote::new().deadline(Duration::from_millis(50)) }
///     }
/// }
///
/// impl Store for Database {
///     // ... three queries
/// #     fn charge(&self, _: Charge<'_>) -> Reply<Decision> { Reply::failed(StoreError::new("down")) }
/// #     fn adjust(&self, _: Adjust<'_>) -> Reply<()> { Reply::failed(StoreError::new("down")) }
/// #     fn reset(&self, _: &Scope, _: &Key) -> Reply<()> { Reply::failed(StoreError::new("down")) }
///
///     fn remote(&self) -> Option<&Remote> { Some(&self.remote) }
/// }
///
/// assert_eq!(Database::new().remote().unwrap().fallback().len(), 0);
/// ```
#[derive(Clone, Debug)]
pub struct Remote {
    deadline: Option<Duration>,
    /// The one that the store keeps by itself, if that is known.
    kept_deadline: Option<Duration>,
    fallback: MemoryStore,
    front: Option<Front>,
}

impl Remote {
    /// A deadline of 250 ms, a fallback of a million entries, and nothing remembered yet.
    pub fn new() -> Self {
        Self {
            deadline: Some(Duration::from_millis(250)),
            kept_deadline: None,
            fallback: MemoryStore::new(),
            front: Some(Front::new()),
        }
    }

    /// How long a limiter waits for an answer that is not there at once, before it acts as if the
    /// store had failed (feature `tokio`, in a runtime of tokio's).
    #[must_use]
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.deadline = Some(deadline);
        self
    }

    /// The store ends its replies in time by itself.
    #[must_use]
    pub fn without_deadline(mut self) -> Self {
        self.deadline = None;
        self
    }

    /// The store ends its replies by this deadline by itself.
    #[cfg(feature = "redis")]
    pub(crate) fn keeping_deadline(mut self, deadline: Duration) -> Self {
        (self.deadline, self.kept_deadline) = (None, Some(deadline));
        self
    }

    /// Asks the store each time: no refusal is remembered, and no tokens are
    /// [leased](crate::FixedWindowLayer::leases). For a store whose clock doesn't run as this process's
    /// does: a [`ManualClock`](crate::ManualClock) in tests.
    #[must_use]
    pub fn without_front(mut self) -> Self {
        self.front = None;
        self
    }

    /// Counts in this memory while the store fails.
    #[must_use]
    pub fn fallback_to(mut self, memory: MemoryStore) -> Self {
        self.fallback = memory;
        self
    }

    /// The memory that counts while the store fails.
    pub fn fallback(&self) -> &MemoryStore {
        &self.fallback
    }

    pub(crate) fn front(&self) -> Option<&Front> {
        self.front.as_ref()
    }
}

impl Default for Remote {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for dyn Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Store")
    }
}

/// The name under which counters live; cheap to clone.
#[derive(Clone)]
pub struct Scope(Arc<Named>);

struct Named {
    name: Box<str>,
    id: u64,
    meters: Meters,
    /// Counters that stores are known to know this scope by. It saves them a look.
    marks: [AtomicU64; 8],
}

impl Scope {
    /// Counters of this name: 1 to 64 of `[a-z0-9_.-]`.
    ///
    /// # Panics
    /// If the name is not such a one.
    pub fn named(name: &str) -> Self {
        assert!(
            (1..=64).contains(&name.len())
                && name
                    .bytes()
                    .all(|b| matches!(b, b'a'..=b'z' | b'0'..=b'9' | b'_' | b'.' | b'-')),
            "{name:?} can't name a rate limit: write 1 to 64 of a-z, 0-9, '_', '.', '-', as in .name(\"login\")"
        );
        let id = window::stagger(name, b"");
        Self::new(name, id)
    }

    /// Counters that nobody else can find: a scope of its own at each call.
    pub(crate) fn unnamed() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let id = fmix64(NEXT.fetch_add(1, Ordering::Relaxed));
        Self::new("", id)
    }

    fn new(name: &str, id: u64) -> Self {
        let (meters, marks) = (Meters::default(), Default::default());
        Self(Arc::new(Named { name: name.into(), id, meters, marks }))
    }

    #[inline]
    fn cell(&self, mark: u64) -> &AtomicU64 {
        &self.0.marks[(mark.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 61) as usize]
    }

    /// Whether it has got this mark, and no other has taken its place.
    #[inline]
    pub(crate) fn is_marked(&self, mark: u64) -> bool {
        self.cell(mark).load(Ordering::Relaxed) == mark
    }

    /// `true`.
    pub(crate) fn mark(&self, mark: u64) -> bool {
        self.cell(mark).store(mark, Ordering::Relaxed);
        true
    }

    /// The name; empty if it has none.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// The scope as its operator sees it.
    #[inline]
    pub(crate) fn observe(&self) -> Observed<'_> {
        Observed::new(&self.0.name, &self.0.meters)
    }

    /// The same for equal names, other for each scope without a name.
    #[inline]
    pub(crate) fn id(&self) -> u64 {
        self.0.id
    }
}

impl fmt::Debug for Scope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Scope({:?})", self.name())
    }
}

/// Whose counters: a key, under a scope, for a set of quotas.
#[derive(Clone, Copy, Debug)]
pub struct Account<'a> {
    scope: &'a Scope,
    quotas: &'a Quotas,
    key: &'a Key,
}

impl<'a> Account<'a> {
    /// The counters of `key` under `scope` for `quotas`.
    #[inline]
    pub fn new(scope: &'a Scope, quotas: &'a Quotas, key: &'a Key) -> Self {
        Self { scope, quotas, key }
    }

    /// The name under which the counters live.
    #[inline]
    pub fn scope(&self) -> &'a Scope {
        self.scope
    }

    /// What may be spent.
    #[inline]
    pub fn quotas(&self) -> &'a Quotas {
        self.quotas
    }

    /// Who pays.
    #[inline]
    pub fn key(&self) -> &'a Key {
        self.key
    }

    /// A copy that borrows nothing, for a reply that comes later.
    pub fn to_owned(&self) -> OwnedAccount {
        OwnedAccount { scope: self.scope.clone(), quotas: *self.quotas, key: self.key.clone() }
    }

    /// Where the grid of one of the quotas is shifted to, if it is staggered.
    #[inline]
    pub(crate) fn shift(&self, quota: &Quota) -> u64 {
        match quota.anchor {
            Anchor::Staggered => window::stagger(self.scope.name(), self.key.as_bytes()),
            _ => 0,
        }
    }

    #[inline]
    pub(crate) fn window(
        &self,
        now: i64,
        quota: &'a Quota,
        load: impl FnOnce(&Quota) -> Option<State>,
    ) -> Window<'a> {
        Window::at(now, load(quota), quota, self.shift(quota))
    }
}

/// An [`Account`] that borrows nothing.
#[derive(Clone, Debug)]
pub struct OwnedAccount {
    scope: Scope,
    quotas: Quotas,
    key: Key,
}

impl OwnedAccount {
    /// The same under the limits that are in force now.
    pub(crate) fn updated(mut self, current: &Quotas) -> Self {
        self.quotas = self.quotas.updated(current);
        self
    }

    /// The account.
    pub fn as_account(&self) -> Account<'_> {
        Account::new(&self.scope, &self.quotas, &self.key)
    }
}

/// A question for tokens from all quotas of an account.
#[derive(Clone, Copy, Debug)]
pub struct Charge<'a> {
    account: Account<'a>,
    ask: Ask,
}

impl<'a> Charge<'a> {
    /// Asks for `cost` tokens.
    #[inline]
    pub fn new(account: Account<'a>, cost: u64) -> Self {
        Self { account, ask: Ask { cost, reserve: false, up_to: false, peek: false } }
    }

    /// May take from windows to come, as far as the quotas allow.
    #[must_use]
    pub fn reserving(mut self) -> Self {
        self.ask.reserve = true;
        self
    }

    /// Takes what is there, at least one token, where it is less than the cost.
    #[must_use]
    pub fn up_to(mut self) -> Self {
        self.ask.up_to = true;
        self
    }

    /// Takes nothing, only looks.
    #[must_use]
    pub fn peeking(mut self) -> Self {
        self.ask.peek = true;
        self
    }

    /// Whose counters.
    #[inline]
    pub fn account(&self) -> Account<'a> {
        self.account
    }

    /// The tokens asked for.
    pub fn cost(&self) -> u64 {
        self.ask.cost
    }

    /// Whether it may take from windows to come.
    pub fn may_reserve(&self) -> bool {
        self.ask.reserve
    }

    /// Whether less than the cost is acceptable.
    pub fn is_up_to(&self) -> bool {
        self.ask.up_to
    }

    /// Whether nothing is to be taken.
    pub fn is_peek(&self) -> bool {
        self.ask.peek
    }

    /// A copy that borrows nothing, for a reply that comes later.
    pub fn to_owned(&self) -> OwnedCharge {
        OwnedCharge { account: self.account.to_owned(), ask: self.ask }
    }

    /// Decides at `now` (milliseconds since the epoch, on the store's clock), given the state of
    /// each quota. The answer, and what to write for each quota in their order; `None`: nothing.
    pub fn decide(
        &self,
        now: u64,
        mut load: impl FnMut(&Quota) -> Option<State>,
    ) -> (Decision, Option<[State; Quotas::MAX]>) {
        let now = instant(now);
        self.decide_over(now, |account, _, quota| account.window(now, quota, &mut load))
    }

    /// The same over windows that the store has made. `N` is how many quotas there are at most: most
    /// charges have one, and a compiler that knows it leaves out all that is for more.
    #[inline(always)]
    pub(crate) fn decide_over<const N: usize>(
        &self,
        now: i64,
        mut window: impl FnMut(&Account<'a>, usize, &'a Quota) -> Window<'a>,
    ) -> (Decision, Option<[State; N]>) {
        let quotas = self.account.quotas.as_slice();
        let mut windows = [window(&self.account, 0, &quotas[0]); N];
        if N == 1 {
            return Decision::over(now, &windows, self.ask);
        }
        for (i, quota) in quotas.iter().enumerate().skip(1) {
            windows[i] = window(&self.account, i, quota);
        }
        Decision::over(now, &windows[..quotas.len()], self.ask)
    }
}

/// A [`Charge`] that borrows nothing.
#[derive(Clone, Debug)]
pub struct OwnedCharge {
    account: OwnedAccount,
    ask: Ask,
}

impl OwnedCharge {
    /// The charge.
    pub fn as_charge(&self) -> Charge<'_> {
        Charge { account: self.account.as_account(), ask: self.ask }
    }
}

/// A correction of what was charged before: tokens that come back, or more of them that were used.
#[derive(Clone, Copy, Debug)]
pub struct Adjust<'a> {
    account: Account<'a>,
    change: Change,
    /// What is corrected was counted by the fallback of a store that failed.
    local: bool,
}

#[derive(Clone, Copy, Debug)]
enum Change {
    Return { tokens: u64, until: [i64; Quotas::MAX] },
    Take { tokens: u64 },
}

impl<'a> Adjust<'a> {
    /// Returns `tokens` that `decision` has taken, for each quota until the window they were taken
    /// from has ended. The account's quotas are those of the decision, in the same order; their
    /// limits may have changed.
    pub fn refund(account: Account<'a>, tokens: u64, decision: &Decision) -> Self {
        let mut until = [0; Quotas::MAX];
        let last = |i, quota: &Quota| match decision.refundable_until(i) {
            Some(until) => until,
            None if quota.anchor == Anchor::FirstRequest => 0,
            None => account.window(decision.now_ms(), quota, |_| None).end(),
        };
        for (i, quota) in account.quotas.iter().enumerate().take(decision.standings().len()) {
            until[i] = last(i, quota);
        }
        Self { account, change: Change::Return { tokens, until }, local: decision.is_local() }
    }

    /// Takes `tokens` more than `decision` has, whether they are there or not: they have been used
    /// already.
    pub fn take(account: Account<'a>, tokens: u64, decision: &Decision) -> Self {
        Self { account, change: Change::Take { tokens }, local: decision.is_local() }
    }

    pub(crate) fn is_local(&self) -> bool {
        self.local
    }

    /// Whose counters.
    pub fn account(&self) -> Account<'a> {
        self.account
    }

    /// Whether tokens come back (and never open or revive a window).
    pub fn is_refund(&self) -> bool {
        matches!(self.change, Change::Return { .. })
    }

    /// A copy that borrows nothing, for a reply that comes later.
    pub fn to_owned(&self) -> OwnedAdjust {
        OwnedAdjust { account: self.account.to_owned(), change: self.change, local: self.local }
    }

    /// What to write at `now` for each quota in their order, given their states; `None`: nothing.
    pub fn apply(
        &self,
        now: u64,
        mut load: impl FnMut(&Quota) -> Option<State>,
    ) -> [Option<State>; Quotas::MAX] {
        let now = instant(now);
        self.apply_over(now, |account, _, quota| account.window(now, quota, &mut load))
    }

    pub(crate) fn apply_over(
        &self,
        now: i64,
        mut window: impl FnMut(&Account<'a>, usize, &'a Quota) -> Window<'a>,
    ) -> [Option<State>; Quotas::MAX] {
        let mut writes = [None; Quotas::MAX];
        for (i, quota) in self.account.quotas.iter().enumerate() {
            let window = window(&self.account, i, quota);
            writes[i] = match self.change {
                Change::Return { tokens: 0, .. } | Change::Take { tokens: 0 } => None,
                // Also where the clock has stepped back since: what has ended stays ended (S4).
                Change::Return { until, .. } if now.max(window.start()) >= until[i] => None,
                Change::Return { tokens, .. } => window.give_back(tokens),
                Change::Take { tokens } => Some(window.take(tokens)),
            };
        }
        writes
    }
}

/// An [`Adjust`] that borrows nothing.
#[derive(Clone, Debug)]
pub struct OwnedAdjust {
    account: OwnedAccount,
    change: Change,
    local: bool,
}

impl OwnedAdjust {
    /// The correction.
    pub fn as_adjust(&self) -> Adjust<'_> {
        Adjust { account: self.account.as_account(), change: self.change, local: self.local }
    }
}

/// A reading of a clock, as the arithmetic takes it.
#[inline]
pub(crate) fn instant(now: u64) -> i64 {
    // One less than the latest `until`, which is never reached.
    now.min(MAX_TOKENS - 1) as i64
}

/// What a store answers: a future that may hold its answer already, so that a store in memory costs
/// no allocation and no second poll.
///
/// ```
/// use tower_fixed_window::store::Reply;
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() {
/// assert_eq!(Reply::now(7).await.unwrap(), 7);
/// assert_eq!(Reply::later(async { Ok(7) }).await.unwrap(), 7);
/// assert!(matches!(Reply::now(7).into_now(), Ok(Ok(7))));
/// # }
/// ```
#[must_use = "a reply does nothing unless it is awaited"]
pub struct Reply<T>(Inner<T>);

enum Inner<T> {
    Now(Option<Result<T, StoreError>>),
    Later(Pin<Box<dyn Future<Output = Result<T, StoreError>> + Send>>),
}

// Nothing in it is pinned in place: the future is boxed.
impl<T> Unpin for Reply<T> {}

impl<T> Reply<T> {
    /// The answer.
    #[inline]
    pub fn now(value: T) -> Self {
        Self(Inner::Now(Some(Ok(value))))
    }

    /// The store has failed.
    pub fn failed(error: StoreError) -> Self {
        Self(Inner::Now(Some(Err(error))))
    }

    /// The answer is still to come.
    pub fn later(future: impl Future<Output = Result<T, StoreError>> + Send + 'static) -> Self {
        Self(Inner::Later(Box::pin(future)))
    }

    /// The same reply with another answer.
    pub fn map<U>(self, f: impl FnOnce(T) -> U + Send + 'static) -> Reply<U>
    where
        T: Send + 'static,
    {
        match self.into_now() {
            Ok(answer) => Reply(Inner::Now(Some(answer.map(f)))),
            Err(later) => Reply::later(async { later.await.map(f) }),
        }
    }

    /// Has it done without waiting for it: a correction never delays a response (S14). Without a
    /// runtime of tokio's around, a reply that comes later may be lost.
    pub(crate) fn detach(self)
    where
        T: Send + 'static,
    {
        let Err(mut later) = self.into_now() else { return };
        #[cfg(feature = "tokio")]
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            runtime.spawn(later);
            return;
        }
        let _ = Pin::new(&mut later).poll(&mut Context::from_waker(Waker::noop()));
    }

    /// The answer if it is there, to look at.
    pub(crate) fn as_now(&self) -> Option<Result<&T, &StoreError>> {
        match &self.0 {
            Inner::Now(answer) => answer.as_ref().map(Result::as_ref),
            Inner::Later(_) => None,
        }
    }

    /// The answer if it is there, else the reply itself.
    ///
    /// # Errors
    /// The reply, if it has to be awaited.
    #[inline]
    pub fn into_now(mut self) -> Result<Result<T, StoreError>, Self> {
        match &mut self.0 {
            Inner::Now(answer) => match answer.take() {
                Some(answer) => Ok(answer),
                None => Err(self),
            },
            Inner::Later(_) => Err(self),
        }
    }
}

impl<T> From<Result<T, StoreError>> for Reply<T> {
    /// The answer, or the failure.
    fn from(answer: Result<T, StoreError>) -> Self {
        Self(Inner::Now(Some(answer)))
    }
}

impl<T> Future for Reply<T> {
    type Output = Result<T, StoreError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        match &mut self.0 {
            Inner::Now(answer) => Poll::Ready(answer.take().expect("polled after it was done")),
            Inner::Later(future) => future.as_mut().poll(cx),
        }
    }
}

impl<T> fmt::Debug for Reply<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.0 {
            Inner::Now(_) => "Reply::now(..)",
            Inner::Later(_) => "Reply::later(..)",
        })
    }
}

/// Why a store could not answer. Its text names no key and no address.
#[derive(Clone, Debug)]
pub struct StoreError {
    message: &'static str,
    /// A code of the store's or of the system's, such as `OOM`.
    code: Option<Box<str>>,
    source: Option<Arc<dyn Error + Send + Sync>>,
    fault: Fault,
}

/// What an error says of the store.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Fault {
    Store,
    /// It was not asked.
    Unsent,
    /// It is well, but for this one key.
    Key,
}

impl StoreError {
    /// A failure in a few words, without keys or addresses in them.
    pub fn new(message: &'static str) -> Self {
        Self { message, code: None, source: None, fault: Fault::Store }
    }

    /// The same, with the error behind it. It is not part of the text, since it may name an
    /// address.
    pub fn with_source(
        message: &'static str,
        source: impl Into<Box<dyn Error + Send + Sync>>,
    ) -> Self {
        Self { source: Some(Arc::from(source.into())), ..Self::new(message) }
    }

    /// The same with a code that says more, and no secret.
    #[cfg(feature = "redis")]
    pub(crate) fn with_code(self, code: &str) -> Self {
        Self { code: Some(code.into()), ..self }
    }

    /// It was never sent: that says nothing of how the store does.
    #[cfg(feature = "redis")]
    pub(crate) fn unsent(self) -> Self {
        Self { fault: Fault::Unsent, ..self }
    }

    /// Only this key can't be read.
    #[cfg(feature = "redis")]
    pub(crate) fn of_key(self) -> Self {
        Self { fault: Fault::Key, ..self }
    }

    pub(crate) fn is_unsent(&self) -> bool {
        self.fault == Fault::Unsent
    }

    pub(crate) fn is_of_key(&self) -> bool {
        self.fault == Fault::Key
    }
}

impl fmt::Display for StoreError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.message)?;
        match &self.code {
            Some(code) => write!(f, " ({code})"),
            None => Ok(()),
        }
    }
}

impl Error for StoreError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.source.as_deref().map(|source| source as _)
    }
}
