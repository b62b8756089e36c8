//! A layer with several limits, which are decided together (S37).

use std::convert::Infallible;
use std::future::{Future, poll_fn};
use std::task::Poll;
use std::time::Duration;

use axum::Router;
use axum::routing::any;
use http::request::Builder;
use http::{Request, Response, StatusCode};
use tower::{Layer, Service, ServiceExt, service_fn};
use tower_fixed_window::key::{extension, header};
use tower_fixed_window::store::{Adjust, Charge, Remote, Reply, Scope};
use tower_fixed_window::testing::{Hello, ask, ask_around, block_on};
use tower_fixed_window::{
    CostMeter, Decision, FixedWindowLayer, Headers, Key, KeyExtractor, Limit, Limiter, Limits,
    ManualClock, MemoryStore, Quota, RateLimitEndpoint, Store, TrueCost,
};

/// A minute's start.
const NOW_MS: u64 = 1_700_000_040_000;

fn limits<const N: usize>(limits: [Limit; N]) -> (Limits, ManualClock) {
    let clock = ManualClock::at_ms(NOW_MS);
    (Limits::new(limits).store(MemoryStore::new().clock(clock.clone())), clock)
}

fn gateway() -> [Limit; 3] {
    [
        Quota::per_minute(6).name("requests").key(header("x-org")),
        Quota::per_hour(1_000).name("tokens").key(header("x-org")).cost_fn(|parts| {
            parts.headers.get("x-tokens").map_or(10, |n| n.to_str().unwrap().parse().unwrap())
        }),
        Quota::per_day(50).name("cents").key(header("x-user")).cost_fn(|_| 5),
    ]
}

fn request(user: &str) -> Builder {
    Request::get("/").header("x-org", "acme").header("x-user", user)
}

fn used(limits: &Limits, key_of: impl Fn(&str) -> Key) -> Vec<u64> {
    let of = |name| block_on(limits.of(name).peek(key_of(name))).expect("it answers").used();
    ["requests", "tokens", "cents"].map(of).into()
}

fn key_of(user: &'static str) -> impl Fn(&str) -> Key {
    let key = |name: &'static str, value: &'static str| {
        let request = Request::get("/").header(name, value).body(()).expect("valid");
        let mut key = Key::default();
        header(name).extract(&request.into_parts().0, &mut key).expect("it is there");
        key
    };
    move |limit| if limit == "cents" { key("x-user", user) } else { key("x-org", "acme") }
}

fn header_of<'r, B>(response: &'r Response<B>, name: &str) -> &'r str {
    response.headers().get(name).map_or("", |value| value.to_str().expect("text"))
}

fn body(response: &Response<bytes::Bytes>) -> &str {
    std::str::from_utf8(response.body()).expect("text")
}

fn fields<B>(response: &Response<B>) -> [&str; 4] {
    ["limit", "remaining", "used", "resource"]
        .map(|field| header_of(response, &format!("x-ratelimit-{field}")))
}

