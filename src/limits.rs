//! Limits that are charged together: [`Limits`].
//!
//! `limit` is what a user sets, `limiter` a handle of one limit, `live` its changes while it runs.
//! `observer` reports each charge, also to warnings and to counts of refused keys.

use std::fmt;
use std::ptr;
use std::slice;
use std::sync::Arc;

use crate::decision::{Decision, MAX_LIMITS, RateLimited, Ruling};
use crate::key::Key;
use crate::quota::{Plan, Quotas};
use crate::store::{
    Account, AnyStore, Charge, MemoryStore, OwnedAccount, Reply, Scope, Store, StoreError, StoreId,
};

#[cfg(feature = "serde")]
mod kept;
mod limit;
mod limiter;
mod live;
mod mistakes;
mod observer;
mod refused;

pub(crate) use limit::PlanFn;
pub use limit::{Limit, NearLimit};
pub use limiter::Limiter;
pub(crate) use observer::{ChargedLine, report};
pub use refused::{Refused, RefusedKey, RefusedRoute};

#[cfg(feature = "serde")]
pub use kept::KeptReceipt;

/// Limits that are charged together. A charge passes only if every limit grants it; a refused
/// charge takes no tokens of any. Each limit has its own key and cost.
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
/// let receipt = limits.charge(lines(3)).await??;
/// // The answer used more tokens than was estimated.
/// limits.settle(receipt, [("tokens", 812)]).await?;
/// assert_eq!(limits.limiter("tokens").peek("acme").await?.used(), 812);
///
/// // Ann has no such budget: nothing is taken from the organization, either.
/// let refused = limits.charge(lines(4_998)).await?.unwrap_err();
/// assert_eq!(refused.decision().name(), "cents");
/// assert_eq!(limits.limiter("requests").peek("acme").await?.used(), 1);
/// # Ok(()) }
/// ```
///
/// The [`Decision`] shows one limit: if limits refuse, the one with the longest wait, otherwise the
/// one with the smallest fraction of its limit left. [`Decision::of`] returns the decision of each.
///
/// In memory and in a `RedisStore`, a charge is one step; in Redis, it is one round trip. A
/// cluster, whose keys are on several servers, charges the limits one after the other, within one
/// deadline, and refunds them if one refuses; so does any store that can't charge several at once.
/// No limit is exceeded, but meanwhile another request may be refused although there is room
/// ([S37]).
///
/// [S37]:
///     https://docs.rs/tower-fixed-window-conformance/latest/tower_fixed_window_conformance/rules/#s37
///
/// Clones share their counters. The methods return a [`Reply`], which you must await.
#[derive(Clone)]
pub struct Limits {
    /// All in one store.
    pub(crate) limiters: Arc<[Limiter]>,
}

impl Limits {
    /// Creates limits that count in memory, in a store of their own.
    ///
    /// # Panics
    /// If there are no limits or more than eight, or if one of several has no name or the name of
    /// another.
    #[track_caller]
    pub fn new<L: Into<Limit>>(limits: impl IntoIterator<Item = L>) -> Self {
        let limits: Vec<Limit> = limits.into_iter().map(Into::into).collect();
        assert_valid(&limits);
        let store = AnyStore::new(MemoryStore::new());
        let limiters = limits.into_iter().map(|limit| Limiter::in_store(limit, store.clone()));
        let this = Self { limiters: limiters.collect() };
        let own = || mistakes::OWN_MEMORY.to_owned();
        this.limiters.iter().for_each(|limiter| mistakes::note_name(own(), &limiter.live));
        this
    }

    /// Makes the limits count in this store, as [`Limit::store`] does for one limit.
    ///
    /// # Panics
    /// If the store is shared ([`Store::is_shared`]) and the only limit has no name.
    #[must_use]
    #[track_caller]
    pub fn store(self, store: impl Store) -> Self {
        let store = AnyStore::new(store);
        let limiters = self.limiters.iter().map(|limit| limit.moved_to(store.clone()));
        let this = Self { limiters: limiters.collect() };
        // A closure would not show the caller's line.
        for limiter in &this {
            limiter.check_name();
        }
        this
    }

    pub(crate) fn common_store(&self) -> &AnyStore {
        &self.limiters[0].store
    }

