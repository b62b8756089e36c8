//! Values and answers that no store of this crate has written: each is an error, none a panic, and
//! none costs the connection.

use std::time::Duration;

use futures_util::future::join_all;
use harness::{Fate, Proxy, Server, contains, gateway};
use tower_fixed_window::{Limiter, OnStoreFailure, Quota, Quotas};
use tower_fixed_window_redis::RedisStore;

use crate::log::Log;

fn store(url: &str) -> RedisStore {
    let store = RedisStore::new(url).expect("an address").deadline(Duration::from_secs(20));
    store.on_failure(OnStoreFailure::Deny)
}

fn all_quotas() -> [Quotas; 3] {
    [
        Quota::new(1_000, Quota::MAX_WINDOW).into(),
        Quota::new(1_000, Quota::MAX_WINDOW).from_first_request().into(),
        Quota::per_year(1_000).in_zone("Asia/Tokyo").into(),
    ]
}

#[tokio::test]
async fn a_field_with_an_impossible_number_is_that_keys_own_failure() {
    let Some(server) = Server::start() else { return };
    let long = "9".repeat(400);
    let mut values: Vec<String> =
        ["1e308", "-1e308", "inf", "nan", "12.5", "", "18446744073709551616"]
            .map(str::to_owned)
            .into();
    values.extend([long.clone(), format!("{long}@0"), format!("1@{long}"), format!("1@0*{long}")]);
    values.push(format!("1@0-{long}#1"));
    let limiter = Quota::new(1_000, Quota::MAX_WINDOW).name("bad").store(store(&server.url()));
    for quotas in all_quotas() {
        let field = quotas.as_ref()[0].counter();
        let limiter = limiter.with_quotas(quotas);
        for value in &values {
            server.ask::<u64>(&["HSET", "tfw1:{bad:tann}", &field, value]);
            let keys = ["ann", "bob", "cid"];
            let answers = join_all(keys.map(|key| limiter.check(key))).await;
            let error = answers[0].as_ref().expect_err(value).to_string();
            assert_eq!(
                error, "Redis has another value for this key (WRONGTYPE)",
                "{field} {value}"
            );
            assert!(answers[1..].iter().all(Result::is_ok), "{field} {value}");
            let left: String = server.ask(&["HGET", "tfw1:{bad:tann}", &field]);
            assert_eq!(left, *value, "nothing is written");
        }
    }
    // However often: the store does not fail.
    let log = Log::start();
    for _ in 0..20 {
        let error = limiter.check("ann").await.expect_err("no count").to_string();
        assert_eq!(error, "Redis has another value for this key (WRONGTYPE)");
    }
    assert!(!log.text().contains("the store fails"), "{}", log.text());
}

fn limiter_of(answer: &'static str, server: &Server) -> (Limiter, Proxy) {
    let port = server.port;
    let port = gateway(move |command| match contains(command, "tfw1:{bad") {
        true => Fate::Answer(answer.to_owned()),
        false => Fate::To(port),
    });
    let way = Proxy::to(port);
    (Quota::new(5, Quota::MAX_WINDOW).name("bad").store(store(&way.url())), way)
}

#[tokio::test]
async fn an_answer_that_means_nothing_is_an_error_and_keeps_the_connection() {
    let Some(server) = Server::start() else { return };
    for answer in [
        ":-9223372036854775808",
        ":9223372036854775807",
        "$16\r\n\x7f\x7f\x7f\x7f\x7f\x7f\x7f\x7f\x7f\x7f\x7f\x7f\x7f\x7f\x7f\x7f",
        "$5\r\nhello",
        "*2\r\n:-9223372036854775808\r\n:1",
        "*5\r\n:1\r\n:1\r\n:-9223372036854775808\r\n:9223372036854775807\r\n:9223372036854775807",
        "*1\r\n$2\r\nhi",
        "*0",
        "$-1",
        "+OK",
    ] {
        let (limiter, way) = limiter_of(answer, &server);
        let mut errors = Vec::new();
        for _ in 0..20 {
            let asked = join_all((0..3_u64).map(|key| limiter.check(key))).await;
            errors.extend(asked.into_iter().map(|of| of.expect_err(answer).to_string()));
        }
        // It is the server's failure, not that of each key.
        let open = errors.iter().filter(|error| error.starts_with("the store keeps failing"));
        assert!(open.count() > 20, "{answer}: {errors:?}");
        errors.retain(|error| !error.starts_with("the store keeps failing"));
        errors.dedup();
        assert_eq!(errors, ["Redis returned an unexpected answer"], "{answer}");
        assert_eq!(way.made(), 1, "{answer}");
    }
}
