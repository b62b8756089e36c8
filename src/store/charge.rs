//! A question for tokens: [`Charge`].

use super::account::{Account, OwnedAccount, instant};
use crate::decision::{Ask, Decision};
use crate::quota::{Quota, Quotas};
use crate::window::{State, Window};

/// A question for tokens from all quotas of an account.
#[derive(Clone, Copy, Debug)]
pub struct Charge<'a> {
    pub(super) account: Account<'a>,
    pub(super) ask: Ask,
}

impl<'a> Charge<'a> {
    /// Asks for `cost` tokens.
    pub fn new(account: Account<'a>, cost: u64) -> Self {
        Self { account, ask: Ask { cost, reserve: false, up_to: false, peek: false } }
    }

    /// May take from windows to come, as far as the quotas allow.
    #[must_use]
    pub fn reserving(mut self) -> Self {
        self.ask.reserve = true;
        self
    }

    /// Takes what is there, at least one token, where it is less than the cost.
    #[must_use]
    pub fn up_to(mut self) -> Self {
        self.ask.up_to = true;
        self
    }

    /// Takes nothing, only looks.
    #[must_use]
    pub fn peeking(mut self) -> Self {
        self.ask.peek = true;
        self
    }

    /// Whose counters.
    pub fn account(&self) -> Account<'a> {
        self.account
    }

    /// The tokens asked for.
    pub fn cost(&self) -> u64 {
        self.ask.cost
    }

    /// Whether it may take from windows to come.
    pub fn may_reserve(&self) -> bool {
        self.ask.reserve
    }

    /// Whether less than the cost is acceptable.
    pub fn is_up_to(&self) -> bool {
        self.ask.up_to
    }

    /// Whether nothing is to be taken.
    pub fn is_peek(&self) -> bool {
        self.ask.peek
    }

    /// A copy that borrows nothing, for a reply that comes later.
    pub fn to_owned(&self) -> OwnedCharge {
        OwnedCharge { account: self.account.to_owned(), ask: self.ask }
    }

    /// Decides at `now` (milliseconds since the epoch, on the store's clock), given the state of
    /// each quota. The answer, and what to write.
    ///
    /// A store that decides on its server, in a stored procedure, has that return the time and the states
    /// as they were before. This gives the decision that the server has made, and what to write is
    /// ignored.
    pub fn decide(
        &self,
        now: u64,
        mut load: impl FnMut(&Quota) -> Option<State>,
    ) -> (Decision, Vec<(&'a Quota, State)>) {
        let now = instant(now);
        let windows = self.account.windows(|_, quota| self.account.window(now, quota, &mut load));
        let (decision, writes) = self.decide_over::<{ Quotas::MAX }>(now, &windows);
        let writes = writes.into_iter().flatten();
        (decision, self.account.quotas().iter().zip(writes).collect())
    }

    /// The same over the windows of the quotas. `N` is how many there are at most: most charges have one,
    /// and a compiler that knows it leaves out all that is for more.
    #[inline(always)]
    pub(super) fn decide_over<const N: usize>(
        &self,
        now: i64,
        windows: &[Window<'a>; N],
    ) -> (Decision, Option<[State; N]>) {
        let len = if N == 1 { 1 } else { self.account.quotas().len() };
        Decision::over(now, &windows[..len], self.ask)
    }
}

/// A [`Charge`] that borrows nothing.
#[derive(Clone, Debug)]
pub struct OwnedCharge {
    account: OwnedAccount,
    ask: Ask,
}

impl OwnedCharge {
    /// The charge.
    pub fn as_charge(&self) -> Charge<'_> {
        Charge { account: self.account.as_account(), ask: self.ask }
    }
}
