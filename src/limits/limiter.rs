//! A limit that counts in a store, and is changed at run time.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::slice;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use super::live::{Changed, Live, UNKNOWN};
use super::refused::Refused;
use super::{
    Limit, OtherQuotas, Receipt, ReceiptLine, charge_for_receipt, check, check_here, mistakes,
};
use crate::decision::{Decision, RateLimited, system_time};
use crate::key::Key;
use crate::observe::{Change, Event};
use crate::quota::{Plan, Quota, Quotas};
use crate::store::{
    Account, Adjust, AnyStore, Charge, MemoryStore, Reply, Scope, Store, StoreError, instant,
};

/// A rate limit without HTTP: for a WebSocket, a job, or calls to another API.
///
/// ```
/// use tower_fixed_window::{Limiter, Quota};
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let uploads = Limiter::new(Quota::per_day(1_000).name("uploads"));
///
/// let decision = uploads.check("alice").await?;
/// assert!(decision.is_allowed());
/// assert_eq!(decision.remaining(), 999);
///
/// // More than one token at a time.
/// assert!(uploads.charge("alice", 1_000).await?.is_err());
/// assert_eq!(uploads.peek("alice").await?.remaining(), 999);
/// assert_eq!(uploads.quotas(), Some(Quota::per_day(1_000).into()));
///
/// uploads.reset("alice").await?;
/// assert_eq!(uploads.peek("alice").await?.remaining(), 1_000);
/// # Ok(()) }
/// ```
///
/// [`check`](Self::check) takes one token. [`charge`](Self::charge) and [`reserve`](Self::reserve)
/// take any number, and return a receipt with which you can correct the charge later.
///
/// Clones share their counters. The methods return a [`Reply`], which you must await: memory is
/// charged when the method is called, but a remote store may be called only when the reply is first
/// polled.
#[derive(Clone)]
#[doc(alias = "throttle")]
pub struct Limiter {
    pub(crate) scope: Scope,
    /// The quotas of this handle's generation of [`Live`].
    pub(super) quotas: Quotas,
    generation: u64,
    pub(crate) is_watched: bool,
    pub(crate) store: AnyStore,
    pub(crate) live: Arc<Live>,
}

impl Limiter {
    /// Creates a limiter. It counts in memory, in a store of its own, unless the limit already has
    /// a store ([`Limit::store`]).
    pub fn new(limit: impl Into<Self>) -> Self {
        limit.into()
    }

    pub(crate) fn in_store(limit: Limit, store: AnyStore) -> Self {
        mistakes::note_zero(&limit);
        if limit.cost.is_some() || limit.settled {
            limit.scope.observe().has_costs();
        }
        let is_plan = limit.plan.is_some();
        let live = Live::new(limit);
        Self {
            scope: live.limit.scope.clone(),
            quotas: live.limit.quotas,
            generation: if is_plan { UNKNOWN } else { 0 },
            is_watched: live.tracker.is_some() || live.limit.warns(),
            store,
            live: Arc::new(live),
        }
    }

    /// The limit in the other store is no longer changed with this one.
    pub(crate) fn moved_to(&self, store: AnyStore) -> Self {
        let (plan, shadow) = self.live.usual();
        let limit = self.live.limit.clone();
        let quotas = plan.quotas().copied().unwrap_or(limit.quotas);
        let moved = Self::in_store(Limit { quotas, shadow, ..limit }, store);
        if plan == Plan::UNLIMITED {
            moved.live.change(Change::Quotas, |changes| changes.quotas.set(plan));
        }
        moved
    }

    /// Returns a limiter for the same counters under other quotas, such as a customer's plan, as
    /// [`Line::with_quotas`](crate::Line::with_quotas) does for one charge.
    #[must_use]
    pub fn with_quotas(&self, quotas: impl Into<Quotas>) -> Self {
        let quotas = quotas.into();
        let live = Arc::new(self.live.with_quotas(quotas));
        Self { quotas, generation: UNKNOWN, live, ..self.clone() }
    }
}

impl Limiter {
    /// Returns the name of the limit, or the empty string if it has none.
    pub fn name(&self) -> &str {
        self.scope.name()
    }

