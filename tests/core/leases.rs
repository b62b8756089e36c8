//! Leases: fewer calls, never above the limit, early by no more than the bound (S34).

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, mpsc};
use std::thread;
use std::time::{Duration, SystemTime};

use fastrand::Rng;
use harness::{Operation, TokioClock, forward_to_memory};
use tokio::runtime::Handle;
use tokio::task::{JoinSet, yield_now};
use tokio::time::{Instant, sleep, timeout};
use tower_fixed_window::store::{Adjust, Charge, Remote, Reply, Scope, Store};
use tower_fixed_window::{
    Decision, Key, Limit, Limiter, MemoryStore, OnStoreFailure, Quota, Quotas,
};

use crate::simulated_server::{Node, Server, TURN, paused};
use crate::sized;

const MS: Duration = Duration::from_millis(1);
const SECOND: Duration = Duration::from_secs(1);

fn limiter(node: &Node, quotas: impl Into<Quotas>, max: u64) -> Limiter {
    Limit::new(quotas).name("far").store(node.clone().on_failure(OnStoreFailure::Deny).leases(max))
}

async fn check(limiter: &Limiter) -> Decision {
    limiter.check("alice").await.expect("it answers")
}

/// Sends requests one by one until leases have their full size.
async fn warm_up(limiter: &Limiter, requests: u64) {
    for _ in 0..requests {
        assert!(check(limiter).await.allowed());
    }
}

#[tokio::test(start_paused = true)]
async fn one_call_serves_many_requests_of_a_hot_key() {
    let server = Server::start();
    let limiter = limiter(&server.node(), Quota::per_minute(10_000), 100);
    let mut passed = 0;
    while check(&limiter).await.allowed() {
        passed += 1;
    }
    assert_eq!(passed, 10_000, "a node alone loses nothing");
    // The leases have 1, 2, 4 .. 64, then 100 tokens, and fewer as the limit comes near.
    assert!(server.calls() < 200, "{} calls", server.calls());
    let calls = server.calls();
    assert!(!check(&limiter).await.allowed());
    assert_eq!(server.calls(), calls);
}

#[tokio::test(start_paused = true)]
async fn used_includes_leased_tokens() {
    let server = Server::start();
    let limiter = limiter(&server.node(), Quota::per_minute(1_000), 100);
    let mut told = Vec::new();
    for _ in 0..15 {
        let decision = check(&limiter).await;
        assert_eq!(decision.used() + decision.remaining(), decision.limit());
        told.push(decision.used());
    }
    assert_eq!(told, [1, 3, 3, 7, 7, 7, 7, 15, 15, 15, 15, 15, 15, 15, 15]);
    assert_eq!(limiter.peek("alice").await.expect("it answers").used(), 15);
}

#[tokio::test(start_paused = true)]
async fn concurrent_requests_share_one_call() {
    let server = Server::start();
    server.slow(1, 5..=5, 5..=5);
    let limiter = limiter(&server.node(), Quota::per_minute(1_000), 100);
    let mut tasks: JoinSet<_> = (0..64)
        .map(|_| {
            let limiter = limiter.clone();
            async move { check(&limiter).await }
        })
        .collect();
    while let Some(decision) = tasks.join_next().await {
        assert!(decision.expect("no panic").allowed());
    }
    assert_eq!(server.calls(), 1, "tokens for all who wait");
    assert_eq!(limiter.peek("alice").await.expect("it answers").used(), 64, "and none but these");
}

#[tokio::test(start_paused = true)]
async fn a_lease_that_is_too_small_is_followed_by_another_and_a_refusal_answers_all_waiters() {
    let server = Server::start();
    server.slow(1, 5..=5, 5..=5);
    let limiter = limiter(&server.node(), Quota::per_minute(40), 100);
    let mut tasks: JoinSet<_> = (0..64)
        .map(|_| {
            let limiter = limiter.clone();
            async move { check(&limiter).await.allowed() }
        })
        .collect();
    let mut passed = 0;
    while let Some(allowed) = tasks.join_next().await {
        passed += u64::from(allowed.expect("no panic"));
    }
    assert_eq!((passed, server.calls()), (40, 2));
}

/// Sends this many concurrent requests, and returns how many pass.
async fn crowd(limiter: &Limiter, requests: usize) -> usize {
    let ask = |limiter: Limiter| async move { check(&limiter).await.allowed() };
    let tasks: JoinSet<_> = (0..requests).map(|_| ask(limiter.clone())).collect();
    tasks.join_all().await.into_iter().filter(|allowed| *allowed).count()
}

#[tokio::test(start_paused = true)]
async fn requests_that_share_a_call_get_what_another_node_has_left() {
    let server = Server::start();
    let there = limiter(&server.node(), Quota::per_minute(40), 0);
    assert!(there.check_cost("alice", 37).await.expect("it answers").allowed());
    let here = limiter(&server.node(), Quota::per_minute(40), 100);
    assert_eq!(crowd(&here, 20).await, 3);
}

