//! The response to a refused request: any closure or type may make it, and the layer adds its
//! headers once.

use std::str;

use axum::extract::State;
use fastrand::Rng;
use http::HeaderMap;
use http::header::{CONTENT_TYPE, RETRY_AFTER};
use tower_fixed_window::{ProblemJson, Rejection, testing};

use crate::prelude::*;
use crate::support::RETRY_AFTER as SECONDS;

const STYLES: [Headers; 4] =
    [Headers::GitHub, Headers::IetfDraft10, Headers::GitHubAndIetfDraft10, Headers::None];

/// Another crate's response: it knows no rate-limit headers.
struct Plain;

impl Reject<Body> for Plain {
    fn reject(&self, parts: &Parts, why: &Rejection<'_>) -> Response<Body> {
        let mut response = Response::new(Body::from(parts.uri.path().to_owned()));
        *response.status_mut() = why.status();
        response.headers_mut().insert(CONTENT_TYPE, "text/plain".parse().expect("a value"));
        response
    }
}

async fn refused<J: Reject<Body>>(layer: &FixedWindowLayer<J>) -> Response<Body> {
    let service = layer.layer(Router::new());
    let _ = service.clone().oneshot(get("/")).await.expect("infallible");
    service.oneshot(get("/asked")).await.expect("infallible")
}

/// Clients of gRPC-web read no answer of another content type than that of their request.
#[test]
fn a_refused_call_of_grpc_web_has_the_content_type_of_its_request() {
    let layer = FixedWindowLayer::new(everyone(0)).reject(Grpc);
    for (asked, answered) in [
        (None, "application/grpc"),
        (Some("application/grpc"), "application/grpc"),
        (Some("application/grpc+proto"), "application/grpc"),
        (Some("application/json"), "application/grpc"),
        (Some("application/grpc-web"), "application/grpc-web"),
        (Some("application/grpc-web+proto"), "application/grpc-web+proto"),
        (Some("application/grpc-web-text+proto"), "application/grpc-web-text+proto"),
        (Some("Application/gRPC-Web+proto"), "Application/gRPC-Web+proto"),
    ] {
        let request = Request::post("/");
        let request = asked.into_iter().fold(request, |r, asked| r.header(CONTENT_TYPE, asked));
        let refused = testing::ask(&layer, request);
        assert_eq!(refused.headers()[CONTENT_TYPE], answered, "{asked:?}");
        assert_eq!(
            (refused.status(), &refused.headers()["grpc-status"]),
            (200.try_into().unwrap(), &"8".parse().unwrap())
        );
        assert!(refused.body().is_empty());
    }
}

/// The headers of a response, except those that describe the body.
fn without_type(response: &Response<Body>) -> HeaderMap {
    let mut headers = response.headers().clone();
    headers.remove(CONTENT_TYPE);
    headers
}

/// The layer replaces the kinds of headers that it is configured to send. Other kinds stay as the
/// closure wrote them.
#[tokio::test]
async fn rate_limit_headers_of_a_closure_stay_where_the_layer_sends_none_of_their_kind() {
    const GITHUB: [&str; 5] = ["limit", "remaining", "used", "reset", "resource"];
    const IETF: [&str; 2] = ["ratelimit", "ratelimit-policy"];
    let github = GITHUB.map(|name| format!("x-ratelimit-{name}"));
    for (mood, style) in ANSWERS.into_iter().flat_map(|mood| STYLES.map(|style| (mood, style))) {
        let names = || github.iter().map(|name| &name[..]).chain(IETF);
        let all = Vec::from_iter(names().map(str::to_owned));
        let layer = per_minute(1, mood).headers(style).on_reject(move |_, why| {
            let mut response = why.response(Body::empty());
            for name in all.iter().map(|name| &name[..]).chain(["retry-after", "cache-control"]) {
                let name = http::HeaderName::try_from(name).expect("a name");
                response.headers_mut().insert(name, "theirs".parse().expect("a value"));
            }
            response
        });
        let refused = refused(&layer).await;
        let own_github = matches!(style, Headers::GitHub | Headers::GitHubAndIetfDraft10);
        let own_ietf = matches!(style, Headers::IetfDraft10 | Headers::GitHubAndIetfDraft10);
        for name in names() {
            let sent = Vec::from_iter(refused.headers().get_all(name));
            let own = if name.starts_with("x-") { own_github } else { own_ietf };
            let stays = sent == ["theirs"];
            assert_eq!(stays, !own, "{style:?} sends {name}: {sent:?}");
            assert_eq!(sent.len(), usize::from(name != "x-ratelimit-resource" || !own));
        }
        assert_eq!(refused.headers()["retry-after"], SECONDS);
        assert_eq!(Vec::from_iter(refused.headers().get_all("cache-control")), ["no-store"]);
    }
}

