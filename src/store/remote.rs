//! A store elsewhere: [`Remote`].
//!
//! A `Remote` answers a charge from what this process knows of its counts. If that is not enough,
//! it asks the store; while the store fails, the policy decides:
//!
//! ```text
//! charge ──> 1 look ──> 2 join ──> 3 ask ──> 4 note ──> 5 stand in
//!            known      flights    breaker   known      fallback,
//!            facts,     of leases  deadline  outage     or an error
//!            leases                store
//! ```
//!
//! 1. *Look*: leased tokens are spent, or known counts refuse, under one lock. This ends the
//!    charge.
//! 2. *Join*: where tokens are leased and the breaker is closed, requests for a key wait for one
//!    call.
//! 3. *Ask*: a call to the store, if the breaker lets one pass. It ends by the deadline.
//! 4. *Note*: the breaker and the log hear of the answer, and a refusal is remembered, unless the
//!    key has changed meanwhile.
//! 5. *Stand in*: while the store fails, the fallback counts, or the caller gets the error.
//!
//! Peeks begin at 3. Corrections and resets are calls, too. When they begin and when they end, a
//! correction forgets the refusals of its key, and a reset forgets all facts.
//!
//! The nouns, each in the file of its name or of the one before it:
//!
//! - `Remote`: a handle, with the settings by which its limiters call the store (here).
//! - `Caller`: makes the calls of a handle, and stands in (3, 4, 5). `Policy`: the handle's
//!   settings: deadline, leases, what happens on failure. `Node`: the state that all handles of a
//!   store share in this process.
//! - `Known`: a table of facts, and marks of keys that have changed (1, 4). `Sent`: when a question
//!   was sent, and the key's mark then.
//! - `Fact`: a count as the store last showed it, until when it refuses, and the `Lease` of it:
//!   tokens, and when they end.
//! - `Flights`: requests that wait for a call (2). `Flight`: the task that makes it, for those of a
//!   key. `leasing` keeps the leased tokens, and returns them.
//! - `Idle`: when to look at unused leases. `Owner`: held by the limiters that may spend them.
//! - `Breaker`: stops calls to a store that keeps failing.
//! - `Outage`: the log of failures.
//!
//! Times are this process's. `stopwatch` computes how far the store's clock is ahead.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use super::Store;
use super::adjust::Adjust;
use super::charge::{Charge, OwnedCharge};
use super::error::{OnStoreFailure, StoreError};
use super::memory::MemoryStore;
use super::reply::Reply;
use super::scope::Scope;
use crate::decision::Decision;
use crate::key::Key;

mod breaker;
mod caller;
mod fact;
#[cfg(feature = "tokio")]
mod flight;
#[cfg(feature = "tokio")]
mod flights;
#[cfg(feature = "tokio")]
mod idle;
mod known;
#[cfg(feature = "tokio")]
mod leasing;
mod outage;
mod stopwatch;

#[cfg(feature = "redis")]
pub(super) use breaker::Breaker;
use caller::{Caller, Node, Policy};
#[cfg(feature = "tokio")]
use flight::Flight;
#[cfg(feature = "tokio")]
use idle::Owner;