    /// Returns the limiter of the limit with this name, to peek at, reset or charge that limit
    /// alone.
    ///
    /// # Panics
    /// If no limit has this name.
    #[must_use]
    #[track_caller]
    #[doc(alias = "get")]
    pub fn limiter(&self, name: &str) -> &Limiter {
        // A closure would not show the caller's line.
        let Some(limiter) = self.find(name, 0) else {
            panic!("there is no limit {name:?} in {self:?}")
        };
        limiter
    }

    /// Lines are mostly in the order of the limits, so that this one is `near` its line.
    #[inline(always)]
    fn find(&self, name: &str, near: usize) -> Option<&Limiter> {
        match self.limiters.get(near) {
            Some(limiter) if limiter.name() == name => Some(limiter),
            _ => self.limiters.iter().find(|limiter| limiter.name() == name),
        }
    }

    /// Takes the cost of each line, or nothing, and returns the decision: see the example of
    /// [`Line`].
    ///
    /// # Errors
    /// If the store fails, or if the lines are empty, name an unknown limit, or name one limit
    /// twice. Also for a line of a limit by plan without [`with_quotas`](Line::with_quotas).
    pub fn check<'a>(&self, lines: impl AsRef<[Line<'a>]>) -> Reply<Decision> {
        self.ask(lines.as_ref(), |limiters, charge, _| check_here(limiters, charge))
    }

    /// Returns what each line's key has used, and whether the costs would pass. It takes nothing.
    ///
    /// # Errors
    /// The same as those of [`check`](Self::check).
    pub fn peek<'a>(&self, lines: impl AsRef<[Line<'a>]>) -> Reply<Decision> {
        self.ask(lines.as_ref(), |limiters, charge, _| check(limiters, charge.peeking()))
    }

    /// Takes the cost of each line, or nothing. Returns a receipt to correct the charge later, or
    /// the refusal.
    ///
    /// # Errors
    /// The same as those of [`check`](Self::check).
    pub fn charge<'a>(&self, lines: impl AsRef<[Line<'a>]>) -> Reply<Result<Receipt, RateLimited>> {
        self.ask(lines.as_ref(), charge_for_receipt)
    }

    /// Takes the cost of each line, if necessary from later windows, as far as the quotas allow, as
    /// [`Limiter::reserve`] does for one limit. The caller then waits for
    /// [`Decision::ready_after`], the longest wait of all limits.
    ///
    /// # Errors
    /// The same as those of [`check`](Self::check).
    pub fn reserve<'a>(
        &self,
        lines: impl AsRef<[Line<'a>]>,
    ) -> Reply<Result<Receipt, RateLimited>> {
        self.ask(lines.as_ref(), |limiters, charge, others| {
            charge_for_receipt(limiters, charge.reserving(), others)
        })
    }

    /// Refunds a [charge](Self::charge) to each quota of all its limits whose window has not ended.
    ///
    /// # Errors
    /// The same as those of [`settle`](Self::settle).
    pub fn refund(&self, receipt: impl Into<Receipt>) -> Reply<()> {
        receipt.into().settle(&self.limiters, |_| Some(0))
    }

    /// Corrects a charge to its true costs, each by the name of its limit, as [`Limiter::settle`]
    /// does. Limits that are not named keep their charge.
    ///
    /// # Errors
    /// If the store fails, or if the receipt is of other limits than these. Also if a name is not
    /// in the charge, or is there twice; then nothing changes.
    pub fn settle<'a>(
        &self,
        receipt: impl Into<Receipt>,
        actual: impl IntoIterator<Item = (&'a str, u64)>,
    ) -> Reply<()> {
        let (receipt, mut costs) = (receipt.into(), [None; MAX_LIMITS]);
        for (name, cost) in actual {
            let place = receipt.lines.iter().position(|line| line.scope().name() == name);
            match place.filter(|place| costs[*place].is_none()) {
                Some(place) => costs[place] = Some(cost),
                None => {
                    return Reply::from(Err(StoreError::with_source(
                        "a true cost names no limit of its charge, or one twice",
                        format!("the name is {name:?}"),
                    )));
                }
            }
        }
        receipt.settle(&self.limiters, |place| costs[place])
    }

    fn ask<T>(
        &self,
        lines: &[Line<'_>],
        ask: impl FnOnce(&[&Limiter], Charge<'_>, &[OtherQuotas]) -> Reply<T>,
    ) -> Reply<T> {
        if lines.is_empty() || lines.len() > MAX_LIMITS {
            return Reply::from(Err(StoreError::new("a charge has one to eight lines")));
        }
        let mut limiters = [&self.limiters[0]; MAX_LIMITS];
        let mut is_usual = true;
        for (place, line) in lines.iter().enumerate() {
            let is_new =
                |of: &&Limiter| !limiters[..place].iter().any(|other| ptr::eq(*other, *of));
            let Some(limiter) = self.find(line.name, place).filter(is_new) else {
                return Reply::from(Err(StoreError::with_source(
                    "a line of a charge names no limit, or one twice",
                    format!("the name is {:?}", line.name),
                )));
            };
            limiters[place] = limiter;
            is_usual &= line.quotas.is_none() && limiter.is_unchanged();
        }
        let mut others = Vec::new();
        if !is_usual {
            let other = |(line, of): (&Line<'_>, &Limiter)| of.other_quotas(&line.key, line.quotas);
            others = match lines.iter().zip(limiters).map(other).collect() {
                Ok(others) => others,
                Err(error) => return Reply::from(Err(error)),
            };
        }
        let line = |place: usize| {
            let (limiter, Line { key, cost, .. }) = (limiters[place], &lines[place]);
            let quotas = others.get(place).map_or(&limiter.quotas, |(quotas, _)| quotas);
            (Account::new(&limiter.scope, quotas, key), *cost)
        };
        // The first line fills the places that are not used.
        let mut rest = [line(0); MAX_LIMITS - 1];
        (1..lines.len()).for_each(|place| rest[place - 1] = line(place));
        let charge = Charge::of_lines(line(0), &rest[..lines.len() - 1]);
        ask(&limiters[..lines.len()], charge, &others)
    }
}

#[track_caller]
fn assert_valid(limits: &[Limit]) {
    assert!(
        (1..=MAX_LIMITS).contains(&limits.len()),
        "one to eight limits are charged together, not {}: write \
         Limits::new([Quota::per_minute(60).name(\"requests\")])",
        limits.len()
    );
    for (i, limit) in limits.iter().enumerate() {
        for other in &limits[..i] {
            let (name, other) = (limit.scope.name(), other.scope.name());
            assert!(
                !name.is_empty() && !other.is_empty(),
                "each of several limits needs a name: \
                 write Quota::per_minute(60).name(\"tokens\")"
            );
            assert!(
                other != name,
                "two limits of one charge are named {name:?}: \
                 write .name(\"{name}-2\") for the other one"
            );
        }
    }
}

/// Converts into [`Limits`]. A trait of this crate, since only its advice is shown by the compiler.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a limit",
    label = "write a quota here, such as `Quota::per_minute(60)`",
    note = "a text is parsed first: `\"60/minute\".parse::<Quotas>()?`",
    note = "windows of one limit are joined by `.and(..)`; of several limits each has a name: `Quota::per_minute(5).name(\"a\")`",
    note = "limits that are decided together share one store: `Limits::new([a, b]).store(store)`",
    note = "`Quotas`, `Limit`, an array or a `Vec` of limits, `Limiter`, `&Limiter`, `Limits` and `&Limits` work, too"
)]
pub trait IntoLimits {
    #[doc(hidden)]
    fn into_limits(self) -> Limits;
}

