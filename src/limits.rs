//! Several limits in one charge, without HTTP: [`Limits`].

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::decision::{Decision, MAX_LIMITS, RateLimited};
use crate::limit::Limit;
use crate::limiter::{Limiter, Receipt, UNNAMED, likely_mistakes};
use crate::quota::Quotas;
use crate::store::{
    Account, AnyStore, Charge, MemoryStore, OwnedAccount, Reply, Store, StoreError,
};

mod from;
mod in_order;
mod line;
mod noted;
mod receipts;
mod watched;

use noted::note_decision;
pub(crate) use noted::observe_all;

pub(crate) use from::IntoLimits;
pub use line::Line;
#[cfg(feature = "serde")]
#[cfg_attr(docsrs, doc(cfg(feature = "serde")))]
pub use receipts::KeptReceipts;
pub use receipts::Receipts;

/// Several limits that are charged together: a charge passes only if every limit grants it, and a
/// refusal takes from none. Each limit has its own key and its own cost.
///
/// ```
/// use tower_fixed_window::{Limits, Line, Quota};
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let limits = Limits::new([
///     Quota::per_minute(600).name("requests"),
///     Quota::per_hour(200_000).name("tokens"),
///     Quota::per_month(5_000).name("cents"),
/// ]);
///
/// // An organization's requests and tokens, and a user's budget.
/// let lines = |cents| {
///     [
///         Line::new("requests", "acme", 1),
///         Line::new("tokens", "acme", 600),
///         Line::new("cents", "ann", cents),
///     ]
/// };
/// // One `?` for the store, one for the limits.
/// let receipts = limits.charge(lines(3)).await??;
/// // The answer used more tokens than was estimated.
/// limits.settle(receipts, [("tokens", 812)]).await?;
/// assert_eq!(limits.of("tokens").peek("acme").await?.used(), 812);
///
/// // Ann has no such budget: nothing is taken from the organization, either.
/// let refused = limits.charge(lines(4_998)).await?.unwrap_err();
/// assert_eq!(refused.decision().governing_limit(), Some("cents"));
/// assert_eq!(limits.of("requests").peek("acme").await?.used(), 1);
/// # Ok(()) }
/// ```
///
/// The [`Decision`] is that of the limit that governs: on a refusal the refusing limit with the
/// latest retry, otherwise the one with the smallest part of its limit left.
/// [`Decision::of`] returns the decision of each limit.
///
/// In memory, a charge is one step: no other request sees tokens that are not taken in the end. In
/// a `RedisStore` it is one step, too, and one round trip. A cluster, whose keys are on several
/// servers, and any other store that can't do that charges the limits one after the other, and
/// returns what was taken when one refuses, within one deadline. Nothing passes above a limit then,
/// either. For that moment, another request may be refused early; tokens whose return was lost stay
/// counted until their window ends; and a window from the first request stays open.
///
/// Clones share their counters. The methods return a [`Reply`], which must be awaited.
#[derive(Clone)]
pub struct Limits {
    limits: Arc<[Limiter]>,
    store: AnyStore,
}

impl Limits {
    /// Creates limits that count in memory, in a store of their own.
    ///
    /// # Panics
    /// If there is none or more than eight, or if there are several and two have the same name or
    /// one has none.
    #[track_caller]
    pub fn new<L: Into<Limit>>(limits: impl IntoIterator<Item = L>) -> Self {
        let this = Self::unchecked(limits.into_iter().map(Into::into).collect());
        this.assert_valid();
        this
    }

    fn unchecked(limits: Vec<Limit>) -> Self {
        let store = AnyStore::new(MemoryStore::new());
        limits.iter().for_each(likely_mistakes::note_own_store);
        let limiters = limits.into_iter().map(|limit| Limiter::in_store(limit, store.clone()));
        Self { limits: limiters.collect(), store }
    }

    /// Checks limits that a conversion has created: the panic shows the caller's line.
    ///
    /// # Panics
    /// For the same reasons as [`new`](Self::new).
    #[track_caller]
    pub(crate) fn assert_valid(&self) {
        assert!(
            (1..=MAX_LIMITS).contains(&self.limits.len()),
            "one to eight limits are charged together, not {}",
            self.limits.len()
        );
        for (i, limit) in self.limits.iter().enumerate().filter(|_| self.limits.len() > 1) {
            let name = limit.name();
            assert!(
                !name.is_empty(),
                "each of several limits needs a name: write Quota::per_minute(60).name(\"tokens\")"
            );
            assert!(
                self.limits[..i].iter().all(|other| other.name() != name),
                "two limits of one charge are named {name:?}: \
                 write .name(\"{name}-2\") for the other one"
            );
        }
    }

    /// Counts in this store.
    ///
    /// ```
    /// use tower_fixed_window::{Limits, MemoryStore, Quota};
    ///
    /// let limits = Limits::new([
    ///     Quota::per_minute(60).name("requests"),
    ///     Quota::per_hour(1_000).name("tokens"),
    /// ]);
    /// let limits = limits.store(MemoryStore::with_max_keys(100_000));
    /// # let _ = limits;
    /// ```
    ///
    /// # Panics
    /// If the store is shared ([`Store::is_shared`]) and the only limit has no name.
    #[must_use]
    #[track_caller]
    pub fn store(self, store: impl Store) -> Self {
        let id = likely_mistakes::identity(&store);
        let store = AnyStore::new(store);
        let limits = self.limits.iter().map(|limit| limit.moved_to(store.clone()));
        let this = Self { limits: limits.collect(), store };
        assert!(this.limits.iter().all(Limiter::can_be_found), "{UNNAMED}");
        this.limits
            .iter()
            .for_each(|limiter| likely_mistakes::note_name(id.clone(), limiter.live()));
        this
    }

    /// Returns the limiters of all limits, in their order.
    ///
    /// ```
    /// use tower_fixed_window::{Limits, Quota};
    ///
    /// let limits = Limits::new([
    ///     Quota::per_minute(60).name("requests"),
    ///     Quota::per_hour(1_000).name("tokens"),
    /// ]);
    /// let names: Vec<_> = limits.iter().map(|limiter| limiter.name()).collect();
    /// assert_eq!(names, ["requests", "tokens"]);
    /// ```
    pub fn iter(&self) -> impl Iterator<Item = &Limiter> {
        self.limits.iter()
    }

    #[cfg(feature = "openapi")]
    pub(crate) fn may_fail(&self) -> bool {
        self.store.is_shared() || self.store.answers_within().is_some()
    }

    pub(crate) fn limiters(&self) -> &[Limiter] {
        &self.limits
    }

    /// Returns the limiter of one limit: for a peek, a reset, or a charge of this limit alone.
    ///
    /// # Panics
    /// If there is none of this name.
    #[must_use]
    #[track_caller]
    pub fn of(&self, name: &str) -> &Limiter {
        // A closure would not show the caller's line.
        let Some(limiter) = self.find(name) else {
            panic!("there is no limit {name:?} in {self:?}")
        };
        limiter
    }

    fn find(&self, name: &str) -> Option<&Limiter> {
        self.position(name, 0).map(|limit| &self.limits[limit])
    }

    /// Returns the position of the limit of a name, which is probably `here`.
    #[inline(always)]
    fn position(&self, name: &str, here: usize) -> Option<usize> {
        match self.limits.get(here) {
            Some(limit) if limit.scope().name() == name => Some(here),
            _ => self.search_position(name),
        }
    }

    #[inline(never)]
    fn search_position(&self, name: &str) -> Option<usize> {
        self.limits.iter().position(|limit| limit.scope().name() == name)
    }

    /// Takes the cost of each line, or nothing: see the example of [`Line`].
    ///
    /// # Errors
    /// If the store fails, or if the lines name no limit of these, one twice, or none at all.
    pub fn check<'a>(&self, lines: impl AsRef<[Line<'a>]>) -> Reply<Decision> {
        self.charge_lines(lines.as_ref(), |charge| charge)
    }

    /// Returns the standing of each line's key, and whether the costs would pass. Takes nothing.
    ///
    /// # Errors
    /// The same as those of [`check`](Self::check).
    pub fn peek<'a>(&self, lines: impl AsRef<[Line<'a>]>) -> Reply<Decision> {
        self.charge_lines(lines.as_ref(), |charge| charge.peeking())
    }

    /// Takes the cost of each line and returns receipts to correct the charge later, or the
    /// refusal.
    ///
    /// # Errors
    /// The same as those of [`check`](Self::check).
    pub fn charge<'a>(
        &self,
        lines: impl AsRef<[Line<'a>]>,
    ) -> Reply<Result<Receipts, RateLimited>> {
        self.charge_for_receipts(lines.as_ref(), |charge| charge)
    }

    /// Takes the cost of each line, also from later windows as far as the quotas allow
    /// ([`Quota::reserve_up_to`](crate::Quota::reserve_up_to)). The caller then waits for
    /// [`Decision::ready_after`], which is the longest wait of all limits.
    ///
    /// ```
    /// use std::time::Duration;
    /// use tower_fixed_window::{Limits, Line, ManualClock, MemoryStore, Quota};
    ///
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let clock = ManualClock::at_ms(1_700_000_040_000);
    /// let limits = Limits::new([
    ///     Quota::per_minute(2).reserve_up_to(4).name("mails"),
    ///     Quota::per_day(10).name("customers"),
    /// ]);
    /// let limits = limits.store(MemoryStore::new().clock(clock));
    ///
    /// let lines = [Line::new("mails", "all", 2), Line::new("customers", "acme", 2)];
    /// assert_eq!(limits.reserve(&lines).await??.decision().ready_after(), Duration::ZERO);
    /// let second = limits.reserve(&lines).await??;
    /// assert_eq!(second.decision().ready_after(), Duration::from_secs(60));
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// The same as those of [`check`](Self::check).
    pub fn reserve<'a>(
        &self,
        lines: impl AsRef<[Line<'a>]>,
    ) -> Reply<Result<Receipts, RateLimited>> {
        self.charge_for_receipts(lines.as_ref(), |charge| charge.reserving())
    }

    /// Refunds a [charge](Self::charge) of all its limits: to each quota until the window of the
    /// tokens has ended.
    ///
    /// # Errors
    /// The same as those of [`settle`](Self::settle).
    pub fn refund(&self, receipts: impl Into<Receipts>) -> Reply<()> {
        self.correct_costs(receipts.into().receipts.into_iter().map(|of| (of, 0)).collect())
    }

    /// Sets the true costs of a charge, by the names of the limits. Limits that are not named keep
    /// their cost. As for one limit ([`Limiter::settle`]), a lower cost is refunded, and the
    /// difference to a higher cost is taken now, even beyond the limit.
    ///
    /// # Errors
    /// If the store fails, or if the receipts are of other limits than these. If a name is not one
    /// of the charge, or is there twice; then nothing changes.
    pub fn settle<'a>(
        &self,
        receipts: impl Into<Receipts>,
        actual: impl IntoIterator<Item = (&'a str, u64)>,
    ) -> Reply<()> {
        let mut receipts = receipts.into().receipts;
        let mut costs = Vec::new();
        for (name, cost) in actual {
            let of = receipts.iter().position(|receipt| receipt.scope().name() == name);
            let Some(of) = of else {
                return Reply::failed(StoreError::with_source(
                    "a true cost names no limit of its charge, or one twice",
                    format!("the name is {name:?}"),
                ));
            };
            costs.push((receipts.swap_remove(of), cost));
        }
        self.correct_costs(costs)
    }

    fn correct_costs(&self, costs: Vec<(Receipt, u64)>) -> Reply<()> {
        let limit_of = |receipt: &Receipt| self.find(receipt.scope().name());
        if costs.iter().any(|(receipt, _)| limit_of(receipt).is_none()) {
            return Reply::failed(StoreError::new(
                "receipts belong to the limits of their names: settle them there",
            ));
        }
        let correct =
            |(receipt, actual): (Receipt, u64)| Some(limit_of(&receipt)?.settle(receipt, actual));
        Reply::all(costs.into_iter().filter_map(correct).collect())
    }

    fn charge_lines(
        &self,
        lines: &[Line<'_>],
        configure: impl for<'c> Fn(Charge<'c>) -> Charge<'c>,
    ) -> Reply<Decision> {
        let mut limits = [&self.limits[0]; MAX_LIMITS];
        if lines.is_empty() || lines.len() > MAX_LIMITS {
            return Reply::failed(StoreError::new("a charge has one to eight lines"));
        }
        let (mut named, mut has_changed) = (0_u32, false);
        for (i, Line { name, quotas, .. }) in lines.iter().enumerate() {
            let limit = self.position(name, i).filter(|limit| named >> limit & 1 == 0);
            let Some(limit) = limit else {
                return Reply::failed(StoreError::with_source(
                    "a line of a charge names no limit, or one twice",
                    format!("the name is {name:?}"),
                ));
            };
            named |= 1 << limit;
            limits[i] = &self.limits[limit];
            has_changed |=
                !limits[i].is_unchanged() && (quotas.is_none() || limits[i].live().is_watched());
        }
        if has_changed {
            return self.charge_changed(lines, limits, configure);
        }
        let charge = |i: usize| {
            let quotas = lines[i].quotas.unwrap_or(limits[i].first_quotas());
            configure(charge_of(limits[i], quotas, &lines[i]))
        };
        let mut charges = [charge(0); MAX_LIMITS];
        (1..lines.len()).for_each(|i| charges[i] = charge(i));
        self.charge_and_note(limits, &charges[..lines.len()])
    }

    #[inline(always)]
    fn charge_and_note(
        &self,
        limits: [&Limiter; MAX_LIMITS],
        charges: &[Charge<'_>],
    ) -> Reply<Decision> {
        let mut reply = self.send(limits, charges);
        match reply.as_now() {
            Some(Ok(decision)) => {
                note_decision(decision, charges, |i, quotas| limits[i].refuser(quotas));
            }
            Some(Err(_)) => {}
            None => return note_later(reply, charges),
        }
        reply
    }

    /// Charges these limits in one step, or one after the other if the store can't do that.
    #[inline(always)]
    pub(crate) fn send(
        &self,
        limits: [&Limiter; MAX_LIMITS],
        charges: &[Charge<'_>],
    ) -> Reply<Decision> {
        let Some(mut reply) = self.store.charge_all(charges) else {
            return charge_in_order(limits, charges, self.store.answers_within());
        };
        if reply.as_now().is_some() {
            return reply;
        }
        let in_order = charge_in_order(limits, charges, self.store.answers_within());
        Reply::later(async move {
            match reply.await {
                // The store has found out by this call that it can't.
                Err(error) if error.is_apart() => in_order.await,
                answer => answer,
            }
        })
    }

    fn charge_for_receipts(
        &self,
        lines: &[Line<'_>],
        configure: impl for<'c> Fn(Charge<'c>) -> Charge<'c>,
    ) -> Reply<Result<Receipts, RateLimited>> {
        let accounts: Vec<_> = lines
            .iter()
            .filter_map(|Line { name, key, quotas, .. }| {
                let limit = self.find(name)?;
                let now = match quotas {
                    Some(own) => Cow::Borrowed(*own),
                    None => limit.quotas_now(key).ok()?,
                };
                let account = Account::new(limit.scope(), &now, key);
                Some((account.to_owned(), quotas.is_some() || limit.has_own_quotas(key)))
            })
            .collect();
        self.charge_lines(lines, configure).map(|decision| {
            let decision = decision.passed()?;
            // A limit whose store failed has no decision.
            let receipt = |(account, own): (OwnedAccount, bool)| {
                let of = decision.of(account.as_account().scope().name())?;
                Some(Receipt::new(account, of, own))
            };
            Ok(Receipts { receipts: accounts.into_iter().filter_map(receipt).collect(), decision })
        })
    }
}

impl fmt::Debug for Limits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let of = |limit: &Limiter| (limit.name().to_owned(), limit.quotas());
        f.debug_map().entries(self.limits.iter().map(of)).finish()
    }
}

/// Charges the limits one after the other.
fn charge_in_order(
    limits: [&Limiter; MAX_LIMITS],
    charges: &[Charge<'_>],
    deadline: Option<Duration>,
) -> Reply<Decision> {
    let line = |(limit, charge): (&Limiter, &Charge<'_>)| (limit.clone(), charge.to_owned());
    in_order::charge(limits.into_iter().zip(charges).map(line).collect(), deadline)
}

/// Returns the charge of a line under these quotas.
#[inline(always)]
fn charge_of<'a>(limit: &'a Limiter, quotas: &'a Quotas, line: &'a Line<'_>) -> Charge<'a> {
    let account = Account::new(limit.scope(), quotas, &line.key);
    Charge::new(account, line.cost)
}

/// Notes the decision when the reply is there.
fn note_later(reply: Reply<Decision>, charges: &[Charge<'_>]) -> Reply<Decision> {
    let charges: Vec<_> = charges.iter().map(Charge::to_owned).collect();
    reply.map(move |mut decision| {
        let charges: Vec<_> = charges.iter().map(|charge| charge.as_charge()).collect();
        note_decision(&mut decision, &charges, |_, _| None);
        decision
    })
}
