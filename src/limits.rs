//! Several limits in one charge, without HTTP: [`Limits`].

use std::fmt;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use crate::decision::{Decision, MAX_LIMITS, RateLimited};
use crate::limiter::{Limiter, Receipt, note_passed, observe_decision};
use crate::store::{Account, Charge, MemoryStore, Reply, Store, StoreError};

mod in_order;
mod line;
mod receipts;

pub use line::Line;
#[cfg(feature = "serde")]
#[cfg_attr(docsrs, doc(cfg(feature = "serde")))]
pub use receipts::KeptReceipts;
use receipts::LineReceipt;
pub use receipts::Receipts;

/// Several limits that are charged together: a charge passes only if every limit grants it, and a
/// refusal takes from none. Each limit has its own key and its own cost.
///
/// ```
/// use tower_fixed_window::{Limiter, Limits, Line, Quota};
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let limits = Limits::new([
///     Limiter::new(Quota::per_minute(600)).name("requests"),
///     Limiter::new(Quota::per_hour(200_000)).name("tokens"),
///     Limiter::new(Quota::per_month(5_000)).name("cents"),
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
    store: Arc<dyn Store>,
}

impl Limits {
    /// Creates limits that count in memory, in a store of their own.
    ///
    /// # Panics
    /// If there is none or more than eight, if two have the same name or one has none, or if one
    /// has a store: see [`store`](Self::store).
    #[track_caller]
    pub fn new(limits: impl IntoIterator<Item = Limiter>) -> Self {
        let limits: Vec<_> = limits.into_iter().collect();
        assert!(
            (1..=MAX_LIMITS).contains(&limits.len()),
            "one to eight limits are charged together, not {}",
            limits.len()
        );
        for (i, limit) in limits.iter().enumerate() {
            let name = limit.scope().name();
            assert!(
                !name.is_empty(),
                "each of several limits needs a name: write Limiter::new(..).name(\"tokens\")"
            );
            assert!(
                limits[..i].iter().all(|other| other.scope().name() != name),
                "two limits of one charge are named {name:?}: \
                 write .name(\"{name}-2\") for the other one"
            );
            assert!(
                !limit.has_store(),
                "several limits have one store: write Limits::new([..]).store(store), \
                 and not .store(..) for {name:?}"
            );
        }
        Self::in_store(limits, MemoryStore::new())
    }

    /// Counts in this store.
    ///
    /// ```
    /// use tower_fixed_window::{Limiter, Limits, MemoryStore, Quota};
    ///
    /// let store = MemoryStore::with_max_keys(100_000);
    /// let limits = Limits::new([
    ///     Limiter::new(Quota::per_minute(60)).name("requests"),
    ///     Limiter::new(Quota::per_hour(1_000)).name("tokens"),
    /// ]);
    /// let limits = limits.store(store);
    /// # let _ = limits;
    /// ```
    #[must_use]
    pub fn store<S: Store>(self, store: S) -> Self {
        Self::in_store(self.limits.to_vec(), store)
    }

    fn in_store(limits: Vec<Limiter>, store: impl Store) -> Self {
        let store = Arc::new(store);
        let limits = limits.into_iter().map(|limit| limit.store(Arc::clone(&store)));
        // A refusal may be due to tokens that are returned at once, since another limit refused.
        let limits = limits.map(Limiter::refundable).collect();
        Self { limits, store }
    }

    /// Returns the limiter of one limit: for a peek, a reset, or a charge of this limit alone.
    ///
    /// # Panics
    /// If there is none of this name.
    #[must_use]
    #[track_caller]
    pub fn of(&self, name: &str) -> &Limiter {
        self.find(name).unwrap_or_else(|| panic!("there is no limit {name:?} in {self:?}"))
    }

    fn find(&self, name: &str) -> Option<&Limiter> {
        self.position(name, 0).map(|limit| &self.limits[limit])
    }

    /// Where the limit of a name is, which is likely to be `here`.
    #[inline(always)]
    fn position(&self, name: &str, here: usize) -> Option<usize> {
        match self.limits.get(here) {
            Some(limit) if limit.scope().name() == name => Some(here),
            _ => self.search(name),
        }
    }

    #[inline(never)]
    fn search(&self, name: &str) -> Option<usize> {
        self.limits.iter().position(|limit| limit.scope().name() == name)
    }

    /// Takes the cost of each line, or nothing: see the example of [`Line`].
    ///
    /// # Errors
    /// If the store fails, or if the lines name no limit of these, one twice, or none at all.
    pub fn check<'a>(&self, lines: impl AsRef<[Line<'a>]>) -> Reply<Decision> {
        self.ask(lines.as_ref(), |charge| charge)
    }

    /// Returns the standing of each line's key, and whether the costs would pass. Takes nothing.
    ///
    /// # Errors
    /// The same as those of [`check`](Self::check).
    pub fn peek<'a>(&self, lines: impl AsRef<[Line<'a>]>) -> Reply<Decision> {
        self.ask(lines.as_ref(), |charge| charge.peeking())
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
        self.ask_receipts(lines.as_ref(), |charge| charge)
    }

    /// Takes the cost of each line, also from later windows as far as the quotas allow
    /// ([`Quota::reserve_up_to`](crate::Quota::reserve_up_to)). The caller then waits for
    /// [`Decision::ready_after`], which is the longest wait of all limits.
    ///
    /// ```
    /// use std::time::Duration;
    /// use tower_fixed_window::{Limiter, Limits, Line, ManualClock, MemoryStore, Quota};
    ///
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let clock = ManualClock::at_ms(1_700_000_040_000);
    /// let limits = Limits::new([
    ///     Limiter::new(Quota::per_minute(2).reserve_up_to(4)).name("mails"),
    ///     Limiter::new(Quota::per_day(10)).name("customers"),
    /// ]);
    /// let limits = limits.store(MemoryStore::with_clock(clock));
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
        self.ask_receipts(lines.as_ref(), |charge| charge.reserving())
    }

    /// Refunds a [charge](Self::charge) of all its limits: to each quota until the window of the
    /// tokens has ended.
    ///
    /// # Errors
    /// The same as those of [`settle`](Self::settle).
    pub fn refund(&self, receipts: impl Into<Receipts>) -> Reply<()> {
        self.correct(receipts.into().lines.into_iter().map(|line| (line, 0)).collect())
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
        let mut lines = receipts.into().lines;
        let mut costs = Vec::new();
        for (name, cost) in actual {
            let line = lines.iter().position(|line| line.receipt.scope().name() == name);
            let Some(line) = line else {
                return Reply::failed(StoreError::with_source(
                    "a true cost names no limit of its charge, or one twice",
                    format!("the name is {name:?}"),
                ));
            };
            costs.push((lines.swap_remove(line), cost));
        }
        self.correct(costs)
    }

    fn correct(&self, costs: Vec<(LineReceipt, u64)>) -> Reply<()> {
        let known =
            |(line, _): &(LineReceipt, u64)| self.find(line.receipt.scope().name()).is_some();
        if !costs.iter().all(known) {
            return Reply::failed(StoreError::new(
                "receipts belong to the limits of their names: settle them there",
            ));
        }
        let corrections = costs.into_iter().filter_map(|(LineReceipt { receipt, own }, actual)| {
            let limit = self.find(receipt.scope().name())?;
            // Under a plan of its own, it stays what it was decided by.
            Some(if own {
                limit.settle(receipt, actual)
            } else {
                limit.settle_as_charged(receipt, actual)
            })
        });
        all(corrections.collect())
    }

    fn ask(
        &self,
        lines: &[Line<'_>],
        how: impl for<'c> Fn(Charge<'c>) -> Charge<'c>,
    ) -> Reply<Decision> {
        let mut limits = [&self.limits[0]; MAX_LIMITS];
        if lines.is_empty() || lines.len() > MAX_LIMITS {
            return Reply::failed(StoreError::new("a charge has one to eight lines"));
        }
        let mut named = 0_u32;
        for (i, Line { name, .. }) in lines.iter().enumerate() {
            let limit = self.position(name, i).filter(|limit| named >> limit & 1 == 0);
            let Some(limit) = limit else {
                return Reply::failed(StoreError::with_source(
                    "a line of a charge names no limit, or one twice",
                    format!("the name is {name:?}"),
                ));
            };
            named |= 1 << limit;
            limits[i] = &self.limits[limit];
        }
        let charge = |i: usize| {
            let (Line { key, cost, quotas, .. }, limit) = (&lines[i], limits[i]);
            let quotas = quotas.unwrap_or(limit.quotas());
            how(Charge::new(Account::new(limit.scope(), quotas, key), *cost))
        };
        let mut charges = [charge(0); MAX_LIMITS];
        (1..lines.len()).for_each(|i| charges[i] = charge(i));
        let charges = &charges[..lines.len()];
        if let Some(mut reply) = self.store.charge_all(charges) {
            if let Some(answer) = reply.as_now() {
                if let Ok(decision) = answer {
                    note(decision, charges);
                }
                return reply;
            }
            let in_order = in_order(limits, charges, self.store.answers_within());
            let reply = Reply::later(async move {
                match reply.await {
                    // The store has only just found out.
                    Err(error) if error.is_apart() => in_order.await,
                    answer => answer,
                }
            });
            return noted(reply, charges);
        }
        noted(in_order(limits, charges, self.store.answers_within()), charges)
    }

    fn ask_receipts(
        &self,
        lines: &[Line<'_>],
        how: impl for<'c> Fn(Charge<'c>) -> Charge<'c>,
    ) -> Reply<Result<Receipts, RateLimited>> {
        let accounts: Vec<_> = lines
            .iter()
            .filter_map(|Line { name, key, quotas, .. }| {
                let limit = self.find(name)?;
                let account = Account::new(limit.scope(), quotas.unwrap_or(limit.quotas()), key);
                Some((account.to_owned(), quotas.is_none()))
            })
            .collect();
        self.ask(lines, how).map(|decision| {
            let decision = decision.passed()?;
            let of = decision.limits().zip(accounts);
            let line = |((_, decision), (account, own))| LineReceipt {
                receipt: Receipt::new(account, decision),
                own,
            };
            Ok(Receipts { lines: of.map(line).collect(), decision })
        })
    }
}

