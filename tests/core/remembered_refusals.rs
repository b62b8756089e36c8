//! Remembered refusals: no calls, the store's own decision, and never longer than the store would
//! refuse (S34).

use std::time::Duration;

use tokio::time::{advance, sleep};
use tower_fixed_window::store::{Account, Charge, Remote, Scope};
use tower_fixed_window::{
    Decision, Key, Limit, Limiter, Limits, Line, OnStoreFailure, Quota, Quotas,
};

use crate::simulated_server::Server;

const SECOND: Duration = Duration::from_secs(1);

/// Remembers refusals for as long as they are sure to be some.
fn limiter(node: &Remote, quotas: impl Into<Quotas>) -> Limiter {
    limiter_on(node.clone().remember_refusals(Duration::MAX), quotas)
}

fn limiter_on(node: Remote, quotas: impl Into<Quotas>) -> Limiter {
    Limit::new(quotas).name("far").store(node.on_failure(OnStoreFailure::Deny))
}

async fn check(limiter: &Limiter, cost: u64) -> Decision {
    match limiter.charge("alice", cost).await.expect("it answers") {
        Ok(receipt) => receipt.decision().clone(),
        Err(refused) => refused.decision().clone(),
    }
}

async fn allowed(limiter: &Limiter) -> bool {
    check(limiter, 1).await.is_allowed()
}

/// The calls for 1,000 refusals in a minute.
#[tokio::test(start_paused = true)]
async fn a_refused_key_is_asked_for_again_as_often_as_the_handle_says() {
    for (remember, calls) in [(None, 59), (Some(Duration::ZERO), 1_000), (Some(Duration::MAX), 1)] {
        let server = Server::start();
        let node = server.node();
        let node = match remember {
            Some(time) => node.remember_refusals(time),
            None => node,
        };
        let limiter = limiter_on(node, Quota::per_minute(5));
        for _ in 0..5 {
            assert!(allowed(&limiter).await);
        }
        for _ in 0..1_000 {
            assert!(!allowed(&limiter).await);
            advance(Duration::from_millis(59)).await;
        }
        assert_eq!(server.calls(), 5 + calls, "{remember:?}");
        advance(SECOND).await;
        assert!(allowed(&limiter).await);
        assert_eq!(server.calls(), 6 + calls);
    }
}

/// A fact is as old as it is, whatever the handle that has learned it remembers.
#[tokio::test(start_paused = true)]
async fn each_handle_judges_shared_refusals_by_its_own_setting() {
    let server = Server::start();
    let node = server.node();
    let [short, long] = [SECOND, Duration::MAX]
        .map(|time| limiter_on(node.clone().remember_refusals(time), Quota::per_minute(1)));
    assert!(allowed(&long).await && !allowed(&long).await);
    let calls = server.calls();
    advance(SECOND / 2).await;
    assert!(!allowed(&short).await && !allowed(&long).await);
    assert_eq!(server.calls(), calls);
    advance(SECOND).await;
    assert!(!allowed(&long).await);
    assert_eq!(server.calls(), calls);
    assert!(!allowed(&short).await && !allowed(&short).await);
    assert_eq!(server.calls(), calls + 1);
    advance(5 * SECOND).await;
    assert!(!allowed(&long).await);
    assert_eq!(server.calls(), calls + 1, "what another handle learned is remembered for long");
}

/// Real time by a second, and the store's by a minute.
#[tokio::test(start_paused = true)]
async fn a_store_whose_clock_is_set_is_asked_again_after_a_second() {
    let server = Server::start();
    let limiter = limiter_on(server.node(), Quota::per_minute(1));
    assert!(allowed(&limiter).await && !allowed(&limiter).await);
    server.step(60_000);
    advance(SECOND).await;
    assert!(allowed(&limiter).await);
}

