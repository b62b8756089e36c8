//! The limits of one charge pass together or none is charged, and one of them speaks for all (S37): of a
//! layer, of `Limits` without HTTP, and over a store that can't charge them in one step. There nothing is
//! kept of a charge that is refused, dropped or late, and one deadline is for all of it.

use tokio::time::Instant;
use tower_fixed_window::Store;
use tower_fixed_window::testing::ask;

use crate::prelude::*;

/// A minute's start.
const NOW_MS: u64 = 1_700_000_040_000;

#[test]
fn the_body_and_the_ietf_fields_name_all_limits() {
    let limits = Limits::new([
        Quota::per_minute(1).name("a").key(Key::global()),
        Quota::per_hour(5).name("b").key(Key::global()),
        Quota::per_day(1).name("c").key(Key::global()),
    ]);
    let layer = FixedWindowLayer::new(limits.store(store()));
    let layer = layer.headers(Headers::GitHubAndIetfDraft10);

    let policies = r#""a:1/minute";q=1;w=60, "b:5/hour";q=5;w=3600, "c:1/day";q=1;w=86400"#;
    let passed = ask(&layer, Request::get("/"));
    assert_eq!(passed.headers()["ratelimit-policy"], policies);
    let left = passed.headers()["ratelimit"].to_str().expect("ASCII");
    assert!(left.starts_with(r#""a:1/minute";r=0;t=60, "b:5/hour";r=4;"#), "{left}");

    let refused = ask(&layer, Request::get("/"));
    assert_eq!(refused.headers()["ratelimit-policy"], policies);
    let headers = limit_headers(&refused);
    let told = ["limit", "remaining", "used", "resource"].map(|field| headers[field]);
    assert_eq!(told, ["1", "0", "1", "c"], "the latest retry");
    let body = String::from_utf8_lossy(refused.body());
    assert!(body.contains(r#""violated-policies":["a:1/minute","c:1/day"]"#), "{body}");
    assert!(body.contains("API rate limit exceeded: a:1/minute, c:1/day"), "{body}");
}

const NAMES: [&str; 3] = ["one", "two", "three"];

fn named(count: usize, per_minute: u64) -> impl Iterator<Item = Limit> {
    NAMES[..count]
        .iter()
        .map(move |name| Quota::per_minute(per_minute).name(name).key(Key::global()))
}

fn store() -> MemoryStore {
    MemoryStore::new().clock(ManualClock::at_ms(NOW_MS))
}

/// Each decision that the layer's hook is told: whether it passed, and the limits in it.
type Told = Arc<Mutex<Vec<(bool, Vec<String>)>>>;

fn told(layer: FixedWindowLayer, to: &Told) -> FixedWindowLayer {
    let to = Arc::clone(to);
    layer.on_decision(move |_, decision| {
        let names = decision.limits().map(|(name, _)| name.to_owned()).collect();
        to.lock().unwrap().push((decision.is_allowed(), names));
    })
}

#[test]
fn a_decision_knows_its_limits_whether_one_or_more() {
    for count in 1..=3 {
        for per_minute in [9, 0] {
            let all = || Limits::new(named(count, per_minute)).store(store());
            let lines: Vec<_> =
                NAMES[..count].iter().map(|name| Line::new(name, Key::global(), 1)).collect();
            let decision = block_on(all().check(&lines)).expect("it answers");
            let names: Vec<_> = decision.limits().map(|(name, _)| name).collect();
            assert_eq!(names, NAMES[..count]);
            assert!(NAMES.iter().all(|name| decision.of(name).is_some() == names.contains(name)));
            assert_eq!(decision.name(), "one");
            for (name, of) in decision.limits() {
                assert_eq!(Some(&of), decision.of(name).as_ref());
                assert_eq!((of.is_allowed(), of.limit()), (per_minute > 0, per_minute));
            }
            // The hook of a layer, and the request's extension, have the same decision.
            let heard = Told::default();
            let layer = told(FixedWindowLayer::new(all()), &heard);
            let _ = ask(&layer, Request::get("/"));
            let expected = (per_minute > 0, names.into_iter().map(str::to_owned).collect());
            assert_eq!(*heard.lock().unwrap(), [expected]);
        }
    }
}

/// Limits that a store charges one after the other, if it can't charge them in one step.
fn in_order(store: impl Store) -> Limits {
    let limits = Limits::new([
        Quota::per_hour(9).name("requests"),
        Quota::per_hour(5).name("tokens"),
        Quota::per_day(2).name("cents"),
    ]);
    limits.store(store)
}

const KEYS: [(&str, &str); 3] = [("requests", "acme"), ("tokens", "acme"), ("cents", "ann")];

/// The tokens that the store has counted for each limit.
async fn counted(memory: &MemoryStore) -> [u64; 3] {
    let mut used = [0; 3];
    let counts = in_order(memory.clone());
    for (used, (name, key)) in used.iter_mut().zip(KEYS) {
        *used = counts.limiter(name).peek(key).await.expect("memory answers").used();
    }
    used
}

#[tokio::test(start_paused = true)]
async fn one_deadline_is_for_all_limits_and_what_comes_late_is_returned() {
    let deadline = ms(250);
    for (delay, local) in [(20, [false; 3]), (60, [false, false, true]), (100, [false, true, true])]
    {
        let memory = paused_memory();
        let limits = in_order(far_from(memory.clone(), move || delay).deadline(deadline));
        let started = Instant::now();
        let decision = limits.check(KEYS.map(|(name, key)| Line::new(name, key, 1))).await.unwrap();
        assert!(started.elapsed() <= deadline, "{:?} of {deadline:?}", started.elapsed());
        assert!(decision.is_allowed());
        let locals = KEYS.map(|(name, _)| decision.of(name).unwrap().is_local());
        assert_eq!((locals, decision.is_local()), (local, local.contains(&true)));
        sleep(secs(1)).await;
        assert_eq!(counted(&memory).await, local.map(|local| u64::from(!local)), "at {delay} ms");
    }
    // The limit that governs was decided by the store, and the other one in memory.
    let limits =
        Limits::new([Quota::per_day(2).name("cents"), Quota::per_hour(9).name("requests")]);
    let limits = limits.store(far_store(|| 100).deadline(deadline));
    let lines = [Line::new("cents", "ann", 1), Line::new("requests", "acme", 1)];
    let decision = limits.check(lines).await.unwrap();
    assert_eq!(decision.name(), "cents");
    assert!(decision.is_local() && !decision.of("cents").unwrap().is_local());
}

#[tokio::test(start_paused = true)]
async fn a_charge_that_is_dropped_returns_what_it_has_taken() {
    for after in (5..60).step_by(10) {
        let memory = paused_memory();
        let limits = in_order(far_from(memory.clone(), || 10));
        let charge = limits.check(KEYS.map(|(name, key)| Line::new(name, key, 1)));
        assert!(tokio::time::timeout(ms(after), charge).await.is_err(), "it is dropped");
        sleep(secs(1)).await;
        assert_eq!(counted(&memory).await, [0; 3], "after {after} ms");
    }
}

#[tokio::test(start_paused = true)]
async fn a_reservation_that_would_be_due_too_late_is_returned() {
    let memory = paused_memory();
    let limiters = || {
        Limits::new([
            Quota::per_second(1).reserve_up_to(9).name("fast"),
            Quota::per_minute(1).reserve_up_to(9).name("slow"),
        ])
    };
    let limits = limiters().store(far_from(memory.clone(), || 10));
    let memory = limiters().store(memory);
    let both = [Line::new("fast", "k", 1), Line::new("slow", "k", 1)];
    assert!(limits.reserve(&both).await.unwrap().is_ok());
    let late = limits.reserve(&both).await.unwrap().unwrap_err();
    let expected = memory.reserve(&both).await.unwrap().unwrap_err();
    assert_eq!(late.decision().retry_at(), expected.decision().retry_at());
    assert_eq!(late.decision().name(), "slow");
    for name in ["fast", "slow"] {
        let standing = memory.limiter(name).peek("k").await.unwrap();
        assert_eq!(standing.used(), 1, "{name}");
        let told = late.decision().of(name).unwrap();
        assert_eq!(told.used(), 1, "{name}");
    }
    // The window of a line that takes nothing may end before.
    let one = [Line::new("fast", "other", 0), Line::new("slow", "other", 1)];
    for limits in [&limits, &limits, &memory] {
        assert!(limits.reserve(&one).await.unwrap().is_ok());
    }
}