#[tokio::test]
async fn a_reject_of_your_own_gets_the_headers_that_the_ready_made_ones_have() {
    for (mood, style) in ANSWERS.into_iter().flat_map(|mood| STYLES.map(|style| (mood, style))) {
        let limit = || named("api", 1, mood).headers(style);
        let ready_made = refused(&limit().reject(EmptyBody)).await;
        let own = refused(&limit().reject(Plain)).await;
        assert_eq!(own.status(), ready_made.status());
        assert_eq!(without_type(&own), without_type(&ready_made), "{style:?}");
        assert_eq!(own.headers()[CONTENT_TYPE], "text/plain");
        let names = own.headers().keys().count();
        assert_eq!(own.headers().len(), names, "each of them once, under {style:?}");
        assert_eq!(text_of(own).await, "/asked");
        let closure = limit().on_reject(|parts, why| Plain.reject(parts, why));
        assert_eq!(without_type(&refused(&closure).await), without_type(&ready_made));
    }
}

#[tokio::test]
async fn a_closure_may_return_another_limiters_refusal_or_its_headers() {
    let other = Limiter::new(Quota::per_day(1).name("other"));
    let _ = other.check("alice").await;
    let error = other.check("alice").await.expect("a decision").into_result().expect_err("refused");
    let theirs: Response<bytes::Bytes> = error.into();
    for mood in ANSWERS.into_iter().chain([Mood::FailsNow]) {
        let layer = || {
            let store = TestStore::new(mood).on_failure(OnStoreFailure::Deny);
            FixedWindowLayer::new(everyone(1).name("api").store(store))
        };
        let mut expected = without_type(&refused(&layer()).await);
        if matches!(mood, Mood::FailsNow) {
            // The layer has no numbers of its own, and leaves those of the closure.
            let numbers =
                theirs.headers().iter().filter(|(name, _)| name.as_str().starts_with("x-"));
            expected.extend(numbers.map(|(name, value)| (name.clone(), value.clone())));
        }
        let response = theirs.clone();
        let layer_of_response = layer().on_reject(move |_, _| response.clone().map(Body::from));
        assert_eq!(without_type(&refused(&layer_of_response).await), expected);
        let headers = theirs.headers().clone();
        let layer_of_headers = layer().on_reject(move |_, why| {
            let mut response = why.response(Body::empty());
            *response.headers_mut() = headers.clone();
            response
        });
        assert_eq!(without_type(&refused(&layer_of_headers).await), expected);
    }
}

#[tokio::test]
async fn a_failure_is_completed_as_a_refusal_by_a_limit_is() {
    let failing = || {
        let store = TestStore::new(Mood::FailsNow).on_failure(OnStoreFailure::Deny);
        FixedWindowLayer::new(everyone(1).store(store))
    };
    let own = refused(&failing().reject(Plain)).await;
    assert_eq!(own.status(), 503);
    assert_eq!(without_type(&own), without_type(&refused(&failing().reject(EmptyBody)).await));
}

