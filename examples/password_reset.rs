//! `cargo run --example password_reset`
//!
//! Password resets with a code of six digits sent by mail. Limits cover mails and wrong codes, for
//! each address and for each account, and no response reveals which accounts exist. The example
//! sends its own requests with a manual clock, and ends by itself.

use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use axum::body::Body;
use axum::extract::{Path, Request, State};
use axum::http::StatusCode;
use axum::{Router, routing::post};
use tower::ServiceExt;
use tower_fixed_window::key::PeerAddr;
use tower_fixed_window::{
    FixedWindowLayer, Key, Limiter, Limits, ManualClock, MemoryStore, Quota, Quotas, Store,
};

const HOUR: Duration = Duration::from_secs(3_600);

/// The key of an account: the same for any spelling of its name, and hashed, since the name is a
/// mail address.
fn account(name: &str) -> Key {
    Key::hmac("a secret of the app", name.trim().to_lowercase())
}

#[derive(Clone)]
struct Mails {
    per_account: Limiter,
    sent: Arc<AtomicU32>,
}

/// Responds alike whether or not the account exists or its limit is reached.
async fn send_mail(State(mails): State<Mails>, Path(name): Path<String>) -> StatusCode {
    match mails.per_account.check(account(&name)).await {
        Ok(decision) if decision.allowed() && name.ends_with("@example.org") => {
            mails.sent.fetch_add(1, Ordering::Relaxed);
            StatusCode::ACCEPTED
        }
        Ok(_) => StatusCode::ACCEPTED,
        Err(_) => StatusCode::SERVICE_UNAVAILABLE,
    }
}

/// Checks a code. An app compares codes in constant time, and lets them expire after some minutes.
async fn check_code(Path((_, code)): Path<(String, u32)>) -> StatusCode {
    match code {
        123_456 => StatusCode::OK,
        _ => StatusCode::FORBIDDEN,
    }
}

/// Sets a limit twice, in two grids of windows that are half a window apart.
fn twice(limit: u64, window: Duration) -> Quotas {
    Quota::new(limit, window).and(Quota::new(limit, window).starting_at(window / 2))
}

fn app(store: impl Store + Clone, sent: Arc<AtomicU32>) -> Router {
    // Every mail counts, since each one annoys its recipient.
    let per_account = twice(3, HOUR).name("reset-mails").store(store.clone());
    let per_address = twice(10, HOUR).name("reset-mails-address").store(store.clone());
    let mails = FixedWindowLayer::new(per_address);

    // Only wrong codes count.
    let day = 24 * HOUR;
    let codes =
        twice(5, HOUR).and(Quota::new(10, day)).and(Quota::new(10, day).starting_at(day / 2));
    let codes = Limits::new([
        twice(20, HOUR).name("reset-codes-address"),
        codes.name("reset-codes").key_fn(|parts| parts.uri.path().split('/').nth(2).map(account)),
    ]);
    let codes = FixedWindowLayer::new(codes.store(store))
        .count_if(|response| response.status == StatusCode::FORBIDDEN);

    Router::new()
        .route("/password-reset/{account}", post(send_mail).route_layer(mails))
        .route("/password-reset/{account}/{code}", post(check_code).route_layer(codes))
        .with_state(Mails { per_account, sent })
}

#[tokio::main(flavor = "current_thread")]
async fn main() {
    let midnight = 1_767_225_600_000;
    let clock = ManualClock::at_ms(midnight - 60_000);
    let sent = Arc::new(AtomicU32::new(0));
    let app = app(MemoryStore::new().clock(clock.clone()), sent.clone());
    let ask = async |address: u32, path: String| {
        let peer = (IpAddr::V4(Ipv4Addr::from_bits(address)), 4711).into();
        let request = Request::post(format!("/password-reset/{path}")).extension(PeerAddr(peer));
        let request = request.body(Body::empty()).expect("a request");
        app.clone().oneshot(request).await.expect("it never fails").status().as_u16()
    };

    // A mailbox gets three mails, and the response does not reveal whether it exists.
    for i in 0..50 {
        for name in ["ali@example.org", "unknown@example.com"] {
            assert_eq!(ask(100 + i, name.into()).await, 202);
        }
    }
    assert_eq!(sent.swap(0, Ordering::Relaxed), 3);
    clock.set_ms(midnight);
    assert_eq!(ask(1, "ali@example.org".into()).await, 202);
    assert_eq!(sent.load(Ordering::Relaxed), 0, "the boundary brings no second limit");
    println!("3 mails for 50 requests, and none more at the boundary");

    // A client can't send mails to many accounts.
    let mut accepted = 0;
    for i in 0..100 {
        accepted += u32::from(ask(2, format!("user-{i}@example.org")).await == 202);
    }
    assert_eq!((accepted, sent.load(Ordering::Relaxed)), (10, 10));
    println!("10 mails for 100 accounts from one address");

    // Five wrong codes in an hour pass, also around the hour's boundary. Then the right code is
    // refused, too.
    clock.set_ms(midnight - 1);
    let mut checked = 0;
    for i in 0..50 {
        checked += u32::from(ask(200 + i, format!("ali@example.org/{i}")).await == 403);
        if i == 25 {
            clock.set_ms(midnight);
        }
    }
    assert_eq!(checked, 5);
    assert_eq!(ask(3, "Ali@example.org/123456".into()).await, 429);
    assert_eq!(ask(3, "ben@example.org/123456".into()).await, 200);
    println!("5 of 50 codes are checked");

    // A month of guessing, every ten minutes, each time from a new address.
    clock.set_ms(midnight + 365 * 86_400_000);
    let mut checked = 0;
    for i in 0..30 * 24 * 6 {
        checked += u32::from(ask(1_000 + i, format!("ali@example.org/{i}")).await == 403);
        clock.advance(Duration::from_secs(600));
    }
    assert_eq!(checked, 300);
    println!("300 codes of 1,000,000 are checked in 30 days: 10 a day");
}