#[diagnostic::do_not_recommend]
impl<T: Into<Limits>> IntoLimits for T {
    #[track_caller]
    fn into_limits(self) -> Limits {
        self.into()
    }
}

impl From<Limit> for Limits {
    fn from(limit: Limit) -> Self {
        Self::new([limit])
    }
}

/// # Panics
/// As [`Limits::new`] does.
impl From<Vec<Limit>> for Limits {
    #[track_caller]
    fn from(limits: Vec<Limit>) -> Self {
        Self::new(limits)
    }
}

/// # Panics
/// As [`Limits::new`] does.
impl<const N: usize> From<[Limit; N]> for Limits {
    #[track_caller]
    fn from(limits: [Limit; N]) -> Self {
        Self::new(limits)
    }
}

impl From<Limiter> for Limits {
    fn from(limiter: Limiter) -> Self {
        Self { limiters: [limiter].into() }
    }
}

impl From<&Limiter> for Limits {
    fn from(limiter: &Limiter) -> Self {
        limiter.clone().into()
    }
}

impl From<&Self> for Limits {
    fn from(limits: &Self) -> Self {
        limits.clone()
    }
}

/// A limit in a charge of several, with its key and its cost. A limit without a line isn't
/// charged.
///
/// ```
/// use tower_fixed_window::{Limits, Line, Quota, Quotas};
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let limits = Limits::new([
///     Quota::per_minute(60).name("requests"),
///     Quota::per_hour(1_000).name("tokens"),
/// ]);
///
/// // A customer's plan.
/// let pro: Quotas = "50_000/hour".parse()?;
/// let tokens = Line::new("tokens", "acme", 600).with_quotas(&pro);
/// let decision = limits.check([Line::new("requests", "acme", 1), tokens]).await?;
/// assert_eq!(decision.of("tokens").unwrap().limit(), 50_000);
///
/// // This request needs no tokens.
/// let decision = limits.check([Line::new("requests", "acme", 1)]).await?;
/// assert!(decision.of("tokens").is_none());
/// assert_eq!(decision.limits().map(|(name, _)| name).collect::<Vec<_>>(), ["requests"]);
/// # Ok(()) }
/// ```
#[derive(Clone, Debug)]
#[must_use = "a line charges nothing unless it is part of a charge"]
pub struct Line<'a> {
    name: &'a str,
    key: Key,
    cost: u64,
    quotas: Option<&'a Quotas>,
}

impl<'a> Line<'a> {
    /// Creates a line that charges `cost` tokens of `key` to the limit with this name.
    pub fn new(name: &'a str, key: impl Into<Key>, cost: u64) -> Self {
        Self { name, key: key.into(), cost, quotas: None }
    }

    /// Charges the same counters under other quotas, such as a customer's plan.
    pub fn with_quotas(self, quotas: &'a Quotas) -> Self {
        Self { quotas: Some(quotas), ..self }
    }
}

/// Proof of a charge that passed, with which you can correct the charge once. It can't be cloned.
/// If you drop it, the charge stays as it is.
///
/// A [`Limiter`](crate::Limiter) corrects a charge of its limit, as in the example of
/// [`Limiter::charge`]. [`Limits`](crate::Limits) correct a charge of several limits, as in the
/// example there.
#[derive(Debug)]
pub struct Receipt {
    /// In their places of the charge.
    lines: Vec<ReceiptLine>,
    pub(crate) decision: Decision,
    /// `None` if it was read from text, maybe by another process, or is a layer's own.
    store: Option<StoreId>,
}

#[derive(Debug)]
pub(crate) struct ReceiptLine {
    pub(crate) account: OwnedAccount,
    /// `true` if quotas of the key or of the charge decided, not the limiter's.
    pub(crate) own: bool,
}

impl ReceiptLine {
    fn scope(&self) -> &Scope {
        self.account.as_account().scope
    }

    /// Limits without a name are none of each other's.
    fn find<'a>(&self, limiters: &'a [Limiter]) -> Option<&'a Limiter> {
        limiters.iter().find(|limiter| limiter.scope.id() == self.scope().id())
    }
}