    /// Other processes must find the counters of a shared store, and the counters of a store with
    /// this [name](AnyStore::name) have one limit.
    #[track_caller]
    pub(super) fn check_name(&self) {
        assert!(
            !self.store.is_shared() || !self.name().is_empty(),
            "a rate limit on a shared store needs a name, or its counters can't be found: write \
             Quota::per_minute(5).name(\"login\").store(..)"
        );
        mistakes::note_name(self.store.name(), &self.live);
    }

    /// Takes one token of the key, if each quota has one left, and returns the decision. A refusal
    /// is not an error: see [`Decision::is_allowed`] and [`Decision::into_result`].
    ///
    /// # Errors
    /// If the store fails and nothing decides in its place: under the policies `Allow` and `Deny`
    /// of [`OnStoreFailure`](crate::OnStoreFailure). Also for a limit by plan without
    /// [`with_quotas`](Self::with_quotas).
    #[doc(alias = "try_acquire")]
    pub fn check(&self, key: impl Into<Key>) -> Reply<Decision> {
        self.check_key(&key.into())
    }

    /// Compiled once, not for each type of keys.
    #[inline(never)]
    fn check_key(&self, key: &Key) -> Reply<Decision> {
        self.ask(key, 1, |limiters, charge, _| check_here(limiters, charge))
    }

    /// Returns what a key has used of the limiter's own quotas, and whether a charge of one token
    /// would pass. It takes nothing. A higher cost would pass if [`Decision::remaining`] is at
    /// least as high; [`Limits::peek`](crate::Limits::peek) takes costs. For other quotas, use
    /// [`with_quotas`](Self::with_quotas).
    ///
    /// # Errors
    /// The same as those of [`check`](Self::check).
    #[doc(alias = "status")]
    pub fn peek(&self, key: impl Into<Key>) -> Reply<Decision> {
        self.ask(&key.into(), 1, |limiters, charge, _| check(limiters, charge.peeking()))
    }

    /// Takes `cost` tokens, all or none. Returns a receipt to correct the charge later, or the
    /// refusal.
    ///
    /// # Errors
    /// The outer `Result` has the errors of [`check`](Self::check), the inner one the refusal.
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
    #[doc(alias("check_n", "consume"))]
    pub fn charge(&self, key: impl Into<Key>, cost: u64) -> Reply<Result<Receipt, RateLimited>> {
        self.ask(&key.into(), cost, charge_for_receipt)
    }

    /// Takes `cost` tokens, if necessary from later windows, as far as
    /// [`Quota::reserve_up_to`](crate::Quota::reserve_up_to) allows. The caller then waits for
    /// [`Decision::ready_after`]. Callers that become ready in one window have taken at most
    /// `limit` tokens of that window; a charge that spans several windows becomes ready in the last
    /// of them. With several quotas, a reservation is refused if one of them would make it wait
    /// until after the window in which another one counts it. Once tokens of later windows are
    /// taken, those of earlier ones can't be refunded ([S13], [S14]).
    ///
    /// [S13]:
    ///     https://docs.rs/tower-fixed-window-conformance/latest/tower_fixed_window_conformance/rules/#s13
    /// [S14]:
    ///     https://docs.rs/tower-fixed-window-conformance/latest/tower_fixed_window_conformance/rules/#s14
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
    /// // No effect: tokens of a later minute are taken, and the count can't say which minute has
    /// // room.
    /// mails.refund(first).await?;
    /// assert_eq!(mails.peek("newsletter").await?.used(), 20);
    /// # Ok(()) }
    /// ```
    #[doc(alias = "until_ready")]
    pub fn reserve(&self, key: impl Into<Key>, cost: u64) -> Reply<Result<Receipt, RateLimited>> {
        self.ask(&key.into(), cost, |limiters, charge, others| {
            charge_for_receipt(limiters, charge.reserving(), others)
        })
    }

    /// Refunds a [charge](Self::charge) to each quota whose window has not ended. For the other
    /// quotas, it has no effect.
    ///
    /// # Errors
    /// The same as those of [`settle`](Self::settle).
    pub fn refund(&self, receipt: impl Into<Receipt>) -> Reply<()> {
        self.settle(receipt, 0)
    }

