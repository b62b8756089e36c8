//! A request for tokens: [`Charge`].

use super::account::{Account, OwnedAccount, instant};
use crate::decision::{Ask, Decision, LimitWindows, MAX_LIMITS};
use crate::quota::{Quota, Quotas};
use crate::window::{State, Window};

/// A request for tokens from all quotas of an account.
///
/// ```
/// use tower_fixed_window::store::{Account, Charge, Scope};
/// use tower_fixed_window::{Key, Quota};
///
/// let (scope, key) = (Scope::named("api"), Key::from("alice"));
/// let quotas = Quota::per_minute(5).reserve_up_to(2).into();
/// let account = Account::new(&scope, &quotas, &key);
/// let now = 1_700_000_050_000;
///
/// let charge = Charge::new(account, 3);
/// assert_eq!((charge.cost(), charge.account().key()), (3, &key));
/// assert!(!charge.is_peek() && !charge.may_reserve() );
/// let (decision, writes) = charge.decide(now, |_quota| None);
/// assert!(decision.allowed());
/// let (_quota, state) = writes[0];
/// assert_eq!((state.used, state.until), (3, 1_700_000_100_000));
///
/// // Two are left.
/// let decide = |charge: Charge<'_>| charge.decide(now, |_| Some(state)).0;
/// assert!(!decide(charge).allowed());
/// assert!(decide(charge.reserving()).ready_at().is_some());
/// assert!(!decide(charge.peeking()).allowed());
/// // Without borrows, for a reply that comes later.
/// assert_eq!(charge.to_owned().as_charge().cost(), 3);
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Charge<'a> {
    pub(super) account: Account<'a>,
    pub(super) ask: Ask,
}

impl<'a> Charge<'a> {
    /// Creates a charge of `cost` tokens.
    pub fn new(account: Account<'a>, cost: u64) -> Self {
        Self { account, ask: Ask { cost, reserve: false, peek: false } }
    }

    /// Lets the charge take tokens of later windows, as far as the quotas allow.
    #[must_use]
    pub fn reserving(mut self) -> Self {
        self.ask.reserve = true;
        self
    }

    /// Makes the charge a peek, which takes nothing.
    #[must_use]
    pub fn peeking(mut self) -> Self {
        self.ask.peek = true;
        self
    }

