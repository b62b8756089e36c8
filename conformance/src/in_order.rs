//! Several limits, charged one after the other (S37).

use tower_fixed_window::store::{Adjust, Charge, Remote, Reply, Scope};
use tower_fixed_window::{Decision, Key, Store};

/// The traces, and no others, whose answers differ if limits are charged in order (S37): a limit
/// behind the one that refused is not written (G11), and a window from the first request stays open
/// although the tokens of the charge that opened it were returned (T002, T015).
pub(super) const EXCEPTED: [&str; 3] = ["G11", "T002", "T015"];

/// A store that charges several limits one after the other, even if the inner store can charge all
/// in one step.
#[derive(Clone, Debug)]
pub struct InOrder<S>(pub S);

impl<S: Store> Store for InOrder<S> {
    fn charge(&self, charge: Charge<'_>) -> Reply<Decision> {
        self.0.charge(charge)
    }

    fn charges_together(&self) -> bool {
        false
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

    fn remote(&self) -> Option<Remote> {
        self.0.remote()
    }
}
