//! A limit that counts in a store, and is changed at run time.

use std::borrow::Cow;
use std::fmt;
use std::ptr;
use std::sync::{Arc, OnceLock};

use crate::decision::{Decision, KeptRefuser, RateLimited};
use crate::key::Key;
use crate::quota::Quotas;
use crate::store::{Account, Adjust, AnyStore, Charge, Reply, Scope, Store, StoreError, instant};

// First, since rustdoc shows methods in the order of modules.
mod creating;

mod changes;
mod changing;
pub(crate) mod likely_mistakes;
mod live;
mod noted;
mod options;
mod receipt;
mod refused;
mod watched;

pub(crate) use live::{InForce, Live};
use live::{UNKNOWN, WATCHED};
use noted::note_decision;
pub(crate) use noted::{note_passed, observe_decision};
pub use options::IntoLimit;
#[cfg(feature = "serde")]
#[cfg_attr(docsrs, doc(cfg(feature = "serde")))]
pub use receipt::KeptReceipt;
pub use receipt::Receipt;
pub use refused::{Refused, RefusedKey, RefusedRoute};

/// A rate limit without HTTP: for a WebSocket, a job, or calls to another API.
///
/// ```
/// use tower_fixed_window::{Limiter, Quota};
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let uploads = Limiter::new(Quota::per_day(1_000).name("uploads"));
///
/// let decision = uploads.check("alice").await?;
/// assert!(decision.allowed());
/// assert_eq!(decision.remaining(), 999);
///
/// let decision = uploads.check_cost("alice", 1_000).await?;
/// assert!(!decision.allowed());
/// assert!(uploads.peek_cost("alice", 999).await?.allowed());
/// assert_eq!(uploads.quotas().to_string(), "1000/day");
/// # Ok(()) }
/// ```
///
/// [`check`](Self::check) and [`peek`](Self::peek) are about one token, and with `_cost` about as
/// many as you say. A charge that can be corrected later always names its cost:
/// [`charge`](Self::charge) and [`reserve`](Self::reserve).
///
/// Clones share their counters. The methods return a [`Reply`], which must be awaited. A store in
/// memory is charged when the method is called. A remote store is called when the reply is first
/// polled, at the latest, so a charge that is not awaited may never be made.
#[derive(Clone)]
#[doc(alias = "throttle")]
pub struct Limiter {
    scope: Scope,
    /// The quotas of this handle's generation of [`Live`]. The mark [`WATCHED`] keeps the
    /// generation from equalling any of `Live`'s, so that watched decisions take the longer path.
    quotas: Quotas,
    generation: u64,
    store: AnyStore,
    live: Arc<Live>,
    /// Set by the first refusal. `None`: each refusal takes a copy, since the limiter may be one of
    /// many with quotas of their own.
    refuser: OnceLock<Option<KeptRefuser>>,
}

/// The advice if counters [can't be found](Limiter::can_be_found).
pub(crate) const UNNAMED: &str = "a rate limit on a shared store needs a name, or its counters \
    can't be found: write Quota::per_minute(5).name(\"login\").store(..)";

impl Limiter {
    pub(crate) fn shared_store(&self) -> &AnyStore {
        &self.store
    }

    /// Returns the limit with its changes.
    pub(crate) fn live(&self) -> &Arc<Live> {
        &self.live
    }

    /// Returns the name of the limit. It is empty if the limit has none.
    pub fn name(&self) -> &str {
        self.scope.name()
    }

    /// Returns whether other processes count in the same store.
    pub(crate) fn is_shared(&self) -> bool {
        self.store.is_shared()
    }

    /// Returns whether other processes find the counters: a shared store needs a name.
    pub(crate) fn can_be_found(&self) -> bool {
        !self.is_shared() || !self.scope.name().is_empty()
    }

    /// Takes one token.
    pub fn check(&self, key: impl Into<Key>) -> Reply<Decision> {
        self.check_cost(key, 1)
    }

    /// Takes `cost` tokens, all or none.
    pub fn check_cost(&self, key: impl Into<Key>, cost: u64) -> Reply<Decision> {
        self.check_key(&key.into(), cost)
    }

    /// Compiled once, not for each type of keys.
    #[inline(never)]
    fn check_key(&self, key: &Key, cost: u64) -> Reply<Decision> {
        self.ask(key, |account| Charge::new(account, cost))
    }