#[test]
fn a_request_passes_if_all_limits_hold_and_a_refusal_takes_from_none() {
    let (limits, clock) = limits(gateway());
    let layer = FixedWindowLayer::new(&limits);

    let response = ask(&layer, request("ann"));
    assert_eq!(fields(&response), ["6", "5", "1", "requests"], "the smallest part is left of it");
    assert_eq!(used(&limits, key_of("ann")), [1, 10, 5]);

    let response = ask(&layer, request("ann").header("x-tokens", "991"));
    assert_eq!(response.status(), 429);
    assert_eq!(fields(&response), ["1000", "0", "10", "tokens"]);
    assert_eq!(header_of(&response, "retry-after"), "2760", "the hour began 14 min before");
    assert!(body(&response).contains(r#""violated-policies":["tokens:1000/hour"]"#));
    assert_eq!(used(&limits, key_of("ann")), [1, 10, 5], "nothing is taken of any");

    for _ in 0..5 {
        assert_eq!(ask(&layer, request("bob")).status(), 200);
    }
    let response = ask(&layer, request("ann"));
    assert_eq!(
        (response.status(), fields(&response)),
        (StatusCode::TOO_MANY_REQUESTS, ["6", "0", "6", "requests"])
    );
    assert_eq!(used(&limits, key_of("ann")), [6, 60, 5]);
    clock.advance(Duration::from_secs(60));
    assert_eq!(ask(&layer, request("ann")).status(), 200);
}

#[test]
fn the_body_and_the_ietf_fields_name_all_limits() {
    let (limits, _) = limits([
        Quota::per_minute(1).name("a").key(Key::global()),
        Quota::per_hour(5).name("b").key(Key::global()),
        Quota::per_day(1).name("c").key(Key::global()),
    ]);
    let layer = FixedWindowLayer::new(&limits).headers(Headers::GitHubAndIetfDraft10);

    let response = ask(&layer, Request::get("/"));
    let policies = r#""a:1/minute";q=1;w=60, "b:5/hour";q=5;w=3600, "c:1/day";q=1;w=86400"#;
    assert_eq!(header_of(&response, "ratelimit-policy"), policies);
    assert!(
        header_of(&response, "ratelimit").starts_with(r#""a:1/minute";r=0;t=60, "b:5/hour";r=4;"#)
    );

    let response = ask(&layer, Request::get("/"));
    assert_eq!(fields(&response), ["1", "0", "1", "c"], "the latest retry");
    assert!(
        body(&response).contains(r#""violated-policies":["a:1/minute","c:1/day"]"#),
        "{}",
        body(&response)
    );
    assert!(body(&response).contains("API rate limit exceeded: a:1/minute, c:1/day"));
    assert_eq!(header_of(&response, "ratelimit-policy"), policies);
}

#[test]
fn a_missing_key_of_one_limit_refuses_the_request() {
    let (limits, _) = limits(gateway());
    let layer = FixedWindowLayer::new(&limits);
    let response = ask(&layer, Request::get("/").header("x-org", "acme"));
    assert_eq!(response.status(), 400);
    assert_eq!(response.headers().get("x-ratelimit-limit"), None);
    assert_eq!(used(&limits, key_of("ann")), [0, 0, 0]);
}

#[test]
fn a_limit_that_is_unlimited_for_a_request_takes_no_part() {
    let plan = |limit: Quota| {
        move |parts: &http::request::Parts, _: &Key| {
            (!parts.headers.contains_key("x-vip")).then_some(limit)
        }
    };
    let (limits, _) = limits([
        Limit::by_plan(plan(Quota::per_minute(1))).name("requests").key(Key::global()),
        Limit::by_plan(plan(Quota::per_day(9))).name("tokens").key(Key::global()).cost_fn(|_| 2),
    ]);
    let layer = FixedWindowLayer::new(&limits);
    assert_eq!(fields(&ask(&layer, Request::get("/"))), ["1", "0", "1", "requests"]);
    assert_eq!(ask(&layer, Request::get("/")).status(), 429);
    let response = ask(&layer, Request::get("/").header("x-vip", "1"));
    assert_eq!((response.status(), fields(&response)), (StatusCode::OK, [""; 4]));
    assert!(block_on(limits.of("tokens").peek(Key::global())).is_err(), "by which plan?");
    let tokens = limits.of("tokens").with_quotas(Quota::per_day(9));
    assert_eq!(block_on(tokens.peek(Key::global())).expect("it answers").used(), 2);
}

#[test]
fn a_limit_in_shadow_never_refuses_is_charged_behind_the_others_and_is_in_no_field() {
    let (limits, _) = limits([
        Quota::per_minute(2).name("requests").key(Key::global()),
        Quota::per_minute(1).name("tokens").key(Key::global()).shadow(),
    ]);
    let layer = FixedWindowLayer::new(&limits).count_if(|response| response.status != 204);
    let used = || {
        ["requests", "tokens"]
            .map(|name| block_on(limits.of(name).peek(Key::global())).expect("it answers").used())
    };
    let no_content = any(async || StatusCode::NO_CONTENT);
    assert_eq!(ask_around(&layer, no_content, Request::get("/")).status(), 204);
    assert_eq!(used(), [0, 0], "both are given back");
    for remaining in ["1", "0"] {
        let response = ask(&layer, Request::get("/"));
        assert_eq!(response.status(), 200);
        assert_eq!(fields(&response)[1..2], [remaining]);
        assert_eq!(header_of(&response, "x-ratelimit-resource"), "requests");
    }
    assert_eq!(used(), [2, 1]);
    assert_eq!(ask(&layer, Request::get("/")).status(), 429);
    limits.of("tokens").set_shadow(false);
    limits.of("requests").set_quotas(Quota::per_minute(9));
    let response = ask(&layer, Request::get("/"));
    assert_eq!(
        (response.status(), fields(&response)[3]),
        (StatusCode::TOO_MANY_REQUESTS, "tokens")
    );
    assert_eq!(used(), [2, 1]);

    for name in ["requests", "tokens"] {
        limits.of(name).set_shadow(true);
    }
    let response = ask(&layer, Request::get("/"));
    assert_eq!((response.status(), fields(&response)), (StatusCode::OK, [""; 4]));
    assert_eq!(used(), [3, 1]);
}

#[test]
fn a_true_cost_takes_nothing_of_a_limit_in_shadow_that_would_refuse() {
    let (limits, _) = limits([
        Quota::per_minute(9).name("requests").key(Key::global()),
        Quota::per_minute(10).name("tokens").key(Key::global()).cost_fn(|_| 8).settled().shadow(),
    ]);
    let layer = FixedWindowLayer::new(&limits);
    for used in [3, 3] {
        let inner = any(async || axum::Extension(TrueCost::of("tokens", 3)));
        assert_eq!(ask_around(&layer, inner, Request::get("/")).status(), 200);
        let tokens = block_on(limits.of("tokens").peek(Key::global())).expect("it answers");
        assert_eq!(tokens.used(), used);
    }
}

#[test]
fn the_first_limit_in_shadow_makes_no_other_one_pass() {
    let (limits, _) = limits([
        Quota::per_minute(9).name("watched").key(Key::global()).shadow(),
        Quota::per_minute(1).name("requests").key(Key::global()),
    ]);
    let layer = FixedWindowLayer::new(&limits);
    assert_eq!(fields(&ask(&layer, Request::get("/"))), ["1", "0", "1", "requests"]);
    let response = ask(&layer, Request::get("/"));
    let refused = (StatusCode::TOO_MANY_REQUESTS, ["1", "0", "1", "requests"]);
    assert_eq!((response.status(), fields(&response)), refused);
    let watched = block_on(limits.of("watched").peek(Key::global())).expect("it answers");
    assert_eq!(watched.used(), 1);
}

/// Also where all limits are only watched.
#[test]
fn a_dropped_request_is_given_back_by_limits_in_shadow() {
    for enforced in [true, false] {
        let watched = Quota::per_minute(9).name("watched").key(Key::global()).shadow();
        let other = Quota::per_minute(9).name("other").key(Key::global());
        let (limits, _) = limits([watched, if enforced { other } else { other.shadow() }]);
        let layer = FixedWindowLayer::new(&limits).refund_dropped();
        let mut service = layer.layer(service_fn(async |_: Request<String>| {
            std::future::pending::<()>().await;
            Ok::<_, Infallible>(Response::new(axum::body::Body::empty()))
        }));
        let used = |name| block_on(limits.of(name).peek(Key::global())).expect("it answers").used();
        let response = service.call(Request::new(String::new()));
        assert_eq!([used("watched"), used("other")], [1, 1]);
        drop(response);
        assert_eq!([used("watched"), used("other")], [0, 0], "enforced: {enforced}");
    }
}

#[test]
fn what_an_inner_layer_refuses_is_counted_by_no_limit_in_shadow() {
    for enforced in [true, false] {
        let watched = Quota::per_minute(9).name("watched").key(Key::global()).shadow();
        let other = Quota::per_minute(9).name("other").key(Key::global());
        let (limits, _) = limits([watched, if enforced { other } else { other.shadow() }]);
        let clock = ManualClock::at_ms(NOW_MS);
        let inner = Quota::per_minute(1).key(Key::global()).store(MemoryStore::new().clock(clock));
        let service = FixedWindowLayer::new(inner).layer(Hello);
        for status in [200, 429] {
            let outer = FixedWindowLayer::new(&limits);
            assert_eq!(ask_around(&outer, service.clone(), Request::get("/")).status(), status);
        }
        let used = |name| block_on(limits.of(name).peek(Key::global())).expect("it answers").used();
        assert_eq!([used("watched"), used("other")], [1, 1], "enforced: {enforced}");
    }
}

fn settled() -> [Limit; 3] {
    [
        Quota::per_minute(6).name("requests").key(Key::global()),
        Quota::per_hour(1_000).name("tokens").key(Key::global()).cost_fn(|_| 100).settled(),
        Quota::per_day(50).name("cents").key(Key::global()).cost_fn(|_| 5).settled(),
    ]
}

#[test]
fn a_response_settles_each_limit_by_its_name() {
    let (limits, _) = limits(settled());
    let layer = FixedWindowLayer::new(&limits);
    let answer = |cost: TrueCost| {
        let response = ask_around(&layer, any(axum::Extension(cost)), Request::get("/"));
        assert_eq!(response.status(), 200);
        response
    };
    let used = || used(&limits, |_| Key::global());
    let response = answer(TrueCost::of("tokens", 712).and("cents", 4));
    assert_eq!(used(), [1, 712, 4]);
    assert_eq!(fields(&response)[..3], ["1000", "288", "712"], "after the correction");
    answer(TrueCost::of("cents", 0));
    assert_eq!(used(), [2, 812, 4], "what is not named keeps its charge");
    // `requests` is not settled, so its true cost changes nothing.
    answer(TrueCost::of("requests", 7));
    assert_eq!(used(), [3, 912, 9]);
    let response = ask(&layer, Request::get("/"));
    assert_eq!(
        (response.status(), fields(&response)[3]),
        (StatusCode::TOO_MANY_REQUESTS, "tokens")
    );
}

/// The documentation of `cost_fn` and `settled` promises this for estimates.
#[test]
fn an_estimate_of_zero_passes_where_the_true_cost_does_not_fit_and_one_of_one_does_not() {
    for (estimate, status) in [(0, StatusCode::OK), (1, StatusCode::TOO_MANY_REQUESTS)] {
        let tokens = Quota::per_hour(100).name("tokens").key(Key::global());
        let tokens = tokens.cost_fn(move |_| estimate).settled();
        let layer =
            FixedWindowLayer::new([tokens, Quota::per_day(9).name("day").key(Key::global())]);
        let ask = |cost| {
            let handler = any(axum::Extension(TrueCost::of("tokens", cost)));
            ask_around(&layer, handler, Request::get("/")).status()
        };
        assert_eq!(ask(100), StatusCode::OK);
        assert_eq!(ask(50), status, "estimated at {estimate}, and nothing is left");
    }
}

/// The same limit, however it is written.
#[test]
fn setters_of_a_limit_have_no_order() {
    type Setter = fn(Limit) -> Limit;
    let setters: [Setter; 5] = [
        |limit| limit.name("tokens"),
        |limit| limit.key(header("x-tenant")),
        |limit| limit.cost_fn(|_| 3),
        |limit| limit.settled(),
        |limit| limit.track_refused(10),
    ];
    let mut order = [0, 1, 2, 3, 4];
    // Swaps of neighbours, until each setter was first and last.
    for i in 0..20 {
        order.swap(i % 4, i % 4 + 1);
        let by_quota = Limit::new(Quota::per_hour(5));
        let limit = order.iter().fold(by_quota, |limit, setter| setters[*setter](limit));
        let layer = FixedWindowLayer::new(limit.store(MemoryStore::new()));
        let tokens = layer.limits().of("tokens");
        let ask = |cost| {
            let handler = any(axum::Extension(TrueCost::of("tokens", cost)));
            ask_around(&layer, handler, Request::get("/").header("x-tenant", "a")).status()
        };
        assert_eq!((ask(4), ask(1)), (StatusCode::OK, StatusCode::TOO_MANY_REQUESTS), "{order:?}");
        let used = block_on(tokens.peek(Key::secret("a"))).expect("it answers").used();
        assert_eq!((used, tokens.refused().expect("it tracks").total), (4, 1), "{order:?}");
    }
}

#[test]
fn a_stream_settles_each_limit_when_it_ends_however_early() {
    let (limits, _) = limits(settled());
    let used = || used(&limits, |_| Key::global());
    let layer = FixedWindowLayer::new(&limits);
    let metered = || {
        let (cost, meter) = TrueCost::metered();
        ask_around(&layer, any(axum::Extension(cost)), Request::get("/"));
        meter
    };
    let add = |meter: &mut CostMeter, tokens| {
        meter.add("tokens", tokens);
        meter.set("cents", meter.of("tokens").div_ceil(100));
    };
    let (mut whole, mut cut, nothing) = (metered(), metered(), metered());
    assert_eq!(used(), [3, 300, 15]);
    add(&mut whole, 150);
    add(&mut whole, 150);
    drop(whole);
    assert_eq!(used(), [3, 500, 13]);
    add(&mut cut, 1);
    drop(cut);
    assert_eq!(used(), [3, 401, 9]);
    // It never heard of a cost: what it caused may have been bought.
    drop(nothing);
    assert_eq!(used(), [3, 401, 9]);
    let mut free = metered();
    assert_eq!(used(), [4, 501, 14]);
    free.set("tokens", 0);
    drop(free);
    assert_eq!(used(), [4, 401, 14], "a cost of nothing is a cost");
}

/// Over a store elsewhere, which charges the limits one after the other.
#[tokio::test(start_paused = true)]
async fn a_request_that_is_dropped_while_a_store_decides_is_given_back_by_all_limits() {
    let store = MemoryStore::new().clock(ManualClock::at_ms(NOW_MS));
    let limits = Limits::new(settled()).store(Remote::around(Late(store.clone())));
    let layer = FixedWindowLayer::new(&limits).refund_dropped();
    let mut service = layer.layer(service_fn(async |_: Request<String>| {
        Ok::<_, Infallible>(Response::new(axum::body::Body::empty()))
    }));
    let here = Limits::new(settled()).store(store);
    let used = || used(&here, |_| Key::global());
    let request = || Request::new(String::new());
    for _ in 0..3 {
        let mut response = Box::pin(service.ready().await.expect("infallible").call(request()));
        let polled = poll_fn(|cx| Poll::Ready(response.as_mut().poll(cx).is_pending()));
        assert!(polled.await, "the store takes a while");
        drop(response);
        tokio::time::sleep(Duration::from_secs(1)).await;
        assert_eq!(used(), [0, 0, 0]);
    }
    let response = service.ready().await.expect("infallible").call(request()).await;
    assert_eq!(response.expect("infallible").status(), 200);
    assert_eq!(used(), [1, 100, 5]);
}

/// A store that answers after a while.
struct Late(MemoryStore);

impl Store for Late {
    fn charge(&self, charge: Charge<'_>) -> Reply<Decision> {
        let (store, charge) = (self.0.clone(), charge.to_owned());
        late(move || store.charge(charge.as_charge()))
    }

    fn adjust(&self, adjust: Adjust<'_>) -> Reply<()> {
        self.0.adjust(adjust)
    }

    fn reset(&self, scope: &Scope, key: &Key) -> Reply<()> {
        self.0.reset(scope, key)
    }
}

fn late<T: Send + 'static>(ask: impl FnOnce() -> Reply<T> + Send + 'static) -> Reply<T> {
    Reply::later(async {
        tokio::time::sleep(Duration::from_millis(10)).await;
        ask().await
    })
}

#[test]
fn an_outer_layer_of_several_limits_gives_back_what_an_inner_layer_refuses() {
    let (limits, _) = limits(settled());
    let outer = FixedWindowLayer::new(&limits);
    let inner = FixedWindowLayer::new(Quota::per_minute(0).name("inner").key(Key::global()));
    let response = ask_around(&outer, inner.layer(Hello), Request::get("/"));
    assert_eq!((response.status(), fields(&response)[3]), (StatusCode::TOO_MANY_REQUESTS, "inner"));
    assert_eq!(used(&limits, |_| Key::global()), [0, 0, 0]);
}

#[test]
fn the_endpoint_lists_all_limits_of_a_layer() {
    let (limits, _) = limits(settled());
    let layer = FixedWindowLayer::new(&limits);
    ask(&layer, Request::get("/"));
    let app = Router::new().route_service("/rate_limit", RateLimitEndpoint::new([&layer]));
    let request = Request::get("/rate_limit").body(axum::body::Body::empty()).expect("valid");
    let text = block_on(async {
        let response = app.oneshot(request).await.expect("infallible");
        let body = axum::body::to_bytes(response.into_body(), 10_000).await.expect("it is there");
        Ok::<_, Infallible>(String::from_utf8(body.into()).expect("text"))
    })
    .expect("infallible");
    let json: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    let used = |name: &str| json["resources"][name]["used"].as_u64();
    assert_eq!([used("requests"), used("tokens"), used("cents")], [Some(1), Some(100), Some(5)]);
}

/// `extension` finds what an auth layer has left, for each limit its own.
#[test]
fn limits_of_an_organization_and_of_its_users() {
    #[derive(Clone)]
    struct Org(u64);
    #[derive(Clone)]
    struct User(u64);
    impl From<&Org> for Key {
        fn from(org: &Org) -> Self {
            Self::from(org.0)
        }
    }
    impl From<&User> for Key {
        fn from(user: &User) -> Self {
            Self::from(user.0)
        }
    }
    let layer = FixedWindowLayer::new([
        Quota::per_day(3).name("org").key(extension::<Org>()),
        Quota::per_day(2).name("user").key(extension::<User>()),
    ]);
    let ask = |org, user| {
        let request = Request::get("/").extension(Org(org)).extension(User(user));
        ask(&layer, request).status().as_u16()
    };
    assert_eq!([ask(1, 1), ask(1, 1), ask(1, 1), ask(1, 2), ask(1, 2)], [200, 200, 429, 200, 429]);
    assert_eq!(ask(2, 2), 200, "the refusal took nothing of user 2");
}

#[test]
fn a_layer_changes_its_quotas_with_those_of_its_limits() {
    let api = Limiter::new(Quota::per_minute(1).name("api").key(Key::global()));
    let (one, other) = (FixedWindowLayer::new(&api), FixedWindowLayer::new(&api));
    assert_eq!(ask(&one, Request::get("/")).status(), 200);
    assert_eq!(ask(&other, Request::get("/")).status(), 429, "they are one limit");
    api.set_quotas(Quota::per_minute(2));
    assert_eq!(fields(&ask(&other, Request::get("/")))[..3], ["2", "0", "2"]);
    assert_eq!(ask(&one, Request::get("/")).status(), 429);
}
