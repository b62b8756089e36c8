//! Mistakes in the set-up of a server are logged once, with the line to write.
//!
//! Each mistake is made in a process of its own, since it is logged once in the life of a process.
//! The operator reads the standard output and error of that process.

use std::any::type_name;
use std::env;
use std::process::{Command, exit};

use axum::serve;
use http::HeaderValue;
use hyper_util::rt::TokioIo;
use tokio::net::{UnixListener, UnixStream};
use tokio::runtime::Runtime;
use tonic::transport::server::TcpConnectInfo;
use tonic_health::pb::HealthCheckRequest;
use tower_fixed_window::key::MissingKey;
use tower_fixed_window::store::{Remote, Store};
use tower_fixed_window_redis::RedisStore;
use tracing::level_filters::LevelFilter;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

use crate::client_libraries::health;
use crate::prelude::*;

/// Runs a test's closure in a process of its own, and returns what the crate logs there.
fn logged<F: AsyncFnOnce()>(mistake: F) -> Vec<String> {
    logged_by(type_name::<F>(), 0, async |_| mistake().await)
}

/// The same, for a test of several cases.
fn logged_in_case<F: AsyncFnOnce(usize)>(case: usize, mistake: F) -> Vec<String> {
    logged_by(type_name::<F>(), case, mistake)
}

/// A closure is named after the function that it is in.
fn logged_by(closure: &str, case: usize, mistake: impl AsyncFnOnce(usize)) -> Vec<String> {
    /// Set in that process.
    const TEST: &str = "TOWER_FIXED_WINDOW_TEST";
    const CASE: &str = "TOWER_FIXED_WINDOW_CASE";

    let name = closure.trim_start_matches("it::").trim_end_matches("::{{closure}}");
    if env::var(TEST).is_ok_and(|test| test == name) {
        let case = env::var(CASE).expect("a case").parse().expect("a number");
        Runtime::new().expect("a runtime").block_on(mistake(case));
        exit(0);
    }
    let output = Command::new(env::current_exe().expect("this program"))
        .args(["--exact", name, "--nocapture"])
        .envs([(TEST, name), (CASE, &case.to_string())])
        .output()
        .expect("it starts");
    let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{text}");
    assert!(!text.contains("test result"), "{name} is not the name of its test");
    let mut told: Vec<String> = Vec::new();
    let mut goes_on = false;
    for line in text.lines() {
        if line.contains("tower_fixed_window: ") {
            told.push(line.to_owned());
            goes_on = true;
        } else if goes_on && line.starts_with("  ") {
            told.last_mut().expect("what goes on").extend(["\n", line]);
        } else {
            goes_on = false;
        }
    }
    told
}

async fn ask(layer: &FixedWindowLayer, request: Request<Body>) -> Response<Body> {
    limited(layer).oneshot(request).await.expect("infallible")
}

async fn ask_with_cost(layer: &FixedWindowLayer, cost: TrueCost) {
    let Ok(response) = layer.layer(answering(cost)).oneshot(from("192.0.2.7")).await;
    assert_eq!(response.status(), StatusCode::OK);
}

const QUOTA: Quota = Quota::per_minute(1_000);

fn per_minute() -> FixedWindowLayer {
    FixedWindowLayer::new(QUOTA)
}

fn named(name: &str) -> FixedWindowLayer {
    FixedWindowLayer::new(QUOTA.name(name))
}

fn limited_by(key: impl KeyExtractor) -> FixedWindowLayer {
    FixedWindowLayer::new(QUOTA.key(key))
}

/// A request from this peer.
fn from(peer: &str) -> Request<Body> {
    let mut request = Request::new(Body::empty());
    let peer = SocketAddr::new(peer.parse().expect("an address"), 4711);
    request.extensions_mut().insert(PeerAddr(peer));
    request
}

fn with(mut request: Request<Body>, name: &'static str, value: &'static str) -> Request<Body> {
    request.headers_mut().insert(name, HeaderValue::from_static(value));
    request
}