    /// Returns the standing of a key under the limiter's own quotas, and whether one token would
    /// pass. Takes nothing. For keys that are charged under others, use
    /// [`with_quotas`](Self::with_quotas).
    ///
    /// ```
    /// use tower_fixed_window::{Limiter, Quota};
    ///
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let limiter = Limiter::new(Quota::per_day(10));
    /// assert_eq!(limiter.peek("alice").await?.remaining(), 10);
    /// assert_eq!(limiter.peek("alice").await?.remaining(), 10);
    /// # Ok(()) }
    /// ```
    pub fn peek(&self, key: impl Into<Key>) -> Reply<Decision> {
        self.peek_cost(key, 1)
    }

    /// Returns the standing of a key, and whether `cost` tokens would pass. Takes nothing.
    pub fn peek_cost(&self, key: impl Into<Key>, cost: u64) -> Reply<Decision> {
        self.ask(&key.into(), |account| Charge::new(account, cost).peeking())
    }

    /// Takes `cost` tokens and returns a receipt to correct the charge later, or the refusal.
    ///
    /// ```
    /// use tower_fixed_window::{Limiter, Quota};
    ///
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let tokens = Limiter::new(Quota::per_day(1_000).name("llm-tokens"));
    ///
    /// // One `?` for the store, one for the limit.
    /// let receipt = tokens.charge("alice", 100).await??;
    /// // The answer used more than was estimated.
    /// tokens.settle(receipt, 250).await?;
    /// assert_eq!(tokens.peek("alice").await?.used(), 250);
    ///
    /// let receipt = tokens.charge("alice", 100).await??;
    /// tokens.refund(receipt).await?;
    /// assert_eq!(tokens.peek("alice").await?.used(), 250);
    ///
    /// let refused = tokens.charge("alice", 800).await?.unwrap_err();
    /// assert_eq!(refused.decision().remaining(), 750);
    /// # Ok(()) }
    /// ```
    pub fn charge(&self, key: impl Into<Key>, cost: u64) -> Reply<Result<Receipt, RateLimited>> {
        self.ask_receipt(&key.into(), |account| Charge::new(account, cost))
    }

    /// Takes `cost` tokens, also from later windows as far as the quotas allow
    /// ([`Quota::reserve_up_to`](crate::Quota::reserve_up_to)). The caller then waits for
    /// [`Decision::ready_after`].
    ///
    /// A window sees at most its limit start, plus the tokens of the last charge that earlier
    /// windows cover: with 10 a minute, a charge of 15 takes the 10 of this minute and 5 of the
    /// next, and starts in the next one, beside 5 others. Over several quotas, no window sees more:
    /// a reservation that one quota covers only after the window in which another one counts it is
    /// refused until then. Once tokens of later windows are taken, those of earlier ones can't be
    /// refunded, since the count can't say which window has room again.
    ///
    /// ```
    /// use std::time::Duration;
    /// use tower_fixed_window::{Limit, ManualClock, MemoryStore, Quota};
    ///
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let clock = ManualClock::at_ms(1_700_000_040_000);
    /// let mails = Limit::new(Quota::per_minute(10).reserve_up_to(20));
    /// let mails = mails.store(MemoryStore::new().clock(clock));
    ///
    /// let first = mails.reserve("newsletter", 10).await??;
    /// assert_eq!(first.decision().ready_after(), Duration::ZERO);
    /// let second = mails.reserve("newsletter", 10).await??;
    /// assert_eq!(second.decision().ready_after(), Duration::from_secs(60));
    /// // It would leave room in a minute that others wait for.
    /// mails.refund(first).await?;
    /// assert_eq!(mails.peek("newsletter").await?.used(), 20);
    /// # Ok(()) }
    /// ```
    pub fn reserve(&self, key: impl Into<Key>, cost: u64) -> Reply<Result<Receipt, RateLimited>> {
        self.ask_receipt(&key.into(), |account| Charge::new(account, cost).reserving())
    }

    /// Refunds a [charge](Self::charge): to each quota until the window of the tokens has ended.
    /// After that, it has no effect.
    pub fn refund(&self, receipt: impl Into<Receipt>) -> Reply<()> {
        self.settle(receipt, 0)
    }

