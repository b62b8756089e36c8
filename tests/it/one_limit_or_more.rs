//! What holds for one limit holds beside others, by the same code (S37): each test for one limit, two
//! and three.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::body::Body;
use axum::routing::any;
use http::Request;
use tokio::time::{Instant, sleep};
use tower::{Layer, ServiceExt};
use tower_fixed_window::store::{Adjust, Charge, Reply, Scope};
use tower_fixed_window::testing::{ask, block_on};
use tower_fixed_window::{
    Decision, FixedWindowLayer, Key, Limit, Limiter, Limits, Line, ManualClock, MemoryStore, Quota,
    Store,
};

const NAMES: [&str; 3] = ["one", "two", "three"];

/// A limit of each name, from one to three of them. The first is in shadow mode if `shadow`.
fn limits(count: usize, per_minute: u64, shadow: bool) -> Vec<Limit> {
    let limit = |name| Quota::per_minute(per_minute).name(name).key(Key::global());
    let limits = NAMES[..count].iter().map(|name| limit(name));
    limits
        .enumerate()
        .map(|(i, limit)| if i == 0 && shadow { limit.shadow() } else { limit })
        .collect()
}

fn store() -> MemoryStore {
    MemoryStore::new().clock(ManualClock::at_ms(1_700_000_040_000))
}

/// Each decision that the layer's hook is told: whether it passed, and the limits in it.
type Told = Arc<Mutex<Vec<(bool, Vec<String>)>>>;

fn told(layer: FixedWindowLayer, to: &Told) -> FixedWindowLayer {
    let to = Arc::clone(to);
    layer.on_decision(move |_, decision| {
        let names = decision.limits().map(|(name, _)| name.to_owned()).collect();
        to.lock().unwrap().push((decision.allowed(), names));
    })
}

#[test]
fn a_hook_hears_of_a_limit_in_shadow_mode_alone_and_beside_others() {
    for count in 1..=3 {
        let mut all = limits(count, 9, false);
        all[0] = Quota::per_minute(1).name("one").key(Key::global()).shadow();
        let heard = Told::default();
        let layer = told(FixedWindowLayer::new(Limits::new(all).store(store())), &heard);
        for allowed in [true, false] {
            assert_eq!(ask(&layer, Request::get("/")).status(), 200);
            let heard: Vec<_> = heard.lock().unwrap().drain(..).collect();
            let of_shadow = heard.iter().filter(|(_, names)| *names == ["one"]);
            let verdicts: Vec<_> = of_shadow.map(|(allowed, _)| *allowed).collect();
            assert_eq!(verdicts, [allowed], "{count} limits: {heard:?}");
            let others: Vec<_> = NAMES[1..count].iter().map(|name| (*name).to_owned()).collect();
            assert_eq!(heard.contains(&(true, others)), count > 1, "{count} limits: {heard:?}");
        }
    }
}

/// A store that answers after a second.
struct Late(MemoryStore);

impl Store for Late {
    fn charge(&self, charge: Charge<'_>) -> Reply<Decision> {
        let (store, charge) = (self.0.clone(), charge.to_owned());
        Reply::later(async move {
            sleep(Duration::from_secs(1)).await;
            store.charge(charge.as_charge()).await
        })
    }

    fn charges_together(&self) -> bool {
        true
    }

    fn adjust(&self, adjust: Adjust<'_>) -> Reply<()> {
        self.0.adjust(adjust)
    }

    fn reset(&self, scope: &Scope, key: &Key) -> Reply<()> {
        self.0.reset(scope, key)
    }

    fn is_shared(&self) -> bool {
        false
    }
}

/// A limit in shadow mode is awaited where no other one can refuse. Beside those that can, it is
/// charged when they have passed, and the request waits for them only.
#[tokio::test(start_paused = true)]
async fn a_request_waits_once_whatever_is_in_shadow_mode() {
    for count in 1..=3 {
        for shadows in 1..=count {
            let of = |(i, limit): (usize, Limit)| if i < shadows { limit.shadow() } else { limit };
            let all = limits(count, 9, false).into_iter().enumerate().map(of);
            let memory = store();
            let limits = Limits::new(all).store(Late(memory.clone()));
            let app = FixedWindowLayer::new(&limits).layer(any(async || "hello"));
            let began = Instant::now();
            app.oneshot(Request::new(Body::empty())).await.expect("infallible");
            assert_eq!(began.elapsed().as_secs(), 1, "{shadows} of {count} in shadow mode");
            sleep(Duration::from_secs(2)).await;
            assert_eq!(memory.live_entries(), count, "all were charged");
        }
    }
}

#[test]
fn a_decision_knows_its_limits_whether_one_or_more() {
    for count in 1..=3 {
        for per_minute in [9, 0] {
            let all = || Limits::new(limits(count, per_minute, false)).store(store());
            let lines: Vec<_> =
                NAMES[..count].iter().map(|name| Line::new(name, Key::global(), 1)).collect();
            let decision = block_on(all().check(&lines)).expect("it answers");
            let names: Vec<_> = decision.limits().map(|(name, _)| name).collect();
            assert_eq!(names, NAMES[..count]);
            assert!(NAMES.iter().all(|name| decision.of(name).is_some() == names.contains(name)));
            assert_eq!(decision.governing_limit(), "one");
            for (name, of) in decision.limits() {
                assert_eq!(Some(&of), decision.of(name).as_ref());
                assert_eq!((of.allowed(), of.limit()), (per_minute > 0, per_minute));
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

#[test]
fn a_limiter_and_limits_of_one_decide_alike() {
    let limit = || Quota::per_minute(2).and(Quota::per_hour(3)).name("one");
    let limiter: Limiter = limit().store(store());
    let limits = Limits::new([limit()]).store(store());
    for cost in [1, 1, 1, 0, 9] {
        let one = block_on(limiter.check_cost("k", cost)).expect("it answers");
        let of_one = block_on(limits.check([Line::new("one", "k", cost)])).expect("it answers");
        assert_eq!(one, of_one);
        let one = one.into_result().err().map(http::Response::<axum::body::Bytes>::from);
        let of_one = of_one.into_result().err().map(http::Response::<axum::body::Bytes>::from);
        let shown = |response: http::Response<axum::body::Bytes>| {
            let (parts, body) = response.into_parts();
            (parts.status, parts.headers, body)
        };
        assert_eq!(one.map(shown), of_one.map(shown));
    }
    let receipt = block_on(limiter.charge("other", 1)).expect("it answers").expect("it passes");
    block_on(limits.charge([Line::new("one", "other", 1)])).expect("it answers").expect("passes");
    block_on(limiter.refund(receipt)).expect("it answers");
    assert_eq!(block_on(limiter.peek("other")).expect("it answers").used(), 0);
}
