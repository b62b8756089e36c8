//! A request for tokens: [`Charge`].

use std::sync::Arc;

use super::account::{Account, OwnedAccount, instant};
use crate::decision::{Decision, LineWindows, MAX_LIMITS, Mode};
use crate::quota::{Quota, Quotas};
use crate::window::{State, Window};

/// A request for tokens, with a line for each limit. All lines pass, or none takes anything.
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
/// let (account, cost) = charge.lines().next().unwrap();
/// assert_eq!((account.key, cost), (&key, 3));
/// assert!(!charge.is_peek() && !charge.may_reserve());
/// let (decision, writes) = charge.decide(now, |_account, _quota| None);
/// assert!(decision.is_allowed());
/// let (_account, _quota, state) = writes[0];
/// assert_eq!((state.used, state.until), (3, 1_700_000_100_000));
///
/// // Two are left.
/// let decide = |charge: Charge<'_>| charge.decide(now, |_, _| Some(state)).0;
/// assert!(!decide(charge).is_allowed());
/// assert!(decide(charge.reserving()).ready_at().is_some());
/// assert!(!decide(charge.peeking()).is_allowed());
/// // Without borrows, for a reply that comes later.
/// assert!(!charge.to_owned().as_charge().is_peek());
/// ```
///
/// A store that [takes several lines in one step](super::Store::charges_together) loads and writes
/// the states of all of them:
///
/// ```
/// # use tower_fixed_window::store::{Account, Charge, Scope};
/// # use tower_fixed_window::{Key, Quota};
/// # let (key, now) = (Key::from("acme"), 1_700_000_050_000);
/// let (requests, tokens) = (Scope::named("requests"), Scope::named("tokens"));
/// let (few, many) = (Quota::per_minute(60).into(), Quota::per_minute(1_000).into());
/// let (requests, tokens) =
///     (Account::new(&requests, &few, &key), Account::new(&tokens, &many, &key));
///
/// let lines = [(requests, 1), (tokens, 600)];
/// let charge = Charge::together(&lines);
/// assert_eq!(charge.lines().len(), 2);
/// let (decision, writes) = charge.decide(now, |_, _| None);
/// assert_eq!(decision.of("tokens").unwrap().remaining(), 400);
/// let (account, _quota, state) = writes[1];
/// assert_eq!((account.scope.name(), state.used), ("tokens", 600));
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Charge<'a> {
    /// By value, so that a single line stays in registers.
    first: ChargeLine<'a>,
    others: Others<'a>,
    pub(super) mode: Mode,
}

pub(super) type ChargeLine<'a> = (Account<'a>, u64);

#[derive(Clone, Copy, Debug)]
enum Others<'a> {
    Borrowed(&'a [ChargeLine<'a>]),
    Owned(&'a Arc<[(OwnedAccount, u64)]>),
}

impl<'a> Others<'a> {
    fn len(self) -> usize {
        match self {
            Self::Borrowed(lines) => lines.len(),
            Self::Owned(lines) => lines.len() - 1,
        }
    }

    fn at(self, i: usize) -> ChargeLine<'a> {
        match self {
            Self::Borrowed(lines) => lines[i],
            Self::Owned(lines) => as_line(&lines[1 + i]),
        }
    }
}

impl<'a> Charge<'a> {
    /// Creates a charge of one line, for `cost` tokens.
    pub fn new(account: Account<'a>, cost: u64) -> Self {
        Self::of_lines((account, cost), &[])
    }