/// A store that is called over a network, or that can fail, with what its limiters need for that: a
/// deadline and a breaker (S32), memory that counts while the store fails (S33), and what this
/// process knows of its counts (S34). It says once how all of its limiters talk to the store.
///
/// Clones share what is known and the memory. So a reset through one layer takes effect in all.
/// Make one `Remote` for a store, and clones of it for layers, also for those with other settings.
///
/// ```
/// use std::time::Duration;
/// use http::Request;
/// use tower_fixed_window::key::global;
/// use tower_fixed_window::store::{Adjust, Charge, Remote, Reply, Scope, Store};
/// use tower_fixed_window::testing::ask;
/// use tower_fixed_window::{Decision, FixedWindowLayer, Key, OnStoreFailure, Quota, StoreError};
///
/// struct Database;
///
/// impl Store for Database {
///     // ... three queries. This one is down.
/// #     fn charge(&self, _: Charge<'_>) -> Reply<Decision> { Reply::failed(StoreError::new("down")) }
/// #     fn adjust(&self, _: Adjust<'_>) -> Reply<()> { Reply::failed(StoreError::new("down")) }
/// #     fn reset(&self, _: &Scope, _: &Key) -> Reply<()> { Reply::failed(StoreError::new("down")) }
/// }
///
/// let store = Remote::around(Database).deadline(Duration::from_millis(50));
/// let api = Quota::per_minute(60).name("api").key(global());
///
/// let local = FixedWindowLayer::new(api.clone().store(store.clone()));
/// assert_eq!(ask(&local, Request::get("/")).status(), 200);
/// assert_eq!(store.fallback().len(), 1);
///
/// let strict = FixedWindowLayer::new(api.store(store.on_failure(OnStoreFailure::Deny)));
/// assert_eq!(ask(&strict, Request::get("/")).status(), 503);
/// ```
pub struct Remote {
    caller: Arc<Caller>,
    /// Leased tokens may be spent as long as an owner exists.
    #[cfg(feature = "tokio")]
    owner: Arc<Owner>,
}

impl Remote {
    /// Returns a number that handles share if, and only if, these have the same counts.
    pub(crate) fn address(&self) -> usize {
        Arc::as_ptr(&self.caller.node).addr()
    }

    /// Wraps a store, with a deadline of 250 ms and a fallback of a million entries.
    pub fn around(store: impl Store) -> Self {
        let policy = Policy {
            deadline: Some(Duration::from_millis(250)),
            ends_itself: false,
            remembers: true,
            revalidates: false,
            max_lease: 0,
            on_failure: OnStoreFailure::Local,
        };
        Self::new(Arc::new(store), Arc::new(Node::new(Arc::default())), policy)
    }

    fn new(store: Arc<dyn Store>, node: Arc<Node>, policy: Policy) -> Self {
        Self {
            #[cfg(feature = "tokio")]
            owner: node.idle.owner(),
            caller: Arc::new(Caller::new(store, node, policy)),
        }
    }

    fn with_policy(self, change: impl FnOnce(&mut Policy)) -> Self {
        let Caller { store, node, policy, .. } = &*self.caller;
        let mut policy = *policy;
        change(&mut policy);
        Self::new(Arc::clone(store), Arc::clone(node), policy)
    }

    /// Sets how long a call may take before the store is treated as failed (feature `tokio`, in a
    /// tokio runtime). [`Duration::MAX`] is no deadline: the store itself ends its replies in time.
    #[must_use]
    pub fn deadline(self, deadline: Duration) -> Self {
        let deadline = (deadline < Duration::MAX).then_some(deadline);
        self.with_policy(|policy| policy.deadline = deadline)
    }

    /// Lets this process take up to `max` tokens of a busy key from the store with one call, and
    /// spend them in memory. By default there are no leases; 0 and 1 also mean none.
    ///
    /// Never more than the limit passes, whatever happens to nodes or the store: a node takes
    /// tokens from the shared count before it spends them, and unspent tokens end with the window.
    /// The cost is that another node may hold the last tokens, so that nodes refuse slightly early.
    /// A lease is at most a 16th of the tokens left, and at most the key's heat. Heat starts at 1,
    /// doubles if a lease is spent within a hundredth of the window (at most 10 s), and halves
    /// otherwise. Tokens unused for a 16th of the window, or for 10 s if that is shorter, are
    /// returned, and all of them when the limiter that has this store is dropped, such as at a
    /// shutdown. So `n` nodes refuse at most `(n - 1) * (min(max, limit / 16) - 1)` requests too
    /// many in a window. `used` in responses includes leased tokens.
    ///
    /// Leases need a single quota of at least 32 tokens, without rollover and without a
    /// [`queue`](crate::FixedWindowLayer::queue); otherwise this has no effect. Requests of cost 1
    /// take leases; requests with a higher cost use leased tokens if they suffice. A reset by
    /// another process does not revoke leased tokens.
    ///
    /// ```no_run
    /// # #[cfg(feature = "redis")]
    /// use tower_fixed_window::{FixedWindowLayer, Quota, RedisStore};
    ///
    /// # #[cfg(not(feature = "redis"))] fn main() {}
    /// # #[cfg(feature = "redis")]
    /// # fn main() -> Result<(), tower_fixed_window::StoreError> {
    /// let store = RedisStore::new("redis://127.0.0.1/")?.leases(100);
    /// let api = FixedWindowLayer::new(Quota::per_minute(60_000).name("api").store(store));
    /// # let _ = api; Ok(()) }
    /// ```
    #[cfg(feature = "tokio")]
    #[must_use]
    pub fn leases(self, max: u64) -> Self {
        self.with_policy(|policy| policy.max_lease = max)
    }