/// A store in memory that notes its charges: how many tokens, and whether fewer would do.
#[derive(Clone)]
struct Noting {
    memory: MemoryStore,
    asked: Arc<Mutex<Vec<(u64, bool)>>>,
}

impl Store for Noting {
    fn charge(&self, charge: Charge<'_>) -> Reply<Decision> {
        self.asked.lock().expect("no panic").push((charge.cost(), charge.is_up_to()));
        self.memory.charge(charge)
    }

    fn adjust(&self, adjust: Adjust<'_>) -> Reply<()> {
        self.memory.adjust(adjust)
    }

    fn reset(&self, scope: &Scope, key: &Key) -> Reply<()> {
        self.memory.reset(scope, key)
    }
}

/// A charge for all tokens or none is the simpler one.
#[tokio::test(start_paused = true)]
async fn fewer_tokens_are_asked_for_where_not_all_may_be_left() {
    // More than half of the tokens that seem to be left; and a single token is all or none.
    let cases =
        [(20, vec![(20, false)]), (21, vec![(21, true)]), (40, vec![(40, true), (1, false)])];
    for (requests, asks) in cases {
        let memory = MemoryStore::new().clock(TokioClock::at_ms(TURN));
        let store = Noting { memory, asked: Arc::default() };
        let limit = Quota::per_minute(40).name("far");
        let limiter = limit.store(Remote::around(store.clone()).leases(100));
        assert_eq!(crowd(&limiter, requests).await, requests);
        assert_eq!(crowd(&limiter, 1).await, usize::from(requests < 40));
        let asked = store.asked.lock().expect("no panic");
        assert_eq!(asked[..asks.len()], asks);
    }
}

#[tokio::test(start_paused = true)]
async fn requests_under_different_limits_do_not_share_a_call() {
    let server = Server::start();
    let limiter = limiter(&server.node(), Quota::per_minute(1_000), 100);
    let there = self::limiter(&server.node(), Quota::per_minute(1_000), 0);
    assert!(there.check_cost("alice", 100).await.expect("it answers").allowed());
    server.slow(1, 5..=5, 5..=5);
    let lowered = limiter.with_quotas(Quota::per_minute(32));
    let (passed, refused) = tokio::join!(check(&limiter), check(&lowered));
    assert_eq!((passed.allowed(), passed.limit()), (true, 1_000));
    assert_eq!((refused.allowed(), refused.limit()), (false, 32));
}