    /// Corrects a charge to its true cost. A lower cost is refunded, as by
    /// [`refund`](Self::refund). For a higher cost, the difference is charged now, even beyond the
    /// limit.
    ///
    /// # Errors
    /// If the store fails, or if the receipt is of a limiter with another name or store.
    pub fn settle(&self, receipt: impl Into<Receipt>, actual: u64) -> Reply<()> {
        receipt.into().settle(slice::from_ref(self), |_| Some(actual))
    }

    /// `decision` is that of the line. A clock or a store of the app that panics leaves other limits'
    /// corrections as they are, and may be called while a body is dropped (S15).
    pub(super) fn correct(
        &self,
        ReceiptLine { account, own }: &ReceiptLine,
        decision: &Decision,
        actual: Option<u64>,
    ) -> Reply<()> {
        let corrected = catch_unwind(AssertUnwindSafe(|| {
            let plan = self.quotas().filter(|_| !own);
            // A limit that is lifted may come back: what was reserved stays so.
            let (account, current) = (account.as_account(), plan.as_ref().and_then(Plan::quotas));
            let quotas = current.map_or(*account.quotas, |of| account.quotas.updated(of));
            let account = Account { quotas: &quotas, ..account };
            match actual {
                Some(actual) => self.settle_account(account, decision, actual),
                None => self.store.give_back(account, decision),
            }
        }));
        corrected.unwrap_or_else(|_| Reply::from(Err(StoreError::new(PANICKED))))
    }

    fn settle_account(&self, account: Account<'_>, decision: &Decision, actual: u64) -> Reply<()> {
        let taken = decision.granted();
        match actual.checked_sub(taken) {
            Some(0) => Reply::now(()),
            Some(more) => {
                account.scope.observe().event(Event::TokensSettled, more.min(Quota::MAX_TOKENS));
                mistakes::note_cost(account, actual);
                let taken = self.store.adjust(Adjust::take(account, more, decision));
                match self.live.limit.warns() {
                    true => self.warn_after(taken, account, more, decision.is_local()),
                    false => taken,
                }
            }
            None => {
                account.scope.observe().event(Event::TokensRefunded, taken - actual);
                self.store.adjust(Adjust::refund(account, taken - actual, decision))
            }
        }
    }

    /// Warns of the share that tokens beyond a charge have reached, by a peek at the count that they
    /// were taken from.
    fn warn_after(
        &self,
        taken: Reply<()>,
        account: Account<'_>,
        more: u64,
        is_local: bool,
    ) -> Reply<()> {
        let (this, account) = (self.clone(), account.to_owned());
        let look = move || {
            let peek = this.store.charge(Charge::new(account.as_account(), 0).peeking());
            peek.map(move |decision| {
                if decision.is_local() == is_local {
                    let account = account.as_account();
                    this.live.limit.warn(account.key, account.quotas, &decision, more);
                }
            })
        };
        // The correction is made, even if the store does not answer the peek.
        match taken.into_now() {
            Ok(taken) => {
                if taken.is_ok() {
                    look().detach();
                }
                Reply::from(taken)
            }
            Err(later) => Reply::later(async move {
                later.await?;
                let _ = look().await;
                Ok(())
            }),
        }
    }

    /// Clears the counters of a key, under all quotas that it was charged with, as in the example
    /// of [`Limiter`].
    ///
    /// # Errors
    /// If the store fails. In memory, also if the key shares its entry with others because the
    /// store is full ([`MemoryStore`](crate::MemoryStore)), or if the limit's name was used with
    /// more than 64 different windows, so that the store does not know all counters of the key.
    pub fn reset(&self, key: impl Into<Key>) -> Reply<()> {
        self.store.reset(&self.scope, &key.into())
    }

    /// Returns the keys that this process refused lately, those with the most refusals first: how
    /// often, since when, by which quota, and until when. Returns `None` without
    /// [`Limit::track_refused`](crate::Limit::track_refused), which has examples.
    ///
    /// Keys are copied under a lock. Refusals during that time are not counted, nor some of those at
    /// the same moment on several threads.
    pub fn refused(&self) -> Option<Refused> {
        Some(self.live.tracker.as_ref()?.refused(self.now()))
    }

    pub(crate) fn now(&self) -> i64 {
        instant(self.store.now_ms())
    }

    #[inline]
    pub(crate) fn is_unchanged(&self) -> bool {
        self.live.is_of(self.generation)
    }