    /// Sets the true cost of a charge. A lower cost is refunded as by [`refund`](Self::refund). The
    /// difference to a higher cost is taken now, even beyond the limit.
    ///
    /// # Errors
    /// If the store fails, or if the charge was made under another name than this limiter's.
    pub fn settle(&self, receipt: impl Into<Receipt>, actual: u64) -> Reply<()> {
        let Receipt { account, decision, own } = receipt.into();
        let account = match self.quotas_now(account.as_account().key()) {
            Ok(quotas) if !own => account.updated(&quotas),
            // Quotas that decided the charge stay if they are a plan's or the key's own.
            _ => account,
        };
        let account = account.as_account();
        if account.scope().id() != self.scope.id() {
            return Reply::failed(StoreError::new(
                "a receipt belongs to the limiter of its name: settle it there",
            ));
        }
        self.settle_account(account, &decision, actual)
    }

    /// Corrects a charge that was reported.
    pub(crate) fn settle_account(
        &self,
        account: Account<'_>,
        decision: &Decision,
        actual: u64,
    ) -> Reply<()> {
        let taken = decision.granted();
        match actual.checked_sub(taken) {
            Some(0) => Reply::now(()),
            Some(more) => {
                account.scope().observe().settled(more);
                likely_mistakes::note_cost(account, actual);
                let taken = self.store.adjust(Adjust::take(account, more, decision));
                match self.live.limit().warns() {
                    true => self.warn_after(taken, account, more, decision.is_local()),
                    false => taken,
                }
            }
            None => {
                account.scope().observe().refunded(taken - actual);
                self.store.adjust(Adjust::refund(account, taken - actual, decision))
            }
        }
    }

    /// Returns what was taken by a charge that was not reported.
    pub(crate) fn give_back(&self, account: Account<'_>, decision: &Decision) -> Reply<()> {
        match decision.granted() {
            0 => Reply::now(()),
            taken => self.store.adjust(Adjust::refund(account, taken, decision)),
        }
    }

    /// Clears the counters of a key, under all quotas it was charged with.
    ///
    /// # Errors
    /// If the store fails. In memory, if the key shares its entry with others because the store is
    /// full ([`MemoryStore`](crate::MemoryStore)), or if more than 64 windows were used under one
    /// name, so that the store does not know all counters of the key.
    ///
    /// ```
    /// use tower_fixed_window::{Limiter, Quota};
    ///
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let limiter = Limiter::new(Quota::per_day(1));
    /// limiter.check("alice").await?;
    /// limiter.reset("alice").await?;
    /// assert!(limiter.check("alice").await?.allowed());
    /// # Ok(()) }
    /// ```
    pub fn reset(&self, key: impl Into<Key>) -> Reply<()> {
        self.store.reset(&self.scope, &key.into())
    }

    /// Returns which keys were refused lately in this process, most often first: how often, since
    /// when, by which quota, and until when. `None`: they are not counted, see the examples of
    /// [`Limit::track_refused`](crate::Limit::track_refused).
    ///
    /// This holds a lock for as long as it takes to copy the keys. Refusals of that time are not
    /// counted.
    pub fn refused(&self) -> Option<Refused> {
        Some(self.live.tracker()?.refused(self.now()))
    }

    /// Returns the time of the store.
    pub(crate) fn now(&self) -> i64 {
        instant(self.store.now_ms())
    }

    /// Returns whether the quotas are the ones that this handle was made with.
    #[inline]
    pub(crate) fn is_unchanged(&self) -> bool {
        self.live.is_of(self.generation)
    }

    /// Returns whether the quotas are unchanged and decisions are watched.
    #[inline]
    fn is_only_watched(&self) -> bool {
        self.live.is_of(self.generation & !WATCHED)
    }

    /// The quotas that this handle was made with.
    #[inline]
    pub(crate) fn first_quotas(&self) -> &Quotas {
        &self.quotas
    }