impl Receipt {
    pub(crate) fn new(lines: Vec<ReceiptLine>, decision: Decision) -> Self {
        Self { lines, decision, store: None }
    }

    /// Returns the decision, as in the example of [`Limiter::reserve`].
    pub fn decision(&self) -> &Decision {
        &self.decision
    }

    /// Sets true costs by place. A receipt is good for the counters it was taken from (S14).
    fn settle(&self, limiters: &[Limiter], costs: impl Fn(usize) -> Option<u64>) -> Reply<()> {
        let is_here = |(place, line): (usize, &ReceiptLine)| {
            costs(place).is_none() || line.find(limiters).is_some()
        };
        let store = &limiters[0].store;
        if !self.store.as_ref().is_none_or(|of| of.is_of(store))
            || !self.lines.iter().enumerate().all(is_here)
        {
            return Reply::from(Err(StoreError::new(
                "a receipt belongs to the limit and the store it was taken from: settle it there",
            )));
        }
        self.correct(limiters, |place, _, granted| Some(costs(place).unwrap_or(granted))).0
    }

    /// Corrects each line to what `actual` returns for its place, its limiter and the tokens taken,
    /// and returns the decision with these costs. `None`: the charge was not reported, and is undone.
    pub(crate) fn correct(
        &self,
        limiters: &[Limiter],
        actual: impl Fn(usize, &Limiter, u64) -> Option<u64>,
    ) -> (Reply<()>, Decision) {
        let mut replies = Vec::new();
        let corrected = self.decision.map_lines(|place, of| {
            let line = &self.lines[place];
            let Some(limiter) = line.find(limiters) else { return of };
            let actual = actual(place, limiter, of.granted());
            replies.push(limiter.correct(line, &of, actual));
            of.with_cost(actual.unwrap_or(0))
        });
        (Reply::all(replies).map(drop), corrected)
    }
}