    /// Returns the account.
    pub fn account(&self) -> Account<'a> {
        self.account
    }

    /// Returns the number of requested tokens.
    pub fn cost(&self) -> u64 {
        self.ask.cost
    }

    /// Returns whether the charge may take tokens of later windows.
    pub fn may_reserve(&self) -> bool {
        self.ask.reserve
    }

    /// Returns whether the charge takes nothing.
    pub fn is_peek(&self) -> bool {
        self.ask.peek
    }

    /// Returns a copy without borrows, for a reply that comes later.
    pub fn to_owned(&self) -> OwnedCharge {
        OwnedCharge { account: self.account.to_owned(), ask: self.ask }
    }

    /// Decides at `now` (milliseconds since the epoch, on the store's clock), given the state of
    /// each quota. Returns the decision, and what to write. A refusal also writes, where the clock
    /// has stepped back by a window or more. The decision also carries the states, by which a
    /// limiter refuses later charges without a call.
    ///
    /// A store that decides on its server, in a stored procedure, lets that return the time and the
    /// states as they were before. This then returns the decision that the server has made, and
    /// what to write is ignored.
    pub fn decide(
        &self,
        now: u64,
        mut load: impl FnMut(&Quota) -> Option<State>,
    ) -> (Decision, Vec<(&'a Quota, State)>) {
        let (quotas, mut states) = (self.account.quotas(), [None; Quotas::MAX]);
        for (state, quota) in states.iter_mut().zip(quotas) {
            *state = load(quota);
        }
        let (decision, writes) = self.decide_from(instant(now), states);
        let writes = quotas.iter().zip(writes);
        (decision, writes.filter_map(|(quota, state)| Some((quota, state?))).collect())
    }

    /// Decides in the same way on states that were loaded. The decision carries the new states.
    pub(super) fn decide_from(
        &self,
        now: i64,
        states: [Option<State>; Quotas::MAX],
    ) -> (Decision, [Option<State>; Quotas::MAX]) {
        let windows =
            self.account.windows(|i, quota| self.account.window(now, quota, |_| states[i]));
        let (mut decision, writes) = self.decide_over(now, &windows);
        decision.note_states(states, writes);
        (decision, writes)
    }

    /// Decides over several charges of different scopes: all of them pass, or none takes anything.
    /// If one of them is a peek, none takes anything. There are one to eight charges. As with
    /// [`decide`](Self::decide), the decision carries the states.
    ///
    /// ```
    /// use tower_fixed_window::store::{Account, Charge, Scope};
    /// use tower_fixed_window::{Key, Quota};
    ///
    /// let (requests, tokens) = (Scope::named("requests"), Scope::named("tokens"));
    /// let (few, many) = (Quota::per_minute(60).into(), Quota::per_minute(1_000).into());
    /// let key = Key::from("acme");
    /// let charge = |cost| {
    ///     let tokens = Charge::new(Account::new(&tokens, &many, &key), cost);
    ///     [Charge::new(Account::new(&requests, &few, &key), 1), tokens]
    /// };
    ///
    /// let now = 1_700_000_050_000;
    /// let (decision, writes) = Charge::decide_all(&charge(600), now, |_account, _quota| None);
    /// assert!(decision.allowed());
    /// assert_eq!(decision.of("tokens").unwrap().remaining(), 400);
    /// let (account, _quota, state) = writes[1];
    /// assert_eq!((account.scope().name(), state.used), ("tokens", 600));
    ///
    /// let (decision, writes) = Charge::decide_all(&charge(1_001), now, |_, _| None);
    /// assert!(!decision.allowed() && writes.is_empty());
    /// assert_eq!(decision.governing_limit(), Some("tokens"));
    /// ```
    ///
    /// # Panics
    /// If there are none.
    #[track_caller]
    pub fn decide_all(
        charges: &[Self],
        now: u64,
        mut load: impl FnMut(&Account<'a>, &Quota) -> Option<State>,
    ) -> (Decision, Vec<(Account<'a>, &'a Quota, State)>) {
        assert!(!charges.is_empty(), "several limits are decided over at least one charge");
        let now = instant(now);
        let charges = &charges[..charges.len().min(MAX_LIMITS)];
        let mut states = [[None; Quotas::MAX]; MAX_LIMITS];
        let windows: Vec<[Window<'a>; Quotas::MAX]> = charges
            .iter()
            .zip(&mut states)
            .map(|(Charge { account, .. }, states)| {
                account.windows(|i, quota| {
                    states[i] = load(account, quota);
                    account.window(now, quota, |_| states[i])
                })
            })
            .collect();
        let limits =
            charges.iter().zip(&windows).map(|(charge, windows)| charge.with_windows(windows, 0));
        let limits: Vec<_> = limits.collect();
        let mut writes = Vec::new();
        let mut written = [[None; Quotas::MAX]; MAX_LIMITS];
        let mut decision =
            Decision::over_limits::<{ Quotas::MAX }>(now, &limits, |i, _, states| {
                let Charge { account, .. } = charges[i];
                written[i] = states;
                let states = account.quotas().iter().zip(states);
                writes.extend(states.filter_map(|(quota, state)| Some((account, quota, state?))));
            });
        for i in 0..charges.len() {
            decision.note_states_of(i, states[i], written[i]);
        }
        (decision, writes)
    }

    /// Returns this charge as one limit of several. `shared` has a bit for each quota whose count
    /// other keys share.
    pub(super) fn with_windows<'w>(
        &'w self,
        windows: &'w [Window<'a>],
        shared: u8,
    ) -> LimitWindows<'w, 'a> {
        let Account { scope, quotas, .. } = self.account;
        let windows = &windows[..quotas.len()];
        LimitWindows { name: scope.shared_name(), windows, ask: self.ask, shared }
    }

    /// Decides in the same way over the windows of the quotas. `N` is their maximal number: most
    /// charges have one, and the compiler then leaves out all code for more.
    #[inline(always)]
    pub(super) fn decide_over<const N: usize>(
        &self,
        now: i64,
        windows: &[Window<'a>; N],
    ) -> (Decision, [Option<State>; N]) {
        let len = if N == 1 { 1 } else { self.account.quotas().len() };
        Decision::over(now, &windows[..len], self.ask)
    }
}

/// A [`Charge`] without borrows: [`Charge::to_owned`].
#[derive(Clone, Debug)]
pub struct OwnedCharge {
    account: OwnedAccount,
    ask: Ask,
}

impl OwnedCharge {
    pub(crate) fn account(&self) -> &OwnedAccount {
        &self.account
    }

    /// Returns the [`Charge`].
    pub fn as_charge(&self) -> Charge<'_> {
        Charge { account: self.account.as_account(), ask: self.ask }
    }
}