    /// Returns the quotas of a charge that names some, of a plan, or of a limit that was changed.
    #[inline(never)]
    pub(super) fn other_quotas(
        &self,
        key: &Key,
        named: Option<&Quotas>,
    ) -> Result<OtherQuotas, StoreError> {
        self.end_changes();
        let is_named = self.live.base.is_some();
        // Without the lock of the changes.
        if let Some(quotas) = named.or((is_named && self.live.is_of(0)).then_some(&self.quotas)) {
            return Ok((*quotas, true));
        }
        match self.live.quotas_for(key) {
            (_, false) if self.live.limit.plan.is_some() => Err(StoreError::new(
                "this limit's quotas differ between requests: write limiter.with_quotas(quotas)",
            )),
            (plan, own) => {
                // Without a request, a charge is counted in any case.
                let lifted = || self.live.limit.quotas.lifted();
                Ok((plan.quotas().copied().unwrap_or_else(lifted), own || is_named))
            }
        }
    }

    #[inline(always)]
    fn ask<T>(
        &self,
        key: &Key,
        cost: u64,
        ask: impl FnOnce(&[&Self], Charge<'_>, &[OtherQuotas]) -> Reply<T>,
    ) -> Reply<T> {
        let other;
        let (quotas, others) = if self.is_unchanged() {
            (&self.quotas, &[][..])
        } else {
            other = match self.other_quotas(key, None) {
                Ok(other) => [other],
                Err(error) => return Reply::from(Err(error)),
            };
            (&other[0].0, &other[..])
        };
        let charge = Charge::new(Account::new(&self.scope, quotas, key), cost);
        ask(&[self], charge, others)
    }
}

impl Limiter {
    /// Returns the current quotas, or `None` if they differ between requests
    /// ([`Limit::by_plan`](crate::Limit::by_plan)).
    pub fn quotas(&self) -> Option<Plan> {
        self.end_changes();
        self.live.quotas()
    }

    /// Changes the quotas for all clones and all layers of this limiter, from the next charge on. A
    /// new limit also applies to what is already counted, and leaves no debt for the next window. A
    /// quota with other windows starts a new counter. For text, write `text.parse::<Plan>()?`. A
    /// limit by plan keeps the quotas of its closure. For one key, use
    /// [`set_key_quotas_until`](Self::set_key_quotas_until), which has an example.
    ///
    /// With [`Plan::UNLIMITED`], requests pass a layer uncounted. Charges without a request are
    /// still counted in the same windows, and pass up to [`MAX_TOKENS`](crate::Quota::MAX_TOKENS).
    pub fn set_quotas(&self, quotas: impl Into<Plan>) {
        let quotas = quotas.into();
        self.change_quotas(|of| of.set(quotas));
    }

    /// Changes the quotas until an instant, by the store's clock ([`Store::now_ms`]). Then the
    /// former quotas apply again, without a further call. A later change replaces this one. An
    /// instant in the past ends the change at once. A limit by plan keeps the quotas of its
    /// closure. For one key, use [`set_key_quotas_until`](Self::set_key_quotas_until), which has an
    /// example.
    ///
    /// [`Store::now_ms`]: crate::store::Store::now_ms
    pub fn set_quotas_until(&self, quotas: impl Into<Plan>, until: SystemTime) {
        let (quotas, until) = (quotas.into(), ms(until));
        self.change_quotas(|of| of.set_until(quotas, until));
    }