/// The quotas of a line that may not be those of its limiter, and whether a correction keeps them.
type OtherQuotas = (Quotas, bool);

/// Charges the lines of these limiters, and reports each.
#[inline(never)]
fn check(limiters: &[&Limiter], charge: Charge<'_>) -> Reply<Decision> {
    check_here(limiters, charge)
}

/// [`check`], compiled for its caller.
#[inline(always)]
fn check_here(limiters: &[&Limiter], charge: Charge<'_>) -> Reply<Decision> {
    let first = limiters[0];
    let memory = match &first.store {
        AnyStore::Memory(memory) if !first.is_watched => memory,
        _ => return check_elsewhere(limiters, charge),
    };
    let decided = |of: Ruling| Reply::now(of.into_decision(charge.account().label()));
    let reply = match memory.rule(charge) {
        Ok(ruling) if ruling.passed() => {
            observer::note_passed(&first.scope, charge.cost(), false);
            return decided(ruling);
        }
        Ok(ruling) => decided(ruling),
        Err(undecided) => memory.decide_other(charge, undecided),
    };
    if let Some(Ok(decision)) = reply.as_now() {
        report_charge(decision, limiters, charge);
    }
    reply
}

#[inline(never)]
fn check_elsewhere(limiters: &[&Limiter], charge: Charge<'_>) -> Reply<Decision> {
    let reply = limiters[0].store.charge(charge);
    if let Some(answer) = reply.as_now() {
        if let Ok(decision) = answer {
            report_charge(decision, limiters, charge);
        }
        return reply;
    }
    let limiters: Vec<_> = limiters.iter().copied().cloned().collect();
    let charge = charge.to_owned();
    reply.map(move |decision| {
        let limiters: Vec<_> = limiters.iter().collect();
        report_charge(&decision, &limiters, charge.as_charge());
        decision
    })
}

#[inline(always)]
fn report_charge(decision: &Decision, limiters: &[&Limiter], charge: Charge<'_>) {
    if !charge.is_peek() {
        let line = |place: usize| {
            let (account, cost) = charge.line_at(place);
            (limiters[place], account, cost)
        };
        report(decision, charge.len(), line, None);
    }
}

fn charge_for_receipt(
    limiters: &[&Limiter],
    charge: Charge<'_>,
    others: &[OtherQuotas],
) -> Reply<Result<Receipt, RateLimited>> {
    let reply = check(limiters, charge);
    let line = |(place, (account, _)): (usize, (Account<'_>, _))| {
        let own = others.get(place).is_some_and(|(_, own)| *own);
        ReceiptLine { account: account.to_owned(), own }
    };
    let lines = charge.lines().enumerate().map(line).collect();
    let store = limiters[0].store.clone();
    reply.map(move |decision| {
        let decision = decision.passed()?;
        let store = Some(store.id(decision.is_local()));
        Ok(Receipt { lines, decision, store })
    })
}

/// The limiters of all limits, in their order: `for limiter in &limits`.
impl<'a> IntoIterator for &'a Limits {
    type Item = &'a Limiter;
    type IntoIter = slice::Iter<'a, Limiter>;

    fn into_iter(self) -> Self::IntoIter {
        self.limiters.iter()
    }
}

impl fmt::Debug for Limits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = |plan: Option<Plan>| plan.map_or("by plan".into(), |plan| plan.to_string());
        let of = |limit: &Limiter| (limit.name().to_owned(), text(limit.quotas()));
        f.debug_map().entries(self.limiters.iter().map(of)).finish()
    }
}