#[tokio::test(start_paused = true)]
async fn a_remembered_refusal_equals_the_stores_answer() {
    let server = Server::start();
    let quotas = Quota::per_minute(100).and(Quota::per_hour(120));
    let limiter = limiter(&server.node(), quotas);
    let truth = |cost| truth(&server, &quotas, cost, false);
    sleep(7 * SECOND).await;
    assert!(check(&limiter, 95).await.is_allowed());
    assert!(!check(&limiter, 10).await.is_allowed());
    sleep(3 * SECOND).await;
    let calls = server.calls();
    let known = check(&limiter, 10).await;
    assert_eq!(known, truth(10));
    assert_eq!((known.used(), known.remaining(), known.limit()), (95, 5, 100));
    assert_eq!(known.retry_after(), Some(50 * SECOND));
    // The longer window refuses a cost that exceeds all that is left of it.
    let larger = check(&limiter, 30).await;
    assert_eq!((larger.limit(), &larger), (120, &truth(30)));
    // No window is large enough.
    let never = check(&limiter, 1_000).await;
    assert!(never.retry_at().is_none());
    assert_eq!(never, truth(1_000));
    assert_eq!(server.calls(), calls, "all that without asking");
}

/// A charge, whether it passes, and whether the store is asked.
type Asked = (Quota, u64, bool, bool);

/// S5, S10.
#[tokio::test(start_paused = true)]
async fn what_may_pass_calls_the_store_and_what_can_not_does_not() {
    let minute = Quota::per_minute;
    let reserves = minute(10).reserve_up_to(5);
    let cases: [(&str, &[Asked]); 4] = [
        (
            "a raised limit, and a lower one again",
            &[
                (minute(1), 1, true, true),
                (minute(1), 1, false, true),
                (minute(2), 1, true, true),
                (minute(2), 1, false, true),
                (minute(1), 1, false, false),
            ],
        ),
        (
            "a smaller cost",
            &[
                (minute(10), 6, true, true),
                (minute(10), 5, false, true),
                (minute(10), 6, false, false),
                (minute(10), 4, true, true),
            ],
        ),
        (
            "a lowered limit leaves no debt",
            &[
                (minute(100), 90, true, true),
                (minute(10), 1, false, true),
                (minute(10), 1, false, false),
                (minute(10), 2, false, true),
                (minute(10), 2, false, false),
            ],
        ),
        (
            "a reservation above the debt that is left",
            &[
                (reserves, 12, true, true),
                (reserves, 4, false, true),
                (reserves, 4, false, false),
                (reserves, 3, true, true),
            ],
        ),
    ];
    for (what, charges) in cases {
        let server = Server::start();
        let node = server.node();
        for (i, &(quota, cost, passes, asks)) in charges.iter().enumerate() {
            let (limiter, calls) = (limiter(&node, quota), server.calls());
            let decision = match quota.max_reserved() {
                0 => check(&limiter, cost).await,
                _ => reserved(&limiter, cost).await,
            };
            let found = (decision.is_allowed(), server.calls() > calls);
            assert_eq!(found, (passes, asks), "{what}: charge {i}");
            if quota.max_reserved() == 0 && !passes {
                assert_eq!(decision.retry_after(), Some(60 * SECOND), "{what}: charge {i}");
            }
        }
    }
}

