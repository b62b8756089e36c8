//! Several limits, charged one after the other (S37).

use crate::decision::Decision;
use crate::key::Key;
use crate::quota::{Quota, Quotas};
use crate::store::{Account, Adjust, Charge, Reply, Scope, Store};

/// The traces, and no others, whose answers differ if limits are charged in order (S37): a limit
/// behind the one that refused is not written (G11), and a window from the first request stays open
/// although the tokens of the charge that opened it were returned (T002, T015).
pub(super) const EXCEPTED: [&str; 3] = ["G11", "T002", "T015"];

/// A store that charges several limits one after the other, even if the inner store can charge all
/// in one step.
pub(super) struct InOrder<S>(pub(super) S);

impl<S: Store> Store for InOrder<S> {
    fn charge(&self, charge: Charge<'_>) -> Reply<Decision> {
        self.0.charge(charge)
    }

    fn adjust(&self, adjust: Adjust<'_>) -> Reply<()> {
        self.0.adjust(adjust)
    }

    fn reset(&self, scope: &Scope, key: &Key) -> Reply<()> {
        self.0.reset(scope, key)
    }

    fn is_shared(&self) -> bool {
        self.0.is_shared()
    }

    fn fault_domain(&self, scope: &Scope, key: &Key) -> u64 {
        self.0.fault_domain(scope, key)
    }
}

pub(super) fn charges_in_one_step(store: &impl Store) -> bool {
    let scopes = ["one", "two"].map(Scope::named);
    let (quotas, key) = (Quotas::from(Quota::per_minute(1)), Key::global());
    let peek = |scope| Charge::new(Account::new(scope, &quotas, &key), 1).peeking();
    store.charge_all(&scopes.each_ref().map(peek)).is_some()
}
