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
    FixedWindowLayer, Key, Limiter, ManualClock, MemoryStore, Quota, Quotas, Store,
};

const HOUR: Duration = Duration::from_secs(3_600);

/// An account's name in the one form by which the app finds the account, whatever a client has
/// written: `ali`, `%61li` and `Ali` are one path to the handler, so they are one key.
#[derive(serde::Deserialize)]
#[serde(from = "String")]
struct Account(String);

impl From<String> for Account {
    fn from(name: String) -> Self {
        Self(name.trim().to_lowercase())
    }
}

impl From<&Account> for Key {
    fn from(account: &Account) -> Key {
        // Hashed, since the name is a mail address.
        Key::hmac("a secret of the app", &account.0)
    }
}

#[derive(Clone)]
struct Resets {
    mails: Limiter,
    codes: Limiter,
    sent: Arc<AtomicU32>,
}

/// Responds alike whether or not the account exists or its limit is reached.
async fn send_mail(State(resets): State<Resets>, Path(account): Path<Account>) -> StatusCode {
    match resets.mails.check(&account).await {
        Ok(decision) if decision.is_allowed() && account.0.ends_with("@example.org") => {
            resets.sent.fetch_add(1, Ordering::Relaxed);
            StatusCode::ACCEPTED
        }
        Ok(_) => StatusCode::ACCEPTED,
        Err(_) => StatusCode::SERVICE_UNAVAILABLE,
    }
}

/// Checks a code. An app compares codes in constant time, and lets them expire after some minutes.
async fn check_code(
    State(resets): State<Resets>,
    Path((account, code)): Path<(Account, u32)>,
) -> StatusCode {
    // Each code counts before it is compared, so that concurrent requests can't check more.
    let receipt = match resets.codes.charge(&account, 1).await {
        Ok(Ok(receipt)) => receipt,
        Ok(Err(_)) => return StatusCode::TOO_MANY_REQUESTS,
        Err(_) => return StatusCode::SERVICE_UNAVAILABLE,
    };
    if code != 123_456 {
        return StatusCode::FORBIDDEN;
    }
    // The right one is refunded. If that fails, it stays counted.
    let _ = resets.codes.refund(receipt).await;
    StatusCode::OK
}

/// Sets a limit twice, in two grids of windows that are half a window apart.
fn twice(limit: u64, window: Duration) -> Quotas {
    Quota::new(limit, window).and(Quota::new(limit, window).starting_at(window / 2))
}

fn app(store: impl Store + Clone, sent: Arc<AtomicU32>) -> Router {
    // Every mail counts, since each one annoys its recipient. Only wrong codes count.
    let day = 24 * HOUR;
    let codes =
        twice(5, HOUR).and(Quota::new(10, day)).and(Quota::new(10, day).starting_at(day / 2));
    let resets = Resets {
        mails: twice(3, HOUR).name("reset-mails").store(store.clone()),
        codes: codes.name("reset-codes").store(store.clone()),
        sent,
    };
    // A layer knows the address. The account is known where its name has been decoded: in the
    // handler.
    let mails = twice(10, HOUR).name("reset-mails-address").store(store.clone());
    let codes = twice(20, HOUR).name("reset-codes-address").store(store);
    let (mails, codes) = (FixedWindowLayer::new(mails), FixedWindowLayer::new(codes));
    let codes = codes.count_if(|response| response.status == StatusCode::FORBIDDEN);

    Router::new()
        .route("/password-reset/{account}", post(send_mail).route_layer(mails))
        .route("/password-reset/{account}/{code}", post(check_code).route_layer(codes))
        .with_state(resets)
}

/// Writes a name in one of many ways that mean the same: each bit of `i` changes the case of a
/// letter or encodes it, and there may be spaces around it.
fn spelled(name: &str, i: u32) -> String {
    let spaces = |bit: u32| if i >> bit & 1 == 1 { "%20" } else { "" };
    let mut path = spaces(30).to_owned();
    for (at, letter) in name.chars().enumerate() {
        let letter = if i >> (at % 7) & 1 == 1 { letter.to_ascii_uppercase() } else { letter };
        match i >> (7 + at) & 1 {
            1 => path += &format!("%{:02x}", u32::from(letter)),
            _ => path.push(letter),
        }
    }
    path + spaces(31)
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

    // The path is the client's: it can be written in thousands of ways, and counts as one account.
    clock.set_ms(midnight + 7 * 86_400_000);
    let mut checked = 0;
    for i in 0..5_000_u32 {
        let name = spelled("ali@example.org", i.wrapping_mul(0x9e37_79b9));
        checked += u32::from(ask(10_000 + i, format!("{name}/{i}")).await == 403);
    }
    assert_eq!(checked, 5);
    assert_eq!(ask(4, "%61LI@example.org/123456".into()).await, 429);
    println!("5 codes are checked, in however many ways a client writes the account");

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
