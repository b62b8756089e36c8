//! Clients of other projects, over real sockets: the headers make them wait, and they wait for the
//! right time. Where they would sleep, the server's clock is moved instead.

use axum::routing::get;
use hyper::body::Incoming;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tonic::Code;
use tonic::transport::server::{Server, TcpIncoming};
use tonic::transport::{Channel, Endpoint};
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_client::HealthClient;
use tonic_types::StatusExt;
use tower_fixed_window::Clock;
use tower_fixed_window::key::MissingKey;

use crate::github;
use crate::prelude::*;

async fn hello(_: Request<Incoming>) -> Result<Response<Body>, Infallible> {
    Ok(Response::new(Body::from("hello")))
}

fn seconds(response: &reqwest::Response, name: &str) -> Option<u64> {
    let mut values = response.headers().get_all(name).iter();
    let value = values.next()?.to_str().expect("ASCII");
    assert_eq!(values.next(), None, "{name} comes twice");
    Some(value.parse().unwrap_or_else(|_| panic!("{name}: {value}")))
}

async fn json_of(response: reqwest::Response) -> Value {
    serde_json::from_slice(&response.bytes().await.expect("a body")).expect("JSON")
}

/// What openai-python 3.57 makes of a 429 (`_base_client.py`): it waits for `retry-after-ms` or else for
/// `retry-after`, read as a float of up to two minutes; it does not retry after a longer time, or if
/// `x-should-retry` says so.
fn openai_python_waits(response: &reqwest::Response) -> Option<f64> {
    let float = |name, divisor: f64| {
        let value: f64 = response.headers().get(name)?.to_str().ok()?.parse().ok()?;
        Some(value / divisor)
    };
    let wait = float("retry-after-ms", 1_000.0).or_else(|| float("retry-after", 1.0))?;
    let says_no = response.headers().get("x-should-retry").is_some_and(|value| value == "false");
    assert!(wait > 0.0, "it would wait as long as it likes");
    (wait <= 120.0 && !says_no).then_some(wait)
}

/// What litellm 1.110 makes of it (`utils.py`): it waits for `retry-after`, read as an integer, if that
/// is no more than a minute, and cools a deployment down for as long otherwise.
fn litellm_waits(response: &reqwest::Response) -> u64 {
    let value = response.headers()["retry-after"].to_str().expect("ASCII");
    value.parse().expect("its `int(..)` would fail")
}

#[tokio::test]
async fn openai_python_and_litellm_read_the_headers_of_openais_api() {
    let clock = ManualClock::at_ms(NOW_MS);
    let tokens = Quota::per_minute(100).and(Quota::per_hour(230)).name("tokens");
    let limits = Limits::new([
        Quota::per_minute(3).name("requests").key(Key::global()),
        tokens.key(Key::global()).cost_fn(|_| 40),
    ]);
    let layer = FixedWindowLayer::new(limits.store(MemoryStore::new().clock(clock.clone())));
    let app = Router::new().route("/", get(async || "hello"));
    let app = app.layer(layer.headers(Headers::OpenAi));
    let (url, client) = (format!("http://{}/", serve(app).await), client());
    let (mut passed, mut refused_before) = (0, false);
    let last = loop {
        let response = client.get(&url).send().await.expect("an answer");
        // litellm passes these on, and sets gauges to those that remain.
        for limit in ["requests", "tokens"] {
            let value = |field| {
                let name = format!("x-ratelimit-{field}-{limit}");
                response.headers()[name].to_str().expect("ASCII").to_owned()
            };
            let [most, left] = ["limit", "remaining"].map(|field| value(field).parse::<f64>());
            assert!(left.expect("a number") <= most.expect("a number"));
            assert!(value("reset").ends_with('s'), "a duration of Go's");
        }
        if response.status() == StatusCode::OK {
            (passed, refused_before) = (passed + 1, false);
            continue;
        }
        assert!(!refused_before, "both waited as long as the response says");
        refused_before = true;
        let Some(wait) = openai_python_waits(&response) else { break response };
        assert_eq!(litellm_waits(&response) as f64, wait);
        clock.advance(Duration::from_secs_f64(wait));
    };
    // Five requests take 200 of the hour's 230 tokens; nobody waits for the next hour.
    assert_eq!(passed, 5);
    let wait = litellm_waits(&last);
    assert!(wait > 120, "{wait}");
    clock.advance(secs(wait));
    assert_eq!(client.get(&url).send().await.expect("an answer").status(), StatusCode::OK);
}

