//! A limiter without HTTP: a name, quotas and a store.

use std::fmt;
use std::sync::Arc;

use crate::decision::{Decision, RateLimited};
use crate::key::Key;
use crate::observe::{self, Outcome};
use crate::quota::Quotas;
use crate::store::{Account, Adjust, Charge, MemoryStore, Reply, Scope, Store, StoreError};

pub(crate) mod freed;
mod receipt;

#[cfg(feature = "serde")]
#[cfg_attr(docsrs, doc(cfg(feature = "serde")))]
pub use receipt::KeptReceipt;
pub use receipt::Receipt;

/// A rate limit without HTTP: for a WebSocket, a job, or calls to another API.
///
/// ```
/// use tower_fixed_window::{Limiter, Quota};
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let uploads = Limiter::new(Quota::per_day(1_000)).name("uploads");
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
/// Clones share their counters. The methods return a [`Reply`], which must be awaited. A store in
/// memory is charged when the method is called. A remote store is called when the reply is first
/// polled, at the latest, so a charge that is not awaited may never be made.
#[derive(Clone)]
#[doc(alias = "throttle")]
pub struct Limiter {
    scope: Scope,
    quotas: Quotas,
    store: Arc<dyn Store>,
    /// Whether it counts in another store than its first.
    has_store: bool,
    /// Whether its tokens may come back.
    refundable: bool,
    /// Whether it has no part in the leases of its store.
    unleased: bool,
}

/// What to write where it [can't be found](Limiter::can_be_found).
pub(crate) const UNNAMED: &str = "a rate limit on a shared store needs a name, or its counters \
    can't be found: write .name(\"login\").store(..)";

impl Limiter {
    /// Creates a limiter that counts in memory, in a store of its own.
    pub fn new(quotas: impl Into<Quotas>) -> Self {
        Self {
            scope: Scope::unnamed(),
            quotas: quotas.into(),
            store: Arc::new(MemoryStore::new()),
            has_store: false,
            refundable: false,
            unleased: false,
        }
    }

    /// Names the limiter. Every node that shares the store finds the counters by the name.
    ///
    /// # Panics
    /// If the name is not 1 to 64 characters of `[a-z0-9_.-]`.
    #[must_use]
    #[track_caller]
    pub fn name(mut self, name: &str) -> Self {
        self.scope = Scope::named(name);
        self
    }

    /// Counts in this store. What happens while it fails says a handle of the store itself, such as
    /// [`RedisStore::on_failure`]: by default, this process enforces the same quotas in its memory.
    ///
    /// ```no_run
    /// # #[cfg(feature = "redis")]
    /// use tower_fixed_window::{Limiter, OnStoreFailure, Quota, RedisStore};
    ///
    /// # #[cfg(not(feature = "redis"))] fn main() {}
    /// # #[cfg(feature = "redis")]
    /// # fn main() -> Result<(), tower_fixed_window::StoreError> {
    /// let store = RedisStore::new("redis://127.0.0.1/")?.on_failure(OnStoreFailure::Deny);
    /// let codes = Limiter::new(Quota::per_hour(5)).name("codes").store(store);
    /// # let _ = codes; Ok(()) }
    /// ```
    ///
    /// # Panics
    /// If the store is shared ([`Store::is_shared`]) and the limiter has no name.
    ///
    /// [`RedisStore::on_failure`]: crate::store::Remote::on_failure
    #[must_use]
    #[track_caller]
    pub fn store<S: Store>(self, store: S) -> Self {
        let this = self.store_named_later(store);
        assert!(this.can_be_found(), "{UNNAMED}");
        this
    }

    pub(crate) fn store_named_later<S: Store>(self, store: S) -> Self {
        Self { store: Arc::new(store), has_store: true, ..self }
    }

    /// The same, with tokens that may come back.
    pub(crate) fn refundable(self) -> Self {
        Self { refundable: true, ..self }
    }

    /// The same without leases.
    pub(crate) fn unleased(self) -> Self {
        Self { unleased: true, ..self }
    }

    /// Whether a charge takes a while.
    pub(crate) fn is_remote(&self) -> bool {
        self.store.answers_within().is_some()
    }

    /// Whether other processes count there, too.
    pub(crate) fn is_shared(&self) -> bool {
        self.store.is_shared()
    }

    /// Whether a shared store has a name for its counters.
    pub(crate) fn can_be_found(&self) -> bool {
        !self.is_shared() || !self.scope.name().is_empty()
    }

    /// Takes one token.
    pub fn check(&self, key: impl Into<Key>) -> Reply<Decision> {
        self.check_cost(key, 1)
    }

    /// Takes `cost` tokens, all or none.
    pub fn check_cost(&self, key: impl Into<Key>, cost: u64) -> Reply<Decision> {
        self.ask(&key.into(), &self.quotas, |account| Charge::new(account, cost))
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
        self.ask(&key.into(), &self.quotas, |account| Charge::new(account, cost).peeking())
    }

