//! S26: whoever can read the server finds no secret in it.

use std::convert::Infallible;
use std::time::Duration;

use harness::Server;
use http::header::{AUTHORIZATION, COOKIE};
use http::{Request, Response};
use tower::{Layer, ServiceExt, service_fn};
use tower_fixed_window::key::{header, key_fn};
use tower_fixed_window::{EmptyBody, FixedWindowLayer, Key, KeyExtractor, Quota};
use tower_fixed_window_redis::RedisStore;

use crate::conformance::connect;

const SECRET: &str = "hunter2";

#[tokio::test]
async fn no_secret_of_a_key_is_stored_in_redis() {
    let Some(server) = Server::start() else { return };
    let store = RedisStore::from(connect(&server.url()).await).deadline(Duration::from_secs(20));

    let cookie = key_fn(|parts| parts.headers.get(COOKIE).map(Key::secret));
    let token = header("authorization").or(header("x-api-key"));
    let limit = Quota::per_hour(3).name("api").key((token, cookie));
    let layer = FixedWindowLayer::new(limit.store(store.clone()));
    let service = layer
        .reject(EmptyBody)
        .layer(service_fn(async |_: Request<()>| Ok::<_, Infallible>(Response::new(()))));
    let mut refused = 0;
    for i in 0..5 {
        let request = Request::get(format!("/?token={SECRET}"))
            .header(COOKIE, format!("session={SECRET}"))
            .header("x-api-key", format!("{SECRET}-{}", i % 2));
        let request = match i {
            0..4 => request.header(AUTHORIZATION, format!("Bearer {SECRET}")),
            _ => request,
        };
        let response = service.clone().oneshot(request.body(()).expect("valid")).await;
        refused += u32::from(response.expect("infallible").status() == 429);
    }
    assert_eq!(refused, 1, "the counts are the server's");
    let limiter = Quota::per_hour(3).name("mail").store(store);
    let mail = Key::hmac("a secret of the app's", format!("{SECRET}@example.com"));
    let _ = limiter.check(mail).await.expect("it answers");

    let keys: Vec<String> = server.ask(&["KEYS", "*"]);
    assert_eq!(keys.len(), 3, "{keys:?}");
    for key in &keys {
        let hash: Vec<String> = server.ask(&["HGETALL", key]);
        let text = format!("{key} {hash:?}").to_lowercase();
        // As it is, or in hexadecimal.
        let hex: String = SECRET.bytes().map(|byte| format!("{byte:02x}")).collect();
        assert!(!text.contains(SECRET) && !text.contains(&hex), "{text}");
    }
}