/// Returns the only line of a log, with those that are indented below it. It has no address.
#[track_caller]
fn only_line(log: &[String]) -> &str {
    let [line] = log else { panic!("not one line: {log:#?}") };
    for address in ["192.0.2.", "10.0.0.1:", "10.0.0.5", "4711"] {
        assert!(!line.contains(address), "{line}");
    }
    line
}

/// A limit by address, and requests without an address.
async fn without_addresses() {
    for layer in [per_minute(), named("api")] {
        for _ in 0..3 {
            let response = ask(&layer, Request::new(Body::empty())).await;
            assert_eq!(response.status(), StatusCode::INTERNAL_SERVER_ERROR);
        }
    }
}

const CONNECT_INFO: &str = "into_make_service_with_connect_info::<SocketAddr>()";

/// Without a subscriber, and under a filter that names other crates only, a mistake goes to standard
/// error. A subscriber that shows errors gets it alone.
#[test]
fn a_mistake_is_shown_by_a_subscriber_or_on_standard_error() {
    for case in 0..3 {
        let log = logged_in_case(case, async |case| {
            let filter = Targets::new().with_target("my_app", LevelFilter::DEBUG);
            let shown = tracing_subscriber::fmt::layer().with_ansi(false);
            match case {
                0 => {}
                1 => tracing_subscriber::registry().with(shown).with(filter).init(),
                _ => tracing_subscriber::fmt().with_ansi(false).init(),
            }
            without_addresses().await;
        });
        let told = only_line(&log);
        match case {
            2 => assert!(told.contains(" ERROR tower_fixed_window: "), "{told}"),
            _ => assert!(told.starts_with("tower_fixed_window: "), "{told}"),
        }
        let page = "docs/trouble.md";
        for advice in
            [CONNECT_INFO, "`tower_fixed_window::key::PeerAddr`", "docs/other-stacks.md", page]
        {
            assert!(told.contains(advice), "{told}");
        }
    }
}

/// A handler reports true costs that no limit of its layer takes, or only some of them.
#[test]
fn true_costs_that_no_limit_takes_are_told_once() {
    let ask = async |limits: Vec<Limit>, cost: &TrueCost| {
        let layer = FixedWindowLayer::new(limits);
        for _ in 0..3 {
            ask_with_cost(&layer, cost.clone()).await;
        }
    };
    for (case, name) in [(0, "\"tokens\""), (1, "\"cents\""), (2, "\"\"")] {
        let log = logged_in_case(case, async |case| {
            let key = |name| QUOTA.name(name).key(Key::global());
            let (tokens, unnamed) = (TrueCost::of("tokens", 7), TrueCost::of("", 7));
            match case {
                0 => ask(vec![key("tokens")], &tokens).await,
                1 => {
                    let limits = vec![key("tokens").settled(), key("cents")];
                    ask(limits, &tokens.clone().and("cents", 1)).await;
                }
                _ => ask(vec![key("tokens").settled()], &unnamed).await,
            }
            // Applied true costs are not mistakes.
            ask(vec![key("tokens").settled()], &tokens).await;
            ask(vec![Limit::new(QUOTA).key(Key::global()).settled()], &unnamed).await;
        });
        assert!(only_line(&log).contains(&format!("a true cost of {name}, ")), "{log:#?}");
        assert!(log[0].contains(".settled()"), "{log:#?}");
    }
}

/// Names of models, as an app may make them up for its costs, and an extractor's own words. What a
/// client sends is none of the server's mistakes.
#[test]
fn many_mistakes_of_one_kind_silence_no_other() {
    let log = logged(async || {
        for i in 0..100 {
            let cost = TrueCost::of(&format!("model-{i}"), 1);
            ask_with_cost(&limited_by(Key::global()), cost).await;
            let sent = move |_: &Parts, _: &mut Key| {
                Err(MissingKey::unusable(format!("a tenant that is no number: {i}")))
            };
            let _ = ask(&limited_by(Own(sent)), Request::new(Body::empty())).await;
            let own =
                move |_: &Parts, _: &mut Key| Err(MissingKey::server(format!("mend number {i}")));
            let _ = ask(&limited_by(Own(own)), Request::new(Body::empty())).await;
        }
        let _ = ask(&limited_by(extension::<User>()), Request::new(Body::empty())).await;
        let _ = ask(&per_minute(), Request::new(Body::empty())).await;
    });
    let of = |what: &str| log.iter().filter(|line| line.contains(what)).count();
    assert_eq!((of("extension `it::mistakes::User`"), of(CONNECT_INFO)), (1, 1), "{log:#?}");
    assert_eq!(of("a tenant that"), 0, "{log:#?}");
    for kind in ["model-", "mend number "] {
        assert!((1..20).contains(&of(kind)), "{log:#?}");
    }
}