/// A limit of 31 is too low for leases, and a lease of one token is none.
#[tokio::test(start_paused = true)]
async fn concurrent_requests_without_leases_have_a_call_each() {
    for (limit, max) in [(31, 100), (1_000, 1)] {
        let server = Server::start();
        server.slow(1, 5..=5, 5..=5);
        let limiter = limiter(&server.node(), Quota::per_minute(limit), max);
        let ask = |limiter: Limiter| async move { check(&limiter).await.used() };
        let tasks: JoinSet<_> = (0..8).map(|_| ask(limiter.clone())).collect();
        let mut used = tasks.join_all().await;
        used.sort_unstable();
        assert_eq!((used, server.calls()), ((1..=8).collect(), 8), "{limit}, {max}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_dropped_waiter_does_not_block_the_others() {
    let server = Server::start();
    server.slow(1, 5..=5, 5..=5);
    let limiter = limiter(&server.node(), Quota::per_minute(1_000), 100);
    let ask = || {
        let limiter = limiter.clone();
        tokio::spawn(async move { check(&limiter).await.allowed() })
    };
    let first = ask();
    sleep(MS).await;
    let second = ask();
    yield_now().await;
    first.abort();
    assert!(second.await.expect("no panic"));
    assert_eq!(server.calls(), 1, "the token of the first is the second's");
}

#[tokio::test(start_paused = true)]
async fn a_store_error_is_handled_by_the_policy_of_each_waiter() {
    let server = Server::start();
    server.set_down(true);
    let node = server.node();
    let strict = limiter(&node, Quota::per_minute(40), 100);
    let local = Quota::per_minute(40).name("far").store(node.leases(100));
    let (failed, answered) = tokio::join!(strict.check("alice"), local.check("alice"));
    assert!(failed.is_err());
    assert!(answered.expect("memory answers").is_local());
    let mut passed = 1;
    while local.check("alice").await.expect("memory answers").allowed() {
        passed += 1;
    }
    assert_eq!(passed, 40, "one further limit, request by request");
}

/// A store in memory that panics when it is called for the first time.
struct Panicking {
    memory: MemoryStore,
    was_called: AtomicBool,
}

impl Panicking {
    fn forward<T>(&self, _: Operation, ask: impl FnOnce(&MemoryStore) -> Reply<T>) -> Reply<T> {
        assert!(self.was_called.swap(true, Ordering::SeqCst), "a mistake in the store");
        ask(&self.memory)
    }
}

forward_to_memory!(Panicking, {});

#[tokio::test(start_paused = true)]
async fn a_store_that_panics_fails_the_requests_that_wait_and_none_after_them() {
    let memory = MemoryStore::new().clock(TokioClock::at_ms(TURN));
    let store = Remote::around(Panicking { memory, was_called: AtomicBool::new(false) });
    let store = store.deadline(Duration::MAX).on_failure(OnStoreFailure::Deny).leases(100);
    let limiter = Quota::per_minute(1_000).name("far").store(store);
    assert!(limiter.check("alice").await.is_err());
    let next = timeout(SECOND, check(&limiter)).await;
    assert!(next.expect("it does not wait for the task that panicked").allowed());
}

#[tokio::test(start_paused = true)]
async fn no_request_waits_for_more_than_one_failed_call() {
    let server = Server::start();
    server.slow(1, 10_000..=10_000, 0..=0);
    let limiter = limiter(&server.node(), Quota::per_minute(1_000), 100);
    let ask = || {
        let limiter = limiter.clone();
        async move { limiter.check("alice").await.map(|decision| decision.allowed()) }
    };
    let start = Instant::now();
    let first = tokio::spawn(ask());
    sleep(200 * MS).await;
    assert!(ask().await.is_err() && first.await.expect("no panic").is_err());
    assert!(start.elapsed() < 260 * MS, "the deadline of the first");
}

#[tokio::test(start_paused = true)]
async fn leased_tokens_may_be_spent_while_the_store_is_down() {
    let server = Server::start();
    let limiter = limiter(&server.node(), Quota::per_minute(1_000), 100);
    warm_up(&limiter, 8).await;
    server.set_down(true);
    // The last lease was of 8.
    warm_up(&limiter, 7).await;
    assert!(limiter.check("alice").await.is_err());
}

#[tokio::test(start_paused = true)]
async fn a_lease_ends_with_the_window_in_which_it_was_requested() {
    let server = Server::start();
    let limiter = limiter(&server.node(), Quota::per_minute(1_000), 100);
    sleep(59 * SECOND + 900 * MS).await;
    warm_up(&limiter, 7).await;
    // The reply to the next call takes 40 ms: it arrives 60 ms or 20 ms before the end of the
    // window.
    server.slow(1, 0..=0, 40..=40);
    assert!(check(&limiter).await.allowed());
    server.slow(1, 0..=0, 0..=0);
    let calls = server.calls();
    sleep(58 * MS).await;
    assert!(check(&limiter).await.allowed());
    assert_eq!(server.calls(), calls, "in its window");
    sleep(2 * MS).await;
    let decision = check(&limiter).await;
    assert_eq!((server.calls(), decision.used()), (calls + 1, 16), "in the next");
}

#[tokio::test(start_paused = true)]
async fn a_lease_is_used_after_the_limit_is_raised_but_not_after_it_is_lowered() {
    let server = Server::start();
    let limiter = limiter(&server.node(), Quota::per_minute(1_000), 100);
    warm_up(&limiter, 32).await;
    let calls = server.calls();
    // 63 tokens are taken, 31 of them leased and unused.
    let lowered = limiter.with_quotas(Quota::per_minute(50));
    assert!(!check(&lowered).await.allowed());
    let lowered = limiter.with_quotas(Quota::per_minute(500));
    assert!(check(&lowered).await.used() > 63);
    assert_eq!(server.calls(), calls + 2);
    // Tokens leased under the higher limit are still there, beside those taken under the lower one.
    let raised = limiter.with_quotas(Quota::per_minute(2_000));
    let leased = raised.peek("alice").await.expect("it answers").used() - 33;
    assert!(leased > 31, "{leased}");
    for _ in 0..leased {
        assert_eq!(check(&raised).await.limit(), 2_000);
    }
    assert_eq!(server.calls(), calls + 3, "the peek is one");
}

#[tokio::test(start_paused = true)]
async fn a_lease_from_before_a_reset_by_another_process_does_not_enlarge_the_next_one() {
    let server = Server::start();
    let quota = Quota::per_minute(1_000).from_first_request();
    let limiter = limiter(&server.node(), quota, 100);
    warm_up(&limiter, 32).await;
    self::limiter(&server.node(), quota, 0).reset("alice").await.expect("it answers");
    sleep(MS).await;
    // The 31 leased tokens can't be spent under the lower limit, and are of a window that is gone.
    let lowered = limiter.with_quotas(quota.with_limit(500));
    assert_eq!(check(&lowered).await.used(), 27);
    let calls = server.calls();
    warm_up(&limiter, 26).await;
    assert_eq!(server.calls(), calls);
    warm_up(&limiter, 1).await;
    assert_eq!(server.calls(), calls + 1);
}

#[tokio::test(start_paused = true)]
async fn a_lease_larger_than_its_share_is_reduced_to_it() {
    let server = Server::start();
    let limiter = limiter(&server.node(), Quota::per_minute(1_000), 100);
    warm_up(&limiter, 31).await;
    let there = self::limiter(&server.node(), Quota::per_minute(1_000), 0);
    assert!(there.check_cost("alice", 900).await.expect("it answers").allowed());
    // 32 of 69 tokens could be taken: a 16th of that is 4.
    assert!(check(&limiter).await.allowed());
    sleep(MS).await;
    assert_eq!(limiter.peek("alice").await.expect("it answers").used(), 931 + 4);
}

#[tokio::test(start_paused = true)]
async fn a_reset_in_this_process_ends_the_lease() {
    let server = Server::start();
    let limiter = limiter(&server.node(), Quota::per_minute(100), 100);
    warm_up(&limiter, 4).await;
    limiter.reset("alice").await.expect("it answers");
    let mut passed = 0;
    while check(&limiter).await.allowed() {
        passed += 1;
    }
    assert_eq!(passed, 100);
}

#[tokio::test(start_paused = true)]
async fn a_reset_by_a_limiter_with_other_quotas_ends_the_lease() {
    let server = Server::start();
    let node = server.node();
    let limiter = limiter(&node, Quota::per_minute(100), 100);
    warm_up(&limiter, 4).await;
    let other = self::limiter(&node, Quota::per_day(1), 0);
    other.reset("alice").await.expect("it answers");
    let mut passed = 0;
    while check(&limiter).await.allowed() {
        passed += 1;
    }
    assert_eq!(passed, 100);
}

#[tokio::test(start_paused = true)]
async fn a_lease_from_before_a_reset_is_not_spent_after_it() {
    let server = Server::start();
    let limiter = limiter(&server.node(), Quota::per_minute(100), 100);
    warm_up(&limiter, 7).await;
    // Six more requests are in flight while the reset is sent and answered.
    server.slow(1, 0..=0, 20..=20);
    let asked = tokio::spawn(limiter.check("alice"));
    sleep(MS).await;
    server.slow(1, 0..=0, 0..=0);
    limiter.reset("alice").await.expect("it answers");
    assert!(asked.await.expect("no panic").expect("it answers").allowed());
    let mut passed = 0;
    while check(&limiter).await.allowed() {
        passed += 1;
    }
    assert_eq!(passed, 100);
}

#[tokio::test(start_paused = true)]
async fn unused_leased_tokens_are_returned() {
    let server = Server::start();
    let limiter = limiter(&server.node(), Quota::per_minute(1_000), 100);
    warm_up(&limiter, 8).await;
    let used = async || limiter.peek("alice").await.expect("it answers").used();
    assert_eq!(used().await, 15);
    sleep(3 * SECOND).await;
    assert_eq!(used().await, 15, "it may still be spent");
    sleep(SECOND).await;
    assert_eq!(used().await, 8);
    // The next lease is small, and needs a call.
    let calls = server.calls();
    assert!(check(&limiter).await.allowed());
    assert_eq!(server.calls(), calls + 1);
    assert_eq!(used().await, 12);
}

#[tokio::test(start_paused = true)]
async fn unused_leased_tokens_of_a_window_that_has_ended_are_not_returned() {
    let server = Server::start();
    let limiter = limiter(&server.node(), Quota::per_minute(1_000), 100);
    sleep(59 * SECOND).await;
    warm_up(&limiter, 8).await;
    sleep(2 * SECOND).await;
    let there = self::limiter(&server.node(), Quota::per_minute(1_000), 0);
    assert!(there.check_cost("alice", 20).await.expect("it answers").allowed());
    sleep(4 * SECOND).await;
    assert_eq!(there.peek("alice").await.expect("it answers").used(), 20);
}

#[tokio::test(start_paused = true)]
async fn unused_leased_tokens_of_a_short_window_do_not_wait_for_those_of_a_long_one() {
    let server = Server::start();
    let node = server.node();
    let (long, short) = (
        limiter(&node, Quota::per_hour(1_000), 100),
        limiter(&node, Quota::per_minute(1_000), 100),
    );
    warm_up(&long, 8).await;
    warm_up(&short, 8).await;
    sleep(4 * SECOND).await;
    let used = async |limiter: &Limiter| limiter.peek("alice").await.expect("it answers").used();
    assert_eq!((used(&long).await, used(&short).await), (15, 8));
}

#[tokio::test(start_paused = true)]
async fn few_tasks_look_after_the_leases_of_many_keys() {
    let server = Server::start();
    let limiter = limiter(&server.node(), Quota::new(100_000, SECOND), 100);
    let ask = |key: u64| {
        let limiter = limiter.clone();
        async move {
            for _ in 0..20 {
                assert!(limiter.check(key).await.expect("it answers").allowed());
            }
        }
    };
    for _ in 0..100 {
        (0..20).map(ask).collect::<JoinSet<_>>().join_all().await;
        sleep(5 * MS).await;
    }
    let tasks = Handle::current().metrics().num_alive_tasks();
    assert!(tasks < 10, "{tasks}");
}

#[tokio::test(start_paused = true)]
async fn a_renewed_lease_is_returned_when_it_was_unused_for_a_while_itself() {
    let server = Server::start();
    // A 16th of the window is a second.
    let limiter = limiter(&server.node(), Quota::new(10_000, 16 * SECOND), 100);
    warm_up(&limiter, 8).await;
    sleep(600 * MS).await;
    // The eighth of these comes from another lease.
    warm_up(&limiter, 8).await;
    let calls = server.calls();
    sleep(600 * MS).await;
    assert!(check(&limiter).await.allowed());
    assert_eq!(server.calls(), calls, "a second after the first lease it is still there");
    sleep(500 * MS).await;
    assert_eq!(server.calls(), calls + 1, "a second after its own call it is returned");
    assert_eq!(limiter.peek("alice").await.expect("it answers").used(), 17);
}

/// Ten seconds pass in a long window, since a 16th of a month would be two days.
#[tokio::test(start_paused = true)]
async fn unused_leased_tokens_of_a_month_are_returned_after_ten_seconds() {
    for quota in [Quota::per_month(1_000), Quota::per_week(1_000)] {
        let server = Server::start();
        let limiter = limiter(&server.node(), quota, 100);
        warm_up(&limiter, 8).await;
        let used = async || limiter.peek("alice").await.expect("it answers").used();
        sleep(9 * SECOND).await;
        assert_eq!(used().await, 15, "it may still be spent");
        sleep(2 * SECOND).await;
        assert_eq!(used().await, 8);
        // Tokens that were not used in time don't enlarge the next lease.
        assert!(check(&limiter).await.allowed());
        assert_eq!(used().await, 12);
    }
}

#[tokio::test(start_paused = true)]
async fn a_lease_pays_larger_costs_if_it_has_enough_tokens() {
    let server = Server::start();
    let limiter = limiter(&server.node(), Quota::per_minute(1_000), 100);
    warm_up(&limiter, 8).await;
    let calls = server.calls();
    let cost = async |cost| limiter.check_cost("alice", cost).await.expect("it answers");
    assert!(cost(u64::MAX).await.exceeds_capacity());
    let calls = calls + 1;
    assert_eq!(cost(3).await.granted(), 3);
    assert_eq!((cost(4).await.used(), server.calls()), (15, calls));
    let decision = cost(5).await;
    assert_eq!((decision.granted(), decision.used(), server.calls()), (5, 20, calls + 1));
}

#[tokio::test(start_paused = true)]
async fn a_request_without_cost_calls_the_store() {
    let server = Server::start();
    let limiter = limiter(&server.node(), Quota::per_minute(1_000), 100);
    warm_up(&limiter, 8).await;
    let there = self::limiter(&server.node(), Quota::per_minute(1_000), 0);
    assert!(there.check_cost("alice", 100).await.expect("it answers").allowed());
    let calls = server.calls();
    let decision = limiter.check_cost("alice", 0).await.expect("it answers");
    assert_eq!((decision.used(), server.calls()), (115, calls + 1));
}

#[tokio::test(start_paused = true)]
async fn only_reservations_that_may_take_tokens_of_later_windows_spend_no_leased_ones() {
    let server = Server::start();
    let quota = Quota::per_minute(1_000).reserve_up_to(20);
    warm_up(&limiter(&server.node(), quota, 100), 200).await;
    assert!(server.calls() < 20, "{} calls", server.calls());
    let reserve = async |limiter: &Limiter| limiter.reserve("alice", 1).await.expect("it answers");
    let plain = limiter(&server.node(), Quota::per_minute(1_000), 100);
    warm_up(&plain, 8).await;
    let calls = server.calls();
    assert!(reserve(&plain).await.is_ok());
    assert_eq!(server.calls(), calls);
    let (server, quota) = (Server::start(), Quota::per_minute(40).reserve_up_to(40));
    warm_up(&limiter(&server.node(), quota, 0), 40).await;
    let reserved = reserve(&limiter(&server.node(), quota, 100)).await.expect("it passes");
    assert_eq!(reserved.decision().ready_after(), 60 * SECOND);
}

#[tokio::test(start_paused = true)]
async fn a_refund_of_leased_tokens_goes_to_the_store() {
    let server = Server::start();
    let limiter = limiter(&server.node(), Quota::per_minute(1_000), 100);
    warm_up(&limiter, 8).await;
    let receipt = limiter.charge("alice", 1).await.expect("it answers").expect("it passes");
    limiter.refund(receipt).await.expect("it answers");
    assert_eq!(limiter.peek("alice").await.expect("it answers").used(), 14);
}

#[tokio::test(start_paused = true)]
async fn requests_that_leases_cannot_serve_call_the_store() {
    let server = Server::start();
    let node = server.node();
    let mut calls = 0;
    for quotas in [
        Quotas::from(Quota::per_minute(31)),
        Quota::per_minute(1_000).rollover_up_to(2_000).into(),
        Quota::per_minute(1_000).and(Quota::per_hour(10_000)),
    ] {
        let limiter = limiter(&node, quotas, 100);
        warm_up(&limiter, 20).await;
        calls += 20;
        assert_eq!(server.calls(), calls, "{quotas}");
        limiter.reset("alice").await.expect("it answers");
        calls += 1;
    }
}

#[test]
fn a_runtime_that_ends_leaves_no_waiter_blocked() {
    let limiter = paused(async {
        let server = Server::start();
        server.slow(1, 5..=5, 5..=5);
        let limiter = limiter(&server.node(), Quota::per_minute(1_000), 100);
        warm_up(&limiter, 8).await;
        // Requests are dropped in mid-flight, and so is the task that calls the store.
        let _ = timeout(MS, limiter.clone().check("bob")).await;
        limiter
    });
    paused(async { assert!(limiter.check("bob").await.expect("it answers").allowed()) });
}

#[tokio::test(start_paused = true)]
async fn after_a_reset_by_another_process_leases_report_the_new_count() {
    let server = Server::start();
    let limiter = limiter(&server.node(), Quota::per_hour(1_000), 100);
    warm_up(&limiter, 900).await;
    let other = self::limiter(&server.node(), Quota::per_hour(1_000), 100);
    other.reset("alice").await.expect("it answers");
    // Tokens that were leased before the reset may be used, and decisions report them as they did.
    warm_up(&limiter, 100).await;
    let calls = server.calls();
    for _ in 0..100 {
        let decision = check(&limiter).await;
        assert!(decision.used() <= 400, "{decision:?}");
    }
    assert!(server.calls() - calls < 20, "{} calls", server.calls() - calls);
}

/// More keys than the table has slots.
#[tokio::test(start_paused = true)]
async fn keys_that_were_quiet_for_long_leave_room_for_hot_ones() {
    let server = Server::start();
    let limiter = limiter(&server.node(), Quota::per_month(1_000), 100);
    for key in 0..130_000_u64 {
        assert!(limiter.check(key).await.expect("it answers").allowed());
    }
    sleep(300 * SECOND).await;
    let calls = server.calls();
    warm_up(&limiter, 200).await;
    assert!(server.calls() - calls < 20, "{} calls", server.calls() - calls);
}

#[tokio::test(start_paused = true)]
async fn leases_that_cannot_be_looked_after_take_no_more_calls_than_none() {
    let server = Server::start();
    let limiter = limiter(&server.node(), Quota::per_hour(1_000), 100);
    for _ in 0..2 {
        for key in 0..17_000_u64 {
            assert!(limiter.check(key).await.expect("it answers").allowed());
        }
    }
    let calls = server.calls();
    warm_up(&limiter, 100).await;
    // Leases are returned in the background.
    sleep(MS).await;
    // The first lease is returned, before it is known that there are too many.
    assert_eq!(server.calls() - calls, 101);
    assert_eq!(limiter.peek("alice").await.expect("it answers").used(), 100);
}

/// The task that returns a key's unused lease ends with the runtime in which the key was leased.
#[test]
fn unused_leased_tokens_are_returned_in_a_later_runtime() {
    let limiter = paused(async {
        let server = Server::start();
        let limiter = limiter(&server.node(), Quota::per_hour(1_000), 100);
        warm_up(&limiter, 8).await;
        limiter
    });
    paused(async {
        warm_up(&limiter, 8).await;
        let used = async || limiter.peek("alice").await.expect("it answers").used();
        assert!(used().await > 16, "some are leased");
        sleep(30 * SECOND).await;
        assert_eq!(used().await, 16);
    });
}

/// The task that returns unused leases may also stand still with its runtime, before it has begun
/// or while it waits.
#[test]
fn unused_leased_tokens_are_returned_while_an_earlier_runtime_stands_still() {
    for begins in [false, true] {
        let mut still = tokio::runtime::Builder::new_current_thread();
        // After each task it looks whether it is done.
        still.enable_time().start_paused(true).event_interval(1);
        let still = still.build().expect("a runtime");
        let limiter = still.block_on(async {
            let server = Server::start();
            let limiter = limiter(&server.node(), Quota::per_hour(1_000), 100);
            sleep(SECOND).await;
            warm_up(&limiter, 2).await;
            if begins {
                sleep(MS).await;
            }
            limiter
        });
        paused(async {
            sleep(15 * SECOND).await;
            warm_up(&limiter, 9).await;
            let used = async || limiter.peek("alice").await.expect("it answers").used();
            assert!(used().await > 11, "some are leased");
            sleep(30 * SECOND).await;
            assert_eq!(used().await, 11);
        });
    }
}

/// The requests that nodes under load have sent in a window.
#[derive(Default, Clone, Copy)]
struct Seen {
    passed: u64,
    /// The first refusal, and the cost of all requests up to then.
    refused: Option<Instant>,
    spent: u64,
}

/// The most requests that `n` nodes together refuse too early.
fn bound(n: u64, limit: u64, max: u64) -> f64 {
    let first = (n - 1) * max.min(limit / 16).saturating_sub(1);
    let second = limit as f64 * (1.0 - (1.0 - 1.0 / 16.0_f64).powi(n as i32 - 1));
    second.min(first as f64)
}

/// How load is spread over the nodes.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Load {
    Uniform,
    /// Each node has half the load of the one before.
    Skewed,
    /// A single node has nearly all requests.
    OneSided,
    /// Nodes take turns: each is busy for a while, then silent.
    Silent,
}

const LOADS: [Load; 4] = [Load::Uniform, Load::Skewed, Load::OneSided, Load::Silent];

#[derive(Debug)]
struct World {
    nodes: u64,
    limit: u64,
    max: u64,
    load: Load,
    /// Requests per second.
    demand: f64,
    /// The longest distance, in milliseconds.
    way: u64,
    /// In milliseconds.
    window: u64,
    windows: u64,
}

/// The share of a limit that was unused in the worst window.
#[derive(Default)]
struct Early {
    /// At the first refusal.
    at_first: f64,
    /// At the end of the window.
    at_last: f64,
}

/// Sends requests to nodes for some windows, and asserts that no more than the limit passes.
/// Returns how early requests were refused, and the calls per request.
async fn simulate(seed: u64, world: &World) -> (Early, f64) {
    let mut rng = Rng::with_seed(seed);
    let server = Server::start();
    server.slow(seed, 0..=world.way, 0..=world.way);
    let quota = Quota::new(world.limit, Duration::from_millis(world.window));
    let nodes: Vec<_> =
        (0..world.nodes).map(|_| limiter(&server.node(), quota, world.max)).collect();
    let seen = Arc::<Mutex<HashMap<SystemTime, Seen>>>::default();
    let mut tasks = JoinSet::new();
    let steps = world.window;
    let (mut due, mut asked) = (0.0, 0_u64);
    for step in 0..world.windows * steps {
        due += world.demand / 1_000.0;
        while due >= 1.0 {
            due -= 1.0;
            asked += 1;
            let last = nodes.len() - 1;
            let node = match world.load {
                Load::Uniform => rng.usize(..=last),
                Load::Skewed => (rng.u64(1..).trailing_zeros() as usize).min(last),
                Load::OneSided if rng.u8(..10) > 0 => 0,
                Load::OneSided => rng.usize(..=last),
                Load::Silent => (step * 4 * world.nodes / steps % world.nodes) as usize,
            };
            let (limiter, server, seen) = (nodes[node].clone(), server.clone(), Arc::clone(&seen));
            tasks.spawn(async move {
                let (before, sent, asked) = (server.calls(), server.now(), Instant::now());
                let decision = check(&limiter).await;
                if sent == server.now() && before == server.calls() && decision.allowed() {
                    assert!(decision.reset_at() > sent, "spent after its window");
                }
                let mut seen = seen.lock().expect("no panic");
                let seen = seen.entry(decision.reset_at()).or_default();
                if decision.allowed() {
                    seen.passed += 1;
                    seen.spent += u64::from(seen.refused.is_none_or(|refused| asked <= refused));
                } else {
                    seen.refused.get_or_insert(Instant::now());
                }
            });
        }
        sleep(MS).await;
        while let Some(done) = tasks.try_join_next() {
            done.expect("no panic");
        }
    }
    while let Some(done) = tasks.join_next().await {
        done.expect("no panic");
    }
    let mut early = Early::default();
    for seen in seen.lock().expect("no panic").values() {
        let Seen { passed, refused, spent } = *seen;
        assert!(passed <= world.limit, "{passed} passed: SEED={seed} {world:?}");
        if refused.is_some() {
            let missing = (world.limit - spent) as f64;
            let bound = bound(world.nodes, world.limit, world.max);
            assert!(missing <= bound, "{missing} missing, bound {bound}: SEED={seed} {world:?}");
            let part = |tokens: f64| tokens / world.limit as f64;
            early.at_first = early.at_first.max(part(missing));
            early.at_last = early.at_last.max(part((world.limit - passed) as f64));
        }
    }
    (early, server.calls() as f64 / asked as f64)
}

#[test]
fn leases_never_exceed_the_limit_and_refuse_early_only_within_the_bound() {
    let seeds = std::env::var("SEED").map_or(0..sized(20, 2_000), |seed| {
        let seed = seed.parse().expect("a number");
        seed..seed + 1
    });
    for seed in seeds {
        let mut rng = Rng::with_seed(seed);
        let world = World {
            nodes: rng.u64(2..12),
            limit: *rng.choice(&[32, 50, 100, 300, 1_000, 3_000]).expect("some"),
            max: *rng.choice(&[2, 10, 100, 1_000]).expect("some"),
            load: *rng.choice(&LOADS).expect("some"),
            demand: 0.0,
            way: *rng.choice(&[0, 1, 5, 40]).expect("some"),
            window: 1_000,
            windows: 3,
        };
        let demand = (0.5 + 3.0 * rng.f64()) * world.limit as f64;
        let _ = paused(simulate(seed, &World { demand, ..world }));
    }
}

/// The tables of BENCHMARKS.md:
/// `cargo test --release -p tests --test core leases::print_tables -- --ignored --nocapture`
#[test]
#[ignore = "it prints tables"]
fn print_tables() {
    println!("64 nodes, 400,000 requests a second on one limit, ways of up to 1 ms");
    println!(
        "| limit a second | leases | calls a second | unspent at the first refusal | at the end |"
    );
    println!("|---|---|---|---|---|");
    for limit in [100, 1_000, 10_000, 100_000, 300_000, 1_000_000] {
        for max in [0, 10, 100, 1_000] {
            row(64, limit, max, 400_000.0, true);
        }
    }
    println!("1.5 times the limit is asked for");
    println!("| limit | nodes | leases | unspent at the first refusal | at the end |");
    println!("|---|---|---|---|---|");
    for limit in [100, 1_000, 10_000, 100_000] {
        for nodes in [2, 8, 64] {
            for max in [100, 1_000] {
                row(nodes, limit, max, 1.5 * limit as f64, false);
            }
        }
    }
}

/// The worst of three kinds of load.
fn row(nodes: u64, limit: u64, max: u64, demand: f64, calls: bool) {
    let (mut worst, mut most) = (Early::default(), 0.0_f64);
    for load in [Load::Uniform, Load::Skewed, Load::OneSided] {
        let world = World { nodes, limit, max, load, demand, way: 1, window: 1_000, windows: 3 };
        let (early, rate) = paused(simulate(1, &world));
        worst.at_first = worst.at_first.max(early.at_first * 100.0);
        worst.at_last = worst.at_last.max(early.at_last * 100.0);
        most = most.max(rate * demand);
    }
    let Early { at_first, at_last } = worst;
    match calls {
        true => println!("| {limit} | {max} | {most:.0} | {at_first:.1}% | {at_last:.2}% |"),
        false => println!("| {limit} | {nodes} | {max} | {at_first:.1}% | {at_last:.2}% |"),
    }
}

/// Memory behind a gate: while it is shut, a call blocks its thread.
#[derive(Clone)]
struct Gated {
    memory: MemoryStore,
    gate: Arc<(Mutex<bool>, Condvar)>,
    waits: mpsc::Sender<()>,
}

impl Gated {
    fn shut(&self, shut: bool) {
        *self.gate.0.lock().expect("no panic") = shut;
        self.gate.1.notify_all();
    }

    fn pass(&self) {
        let shut = self.gate.0.lock().expect("no panic");
        if *shut {
            let _ = self.waits.send(());
        }
        drop(self.gate.1.wait_while(shut, |shut| *shut).expect("no panic"));
    }

    fn forward<T: Send + 'static>(
        &self,
        _: Operation,
        ask: impl FnOnce(&MemoryStore) -> Reply<T> + Send + 'static,
    ) -> Reply<T> {
        let this = self.clone();
        Reply::later(async move {
            this.pass();
            ask(&this.memory).await
        })
    }
}

