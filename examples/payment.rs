//! `cargo run --example payment`
//!
//! A payment form with limits against trying out stolen cards: declined payments count for each
//! address and for each account, accepted ones don't count. A request counts until the bank has
//! answered, so concurrent requests can't bypass the limit. The example sends its own requests with
//! a manual clock, and ends by itself.

use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::{Router, routing::post};
use futures_util::future::join_all;
use tower::ServiceExt;
use tower_fixed_window::key::{PeerAddr, extension};
use tower_fixed_window::{
    FixedWindowLayer, Key, Limits, ManualClock, MemoryStore, Quota, Quotas, Store,
};

const HOUR: Duration = Duration::from_secs(3_600);

/// A customer. Your authentication layer puts it into the request's extensions.
#[derive(Clone)]
struct User(u64);

impl From<&User> for Key {
    fn from(user: &User) -> Key {
        Key::from(user.0)
    }
}

/// Counts the cards that reached the bank.
type Bank = Arc<AtomicU32>;

/// Stands in for the bank: accepts one card, `good`, and takes some time.
async fn pay(State(bank): State<Bank>, card: String) -> StatusCode {
    bank.fetch_add(1, Ordering::Relaxed);
    tokio::task::yield_now().await;
    match card.as_str() {
        "good" => StatusCode::OK,
        _ => StatusCode::PAYMENT_REQUIRED,
    }
}

/// Sets a limit twice, in two grids of windows that are half a window apart.
fn twice(limit: u64, window: Duration) -> Quotas {
    Quota::new(limit, window).and(Quota::new(limit, window).starting_at(window / 2))
}

fn app(store: impl Store, bank: Bank) -> Router {
    let limits = Limits::new([
        // Stops one client with many accounts. Behind a proxy: `.key(client_ip()..)`.
        twice(10, HOUR).name("payment-address"),
        // Stops many clients that share one account.
        twice(5, 24 * HOUR).name("payment-account").key(extension::<User>()),
    ]);
    let layer = FixedWindowLayer::new(limits.store(store))
        .count_if(|response| response.status == StatusCode::PAYMENT_REQUIRED);
    Router::new().route("/payment", post(pay).route_layer(layer)).with_state(bank)
}

#[tokio::main(flavor = "current_thread")]
async fn main() {
    let midnight = 1_767_225_600_000;
    let clock = ManualClock::at_ms(midnight - 60_000);
    let bank = Bank::default();
    // On several nodes, use `RedisStore::new(..)?.on_failure(OnStoreFailure::Deny)`: during an
    // outage, accepting no payments is better than one more limit on each node.
    let app = app(MemoryStore::new().clock(clock.clone()), bank.clone());
    let pay = async |address: u32, user: u64, card: &'static str| {
        let peer = (IpAddr::V4(Ipv4Addr::from_bits(address)), 4711).into();
        let request = Request::post("/payment").extension(PeerAddr(peer)).extension(User(user));
        let request = request.body(Body::from(card)).expect("a request");
        app.clone().oneshot(request).await.expect("it never fails").status().as_u16()
    };

    // Accepted payments don't count.
    for _ in 0..100 {
        assert_eq!(pay(1, 1, "good").await, 200);
    }
    assert_eq!(bank.swap(0, Ordering::Relaxed), 100);
    println!("100 accepted payments pass");

    // A hundred cards at once, from a hundred addresses: five reach the bank.
    let answers = join_all((0..100).map(|i| pay(100 + i, 2, "stolen"))).await;
    let declined = answers.iter().filter(|status| **status == 402).count();
    assert_eq!((declined, bank.swap(0, Ordering::Relaxed)), (5, 5));
    assert_eq!(answers.iter().filter(|status| **status == 429).count(), 95);
    println!("5 of 100 cards that one account sends at once reach the bank");

    // Midnight brings no second limit, since the other windows end at noon.
    clock.set_ms(midnight);
    assert_eq!(pay(300, 2, "stolen").await, 429);
    clock.set_ms(midnight + 12 * 3_600_000);
    assert_eq!(pay(300, 2, "stolen").await, 402);
    println!("none more at midnight");

    // A hundred accounts pay from one address.
    bank.store(0, Ordering::Relaxed);
    join_all((0..100).map(|i| pay(7, 1_000 + i, "stolen"))).await;
    assert_eq!(bank.load(Ordering::Relaxed), 10);
    println!("10 of 100 cards from one address reach the bank");
}