#[test]
fn seconds_are_there_where_waiting_helps() {
    let seconds = |layer: FixedWindowLayer| {
        let layer = layer.on_reject(|_, why| {
            Response::builder()
                .header("seconds", format!("{:?}", why.retry_after()))
                .body(bytes::Bytes::new())
                .expect("a response")
        });
        let _ = testing::ask(&layer, Request::get("/"));
        let response = testing::ask(&layer, Request::get("/"));
        let told = response.headers()["seconds"].to_str().expect("ASCII").to_owned();
        let header = response.headers().get(RETRY_AFTER);
        (told, header.map(|of| of.to_str().expect("ASCII").to_owned()))
    };
    for mood in ANSWERS {
        assert_eq!(seconds(per_minute(1, mood)), ("Some(40s)".into(), Some(SECONDS.into())));
    }
    let never = per_minute(0, Mood::Now);
    assert_eq!(seconds(never), ("None".into(), None));
    let keyless = layered(everyone(1).key_fn(|_| None), Mood::Now);
    assert_eq!(seconds(keyless), ("None".into(), None));
    let store = TestStore::new(Mood::FailsNow).on_failure(OnStoreFailure::Deny);
    let failing = FixedWindowLayer::new(everyone(1).store(store));
    assert_eq!(seconds(failing), ("Some(1s)".into(), Some("1".into())));
}

/// Limits by data that only the handler knows.
async fn handler(State(logins): State<Limiter>) -> axum::response::Result<&'static str> {
    logins.check(Key::global()).await?.into_result()?;
    Ok("welcome")
}

async fn whole(response: Response<Body>) -> (u16, HeaderMap, String) {
    let (parts, body) = response.into_parts();
    let body = to_bytes(body, 1_000).await.expect("a body");
    (parts.status.as_u16(), parts.headers, str::from_utf8(&body).expect("text").to_owned())
}

#[tokio::test]
async fn a_handler_whose_store_fails_answers_503() {
    let store = TestStore::new(Mood::FailsLater);
    let limiter = Quota::per_minute(1).name("login").store(store.on_failure(OnStoreFailure::Deny));
    let app = Router::new().route("/", on_get(handler)).with_state(limiter);
    let (status, headers, body) = whole(app.oneshot(get("/")).await.expect("infallible")).await;
    assert_eq!((status, &headers[RETRY_AFTER]), (503, &"1".parse().expect("a value")));
    assert_eq!(headers["cache-control"], "no-store");
    assert!(!body.contains("test"), "nothing of the store's: {body}");
}

