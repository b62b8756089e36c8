//! The limits of one charge pass together or none is charged (S37): which of them governs, what is
//! corrected by name, and what can't be built.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, UNIX_EPOCH};

use allocation_counter::measure;
use tower_fixed_window::store::{Account, Charge, OnStoreFailure, Scope, Store};
use tower_fixed_window::testing::block_on;
use tower_fixed_window::{
    Decision, FixedWindowLayer, Key, Limit, Limits, Line, ManualClock, MemoryStore, Quota, Quotas,
    StoreError,
};
use tower_fixed_window_conformance::InOrder;

use crate::answer;
use crate::simulated_server::Server;

/// An hour begins, and with it a minute.
const NOW_MS: u64 = 1_699_999_200_000;

fn limits<const N: usize>(quotas: [(&str, Quotas); N]) -> Limits {
    let store = MemoryStore::new().clock(ManualClock::at_ms(NOW_MS));
    Limits::new(quotas.map(|(name, quotas)| Limit::new(quotas).name(name))).store(store)
}

fn gateway() -> Limits {
    limits([
        ("requests", Quota::per_minute(6).into()),
        ("tokens", Quota::per_hour(1_000).into()),
        ("cents", Quota::per_day(50).into()),
    ])
}

fn lines(cents: u64) -> [Line<'static>; 3] {
    [
        Line::new("requests", "acme", 1),
        Line::new("tokens", "acme", 600),
        Line::new("cents", "ann", cents),
    ]
}

fn used(limits: &Limits) -> [u64; 3] {
    let of = |name, key: &str| answer(limits.limiter(name).peek(key)).used();
    [of("requests", "acme"), of("tokens", "acme"), of("cents", "ann")]
}

#[test]
fn a_refusal_takes_from_no_limit_and_names_those_that_refuse() {
    let limits = gateway();
    assert!(answer(limits.check(lines(3))).is_allowed());
    assert_eq!(used(&limits), [1, 600, 3]);

    let refused = answer(limits.check(lines(48)));
    assert!(!refused.is_allowed());
    assert_eq!(used(&limits), [1, 600, 3]);
    let passes = |name| refused.of(name).expect("it took part").is_allowed();
    assert_eq!([passes("requests"), passes("tokens"), passes("cents")], [true, false, false]);
    let requests = refused.of("requests").expect("it took part");
    assert_eq!((requests.granted(), requests.used(), requests.remaining()), (0, 1, 5));
    assert_eq!(refused.name(), "cents", "it refuses for longer");
    assert_eq!(refused.retry_at(), refused.of("cents").and_then(|of| of.retry_at()));
    let text = refused.into_result().expect_err("it is refused").to_string();
    let start = "rate limit exceeded: 3 of 50 used, 47 left for a cost of ";
    assert!(text.starts_with(start), "{text}");
}

#[test]
fn the_limit_with_the_smallest_part_left_governs_to_the_last_token() {
    let governing = |quotas: [Quotas; 2], costs: [u64; 2]| {
        let [one, two] = quotas;
        let limits = limits([("one", one), ("two", two)]);
        let [one, two] = costs;
        let decision =
            answer(limits.check([Line::new("one", "k", one), Line::new("two", "k", two)]));
        assert!(decision.is_allowed());
        decision.name().to_owned()
    };
    let of = |limit| Quotas::from(Quota::per_hour(limit));
    assert_eq!(governing([of(10), of(1_000)], [5, 900]), "two", "100 are left, a tenth");
    assert_eq!(governing([of(1_000), of(10)], [900, 5]), "one");
    // Parts that a float can't tell apart, and whose products are beyond 64 bits.
    assert_eq!(governing([of(Quota::MAX_TOKENS), of(Quota::MAX_TOKENS - 1)], [1, 1]), "two");
    assert_eq!(governing([of(Quota::MAX_TOKENS - 1), of(Quota::MAX_TOKENS)], [1, 1]), "one");
    // Nothing is left of a limit of 0, and of a limit that is used up: the later reset.
    assert_eq!(governing([of(1_000), of(0)], [999, 0]), "two");
    assert_eq!(governing([Quota::per_day(0).into(), of(7)], [0, 7]), "one");
    assert_eq!(governing([of(0), Quota::per_day(7).into()], [0, 7]), "two");
    // Equal parts: the later reset, then the first.
    assert_eq!(governing([of(10), Quota::per_day(20).into()], [1, 2]), "two");
    assert_eq!(governing([of(10), of(20)], [1, 2]), "one");
    // Within a limit, the fewest tokens left; across limits, the parts.
    let two = Quota::per_hour(1_000).and(Quota::per_day(100));
    assert_eq!(governing([of(10), two], [5, 50]), "two");
}

