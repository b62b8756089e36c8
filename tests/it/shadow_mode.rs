//! Limits in shadow mode, alone and beside others that can refuse (S37).

use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::body::Body;
use axum::routing::any;
use http::{Request, Response, StatusCode};
use tokio::time::{Instant, sleep};
use tower::{Layer, ServiceExt};
use tower_fixed_window::store::{Adjust, Charge, Reply, Scope};
use tower_fixed_window::testing::{ask, ask_around, block_on};
use tower_fixed_window::{
    Decision, FixedWindowLayer, Key, Limit, Limits, ManualClock, MemoryStore, Quota, Store,
};

use crate::support::{NOW_MS, limit_headers};

const NAMES: [&str; 3] = ["one", "two", "three"];

/// A limit of each name, from one to three of them.
fn limits(count: usize) -> Vec<Limit> {
    let limit = |name: &&str| Quota::per_minute(9).name(name).key(Key::global());
    NAMES[..count].iter().map(limit).collect()
}

fn store() -> MemoryStore {
    MemoryStore::new().clock(ManualClock::at_ms(NOW_MS))
}

fn used_of(limits: &Limits, name: &str) -> u64 {
    block_on(limits.of(name).peek(Key::global())).expect("it answers").used()
}

#[test]
fn a_limit_in_shadow_never_refuses_is_charged_behind_the_others_and_is_in_no_field() {
    // It may be the first.
    for place in [0, 1] {
        let mut all = vec![Quota::per_minute(2).name("requests").key(Key::global())];
        all.insert(place, Quota::per_minute(1).name("tokens").key(Key::global()).shadow());
        let limits = Limits::new(all).store(store());
        let layer = FixedWindowLayer::new(&limits).count_if(|response| response.status != 204);
        let used = || ["requests", "tokens"].map(|name| used_of(&limits, name));
        let shown = |response: &Response<_>| {
            let fields = limit_headers(response);
            let of = |field| fields.get(field).copied().unwrap_or_default().to_owned();
            (response.status().as_u16(), of("remaining"), of("resource"))
        };
        let is = |status, remaining: &str, name: &str| (status, remaining.into(), name.into());
        let no_content = any(async || StatusCode::NO_CONTENT);
        assert_eq!(ask_around(&layer, no_content, Request::get("/")).status(), 204);
        assert_eq!(used(), [0, 0], "both are given back");
        for remaining in ["1", "0"] {
            let response = ask(&layer, Request::get("/"));
            assert_eq!(shown(&response), is(200, remaining, "requests"));
        }
        assert_eq!(used(), [2, 1]);
        assert_eq!(shown(&ask(&layer, Request::get("/"))), is(429, "0", "requests"));
        limits.of("tokens").set_shadow(false);
        limits.of("requests").set_quotas(Quota::per_minute(9));
        assert_eq!(shown(&ask(&layer, Request::get("/"))), is(429, "0", "tokens"));
        assert_eq!(used(), [2, 1]);

        limits.into_iter().for_each(|limiter| limiter.set_shadow(true));
        assert_eq!(shown(&ask(&layer, Request::get("/"))), is(200, "", ""));
        assert_eq!(used(), [3, 1]);
    }
}

/// Each decision that the layer's hook is told: whether it passed, and the limits in it.
type Told = Arc<Mutex<Vec<(bool, Vec<String>)>>>;

#[test]
fn a_hook_hears_of_a_limit_in_shadow_mode_alone_and_beside_others() {
    for count in 1..=3 {
        let mut all = limits(count);
        all[0] = Quota::per_minute(1).name("one").key(Key::global()).shadow();
        let heard = Told::default();
        let to = Arc::clone(&heard);
        let layer = FixedWindowLayer::new(Limits::new(all).store(store()));
        let layer = layer.on_decision(move |_, decision| {
            let names: Vec<_> = decision.limits().map(|(name, _)| name.to_owned()).collect();
            to.lock().unwrap().push((decision.allowed(), names));
        });
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
            let all = limits(count).into_iter().enumerate().map(of);
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