/// S34: one in debt that asks for another cost each time, and under two plans, too.
#[tokio::test(start_paused = true)]
async fn a_refused_key_of_many_costs_is_asked_for_a_few_times() {
    let (debt, rollover) = (Quota::per_minute(10), Quota::per_minute(10).rollover_up_to(100));
    for (quota, taken) in [(debt, 10), (rollover, 100)] {
        let (server, quotas) = (Server::start(), quota.into());
        let node = server.node();
        let [limiter, other] = [quota, Quota::per_minute(9)].map(|of| limiter_on(node.clone(), of));
        let receipt = limiter.charge("alice", taken).await.expect("it answers").expect("it passes");
        limiter.settle(receipt, taken + 25).await.expect("it answers");
        for least in [1, 5] {
            let calls = server.calls();
            for cost in (0..100).map(|i| least + i % 10) {
                assert_eq!(check(&limiter, cost).await, truth(&server, &quotas, cost, false));
                assert!(!check(&other, cost).await.is_allowed());
            }
            assert!(server.calls() <= calls + 4, "{} calls", server.calls() - calls);
            advance(SECOND).await;
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_reset_or_refund_in_this_process_applies_at_once() {
    let server = Server::start();
    let node = server.node();
    let (one, other) = (limiter(&node, Quota::per_minute(1)), limiter(&node, Quota::per_minute(1)));
    let receipt = one.charge("alice", 1).await.expect("it answers").expect("it passes");
    assert!(!allowed(&one).await);
    other.reset("alice").await.expect("it answers");
    assert!(allowed(&one).await && !allowed(&one).await);
    other.refund(receipt).await.expect("it answers");
    assert!(allowed(&one).await && !allowed(&one).await);
}

#[tokio::test(start_paused = true)]
async fn a_reset_clears_refusals_remembered_under_other_quotas() {
    let server = Server::start();
    let node = server.node();
    let (one, other) = (limiter(&node, Quota::per_minute(9)), limiter(&node, Quota::per_day(9)));
    let plans: [Quotas; 2] =
        [Quota::per_hour(1).into(), Quota::per_hour(1).staggered().and(Quota::per_week(2))];
    let check =
        async |plan| one.with_quotas(plan).check("alice").await.expect("it answers").is_allowed();
    for plan in plans {
        assert!(check(plan).await && !check(plan).await && !check(plan).await);
    }
    other.reset("alice").await.expect("it answers");
    for plan in plans {
        assert!(check(plan).await, "{plan}");
    }
}

#[tokio::test(start_paused = true)]
async fn refusals_under_any_number_of_names_are_remembered() {
    const NAMES: u64 = 1_100;
    let server = Server::start();
    let node = server.node();
    for n in 0..NAMES {
        let tenant = Quota::per_minute(1).name(&format!("tenant-{n}")).store(node.clone());
        assert!(allowed(&tenant).await && !allowed(&tenant).await && !allowed(&tenant).await);
    }
    assert_eq!(server.calls(), 2 * NAMES);
}

#[tokio::test(start_paused = true)]
async fn the_number_of_remembered_refusals_is_bounded() {
    const KEYS: u64 = 200_000;
    let server = Server::start();
    let limiter = limiter(&server.node(), Quota::per_minute(0));
    let check = async |n: u64| limiter.check(n).await.expect("it answers").is_allowed();
    for n in 0..KEYS {
        assert!(!check(n).await);
    }
    assert_eq!(server.calls(), KEYS);
    // From the last one on: those that found no room took that of others.
    for n in (0..KEYS).rev() {
        assert!(!check(n).await);
    }
    let remembered = 2 * KEYS - server.calls();
    assert!((1_000..=65_536).contains(&remembered), "{remembered}");
}

#[tokio::test(start_paused = true)]
async fn a_reset_clears_counts_of_the_fallback() {
    let server = Server::start();
    let node = server.node();
    let limiter = |quotas: Quota| Limit::new(quotas).name("far").store(node.clone());
    let (one, other) = (limiter(Quota::per_minute(1)), limiter(Quota::per_hour(1)));
    let check = async || one.check("alice").await.expect("it answers").is_allowed();
    server.fail("far", true);
    assert!(check().await && !check().await);
    server.fail("far", false);
    other.reset("alice").await.expect("it answers");
    server.fail("far", true);
    assert!(check().await && !check().await, "once for all of the store's clones");
}

/// Resets a key on another node, and returns how long this node still refuses it.
async fn refuses_after_reset(limiter: &Limiter, server: &Server) -> Duration {
    while allowed(limiter).await {}
    let there = self::limiter(&server.node(), quotas_of(limiter));
    there.reset("alice").await.expect("it answers");
    let start = tokio::time::Instant::now();
    while !allowed(limiter).await {
        sleep(Duration::from_millis(10)).await;
    }
    start.elapsed()
}

#[tokio::test(start_paused = true)]
async fn a_reset_by_another_process_applies_within_a_second_or_when_the_refusal_ends() {
    let server = Server::start();
    for (node, most) in [
        (server.node(), SECOND),
        (server.node().remember_refusals(Duration::ZERO), Duration::ZERO),
        (server.node().remember_refusals(Duration::MAX), 60 * SECOND),
    ] {
        let limiter = limiter_on(node, Quota::per_minute(1));
        // The next window has just begun.
        let since_turn = tokio::time::Instant::now();
        let took = refuses_after_reset(&limiter, &server).await;
        assert!(took <= most && took >= most.saturating_sub(SECOND / 20), "{took:?}");
        sleep((60 * SECOND).saturating_sub(since_turn.elapsed())).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_refusal_decided_before_a_reset_is_not_remembered_after_it() {
    for count in [1, 2] {
        let server = Server::start();
        let limits = [Quota::per_minute(1).name("far"), Quota::per_day(9).name("all")];
        let limits = Limits::new(limits.into_iter().take(count)).store(server.node());
        let lines = &["far", "all"].map(|name| Line::new(name, "alice", 1))[..count];
        assert!(limits.check(lines).await.expect("it answers").is_allowed());
        // The refusal is on its way back while the reset is sent and answered.
        server.slow(0, 200);
        let refused = tokio::spawn(limits.check(lines));
        sleep(Duration::from_millis(1)).await;
        server.slow(0, 0);
        limits.limiter("far").reset("alice").await.expect("it answers");
        assert!(!refused.await.expect("no panic").expect("it answers").is_allowed());
        assert!(limits.check(lines).await.expect("it answers").is_allowed());
    }
}

#[tokio::test(start_paused = true)]
async fn a_reset_whose_future_is_dropped_still_applies() {
    let server = Server::start();
    let limiter = limiter(&server.node(), Quota::per_minute(1));
    assert!(allowed(&limiter).await && !allowed(&limiter).await);
    server.slow(10, 100);
    let reset = tokio::spawn(limiter.reset("alice"));
    sleep(Duration::from_millis(5)).await;
    server.slow(0, 0);
    assert!(!allowed(&limiter).await, "not there yet");
    sleep(Duration::from_millis(50)).await;
    reset.abort();
    assert!(reset.await.expect_err("given up").is_cancelled());
    assert!(allowed(&limiter).await);
}

#[tokio::test(start_paused = true)]
async fn a_true_cost_that_raises_a_count_changes_the_remembered_times_at_once() {
    let server = Server::start();
    let limiter = limiter(&server.node(), Quota::per_minute(3));
    let receipt = limiter.charge("alice", 1).await.expect("it answers").expect("it passes");
    assert_eq!(check(&limiter, 3).await.retry_after(), Some(60 * SECOND));
    limiter.settle(receipt, 10).await.expect("it answers");
    let told = check(&limiter, 3).await;
    assert_eq!((told.used(), told.retry_after()), (10, Some(4 * 60 * SECOND)));
    assert_eq!(check(&limiter, 1).await, truth(&server, &quotas_of(&limiter), 1, false));
}

/// Half a second before the hour ends. 5 tokens would be covered in the next minute, after the end
/// of the hour that counts them; 20 are covered in later windows of both.
#[tokio::test(start_paused = true)]
async fn a_larger_reservation_that_may_pass_asks_the_store() {
    let server = Server::start();
    let hour = Quota::per_hour(600).reserve_up_to(600);
    sleep(Duration::from_millis(59 * 60_000 + 59_500)).await;
    let both = limiter(&server.node(), Quota::per_minute(10).reserve_up_to(1_000).and(hour));
    assert!(check(&limiter(&server.node(), hour), 580).await.is_allowed());
    assert!(check(&both, 10).await.is_allowed());

    assert!(!reserved(&both, 5).await.is_allowed());
    let calls = server.calls();
    assert!(!reserved(&both, 5).await.is_allowed());
    assert_eq!(server.calls(), calls, "the refusal is remembered");
    assert!(reserved(&both, 20).await.is_allowed());
    assert_eq!(server.calls(), calls + 1, "the store grants it");
    assert_eq!(truth(&server, &quotas_of(&both), 0, false).usage()[1].used(), 610);
}

/// S4: the count that the step back has moved lasts from there on.
#[tokio::test(start_paused = true)]
async fn what_is_remembered_moves_once_when_the_stores_clock_steps_back() {
    let server = Server::start();
    sleep(60 * SECOND).await;
    let limiter = limiter(&server.node(), Quota::per_second(10).reserve_up_to(50));
    assert!(check(&limiter, 9).await.is_allowed() && !check(&limiter, 5).await.is_allowed());
    assert!(allowed(&limiter).await && reserved(&limiter, 5).await.is_allowed());
    server.step(-9_100);
    assert_eq!(check(&limiter, 0).await.used(), 15);
    sleep(Duration::from_millis(300)).await;
    assert_eq!(check(&limiter, 1).await.used(), 6);
}

#[tokio::test(start_paused = true)]
async fn peeks_call_the_store() {
    let server = Server::start();
    let limiter = limiter(&server.node(), Quota::per_minute(1));
    assert!(allowed(&limiter).await && !allowed(&limiter).await);
    let calls = server.calls();
    assert!(!limiter.peek("alice").await.expect("it answers").is_allowed());
    assert_eq!(server.calls(), calls + 1);
}

#[tokio::test(start_paused = true)]
async fn during_an_outage_remembered_refusals_hold_and_those_of_the_fallback_are_not_remembered() {
    let server = Server::start();
    let node = server.node();
    let limiter = Quota::per_minute(1).name("far").store(node.clone());
    let spent = async |key| !limiter.check(key).await.expect("it answers").is_allowed();
    assert!(!spent("alice").await && spent("alice").await);
    server.fail("far", true);
    assert!(spent("alice").await, "not asked anew in memory");
    assert!(!spent("bob").await && spent("bob").await, "counted in memory");
    server.fail("far", false);
    advance(SECOND).await;
    assert!(!spent("bob").await, "the store has not refused bob");
}

fn quotas_of(limiter: &Limiter) -> Quotas {
    *limiter.quotas().expect("no plans").quotas().expect("a limit")
}

async fn reserved(limiter: &Limiter, cost: u64) -> Decision {
    match limiter.reserve("alice", cost).await.expect("it answers") {
        Ok(receipt) => receipt.decision().clone(),
        Err(refused) => refused.decision().clone(),
    }
}

/// 80 tokens under 100 a minute; then 1 an hour and 10 a minute refuse together.
#[tokio::test(start_paused = true)]
async fn a_refusal_under_one_plan_does_not_outlast_the_count_under_another() {
    let server = Server::start();
    let node = server.node();
    assert!(check(&limiter(&node, Quota::per_minute(100)), 80).await.is_allowed());
    assert!(allowed(&limiter(&node, Quota::per_hour(1))).await);
    let both = limiter(&node, Quota::per_hour(1).and(Quota::per_minute(10)));
    assert!(!allowed(&both).await);
    sleep(60 * SECOND).await;
    assert!(allowed(&limiter(&node, Quota::per_minute(10))).await, "the minute is over");
}

/// The clocks tick at different instants: the store's a tenth of a millisecond before this
/// process's.
#[tokio::test(start_paused = true)]
async fn a_remembered_refusal_ends_before_the_next_window_begins() {
    const TENTH: Duration = Duration::from_micros(100);
    let minute = Quota::per_minute(1);
    // The first refuses until the end of the minute, the second for longer.
    for first in [Quotas::from(minute), minute.and(Quota::per_hour(1))] {
        let server = Server::start();
        advance(TENTH).await;
        let node = server.node();
        let (first, limiter) = (limiter(&node, first), limiter(&node, minute));
        advance(4 * TENTH).await;
        assert!(allowed(&first).await && !allowed(&first).await);
        advance(60 * SECOND - 6 * TENTH).await;
        assert!(!allowed(&limiter).await, "a tenth before the next window");
        advance(TENTH).await;
        assert!(allowed(&limiter).await, "in its first instant");
    }
}

/// The server's own decision, without delay.
fn truth(server: &Server, quotas: &Quotas, cost: u64, reserve: bool) -> Decision {
    let (scope, key) = (Scope::named("far"), Key::from("alice"));
    let charge = Charge::new(Account::new(&scope, quotas, &key), cost).peeking();
    server.decide(if reserve { charge.reserving() } else { charge })
}