/// Limits that refuse together have another text than one of them, at the same time and count.
#[tokio::test]
async fn a_kept_refusal_names_the_limits_that_refuse() {
    for (names, both) in [
        (["all", "each"], r#"["all:1/minute","each:1/minute"]"#),
        (["each", "all"], r#"["each:1/minute","all:1/minute"]"#),
    ] {
        let limits = names.map(|name| match name {
            "all" => Quota::per_minute(1).name(name).key(Key::global()),
            _ => Quota::per_minute(1).name(name).key(header("user")),
        });
        let store = MemoryStore::new().clock(ManualClock::at_ms(NOW_MS));
        let layer = FixedWindowLayer::new(Limits::new(limits).store(store));
        let service = layer.layer(axum::Router::new());
        for (user, refusing) in [("ann", ""), ("ann", both), ("bob", r#"["all:1/minute"]"#)] {
            let request = Request::get("/").header("user", user).body(Body::empty());
            let answer = service.clone().oneshot(request.expect("a request")).await;
            let body = whole(answer.expect("infallible")).await.2;
            assert!(body.contains(refusing), "{user}: {body}");
        }
    }
}

fn some_quota(rng: &mut Rng) -> Quota {
    let (limit, hours) = (rng.u64(0..3), secs(3_600 * rng.u64(1..4)));
    match rng.u8(0..7) {
        0 => Quota::per_minute(limit),
        1 => Quota::per_day(limit),
        2 => Quota::per_month(limit),
        3 => Quota::per_year(limit),
        4 => Quota::new(limit, hours),
        5 => Quota::per_minute(limit).rollover_up_to(limit + 2),
        _ => Quota::new(limit, secs(31 * 86_400)),
    }
}

/// A layer answers as one that has refused nothing before: as a response without a layer does. So
/// it does if each request is refused in another way, in a queue, or after a change of quotas.
#[tokio::test]
async fn a_kept_refusal_is_the_one_that_would_be_made_anew() {
    for seed in 0..60 {
        let mut rng = Rng::with_seed(seed);
        // The last minute of 2025, in which many windows end.
        let clock = ManualClock::at_ms(1_767_225_540_000);
        let plan = move |parts: &Parts, _: &Key| {
            let plan = parts.headers["plan"].len() as u64;
            let mut rng = Rng::with_seed(plan + seed);
            let (one, other) = (Quotas::from(some_quota(&mut rng)), some_quota(&mut rng));
            if plan < 3 { one } else { format!("{one}, {other}").parse().unwrap_or(one) }
        };
        let limits = (0..rng.usize(1..4)).map(|i| {
            let limit = Limit::by_plan(plan).name(&format!("limit-{i}")).key(header("plan"));
            limit.cost_fn(|parts| parts.headers["cost"].len() as u64)
        });
        let store = MemoryStore::new().clock(clock.clone());
        let limits = Limits::new(limits.collect::<Vec<_>>()).store(store);
        let (sender, decisions) = std::sync::mpsc::channel();
        let layer = FixedWindowLayer::new(limits.clone()).on_decision(move |_, decision| {
            let _ = sender.send(decision.clone());
        });
        let layer = if rng.bool() { layer.queue(1, Duration::ZERO) } else { layer };
        let layer = layer.on_reject(|parts, why| match parts.headers["way"].as_bytes() {
            b"problem" => ProblemJson.reject(parts, why),
            b"github" => GitHubBody.reject(parts, why),
            b"empty" => EmptyBody.reject(parts, why),
            _ => Plain.reject(parts, why),
        });
        let service = layer.layer(Router::new());
        for step in 0..200 {
            match rng.u8(0..16) {
                0..4 => clock.advance(ms(rng.u64(0..700))),
                4 => {
                    let (key, quota) = ("p".repeat(rng.usize(1..6)), some_quota(&mut rng));
                    let until = UNIX_EPOCH + secs(1_767_225_540 + 60);
                    limits.limiter("limit-0").set_key_quotas_until(key, quota, until);
                }
                _ => {}
            }
            let way = ["problem", "problem", "github", "empty", "plain"][rng.usize(0..5)];
            let (plan, cost) = ("p".repeat(rng.usize(1..6)), "c".repeat(rng.usize(1..4)));
            let request = Request::get("/").header("plan", plan).header("cost", cost);
            let request = request.header("way", way).body(Body::empty()).expect("a request");
            let answer = service.clone().oneshot(request).await.expect("infallible");
            let decision = decisions.try_recv().expect("a decision");
            if let Err(refused) = decision.into_result() {
                let (mut answer, mut anew) =
                    (whole(answer).await, whole(Response::from(refused)).await);
                let content_type = answer.1.get(CONTENT_TYPE).cloned();
                if way != "problem" {
                    anew.2.clone_from(&answer.2);
                    anew.1.remove(CONTENT_TYPE);
                    answer.1.remove(CONTENT_TYPE);
                }
                assert_eq!(answer, anew, "{way}, seed {seed}, step {step}");
                let (expected, begin) = match way {
                    "problem" => ("application/problem+json", r#"{"type":"#),
                    "github" => ("application/json; charset=utf-8", r#"{"message":"#),
                    "plain" => ("text/plain", "/"),
                    _ => ("", ""),
                };
                let content_type = content_type.as_ref().map_or("", |t| t.to_str().expect("text"));
                assert_eq!((content_type, &answer.2[..begin.len()]), (expected, begin));
                assert_eq!(answer.2.is_empty(), way == "empty");
            }
        }
    }
}