    /// Creates a charge of these lines, each with its cost.
    ///
    /// # Panics
    /// If there are no lines or more than eight, or if two have the same scope.
    #[track_caller]
    pub fn together(lines: &'a [(Account<'a>, u64)]) -> Self {
        let Some((&first, others)) = lines.split_first().filter(|_| lines.len() <= MAX_LIMITS)
        else {
            panic!("a charge has one to eight lines, not {}", lines.len());
        };
        let scopes = || lines.iter().map(|(account, _)| account.scope.id());
        for (i, scope) in scopes().enumerate() {
            assert!(!scopes().take(i).any(|other| other == scope), "two lines of one scope");
        }
        Self::of_lines(first, others)
    }

    #[inline(always)]
    pub(crate) fn of_lines(first: (Account<'a>, u64), others: &'a [(Account<'a>, u64)]) -> Self {
        Self { first, others: Others::Borrowed(others), mode: Mode::default() }
    }

    /// Allows the charge to take tokens of later windows, as far as the quotas allow.
    #[must_use]
    pub fn reserving(mut self) -> Self {
        self.mode.reserve = true;
        self
    }

    /// Makes the charge a peek, which takes nothing.
    #[must_use]
    pub fn peeking(mut self) -> Self {
        self.mode.peek = true;
        self
    }

    /// Returns the account and the cost of each line.
    pub fn lines(&self) -> impl ExactSizeIterator<Item = (Account<'a>, u64)> + Clone + use<'a> {
        let this = *self;
        (0..self.len()).map(move |place| this.line_at(place))
    }

    pub(crate) fn len(&self) -> usize {
        1 + self.others.len()
    }

    #[inline]
    pub(crate) fn line_at(&self, place: usize) -> (Account<'a>, u64) {
        if place == 0 { self.first } else { self.others.at(place - 1) }
    }

    /// The first line's.
    pub(crate) fn account(&self) -> Account<'a> {
        self.first.0
    }

    /// The first line's.
    pub(crate) fn cost(&self) -> u64 {
        self.first.1
    }

    /// Returns whether the charge may take tokens of later windows.
    pub fn may_reserve(&self) -> bool {
        self.mode.reserve
    }

    /// Returns whether the charge takes nothing.
    pub fn is_peek(&self) -> bool {
        self.mode.peek
    }

    pub(super) fn is_plain(&self) -> bool {
        !(self.mode.reserve || self.mode.peek)
    }

    pub(crate) fn each(&self) -> impl ExactSizeIterator<Item = Self> + use<'a> {
        let this = *self;
        (0..self.len()).map(move |place| this.line(place))
    }

    pub(super) fn line(&self, place: usize) -> Self {
        Self { first: self.line_at(place), others: Others::Borrowed(&[]), ..*self }
    }

    /// Returns a copy without borrows, for a reply that comes later.
    pub fn to_owned(&self) -> OwnedCharge {
        let lines = match self.others {
            Others::Owned(lines) => Arc::clone(lines),
            Others::Borrowed(_) => {
                self.lines().map(|(account, cost)| (account.to_owned(), cost)).collect()
            }
        };
        OwnedCharge { lines, mode: self.mode }
    }

    /// Decides at `now` (milliseconds since the epoch, by the store's clock), given the state of
    /// each quota of each line. Returns the decision, and what to write. A refusal also writes if
    /// the clock has stepped back by a window or more.
    ///
    /// The function is pure: it calls `load` once for each quota, in order, and the same states
    /// give the same decision. If a store decides on its server, in a stored procedure, let that
    /// return the time and the states as they were before. This function then returns the server's
    /// decision; ignore what to write.
    pub fn decide(
        &self,
        now: u64,
        load: impl FnMut(&Account<'a>, &Quota) -> Option<State>,
    ) -> (Decision, Vec<(Account<'a>, &'a Quota, State)>) {
        let mut writes = Vec::new();
        let decision = self.decide_in_order(now, load, |account, quota, state| {
            writes.extend(state.map(|state| (account, quota, state)));
        });
        (decision, writes)
    }

    /// Loads the state of each quota of each line in order, once, and says in the same order what to
    /// write. Nothing is said of a peek.
    pub(super) fn decide_in_order(
        &self,
        now: u64,
        mut load: impl FnMut(&Account<'a>, &Quota) -> Option<State>,
        mut write: impl FnMut(Account<'a>, &'a Quota, Option<State>),
    ) -> Decision {
        let now = instant(now);
        let load = |(account, _): ChargeLine<'a>| {
            account.windows(|_, quota| account.window(now, quota, load(&account, quota)))
        };
        let loaded: Vec<[_; Quotas::MAX]> = self.lines().map(load).collect();
        #[cfg(feature = "testing")]
        crate::sync::held_up::wait();
        let lines = self.lines().zip(&loaded);
        let lines = lines.map(|(line, windows)| line_windows(line, windows, 0));
        Decision::over_lines::<{ Quotas::MAX }>(now, self.mode, lines, |place, _, states| {
            let (account, _) = self.line_at(place);
            let of_quotas = account.quotas.into_iter().zip(states);
            of_quotas.for_each(|(quota, state)| write(account, quota, state));
        })
    }
}

/// `overflow` has a bit for each quota whose count other keys share.
pub(super) fn line_windows<'w, 'a>(
    (account, cost): ChargeLine<'a>,
    windows: &'w [Window<'a>],
    overflow: u8,
) -> LineWindows<'w, 'a> {
    let windows = &windows[..account.quotas.len()];
    LineWindows { label: account.label(), windows, cost, overflow }
}

/// A [`Charge`] without borrows: [`Charge::to_owned`].
#[derive(Clone, Debug)]
pub struct OwnedCharge {
    lines: Arc<[(OwnedAccount, u64)]>,
    mode: Mode,
}

impl OwnedCharge {
    /// Under the share of one of `nodes`.
    pub(super) fn share(mut self, nodes: u64) -> Self {
        Arc::make_mut(&mut self.lines).iter_mut().for_each(|(account, _)| account.share(nodes));
        self
    }

    /// Returns the [`Charge`].
    pub fn as_charge(&self) -> Charge<'_> {
        let &Self { ref lines, mode } = self;
        Charge { first: as_line(&lines[0]), others: Others::Owned(lines), mode }
    }
}

fn as_line((account, cost): &(OwnedAccount, u64)) -> ChargeLine<'_> {
    (account.as_account(), *cost)
}
