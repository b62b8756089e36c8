//! `cargo run --example login`
//!
//! A login with limits against guessing: wrong passwords count for each address and for each
//! account, right ones don't count. Each quota is set twice, half a window apart, so that a
//! boundary brings no second limit. The example sends its own requests with a manual clock, and
//! ends by itself.

use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

use axum::body::Body;
use axum::extract::{FromRequest, Request};
use axum::http::StatusCode;
use axum::middleware::{Next, from_fn};
use axum::response::{IntoResponse, Response};
use axum::{Extension, Form, Router, routing::post};
use tower::{ServiceBuilder, ServiceExt};
use tower_fixed_window::key::{PeerAddr, extension};
use tower_fixed_window::{FixedWindowLayer, Key, ManualClock, MemoryStore, Quota, Quotas, Store};

const MINUTE: Duration = Duration::from_secs(60);
const HOUR: Duration = Duration::from_secs(3_600);

#[derive(Clone, serde::Deserialize)]
struct Login {
    user: String,
    password: String,
}

/// The account of a login. Unknown names count like known ones, so a refusal does not reveal which
/// exist.
#[derive(Clone)]
struct Account(String);

impl From<&Account> for Key {
    fn from(account: &Account) -> Key {
        // The key is hashed, since account names are often mail addresses. Take the secret from
        // your settings.
        Key::hmac("a secret of the app", &account.0)
    }
}

/// Reads the form before the limit that needs the account in it.
async fn read_form(request: Request, next: Next) -> Response {
    let (parts, body) = request.into_parts();
    let form = Form::<Login>::from_request(Request::from_parts(parts.clone(), body), &()).await;
    let Form(login) = match form {
        Ok(form) => form,
        Err(rejection) => return rejection.into_response(),
    };
    let mut request = Request::from_parts(parts, Body::empty());
    request.extensions_mut().insert(Account(login.user.trim().to_lowercase()));
    request.extensions_mut().insert(login);
    next.run(request).await
}

async fn login(Extension(login): Extension<Login>) -> StatusCode {
    match login.password == "open sesame" {
        true => StatusCode::OK,
        false => StatusCode::UNAUTHORIZED,
    }
}

/// Sets a limit twice, in two grids of windows that are half a window apart.
fn twice(limit: u64, window: Duration) -> Quotas {
    Quota::new(limit, window).and(Quota::new(limit, window).starting_at(window / 2))
}

fn app(store: impl Store + Clone) -> Router {
    let failed =
        |response: &axum::http::response::Parts| response.status == StatusCode::UNAUTHORIZED;

    // Stops one client that tries many accounts. Behind a proxy: `.key(client_ip()..)`.
    let per_address = twice(30, HOUR).name("login-address").store(store.clone());
    let per_address = FixedWindowLayer::new(per_address).count_if(failed);
    // Stops many clients that try one account.
    let day = 24 * HOUR;
    let quotas = twice(5, 15 * MINUTE)
        .and(Quota::new(20, day))
        .and(Quota::new(20, day).starting_at(day / 2));
    let per_account = quotas.name("login-account").key(extension::<Account>()).store(store);
    let per_account = FixedWindowLayer::new(per_account).count_if(failed);

    let limits =
        ServiceBuilder::new().layer(per_address).layer(from_fn(read_form)).layer(per_account);
    Router::new().route("/login", post(login).route_layer(limits))
}

#[tokio::main(flavor = "current_thread")]
async fn main() {
    // The clock starts five minutes before a boundary of all windows without an offset.
    let midnight = 1_767_225_600_000;
    let clock = ManualClock::at_ms(midnight - 5 * 60_000);
    let app = app(MemoryStore::new().clock(clock.clone()));
    let attempt = async |address: u32, user: &str, password: &str| {
        let peer = (IpAddr::V4(Ipv4Addr::from_bits(address)), 4711).into();
        let form = Request::post("/login")
            .header("content-type", "application/x-www-form-urlencoded")
            .extension(PeerAddr(peer))
            .body(Body::from(format!("user={user}&password={password}")));
        app.clone().oneshot(form.expect("a request")).await.expect("it never fails")
    };
    /// Counts the attempts that reach the password check.
    async fn guesses(answers: impl AsyncFn(u32) -> Response, tries: u32) -> u32 {
        let mut through = 0;
        for i in 0..tries {
            let status = answers(i).await.status();
            assert!([401, 429].contains(&status.as_u16()), "{status}");
            through += u32::from(status == 401);
        }
        through
    }

    // Right passwords don't count.
    for _ in 0..1_000 {
        assert_eq!(attempt(1, "ali", "open+sesame").await.status(), 200);
    }
    println!("1,000 right logins pass");

    // A hundred addresses guess at one account: five guesses in a quarter of an hour pass.
    let through = guesses(async |i| attempt(100 + i, "ali", "guess").await, 100).await;
    assert_eq!(through, 5);
    let refused = attempt(7, "ALI+", "guess").await;
    assert_eq!(refused.status(), 429, "the same account, however it is written");
    assert_eq!(refused.headers()["x-ratelimit-resource"], "login-account");
    println!("5 of 100 guesses at one account pass, from 100 addresses");

    // The boundary brings no second limit, since the other windows are halfway through.
    clock.set_ms(midnight);
    assert_eq!(guesses(async |i| attempt(300 + i, "ali", "guess").await, 100).await, 0);
    clock.set_ms(midnight + 450_000);
    assert_eq!(guesses(async |i| attempt(300 + i, "ali", "guess").await, 100).await, 5);
    println!("0 more at the boundary, 5 more when the second window has turned");

    // A single address tries one password at many accounts.
    let spray = async |i| attempt(2, &format!("user-{i}"), "123456").await;
    assert_eq!(guesses(spray, 100).await, 30);
    println!("30 of 100 accounts can be tried from one address");

    // A month of guessing at one account, every ten minutes, each time from a new address.
    clock.set_ms(midnight + 365 * 86_400_000);
    let patient = async |i| {
        let answer = attempt(1_000 + i, "ben", "guess").await;
        clock.advance(10 * MINUTE);
        answer
    };
    assert_eq!(guesses(patient, 30 * 24 * 6).await, 600);
    println!("600 guesses at one account pass in 30 days: 20 a day");
}
