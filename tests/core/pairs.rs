//! Features of a store elsewhere in pairs: several limits, receipts, queues, policies, shadow
//! mode, changes and warnings.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, UNIX_EPOCH};

use fastrand::Rng;
use http::{Request, Response};
use tokio::time::{Instant, sleep};
use tower::{Layer, ServiceExt, service_fn};
use tower_fixed_window::store::{Adjust, Charge, OnStoreFailure, Remote, Reply, Scope, Store};
use tower_fixed_window::testing::block_on;
use tower_fixed_window::{
    Clock, Decision, EmptyBody, FixedWindowLayer, Key, Limiter, Limits, Line, ManualClock,
    MemoryStore, Quota, Receipt, StoreError, SystemClock,
};

use crate::reference::{self, Ask, Grid, Model, Taken, Terms, together};
use crate::simulated_server::{Server, TURN};
use crate::trace::{NAMES, Spec, answer_of, limits_of, ms, terms};
use crate::{answer, sized};

const SECOND: Duration = Duration::from_secs(1);

fn lines() -> [Line<'static>; 2] {
    ["far", "all"].map(|name| Line::new(name, "alice", 1))
}

/// Of one limit, of two in one step, and of two in turns, where tokens that one limit has given are
/// returned when the next one refuses (S37).
#[tokio::test(start_paused = true)]
async fn a_refusal_of_limits_is_remembered_for_a_second_and_tokens_that_come_back_are_seen() {
    let kinds = [false, true].into_iter().flat_map(|of| [(of, 1), (of, 2)]);
    for (kind, settled) in kinds.flat_map(|kind| [(kind, false), (kind, true)]) {
        let (in_turns, limits) = kind;
        let at = format!("in turns: {in_turns}, {limits} limits, settled: {settled}");
        let server = if in_turns { Server::in_turns() } else { Server::start() };
        let node = || {
            let far = Quota::per_hour(1).name("far");
            let all = [if settled { far.settled() } else { far }, Quota::per_day(9).name("all")];
            Limits::new(all.into_iter().take(limits)).store(server.node())
        };
        let (here, there, lines) = (node(), node(), &lines()[..limits]);
        let refuses = async || !there.check(lines).await.expect("it answers").is_allowed();
        let receipts = here.charge(lines).await.expect("it answers").expect("it passes");
        assert!(refuses().await);
        let calls = server.calls();
        assert!(refuses().await);
        assert_eq!(server.calls(), calls, "{at}: what is known of one limit refuses all");
        sleep(7 * SECOND).await;
        assert!(refuses().await);
        let asked = if in_turns { limits as u64 } else { 1 };
        assert_eq!(server.calls(), calls + asked, "{at}: a charge, and a look at the other limit");
        here.refund(receipts).await.expect("it answers");
        sleep(2 * SECOND).await;
        assert!(!refuses().await, "{at}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_remembered_debt_that_a_group_of_a_larger_plan_has_ended() {
    let server = Server::start();
    let (here, there) = (server.node(), server.node());
    let quota = Quota::per_minute(10).reserve_up_to(20);
    let limits =
        Limits::new([quota.name("far"), Quota::per_day(99).name("all")]).store(here.clone());
    let there = quota.name("far").store(there);
    let free = quota.name("far").store(here);
    sleep(SECOND).await;
    assert!(there.reserve("alice", 30).await.expect("it answers").is_ok());
    assert!(!free.check("alice").await.expect("it answers").is_allowed());
    sleep(60 * SECOND).await;
    let pro = Quota::per_minute(1_000).into();
    let group = [Line::new("far", "alice", 1).with_quotas(&pro), Line::new("all", "alice", 1)];
    assert!(limits.check(group).await.expect("it answers").is_allowed());
    let known = free.check("alice").await.expect("it answers");
    let truth = free.peek("alice").await.expect("it answers");
    assert_eq!(known.is_allowed(), truth.is_allowed());
}

/// What the other limit has taken comes back before the failure is answered, or the refusal.
#[tokio::test(start_paused = true)]
async fn a_shard_that_fails_fails_only_its_own_limit() {
    use OnStoreFailure::{Allow, Deny, Local};

    for (policy, first) in [Allow, Local, Deny].into_iter().flat_map(|of| [(of, true), (of, false)])
    {
        let server = Server::in_turns();
        let limit = |name: &str| {
            let tokens = if name == "well" { 2 } else { 5 };
            Quota::per_hour(tokens).name(name).key(Key::global())
        };
        let names = if first { ["down", "well"] } else { ["well", "down"] };
        let limits = Limits::new(names.map(limit)).store(server.node().on_failure(policy));
        let layer = FixedWindowLayer::new(&limits).reject(EmptyBody);
        let used = async |name| {
            limits.limiter(name).peek(Key::global()).await.map(|decision| decision.used())
        };
        server.fail("down", true);
        for i in 0..10 {
            let Ok(response) = layer.layer(ok_service()).oneshot(Request::new(())).await;
            let (status, taken) = match policy {
                Deny => (503, 0),
                _ if i < 2 => (200, i + 1),
                _ => (429, 2),
            };
            let what = (response.status().as_u16(), used("well").await.expect("it answers"));
            assert_eq!(what, (status, taken), "{policy:?}, {names:?}, request {i}");
        }
        if policy == Local {
            assert_eq!(used("down").await.ok(), Some(2), "given back in memory");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_local_receipt_is_refunded_by_a_clone_with_another_policy() {
    for policy in [OnStoreFailure::Local, OnStoreFailure::Deny, OnStoreFailure::Allow] {
        let server = Server::start();
        let store = server.node();
        let a = Quota::per_hour(5).name("far").store(store.clone());
        let b = Quota::per_hour(5).name("far").store(store.on_failure(policy));
        server.fail("far", true);
        let receipt = a.charge("alice", 3).await.expect("it answers").expect("it passes");
        assert!(receipt.decision().is_local());
        b.refund(receipt).await.expect("it answers");
        assert_eq!(a.peek("alice").await.expect("it answers").used(), 0, "{policy:?}");
    }
}

/// Under a smaller limit, most of what is settled would be debt.
#[test]
fn a_charge_is_corrected_under_the_quotas_that_decided_it_whichever_handle_does_it() {
    type Charging = fn(&Limiter) -> Limiter;
    type Change = fn(&Limiter, &ManualClock);
    fn own(limiter: &Limiter, limit: u64, until: u64) {
        let until = UNIX_EPOCH + Duration::from_millis(TURN + until);
        limiter.set_key_quotas_until("alice", Quota::per_minute(limit), until);
    }
    let cases: [(&str, u64, Charging, Change); 3] = [
        ("by a plan", 10, |base| base.with_quotas(Quota::per_minute(1_000)), |_, _| {}),
        ("the key gets its own", 1_000, Limiter::clone, |base, _| own(base, 10, 120_000)),
        (
            "the key's own have ended",
            10,
            |base| {
                own(base, 1_000, 30_000);
                base.clone()
            },
            |_, clock| clock.set_ms(TURN + 40_000),
        ),
    ];
    for (what, limit, charging, change) in cases {
        // What the limit itself has decided is corrected as the handle's limit is now (S10).
        for handle in 0..if limit == 1_000 { 2 } else { 3 } {
            let clock = ManualClock::at_ms(TURN);
            let store = MemoryStore::new().clock(clock.clone());
            let base = Quota::per_minute(limit).name("far").store(store);
            let charging = charging(&base);
            let receipt = answer(charging.charge("alice", 500)).expect("it passes");
            change(&base, &clock);
            let other = charging.with_quotas(Quota::per_minute(7));
            answer([&base, &charging, &other][handle].settle(receipt, 600));
            clock.set_ms(TURN + 60_000);
            assert_eq!(answer(base.peek("alice")).used(), 0, "{what}, handle {handle}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_clone_with_a_longer_deadline_waits_as_long_as_it_says() {
    let server = Server::start();
    let store = server.node().on_failure(OnStoreFailure::Deny);
    let quick =
        Quota::per_hour(1_000).name("far").store(store.clone().deadline(Duration::from_millis(20)));
    let patient = Quota::per_hour(1_000).name("far").store(store.deadline(SECOND));
    server.slow(50, 50);
    let quick = tokio::spawn(async move { quick.check("alice").await.is_ok() });
    sleep(Duration::from_millis(5)).await;
    assert!(patient.check("alice").await.is_ok());
    assert!(!quick.await.expect("no panic"));
}

fn ok_service()
-> impl tower::Service<Request<()>, Response = Response<()>, Error = Infallible, Future: Send>
+ Clone
+ Send {
    service_fn(async |_: Request<()>| Ok::<_, Infallible>(Response::new(())))
}

/// What this node counted by itself says nothing of the store's count.
#[tokio::test(start_paused = true)]
async fn a_true_cost_warns_by_the_counts_of_which_it_is_a_part() {
    // What others take after the charge, its true cost, and whether that warns, where the store
    // fails during the charge, and where it does not.
    for (taken, cost, warns) in [(None, 9, [true, true]), (Some([6, 8]), 2, [true, false])] {
        for fails in [false, true] {
            let (server, warned) = (Server::start(), Arc::new(AtomicU64::new(0)));
            let (limit, of) = (Quota::per_hour(10).name("far"), Arc::clone(&warned));
            let others = limit.clone().store(server.node());
            let limit = limit.warn_at(80, move |_| _ = of.fetch_add(1, Ordering::SeqCst));
            let far = limit.store(server.node());
            server.fail("far", fails);
            let receipt = far.charge("alice", 1).await.expect("it answers").expect("it passes");
            assert_eq!(receipt.decision().is_local(), fails);
            if let Some(taken) = taken {
                server.fail("far", false);
                sleep(60 * SECOND).await;
                let taken = taken[usize::from(fails)];
                assert!(others.charge("alice", taken).await.expect("it answers").is_ok());
            }
            far.settle(receipt, cost).await.expect("it answers");
            sleep(SECOND).await;
            let warnings = u64::from(warns[usize::from(fails)]);
            assert_eq!(warned.load(Ordering::SeqCst), warnings, "{taken:?}, fails: {fails}");
        }
    }
}

/// The request takes its turn by the limit whose shard is well, and waits for that one only.
#[tokio::test(start_paused = true)]
async fn a_queue_passes_by_the_limit_whose_shard_is_well() {
    let server = Server::in_turns();
    let store = server.node().on_failure(OnStoreFailure::Allow);
    let limit = |name: &str| Quota::per_minute(2).name(name).key(Key::global());
    let limits = Limits::new([limit("down"), limit("well")]).store(store);
    let layer = FixedWindowLayer::new(&limits).reject(EmptyBody).queue(9, 90 * SECOND);
    server.fail("down", true);
    sleep(SECOND).await;
    let start = Instant::now();
    let mut served = Vec::new();
    for _ in 0..3 {
        let Ok(response) = layer.layer(ok_service()).oneshot(Request::new(())).await;
        served.push((response.status().as_u16(), start.elapsed().as_secs()));
    }
    assert_eq!(served, [(200, 0), (200, 0), (200, 59)]);
}

#[tokio::test(start_paused = true)]
async fn a_shadow_limit_counts_what_passes_since_other_shards_fail() {
    for more in [false, true] {
        let server = Server::in_turns();
        let store = server.node().on_failure(OnStoreFailure::Allow);
        let limit = |name: &str| Quota::per_hour(2).name(name).key(Key::global());
        let mut limits = vec![limit("down"), limit("shadow").shadow()];
        limits.extend(more.then(|| limit("well")));
        let limits = Limits::new(limits).store(store);
        let layer = FixedWindowLayer::new(&limits).reject(EmptyBody);
        server.fail("down", true);
        let Ok(response) = layer.layer(ok_service()).oneshot(Request::new(())).await;
        assert_eq!(response.status(), 200);
        sleep(SECOND).await;
        let shadow = limits.limiter("shadow").peek(Key::global()).await.expect("it answers");
        assert_eq!(shadow.used(), 1, "{more}");
    }
}

/// Each head asks at the start of a window, and before that every few seconds at most.
#[tokio::test(start_paused = true)]
async fn heads_that_can_not_use_what_is_left_do_not_ask_at_once_again() {
    for lines in [1, 2] {
        let server = Server::in_turns();
        let far = Quota::per_minute(4).key(Key::global()).name("far").cost_fn(|parts| {
            parts.headers.get("cost").map_or(1, |cost| cost.to_str().unwrap().parse().unwrap())
        });
        let far = far.store(server.node());
        let layer = || FixedWindowLayer::new(&far).reject(EmptyBody).queue(9, 600 * SECOND);
        let layers: Vec<_> = (0..lines).map(|_| layer()).collect();
        sleep(SECOND).await;
        assert!(far.charge(Key::global(), 3).await.expect("it answers").is_ok());
        server.slow(20, 20);
        for layer in layers.iter().flat_map(|layer| [layer; 4]) {
            let request = Request::get("/").header("cost", 3).body(()).unwrap();
            tokio::spawn(layer.layer(ok_service()).oneshot(request));
        }
        sleep(110 * SECOND).await;
        assert!(server.calls() < 40 * lines, "{lines} lines: {} calls", server.calls());
    }
}

/// Fails at once.
pub(crate) struct Down;

impl Store for Down {
    fn charge(&self, _: Charge<'_>) -> Reply<Decision> {
        Reply::from(Err(StoreError::new("down")))
    }

    fn adjust(&self, _: Adjust<'_>) -> Reply<()> {
        Reply::from(Err(StoreError::new("down")))
    }

    fn reset(&self, _: &Scope, _: &Key) -> Reply<()> {
        Reply::from(Err(StoreError::new("down")))
    }

    fn charges_together(&self) -> bool {
        true
    }
}

/// A node's part of a quota, in the reference.
fn share(terms: &Terms, nodes: u32) -> Terms {
    let of = |tokens: i128| (tokens + i128::from(nodes) - 1) / i128::from(nodes);
    let Terms { limit, capacity, max_reserved, .. } = *terms;
    let [limit, capacity, max_reserved] = [limit, capacity, max_reserved].map(of);
    Terms { limit, capacity, max_reserved, ..*terms }
}

/// S14, S33: a charge is decided and corrected under the share of the handle that made it, whichever
/// handle makes the correction.
#[test]
fn a_local_charge_is_corrected_under_the_share_that_decided_it() {
    const NODES: [u32; 4] = [1, 2, 3, 70_000];
    for seed in 0..sized(300, 20_000) {
        let mut rng = Rng::with_seed(seed);
        let mut some_specs = || -> Vec<Spec> {
            let mut spec = |part: u32| Spec {
                amounts: (rng.u64(1..30), rng.u64(..2) * rng.u64(..30), rng.u64(..40)),
                // No window ends while this runs.
                window_ms: (Quota::MAX_WINDOW / part).as_millis() as u64,
                grid: Grid::Aligned,
            };
            let first = spec(1);
            [first].into_iter().chain((2..5).filter(|_| seed % 3 == 0).map(spec)).collect()
        };
        let specs: Vec<_> = (0..1 + seed % 2).map(|_| some_specs()).collect();
        let store = Remote::around(Down).deadline(Duration::MAX);
        let handles = NODES.map(|nodes| limits_of(&specs).store(store.clone().local_share(nodes)));
        let shared = |nodes: u32| -> Vec<Vec<Terms>> {
            let of = |specs: &Vec<Spec>| specs.iter().map(|of| share(&terms(of), nodes)).collect();
            specs.iter().map(of).collect()
        };
        let mut models: Vec<_> = specs.iter().map(|of| Model::new(of.len(), 0)).collect();
        let (now, mut receipts) = (i128::from(SystemClock.now_ms()), Vec::new());
        for step in 0..40 {
            let (by, at) = (rng.usize(..NODES.len()), format!("seed {seed}, step {step}"));
            if rng.bool() && !receipts.is_empty() {
                let (receipt, terms, taken): (Receipt, Vec<Vec<Terms>>, Vec<Taken>) =
                    receipts.swap_remove(rng.usize(..receipts.len()));
                let mut costs = Vec::new();
                for (i, taken) in taken.into_iter().enumerate() {
                    let cost = rng.u64(..40);
                    models[i].settle(&terms[i], taken, now, cost.into());
                    costs.push((NAMES[i], cost));
                }
                block_on(handles[by].settle(receipt, costs)).expect("memory answers");
            }
            let (cost, terms) = (rng.u64(..12), shared(NODES[by]));
            let ask = [Ask::Charge, Ask::Reserve, Ask::Peek][rng.usize(..3)];
            let asked = models.iter_mut().zip(&terms);
            let mut asked: Vec<_> = asked
                .map(|(model, terms)| reference::Line { model, terms, cost: cost.into() })
                .collect();
            let expected = together(&mut asked, now, ask);
            let line = |name: &&'static str| Line::new(name, "alice", cost);
            let lines: Vec<_> = NAMES[..specs.len()].iter().map(line).collect();
            let charged = match ask {
                Ask::Peek => None,
                Ask::Charge => Some(block_on(handles[by].charge(&lines))),
                Ask::Reserve => Some(block_on(handles[by].reserve(&lines))),
            };
            let decision = match charged.map(|charged| charged.expect("memory answers")) {
                None => block_on(handles[by].peek(&lines)).expect("memory answers"),
                Some(Err(refused)) => refused.decision().clone(),
                Some(Ok(receipt)) => {
                    let decision = receipt.decision().clone();
                    receipts.push((receipt, terms, expected.taken.expect("it passes")));
                    decision
                }
            };
            let told = (decision.retry_at().map(ms), decision.ready_at().map(ms));
            let is_told = (expected.allowed, (expected.retry_at, expected.ready_at));
            assert_eq!((decision.is_allowed(), told), is_told, "{at}");
            for ((_, of), expected) in decision.limits().zip(&expected.answers) {
                assert!(of.is_local());
                assert_eq!(answer_of(&of).numbers(), expected.numbers(), "{at}");
            }
        }
    }
}