    /// The quotas of a charge that names none.
    #[inline]
    pub(crate) fn quotas_now(&self, key: &Key) -> Result<Cow<'_, Quotas>, StoreError> {
        if self.is_unchanged() { Ok(Cow::Borrowed(&self.quotas)) } else { self.changed_quotas(key) }
    }

    #[cold]
    fn changed_quotas(&self, key: &Key) -> Result<Cow<'_, Quotas>, StoreError> {
        self.end_changes();
        if self.is_only_watched() {
            return Ok(Cow::Borrowed(&self.quotas));
        }
        if let Some(own) = self.live.quotas_of(key) {
            return Ok(Cow::Owned(own));
        }
        match self.generation {
            UNKNOWN => Err(StoreError::new(
                "this limit's quotas differ between requests: write limiter.with_quotas(plan)",
            )),
            _ => Ok(Cow::Owned(self.live.quotas())),
        }
    }

    /// Returns whether a charge is decided by a plan's quotas or the key's own, which its
    /// correction keeps, whichever handle makes it.
    pub(crate) fn has_own_quotas(&self, key: &Key) -> bool {
        self.live.is_of_a_plan() || !self.is_unchanged() && self.live.quotas_of(key).is_some()
    }

    /// The answer to a charge without the store, which did not answer in time.
    pub(crate) fn stand_in(&self, charge: Charge<'_>, error: StoreError) -> Reply<Decision> {
        self.store.stand_in(charge, error)
    }

    /// The name of the counters.
    pub(crate) fn scope(&self) -> &Scope {
        &self.scope
    }

    #[inline]
    fn ask(&self, key: &Key, charge: impl FnOnce(Account<'_>) -> Charge<'_>) -> Reply<Decision> {
        if self.is_unchanged() {
            return self.ask_by(charge(Account::new(&self.scope, &self.quotas, key)));
        }
        self.ask_changed(key, charge)
    }

    #[cold]
    #[inline(never)]
    fn ask_changed(
        &self,
        key: &Key,
        charge: impl FnOnce(Account<'_>) -> Charge<'_>,
    ) -> Reply<Decision> {
        if self.is_only_watched() {
            return self.ask_watched(charge(Account::new(&self.scope, &self.quotas, key)));
        }
        match self.quotas_now(key) {
            Ok(quotas) => self.ask_watched(charge(Account::new(&self.scope, &quotas, key))),
            Err(error) => Reply::failed(error),
        }
    }

    #[inline(always)]
    fn ask_by(&self, charge: Charge<'_>) -> Reply<Decision> {
        let (quotas, is_peek) = (charge.account().quotas(), charge.is_peek());
        let AnyStore::Memory(store) = &self.store else { return self.ask_elsewhere(charge) };
        let passed = |tokens| note_passed(&self.scope, tokens, false);
        store.charge_noting(charge, passed, |decision| {
            note_decision(&self.scope, quotas, decision, is_peek, || self.refuser(quotas));
        })
    }

    #[inline(never)]
    fn ask_elsewhere(&self, charge: Charge<'_>) -> Reply<Decision> {
        let (quotas, is_peek) = (charge.account().quotas(), charge.is_peek());
        let mut reply = self.send(charge);
        match reply.as_now() {
            Some(Ok(decision)) => {
                note_decision(&self.scope, quotas, decision, is_peek, || self.refuser(quotas));
            }
            Some(Err(_)) => {}
            None => {
                let (scope, quotas) = (self.scope.clone(), *quotas);
                reply.map_in_place(move |decision| {
                    note_decision(&scope, &quotas, decision, is_peek, || None);
                });
            }
        }
        reply
    }

    /// Returns what refusals note of this limiter, for charges under its own quotas.
    #[inline]
    pub(crate) fn refuser(&self, quotas: &Quotas) -> Option<KeptRefuser> {
        let own = ptr::eq(quotas, &self.quotas);
        own.then(|| *self.refuser.get_or_init(|| KeptRefuser::of(self.name(), quotas)))?
    }

    #[inline(always)]
    pub(crate) fn send(&self, charge: Charge<'_>) -> Reply<Decision> {
        match &self.store {
            AnyStore::Memory(store) => store.charge(charge),
            AnyStore::Other(store) => store.charge(charge),
        }
    }

    fn ask_receipt(
        &self,
        key: &Key,
        charge: impl FnOnce(Account<'_>) -> Charge<'_>,
    ) -> Reply<Result<Receipt, RateLimited>> {
        let quotas = match self.quotas_now(key) {
            Ok(quotas) => quotas,
            Err(error) => return Reply::failed(error),
        };
        let account = Account::new(&self.scope, &quotas, key);
        let charge = charge(account);
        let reply =
            if self.is_unchanged() { self.ask_by(charge) } else { self.ask_watched(charge) };
        let (account, own) = (account.to_owned(), self.has_own_quotas(key));
        reply.map(move |decision| {
            decision.passed().map(|decision| Receipt::new(account, decision, own))
        })
    }
}

impl fmt::Debug for Limiter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Limiter")
            .field("name", &self.scope.name())
            .field("quotas", &self.quotas())
            .finish_non_exhaustive()
    }
}