#[tokio::test]
async fn http_2_clients_see_the_same_headers() {
    let layer = named("api", 1, Mood::Now).headers(Headers::GitHubAndIetfDraft10);
    let url = format!("http://{}/", serve_hyper(layer.layer(service_fn(hello))).await.0);
    let http2 = reqwest::Client::builder().no_proxy().http2_prior_knowledge().build();
    let http2 = http2.expect("a client");
    let passed = http2.get(&url).send().await.expect("an answer");
    assert_eq!((passed.status(), passed.version()), (StatusCode::OK, http::Version::HTTP_2));
    let mut answers = Vec::new();
    for client in [http2, client()] {
        let refused = client.get(&url).send().await.expect("an answer");
        assert_eq!(refused.status(), StatusCode::TOO_MANY_REQUESTS);
        let mut headers = refused.headers().clone();
        headers.remove("date");
        let version = refused.version();
        answers.push((version, headers, refused.text().await.expect("a body")));
    }
    let [(http_2, headers, body), (http_1, fields_1, body_1)] = &answers[..] else { panic!() };
    assert_eq!((*http_2, *http_1), (http::Version::HTTP_2, http::Version::HTTP_11));
    assert_eq!((headers, body), (fields_1, body_1));
    assert_eq!(headers["x-ratelimit-reset"], RESET);
    assert_eq!(headers["retry-after"], RETRY_AFTER);
    assert_eq!(headers["ratelimit"], r#""api:1/minute";r=0;t=40"#);
    assert!(body.contains("API rate limit exceeded"), "{body}");
}

/// tonic's server and client, with that limit between them.
pub(crate) async fn health<J>(layer: FixedWindowLayer<J>) -> HealthClient<Channel>
where
    J: Reject<tonic::body::Body> + Clone + Send + Sync + 'static,
{
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let addr = listener.local_addr().expect("bound");
    let (_reporter, health) = tonic_health::server::health_reporter();
    let server = Server::builder()
        .layer(layer)
        .add_service(health)
        .serve_with_incoming(TcpIncoming::from(listener));
    tokio::spawn(server);
    let endpoint = Endpoint::from_shared(format!("http://{addr}")).expect("a URL");
    HealthClient::new(endpoint.connect().await.expect("it listens"))
}

async fn check(client: &mut HealthClient<Channel>) -> Result<(), tonic::Status> {
    client.check(HealthCheckRequest::default()).await.map(|_| ())
}

#[tokio::test]
async fn grpc_clients_see_resource_exhausted_and_when_to_come_back() {
    let store = TestStore::new(Mood::Now);
    let clock = store.clock.clone();
    let layer = FixedWindowLayer::new(everyone(2).name("health").store(store));
    let mut client = health(layer.reject(Grpc)).await;
    let passed = client.check(HealthCheckRequest::default()).await.expect("it passes");
    assert_eq!(passed.metadata().get("x-ratelimit-remaining").expect("a field"), "1");
    check(&mut client).await.expect("it passes");

    let refused = check(&mut client).await.expect_err("it is refused");
    assert_eq!(refused.code(), Code::ResourceExhausted);
    assert_eq!(refused.message(), "API rate limit exceeded: health:2/minute");
    let field = |name| refused.metadata().get(name).expect("a field").to_str().expect("ASCII");
    assert_eq!(field("retry-after"), RETRY_AFTER);
    assert_eq!(field("x-ratelimit-reset"), RESET);
    assert_eq!((field("x-ratelimit-limit"), field("x-ratelimit-used")), ("2", "2"));
    assert_eq!((field("x-ratelimit-remaining"), field("x-ratelimit-resource")), ("0", "health"));
    // That of the wait, which OTLP exporters read.
    assert_eq!(refused.get_error_details_vec().len(), 1);

    clock.advance(secs(field("retry-after").parse().expect("seconds")));
    check(&mut client).await.expect("it passes again");
}

/// A call that no retry mends is not retried, and waits of any length are read back.
#[tokio::test]
async fn grpc_clients_see_whether_and_for_how_long_to_wait() {
    for (quota, wait) in [
        (Quota::per_minute(0), None),
        (Quota::new(1, ms(10)), Some(1)),
        (Quota::per_year(1), Some(41_000)),
    ] {
        let store = TestStore::new(Mood::Now);
        let limit = Limit::new(quota).key(Key::global()).store(store);
        let mut client = health(FixedWindowLayer::new(limit).reject(Grpc)).await;
        let _ = check(&mut client).await;
        let refused = check(&mut client).await.expect_err("it is refused");
        let metadata = refused.metadata().clone().into_headers();
        let seconds = metadata.get("retry-after").map(|value| value.to_str().expect("ASCII"));
        let seconds: Option<u64> = seconds.map(|seconds| seconds.parse().expect("seconds"));
        assert_eq!(wait.is_some(), seconds.is_some());
        assert!(seconds.unwrap_or(0) >= wait.unwrap_or(0), "{seconds:?}");
        let pushback = seconds.map_or("-1".to_owned(), |seconds| (1_000 * seconds).to_string());
        assert_eq!(metadata["grpc-retry-pushback-ms"], pushback);
        let retry = refused.get_details_retry_info().and_then(|retry| retry.retry_delay);
        assert_eq!(retry, seconds.map(Duration::from_secs));
    }
}

#[tokio::test]
async fn grpc_clients_see_client_and_server_errors_as_grpc_codes() {
    let keyless = layered(everyone(9).key_fn(|_| None), Mood::Now).reject(Grpc);
    let status = check(&mut health(keyless).await).await.expect_err("it is refused");
    assert_eq!(status.code(), Code::InvalidArgument);
    assert_eq!(status.message(), "The request lacks a key for the rate limit");

    let store = TestStore::new(Mood::FailsNow).on_failure(OnStoreFailure::Deny);
    let failing = FixedWindowLayer::new(everyone(9).store(store)).reject(Grpc);
    let status = check(&mut health(failing).await).await.expect_err("it is refused");
    assert_eq!(status.code(), Code::Unavailable);
    assert_eq!(status.metadata().get("retry-after").expect("a field"), "1");

    // Text that gRPC wants encoded arrives as it was.
    let text = |_: &Parts, _: &mut Key| Err(MissingKey::client("100 % \u{201c}né\u{201d}\n"));
    let keyless = layered(everyone(9).key(Own(text)), Mood::Now).reject(Grpc);
    let status = check(&mut health(keyless).await).await.expect_err("it is refused");
    assert_eq!(status.message(), "The request lacks 100 % \u{201c}né\u{201d}\n");
}

/// How a client of GitHub's API finds out that, and how long, it has to wait.
#[derive(Clone, Copy, Debug)]
enum Reads {
    /// As Octokit's throttling: `x-ratelimit-remaining` is exactly "0", then `-reset`, and a second
    /// more.
    Fields,
    /// As PyGithub: the body's message, then `-reset`.
    Message,
    /// As generic retries: `retry-after`.
    RetryAfter,
    /// As go-github: the headers of every response; with none left, it sends no request.
    Ahead,
}

struct GitHubClient {
    reads: Reads,
    base: String,
    token: Option<&'static str>,
    http: reqwest::Client,
    clock: ManualClock,
    refusals: u32,
}

impl GitHubClient {
    async fn send(&self, path: &str) -> reqwest::Response {
        let request = self.http.get(format!("{}{path}", self.base));
        let request = match self.token {
            Some(token) => request.header("authorization", format!("token {token}")),
            None => request,
        };
        request.send().await.expect("an answer")
    }

    /// Sends requests until all have passed. Gives up if the client can't find out why it was
    /// refused, or is refused twice in a row.
    async fn get(&mut self, path: &str) -> Value {
        for _ in 0..2 {
            let response = self.send(path).await;
            let now = self.clock.now_ms();
            let until_reset =
                seconds(&response, "x-ratelimit-reset").expect("a time") * 1_000 - now;
            let wait = match (response.status().as_u16(), self.reads) {
                (200, Reads::Ahead) => {
                    if response.headers()["x-ratelimit-remaining"] == "0" {
                        self.clock.advance(ms(until_reset));
                    }
                    return json_of(response).await;
                }
                (200, _) => return json_of(response).await,
                (403 | 429, Reads::Fields) => {
                    assert_eq!(response.headers()["x-ratelimit-remaining"], "0");
                    until_reset.div_ceil(1_000) * 1_000 + 1_000
                }
                (403 | 429, Reads::Message) => {
                    let body: Value = json_of(response).await;
                    let message = body["message"].as_str().expect("a message").to_lowercase();
                    assert!(message.starts_with("api rate limit exceeded"), "{message}");
                    until_reset
                }
                (403 | 429, Reads::RetryAfter) => {
                    1_000 * seconds(&response, "retry-after").expect("a time")
                }
                (status, reads) => panic!("{status} for one that reads {reads:?}"),
            };
            self.refusals += 1;
            self.clock.advance(ms(wait));
        }
        panic!("refused although it waited");
    }
}

#[tokio::test]
async fn clients_of_githubs_api_get_through_as_with_github() {
    for status in [StatusCode::FORBIDDEN, StatusCode::TOO_MANY_REQUESTS] {
        for headers in [Headers::GitHub, Headers::GitHubAndIetfDraft10] {
            for reads in [Reads::Fields, Reads::Message, Reads::RetryAfter, Reads::Ahead] {
                let clock = ManualClock::at_ms(NOW_MS);
                let policy = github::Policy { core: 5, anon: 3, search: 2, status, headers };
                let app = github::app(&policy, &MemoryStore::new().clock(clock.clone()));
                let base = format!("http://{}", serve(app).await);
                for token in [None, Some("alpha")] {
                    let (http, base, clock) = (client(), base.clone(), clock.clone());
                    let mut client = GitHubClient { reads, base, token, http, clock, refusals: 0 };
                    for _ in 0..11 {
                        assert_eq!(client.get("/user").await["login"], "octocat");
                    }
                    // The client sends 11 requests, in windows of 3 or of 5.
                    let spent = if token.is_none() { 3 } else { 2 };
                    let expected = if matches!(reads, Reads::Ahead) { 0 } else { spent };
                    assert_eq!(client.refusals, expected, "{reads:?}, {status}");
                    for _ in 0..5 {
                        let found = client.get("/search/repositories?q=tower").await;
                        assert_eq!(found["total_count"], 0);
                    }
                }
            }
        }
    }
}

#[tokio::test]
async fn the_github_example_counts_points_and_shows_the_standing_without_charging() {
    let clock = ManualClock::at_ms(NOW_MS);
    let (status, headers) = (StatusCode::FORBIDDEN, Headers::GitHub);
    let policy = github::Policy { core: 12, anon: 60, search: 30, status, headers };
    let app = github::app(&policy, &MemoryStore::new().clock(clock.clone()));
    let base = format!("http://{}", serve(app).await);
    let http = client();
    let ask = async |method: &str, path: &str| {
        let request = http.request(method.parse().expect("a method"), format!("{base}{path}"));
        request.header("authorization", "token alpha").send().await.expect("an answer")
    };
    let mut used = 0;
    for (method, points) in [("GET", 1), ("HEAD", 1), ("PATCH", 5), ("OPTIONS", 1)] {
        let response = ask(method, "/repos/octocat/hello").await;
        assert_eq!(response.status(), StatusCode::OK, "{method}");
        used += points;
        assert_eq!(seconds(&response, "x-ratelimit-used"), Some(used), "{method}");
        assert_eq!(response.headers()["x-ratelimit-resource"], "core");
    }
    assert_eq!(
        ask("GET", "/search/repositories").await.headers()["x-ratelimit-resource"],
        "search"
    );
    // Four tokens are left: a write does not fit, and its refusal looks like that of a used-up
    // limit.
    let refused = ask("DELETE", "/repos/octocat/hello").await;
    assert_eq!(refused.status(), StatusCode::FORBIDDEN);
    assert_eq!(seconds(&refused, "x-ratelimit-remaining"), Some(0));
    let message: Value = json_of(refused).await;
    let text = "API rate limit exceeded: core:12/hour; 4 left for a cost of 5";
    assert_eq!(message, json!({ "message": text }));
    // The windows began with the first request.
    let (hour, minute) = (NOW_MS.div_ceil(1_000) + 3_600, NOW_MS.div_ceil(1_000) + 60);
    for _ in 0..20 {
        let standing = ask("GET", "/rate_limit").await;
        assert_eq!(standing.status(), StatusCode::OK);
        assert_eq!(seconds(&standing, "x-ratelimit-used"), Some(8));
        let core = json!({"limit": 12, "used": 8, "remaining": 4, "reset": hour});
        let search = json!({"limit": 30, "used": 1, "remaining": 29, "reset": minute});
        let resources = json!({"core": core, "search": search});
        let told: Value = json_of(standing).await;
        assert_eq!(told, json!({"resources": resources, "rate": core}));
    }
    assert_eq!(ask("GET", "/nowhere").await.status(), StatusCode::NOT_FOUND);
    assert_eq!(seconds(&ask("GET", "/user").await, "x-ratelimit-used"), Some(10));
}