/// It may be a slip of units, which locks its key for as many windows as it takes to pay back.
#[test]
fn a_true_cost_of_ten_windows_is_told_once() {
    let settle = async |case: usize, cost: u64| {
        let limit = |name| Quota::per_minute(100).name(name).key(Key::global()).settled();
        let limits = Limits::new([limit("tokens"), limit("cents")]);
        let tokens = limits.limiter("tokens");
        match case {
            0 => {
                let receipt =
                    tokens.charge(Key::global(), 1).await.expect("memory").expect("passes");
                tokens.settle(receipt, cost).await.expect("memory");
            }
            1 => {
                let lines =
                    [Line::new("tokens", Key::global(), 1), Line::new("cents", Key::global(), 1)];
                let receipts = limits.charge(lines).await.expect("memory").expect("passes");
                limits.settle(receipts, [("tokens", cost)]).await.expect("memory");
            }
            _ => {
                let cost = TrueCost::of("tokens", cost);
                ask_with_cost(&FixedWindowLayer::new(&limits), cost).await;
            }
        }
    };
    for case in 0..3 {
        let log = logged_in_case(case, async |case| {
            settle(case, 900).await;
            for _ in 0..3 {
                settle(case, 901).await;
            }
        });
        let line = only_line(&log);
        assert!(line.contains("`tokens`") && line.contains(".reset(key)"), "{line}");
    }
}

/// Addresses of peers that are hardly clients of a public server.
const LOCAL: [&str; 9] = [
    "127.0.0.1",
    "10.0.0.5",
    "172.17.0.1",
    "192.168.1.9",
    "169.254.1.1",
    "100.64.0.3",
    "::1",
    "fd00::5",
    "::ffff:10.0.0.5",
];

const FORWARDED: [(&str, &str); 3] =
    [("x-forwarded-for", "192.0.2.7"), ("forwarded", "for=192.0.2.7"), ("x-real-ip", "192.0.2.7")];

