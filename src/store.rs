//! Stores of counters: the [`Store`] contract, and the stores in this crate.

use std::any::Any;
use std::fmt;
use std::ops::Deref;
use std::sync::{Arc, Weak};
use std::time::Duration;

use crate::clock::{Clock, SystemClock};
use crate::decision::{Decision, Ruling};
use crate::key::Key;

mod account;
mod adjust;
mod charge;
mod charged_quotas;
mod in_order;
mod memory;
mod remote;
mod reply;
mod sharded;
#[cfg(feature = "tokio")]
mod shared;
mod table;

pub use account::{Account, Scope, Windows};
pub(crate) use account::{OwnedAccount, instant};
pub use adjust::{Adjust, OwnedAdjust};
pub use charge::{Charge, OwnedCharge};
pub use memory::MemoryStore;
pub use remote::Remote;
pub use reply::{OnStoreFailure, Reply, StoreError};
#[cfg(feature = "tokio")]
pub use shared::{CounterId, Counters, Shared, Write};

pub use crate::quota::Calendar;
pub use crate::window::State;

/// An asynchronous store of counters.
///
/// # The contract
///
/// A store keeps a [`State`] for each combination of scope, quota and key, as an [`Account`] names
/// them. The arithmetic is in this crate: the store loads the states, calls [`Charge::decide`] or
/// [`Adjust::apply`], and writes what these return. The store is responsible for the rest:
///
/// 1. **Atomic steps.** Load, decide and write are atomic over *all* quotas of all lines: no call
///    for the same key comes in between, on any node.
/// 2. **One clock.** The store reads its time once per call, and nodes that share counters share
///    that clock. It may step back; then a refusal can write, too.
/// 3. **Identity.** The scope's name, the key's bytes, and the quota's window and anchor
///    ([`Quota::counter`](crate::Quota::counter)) identify a counter. The limit does not: it may
///    change while the counter runs.
/// 4. **Life.** The store may drop a state from [`State::until`] on, not earlier.
/// 5. **Reset.** A reset clears a key of a scope under every quota that the key was charged with,
///    even those that the caller does not know: plans differ per request, and limits change. If
///    that is not possible, it returns an error.
/// 6. **No replay.** A charge whose outcome is unknown is not sent again.
/// 7. **An answer.** Every [`Reply`] ends, with an answer or an error, within a time that the store
///    documents. If a reply is dropped before it is done, the charge may or may not happen. If it
///    was never polled, the charge must not happen.
///
/// A store that is called over a network, or that can fail, needs no deadline, breaker or fallback
/// of its own: [`Remote::around`] adds these. Without it, a request is refused with 503 if the store
/// returns an error.
///
/// The conformance suite (the crate `tower-fixed-window-conformance`) checks all but the last two:
/// [the guide](crate::guide::many_nodes#a-store-of-your-own) runs it.
///
/// ```
/// use std::collections::HashMap;
/// use std::sync::Mutex;
/// use tower_fixed_window::store::{Account, Adjust, Charge, Reply, Scope, State, Store};
/// use tower_fixed_window::{Decision, Key, Limit, Quota};
///
/// /// A minimal store: it counts exactly, and keeps its counters for ever.
/// #[derive(Default)]
/// struct Simple(Mutex<HashMap<(String, Key, String), State>>);
///
/// fn id(account: &Account<'_>, quota: &Quota) -> (String, Key, String) {
///     (account.scope.name().to_owned(), account.key.clone(), quota.counter())
/// }
///
/// fn now() -> u64 { 1_700_000_040_000 }
///
/// impl Store for Simple {
///     fn charge(&self, charge: Charge<'_>) -> Reply<Decision> {
///         let mut states = self.0.lock().unwrap();
///         let (decision, writes) =
///             charge.decide(now(), |account, quota| states.get(&id(account, quota)).copied());
///         for (account, quota, state) in writes {
///             states.insert(id(&account, quota), state);
///         }
///         Reply::now(decision)
///     }
///
///     fn adjust(&self, adjust: Adjust<'_>) -> Reply<()> {
///         let mut states = self.0.lock().unwrap();
///         let account = adjust.account;
///         for (quota, state) in adjust.apply(now(), |quota| states.get(&id(&account, quota)).copied()) {
///             states.insert(id(&account, quota), state);
///         }
///         Reply::now(())
///     }
///
///     fn reset(&self, scope: &Scope, key: &Key) -> Reply<()> {
///         self.0.lock().unwrap().retain(|(name, of, _), _| (name.as_str(), &*of) != (scope.name(), key));
///         Reply::now(())
///     }
///
///     fn is_shared(&self) -> bool { false }
/// }
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), tower_fixed_window::StoreError> {
/// let limiter = Limit::new(Quota::per_minute(1)).store(Simple::default());
/// assert!(limiter.check("alice").await?.is_allowed());
/// assert!(!limiter.check("alice").await?.is_allowed());
/// # Ok(()) }
/// ```
pub trait Store: Send + Sync + 'static {
    /// Takes tokens from all quotas of each line's account, or from none. For a
    /// [peek](Charge::is_peek), [`Charge::decide`] returns nothing to write.
    fn charge(&self, charge: Charge<'_>) -> Reply<Decision>;

    /// Returns whether [`charge`](Self::charge) charges several lines, of different scopes, in one
    /// step. Then no other call sees tokens of a charge that is refused in the end.
    ///
    /// The default is that of its [`remote`](Self::remote), or else `false`: then lines are charged
    /// one after the other, and if one is refused, the others are refunded.
    fn charges_together(&self) -> bool {
        self.remote().is_some_and(|remote| remote.charges_together())
    }

    /// Corrects an earlier charge: returns tokens, or takes more of them, without a decision.
    fn adjust(&self, adjust: Adjust<'_>) -> Reply<()>;

    /// Clears the counters of a key of a scope, under all quotas that the key was charged with, and
    /// no others.
    ///
    /// # Errors
    /// If the store can't find some of them, or if the key shares them with other keys.
    fn reset(&self, scope: &Scope, key: &Key) -> Reply<()>;

    /// Returns whether other processes, or this one after a restart, find the counters by the name
    /// of their scope. Limiters on such a store must have a name. The default is that of its
    /// [`remote`](Self::remote), or else `true`.
    fn is_shared(&self) -> bool {
        self.remote().is_none_or(|remote| remote.is_shared())
    }

    /// Returns a number for the part of the [`Store`] that holds this key's counters, if parts can
    /// fail independently, as the shards of a cluster do. The default is 0: the store fails as a
    /// whole.
    fn fault_domain(&self, scope: &Scope, key: &Key) -> u64 {
        let _ = (scope, key);
        0
    }

    /// Returns the server of this key's counters ([of its part](Self::fault_domain)), for the log
    /// while the store fails: host and port, never a credential. The default is `None`.
    fn server(&self, scope: &Scope, key: &Key) -> Option<Arc<str>> {
        let _ = (scope, key);
        None
    }

    /// Returns `true` if nothing can be sent to the server of this key's counters now, because
    /// there is no connection. [`Remote`] then answers without it, except for a call now and then.
    /// This is called before each charge, and must not wait. The default is `false`.
    fn is_cut_off(&self, scope: &Scope, key: &Key) -> bool {
        let _ = (scope, key);
        false
    }

    /// Returns this store with a deadline, if the store itself ends each call, as it must if
    /// callers share calls: [`Remote`] then sets no timer. The default is `None`.
    fn in_time(&self, deadline: Duration) -> Option<Arc<dyn Store>> {
        let _ = deadline;
        None
    }

    /// Returns text that is the same for stores that have the same counts, as far as that is known.
    /// Such stores take each other's [receipts](crate::Receipt), and if two of their limits have
    /// one name, that is logged as a mistake. The default is that of its [`remote`](Self::remote),
    /// or else `None`.
    fn identity(&self) -> Option<String> {
        self.remote()?.identity()
    }

    /// Returns the [`Remote`] that this store is or contains. Its deadline, policy and remembered
    /// refusals then apply to the charge as a whole, even if its lines are charged one after the
    /// other. A store that wraps a `Remote` implements this function, [`charge`](Self::charge),
    /// [`adjust`](Self::adjust) and [`reset`](Self::reset). If it rewrites charges, it must charge
    /// all lines of each, or return `false` from [`charges_together`](Self::charges_together). The
    /// default is `None`.
    fn remote(&self) -> Option<Remote> {
        None
    }

    /// Returns the time of the clock that decides, in milliseconds since the epoch, for what this
    /// process does by itself, such as [`Limiter::refused`](crate::Limiter::refused). The default
    /// is that of its [`remote`](Self::remote), or else the system's time.
    fn now_ms(&self) -> u64 {
        self.remote().map_or_else(|| SystemClock.now_ms(), |remote| remote.now_ms())
    }
}

impl<S: Store + ?Sized> Store for Arc<S> {
    fn charge(&self, charge: Charge<'_>) -> Reply<Decision> {
        (**self).charge(charge)
    }

    fn charges_together(&self) -> bool {
        (**self).charges_together()
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

    fn fault_domain(&self, scope: &Scope, key: &Key) -> u64 {
        (**self).fault_domain(scope, key)
    }

    fn server(&self, scope: &Scope, key: &Key) -> Option<Arc<str>> {
        (**self).server(scope, key)
    }

    fn is_cut_off(&self, scope: &Scope, key: &Key) -> bool {
        (**self).is_cut_off(scope, key)
    }

    fn in_time(&self, deadline: Duration) -> Option<Arc<dyn Store>> {
        (**self).in_time(deadline)
    }

    fn identity(&self) -> Option<String> {
        (**self).identity()
    }

    fn remote(&self) -> Option<Remote> {
        (**self).remote()
    }

    fn now_ms(&self) -> u64 {
        (**self).now_ms()
    }
}

impl dyn Store {
    pub(crate) fn give_back(&self, account: Account<'_>, decision: &Decision) -> Reply<()> {
        match decision.granted() {
            0 => Reply::now(()),
            taken => self.adjust(Adjust::refund(account, taken, decision)),
        }
    }
}

impl fmt::Debug for dyn Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Store")
    }
}

/// Most limiters count in memory, and charge that store without a call through a pointer.
#[derive(Clone, Debug)]
pub(crate) enum AnyStore {
    Memory(MemoryStore),
    Other(Arc<dyn Store>),
}

impl AnyStore {
    pub(crate) fn new(store: impl Store) -> Self {
        let any: &dyn Any = &store;
        if let Some(memory) = any.downcast_ref::<MemoryStore>() {
            return Self::Memory(memory.clone());
        }
        match any.downcast_ref::<Arc<dyn Store>>() {
            Some(shared) => Self::Other(Arc::clone(shared)),
            None => Self::Other(Arc::new(store)),
        }
    }

    /// Counts of a process by itself, while the store failed, are its `Remote`'s alone.
    pub(crate) fn id(&self, is_local: bool) -> StoreId {
        let name = self.identity().filter(|_| !is_local).or_else(|| self.node_name());
        StoreId(self.pointer(), name)
    }

    /// The same text for stores that have the same counts, where that is known.
    pub(crate) fn name(&self) -> String {
        let address = || self.pointer().map(|of| of.as_ptr().cast::<()>().addr().to_string());
        self.identity().or_else(address).unwrap_or_default()
    }

    fn node_name(&self) -> Option<String> {
        self.remote().map(|remote| remote.node_name())
    }

    fn pointer(&self) -> Option<Weak<dyn Store>> {
        match self {
            Self::Memory(_) => None,
            Self::Other(store) => Some(Arc::downgrade(store)),
        }
    }

    /// A usual charge in memory gives its [ruling](MemoryStore::rule), any other its reply.
    #[inline(always)]
    pub(crate) fn rule(&self, charge: Charge<'_>) -> Result<Ruling, Reply<Decision>> {
        match self {
            Self::Memory(store) => {
                store.rule(charge).map_err(|undecided| store.decide_other(charge, undecided))
            }
            Self::Other(_) => Err(self.charge(charge)),
        }
    }

    #[inline(always)]
    pub(crate) fn charge(&self, charge: Charge<'_>) -> Reply<Decision> {
        match self {
            Self::Memory(store) => store.charge(charge),
            Self::Other(store) if charge.len() == 1 => store.charge(charge),
            Self::Other(store) => in_order::charge_in_order(store, charge),
        }
    }
}

/// The counters that a receipt belongs to (S14). It keeps no store alive, as the last handle of a
/// store with a file saves it and lets go of the file (S38).
#[derive(Clone, Debug)]
pub(crate) struct StoreId(Option<Weak<dyn Store>>, Option<String>);

impl StoreId {
    /// As far as that is known.
    pub(crate) fn is_of(&self, store: &AnyStore) -> bool {
        let Self(pointer, name) = self;
        let is_same = pointer.as_ref().zip(store.pointer()).is_some_and(|(a, b)| a.ptr_eq(&b));
        is_same || name.is_some() && [store.identity(), store.node_name()].contains(name)
    }
}

impl Deref for AnyStore {
    type Target = dyn Store;

    fn deref(&self) -> &(dyn Store + 'static) {
        match self {
            Self::Memory(store) => store,
            Self::Other(store) => &**store,
        }
    }
}
