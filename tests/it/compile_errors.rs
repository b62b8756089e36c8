//! Where a response's body or a key doesn't fit, the compiler says what to write.

use std::convert::Infallible;
use std::path::Path;
use std::process::Command;
use std::{fs, io};

use axum::BoxError;
use axum::body::{Body, Bytes, HttpBody, to_bytes};
use http::{Request, Response, StatusCode};
use http_body_util::combinators::{BoxBody, UnsyncBoxBody};
use tower::{Layer, Service, ServiceBuilder, ServiceExt, service_fn};
use tower_http::compression::CompressionLayer;
use tower_http::limit::RequestBodyLimitLayer;
use tower_http::map_response_body::MapResponseBodyLayer;

use crate::support::{Mood, get, limit_headers, per_minute};

/// Checks a package of its own, as its author would see it. The exact wording is the compiler's
/// and changes with it; what counts is that our advice is part of it.
#[test]
fn compile_errors_of_unsuitable_bodies_and_keys_suggest_a_fix() {
    let here = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the repository");
    let package = Path::new(env!("CARGO_TARGET_TMPDIR")).join("misfit");
    fs::create_dir_all(package.join("src")).expect("a writable target directory");
    let manifest = format!(
        "[package]\nname = \"misfit\"\nedition = \"2024\"\n[dependencies]\n\
         tower-fixed-window = {{ path = {here:?}, default-features = false, features = [\"client-ip\"] }}\n\
         http = \"1\"\ntower = {{ version = \"0.5\", features = [\"util\"] }}\ntower-layer = \"0.3\"\ntower-service = \"0.3\"\n[workspace]\n"
    );
    fs::write(package.join("Cargo.toml"), manifest).expect("written");
    // The versions that are here already: nothing is downloaded.
    fs::copy(here.join("Cargo.lock"), package.join("Cargo.lock")).expect("a lock file");

    let check_source = |main: &str| {
        fs::write(package.join("src/main.rs"), main).expect("written");
        // Built, not checked: another test needs the same libraries.
        let output = Command::new(env!("CARGO"))
            .args(["build", "--offline", "--quiet", "--color=never", "--target-dir"])
            .arg(package.with_file_name("without_features"))
            .current_dir(&package)
            .output()
            .expect("cargo runs");
        (output.status.success(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let check =
        |limit: &str| check_source(&include_str!("../ui/misfit.rs").replace("LIMIT", limit));

    let (compiles, message) = check("limit");
    assert!(!compiles, "a body that can't be made from bytes was accepted");
    for advice in [
        "can't make a refusal's body of type `Own`",
        "`.reject(EmptyBody)`",
        "`.on_reject(|_, why| why.response(why.message()))`",
        "`.on_reject(|parts, why| ...)`",
        "`.layer(MapResponseBodyLayer::new(Body::new))` between the limit and",
    ] {
        let count = message.matches(advice).count();
        assert_eq!(count, 1, "{advice} is not once in the compiler's message:\n{message}");
    }
    let made = |limit: &str| format!("FixedWindowLayer::new({limit}).reject(EmptyBody)");
    let key =
        "Quota::per_minute(60).name(\"api\").key(|_: &http::request::Parts| Some(Key::global()))";
    let closure = made(key);
    let (compiles, message) = check(&closure);
    assert!(!compiles, "a closure was accepted as an extractor");
    for advice in ["can't extract a key", "`.key_fn(|parts| ...)`", "`extension::<User>()`"] {
        assert!(message.contains(advice), "no {advice} in the compiler's message:\n{message}");
    }
    let (compiles, message) = check(&made("\"60/minute\""));
    assert!(!compiles, "a text was accepted as a limit");
    for advice in ["`&str` is not a limit", "`Quota::per_minute(60)`", ".parse::<Quotas>()?`"] {
        assert!(message.contains(advice), "no {advice} in the compiler's message:\n{message}");
    }
    let user = "Quota::per_minute(60).key(tower_fixed_window::key::extension::<Inner>())";
    let (compiles, message) = check(&made(user));
    assert!(!compiles, "a type without a key was accepted as an extension");
    for advice in ["there is no key for it", "`impl From<&Inner> for Key {"] {
        assert!(message.contains(advice), "no {advice} in the compiler's message:\n{message}");
    }
    let (compiles, message) = check(&made(&user.replace("Inner", "u64")));
    assert!(!compiles, "a number without a meaning was accepted as an extension");
    let advice = "put a type of yours that has it into the extensions: `struct UserId(u64)`";
    assert!(message.contains(advice), "no {advice} in the compiler's message:\n{message}");
    let proxies = |networks: &str| {
        let client = format!("tower_fixed_window::key::client_ip().trusting({networks})");
        made(&format!("Quota::per_minute(60).name(\"api\").key({client})"))
    };
    let (compiles, message) = check(&proxies("\"10.0.0.0/8\""));
    assert!(!compiles, "a text was accepted as a list");
    for advice in ["`&str` is not a list of networks", "`[\"10.0.0.0/8\"]`", "`.split(',')`"] {
        assert!(message.contains(advice), "no {advice} in the compiler's message:\n{message}");
    }
    let stored =
        "Quota::per_minute(60).name(\"api\").store(tower_fixed_window::MemoryStore::new())";
    let (compiles, message) = check(&made(&format!("[{stored}, {stored}]")));
    assert!(!compiles, "limits of two stores were accepted");
    let advice = "`Limits::new([a, b]).store(store)`";
    assert!(message.contains(advice), "no {advice} in the compiler's message:\n{message}");
    // A closure's arguments are counted by the compiler, in words of its own.
    let plan = "tower_fixed_window::Limit::by_plan";
    let short = [
        "limit.on_reject(|_| Response::new(Own))".to_owned(),
        made(&format!("{plan}(|_| Quota::per_hour(1))")),
    ];
    for closure in &short {
        let (compiles, message) = check(closure);
        assert!(!compiles, "{closure} was accepted");
        let advice = "expected to take 2 arguments, but it takes 1 argument";
        assert!(message.contains(advice), "no {advice} in the compiler's message:\n{message}");
    }
    let (compiles, message) = check(&made(&format!("{plan}(|_, _| 60)")));
    assert!(!compiles, "a number was accepted as a plan");
    for advice in ["`Plan: From<", "Quotas"] {
        assert!(message.contains(advice), "no {advice} in the compiler's message:\n{message}");
    }
    let (compiles, message) = check(&made(&format!("{plan}(async |_, _| Quota::per_hour(1))")));
    assert!(!compiles, "an async closure was accepted");
    let advice = "not async: let a layer around it put the plan into the extensions";
    assert!(message.contains(advice), "no {advice} in the compiler's message:\n{message}");
    let arms = |first, second| {
        format!("{plan}(|_, _| match 1 {{ 0 => {first}, _ => {second} }}).name(\"api\")")
    };
    let (quota, unlimited) = ("Quota::per_hour(1)", "tower_fixed_window::Plan::UNLIMITED");
    let (compiles, message) = check(&made(&arms(unlimited, quota)));
    assert!(!compiles, "quotas and plans were accepted as one type");
    assert!(message.contains(".into()"), "no .into() in the compiler's message:\n{message}");
    let arms = made(&arms(unlimited, "Quota::per_hour(1).into()"));
    // For a missing method, the compiler gives no reason, but it shows a line of the type.
    let main = include_str!("../ui/misfit.rs").replace("serve((LIMIT)", "let _ = ((LIMIT)");
    let main = main.replace(".layer(Inner));", ".layer(Inner)).oneshot(Request::new(\"\"));");
    let (compiles, message) = check_source(&main.replace("LIMIT", "limit"));
    assert!(!compiles, "a body that can't be made from bytes was accepted");
    for advice in ["error[E0599]", "`.reject(EmptyBody)`, or see its docs"] {
        assert!(message.contains(advice), "no {advice} in the compiler's message:\n{message}");
    }
    let (compiles, message) = check_source(&main.replace("LIMIT", "limit.reject(EmptyBody)"));
    assert!(compiles, "the advice does not help:\n{message}");
    // The ways out are ways out, so the failures above had no other reason.
    let key_fn = closure.replace(".key(", ".key_fn(");
    let by_plan = made(&format!("{plan}(|_, _| Quota::per_hour(1))"));
    for way_out in [
        "limit.reject(EmptyBody)",
        "limit.on_reject(|_, why| why.response(Own))",
        &key_fn,
        &by_plan,
        &arms,
        &made("\"60/minute\".parse::<tower_fixed_window::Quotas>().unwrap()"),
        &made(&user.replace("Inner", "String")),
        &proxies("[\"10.0.0.0/8\"]"),
        &proxies("\"10.0.0.0/8\".split(',')"),
        &made(&format!("tower_fixed_window::Limiter::new({stored})")),
    ] {
        let (compiles, message) = check(way_out);
        assert!(compiles, "{way_out} does not help:\n{message}");
    }
}

/// The way out for bodies that only their own crates can make.
#[tokio::test]
async fn a_limit_around_a_body_of_another_crate_works_with_a_map_between_them() {
    async fn limits<S, B>(inner: S)
    where
        S: Service<Request<Body>, Response = Response<B>, Error = Infallible> + Clone,
        B: HttpBody<Data = Bytes> + Send + 'static,
        B::Error: Into<BoxError>,
    {
        let limited = ServiceBuilder::new()
            .layer(per_minute(1, Mood::Now))
            .layer(MapResponseBodyLayer::new(Body::new))
            .service(inner);
        let response = limited.clone().oneshot(get("/")).await.expect("infallible");
        assert_eq!(response.status(), StatusCode::OK);
        assert_eq!(limit_headers(&response)["used"], "1");
        let refused = limited.oneshot(get("/")).await.expect("infallible");
        assert_eq!(refused.status(), StatusCode::TOO_MANY_REQUESTS);
        let body = to_bytes(refused.into_body(), 10_000).await.expect("short");
        assert!(body.starts_with(b"{\"type\":"), "{body:?}");
    }

    async fn hello<B>(_: Request<B>) -> Result<Response<Body>, Infallible> {
        Ok(Response::new(Body::from("hello")))
    }
    limits(RequestBodyLimitLayer::new(10).layer(service_fn(hello))).await;
    limits(CompressionLayer::new().layer(service_fn(hello))).await;
    // The body of `ServeDir`, and that of rmcp.
    limits(service_fn(async |_| Ok(Response::new(UnsyncBoxBody::<Bytes, io::Error>::default()))))
        .await;
    limits(service_fn(async |_| Ok(Response::new(BoxBody::<Bytes, Infallible>::default())))).await;
}
