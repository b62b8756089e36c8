//! Several limits in one charge of a third party's store elsewhere, which can do that in one step (S37):
//! what a `Remote` around it adds.

use std::time::Duration;

use tower_fixed_window::store::{OnStoreFailure, Remote, Store};
use tower_fixed_window::testing::block_on;
use tower_fixed_window::{Decision, Limits, Line, Quota, StoreError};

use crate::database::Database;

fn limits(store: impl Store) -> Limits {
    Limits::new([Quota::per_year(60).name("requests"), Quota::per_year(1_000).name("tokens")])
        .store(store)
}

fn check(limits: &Limits, tokens: u64) -> Result<Decision, StoreError> {
    let lines = [Line::new("requests", "acme", 1), Line::new("tokens", "acme", tokens)];
    block_on(limits.check(lines))
}

#[test]
fn what_is_known_of_one_limit_refuses_all_without_a_call() {
    let database = Database::start();
    let limits = limits(Remote::around(database.clone()));
    assert!(check(&limits, 900).expect("it answers").allowed());
    assert_eq!(database.calls(), 1, "one step");
    let refused = check(&limits, 200).expect("it answers");
    assert!(refused.of("requests").expect("it took part").allowed());
    for _ in 0..100 {
        let refused = check(&limits, 200).expect("it is known");
        assert_eq!(refused.governing_limit(), "tokens");
        assert!(refused.of("requests").is_none() && refused.retry_at().is_some());
    }
    assert_eq!(database.calls(), 2);
    assert!(check(&limits, 100).expect("it answers").allowed(), "it is less");
    assert!(!check(&limits, 1).expect("it answers").allowed());
    block_on(limits.of("tokens").reset("acme")).expect("it answers");
    assert!(check(&limits, 200).expect("it answers").allowed(), "it was reset");
    let requests = block_on(limits.of("requests").peek("acme")).expect("it answers");
    assert_eq!(requests.used(), 3, "refusals took nothing");
}

#[test]
fn a_store_that_fails_stands_in_for_all_limits_or_for_none() {
    let database = Database::start();
    let store = Remote::around(database.clone()).deadline(Duration::from_secs(9));
    let here = limits(store.clone());
    let nowhere = limits(store.on_failure(OnStoreFailure::Deny));
    assert!(check(&here, 900).expect("it answers").allowed());
    for scope in ["requests", "tokens"] {
        database.fail(scope, true);
    }
    assert!(check(&nowhere, 1).is_err());
    for (tokens, passes) in [(900, true), (900, false), (100, true)] {
        let decision = check(&here, tokens).expect("memory answers");
        assert!(decision.is_local() && decision.limits().all(|(_, of)| of.is_local()));
        assert_eq!(decision.allowed(), passes, "{tokens}");
    }
    // Both limits of one step: the refused one took nothing of the other.
    let decision = check(&here, 0).expect("memory answers");
    assert_eq!(decision.of("requests").expect("it took part").used(), 3);
    let calls = database.calls();
    for _ in 0..20 {
        assert!(check(&here, 0).expect("memory answers").is_local());
    }
    assert!(database.calls() <= calls + 5, "the breaker opens");
}
