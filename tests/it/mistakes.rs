//! Mistakes in the set-up of a server are logged once, with the line to write.
//!
//! Each is made in a process of its own, since it is logged once in the life of a process. What
//! that process writes to its standard output and error is what its operator reads.

use std::any::type_name;
use std::convert::Infallible;
use std::env;
use std::process::{Command, exit};

use axum::body::Body;
use http::{Request, Response, StatusCode};
use tokio::runtime::Runtime;
use tower::util::BoxCloneSyncService;
use tower::{Layer, ServiceExt, service_fn};
use tower_fixed_window::{FixedWindowLayer, Quota};
use tracing::level_filters::LevelFilter;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

/// Runs a test's closure in a process of its own, and returns what the crate logs there.
fn logged<F: AsyncFnOnce()>(mistake: F) -> Vec<String> {
    logged_by(type_name::<F>(), 0, async |_| mistake().await)
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
    text.lines().filter(|line| line.contains("tower_fixed_window: ")).map(str::to_owned).collect()
}

type Limited = BoxCloneSyncService<Request<Body>, Response<Body>, Infallible>;

fn limited(layer: &FixedWindowLayer) -> Limited {
    let inner =
        service_fn(async |_: Request<Body>| Ok::<_, Infallible>(Response::new(Body::empty())));
    BoxCloneSyncService::new(layer.layer(inner))
}

async fn ask(layer: &FixedWindowLayer, request: Request<Body>) -> Response<Body> {
    limited(layer).oneshot(request).await.expect("infallible")
}

fn per_minute() -> FixedWindowLayer {
    FixedWindowLayer::new(Quota::per_minute(1_000))
}

/// The only line, without addresses.
#[track_caller]
fn only(log: &[String]) -> &str {
    let [line] = log else { panic!("not one line: {log:#?}") };
    for address in ["192.0.2.", "10.0.0.1:", "10.0.0.5", "4711"] {
        assert!(!line.contains(address), "{line}");
    }
    line
}

/// A limit by address, and requests without an address.
async fn without_addresses() {
    for layer in [per_minute(), per_minute().name("api")] {
        for _ in 0..3 {
            let response = ask(&layer, Request::new(Body::empty())).await;
            assert_eq!(response.status(), StatusCode::INTERNAL_SERVER_ERROR);
        }
    }
}

const CONNECT_INFO: &str = "into_make_service_with_connect_info::<SocketAddr>()";

#[test]
fn without_a_subscriber_a_mistake_goes_to_standard_error() {
    let log = logged(async || without_addresses().await);
    assert!(only(&log).starts_with("tower_fixed_window: "), "{log:#?}");
    assert!(log[0].contains(CONNECT_INFO), "{log:#?}");
}

#[test]
fn a_filter_that_names_other_crates_only_does_not_hide_a_mistake() {
    let log = logged(async || {
        let filter = Targets::new().with_target("my_app", LevelFilter::DEBUG);
        let shown = tracing_subscriber::fmt::layer().with_ansi(false);
        tracing_subscriber::registry().with(shown).with(filter).init();
        without_addresses().await;
    });
    assert!(only(&log).starts_with("tower_fixed_window: "), "{log:#?}");
}

#[test]
fn a_subscriber_that_shows_errors_gets_them_alone() {
    let log = logged(async || {
        tracing_subscriber::fmt().with_ansi(false).init();
        without_addresses().await;
    });
    assert!(only(&log).contains(" ERROR tower_fixed_window: "), "{log:#?}");
    assert!(log[0].contains(CONNECT_INFO), "{log:#?}");
}