#[test]
fn what_a_decision_says_is_what_the_governing_limit_says() {
    let limits = gateway();
    let decision = answer(limits.check(lines(3)));
    assert_eq!(decision.name(), "tokens");
    let tokens = decision.of("tokens").expect("it took part");
    assert_eq!((decision.limit(), decision.used(), decision.remaining()), (1_000, 600, 400));
    assert_eq!((decision.usage(), decision.granted()), (tokens.usage(), 600));
    assert_eq!(decision.reset_at(), UNIX_EPOCH + Duration::from_millis(NOW_MS + 3_600_000));
    let names: Vec<_> = decision.limits().map(|(name, _)| name).collect();
    assert_eq!(names, ["requests", "tokens", "cents"]);
    assert!(decision.of("others").is_none());
    let alone = answer(limits.limiter("tokens").peek("acme"));
    assert_eq!(alone.of("tokens"), Some(alone.clone()), "one limit is the case of one");
    assert_eq!(alone.limits().collect::<Vec<_>>(), [("tokens", alone.clone())]);
    assert_eq!(alone.name(), "tokens");
    // With more quotas than a decision has room for.
    let four = Quota::per_minute(10).and(Quota::per_hour(20)).and(Quota::per_day(3));
    let four = four.and(Quota::per_week(90));
    let limits = self::limits([("one", Quota::per_minute(9).into()), ("four", four)]);
    let decision = answer(limits.check([Line::new("one", "k", 1), Line::new("four", "k", 2)]));
    assert_eq!(decision.name(), "four");
    assert_eq!((decision.usage().len(), decision.limit()), (4, 3));
    assert_eq!(decision.clone(), decision);
}

#[test]
fn a_late_reservation_is_refused_by_the_quotas_that_it_would_wait_for() {
    let limits = limits([
        ("fast", Quota::per_second(1).reserve_up_to(9).into()),
        ("slow", Quota::per_hour(99).and(Quota::per_minute(1).reserve_up_to(9))),
    ]);
    let lines = [Line::new("fast", "k", 1), Line::new("slow", "k", 1)];
    assert!(answer(limits.reserve(&lines)).is_ok());
    let late = answer(limits.reserve(&lines)).expect_err("too late");
    for (name, quota) in [("fast", 0), ("slow", 1)] {
        let of = late.decision().of(name).expect("it took part");
        assert_eq!(of.refusing().collect::<Vec<_>>(), [quota]);
        assert_eq!(of.limit(), of.usage()[quota].limit());
    }
}

#[test]
fn true_costs_of_a_name_that_took_no_part_or_is_there_twice_change_nothing() {
    let limits = gateway();
    let more = [Line::new("requests", "acme", 2), Line::new("cents", "ann", 9)];
    for wrong in [vec![("cents", 7), ("tokens", 0)], vec![("cents", 7), ("cents", 0)]] {
        let receipts = answer(limits.charge(&more)).expect("it passes");
        let before = used(&limits);
        let error = limits.settle(receipts, wrong).into_now().expect("at once").unwrap_err();
        assert_eq!(error.to_string(), "a true cost names no limit of its charge, or one twice");
        assert_eq!(used(&limits), before);
    }
    let others = self::limits([("others", Quota::per_hour(9).into())]);
    let receipts = answer(others.charge([Line::new("others", "k", 1)])).expect("it passes");
    assert!(limits.refund(receipts).into_now().expect("at once").is_err());
}

#[test]
fn lines_that_name_no_limit_or_one_twice_are_an_error_and_charge_nothing() {
    let limits = gateway();
    let line = |name| Line::new(name, "acme", 1);
    for wrong in [
        vec![],
        vec![line("requests"), line("token")],
        vec![line("requests"), line("tokens"), line("requests")],
        vec![line("requests"), line("tokens"), line("tokens")],
        vec![line("cents"), line("requests"), line("cents")],
        vec![line("requests"); 9],
    ] {
        let error = limits.check(wrong).into_now().expect("at once").unwrap_err().to_string();
        assert!(error.contains("line"), "{error}");
        assert_eq!(used(&limits), [0; 3]);
    }
}