#[test]
fn a_proxy_without_client_ip_is_noticed_by_the_first_request() {
    let layers = || {
        let fallback = header("x-api-key").or(peer_ip());
        [per_minute(), limited_by(client_ip()), limited_by(fallback)]
    };
    for case in 0..LOCAL.len() {
        let log = logged_in_case(case, async |case| {
            let (name, value) = FORWARDED[case % FORWARDED.len()];
            for layer in layers() {
                for _ in 0..1_000 {
                    let request = with(from(LOCAL[case]), name, value);
                    assert_eq!(ask(&layer, request).await.status(), StatusCode::OK);
                }
            }
        });
        let line = only_line(&log);
        assert!(line.contains(r#"`.key(client_ip().trusting(["10.0.0.0/8"]))`"#), "{line}");
        assert!(line.contains("`.key(client_ip().trusting_hops(0))`"), "{line}");
    }
}

/// The first request may be a health check, and a proxy may be added later.
#[test]
fn a_proxy_that_appears_after_other_requests_is_noticed() {
    for case in [0, 1] {
        let log = logged_in_case(case, async |case| {
            let (without, with_proxy) = [(1, 1), (10_000, 256)][case];
            let layer = limited(limited_by(peer_ip()));
            for _ in 0..without {
                let _ = layer.clone().oneshot(from("10.0.0.5")).await;
            }
            for _ in 0..with_proxy {
                let request = with(from("10.0.0.5"), "x-forwarded-for", "192.0.2.7");
                let _ = layer.clone().oneshot(request).await;
            }
        });
        assert!(only_line(&log).contains("client_ip().trusting("), "{log:#?}");
    }
}

#[test]
fn nobody_is_warned_of_a_proxy_who_has_none_or_trusts_it() {
    let log = logged(async || {
        let local = async |layer: FixedWindowLayer| {
            for peer in LOCAL {
                let request =
                    FORWARDED.iter().fold(from(peer), |r, (name, value)| with(r, name, value));
                let _ = ask(&layer, request).await;
            }
        };
        // The peer is a trusted proxy, declared to be the client, or not part of the key.
        local(limited_by(client_ip().trusting(["10.0.0.0/8"]))).await;
        local(limited_by(client_ip().trusting_hops(1))).await;
        local(limited_by(client_ip().trusting_hops(0))).await;
        local(limited_by(header("x-real-ip").or(peer_ip()))).await;
        local(limited_by(Key::global())).await;
        local(per_minute().skip(|_| true)).await;
        // A client may send the headers of a proxy.
        for peer in ["192.0.2.1", "100.128.0.1", "172.32.0.1", "2001:db8::1"] {
            for (name, value) in FORWARDED {
                let _ = ask(&per_minute(), with(from(peer), name, value)).await;
                let _ = ask(&limited_by(client_ip()), with(from(peer), name, value)).await;
            }
        }
        // The peer is a public address, and no proxy.
        for peer in LOCAL {
            let _ = ask(&per_minute(), from(peer)).await;
        }
    });
    assert_eq!(log, [""; 0]);
}

/// All clients of the proxy share its count.
#[test]
fn a_trusted_proxy_that_sends_another_header_is_noticed() {
    let lines = |case| {
        let log = logged_in_case(case, async |case| {
            let proxies = || client_ip().trusting(["10.0.0.0/8"]);
            let (client, name) = match case {
                0 => (proxies().from_header("cloudfront-viewer-address"), "x-forwarded-for"),
                1 => (proxies(), "x-real-ip"),
                2 => (proxies(), "x-forwarded-for"),
                // The proxy's own health checks have no such header.
                _ => (proxies(), "host"),
            };
            let _ = ask(&limited_by(client), with(from("10.0.0.1"), name, "192.0.2.7")).await;
        });
        log.iter().filter(|line| line.contains("all of its clients share one count")).count()
    };
    assert_eq!([0, 1, 2, 3].map(lines), [1, 1, 0, 0]);
}

#[test]
fn quotas_set_on_a_limit_by_plan_are_noticed() {
    let log = logged(async || {
        let by_plan = Limit::by_plan(|_, _| Quota::per_hour(5)).name("api");
        Limiter::new(by_plan).set_quotas(QUOTA);
    });
    let line = only_line(&log);
    assert!(line.contains("`api` is by plan, so `set_quotas` changes nothing"), "{line}");
}

/// An app with a limit on a nested router and around all of it.
fn twice(inner: FixedWindowLayer, outer: FixedWindowLayer) -> Router {
    let nested = Router::new().route("/", on_get(async || "hello")).layer(inner);
    Router::new().nest("/api", nested).route("/", on_get(async || "hello")).layer(outer)
}

/// The `used` of a response after a request through both layers.
async fn used_after_one(app: Router) -> u64 {
    let mut request = get("/api");
    request.extensions_mut().extend(from("192.0.2.7").extensions().clone());
    let response = app.oneshot(request).await.expect("infallible");
    assert_eq!(response.status(), StatusCode::OK);
    used(&response)
}

#[test]
fn the_same_layer_twice_on_the_way_of_a_request_is_named() {
    for case in 0..5 {
        let log = logged_in_case(case, async |case| {
            let layer = match case {
                0 => per_minute(),
                1 => named("api"),
                2 => FixedWindowLayer::new(Limit::new(QUOTA).shadow()),
                3 => per_minute().headers(Headers::None),
                _ => per_minute().queue(10, secs(60)),
            };
            if case < 2 {
                let app = twice(layer.clone(), layer);
                for request in 1..=400 {
                    assert_eq!(used_after_one(app.clone()).await, 2 * request);
                }
                return;
            }
            // Another limit is between the two.
            let other = limited_by(Key::global());
            let layers = ServiceBuilder::new().layer(layer.clone()).layer(other).layer(layer);
            let app: Router = Router::new().route("/", on_get(async || "hello")).layer(layers);
            let _ = app.oneshot(from("192.0.2.7")).await;
        });
        let limit = if case == 1 { "`api`" } else { "the same rate limit" };
        assert!(only_line(&log).contains(&format!("{limit} is applied twice")), "{log:#?}");
        assert!(log[0].contains("`.layer(..)`") && log[0].contains("another name"), "{log:#?}");
    }
}

#[test]
fn layers_that_share_a_count_on_purpose_are_not_taken_for_one() {
    let log = logged(async || {
        let store = MemoryStore::new();
        let counted = |limit: Limit| FixedWindowLayer::new(limit.store(store.clone()));
        let limit = QUOTA.name("api");
        let layer = counted(limit.clone());
        // The layer is on two routes.
        let app: Router = Router::new()
            .route("/api", on_get(async || "hello").layer(layer.clone()))
            .route("/", on_get(async || "hello").layer(layer.clone()));
        assert_eq!(used_after_one(app.clone()).await, 1);
        assert_eq!(used_after_one(app).await, 2);
        // All clients have a limit by address, and users another one by user.
        let others = [
            per_minute(),
            counted(QUOTA.name("other")),
            counted(limit.clone().key(Key::global())),
            counted(limit.cost_fn(|_| 9)),
            layer.clone().count_if(|response| response.status == StatusCode::UNAUTHORIZED),
            counted(Limit::by_plan(|_, _| Quota::per_hour(10)).name("api")),
            layer.clone().skip(|_| true),
        ];
        for other in others {
            used_after_one(twice(other.clone(), layer.clone())).await;
            used_after_one(twice(layer.clone(), other)).await;
        }
        // Two requests: a handler makes one from another, for a part of a batch.
        let inner = limited(&layer);
        let batch = service_fn(move |request: Request<Body>| {
            let mut part = Request::new(Body::empty());
            *part.extensions_mut() = request.extensions().clone();
            inner.clone().oneshot(part)
        });
        let response = layer.layer(batch).oneshot(from("192.0.2.7")).await.expect("infallible");
        assert_eq!(response.status(), StatusCode::OK);
        // Several limits that a request meets twice, with another key.
        let by_user = |name| QUOTA.name(name).key(header("x-user"));
        let layer = FixedWindowLayer::new([by_user("requests"), by_user("tokens")]);
        let inner = limited(&layer);
        let outer = service_fn(move |request| inner.clone().oneshot(with(request, "x-user", "b")));
        let request = with(Request::new(Body::empty()), "x-user", "a");
        let Ok(response) = layer.layer(outer).oneshot(request).await;
        assert_eq!(response.status(), StatusCode::OK);
    });
    // Some are limits of one name, which is said when they are made.
    assert!(log.iter().all(|line| line.contains("has one count in both")), "{log:#?}");
}

/// The answers of gRPC's health check under a limit.
async fn call(layer: FixedWindowLayer<Grpc>) -> [Option<tonic::Status>; 3] {
    let mut client = health(layer).await;
    let mut statuses = [None, None, None];
    for status in &mut statuses {
        *status = client.check(HealthCheckRequest::default()).await.err();
    }
    statuses
}

#[test]
fn under_tonic_a_missing_address_names_the_line_for_tonic() {
    let log = logged(async || {
        for status in call(per_minute().reject(Grpc)).await {
            let status = status.expect("an error");
            assert_eq!(status.code(), tonic::Code::Internal);
            assert!(!status.message().contains("TcpConnectInfo"), "{status:?}");
        }
    });
    let line = only_line(&log);
    assert!(!line.contains("axum"), "{line}");
    let advice = "`.key_fn(|parts| Some(Key::from(\
        parts.extensions.get::<TcpConnectInfo>()?.remote_addr()?.ip())))`";
    assert!(line.contains(advice), "{line}");
}

#[tokio::test]
async fn the_line_for_tonic_counts_by_address() {
    let layer = FixedWindowLayer::new(Limit::new(Quota::per_day(2)).key_fn(|parts| {
        Some(Key::from(parts.extensions.get::<TcpConnectInfo>()?.remote_addr()?.ip()))
    }));
    let statuses = call(layer.reject(Grpc)).await;
    let codes = statuses.map(|status| status.map(|status| status.code()));
    assert_eq!(codes, [None, None, Some(tonic::Code::ResourceExhausted)]);
}

/// The status of a request through a proxy to a server that listens on a Unix socket.
async fn ask_unix(app: Router) -> u16 {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("socket");
    let listener = UnixListener::bind(&path).expect("a socket");
    tokio::spawn(async move { serve(listener, app).await });
    let stream = UnixStream::connect(&path).await.expect("it listens");
    let (mut sender, connection) =
        hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.expect("HTTP/1");
    tokio::spawn(connection);
    let request =
        Request::get("/").header("host", "localhost").header("x-forwarded-for", "192.0.2.7");
    let request = request.body(Body::empty()).expect("a request");
    sender.send_request(request).await.expect("an answer").status().as_u16()
}

/// The lines of the page are those of `tests/stacks/tests/unix_socket.rs`.
#[test]
fn on_a_unix_socket_the_log_names_the_page_about_it() {
    let log = logged(async || {
        let proxied = [client_ip().trusting(["127.0.0.1"]), client_ip().trusting_hops(1)];
        for layer in [per_minute()].into_iter().chain(proxied.map(limited_by)) {
            let app = Router::new().route("/", on_get(async || "hello"));
            assert_eq!(ask_unix(app.layer(layer)).await, 500);
        }
    });
    assert!(only_line(&log).contains("Unix sockets"), "{log:#?}");
}

#[derive(Clone)]
struct User;

impl From<&User> for Key {
    fn from(_: &User) -> Self {
        Key::global()
    }
}

#[test]
fn what_the_code_lacks_is_for_the_operator_and_not_for_the_client() {
    let log = logged(async || {
        tracing_subscriber::fmt().with_max_level(LevelFilter::DEBUG).with_ansi(false).init();
        let cases = [
            (QUOTA.name("one").key(extension::<User>()), 500, "this server is misconfigured"),
            (QUOTA.name("two").key_fn(|_| None), 400, "lacks a key for the rate limit"),
        ];
        let cases = cases.map(|(limit, status, text)| (FixedWindowLayer::new(limit), status, text));
        for (layer, status, message) in cases.iter().flat_map(|case| [case; 3]) {
            let response = ask(layer, Request::new(Body::empty())).await;
            assert_eq!(response.status(), *status);
            let body = text_of(response).await;
            assert!(body.contains(message), "{body}");
            for code in ["User", "extension", "key_fn", "or(", "peer_ip"] {
                assert!(!body.contains(code), "{body}");
            }
        }
    });
    // The fix is logged once, and the refusals if the subscriber shows them.
    let (fix, refused) = log.split_first().expect("a line");
    assert!(fix.contains("ERROR") && fix.contains("extension `it::mistakes::User`"), "{fix}");
    let (server, client) = refused.split_at(3);
    for line in server {
        assert!(line.contains(r#"outcome="missing_key""#) && !line.contains("missing="), "{line}");
    }
    for line in client {
        let missing = "missing=a key for the rate limit";
        assert!(line.contains("DEBUG") && line.contains(missing), "{line}");
    }
    assert_eq!(client.len(), 3);
}

/// Counts by the user, if authentication has set one.
fn user_or_peer() -> FixedWindowLayer {
    limited_by(extension::<User>().or(peer_ip()))
}

#[test]
fn a_fallback_that_all_requests_take_is_noticed_after_a_thousand() {
    let log = logged(async || {
        let layer = limited(user_or_peer());
        for _ in 0..3_000 {
            let _ = layer.clone().oneshot(from("192.0.2.7")).await;
        }
    });
    let line = only_line(&log);
    assert!(
        line.contains("none of 1000 requests had the extension `it::mistakes::User`"),
        "{line}"
    );
    assert!(line.contains("add the limit before it"), "{line}");
}

#[test]
fn a_fallback_that_some_requests_take_is_no_mistake() {
    let log = logged(async || {
        let layer = limited(user_or_peer());
        for i in 0..3_000 {
            let mut request = from("192.0.2.7");
            if i == 900 {
                request.extensions_mut().insert(User);
            }
            let _ = layer.clone().oneshot(request).await;
        }
        let by_header = limited(limited_by(header("x-api-key").or(peer_ip())));
        for _ in 0..3_000 {
            let _ = by_header.clone().oneshot(from("192.0.2.7")).await;
        }
    });
    assert_eq!(log, [""; 0]);
}

#[test]
fn a_limit_of_zero_is_noticed_when_it_is_built_unless_it_is_meant() {
    for case in [0, 1] {
        let log = logged_in_case(case, async |case| {
            let none = || Quota::per_minute(0);
            if case == 0 {
                for layer in [none().name("api"), Limit::new(none().and(Quota::per_hour(9)))] {
                    let _ = FixedWindowLayer::new(layer);
                }
                let _ = Limiter::new(none().name("api"));
                return;
            }
            let _ = FixedWindowLayer::new(Limit::by_plan(|_, _| Quota::per_minute(0)));
            let _ = FixedWindowLayer::new(Limit::new(none()).shadow());
            let limiter = Limiter::new(QUOTA.name("api"));
            limiter.set_quotas(none());
            let _ = FixedWindowLayer::new(&limiter);
            let _ = limiter.with_quotas(none());
        });
        if case == 1 {
            assert_eq!(log, [""; 0]);
            continue;
        }
        let told = only_line(&log);
        assert!(told.contains("a rate limit of 0 refuses every request"), "{told}");
        for advice in ["`Plan::UNLIMITED`", "`Limit::by_plan(|_, _| Quota::per_minute(0))`"] {
            assert!(told.contains(advice), "{told}");
        }
    }
}

#[test]
fn many_limits_that_differ_or_share_a_store_are_no_mistake() {
    let log = logged(async || {
        let store = MemoryStore::new();
        let plans = Limiter::new(QUOTA.name("plans"));
        let layer = FixedWindowLayer::new(&plans);
        for i in 0..2_000 {
            let _ = Limiter::new(QUOTA.name(&format!("tenant-{i}")));
            let _ = QUOTA.name("api").store(store.clone());
            let _ = plans.with_quotas(QUOTA).check("ann").await;
            let _ = layer.clone().layer(Router::<()>::new());
        }
    });
    assert_eq!(log, [""; 0]);
}

/// Each of two limits lets pass what the other one left, or has the other one's quotas. If each has
/// counts of its own, a key has both limits: 4 and 4 where the app says 4.
#[test]
fn one_name_of_two_limits_is_noticed() {
    const BOTH: &str = "are named `api`, so a key has one count in both: give one of them another \
        name; if they are to be one, make one `Limiter` for both; if their quotas differ between \
        requests, write one `Limit::by_plan(..)`";
    const APART: &str = "are named `api`, each with counts of its own";
    const SERVER: &str = "redis://127.0.0.1:1/";

    fn api(store: impl Store) -> Limiter {
        QUOTA.name("api").store(store)
    }
    fn other(store: impl Store) -> Limiter {
        Quota::per_hour(5).name("api").store(store)
    }
    fn of_one<S: Store + Clone>(store: S, change: impl FnOnce(S) -> S) -> [Limiter; 2] {
        [api(store.clone()), other(change(store))]
    }
    let told = [BOTH, BOTH, BOTH, BOTH, BOTH, "", "", "", "", APART, "", "", "", "", "", ""];
    for (case, told) in told.into_iter().enumerate() {
        let log = logged_in_case(case, async |case| {
            let redis = |url| RedisStore::new(url).expect("an address");
            let (memory, server) = (MemoryStore::new(), redis(SERVER));
            let alone = |name| Limiter::new(QUOTA.name(name));
            let layer = || FixedWindowLayer::new(QUOTA.name("api"));
            let two = match case {
                0 => [api(memory.clone()), api(memory)],
                1 => [api(memory.clone()), other(memory)],
                2 => [api(server), api(redis(SERVER))],
                3 => of_one(server, |of| of.deadline(secs(1))),
                4 => of_one(Remote::around(memory), |of| of.remember_refusals(Duration::ZERO)),
                // Another database, prefix or memory has counts of its own.
                5 => [api(server), api(redis("redis://127.0.0.1:1/2"))],
                6 => [api(server), api(redis(SERVER).prefix("shop"))],
                7 => of_one(server, |of| of.prefix("other")),
                // So has each limit that is given no store. Layers of it are noticed.
                8 => [alone("api"), alone("api")],
                9 => return drop([layer(), layer()]),
                10 => [alone("api"), alone("other")],
                11 => [api(memory), other(MemoryStore::new())],
                // One limit for two layers, and for two plans.
                12 => return drop([layer()].map(|first| [first.clone(), first])),
                13 => {
                    let one = api(server);
                    [one.with_quotas(Quota::per_minute(1)), one]
                }
                // A plan of requests.
                14 => {
                    let plan = Limit::by_plan(|_, _| Quota::per_hour(5)).name("api");
                    [api(memory.clone()), plan.store(memory)]
                }
                // Limits that are gone, as those of tests and of connections are.
                _ => {
                    drop((api(memory.clone()), alone("api")));
                    let [first, second] = [other(memory), alone("api")];
                    first.set_quotas(QUOTA);
                    [first, second]
                }
            };
            let _ = two.map(|limiter| FixedWindowLayer::new(&limiter));
        });
        match told {
            "" => assert_eq!(log, [""; 0], "case {case}"),
            _ => assert!(only_line(&log).contains(told), "case {case}: {log:#?}"),
        }
    }
}

/// An app that creates limits as it runs has more than are kept.
#[test]
fn one_name_with_two_sets_of_quotas_is_noticed_after_many_limits_are_gone() {
    let log = logged(async || {
        let store = MemoryStore::new();
        let named = |i: u64| QUOTA.name(&format!("limit-{i}")).store(store.clone());
        (0..3_000).for_each(|i| drop(named(i)));
        let first = named(3_000);
        let second = Quota::per_hour(5).name("limit-3000").store(store.clone());
        drop((first, second));
        // Beyond 1,024 that are in use, only the first of them are known.
        let used: Vec<_> = (0..1_100).map(named).collect();
        for i in [1_000, 1_099] {
            drop(Quota::per_hour(5).name(&format!("limit-{i}")).store(store.clone()));
        }
        drop(used);
    });
    let names: Vec<_> = log.iter().filter_map(|line| line.split('`').nth(1)).collect();
    assert_eq!(names, ["limit-3000", "limit-1000"], "{log:#?}");
}

#[test]
fn a_key_that_the_server_leaves_out_is_a_mistake_of_the_endpoint_too() {
    let log = logged(async || {
        let endpoint = RateLimitEndpoint::new([&named("api")]);
        for _ in 0..3 {
            let request = Request::new(Body::empty());
            let response = endpoint.clone().oneshot(request).await.expect("infallible");
            assert_eq!(response.status(), StatusCode::INTERNAL_SERVER_ERROR);
        }
    });
    let told = only_line(&log);
    assert!(told.contains(CONNECT_INFO), "{told}");
}

#[test]
fn a_true_cost_of_a_limit_that_a_request_does_not_have_is_no_mistake() {
    let log = logged(async || {
        let tokens = || QUOTA.name("tokens").key(Key::global()).settled();
        let unlimited = || Limit::by_plan(|_, _: &Key| Plan::UNLIMITED).name("tokens");
        for case in 0..5 {
            let outer = match case {
                0 => FixedWindowLayer::new(tokens()).skip(|_| true),
                1 => FixedWindowLayer::new(unlimited().key(Key::global()).settled()),
                2 => FixedWindowLayer::new(Quota::per_day(0).name("tokens").settled().shadow()),
                3 => FixedWindowLayer::new(tokens()).count_if(|_| false),
                _ => FixedWindowLayer::new(tokens()),
            };
            let inner = FixedWindowLayer::new(QUOTA.name("cents").key(Key::global()).settled());
            let service = inner.layer(answering(TrueCost::of("tokens", 7).and("cents", 1)));
            let _ = outer.layer(service).oneshot(from("192.0.2.7")).await;
        }
    });
    assert_eq!(log, [""; 0]);
}