    /// Makes [resets](crate::Limiter::reset) by another process effective within a second.
    ///
    /// A node remembers a refusal until its window ends, so that refused clients cause no calls.
    /// Resets and refunds of this process, and raised limits, take effect at once; a reset by
    /// another process takes effect when the refusal ends. With this option, the node asks the
    /// store again after a second, for all limiters of the names that are charged through it. It
    /// does so anyway if charges may be refunded: those of limiters that hand out receipts, of
    /// [settled](crate::Limit::settled) limits, and of layers with
    /// [`count_if`](crate::FixedWindowLayer::count_if),
    /// [`refund_dropped`](crate::FixedWindowLayer::refund_dropped) or a `queue`.
    ///
    /// ```no_run
    /// # #[cfg(feature = "redis")]
    /// use tower_fixed_window::{FixedWindowLayer, Quota, RedisStore};
    ///
    /// # #[cfg(not(feature = "redis"))] fn main() {}
    /// # #[cfg(feature = "redis")]
    /// # fn main() -> Result<(), tower_fixed_window::StoreError> {
    /// let store = RedisStore::new("redis://127.0.0.1/")?.revalidate_refusals();
    /// let login = FixedWindowLayer::new(Quota::per_hour(5).name("login").store(store));
    /// # let _ = login; Ok(()) }
    /// ```
    #[must_use]
    pub fn revalidate_refusals(self) -> Self {
        self.with_policy(|policy| policy.revalidates = true)
    }

    /// Sets what happens to requests while the store fails. By default, this process enforces the
    /// same quotas in its memory (at most one further limit passes for each process). With
    /// [`Allow`](OnStoreFailure::Allow) and [`Deny`](OnStoreFailure::Deny), a
    /// [`Limiter`](crate::Limiter) returns the error.
    #[must_use]
    pub fn on_failure(self, policy: OnStoreFailure) -> Self {
        self.with_policy(|this| this.on_failure = policy)
    }

    /// Calls the store for each request: no refusal is remembered, and no tokens are leased. For
    /// stores whose clock differs from this process's, such as a
    /// [`ManualClock`](crate::ManualClock) in tests.
    #[must_use]
    pub fn remember_nothing(self) -> Self {
        self.with_policy(|policy| policy.remembers = false)
    }

    /// Returns the memory that counts while the store fails.
    pub fn fallback(&self) -> &MemoryStore {
        &self.caller.node.fallback
    }
}

/// For a store that ends its calls itself, and reports them to a breaker.
#[cfg(feature = "redis")]
impl Remote {
    pub(super) fn reporting(store: impl Store, breaker: Arc<Breaker>) -> Self {
        let this = Self::around(store);
        let policy = Policy { ends_itself: true, ..this.caller.policy };
        Self::new(Arc::clone(&this.caller.store), Arc::new(Node::new(breaker)), policy)
    }

    /// Returns a handle of the same counts, which calls them by another store.
    pub(super) fn with_store(self, store: impl Store) -> Self {
        let Caller { node, policy, .. } = &*self.caller;
        Self::new(Arc::new(store), Arc::clone(node), *policy)
    }

