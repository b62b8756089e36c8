//! Where counters live: the [`Store`] contract, and the stores that come with the crate.

use std::fmt;
use std::sync::Arc;

use crate::decision::Decision;
use crate::key::Key;

mod account;
mod adjust;
#[cfg(feature = "tokio")]
mod book;
mod breaker;
mod cache;
mod charge;
mod counters;
mod error;
mod front;
mod guard;
#[cfg(feature = "tokio")]
mod leases;
mod memory;
mod outage;
mod recall;
#[cfg(feature = "redis")]
mod redis;
mod remote;
mod reply;
mod scope;
mod sharded;
mod stopwatch;
mod table;

pub use account::{Account, OwnedAccount};
pub use adjust::{Adjust, OwnedAdjust};
pub use charge::{Charge, OwnedCharge};
pub use error::{OnStoreFailure, StoreError};
pub(crate) use front::{Front, Refundable};
pub(crate) use guard::Guard;
#[cfg(feature = "tokio")]
pub(crate) use leases::Leases;
pub use memory::MemoryStore;
#[cfg(feature = "redis")]
#[cfg_attr(docsrs, doc(cfg(feature = "redis")))]
pub use redis::RedisStore;
pub use remote::Remote;
pub use reply::Reply;
pub use scope::Scope;

/// An asynchronous backend of counters.
///
/// # The contract
///
/// A store keeps a [`State`](crate::window::State) for each (scope, quota, key). It charges, adjusts and peeks at an
/// [`Account`], which names the three, and resets a key of a scope. The arithmetic is not the store's:
/// it loads the states, asks [`Charge::decide`] (or [`Adjust::apply`]) what they mean now, and writes
/// what these return. What is left to the store:
///
/// 1. **One step.** Load, decide and write are atomic over *all* quotas of the account: no other
///    call for the same key comes in between, on this node or another.
/// 2. **One clock.** The store's own time is read once per call; nodes that share counters share
///    that clock. It may step back.
/// 3. **Identity.** A counter is found by the scope's name, the key's bytes, and the quota's window
///    and anchor ([`Quota::counter`](crate::Quota::counter)), never by its limit: limits change while counters run.
/// 4. **Life.** A state may be forgotten from [`State::until`](crate::window::State::until) on, not earlier.
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
///         for (quota, state) in writes {
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
///         for (quota, state) in writes {
///             states.insert(quota.counter().to_string(), state);
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

            fn fault_domain(&self, scope: &Scope, key: &Key) -> u64 {
                (**self).fault_domain(scope, key)
            }
        }
    };
}

pointer!(Arc);
pointer!(Box);

impl Store for MemoryStore {
    fn charge(&self, charge: Charge<'_>) -> Reply<Decision> {
        Self::charge(self, charge)
    }

    fn adjust(&self, adjust: Adjust<'_>) -> Reply<()> {
        Self::adjust(self, adjust)
    }

    fn reset(&self, scope: &Scope, key: &Key) -> Reply<()> {
        Self::reset(self, scope, key)
    }

    fn is_shared(&self) -> bool {
        false
    }

    fn remote(&self) -> Option<&Remote> {
        None
    }
}

impl fmt::Debug for dyn Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Store")
    }
}