    /// Gives one key its own quotas until an instant, in this process: more until tonight, or
    /// nothing until tomorrow (a limit of 0). They replace the limit's quotas and a
    /// [plan's](crate::Limit::by_plan), but not quotas that a charge names
    /// ([`with_quotas`](Self::with_quotas)), nor those of a request that is already in a queue. An
    /// instant in the past ends the change at once.
    ///
    /// Other nodes don't know of the change, and a restart forgets it. For all nodes, read the
    /// exception from your database in [`by_plan`](crate::Limit::by_plan): `docs/support.md`.
    ///
    /// ```
    /// use std::time::{Duration, SystemTime};
    /// use tower_fixed_window::{Key, Limiter, Quota};
    ///
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), tower_fixed_window::StoreError> {
    /// let api = Limiter::new(Quota::per_hour(100).name("api"));
    /// assert!(api.charge("acme", 150).await?.is_err());
    ///
    /// // With the same window, what is used stays used.
    /// let tonight = SystemTime::now() + Duration::from_secs(6 * 3_600);
    /// api.set_key_quotas_until("acme", Quota::per_hour(1_000), tonight);
    /// assert!(api.charge("acme", 150).await?.is_ok());
    /// assert_eq!(api.peek("acme").await?.remaining(), 850);
    /// assert_eq!(api.peek("other").await?.remaining(), 100);
    /// assert_eq!(api.key_quotas()[0].0, Key::from("acme"));
    ///
    /// api.clear_key_quotas("acme");
    /// assert_eq!(api.peek("acme").await?.limit(), 100);
    /// # Ok(()) }
    /// ```
    #[doc(alias("block", "ban"))]
    pub fn set_key_quotas_until(
        &self,
        key: impl Into<Key>,
        quotas: impl Into<Plan>,
        until: SystemTime,
    ) {
        let (key, quotas, until) = (key.into(), quotas.into(), ms(until));
        self.live.change(Change::Key, |changes| changes.keys.set(key, quotas, until));
    }

    /// Removes one key's own quotas, as in the example of
    /// [`set_key_quotas_until`](Self::set_key_quotas_until).
    pub fn clear_key_quotas(&self, key: impl Into<Key>) {
        let key = key.into();
        self.live.change(Change::Key, |changes| changes.keys.clear(&key));
    }

    /// Returns the keys that have their own quotas in this process, with these quotas and when they
    /// end. The first to end comes first, as in the example of
    /// [`set_key_quotas_until`](Self::set_key_quotas_until).
    pub fn key_quotas(&self) -> Vec<(Key, Plan, SystemTime)> {
        self.end_changes();
        let own = self.live.lock().keys.all().into_iter();
        own.map(|(key, quotas, until)| (key, quotas, system_time(until))).collect()
    }

    /// Switches [shadow mode](crate::Limit::shadow) on or off for all layers of this limiter, as in
    /// the example there. Without HTTP, it changes nothing: your own code acts on the decision.
    pub fn set_shadow(&self, shadow: bool) {
        self.live.change(Change::Shadow, |changes| changes.shadow.set(shadow));
    }

    /// Switches shadow mode on or off until an instant, as
    /// [`set_quotas_until`](Self::set_quotas_until) changes the quotas.
    pub fn set_shadow_until(&self, shadow: bool, until: SystemTime) {
        let until = ms(until);
        self.live.change(Change::Shadow, |changes| changes.shadow.set_until(shadow, until));
    }

    fn change_quotas(&self, change: impl FnOnce(&mut Changed<Plan>)) {
        match self.live.limit.plan {
            Some(_) => mistakes::note_no_change(self.name()),
            None => self.live.change(Change::Quotas, |changes| change(&mut changes.quotas)),
        }
    }

    /// Also those of the limit that this is a plan of.
    pub(crate) fn end_changes(&self) {
        self.live.end(|| self.now());
        if let Some(limit) = &self.live.base {
            limit.end(|| self.now());
        }
    }
}

const PANICKED: &str = "a clock or a store panicked in a correction";

fn ms(at: SystemTime) -> i64 {
    let since = at.duration_since(UNIX_EPOCH).unwrap_or_default();
    instant(u64::try_from(since.as_millis()).unwrap_or(u64::MAX))
}

impl Limit {
    /// Makes a limiter that counts in this store, as in the example of [`Limit::new`]. To share a
    /// store between limits, give each a clone. While the store fails, its [`on_failure`] policy
    /// applies: by default, this process enforces the same quotas in its memory.
    ///
    /// # Panics
    /// If the store is shared ([`Store::is_shared`]) and the limit has no name.
    ///
    /// [`on_failure`]: crate::store::Remote::on_failure
    #[track_caller]
    #[doc(alias = "backend")]
    pub fn store(self, store: impl Store) -> Limiter {
        let limiter = Limiter::in_store(self, AnyStore::new(store));
        limiter.check_name();
        limiter
    }
}

impl From<Limit> for Limiter {
    fn from(limit: Limit) -> Self {
        Self::in_store(limit, AnyStore::new(MemoryStore::new()))
    }
}

impl From<&Self> for Limiter {
    fn from(limiter: &Self) -> Self {
        limiter.clone()
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