    /// Returns a handle of other counts, under the same breaker.
    pub(super) fn with_other_counts(self, store: impl Store) -> Self {
        let Caller { node, policy, .. } = &*self.caller;
        Self::new(Arc::new(store), Arc::new(Node::new(Arc::clone(&node.breaker))), *policy)
    }
}

impl Store for Remote {
    fn charge(&self, charge: Charge<'_>) -> Reply<Decision> {
        let sent = match self.caller.look_up(&charge) {
            Ok(decision) => return Reply::now(decision),
            Err(sent) => sent,
        };
        let (caller, charge) = (Arc::clone(&self.caller), charge.to_owned());
        #[cfg(feature = "tokio")]
        let owner = Arc::clone(&self.owner);
        Reply::later(async move {
            let charge = charge.as_charge();
            #[cfg(feature = "tokio")]
            let joined = Flight::join(&caller, &owner, &charge).await;
            #[cfg(not(feature = "tokio"))]
            let joined = None;
            let answer = match joined {
                Some(answer) => answer,
                None => caller.ask_store(charge, sent).await,
            };
            match answer {
                Ok(decision) => Ok(decision),
                Err(error) => {
                    let count = |memory: &MemoryStore| Some(memory.charge(charge));
                    caller.stand_in(&[charge], error, count).await
                }
            }
        })
    }

    fn charge_all(&self, charges: &[Charge<'_>]) -> Option<Reply<Decision>> {
        // First, since a refusal that is known needs no store that can do this.
        let sent = match self.caller.look_up_all(charges) {
            Ok(refusal) => return Some(Reply::now(refusal)),
            Err(sent) => sent,
        };
        // The reply sends nothing before it is polled.
        let reply = self.caller.store.charge_all(charges)?;
        let charges: Vec<_> = charges.iter().map(Charge::to_owned).collect();
        let caller = Arc::clone(&self.caller);
        Some(Reply::later(async move {
            let charges: Vec<_> = charges.iter().map(OwnedCharge::as_charge).collect();
            match caller.ask_store_for_all(&charges, sent, reply).await {
                Err(error) if !error.is_apart() => {
                    caller.stand_in(&charges, error, |memory| memory.charge_all(&charges)).await
                }
                answer => answer,
            }
        }))
    }

    fn adjust(&self, adjust: Adjust<'_>) -> Reply<()> {
        let node = &self.caller.node;
        if adjust.is_local() {
            // The tokens return to the memory that granted them, never to the store: also by a
            // handle with another policy.
            return node.fallback.adjust(adjust);
        }
        if adjust.is_refund() {
            // If tokens are returned here, other nodes may return some, too.
            node.known.expect_returns(adjust.account().scope());
        }
        // A correction that fails is dropped: what was taken stays counted (S14).
        self.caller.correct_counts(adjust)
    }

    fn reset(&self, scope: &Scope, key: &Key) -> Reply<()> {
        // Even if this handle does not count in memory, other handles of the scope may.
        let local = self.fallback().reset(scope, key).into_now();
        let store = self.caller.reset_key(scope, key);
        match local {
            // The key is reset only if both have reset it.
            Ok(Err(error)) => Reply::later(async { store.await.and(Err(error)) }),
            _ => store,
        }
    }

    fn is_shared(&self) -> bool {
        self.caller.store.is_shared()
    }

    fn answers_within(&self) -> Option<Duration> {
        Some(self.caller.policy.deadline.unwrap_or(Duration::MAX))
    }

    fn now_ms(&self) -> u64 {
        self.caller.store.now_ms()
    }

    fn stand_in(&self, charge: Charge<'_>, error: StoreError) -> Reply<Decision> {
        self.caller.stand_in(&[charge], error, |memory| Some(memory.charge(charge)))
    }
}

/// Tokens leased through a clone are returned when the clone is dropped.
impl Clone for Remote {
    fn clone(&self) -> Self {
        let Caller { store, node, policy, .. } = &*self.caller;
        Self::new(Arc::clone(store), Arc::clone(node), *policy)
    }
}

impl fmt::Debug for Remote {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Remote").field("fallback", self.fallback()).finish_non_exhaustive()
    }
}