    /// Takes `cost` tokens and returns a receipt to correct the charge later, or the refusal.
    ///
    /// ```
    /// use tower_fixed_window::{Limiter, Quota};
    ///
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let tokens = Limiter::new(Quota::per_day(1_000)).name("llm-tokens");
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
    /// use tower_fixed_window::{Limiter, ManualClock, MemoryStore, Quota};
    ///
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let clock = ManualClock::at_ms(1_700_000_040_000);
    /// let mails = Limiter::new(Quota::per_minute(10).reserve_up_to(20))
    ///     .store(MemoryStore::with_clock(clock));
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
        let Receipt { account, decision } = receipt.into();
        let account = account.updated(&self.quotas);
        let account = account.as_account();
        if account.scope().id() != self.scope.id() {
            return Reply::failed(StoreError::new(
                "a receipt belongs to the limiter of its name: settle it there",
            ));
        }
        freed::note_after(
            &self.scope,
            account.key(),
            self.settle_account(account, &decision, actual),
        )
    }

    /// The same under the quotas that the charge was decided by.
    pub(crate) fn settle_as_charged(&self, receipt: Receipt, actual: u64) -> Reply<()> {
        let account = receipt.account.as_account();
        let settled = self.settle_account(account, &receipt.decision, actual);
        freed::note_after(&self.scope, account.key(), settled)
    }

    pub(crate) fn settle_account(
        &self,
        account: Account<'_>,
        decision: &Decision,
        actual: u64,
    ) -> Reply<()> {
        let taken = decision.granted();
        match actual.checked_sub(taken) {
            Some(0) => Reply::now(()),
            Some(more) => self.store.adjust(Adjust::take(account, more, decision)),
            None => self.store.adjust(Adjust::refund(account, taken - actual, decision)),
        }
    }

    /// Clears the counters of a key, under all quotas it was charged with.
    ///
    /// # Errors
    /// If the store fails. In memory, if the key shares its entry with others because the store is
    /// full ([`MemoryStore`]), or if more than 64 windows were used under one name, so that the
    /// store does not know all counters of the key.
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
        let key = key.into();
        freed::note_after(&self.scope, &key, self.store.reset(&self.scope, &key))
    }

    /// Returns a limiter for the same counters under other quotas, such as those of a customer's
    /// plan.
    ///
    /// ```
    /// use tower_fixed_window::{Limiter, Quota};
    ///
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let free = Limiter::new(Quota::per_hour(60)).name("api");
    /// let pro = free.with_quotas(Quota::per_hour(5_000));
    /// assert!(free.check("alice").await?.allowed());
    /// // It is the same counter: the limit is no part of its identity.
    /// assert_eq!(pro.peek("alice").await?.remaining(), 4_999);
    /// // Another window is another counter.
    /// assert_eq!(free.with_quotas(Quota::per_day(9)).peek("alice").await?.used(), 0);
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn with_quotas(&self, quotas: impl Into<Quotas>) -> Self {
        Self { quotas: quotas.into(), ..self.clone() }
    }

    /// Returns the limiter's quotas.
    pub fn quotas(&self) -> &Quotas {
        &self.quotas
    }

    pub(crate) fn has_store(&self) -> bool {
        self.has_store
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
    pub(crate) fn ask(
        &self,
        key: &Key,
        quotas: &Quotas,
        charge: impl FnOnce(Account<'_>) -> Charge<'_>,
    ) -> Reply<Decision> {
        let charge = charge(Account::new(&self.scope, quotas, key));
        let mut reply = self.send(charge);
        let is_peek = charge.is_peek();
        if let Some(answer) = reply.as_now() {
            if let Ok(decision) = answer {
                note_decision(&self.scope, quotas, decision, is_peek);
            }
            return reply;
        }
        let (scope, quotas) = (self.scope.clone(), *quotas);
        reply.map(move |mut decision| {
            note_decision(&scope, &quotas, &mut decision, is_peek);
            decision
        })
    }

    #[inline]
    pub(crate) fn send(&self, mut charge: Charge<'_>) -> Reply<Decision> {
        if self.refundable {
            charge = charge.refundable();
        }
        if self.unleased {
            charge = charge.unleased();
        }
        self.store.charge(charge)
    }

    fn ask_receipt(
        &self,
        key: &Key,
        charge: impl FnOnce(Account<'_>) -> Charge<'_>,
    ) -> Reply<Result<Receipt, RateLimited>> {
        let account = Account::new(&self.scope, &self.quotas, key).to_owned();
        self.ask(key, &self.quotas, |account| charge(account).refundable())
            .map(|decision| decision.passed().map(|decision| Receipt { account, decision }))
    }
}

impl fmt::Debug for Limiter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Limiter")
            .field("name", &self.scope.name())
            .field("quotas", &self.quotas)
            .finish_non_exhaustive()
    }
}

/// Reports a decision that was not made for a layer, and adds to a refusal what a response needs.
#[inline(always)]
fn note_decision(scope: &Scope, quotas: &Quotas, decision: &mut Decision, is_peek: bool) {
    if !is_peek {
        observe_decision(scope, quotas, decision, false);
    }
    if !decision.allowed() {
        decision.note_refuser(scope.name(), quotas);
    }
}

/// Reports a decision to the log and the metrics. In shadow mode nothing is refused.
#[inline(always)]
pub(crate) fn observe_decision(scope: &Scope, quotas: &Quotas, decision: &Decision, shadow: bool) {
    if !observe::ON {
        return;
    }
    let observed = scope.observe();
    if decision.allowed() {
        note_passed(scope, decision.ready_at_ms().is_some());
    } else {
        let outcome = if shadow { Outcome::ShadowRefused } else { Outcome::Refused };
        let quota = || &quotas.as_slice()[decision.governing()];
        observed.refused(outcome, quota, || decision.retry_after());
    }
}

/// Reports that a charge passed, for now or for later.
#[inline(always)]
pub(crate) fn note_passed(scope: &Scope, waits: bool) {
    if observe::ON {
        scope.observe().answered(if waits { Outcome::Reserved } else { Outcome::Passed });
    }
}