#[test]
fn the_debug_output_of_a_line_has_no_key() {
    let line = format!("{:?}", Line::new("tokens", "acme", 7));
    assert_eq!(line, r#"Line { name: "tokens", key: Key(..), cost: 7, quotas: None }"#);
}

#[test]
fn limits_that_can_not_be_told_apart_panic_with_the_line_to_write() {
    let limit = || Limit::new(Quota::per_minute(5));
    let build = |build: &dyn Fn() -> Limits| {
        let panicked = catch_unwind(AssertUnwindSafe(build)).expect_err("a mistake");
        match panicked.downcast::<String>() {
            Ok(message) => *message,
            Err(other) => other.downcast_ref::<&str>().expect("a message").to_string(),
        }
    };
    for (limits, message) in [
        (
            vec![],
            "one to eight limits are charged together, not 0: \
             write Limits::new([Quota::per_minute(60).name(\"requests\")])",
        ),
        (
            (0..9).map(|i| limit().name(&format!("limit-{i}"))).collect(),
            "one to eight limits are charged together, not 9: \
             write Limits::new([Quota::per_minute(60).name(\"requests\")])",
        ),
        (
            vec![limit().name("tokens"), limit()],
            "each of several limits needs a name: write Quota::per_minute(60).name(\"tokens\")",
        ),
        (
            vec![limit().name("tokens"), limit().name("cents"), limit().name("tokens")],
            "two limits of one charge are named \"tokens\": write .name(\"tokens-2\") for the other one",
        ),
    ] {
        let limits = || limits.clone();
        let layer = || Limits::from(&FixedWindowLayer::new(limits()));
        let all: [&dyn Fn() -> Limits; 3] =
            [&|| Limits::new(limits()), &|| Limits::from(limits()), &layer];
        for way in all {
            assert_eq!(build(way), message);
        }
    }
    let panicked =
        catch_unwind(|| gateway().limiter("token").quotas().is_some()).expect_err("a mistake");
    let message = panicked.downcast::<String>().expect("a message");
    assert!(message.starts_with("there is no limit \"token\" in {\"requests\": "), "{message}");
}

#[test]
fn a_charge_of_several_limits_takes_one_allocation() {
    let scopes: Vec<Scope> = (0..8).map(|i| Scope::named(&format!("limit-{i}"))).collect();
    let one = Quotas::from(Quota::per_minute(3));
    let two = Quota::per_minute(3).and(Quota::per_hour(5).staggered());
    let key = Key::from("k");
    for quotas in [one, two] {
        for count in 1..=8 {
            let clock = ManualClock::at_ms(NOW_MS);
            let store = MemoryStore::with_max_keys(1_000).clock(clock.clone());
            let lines: Vec<_> = scopes[..count]
                .iter()
                .map(|scope| (Account::new(scope, &quotas, &key), 1))
                .collect();
            let charge = || answer(store.charge(Charge::together(&lines)));
            // The table grows, and the counters are noted.
            assert!(charge().is_allowed());
            for hour in 0..2 {
                for allowed in [true, true, hour == 1, false] {
                    let mut passed = !allowed;
                    let counted = measure(|| passed = charge().is_allowed());
                    assert_eq!(passed, allowed);
                    assert!(counted.count_total <= 1, "{count} of {quotas}: {counted:?}");
                }
                clock.advance(Duration::from_secs(3_600));
            }
        }
    }
}

#[test]
#[should_panic(expected = "two lines of one scope")]
fn lines_of_one_scope_are_no_charge() {
    let (scope, quotas) = (Scope::named("one"), Quotas::from(Quota::per_minute(3)));
    let keys = [Key::from("a"), Key::from("b")];
    let lines = keys.each_ref().map(|key| (Account::new(&scope, &quotas, key), 1));
    let _ = Charge::together(&lines);
}

/// Of a third party's store elsewhere, which can charge them in one step.
fn far(store: impl Store) -> Limits {
    Limits::new([Quota::per_year(60).name("requests"), Quota::per_year(1_000).name("tokens")])
        .store(store)
}

fn check(limits: &Limits, tokens: u64) -> Result<Decision, StoreError> {
    let lines = [Line::new("requests", "acme", 1), Line::new("tokens", "acme", tokens)];
    block_on(limits.check(lines))
}

#[test]
fn what_is_known_of_one_limit_refuses_all_without_a_call() {
    let server = Server::start();
    let limits = far(server.node());
    assert!(check(&limits, 900).expect("it answers").is_allowed());
    assert_eq!(server.calls(), 1, "one step");
    let refused = check(&limits, 200).expect("it answers");
    assert!(refused.of("requests").expect("it took part").is_allowed());
    for _ in 0..100 {
        let refused = check(&limits, 200).expect("it is known");
        assert_eq!(refused.name(), "tokens");
        assert!(refused.of("requests").is_none() && refused.retry_at().is_some());
    }
    assert_eq!(server.calls(), 2);
    assert!(check(&limits, 100).expect("it answers").is_allowed(), "it is less");
    assert!(!check(&limits, 1).expect("it answers").is_allowed());
    block_on(limits.limiter("tokens").reset("acme")).expect("it answers");
    assert!(check(&limits, 200).expect("it answers").is_allowed(), "it was reset");
    let requests = block_on(limits.limiter("requests").peek("acme")).expect("it answers");
    assert_eq!(requests.used(), 3, "refusals took nothing");
}

#[test]
fn a_store_that_fails_stands_in_for_all_limits_or_for_none() {
    let server = Server::start();
    let store = server.node().deadline(Duration::from_secs(9));
    let here = far(store.clone());
    let nowhere = far(store.on_failure(OnStoreFailure::Deny));
    assert!(check(&here, 900).expect("it answers").is_allowed());
    for scope in ["requests", "tokens"] {
        server.fail(scope, true);
    }
    assert!(check(&nowhere, 1).is_err());
    for (tokens, passes) in [(900, true), (900, false), (100, true)] {
        let decision = check(&here, tokens).expect("memory answers");
        assert!(decision.is_local() && decision.limits().all(|(_, of)| of.is_local()));
        assert_eq!(decision.is_allowed(), passes, "{tokens}");
    }
    // Both limits of one step: the refused one took nothing of the other.
    let decision = check(&here, 0).expect("memory answers");
    assert_eq!(decision.of("requests").expect("it took part").used(), 3);
    let calls = server.calls();
    for _ in 0..20 {
        assert!(check(&here, 0).expect("memory answers").is_local());
    }
    assert!(server.calls() <= calls + 5, "the breaker opens");
}

/// The same decision, whether a store charges several limits in one step or in order.
#[test]
fn a_refused_reservation_names_the_limits_that_refuse_it() {
    for used in 0..=6 {
        for others in 0..=1 {
            let quotas: [(&str, Quotas); 3] = [
                ("hour", Quota::per_hour(1).reserve_up_to(5).into()),
                ("second", Quota::per_second(1).into()),
                ("day", Quota::per_day(3).and(Quota::per_week(9))),
            ];
            let together = limits(quotas);
            let memory = MemoryStore::new().clock(ManualClock::at_ms(NOW_MS));
            let in_order = Limits::new(quotas.map(|(name, of)| Limit::new(of).name(name)));
            let in_order = in_order.store(InOrder(memory));
            let decided = [together, in_order].map(|limits| {
                for _ in 0..used {
                    let _ = block_on(limits.limiter("hour").reserve("a", 1)).expect("memory");
                }
                for name in [&["second"][..], &["second", "day"]][others] {
                    let _ = block_on(limits.limiter(name).check("a")).expect("memory");
                }
                let lines = ["hour", "second", "day"].map(|name| Line::new(name, "a", 1));
                let refused = block_on(limits.reserve(lines)).expect("memory");
                refused.expect_err("a second has one").decision().clone()
            });
            assert_eq!(decided[0], decided[1], "{used} used");
            if used == 1 {
                assert_eq!(decided[1].name(), "second");
                assert_eq!(decided[1].retry_after(), Some(Duration::from_secs(1)));
                assert!(decided[1].of("hour").is_some_and(|of| of.is_allowed()));
            }
        }
    }
}