impl fmt::Debug for Limits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let of = |limit: &Limiter| (limit.scope().name().to_owned(), *limit.quotas());
        f.debug_map().entries(self.limits.iter().map(of)).finish()
    }
}

/// Charges these limits one after the other.
fn in_order(
    limits: [&Limiter; MAX_LIMITS],
    charges: &[Charge<'_>],
    deadline: Option<Duration>,
) -> Reply<Decision> {
    let lines = limits.into_iter().zip(charges);
    in_order::charge(
        lines.map(|(limit, charge)| (limit.clone().unleased(), charge.to_owned())).collect(),
        deadline,
    )
}

fn noted(reply: Reply<Decision>, charges: &[Charge<'_>]) -> Reply<Decision> {
    let charges: Vec<_> = charges.iter().map(Charge::to_owned).collect();
    reply.map(move |mut decision| {
        let charges: Vec<_> = charges.iter().map(|charge| charge.as_charge()).collect();
        note(&mut decision, &charges);
        decision
    })
}

/// Reports the decisions that passed, or those that refused, and adds to a refusal what a response
/// needs. In a refusal, a limit that would have passed has decided nothing.
#[inline]
fn note(decision: &mut Decision, charges: &[Charge<'_>]) {
    let passed = decision.allowed();
    let mut verdicts = decision.verdicts();
    let mut next = verdicts.next();
    for charge in charges {
        let scope = charge.account().scope();
        // In the same order, but a limit of which nothing is known has no decision.
        let Some((name, allowed, waits)) = next else { break };
        if !Arc::ptr_eq(name, scope.shared_name()) {
            continue;
        }
        if allowed && passed && !charge.is_peek() {
            note_passed(scope, waits);
        }
        next = verdicts.next();
    }
    drop(verdicts);
    if !passed {
        note_refused(decision, charges);
    }
}

#[cold]
fn note_refused(decision: &mut Decision, charges: &[Charge<'_>]) {
    for charge in charges {
        let account = charge.account();
        let (scope, quotas) = (account.scope(), account.quotas());
        if !charge.is_peek()
            && let Some(of) = decision.of(scope.name()).filter(|of| !of.allowed())
        {
            observe_decision(scope, quotas, &of, false);
        }
        if decision.governing_limit() == Some(scope.name()) {
            decision.note_refuser(scope.name(), quotas);
        }
    }
}

/// Waits for all of these. The error is that of the first that has failed.
fn all(replies: Vec<Reply<()>>) -> Reply<()> {
    let mut answer = Ok(());
    let mut later = Vec::new();
    for reply in replies {
        match reply.into_now() {
            Ok(now) => answer = answer.and(now),
            Err(reply) => later.push(reply),
        }
    }
    if later.is_empty() {
        return Reply::from(answer);
    }
    Reply::later(poll_fn(move |cx| {
        later.retain_mut(|reply| match Pin::new(reply).poll(cx) {
            Poll::Ready(done) => {
                answer = std::mem::replace(&mut answer, Ok(())).and(done);
                false
            }
            Poll::Pending => true,
        });
        match later.is_empty() {
            true => Poll::Ready(std::mem::replace(&mut answer, Ok(()))),
            false => Poll::Pending,
        }
    }))
}
