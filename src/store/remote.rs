//! A store elsewhere: [`Remote`].
//!
//! A `Remote` answers a charge from what this process knows of its counts. If that is not enough,
//! it asks the store; while the store fails, the policy decides:
//!
//! ```text
//! charge ──> 1 look ──> 2 ask ────> 3 note ──> 4 stand in
//!            known      breaker     known      fallback,
//!            refusals   deadline    outage     or an error
//!                       store
//! ```
//!
//! 1. *Look*: known counts refuse, under one lock. This ends the charge.
//! 2. *Ask*: a call to the store, if the breaker lets one pass. It ends by the deadline.
//! 3. *Note*: the breaker and the log hear of the answer, and a refusal is remembered, unless the
//!    key has changed meanwhile.
//! 4. *Stand in*: while the store fails, the fallback counts, or the caller gets the error.
//!
//! Peeks begin at 2. Corrections and resets are calls, too. When they begin and when they end, a
//! correction forgets the refusals of its key, and a reset forgets all facts.
//!
//! The nouns, each in the file of its name or of the one before it:
//!
//! - `Remote`: a handle, with the settings by which its limiters call the store (here).
//! - `Caller`: makes the calls of a handle, and stands in (2, 3, 4). `Policy`: the handle's
//!   settings: deadline, what happens on failure. `Node`: the state that all handles of a store
//!   share in this process.
//! - `Known`: a table of facts, and marks of keys that have changed (1, 3). `Fact`: a count as the
//!   store last showed it, and until when it refuses. `Sent`: when a question was sent, and the
//!   key's mark then.
//! - `Breaker`: stops calls to a store that keeps failing.
//! - `Outage`: the log of failures.
//!
//! Times are this process's. `stopwatch` computes how far the store's clock is ahead.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use super::Store;
use super::adjust::Adjust;
use super::charge::Charge;
use super::error::{OnStoreFailure, StoreError};
use super::memory::MemoryStore;
use super::reply::Reply;
use super::scope::Scope;
use crate::decision::Decision;
use crate::key::Key;

mod breaker;
mod caller;
mod known;
mod outage;
mod stopwatch;

#[cfg(feature = "redis")]
pub(super) use breaker::Breaker;
use caller::{Caller, Node, Policy};

/// A store that is called over a network, or that can fail, with what its limiters need for that: a
/// deadline and a breaker ([S32]), memory that counts while the store fails ([S33]), and what this
/// process knows of its counts ([S34]). It says once how all of its limiters talk to the store.
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
///
/// [S32]: crate::guide::semantics#stores
/// [S33]: crate::guide::semantics#stores
/// [S34]: crate::guide::semantics#stores
pub struct Remote {
    caller: Arc<Caller>,
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
            remember: 1_000,
            on_failure: OnStoreFailure::Local,
        };
        Self::new(Arc::new(store), Arc::new(Node::new(Arc::default())), policy)
    }

    fn new(store: Arc<dyn Store>, node: Arc<Node>, policy: Policy) -> Self {
        Self { caller: Arc::new(Caller::new(store, node, policy)) }
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

    /// Sets how long this process remembers a refusal, which it then answers without a call: for
    /// the same or a higher cost, under the same or a lower limit, and no longer than until the
    /// charge could pass. The default is one second, so a refused key causes at most one call in a
    /// second.
    ///
    /// What this process changes takes effect at once: resets, refunds, true costs, limits. What
    /// another process changes takes effect when the refusal is forgotten. [`Duration::ZERO`]
    /// remembers nothing. [`Duration::MAX`] remembers until the charge could pass: the fewest
    /// calls, but a key that another process resets is refused here until then.
    ///
    /// ```no_run
    /// # #[cfg(feature = "redis")]
    /// use std::time::Duration;
    /// # #[cfg(feature = "redis")]
    /// use tower_fixed_window::{FixedWindowLayer, Quota, RedisStore};
    ///
    /// # #[cfg(not(feature = "redis"))] fn main() {}
    /// # #[cfg(feature = "redis")]
    /// # fn main() -> Result<(), tower_fixed_window::StoreError> {
    /// // The counts of logins are never reset, and guessing goes on for long.
    /// let store = RedisStore::new("redis://127.0.0.1/")?.remember_refusals(Duration::MAX);
    /// let login = FixedWindowLayer::new(Quota::per_hour(5).name("login").store(store));
    /// # let _ = login; Ok(()) }
    /// ```
    #[must_use]
    pub fn remember_refusals(self, duration: Duration) -> Self {
        let remember = duration.as_millis().try_into().unwrap_or(i64::MAX);
        self.with_policy(|policy| policy.remember = remember)
    }

    /// Sets what happens to requests while the store fails. By default, this process enforces the
    /// same quotas in its memory (at most one further limit passes for each process). With
    /// [`Allow`](OnStoreFailure::Allow) and [`Deny`](OnStoreFailure::Deny), a
    /// [`Limiter`](crate::Limiter) returns the error.
    #[must_use]
    pub fn on_failure(self, policy: OnStoreFailure) -> Self {
        self.with_policy(|this| this.on_failure = policy)
    }

    /// Returns the refusal of a charge that follows from known facts.
    pub(super) fn known_refusal(&self, charge: Charge<'_>) -> Option<Decision> {
        self.caller.look_up(&charge).ok()
    }

    /// Answers a charge in place of the store.
    pub(crate) fn stand_in(&self, charge: Charge<'_>, error: StoreError) -> Reply<Decision> {
        self.caller.stand_in(charge, error)
    }

    /// Returns how long a call may take, if that is bounded.
    pub(super) fn ends_within(&self) -> Option<Duration> {
        self.caller.policy.deadline
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
            Ok(refusal) => return Reply::now(refusal),
            Err(sent) => sent,
        };
        let (caller, charge) = (Arc::clone(&self.caller), charge.to_owned());
        Reply::later(async move {
            let charge = charge.as_charge();
            match caller.ask_store(charge, sent).await {
                Err(error) if !error.is_apart() => caller.stand_in(charge, error).await,
                answer => answer,
            }
        })
    }

    fn charges_together(&self) -> bool {
        self.caller.store.charges_together()
    }

    fn adjust(&self, adjust: Adjust<'_>) -> Reply<()> {
        let node = &self.caller.node;
        if adjust.is_local() {
            // The tokens return to the memory that granted them, never to the store: also by a
            // handle with another policy.
            return node.fallback.adjust(adjust);
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

    fn remote(&self) -> Option<&Remote> {
        Some(self)
    }

    fn now_ms(&self) -> u64 {
        self.caller.store.now_ms()
    }
}

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
