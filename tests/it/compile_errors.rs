//! Where a response's body or a key doesn't fit, the compiler says what to write.

use std::path::Path;
use std::process::Command;
use std::{fs, io};

use axum::BoxError;
use axum::body::{Bytes, HttpBody};
use http_body_util::combinators::{BoxBody, UnsyncBoxBody};
use tower_http::compression::CompressionLayer;
use tower_http::limit::RequestBodyLimitLayer;
use tower_http::map_response_body::MapResponseBodyLayer;

use crate::prelude::*;

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
    let refuses = |what: &str, limit: &str, advice: &[&str]| {
        let (compiles, message) = check(limit);
        assert!(!compiles, "{what} was accepted");
        for advice in advice {
            assert!(message.contains(advice), "no {advice} in the compiler's message:\n{message}");
        }
    };
    let closure = made(
        "Quota::per_minute(60).name(\"api\").key(|_: &http::request::Parts| Some(Key::global()))",
    );
    let advice = ["can't extract a key", "`.key_fn(|parts| ...)`", "`extension::<User>()`"];
    refuses("a closure as an extractor", &closure, &advice);
    let advice = ["`&str` is not a limit", "`Quota::per_minute(60)`", ".parse::<Quotas>()?`"];
    refuses("a text as a limit", &made("\"60/minute\""), &advice);
    let user = "Quota::per_minute(60).key(tower_fixed_window::key::extension::<Inner>())";
    let advice = ["there is no key for it", "`impl From<&Inner> for Key {"];
    refuses("a type without a key as an extension", &made(user), &advice);
    let number = made(&user.replace("Inner", "u64"));
    let advice = "put a type of yours that has it into the extensions: `struct UserId(u64)`";
    refuses("a number without a meaning as an extension", &number, &[advice]);
    let proxies = |networks: &str| {
        let client = format!("tower_fixed_window::key::client_ip().trusting({networks})");
        made(&format!("Quota::per_minute(60).name(\"api\").key({client})"))
    };
    let advice = ["`&str` is not a list of networks", "`[\"10.0.0.0/8\"]`", "`.split(',')`"];
    refuses("a text as a list", &proxies("\"10.0.0.0/8\""), &advice);
    let stored =
        "Quota::per_minute(60).name(\"api\").store(tower_fixed_window::MemoryStore::new())";
    let two = made(&format!("[{stored}, {stored}]"));
    refuses("limits of two stores", &two, &["`Limits::new([a, b]).store(store)`"]);
    // A closure's arguments are counted by the compiler, in words of its own.
    let by_plan = |plan: &str| made(&format!("tower_fixed_window::Limit::by_plan({plan})"));
    for short in ["limit.on_reject(|_| Response::new(Own))", &by_plan("|_| Quota::per_hour(1)")] {
        refuses(short, short, &["expected to take 2 arguments, but it takes 1 argument"]);
    }
    refuses("a number as a plan", &by_plan("|_, _| 60"), &["`Plan: From<", "Quotas"]);
    let advice = "not async: let a layer around it put the plan into the extensions";
    refuses("an async closure", &by_plan("async |_, _| Quota::per_hour(1)"), &[advice]);
    let arms = |quota: &str| {
        let unlimited = "tower_fixed_window::Plan::UNLIMITED";
        by_plan(&format!("|_, _| match 1 {{ 0 => {unlimited}, _ => {quota} }}"))
    };
    refuses("quotas and plans as one type", &arms("Quota::per_hour(1)"), &[".into()"]);
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
    for way_out in [
        "limit.reject(EmptyBody)",
        "limit.on_reject(|_, why| why.response(Own))",
        &key_fn,
        &by_plan("|_, _| Quota::per_hour(1)"),
        &arms("Quota::per_hour(1).into()"),
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
        let body = text_of(refused).await;
        assert!(body.starts_with("{\"type\":"), "{body}");
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