forward_to_memory!(Gated, {});

/// A runtime that shuts down drops a new task at once, on the thread that spawns it.
#[test]
fn a_lease_that_arrives_while_the_runtime_shuts_down_does_not_block_it() {
    let memory = MemoryStore::new();
    let (waits, waiting) = mpsc::channel();
    let store = Gated { memory, gate: Arc::default(), waits };
    let far = Remote::around(store.clone()).on_failure(OnStoreFailure::Deny).leases(100);
    let limiter = Quota::per_hour(1_000_000).name("far").store(far);
    let mut runtime = tokio::runtime::Builder::new_multi_thread();
    let runtime = runtime.worker_threads(2).enable_time().build().expect("a runtime");
    runtime.block_on(async {
        for _ in 0..2_000 {
            assert!(check(&limiter).await.allowed());
        }
    });
    let (closing, closed) = mpsc::channel::<()>();
    runtime.spawn(async move {
        std::future::pending::<()>().await;
        drop(closing);
    });
    store.shut(true);
    // Enough requests to use the lease, so that one of them calls for more.
    for _ in 0..200 {
        let limiter = limiter.clone();
        runtime.spawn(async move { check(&limiter).await.allowed() });
    }
    waiting.recv_timeout(10 * SECOND).expect("a call waits at the gate");
    let opens = thread::spawn(move || {
        let _ = closed.recv();
        // All other tasks are dropped first, among them the one that returned leases so far.
        thread::sleep(100 * MS);
        store.shut(false);
    });
    let (ended, ends) = mpsc::channel();
    thread::spawn(move || {
        drop(runtime);
        let _ = ended.send(());
    });
    assert!(ends.recv_timeout(10 * SECOND).is_ok(), "the runtime does not end");
    opens.join().expect("no panic");
}
